"""`topobus up` on a profile with a bad day plays it once all is ready, and says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from topobus.cli.commands.up import _play
from topobus.cli.system.supervision import ProgramState, ProgramStatus
from topobus.cli.system.system import System
from topobus.simulation.machines import RecordedMachine, build


class _Supervisor:
    """Says first that a service starts, then that it is ready."""

    def __init__(self, machine: RecordedMachine) -> None:
        self._machine = machine
        self.was_whole = False

    async def changes(self, *, at_least_every_s: float) -> AsyncIterator[tuple[ProgramStatus, ...]]:
        yield (ProgramStatus(name="gpu", state=ProgramState.STARTING),)
        # Nothing was played before the system is ready.
        self.was_whole = (self._machine.root / self._machine.folder("0000:18:00.0")).exists()
        yield (ProgramStatus(name="gpu", state=ProgramState.READY),)


def _system(supervisor: object) -> System:
    class Running:
        pass

    running = Running()
    running.supervisor = supervisor  # type: ignore[attr-defined]
    return cast("System", running)


async def test_faults_are_played_when_all_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is told when it is done, and the end."""
    machine = build("dgx-flaky", tmp_path / "machine")
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(RecordedMachine.play, "__kwdefaults__", {**(RecordedMachine.play.__kwdefaults__ or {}), "wait": wait})
    said: list[str] = []
    supervisor = _Supervisor(machine)
    await _play(machine.root, _system(supervisor), said.append)

    assert supervisor.was_whole
    assert said[0] == f"profile dgx-flaky scripts {len(machine.profile.faults)} faults; they begin now"
    assert said[1:-1] == list(RecordedMachine.open(machine.root).advance(1e9))
    assert said[-1] == "the faults of profile dgx-flaky are over"
    assert sum(waited) == max(fault.at_s + fault.for_s for fault in machine.profile.faults)


@pytest.mark.parametrize("profile", ["laptop", ""])
async def test_nothing_is_said_when_there_is_no_script(tmp_path: Path, profile: str) -> None:
    """A profile without faults, and somebody's own tree."""
    (tmp_path / "machine" / "sys").mkdir(parents=True) if not profile else build(profile, tmp_path / "machine")
    said: list[str] = []
    await _play(tmp_path / "machine", _system(None), said.append)

    assert said == []
