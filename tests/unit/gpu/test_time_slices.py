"""Time slices of NVIDIA GPUs by a program that behaves as nvidia-smi compute-policy does, with the
real journal around it, through every kill.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.sharing.shared_devices import SharedPool, with_sharing
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.gpu import time_slices
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.process.readiness import Readiness
from topobus.simulation.machines import build
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.values.outcome import Refusal
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind

DATA = Path(__file__).parent.parent.parent / "data"
SHARE = {"shares": 1}
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a program."""
    monkeypatch.setattr(time_slices, "_LIMIT_S", LIMIT_S)


def plugin(uid: str) -> Owner:
    """An owner behind kubelet's device plugin."""
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid=uid)


def claim(uid: str) -> Owner:
    """A claim."""
    return Owner(kind=OwnerKind.CLAIM, name=uid, uid=uid)


class Killed(BaseException):
    """The service is gone at this very moment."""


class Node:
    """One shared H100 of a recorded pair with a driver root; `life` is the service as it starts,
    with the journal of the lives before.
    """

    def __init__(self, root: Path, time_slice: str = "Short") -> None:
        self.root = root
        self.recorded = build(DATA / "profiles" / "h100-pair.toml", root / "machine")
        self.programs = root / "driver" / "usr" / "bin"
        (self.programs / "slices").mkdir(parents=True)
        shutil.copy(DATA / "fake_smi" / "nvidia-smi", self.programs / "nvidia-smi")
        files = DriverFilesSettings(root=str(root / "driver"), bring="never")
        self.tree = Tree(HardwareSettings(root=str(self.recorded.root), driver_files=files))
        discovered = NvidiaDriver().discover(self.tree, read_machine(self.tree, "n1")).devices
        strategy = {"strategy": "TimeSlicing", "time_slice": time_slice} if time_slice else {}
        pool = SharedPool(
            name="gpu-shared", where=(Condition(field="driver", equals="nvidia"),), replicas=4, **strategy
        )  # type: ignore[arg-type]
        self.gpu = with_sharing([structs.replace(discovered[0], driver="nvidia", pool="gpu-shared")], [pool])[0]
        self.slice_file = self.programs / "slices" / self.gpu.uuid
        self.slice_file.write_text("Medium\n")

    @property
    def slice(self) -> str:
        """The GPU's slice now."""
        return self.slice_file.read_text().strip()

    @property
    def calls(self) -> list[str]:
        """The numbers of the slices that were set, in order."""
        path = self.programs / "calls"
        return [line.split()[1] for line in path.read_text().splitlines()] if path.exists() else []

    def behave(self, how: str) -> None:
        """Let the program misbehave from now on."""
        (self.programs / "behaviour").write_text(how)

    def life(self) -> Life:
        """Start the service."""
        return Life(self)


class Life:
    """One life of the service."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.driver = NvidiaDriver()
        self.driver.configure(GpuServices(leftovers=LeftoverSettings(check=False)))
        clock = ManualClock()
        isolated = {"nvidia": IsolatedDriver(self.driver, timeout_s=LIMIT_S, clock=clock)}
        devices = {node.gpu.name: node.gpu}
        self.journal = Journal(node.root / "journal")
        self.hands = DeviceHands(isolated, node.tree, devices.get, self.journal, clock=clock, wait_s=LIMIT_S)
        self.preparer = Preparer("gpu", self.hands, devices.get)
        self._asked = 0

    async def prepare(self, owner: Owner, interval: str = "") -> Prepared | Refusal:
        """Make the GPU ready for a share, with a claim's own word where it has one."""
        self._asked += 1
        config = (
            (
                {
                    "apiVersion": "topobus.dev/v1",
                    "kind": "SharingParameters",
                    "strategy": "TimeSlicing",
                    "timeSlicingConfig": {"interval": interval},
                },
            )
            if interval
            else ()
        )
        name = self.node.gpu.name
        request = PrepareRequest(
            op_id=f"p{self._asked}", owner=owner, devices=(name,), config=config, shares={name: SHARE}
        )
        result = (await self.preparer.prepare(request)).result
        assert isinstance(result, Prepared | Refusal)
        return result

    async def unprepare(self, owner: Owner) -> Refusal | None:
        """Undo it for one owner."""
        self._asked += 1
        request = UnprepareRequest(op_id=f"u{self._asked}", owner=owner, devices=(self.node.gpu.name,))
        return (await self.preparer.unprepare(request)).refusal

    async def load(self) -> None:
        """Read the journal of the lives before."""
        await self.hands.load(Readiness())

    def end(self) -> None:
        """End the process: its lock on the journal goes with it."""
        self.journal.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A GPU whose operator wants short slices; it had medium ones before."""
    return Node(tmp_path)


def code(result: object) -> str:
    """The refusal's first code."""
    assert isinstance(result, Refusal), result
    return result.reasons[0].code


async def test_slice_is_set_by_the_first_and_set_back_by_the_last(node: Node) -> None:
    """Two replicas and a claim share the GPU: one setting, and one
    setting back to what was before.
    """
    life = node.life()
    for owner in (plugin("r0"), plugin("r1"), claim("c")):
        assert isinstance(await life.prepare(owner), Prepared)
    during = node.slice
    between = []
    for owner in (plugin("r0"), claim("c"), plugin("r1")):
        assert await life.unprepare(owner) is None
        between.append(node.slice)

    assert during == "Short"
    assert between == ["Short", "Short", "Medium"]
    assert node.calls == ["1", "2"]


async def test_a_claims_own_slice_wins_and_another_one_is_refused(node: Node) -> None:
    """A GPU has one slice: who wants another one is told which is there, and for whom."""
    life = node.life()
    assert isinstance(await life.prepare(claim("a"), "Long"), Prepared)

    refused = await life.prepare(claim("b"), "Short")
    takes_it = await life.prepare(claim("c"), "Default")

    assert node.slice == "Long"
    assert code(refused) == "time-slice-differs"
    assert isinstance(refused, Refusal)
    assert "has a time slice of Long for claim default/a" in refused.reasons[0].message
    assert isinstance(takes_it, Prepared)
    assert await life.unprepare(claim("b")) is None
    assert node.slice == "Long"


async def test_slice_is_refused_when_the_program_is_absent(node: Node) -> None:
    """The refusal names the program and where it was looked for; nothing is written down."""
    (node.programs / "nvidia-smi").unlink()
    life = node.life()

    refused = await life.prepare(claim("a"))

    assert code(refused) == "time-slice-unsupported"
    assert isinstance(refused, Refusal)
    assert f"nvidia-smi of NVIDIA's driver: not below {node.root}/driver" in refused.reasons[0].message
    assert life.journal.entries == {}


async def test_slice_is_refused_with_the_programs_words_when_it_may_not_set_it(node: Node) -> None:
    """Without the right nothing was changed, so nothing is left to undo, and the GPU can be had by
    others.
    """
    node.behave("powerless")
    life = node.life()

    refused = await life.prepare(claim("a"))
    given = await life.prepare(claim("b"), "Default")

    assert code(refused) == "time-slice-failed"
    assert isinstance(refused, Refusal)
    assert "ended with status 4; its output: Insufficient Permissions" in refused.reasons[0].message
    assert isinstance(given, Prepared)
    assert node.slice == "Medium"


async def test_prepare_fails_within_its_time_when_the_program_hangs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung program is ended; what it may have done is undone as soon as it can be."""
    monkeypatch.setattr(time_slices, "_LIMIT_S", 0.3)
    node.behave("hangs")
    life = node.life()
    failed = await life.prepare(claim("a"))
    monkeypatch.setattr(time_slices, "_LIMIT_S", LIMIT_S)
    node.behave("")

    again = await life.prepare(claim("b"))

    assert code(failed) == "driver-failed"
    assert isinstance(failed, Refusal)
    assert "did not end within" in failed.reasons[0].message
    assert isinstance(again, Prepared)
    assert await life.unprepare(claim("b")) is None
    assert node.slice == "Medium"


async def test_slice_is_set_once_more_after_a_restart_of_the_machine(node: Node) -> None:
    """A reboot sets GPUs back.

    The first prepare of the next life sets the slice again, and the
    end still knows what was before.
    """
    first = node.life()
    await first.prepare(plugin("r0"))
    first.end()
    node.slice_file.write_text("Default\n")
    second = node.life()
    await second.load()

    await second.prepare(plugin("r0"))
    during = node.slice
    await second.unprepare(plugin("r0"))

    assert during == "Short"
    assert node.slice == "Medium"
    second.end()


def kill_at(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """End the process before its n-th write to the journal, or run of the program.

    Gives how many there were.
    """
    count = [0]

    def step() -> None:
        count[0] += 1
        if count[0] >= at:
            # Whatever would run after the end does not run either.
            raise Killed

    write, run = Journal.change, time_slices._run

    def change(self: Journal, *given: object) -> None:
        step()
        write(self, *given)  # type: ignore[arg-type]

    def ran(*given: object) -> object:
        step()
        said = run(*given)  # type: ignore[arg-type]
        step()
        return said

    monkeypatch.setattr(Journal, "change", change)
    monkeypatch.setattr(time_slices, "_run", ran)
    return count


async def whole_use(life: Life) -> None:
    """Two owners come and go."""
    for owner in (plugin("r0"), claim("c")):
        await life.prepare(owner)
    for owner in (plugin("r0"), claim("c")):
        await life.unprepare(owner)


async def test_nothing_is_left_when_the_service_is_killed_at_any_step(tmp_path: Path) -> None:
    """The next life, in which both owners leave, leaves the slice as it was before the first of
    them, wherever the last life ended.
    """
    kills = 0
    for at in range(1, 60):
        (tmp_path / str(at)).mkdir()
        node = Node(tmp_path / str(at))
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = kill_at(monkeypatch, at)
            life = node.life()
            # The host tells of a driver that failed; nothing of it reaches
            # the journal or the GPU any more.
            await whole_use(life)
            life.end()
        is_over = count[0] < at
        kills += not is_over
        later = node.life()
        await later.load()
        for owner in (plugin("r0"), claim("c")):
            assert await later.unprepare(owner) is None
        left = [entry for entry in later.journal.entries.values() if entry.owners]
        later.end()

        assert node.slice == "Medium", at
        assert left == [], at
        if is_over:
            break

    assert is_over
    assert kills >= 12
