"""MPS control daemons as real processes: started, adopted, watched, ended.

Nothing of them stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.fake_mps import FakeMps, is_alive, is_cut, needs_gcc
from topobus.gpu.config import MpsSettings
from topobus.gpu.mps.commands import find_programs
from topobus.gpu.mps.daemon_state import DaemonFolder, DaemonState, Limits, Programs, SharedGpu
from topobus.gpu.mps.daemons import MpsDaemons
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.errors import HardwareError
from topobus.values.health import HealthState
from topobus.values.outcome import Refusal

pytestmark = [pytest.mark.integration, needs_gcc]

NAME = "gpu-0"
OWNER = "claim/a"
LIMITS = Limits(threads_percent=25, memory_mib=(1024, 2048))


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Node:
    """A node with two GPUs, and the daemons of one life of the service after the other."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.clock = _Clock()
        self.mps = FakeMps(folder / "root", folder / "state")
        for uuid in ("GPU-1", "GPU-2"):
            self.mps.add_gpu(uuid)
        self.settings = MpsSettings(owned=True, state_dir=str(folder / "state"), **settings)  # type: ignore[arg-type]  # as they come
        programs = find_programs(DriverFilesSettings(root=str(folder / "root")), "", wants_smi=True)
        assert isinstance(programs, Programs)
        gpus = (SharedGpu(device=NAME, uuid="GPU-1"), SharedGpu(device="gpu-1", uuid="GPU-2"))
        self.wanted = DaemonState(name=NAME, owner=OWNER, gpus=gpus, limits=LIMITS, programs=programs)

    def life(self) -> MpsDaemons:
        """Begin a life of the service."""
        return MpsDaemons(self.settings, now=self.clock)

    def check_nothing_left(self) -> None:
        """Promise: no process, no folder, no compute mode of a daemon is left."""
        assert self.mps.pids() == []
        assert self.mps.folders() == []
        assert self.mps.modes() == {"Default"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[_Node]:
    """Give a node; what a failed test leaves running is ended."""
    made = _Node(tmp_path)
    yield made
    made.mps.end_all()


def test_daemon_serves_with_its_limits_when_it_was_started(node: _Node) -> None:
    """It answers, has the GPUs alone and in order, and knows what a client may have, whatever the
    client's own variables say.
    """
    daemons = node.life()

    assert daemons.ensure(node.wanted) is None

    assert daemons.is_serving(node.wanted)
    assert node.mps.modes() == {"Exclusive_Process"}
    asked = (
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 0",
        "get_default_device_pinned_mem_limit 1",
    )
    assert [node.mps.ask(NAME, command) for command in asked] == ["25", "1024M", "2048M"]
    log = (DaemonFolder(daemons.folder, NAME).logs / "control.log").read_text()
    assert "devices GPU-1,GPU-2" in log
    assert (
        DaemonFolder(daemons.folder, NAME).logs.stat().st_mode & 0o777,
        DaemonFolder(daemons.folder, NAME).pipes.stat().st_mode & 0o777,
    ) == (0o755, 0o755)


def test_nothing_is_left_when_a_daemon_with_a_client_is_ended(node: _Node) -> None:
    """Server and daemon go, the folder goes, each GPU has the compute mode that it had before."""
    node.mps.add_gpu("GPU-2", "Exclusive_Process")
    daemons = node.life()
    daemons.ensure(node.wanted)
    client = node.mps.client(NAME)
    assert len(node.mps.pids()) == 2

    daemons.end(NAME, OWNER)

    assert is_cut(client)
    assert (node.mps.pids(), node.mps.folders()) == ([], [])
    # The second one was in this mode before.
    assert node.mps.modes() == {"Default", "Exclusive_Process"}
    daemons.end(NAME, OWNER)
    assert daemons.names() == ()


def test_daemon_is_killed_when_it_does_not_obey(node: _Node) -> None:
    """One that ignores `quit` is ended all the same, with its server."""
    daemons = node.life()
    daemons.ensure(node.wanted)
    node.mps.client(NAME)
    node.mps.behave("deaf")

    daemons.end(NAME, OWNER)

    node.check_nothing_left()


def test_running_daemon_is_adopted_when_the_service_starts_again(node: _Node) -> None:
    """The same process serves on, its client is not cut off, and the new life ends it as the old
    one would have.
    """
    node.life().ensure(node.wanted)
    client, before = node.mps.client(NAME), node.mps.pids()

    daemons = node.life()
    daemons.look(NAME)

    assert daemons.is_serving(node.wanted)
    assert daemons.observations() == {}
    assert daemons.ensure(node.wanted) is None
    assert node.mps.pids() == before
    assert is_alive(client)
    daemons.end(NAME, OWNER)
    node.check_nothing_left()


def test_daemon_is_started_again_at_once_when_it_was_killed(node: _Node) -> None:
    """Its GPUs are Degraded with a code of their own, told once though it is back, and containers
    that have its folder reach the new one in it.
    """
    daemons = node.life()
    daemons.ensure(node.wanted)
    client, pipes = node.mps.client(NAME), DaemonFolder(daemons.folder, NAME).pipes
    inode = pipes.stat().st_ino
    (control, server) = node.mps.pids()
    node.mps.kill(control)

    daemons.look(NAME)

    seen = daemons.observations()
    assert {name: (it.reason, it.state) for name, it in seen.items()} == {
        NAME: ("mps-daemon-gone", HealthState.DEGRADED),
        "gpu-1": ("mps-daemon-gone", HealthState.DEGRADED),
    }
    assert seen[NAME].evidence == {
        "pid": str(control),
        "log": str(DaemonFolder(daemons.folder, NAME).logs / "control.log"),
    }
    assert daemons.observations() == {}
    assert is_cut(client)
    assert daemons.is_serving(node.wanted)
    assert pipes.stat().st_ino == inode
    assert node.mps.ask(NAME, "get_default_device_pinned_mem_limit 1") == "2048M"
    assert not {control, server} & set(node.mps.pids())


def test_pause_between_restarts_grows_when_a_daemon_does_not_start(node: _Node) -> None:
    """At once, then after one second, two, four.

    The third failure makes its GPUs Unhealthy, and one that starts at last makes them well.
    """
    daemons = node.life()
    daemons.ensure(node.wanted)
    node.mps.kill(node.mps.pids()[0])
    node.mps.behave("fails")
    log = DaemonFolder(daemons.folder, NAME).logs / "control.log"
    tries: list[float] = []
    for tenth in range(90):
        node.clock.now_s = tenth / 10
        before = log.read_text().count("Failed to start")
        daemons.look(NAME)
        tries += [node.clock.now_s] * (log.read_text().count("Failed to start") - before)

    assert tries == [0.0, 1.0, 3.0, 7.0]
    assert daemons.observations()[NAME].state is HealthState.UNHEALTHY
    assert "no CUDA-capable device" in daemons.observations()[NAME].message
    node.mps.behave()
    node.clock.now_s = 15.0
    daemons.look(NAME)
    daemons.observations()
    assert daemons.observations() == {}
    assert daemons.is_serving(node.wanted)


def test_start_is_refused_with_its_log_when_the_daemon_fails(node: _Node) -> None:
    """The reason names a log that is still there when all else is undone.

    It goes with the next start.
    """
    node.mps.behave("fails")
    daemons = node.life()

    refused = daemons.ensure(node.wanted)
    daemons.end(NAME, OWNER)

    assert isinstance(refused, Refusal)
    reason = refused.reasons[0]
    assert reason.code == "mps-start-failed"
    assert "no CUDA-capable device is detected" in reason.message
    log = Path(str(reason.facts["log"]))
    assert str(log) in reason.message
    assert "Failed to start" in log.read_text()
    node.check_nothing_left()
    node.mps.behave()
    assert daemons.ensure(node.wanted) is None
    assert not log.exists()


def test_start_is_refused_when_the_daemon_never_answers(tmp_path: Path) -> None:
    """The wait has an end, and what was begun is undone, process and all."""
    node = _Node(tmp_path, start_s=0.2)
    node.mps.behave("mute")
    daemons = MpsDaemons(node.settings)

    refused = daemons.ensure(node.wanted)
    daemons.end(NAME, OWNER)

    assert isinstance(refused, Refusal)
    assert "Cannot find MPS control daemon" in refused.reasons[0].message
    node.check_nothing_left()


def test_start_is_refused_when_the_compute_mode_may_not_be_set(node: _Node) -> None:
    """Without the right for it no daemon runs that processes could get past."""
    node.mps.behave("powerless")
    daemons = node.life()

    refused = daemons.ensure(node.wanted)
    daemons.end(NAME, OWNER)

    assert isinstance(refused, Refusal)
    assert "Insufficient Permissions" in refused.reasons[0].message
    node.check_nothing_left()


def test_daemon_of_another_boot_is_started_anew_when_a_stranger_has_its_number(node: _Node) -> None:
    """The same process number and the same start time say nothing after a reboot: nobody is asked
    in its place, and the daemon is started.
    """
    node.life().ensure(node.wanted)
    (pid,) = node.mps.pids()
    file = Path(node.settings.state_dir, NAME, "daemon.json")
    state = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**state, "boot_id": "of another boot"}))

    daemons = node.life()
    is_taken_for_running = daemons.is_serving(node.wanted)
    refusal = daemons.ensure(node.wanted)

    assert (is_taken_for_running, refusal) == (False, None)
    assert daemons.is_serving(node.wanted)
    assert pid not in node.mps.pids()
    daemons.end(NAME, OWNER)
    node.check_nothing_left()


def test_limits_grow_when_a_larger_share_joins(node: _Node) -> None:
    """The daemon's own limit is that of its largest client, so that nobody gets more who leaves its
    variables out, and nobody gets less.
    """
    daemons = node.life()
    shared = [
        DaemonState(
            name=NAME,
            gpus=node.wanted.gpus[:1],
            limits=Limits(threads_percent=percent, memory_mib=(mib,)),
            programs=node.wanted.programs,
        )
        for percent, mib in ((25, 1000), (50, 2000), (10, 500))
    ]

    seen = []
    for wanted in shared:
        assert daemons.ensure(wanted) is None
        seen.append(node.mps.ask(NAME, "get_default_device_pinned_mem_limit 0"))

    assert seen == ["1000M", "2000M", "2000M"]
    assert len(node.mps.pids()) == 1


def test_daemon_of_somebody_else_stays_when_an_earlier_owner_ends_again(node: _Node) -> None:
    """An undoing that comes late ends nothing of the next owner's."""
    daemons = node.life()
    daemons.ensure(node.wanted)

    daemons.end(NAME, "claim/before")

    assert daemons.is_serving(node.wanted)
    daemons.end_stale("gpu-1")
    node.check_nothing_left()


def test_process_in_a_daemons_folder_is_ended_when_nothing_is_known_of_it(node: _Node) -> None:
    """A folder without its file was being made or removed when the service died: what runs for it
    is found by its environment.
    """
    node.life().ensure(node.wanted)
    (node.mps.state_dir / NAME / "daemon.json").unlink()

    assert node.life().names() == ()

    assert (node.mps.pids(), node.mps.folders()) == ([], [])


def test_mode_is_given_back_by_the_next_life_when_the_file_says_so(node: _Node) -> None:
    """The mode from before stands in the file before it is changed, so a life that found a GPU in
    it for itself still gives the first one back.
    """
    first = node.life()
    first.ensure(node.wanted)
    node.mps.end_all()

    second = node.life()
    assert second.ensure(node.wanted) is None
    second.end(NAME, OWNER)

    node.check_nothing_left()


def test_end_goes_on_when_a_gpu_has_left_the_bus(node: _Node) -> None:
    """A GPU that nvidia-smi does not know any more has no compute mode to give back, and its pod
    must not wait for one.
    """
    daemons = node.life()
    daemons.ensure(node.wanted)
    (node.mps.programs / "modes" / "GPU-2").unlink()

    daemons.end(NAME, OWNER)

    node.check_nothing_left()


def test_end_raises_when_a_compute_mode_cannot_be_given_back(node: _Node) -> None:
    """It is tried again, and succeeds when the reason has gone."""
    daemons = node.life()
    daemons.ensure(node.wanted)
    node.mps.behave("powerless")

    with pytest.raises(HardwareError, match="Insufficient Permissions"):
        daemons.end(NAME, OWNER)

    assert node.mps.pids() == []
    node.mps.behave()
    node.life().look(NAME)
    node.check_nothing_left()
