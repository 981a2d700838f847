"""Status of claims: written at once, again after trouble, taken away in the end, and by the next
process when this one was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry, SandboxAttachment
from topobus.gateway.claims.rules.device_status import replaced_statuses
from topobus.gateway.cluster.claim_statuses import ClaimStatuses
from topobus.gateway.cluster.event_recorder import EventRecorder, Involved
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.objects import Rejected
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.report_record import ReportRecord
from topobus.gateway.cluster.rules.device_faults import HealthNote
from topobus.testing.clock import LoopClock
from topobus.values.errors import PeerUnavailable
from topobus.values.names import ClaimUid
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

pytestmark = pytest.mark.virtual_time

SANDBOX = Sandbox(id="s", uid="pod", namespace="default", name="p")
NET1 = AttachedInterface(name="net1", addresses=("10.1.2.3/24",))
AWAY = PeerUnavailable("API server: away", retry_after_s=0.0)
FORBIDDEN = Rejected(code=403, message="cannot patch resource")


def entry(name: str, device_class: str = "nic", *, needs_sandbox: bool = True) -> ClaimEntry:
    """A claim with one device that is prepared."""
    device = AllocatedDevice(request="r", pool="n1", device=f"{device_class}-0")
    return ClaimEntry(
        namespace="default",
        name=name,
        uid=ClaimUid(f"u-{name}"),
        device_class=device_class,
        attempt="a",
        devices=(device,),
        is_prepared=True,
        to_attach=(device.device,) if needs_sandbox else (),
    )


def in_pod(claim: ClaimEntry) -> ClaimEntry:
    """The claim as the checkpoint has it when its devices are in the pod."""
    return msgspec.structs.replace(
        claim, attachment=SandboxAttachment(sandbox=SANDBOX, is_attached=True, interfaces={"nic-0": NET1})
    )


def key(claim: ClaimEntry) -> ClaimKey:
    """The claim as kubelet names it."""
    return ClaimKey(namespace=claim.namespace, name=claim.name, uid=claim.uid)


class Server:
    """The API server's answers to writes: `answers` first, then it takes everything.

    Claims that are `allocated` are.
    """

    def __init__(self) -> None:
        self.answers: list[Rejected | PeerUnavailable] = []
        self.allocated: set[str] = set()
        self.writes: list[tuple[float, str, list[str]]] = []
        """When, which claim, and the states of its devices; none: it was taken away."""
        self.shown: dict[str, list[Mapping[str, Any]]] = {}
        """Each claim's `status.devices`."""
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def apply_device_status(
        self, name: str, namespace: str, *, uid: str, device_class: str, devices: Sequence[Mapping[str, Any]]
    ) -> Rejected | None:
        """Answer what the test wants."""
        now_s = asyncio.get_running_loop().time()
        self.writes.append((round(now_s, 3), name, [device["conditions"][0]["reason"] for device in devices]))
        await self.hangs.wait()
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, PeerUnavailable):
            raise answer
        if answer is None:
            self.shown[name] = replaced_statuses(self.shown.get(name, []), device_class, devices)
        return answer

    async def get(self, kind: object, name: str, namespace: str = "") -> ApiObject | None:
        """Show the claim, if it is allocated."""
        if name not in self.allocated:
            return None
        status = {"allocation": {"devices": {"results": [{"pool": "n1"}]}}}
        return ApiObject(
            api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"uid": f"u-{name}"}, status=status
        )

    @property
    def said(self) -> list[tuple[str, list[str]]]:
        """What was written, without its time."""
        return [(name, states) for _, name, states in self.writes]


class Notes:
    """Takes the place of who writes events, and keeps what people would read."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def note(self, involved: Involved, reason: str, message: str, *, is_warning: bool) -> None:
        """Keep it."""
        self.said.append((involved.kind, reason))


@pytest.fixture
def server() -> Server:
    """An API server."""
    return Server()


@asynccontextmanager
async def statuses(
    server: Server,
    folder: Path,
    *entries: ClaimEntry,
    said: list[str] | None = None,
    boot_id: str = "",
    checkpoint: Checkpoint | None = None,
    recorder: EventRecorder | None = None,
) -> AsyncIterator[ClaimStatuses]:
    """A process whose checkpoint has these entries, or that the test fills."""
    tell = said.append if said is not None else lambda _: None
    by_key = {entry.key: entry for entry in entries}
    made = ClaimStatuses(
        cast(KubernetesCluster, server),
        ReportRecord.open(folder / "reports.json"),
        checkpoint or Checkpoint(folder / "checkpoint.json", by_key, boot_id=boot_id),
        PodEvents(recorder or cast(EventRecorder, Notes()), "n1"),
        LoopClock(),
        "n1",
        tell=tell,
    )
    made.restore()
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.finish()


async def test_claim_is_written_at_once_when_prepared_attached_and_undone(server: Server, tmp_path: Path) -> None:
    """What needs no sandbox when it is prepared, the rest when it is in one.

    Both go with the claim, and their file is empty then.
    """
    cpu, nic = entry("cpus", "cpu", needs_sandbox=False), entry("net")
    async with statuses(server, tmp_path) as made:
        made.prepared(cpu)
        made.prepared(nic)
        await asyncio.sleep(1)
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
        made.detached(nic)
        made.unprepared(key(cpu), "cpu")
        made.unprepared(key(nic), "nic")
        await asyncio.sleep(1)

    assert server.writes == [(0, "cpus", ["Prepared"]), (1, "net", ["Attached"]), (2, "cpus", []), (2, "net", [])]
    assert ReportRecord.open(tmp_path / "reports.json").reports == {}


async def test_people_are_told_once_when_the_next_process_finds_what_is_in_a_pod(
    server: Server, tmp_path: Path
) -> None:
    """What a pod has becomes an event on the pod and the claim, and none when it is found again."""
    notes, nic = Notes(), entry("net")
    recorder = cast(EventRecorder, notes)
    async with statuses(server, tmp_path, recorder=recorder) as made:
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
    async with statuses(server, tmp_path, in_pod(nic), recorder=recorder) as made:
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)

    assert notes.said == [("Pod", "DevicesAttached"), ("ResourceClaim", "DevicesAttached")]


async def test_classes_of_a_claim_are_written_beside_each_other(server: Server, tmp_path: Path) -> None:
    """Each class has its own report, also for the next process: what becomes of one device leaves
    the entries of the claim's other classes as they are.
    """
    gpu, nic = entry("both", "gpu", needs_sandbox=False), entry("both")

    def shown() -> list[tuple[str, str]]:
        return [(device["device"], device["conditions"][0]["reason"]) for device in server.shown["both"]]

    async with statuses(server, tmp_path) as made:
        made.prepared(gpu)
        made.prepared(nic)
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
        attached = sorted(shown())
        made.detached(nic)
        await asyncio.sleep(1)
        detached = shown()
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
    async with statuses(server, tmp_path, gpu, in_pod(nic)) as made:
        await asyncio.sleep(1)
        again = sorted(shown())
        made.unprepared(key(gpu), "gpu")
        await asyncio.sleep(1)
        gpu_gone = shown()
        made.unprepared(key(nic), "nic")
        await asyncio.sleep(1)

    assert attached == again == [("gpu-0", "Prepared"), ("nic-0", "Attached")]
    assert (detached, gpu_gone) == ([("gpu-0", "Prepared")], [("nic-0", "Attached")])
    assert server.shown == {"both": []}


def part(device_class: str, *, needs_sandbox: bool = False) -> ClaimEntry:
    """The part of a claim's shape in a class."""
    device = AllocatedDevice(request="r", pool="n1", device=f"{device_class}-0", shape="shape-half-0")
    return msgspec.structs.replace(entry("half", device_class, needs_sandbox=needs_sandbox), devices=(device,))


GPU_PART, NIC_PART = part("gpu"), part("nic", needs_sandbox=True)
TAKEN = Refusal(reasons=(Reason(code="name-taken", message="net1 is taken"),))


async def test_shape_is_reported_once_for_all_its_parts(server: Server, tmp_path: Path) -> None:
    """Not before the last part is ready, and no longer than the first one is. Classes of which the
    claim has only parts are not written.
    """
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", {})
    async with statuses(server, tmp_path, checkpoint=checkpoint) as made:
        await checkpoint.put(GPU_PART, NIC_PART)
        made.prepared(GPU_PART)
        made.prepared(NIC_PART)
        await asyncio.sleep(1)
        made.failed(NIC_PART, SANDBOX, TAKEN)
        await asyncio.sleep(1)
        made.attached(NIC_PART, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
        (shown,) = server.shown["half"]
        made.detached(NIC_PART)
        await asyncio.sleep(1)
        made.attached(NIC_PART, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
        await checkpoint.remove(GPU_PART.uid)
        for device_class in ("gpu", "nic"):
            made.unprepared(key(GPU_PART), device_class)
        await asyncio.sleep(1)

    assert server.said == [("half", ["NameTaken"]), *[("half", ["Attached"]), ("half", [])] * 2]
    assert (shown["device"], shown["networkData"]["interfaceName"]) == ("shape-half-0", "net1")
    assert ReportRecord.open(tmp_path / "reports.json").reports == {}


async def test_shape_and_a_device_by_itself_are_reported_beside_each_other(server: Server, tmp_path: Path) -> None:
    """A claim may have a shape and a NIC more: each has its entry."""
    nic = msgspec.structs.replace(
        NIC_PART, devices=(*NIC_PART.devices, AllocatedDevice(request="more", pool="n1", device="nic-9"))
    )
    async with statuses(server, tmp_path, GPU_PART, in_pod(nic)):
        await asyncio.sleep(1)

    assert sorted(device["device"] for device in server.shown["half"]) == ["nic-9", "shape-half-0"]
    assert len(server.writes) == 2


@pytest.mark.parametrize("is_undone", [False, True])
async def test_next_process_reports_a_shape_when_this_one_was_killed_before_the_write(
    server: Server, tmp_path: Path, is_undone: bool
) -> None:
    """It is written as before, with its time, or removed when the claim was undone meanwhile."""
    entries = (GPU_PART, in_pod(NIC_PART))
    server.answers = [AWAY] * 9
    async with statuses(server, tmp_path, *entries):
        await asyncio.sleep(0.1)
    server.writes.clear()
    server.answers.clear()
    await asyncio.sleep(60)

    async with statuses(server, tmp_path, *(() if is_undone else entries)):
        await asyncio.sleep(1)

    assert server.said == [("half", [] if is_undone else ["Attached"])]
    reports = ReportRecord.open(tmp_path / "reports.json").reports
    assert [report.since for report in reports.values()] == ([] if is_undone else ["2026-01-01T00:00:00Z"] * 3)


async def test_shape_is_removed_when_the_machine_was_booted(server: Server, tmp_path: Path) -> None:
    """Nothing of it is ready until kubelet has had the claim prepared again."""
    entries = (GPU_PART, in_pod(NIC_PART))
    async with statuses(server, tmp_path, *entries):
        await asyncio.sleep(1)
    async with statuses(server, tmp_path, *entries, boot_id="another"):
        await asyncio.sleep(1)

    assert server.said == [("half", ["Attached"]), ("half", [])]


async def test_shape_is_reported_at_once_when_one_part_is_refused_or_sick(server: Server, tmp_path: Path) -> None:
    """A refusal is said although another part is in no sandbox yet, and so is a fault later."""
    gpu = part("gpu", needs_sandbox=True)
    async with statuses(server, tmp_path, gpu, NIC_PART) as made:
        made.failed(NIC_PART, SANDBOX, TAKEN)
        await asyncio.sleep(1)
        made.judged(NIC_PART.key, {"nic-0": HealthNote(is_healthy=False, code="no-link", message="no cable")})
        await asyncio.sleep(1)

    assert server.said == [("half", ["NameTaken"])] * 2
    assert server.shown["half"][0]["conditions"][1]["message"] == "nic-0: no cable (no-link)"


async def test_newest_state_of_a_shape_is_written_when_it_comes_during_a_write(server: Server, tmp_path: Path) -> None:
    """One class's news does not overtake the other's: a claim's shapes are written one after the other."""
    server.hangs.clear()
    async with statuses(server, tmp_path, GPU_PART, in_pod(NIC_PART)) as made:
        await asyncio.sleep(1)
        made.judged(GPU_PART.key, {"gpu-0": HealthNote(is_healthy=False, code="fell-off-bus", message="gone")})
        made.failed(NIC_PART, SANDBOX, TAKEN)
        await asyncio.sleep(1)
        server.hangs.set()
        await asyncio.sleep(1)

    assert server.said == [("half", ["Attached"]), ("half", ["NameTaken"])]
    assert server.shown["half"][0]["conditions"][1]["message"] == "gpu-0: gone (fell-off-bus)"


async def test_claim_is_written_once_when_the_same_is_told_again(server: Server, tmp_path: Path) -> None:
    """Kubelet makes a refused sandbox anew every few seconds, and the gateway tells all attachments
    once more after its start.
    """
    nic = entry("net")
    refusal = Refusal(reasons=(Reason(code="name-taken", message="net1 is taken"),))
    async with statuses(server, tmp_path) as made:
        for _ in range(3):
            made.failed(nic, SANDBOX, refusal)
            await asyncio.sleep(1)
        for _ in range(3):
            made.attached(nic, SANDBOX, {"nic-0": NET1})
            await asyncio.sleep(1)

    assert server.said == [("net", ["NameTaken"]), ("net", ["Attached"])]


async def test_write_is_repeated_ever_less_often_while_the_server_is_away(server: Server, tmp_path: Path) -> None:
    """Nobody waits for it.

    What is the newest then is written, and the trouble is told once and taken back.
    """
    said: list[str] = []
    server.answers = [AWAY] * 5
    async with statuses(server, tmp_path, said=said) as made:
        made.attached(entry("net"), SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(100)

    assert [when for when, _, _ in server.writes] == [0, 0.2, 0.6, 1.4, 3.0, 6.2]
    assert said == ["status of claims is not written: API server: away", ""]


async def test_refused_write_is_repeated_rarely(server: Server, tmp_path: Path) -> None:
    """A right that is missing is given by people: the gateway asks again after ten seconds, and
    then more seldom.
    """
    said: list[str] = []
    server.answers = [FORBIDDEN] * 3
    async with statuses(server, tmp_path, said=said) as made:
        made.attached(entry("net"), SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1000)

    assert [when for when, _, _ in server.writes] == [0, 10, 30, 70]
    assert said == ["status of claims is not written: cannot patch resource", ""]


async def test_one_claims_refusal_delays_no_other(server: Server, tmp_path: Path) -> None:
    """Claims are written side by side, and a new one goes before one
    that waits to be tried again.
    """
    server.answers = [FORBIDDEN]
    async with statuses(server, tmp_path) as made:
        made.attached(entry("bad"), SANDBOX, {})
        await asyncio.sleep(1)
        made.attached(entry("good"), SANDBOX, {})
        await asyncio.sleep(1)

    assert server.writes == [(0, "bad", ["Attached"]), (1, "good", ["Attached"])]


@pytest.mark.parametrize("code", [404, 409, 422])
async def test_claim_that_is_gone_or_deallocated_is_done(server: Server, tmp_path: Path, code: int) -> None:
    """Nobody reads it any more: no error, no other try."""
    said: list[str] = []
    server.answers = [Rejected(code=code, message="no")]
    async with statuses(server, tmp_path, said=said) as made:
        made.attached(entry("net"), SANDBOX, {})
        await asyncio.sleep(1000)

    assert (len(server.writes), said) == (1, [])


async def test_conflict_with_a_claim_that_is_still_ours_is_tried_again_soon(server: Server, tmp_path: Path) -> None:
    """Somebody wrote at the same moment.

    An invalid write of a claim that is still allocated is tried rarely.
    """
    server.allocated = {"net"}
    server.answers = [Rejected(code=409, message="modified"), Rejected(code=422, message="invalid")]
    async with statuses(server, tmp_path) as made:
        made.attached(entry("net"), SANDBOX, {})
        await asyncio.sleep(100)

    assert [when for when, _, _ in server.writes] == [0, 0.2, 20.2]


async def test_newest_word_is_written_when_it_comes_during_a_write(server: Server, tmp_path: Path) -> None:
    """A write that hangs is not overtaken by another of the same claim, and is followed by the
    newest.
    """
    server.hangs.clear()
    async with statuses(server, tmp_path) as made:
        made.attached(entry("net"), SANDBOX, {})
        await asyncio.sleep(1)
        made.detached(entry("net"))
        made.failed(entry("net"), SANDBOX, Refusal(reasons=(Reason(code="gone", message="it is gone"),)))
        await asyncio.sleep(1)
        server.hangs.set()
        await asyncio.sleep(1)

    assert server.said == [("net", ["Attached"]), ("net", ["Gone"])]


@pytest.mark.parametrize("is_undone", [False, True])
async def test_next_process_goes_on_when_this_one_was_killed_before_the_write(
    server: Server, tmp_path: Path, is_undone: bool
) -> None:
    """What was to be said is on disk before it is said: the next process says it, or takes it away
    when the claim was undone meanwhile.
    """
    nic = entry("net")
    server.answers = [AWAY] * 2
    async with statuses(server, tmp_path) as made:
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(0.1)
    server.writes.clear()
    server.answers.clear()

    async with statuses(server, tmp_path, *(() if is_undone else (in_pod(nic),))):
        await asyncio.sleep(1)

    assert server.said == [("net", [] if is_undone else ["Attached"])]
    assert len(ReportRecord.open(tmp_path / "reports.json").reports) == (0 if is_undone else 1)


async def test_next_process_says_what_the_checkpoint_says_when_nothing_was_on_disk(
    server: Server, tmp_path: Path
) -> None:
    """Killed between the checkpoint and the report: prepared claims are told, and those that were
    begun are not.
    """
    begun = msgspec.structs.replace(entry("begun", "cpu", needs_sandbox=False), is_prepared=False)
    async with statuses(server, tmp_path, entry("cpus", "cpu", needs_sandbox=False), entry("net"), begun):
        await asyncio.sleep(1)

    assert server.said == [("cpus", ["Prepared"])]


async def test_status_is_taken_away_when_the_machine_was_booted(server: Server, tmp_path: Path) -> None:
    """Nothing of the boot before is in a pod or made ready.

    It is told again when kubelet has had the claim prepared.
    """
    cpus = entry("cpus", "cpu", needs_sandbox=False)
    async with statuses(server, tmp_path, cpus):
        await asyncio.sleep(1)
    async with statuses(server, tmp_path, cpus, boot_id="another"):
        await asyncio.sleep(1)

    assert server.said == [("cpus", ["Prepared"]), ("cpus", [])]


async def test_since_stays_while_the_state_is_the_same(server: Server, tmp_path: Path) -> None:
    """`lastTransitionTime` is of the change, not of the write; also after a restart."""
    nic = entry("net")
    async with statuses(server, tmp_path) as made:
        made.attached(nic, SANDBOX, {})
        await asyncio.sleep(5)
    async with statuses(server, tmp_path, in_pod(nic)) as made:
        made.attached(nic, SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(5)
        (report,) = ReportRecord.open(tmp_path / "reports.json").reports.values()
        made.failed(nic, SANDBOX, Refusal(reasons=(Reason(code="gone", message="it is gone"),)))
        await asyncio.sleep(5)

    (later,) = ReportRecord.open(tmp_path / "reports.json").reports.values()
    assert (report.interfaces, report.since) == ({"nic-0": NET1}, "2026-01-01T00:00:00Z")
    assert later.since > report.since


async def test_unreadable_file_is_set_aside(server: Server, tmp_path: Path) -> None:
    """No container depends on it: the gateway starts, and what cannot
    be read is kept for people.
    """
    (tmp_path / "reports.json").write_text("{", encoding="utf-8")

    async with statuses(server, tmp_path) as made:
        made.attached(entry("net"), SANDBOX, {})
        await asyncio.sleep(1)

    assert server.said == [("net", ["Attached"])]
    assert (tmp_path / "reports.json.unreadable").read_text(encoding="utf-8") == "{"


async def test_claim_is_written_when_the_disk_refuses(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk costs what a kill would need, not what people see."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("topobus.gateway.cluster.report_record.write", full)
    async with statuses(server, tmp_path) as made:
        made.attached(entry("net"), SANDBOX, {})
        await asyncio.sleep(1)

    assert server.said == [("net", ["Attached"])]


async def test_claim_that_is_gone_is_done_when_the_right_to_write_is_missing(server: Server, tmp_path: Path) -> None:
    """A server asks for the right before it looks for the claim: without an end to it the file
    would grow with each claim that the node ever had.
    """
    said: list[str] = []
    server.answers = [FORBIDDEN] * 100
    server.allocated = {"net"}
    async with statuses(server, tmp_path, said=said) as made:
        made.attached(entry("net"), SANDBOX, {})
        await asyncio.sleep(1)
        made.unprepared(key(entry("net")), "nic")
        await asyncio.sleep(1)
        kept = dict(ReportRecord.open(tmp_path / "reports.json").reports)
        server.allocated.clear()
        await asyncio.sleep(1000)

    assert len(kept) == 1
    assert ReportRecord.open(tmp_path / "reports.json").reports == {}
    assert said == ["status of claims is not written: cannot patch resource", ""]


async def test_another_pods_refusal_hides_nothing_of_the_pod_that_has_the_devices(
    server: Server, tmp_path: Path
) -> None:
    """A claim that two pods share serves one at a time: its status is about the one that has it,
    until the devices have left it.
    """
    other = Sandbox(id="t", uid="other", namespace="default", name="q")
    refusal = Refusal(reasons=(Reason(code="device-in-another-pod", message="nic-0 is in pod default/p"),))
    async with statuses(server, tmp_path) as made:
        made.attached(entry("net"), SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
        made.failed(entry("net"), other, refusal)
        await asyncio.sleep(1)
        made.detached(entry("net"))
        made.failed(entry("net"), other, refusal)
        await asyncio.sleep(1)

    assert server.said == [("net", ["Attached"]), ("net", ["DeviceInAnotherPod"])]


async def test_next_process_takes_away_what_was_detached_when_this_one_was_killed(
    server: Server, tmp_path: Path
) -> None:
    """The checkpoint says that the devices are in no pod any more, and the report of it was not
    written.
    """
    async with statuses(server, tmp_path) as made:
        made.attached(entry("net"), SANDBOX, {"nic-0": NET1})
        await asyncio.sleep(1)
    server.writes.clear()

    async with statuses(server, tmp_path, entry("net")):
        await asyncio.sleep(1)

    assert server.said == [("net", [])]
