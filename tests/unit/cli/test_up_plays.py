"""`topobus up` on a profile with a bad day plays it once all is ready, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from topobus.cli.commands.up import _play
from topobus.local_system.supervision import ProgramState, ProgramStatus
from topobus.local_system.system import System
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


async def test_faults_are_played_again_and_again_some_time_after_all_is_ready(tmp_path: Path) -> None:
    """There is time to open another terminal before the first, each step is told when it is done,
    and what heals comes again after a while.
    """
    machine = build("dgx-flaky", tmp_path / "machine")
    # Before, between the first two rounds, and after the second, where somebody ends it.
    rounds: list[list[float]] = [[]]
    rests = (20.0, 60.0)

    async def wait(seconds: float) -> None:
        if seconds in rests:
            rounds.append([])
            if len(rounds) == 4:
                raise asyncio.CancelledError
        rounds[-1].append(seconds)

    said: list[str] = []
    supervisor = _Supervisor(machine)
    with pytest.raises(asyncio.CancelledError):
        await _play(machine.root, _system(supervisor), said.append, wait)

    steps = list(RecordedMachine.open(machine.root).advance(1e9))
    first, second = (place for place, line in enumerate(said) if "are over" in line)
    healing = [fault for fault in machine.profile.faults if fault.for_s]
    assert supervisor.was_whole
    assert said[0].startswith(f"profile dgx-flaky scripts {len(machine.profile.faults)} faults; they begin in 20 s")
    assert said[1:first] == steps
    assert 0 < len(healing) < len(machine.profile.faults)
    assert len(said[first + 1 : second]) == 2 * len(healing)
    assert set(said[first + 1 : second]) < set(steps)
    assert [waits[0] for waits in rounds[1:3]] == list(rests)
    assert sum(rounds[1][1:]) == max(fault.at_s + fault.for_s for fault in machine.profile.faults)


@pytest.mark.parametrize("profile", ["laptop", ""])
async def test_nothing_is_said_when_there_is_no_script(tmp_path: Path, profile: str) -> None:
    """A profile without faults, and somebody's own tree."""
    (tmp_path / "machine" / "sys").mkdir(parents=True) if not profile else build(profile, tmp_path / "machine")
    said: list[str] = []
    await _play(tmp_path / "machine", _system(None), said.append)

    assert said == []
