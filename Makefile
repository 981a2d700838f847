# The two commands are `make demo` and `make test`; both do their own set-up. `make help` lists the rest.
VENV ?= .venv
BIN := $(VENV)/bin
export VENV
# Many tests wait for processes, so four at a time even on two cores; one file's tests stay together, for they share what is costly to start. The files that take
# longest come first (tests/conftest.py), not those with the most tests.
JOBS ?= 4
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Set-up may put a nats-server there.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Some containers set it. Without compiled modules each of the several hundred processes that the tests start compiles all it imports: twice the processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo up test checks suite laws coverage lint types mypy basedpyright imports proto docs examples audit mutants unit integration real-bus engine vm versions chaos chaos-short rollback bench format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '  make %-12s %s\n' "$$name" "$$what"; done

setup: ## make the virtual environment with locked dependencies and find a nats-server
	@tools/setup

demo: setup ## the main job: eight services, a recorded 8-GPU machine, a pod placed and why (under 60 s)
	@$(BIN)/topobus demo

up: setup ## run the whole system here until Ctrl-C
	@$(BIN)/topobus up

test: checks suite ## everything that needs no container engine

# The longest first: each of them runs on one core.
checks: setup ## all that runs no test file, two at a time
	@$(MAKE) --no-print-directory --jobs 2 mypy basedpyright docs examples lint imports proto

examples: setup ## the examples in docstrings
	$(BIN)/python -m pytest -q --doctest-modules shared/topobus services/topobus tools/lab --ignore shared/topobus/kubeletpb --ignore shared/topobus/runtimepb

# What `make docs` runs is left out.
suite: setup ## the tests, four files at a time, with a share of the examples of each law
	TOPOBUS_EXAMPLES=0.2 $(BIN)/python -m pytest -q --ignore tests/unit/docs/test_plain_english.py -m "not engine and not quarantined" $(PARALLEL)

laws: setup ## all examples of each law, other ones in each run, and a kill at each step (about six minutes on two cores)
	$(BIN)/python -m pytest -q -m "(hypothesis or law) and not engine and not quarantined" -n auto --dist worksteal

# The tests of the rooms that only decide (pyproject.toml, [tool.coverage.run]), those of what measures them among them: none waits, so one process a core, and
# each takes what is left.
DECISIONS := tests/unit/alignment tests/unit/cel tests/unit/controller tests/unit/values tests/unit/engine tests/unit/topology \
  tests/unit/lab/test_allocation_bench.py tests/unit/lab/test_conformance_reading.py \
  $(wildcard tests/contract/test_allocation_*.py tests/contract/test_cel_*.py) tests/property
# The examples in those rooms' docstrings are tests as well.
DECISION_ROOMS := shared/topobus/values shared/topobus/engine
coverage: setup ## every branch of values, alignment, allocation and selectors is taken (about six minutes on two cores)
	$(BIN)/python -m pytest --cov -q -p no:randomly -m "not integration and not engine and not quarantined" -n auto --dist worksteal --hypothesis-profile repeatable $(DECISION_ROOMS) $(DECISIONS)

lint: setup ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: mypy basedpyright ## mypy strict, and basedpyright for what mypy takes for given

mypy: setup
	$(BIN)/mypy

basedpyright: setup
	$(BIN)/basedpyright --pythonpath $(BIN)/python

imports: setup ## the doors between rooms
	$(BIN)/lint-imports

proto: setup ## generated gRPC code equals its protos
	$(BIN)/python proto/regenerate --check

docs: setup ## generated pages equal the code, all prose is plain English
	$(BIN)/python tools/render-docs --check
	$(BIN)/python -m pytest -q tests/unit/docs/test_plain_english.py

audit: setup ## known vulnerabilities, licences and wheels of what is locked; needs the network, fails where it could not look
	@tools/audit

mutants: setup ## changes of the preparation of claims that no unit test notices (half an hour; installs a tool of its own)
	@tools/mutants

unit: setup ## tests that need no server, with few examples of each law
	TOPOBUS_EXAMPLES=0.05 $(BIN)/python -m pytest -q -m "not integration and not engine and not quarantined" $(PARALLEL) tests/unit tests/property

integration: setup ## tests with real processes and a real nats-server
	$(BIN)/python -m pytest -q -m "integration and not quarantined" $(PARALLEL)

real-bus: setup ## the tests on the bus in memory once more, on a real nats-server and in real time
	$(BIN)/python -m pytest -q -m "memory_bus and not quarantined" --real-bus $(PARALLEL)

engine: setup ## containers on a real Docker by testcontainers, devices on a real containerd 2 (as root: installs, unpacks or builds what is absent)
	$(BIN)/python -m pytest -q -s -x -m engine tests/engine

VM ?=
vm: setup ## a real kernel with emulated cards in QEMU (as root, on Debian): `make vm VM="sriov -- -k hand_over"`, the short form: `make vm VM=--short`
	@tests/vm/run $(VM)

versions: setup ## the bus and the demo on the nats-servers of newer Debian releases
	@tools/test-nats-versions

CHAOS ?=
chaos: setup ## proof by faults, for minutes; a million operations: `make chaos CHAOS="--steps 0 --operations 1000000"`, a hub: `--leaf`; the seed is printed
	@$(BIN)/python -m lab.chaos $(CHAOS)

chaos-short: setup ## the same in at most a minute and a half, with the seed of CI
	@$(BIN)/python -m lab.chaos --seed 12 --steps 0 --operations 20000 --window 5000 --faults 4 --seconds 60

rollback: setup ## an earlier commit and this one, built, take turns on a node under load; needs the whole history (some minutes)
	@$(BIN)/python -m lab.chaos.rollback

BENCH ?=
bench: setup ## measure (no test times anything); another group than the alignment engine: `make bench BENCH=idle`, all of them: `BENCH=--help`
	@$(BIN)/python -m lab.bench $(BENCH)

format: setup ## mend the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what set-up and tests made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find shared services tests tools -name __pycache__ -prune -exec rm -rf {} +
