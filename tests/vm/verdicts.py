"""Keeps each test's result outside of the guest: another guest continues where one was lost, and no
test that has ended runs again. A failure is shown at once. A plugin of pytest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from vm.kernel import sh

_ENDED, _FAILED = Path("/job/ended"), Path("/job/failed")


def _note(file: Path, test: str) -> None:
    with file.open("a") as lines:
        lines.write(f"{test}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what ended in a guest before this one."""
    ended = set(_ENDED.read_text().splitlines()) if _ENDED.exists() else set()
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure, which stays one whatever the next guest reports, and print it with the logs
    of the kernel and the services: a run takes minutes, and may be lost before its end.
    """
    if report.failed:
        _note(_FAILED, report.nodeid)
        logs = [(log.name, log.read_text(errors="replace")[-4000:]) for log in sorted(_FAILED.parent.glob("*.log"))]
        for name, text in [
            (report.nodeid, report.longreprtext),
            *report.sections,
            ("dmesg", sh("dmesg | tail -n 40")),
            *logs,
        ]:
            print(f"\n----- {name}\n{text}")


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note a test's end."""
    _note(_ENDED, nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing is left to do where all had ended."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _ENDED.exists():
        session.exitstatus = pytest.ExitCode.OK
