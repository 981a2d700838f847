"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
import structlog
from _pytest.doctest import DoctestModule
from _pytest.terminal import TerminalReporter
from hypothesis import settings

from lab.servers.shaped_servers import cheap_folder
from support import forked_starts
from support.blocking import BlockingCalls
from support.event_loops import RealTimeLoop
from support.laws import examples
from support.set_up import why_not_set_up
from topobus.process import log_lines as log_lines
from topobus.testing.clock import VirtualTimeLoop

# No test times anything: Hypothesis fails an example that takes more than 200 ms by itself,
# which a busy machine makes of any.
settings.register_profile("topobus", deadline=None, max_examples=examples(100))
# What `make coverage` runs: the same examples each time, so that a branch is not taken by chance.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("topobus")

# A child that a test forks collects no garbage: finalizers of what it inherited (gRPC's channels)
# wait for threads that it does not have, for ever.
os.register_at_fork(after_in_child=gc.disable)

_NUMBERS = itertools.count()
_BLOCKING = BlockingCalls()
_BLOCKING.start()


@pytest.fixture(autouse=True)
def own_log_configuration() -> Iterator[None]:
    """Take back what a test's commands configured: a level that one of them sets for the process
    would hide the next test's lines.
    """
    before, handlers = structlog.get_config(), [*logging.getLogger().handlers]
    try:
        yield
    finally:
        structlog.configure(**before)
        # One that a test's command put there would configure structlog anew,
        # with the next test's first line.
        logging.getLogger().handlers[:] = handlers
        structlog.contextvars.clear_contextvars()


@pytest.fixture(autouse=True)
def own_contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the contexts of a test's commands to the test: one that a `topobus up` selected would be
    the next test's system, and they are never the user's own.
    """
    before = os.environ["XDG_CONFIG_HOME"]
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.getbasetemp() / f"contexts-{next(_NUMBERS)}")
    try:
        yield
    finally:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path so short that sockets below it fit: a unix socket's path ends at 107
    bytes, and pytest's own folders have the name of the test.
    """
    made = Path(tempfile.mkdtemp(prefix="tb-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Fail a test in which service code blocked the event loop: every other caller of that service
    waited meanwhile.
    """
    _BLOCKING.take()
    yield
    if calls := _BLOCKING.take():
        pytest.fail(
            "service code blocks the event loop; give it to asyncio.to_thread, or to _ALLOWED in "
            "support/blocking.py with its reason:\n" + "\n".join(calls)
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Say beside a module that cannot be read what the environment lacks."""
    report = yield
    _tell_set_up(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say beside a failure what the environment lacks."""
    report = yield
    _tell_set_up(report)
    return report


def _tell_set_up(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.failed and (why := why_not_set_up()):
        report.sections.append(("set up", why))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the bus, and of how programs start."""
    parser.addoption(
        "--real-bus",
        action="store_true",
        help="run on a real nats-server what is marked memory_bus, too, and in real time",
    )
    parser.addoption(
        "--real-starts",
        action="store_true",
        help="start every program by exec, as is done for what is marked real_start",
    )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is marked `virtual_time` on a loop whose time jumps, the rest on one like asyncio's
    own.

    A real server's sockets need real time.
    """
    in_memory = not config.getoption("--real-bus") and item.get_closest_marker("real_server") is None
    is_virtual = item.get_closest_marker("virtual_time") is not None and (
        in_memory or item.get_closest_marker("memory_bus") is None
    )
    if is_virtual and item.get_closest_marker("both_buses") is not None:
        # Each bus is combined with each loop; `pytest_collection_modifyitems`
        # keeps the pairs that go together.
        return {"virtual": VirtualTimeLoop, "real": RealTimeLoop}
    return {"virtual": VirtualTimeLoop} if is_virtual else {"real": RealTimeLoop}


def _has_its_loop(item: pytest.Item) -> bool:
    """Say whether a test of both buses that is in virtual time runs on the loop of its bus: time
    jumps in memory, and a real server's sockets need real time.
    """
    if item.get_closest_marker("both_buses") is None or item.get_closest_marker("virtual_time") is None:
        return True
    parameters = cast("pytest.Function", item).callspec.params
    return (parameters["nats_binary"] is None) is (parameters["_asyncio_loop_factory"] is VirtualTimeLoop)


# Files of about ten seconds and more on a quiet machine, the longest first.
_LONG = (
    "test_repairs.py",  # on a real bus, where it waits for minutes
    "test_bad_input.py",
    "test_cluster_suite.py",
    "test_mps_service.py",
    "test_console_browser.py",
    "test_demo.py",
    "test_nic_hands_contract.py",
    "test_gateway_crashes.py",
    "test_hands_crashes.py",
    "test_life_cycle.py",
    "test_reboots.py",
    "test_alert_faults.py",
    "test_interface_crashes.py",
    "test_bus_feeds.py",
    "test_ledger_survives.py",
    "test_dry_run_conformance.py",
    "test_cluster_crashes.py",
    "test_cli_objects.py",
    "test_forked_starts.py",
    "test_nats_store.py",
    "test_bus_connection.py",
    "test_kubelet_replay.py",
    "test_gateway_kubernetes.py",
    "test_foreign_resource_names.py",
    "test_service_run.py",
    "test_classic_crashes.py",
    "test_gateway_publish_crashes.py",
    "test_gateway_large.py",
)
_QUARANTINED = pytest.StashKey[dict[str, str]]()
_OWN_CONTEXTS = pytest.StashKey[Path]()
_OWN_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of tests in quarantine (id -> why), and put temporary folders into memory
    where there is room.

    Recorded machines are trees of thousands of small files: on a disk the kernel took four times
    the processor time that it takes in memory.
    """
    config.stash[_QUARANTINED] = {}
    # What lives longer than a test (a module's `topobus up`) names its system here: never among the
    # user's own, and no test reads it.
    config.stash[_OWN_CONTEXTS] = Path(tempfile.mkdtemp(prefix="topobus-tests-"))
    os.environ["XDG_CONFIG_HOME"] = str(config.stash[_OWN_CONTEXTS])
    os.environ.pop("TOPOBUS_CONTEXT", None)
    # A run that a shell put into the background ignores two of them, one by nohup the third, and so
    # would every program that a test starts and ends by it.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    folder = cheap_folder()
    if "TMPDIR" in os.environ or folder is None:
        return
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    if not config.option.basetemp:
        # Short, for a unix socket's path ends at 107 bytes, and gone after the run: memory
        # is not a place to keep things.
        config.stash[_OWN_FOLDER] = Path(tempfile.mkdtemp(prefix="tb"))
        config.option.basetemp = str(config.stash[_OWN_FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the fork server, and give the memory of temporary folders back."""
    forked_starts.close()
    shutil.rmtree(config.stash[_OWN_CONTEXTS], ignore_errors=True)
    folder = config.stash.get(_OWN_FOLDER, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Note the tests in quarantine before `-m` leaves them out, and begin with the files that take
    longest, in whatever order the others are put.
    """
    items[:] = [item for item in items if _has_its_loop(item)]
    _note_quarantined(config, items)
    yield
    # Files go to workers one by one: a long one that comes last runs alone.
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def _note_quarantined(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note each with its reason and issue.

    One without them is an error: nobody would ever bring it back.
    """
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
    """Say how to have this order again, and count the quarantine in every run, an empty one
    included: what is left out must not be forgotten.
    """
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None and config.getoption("randomly_reorganize"):
        terminalreporter.write_line(f"in the order of -p randomly --randomly-seed={seed}")
    quarantined = config.stash[_QUARANTINED]
    terminalreporter.write_line(f"in quarantine: {len(quarantined)} tests")
    for name, why in sorted(quarantined.items()):
        terminalreporter.write_line(f"  {name}: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no docstring's examples in files of tests: they have none, and a second look at each
    takes a fifth of the time.
    """
    collectors = yield
    return [each for each in collectors if not (isinstance(each, DoctestModule) and file_path.name[:5] == "test_")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: each full collection walks all that is there so
    far, an eighth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what collection made out of later garbage collections: thousands of test items live to
    the end, and each full collection would walk them.

    The fork server imports beside us from here on, unless nobody will need it.
    """
    gc.collect()
    gc.freeze()
    if any(_forks(item) for item in session.items) and not session.config.getoption("collectonly"):
        forked_starts.prepare()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Start programs of ours as copies of one process (support.forked_starts), in tests with
    processes or commands that are not marked `real_start`.
    """
    if not _forks(item):
        return (yield)
    with forked_starts.forked_starts():
        return (yield)


def _forks(item: pytest.Item) -> bool:
    is_real = item.config.getoption("--real-starts") or item.get_closest_marker("real_start") is not None
    # Commands that plan run the controller's program: a process in a unit test as well.
    starts_programs = item.get_closest_marker("integration") is not None or item.path.parent.name in ("cli", "docs")
    return starts_programs and not is_real
