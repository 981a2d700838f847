"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import structlog
from _pytest.terminal import TerminalReporter
from hypothesis import settings

from support.blocking import BlockingCalls
from support.laws import examples
from topobus.testing.clock import VirtualTimeLoop
from topobus.testing.nats.accounts import cheap_folder

# No test times anything: Hypothesis fails an example that takes more than 200 ms by itself, which a busy machine makes of any.
settings.register_profile("topobus", deadline=None, max_examples=examples(100))
# What `make coverage` runs: the same examples each time, so that a branch is not taken by chance.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("topobus")

_BLOCKING = BlockingCalls()
_BLOCKING.start()


@pytest.fixture(autouse=True)
def own_log_configuration() -> Iterator[None]:
    """Take back what a test's commands configured: a level that one of them sets for the process would hide the next test's lines."""
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Fail a test in which service code blocked the event loop: every other caller of that service waited meanwhile."""
    _BLOCKING.take()
    yield
    if calls := _BLOCKING.take():
        pytest.fail(
            "service code blocks the event loop; give it to asyncio.to_thread, or to _ALLOWED in support/blocking.py with its reason:\n"
            + "\n".join(calls)
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the bus."""
    parser.addoption("--real-bus", action="store_true", help="run on a real nats-server what is marked memory_bus, too, and in real time")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is marked `virtual_time` on a loop whose time jumps, the rest on asyncio's own; a real server's sockets need real time."""
    in_memory = not config.getoption("--real-bus") and item.get_closest_marker("real_server") is None
    is_virtual = item.get_closest_marker("virtual_time") is not None and (in_memory or item.get_closest_marker("memory_bus") is None)
    return {"virtual": VirtualTimeLoop} if is_virtual else {"real": asyncio.new_event_loop}


_QUARANTINED = pytest.StashKey[dict[str, str]]()
_OWN_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of tests in quarantine (id -> why), and put temporary folders into memory where there is room.

    Recorded machines are trees of thousands of small files: on a disk the kernel took four times the processor time that it takes in memory.
    """
    config.stash[_QUARANTINED] = {}
    folder = cheap_folder()
    if "TMPDIR" in os.environ or folder is None:
        return
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    if not config.option.basetemp:
        # Short, for a unix socket's path ends at 107 bytes, and gone after the run: memory is not a place to keep things.
        config.stash[_OWN_FOLDER] = Path(tempfile.mkdtemp(prefix="tb"))
        config.option.basetemp = str(config.stash[_OWN_FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the memory of temporary folders back."""
    folder = config.stash.get(_OWN_FOLDER, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the tests in quarantine before `-m` leaves them out. One without a reason and an issue is an error: nobody would ever bring it back."""
    for item in items:
        marker = item.get_closest_marker("quarantined")
        if marker is None:
            continue
        if not marker.kwargs.get("reason") or not marker.kwargs.get("issue"):
            raise pytest.UsageError(f"{item.nodeid}: quarantined without reason= and issue=")
        config.stash[_QUARANTINED][item.nodeid] = f"issue {marker.kwargs['issue']}: {marker.kwargs['reason']}"
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output["quarantined"] = config.stash[_QUARANTINED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take the list over from a worker: with xdist only workers collect."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_QUARANTINED].update(output.get("quarantined", {}))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Say how to have this order again, and count the quarantine in every run, an empty one included: what is left out must not be forgotten."""
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None and config.getoption("randomly_reorganize"):
        terminalreporter.write_line(f"in the order of -p randomly --randomly-seed={seed}")
    quarantined = config.stash[_QUARANTINED]
    terminalreporter.write_line(f"in quarantine: {len(quarantined)} tests")
    for name, why in sorted(quarantined.items()):
        terminalreporter.write_line(f"  {name}: {why}")


def pytest_collection_finish() -> None:
    """Leave what collection made out of later garbage collections: thousands of test items live to the end, and each full collection would walk them."""
    gc.collect()
    gc.freeze()
