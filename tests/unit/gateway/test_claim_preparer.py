"""Preparing and undoing claims: what is reported when an earlier try has to be undone first, and how
the classes of a claim go together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.containers.cdi import file_name
from topobus.formats.messages.messages import Adopted, AdoptRequest, ApiObject, Prepared, PrepareRequest
from topobus.gateway.asks import StillAtWork
from topobus.gateway.claims.attempts import Attempts
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_devices import ClaimDevices
from topobus.gateway.claims.claim_files import ClaimFiles
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey
from topobus.gateway.claims.claim_ledger import ClaimLedger
from topobus.gateway.claims.claim_metadata import ClaimMetadata
from topobus.gateway.claims.claim_steps import ClaimSteps
from topobus.gateway.claims.claims import ClaimPreparer, PreparedDevice
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice, ClaimAllocation
from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.live_containers import LiveContainer, LiveContainers
from topobus.gateway.metrics import ClaimMetrics
from topobus.process.broadcast import Broadcast
from topobus.values.device import Device, Inventory
from topobus.values.edits import ContainerEdits
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import NodeSet
from topobus.values.ledger import Allocation, Holders
from topobus.values.names import ClaimUid
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner

CLAIM = ClaimKey(namespace="default", name="c", uid=ClaimUid("u-c"))
GPU_0, GPU_1 = (AllocatedDevice(request="r", pool="n1", device=f"gpu-{number}") for number in (0, 1))
NIC_0 = AllocatedDevice(request="net", pool="n1", device="nic-0")


class Calls:
    """The steps and reports of a claim, in the order of their calls. A new try is refused."""

    def __init__(self, *entries: ClaimEntry) -> None:
        self.made: list[str] = []
        self.found = entries

    def of_claim(self, *_: object) -> tuple[ClaimEntry, ...]:
        """The checkpoint's entries."""
        return self.found

    def entries(self) -> tuple[ClaimEntry, ...]:
        """All of them."""
        return self.found

    def is_ready(self, _: ClaimEntry) -> bool:
        """No entry is."""
        return False

    async def read(self, *_: object) -> ClaimAllocation:
        """The claim has one GPU and one NIC."""
        return ClaimAllocation(devices=(GPU_0, NIC_0))

    async def undo(self, *_: object) -> tuple[str, ...]:
        """It succeeds."""
        self.made.append("undo")
        self.found = ()
        return ("gpu-0",)

    async def prepare(self, *_: object) -> tuple[ClaimEntry, ...]:
        """It fails."""
        self.made.append("prepare")
        raise ClaimFailed("no firmware")

    def unprepared(self, _: ClaimKey, device_class: str) -> None:
        """Note the report."""
        self.made.append(f"{device_class} reported as unprepared")


UNDONE = ["undo", "gpu reported as unprepared", "nic reported as unprepared"]


@pytest.mark.parametrize(
    ("gpu", "nic", "calls"),
    [
        ({"devices": (GPU_0,), "is_undoing": True}, {"devices": (NIC_0,), "is_undoing": True}, [*UNDONE, "prepare"]),
        ({"devices": (GPU_0,)}, {"devices": (NIC_0,), "is_undoing": True}, [*UNDONE, "prepare"]),
        ({"devices": (GPU_1,)}, {"devices": (NIC_0,)}, [*UNDONE, "prepare"]),
        ({"devices": (GPU_0,)}, None, [*UNDONE[:2], "prepare"]),
        ({"devices": (GPU_0,)}, {"devices": (NIC_0,)}, ["prepare"]),
        (None, None, ["prepare"]),
    ],
    ids=[
        "partly undone",
        "one class partly undone",
        "allocated again",
        "allocated again with one more class",
        "begun with the same devices",
        "new",
    ],
)
async def test_earlier_try_is_reported_as_undone_before_a_new_one_begins(
    gpu: dict[str, Any] | None, nic: dict[str, Any] | None, calls: list[str]
) -> None:
    """The claim's status must not show devices as prepared that were given back, whatever becomes of
    the new try.
    """
    made: Any = Calls(
        *(
            ClaimEntry(namespace="default", name="c", uid=CLAIM.uid, device_class=name, attempt="a", **fields)
            for name, fields in (("gpu", gpu), ("nic", nic))
            if fields is not None
        )
    )
    preparer = ClaimPreparer(
        cast(Any, SimpleNamespace(containers=None)),
        made,
        DeadlineSettings(),
        made,
        made,
        made,
        made,
        ClaimMetrics(CollectorRegistry()),
    )

    answer = await preparer.prepare(CLAIM)

    assert isinstance(answer, str)
    assert "no firmware" in answer
    assert made.made == calls


class Node:
    """A node's ledger, device services and claims, and a preparer of its own for them.

    `trouble` has what a class's service answers instead of its work.
    """

    def __init__(self, folder: Path, *versions: str, retry_s: float = 0.0, pinning: Pins | None = None) -> None:
        """`versions` of the files that describe devices to containers; `retry_s` is how long a claim is
        tried; `pinning` promises CPUs.
        """
        self.pinning: Any = pinning
        self.forbidden: Refusal | None = None
        self.remarks: list[str] = []
        """What is wrong with the folder of CDI files."""
        self.retry_s = retry_s
        self.folder = folder
        self.versions = versions
        self.asked: list[str] = []
        """The requests, each as `verb class op-id`, those of a class's service side by side."""
        self.adopted: list[AdoptRequest] = []
        self.requests: dict[str, PrepareRequest] = {}
        self.inventories: dict[str, Inventory] = {}
        self.results: list[dict[str, Any]] = []
        self.refused: Refusal | None = None
        self.trouble: dict[str, Refusal | PeerUnavailable] = {}
        self.hangs: set[str] = set()
        """The classes whose service never answers."""
        self.reported: list[str] = []
        self.handed_out: list[tuple[str, tuple[str, ...]]] = []
        self.checkpoint = Checkpoint.load(folder / "checkpoint.json", boot_id="b")
        self.preparer = self._preparer()

    @property
    def verbs(self) -> list[str]:
        """The requests without the ids of their operations."""
        return [text.rpartition(" ")[0] for text in self.asked]

    def cdi_files(self) -> list[str]:
        """The classes that have a CDI file of the claim."""
        return [
            name for name in ("cpu", "gpu", "nic") if (self.folder / file_name(CDI_VENDOR, name, CLAIM.uid)).exists()
        ]

    def _preparer(self) -> ClaimPreparer:
        us: Any = self
        self.state = state = cast(Any, SimpleNamespace)(
            node="n1",
            containers=LiveContainers(),
            hand_out=self.hand_out,
            ledger=None,
            ledger_went_back=Broadcast(),
            device=lambda *_: None,
            inventories=lambda: self.inventories,
            shapes=lambda: shapes_of(self.inventories.values()),
        )
        metrics = ClaimMetrics(CollectorRegistry())
        files = ClaimFiles(
            self.folder,
            metadata=ClaimMetadata(self.folder / "metadata", self.versions, dict, self.checkpoint.of_claim),
            pinning=self.pinning,
            metrics=metrics,
            tell=self.remarks.append,
        )
        ledger = ClaimLedger(state, us, us.read, self.checkpoint, None)
        devices = ClaimDevices(us, self.checkpoint, lambda _class, _name: None, lambda _: "")
        steps = ClaimSteps(state, us.read, self.checkpoint, ledger, devices, us, self.pinning, files)
        deadlines = DeadlineSettings(claim_retry_s=self.retry_s)
        return ClaimPreparer(state, self.checkpoint, deadlines, ledger, steps, files, cast(Any, Reports(self)), metrics)

    def hand_out(self, device_class: str, names: tuple[str, ...], *_: object) -> None:
        """Note what is given."""
        self.handed_out.append((device_class, names))

    async def read(self, namespace: str, name: str) -> ApiObject:
        """The claim: two GPUs, a NIC and a CPU of a group, or what the test wants."""
        results: list[dict[str, Any]] = self.results or [
            {"request": "gpus", "driver": "topobus.dev", "pool": "n1", "device": "gpu-0"},
            {"request": "gpus", "driver": "topobus.dev", "pool": "n1", "device": "gpu-1"},
            {"request": "net", "driver": "topobus.dev", "pool": "n1", "device": "nic-0"},
            {
                "request": "cpus",
                "driver": "topobus.dev",
                "pool": "n1/cpu",
                "device": "cpu-machine",
                "shareID": "s",
                "consumedCapacity": {"cpus": "2"},
            },
        ]
        return ApiObject(
            api_version="resource.k8s.io/v1",
            kind="ResourceClaim",
            metadata={"namespace": namespace, "name": name, "uid": f"u-{name}"},
            status={"allocation": {"devices": {"results": results}}},
        )

    async def adopt(self, request: AdoptRequest, **_: object) -> Adopted | Refusal:
        """The ledger's answer."""
        self.asked.append(f"adopt all {request.op_id}")
        self.adopted.append(request)
        return self.refused or Adopted(decision_id="d")

    async def release(self, op_id: str, owner: Owner, **_: object) -> Refusal | None:
        """The ledger's answer."""
        self.asked.append(f"release {owner.uid if owner.uid != CLAIM.uid else 'all'} {op_id}")
        return self._troubled("ledger")

    async def prepare(self, device_class: str, request: PrepareRequest) -> Prepared | Refusal:
        """A service's answer."""
        self.asked.append(f"prepare {device_class} {request.op_id}")
        self.requests[device_class] = request
        if device_class in self.hangs:
            await asyncio.Event().wait()
        trouble = self._troubled(device_class)
        edits = {name: ContainerEdits(env={"A": name}) for name in request.devices}
        return trouble or Prepared(edits=edits, common=ContainerEdits(env={"ALL": ",".join(request.devices)}))

    async def unprepare(self, op_id: str, _: Owner, device_class: str, names: Sequence[str]) -> Refusal | None:
        """A service's answer."""
        self.asked.append(f"unprepare {device_class} {op_id}")
        return self._troubled(device_class)

    async def refuse_forbidden(self, *_: object) -> Refusal | None:
        """All is allowed, unless the test forbids it."""
        return self.forbidden

    def check(self, _: ClaimEntry) -> None:
        """Nothing is in the way of attaching."""

    async def detach(self, _: ClaimEntry) -> None:
        """Nothing is attached."""

    def _troubled(self, device_class: str) -> Refusal | None:
        trouble = self.trouble.get(device_class)
        if isinstance(trouble, PeerUnavailable):
            raise trouble
        return trouble


class Pins:
    """Promises CPUs, and notes of which classes, and whether the promise ended before the entry was stored."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.checkpoint: Checkpoint | None = None
        self.promised: list[str] = []
        self.ended: list[bool] = []
        self.released_claims = 0

    @asynccontextmanager
    async def promising(self, entry: ClaimEntry) -> AsyncIterator[Refusal | None]:
        """Promise, or refuse the class that the test names."""
        self.promised.append(entry.device_class)
        yield NO if entry.device_class == self.refused else None
        assert self.checkpoint is not None
        self.ended.append(self.checkpoint.ready(entry.uid, entry.device_class) is not None)

    async def released(self) -> None:
        """Note that CPUs are free."""
        self.released_claims += 1

    def pins(self, _: ClaimEntry) -> bool:
        """No container is guarded."""
        return False


class Reports:
    """Notes what a node reports of its claims."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def prepared(self, entry: ClaimEntry) -> None:
        """It is prepared."""
        self._node.reported.append(f"prepared {entry.device_class}")

    def unprepared(self, _: ClaimKey, device_class: str) -> None:
        """It is undone."""
        self._node.reported.append(f"unprepared {device_class}")


CLASSES = ["cpu", "gpu", "nic"]
AWAY = PeerUnavailable("the nic service is away", retry_after_s=0.0)
NO = Refusal(reasons=(Reason(code="no-firmware", message="nic-0 has no firmware"),))


def of_all(verb: str) -> list[str]:
    """A request to the service of each class."""
    return [f"{verb} {device_class}" for device_class in CLASSES]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node."""
    return Node(tmp_path)


async def test_claim_of_several_classes_is_adopted_once_and_prepared_together(node: Node) -> None:
    """One decision of the ledger, one operation of each class's service, one answer for kubelet."""
    answer = await node.preparer.prepare(CLAIM)

    assert (node.verbs[0], sorted(node.verbs[1:])) == ("adopt all", of_all("prepare"))
    (adopted,) = node.adopted
    assert adopted.devices == {"cpu": ("cpu-machine",), "gpu": ("gpu-0", "gpu-1"), "nic": ("nic-0",)}
    assert (adopted.shared, adopted.group_cpus) == ({"cpu": ("cpu-machine",)}, {"cpu-machine": 2})
    assert {name: request.devices for name, request in node.requests.items()} == adopted.devices
    assert _devices(answer) == [
        ("cpu-machine", "n1/cpu", "s"),
        ("gpu-0", "n1", ""),
        ("gpu-1", "n1", ""),
        ("nic-0", "n1", ""),
    ]
    assert all(node.checkpoint.is_ready(entry) for entry in node.checkpoint.of_claim(CLAIM.uid))
    assert (node.cdi_files(), node.reported) == (CLASSES, of_all("prepared"))
    assert node.handed_out == list(adopted.devices.items())


async def test_prepared_claim_asks_nobody_when_kubelet_asks_again(node: Node) -> None:
    """The answer is the same, out of the checkpoint."""
    first = await node.preparer.prepare(CLAIM)
    node.asked.clear()

    assert await node.preparer.prepare(CLAIM) == first
    assert node.asked == []


@pytest.mark.parametrize(
    ("trouble", "error"), [(AWAY, "the nic service is away"), (NO, "nic-0 has no firmware")], ids=["away", "refused"]
)
async def test_nothing_is_prepared_while_one_class_is_not(
    node: Node, trouble: Refusal | PeerUnavailable, error: str
) -> None:
    """No answer, no entry that is ready, no CDI file and no report, though the other classes are
    done.

    The next try continues the same operation, in which the done ones answer as before.
    """
    node.trouble["nic"] = trouble
    refused = await node.preparer.prepare(CLAIM)
    begun = node.checkpoint.of_claim(CLAIM.uid)
    first = list(node.asked)
    stored = (node.cdi_files(), list(node.reported), list(Checkpoint.load(node.folder / "checkpoint.json").entries()))
    node.trouble.clear()
    node.asked.clear()

    answer = await node.preparer.prepare(CLAIM)

    assert isinstance(refused, str)
    assert error in refused
    assert [(entry.device_class, entry.is_prepared) for entry in begun] == [(name, False) for name in CLASSES]
    assert len({entry.attempt for entry in begun}) == 1
    assert stored == ([], [], list(begun))
    assert len(_devices(answer)) == 4
    assert sorted(node.asked) == sorted(first)
    assert all(node.checkpoint.is_ready(entry) for entry in node.checkpoint.of_claim(CLAIM.uid))


async def test_refusal_is_told_when_another_class_is_only_away(node: Node) -> None:
    """Waiting for the service that is away would not help."""
    node.trouble = {"gpu": AWAY, "nic": NO}

    answer = await node.preparer.prepare(CLAIM)

    assert isinstance(answer, str)
    assert "nic-0 has no firmware" in answer


async def test_nobody_is_asked_to_prepare_when_the_ledger_refuses(node: Node) -> None:
    """Nothing was taken: no entry of any class stays."""
    node.refused = NO

    answer = await node.preparer.prepare(CLAIM)

    assert isinstance(answer, str)
    assert (node.verbs, node.checkpoint.entries(), node.handed_out) == (["adopt all"], (), [])


async def test_unprepare_undoes_all_classes_and_lets_go_once(node: Node) -> None:
    """The ledger hears of the end when nothing of any class is prepared any more."""
    await node.preparer.prepare(CLAIM)
    node.asked.clear()
    node.reported.clear()

    error = await node.preparer.unprepare(CLAIM)

    assert error == ""
    assert (sorted(node.verbs[:-1]), node.verbs[-1]) == (of_all("unprepare"), "release all")
    assert (node.checkpoint.entries(), node.cdi_files()) == ((), [])
    assert node.reported == of_all("unprepared")


async def test_unprepare_lets_go_of_nothing_when_one_class_refuses(node: Node) -> None:
    """The claim keeps the devices of all classes, and none counts as prepared.

    The next try undoes the rest under the same operation, and lets go then.
    """
    await node.preparer.prepare(CLAIM)
    node.asked.clear()
    node.reported.clear()
    node.trouble["nic"] = NO
    error = await node.preparer.unprepare(CLAIM)
    first, half = list(node.verbs), Checkpoint.load(node.folder / "checkpoint.json", boot_id="b").entries()
    reported = list(node.reported)
    node.trouble.clear()

    again = await node.preparer.unprepare(CLAIM)

    assert "nic-0 has no firmware" in error
    assert (sorted(first), reported) == (of_all("unprepare"), [])
    assert [(entry.device_class, entry.is_undoing) for entry in half] == [(name, True) for name in CLASSES]
    assert (again, node.verbs.count("release all"), node.verbs[-1]) == ("", 1, "release all")
    assert len({text.rpartition(" ")[2] for text in node.asked if text.startswith("unprepare")}) == 1
    assert (node.checkpoint.entries(), node.reported) == ((), of_all("unprepared"))


async def test_claim_is_left_whole_when_one_service_is_away(node: Node) -> None:
    """Kubelet may end the pod; the entries of all classes stay until all are undone."""
    await node.preparer.prepare(CLAIM)
    node.trouble["nic"] = AWAY

    error = await node.preparer.unprepare(CLAIM)

    assert error == ""
    left = node.checkpoint.of_claim(CLAIM.uid)
    assert [(entry.device_class, entry.is_left) for entry in left] == [(name, True) for name in CLASSES]
    assert "release all" not in node.verbs


async def test_new_attempt_begins_after_one_that_was_undone_half(node: Node) -> None:
    """Operations are answered once: the ids of a claim that was undone are not used again."""
    await node.preparer.prepare(CLAIM)
    (before,) = {entry.attempt for entry in node.checkpoint.of_claim(CLAIM.uid)}
    node.trouble["nic"] = NO
    await node.preparer.unprepare(CLAIM)
    node.trouble.clear()
    node.asked.clear()

    answer = await node.preparer.prepare(CLAIM)

    (after,) = {entry.attempt for entry in node.checkpoint.of_claim(CLAIM.uid)}
    assert len(_devices(answer)) == 4
    assert after != before
    assert sorted(node.verbs[:3]) == of_all("unprepare")
    assert (node.verbs[3:5], sorted(node.verbs[5:])) == (["release all", "adopt all"], of_all("prepare"))


async def test_devices_of_all_classes_are_made_ready_again_after_a_reboot(node: Node) -> None:
    """The same attempt, with operations of the new boot."""
    await node.preparer.prepare(CLAIM)
    (before,) = {entry.attempt for entry in node.checkpoint.of_claim(CLAIM.uid)}
    rebooted = Node(node.folder)
    rebooted.checkpoint.boot_id = "0123456789"

    answer = await rebooted.preparer.prepare(CLAIM)

    assert len(_devices(answer)) == 4
    assert sorted(rebooted.asked[1:]) == [f"{text} {before}-prepare-01234567" for text in of_all("prepare")]
    assert all(request.is_again for request in rebooted.requests.values())


async def test_checkpoint_has_all_classes_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning and the end are one write each, so that no crash leaves a claim with one class
    of its devices.
    """
    puts: list[list[tuple[str, bool]]] = []
    put = node.checkpoint.put

    async def noted(*entries: ClaimEntry) -> None:
        puts.append([(entry.device_class, entry.is_prepared) for entry in entries])
        await put(*entries)

    monkeypatch.setattr(node.checkpoint, "put", noted)

    await node.preparer.prepare(CLAIM)

    assert puts == [[(name, False) for name in CLASSES], [(name, True) for name in CLASSES]]


async def test_another_claims_device_is_refused_before_anything_of_the_claim_is_asked(node: Node) -> None:
    """A NIC with which a claim is prepared stops the GPUs of the other as well."""
    rival = ClaimEntry(
        namespace="default",
        name="rival",
        uid=ClaimUid("u-rival"),
        device_class="nic",
        attempt="x",
        devices=(NIC_0,),
        is_prepared=True,
    )
    await node.checkpoint.put(rival)

    answer = await node.preparer.prepare(CLAIM)

    assert isinstance(answer, str)
    assert "claim default/rival holds nic-0" in answer
    assert (node.asked, node.checkpoint.entries()) == ([], (rival,))


def _devices(answer: tuple[PreparedDevice, ...] | str) -> list[tuple[str, str, str]]:
    """Each device of an answer, with its pool and share; entries for the whole claim come last."""
    assert not isinstance(answer, str), answer
    return [(each.device, each.pool, each.share_id) for each in answer if not each.request.startswith("_")]


SHAPE = {"request": "half", "driver": "topobus.dev", "pool": "n1", "device": "shape-numa-0"}


def machine(**counts: int) -> dict[str, Inventory]:
    """Inventories of devices near one NUMA node."""
    return {
        name: Inventory(
            node="n1",
            device_class=name,
            generation=1,
            devices=tuple(
                Device(name=f"{name}-{number}", device_class=name, numa_nodes=NodeSet(0)) for number in range(count)
            ),
        )
        for name, count in counts.items()
    }


async def test_shape_is_one_device_to_kubelet_and_its_parts_to_all_others(node: Node) -> None:
    """Its CDI names are those of all its parts, each once, whatever else the claim has of a class.

    The names for containers that name no request stay last, because a later list overrides.
    """
    node.inventories = machine(gpu=2, nic=1)
    shape = shapes_of(node.inventories.values()).devices[-1].name
    node.results = [
        {**SHAPE, "request": request, "device": device}
        for request, device in (("more", "gpu-8"), ("net", "nic-8"), ("half", shape))
    ]

    answer = await node.preparer.prepare(CLAIM)
    again = await node.preparer.prepare(CLAIM)

    assert node.adopted[0].devices == {"gpu": ("gpu-0", "gpu-1", "gpu-8"), "nic": ("nic-0", "nic-8")}
    assert not isinstance(answer, str)
    assert [(each.request, each.device, [name.partition("=")[2] for name in each.cdi_devices]) for each in answer] == [
        ("more", "gpu-8", ["claim-u-c-gpu-8", "claim-u-c_request-more"]),
        (
            "half",
            shape,
            [
                "claim-u-c-gpu-0",
                "claim-u-c_request-half",
                "claim-u-c-gpu-1",
                "claim-u-c-nic-0",
                "claim-u-c_request-half",
            ],
        ),
        ("net", "nic-8", ["claim-u-c-nic-8", "claim-u-c_request-net"]),
        ("_whole", shape, ["claim-u-c_whole", "claim-u-c_whole"]),
    ]
    assert all(len(set(each.cdi_devices)) == len(each.cdi_devices) for each in answer)
    assert again == answer


async def test_shape_brings_one_file_that_describes_its_parts(tmp_path: Path) -> None:
    """The classes of its parts name the same file, which has the parts of all of them."""
    node = Node(tmp_path, "v1alpha1")
    node.inventories = machine(gpu=2, nic=1)
    node.results = [{**SHAPE, "device": shapes_of(node.inventories.values()).devices[-1].name}]

    answer = await node.preparer.prepare(CLAIM)

    assert not isinstance(answer, str)
    assert [name for each in answer for name in each.cdi_devices if "_metadata-" in name] == [
        "topobus.dev/gpu=claim-u-c_metadata-half",
        "topobus.dev/nic=claim-u-c_metadata-half",
    ]
    (file,) = (tmp_path / "metadata").rglob("*.json")
    (request,) = json.loads(file.read_text(encoding="utf-8"))["requests"]
    assert [device["name"] for device in request["devices"]] == ["gpu-0", "gpu-1", "nic-0"]


@pytest.mark.virtual_time
async def test_shape_waits_for_the_inventories_of_its_parts_after_a_reboot(node: Node) -> None:
    """Without the NIC's inventory the machine has another shape, of GPUs alone: the pod does not start without
    its NIC.
    """
    node.inventories = machine(gpu=2, nic=1)
    shape = shapes_of(node.inventories.values()).devices[-1]
    node.results = [{**SHAPE, "device": shape.name}]
    await node.preparer.prepare(CLAIM)
    rebooted = Node(node.folder, retry_s=5.0)
    rebooted.checkpoint.boot_id = "later"
    rebooted.results, rebooted.inventories = node.results, machine(gpu=2)

    early = await rebooted.preparer.prepare(CLAIM)
    waiting = asyncio.create_task(rebooted.preparer.prepare(CLAIM))
    await asyncio.sleep(1)
    rebooted.inventories = node.inventories
    answer = await waiting

    assert isinstance(early, str)
    assert f"this machine has no shape {shape.name} now: a device service has not reported yet" in early
    assert _devices(answer) == [(shape.name, "n1", "")]
    assert sorted(rebooted.verbs) == ["adopt all", "prepare gpu", "prepare nic"]


async def test_cpus_of_all_classes_are_promised_until_the_claim_is_stored(tmp_path: Path) -> None:
    """A container that starts in between would get CPUs of the claim. They return when it is undone."""
    pins = Pins()
    node = Node(tmp_path, pinning=pins)
    pins.checkpoint = node.checkpoint

    await node.preparer.prepare(CLAIM)
    await node.preparer.unprepare(CLAIM)

    assert (pins.promised, pins.ended, pins.released_claims) == (CLASSES, [True] * 3, 1)


async def test_claim_whose_cpus_are_refused_is_not_prepared(tmp_path: Path) -> None:
    """Also when it is not the first class that asks for them."""
    pins = Pins(refused="nic")
    node = Node(tmp_path, pinning=pins)
    pins.checkpoint = node.checkpoint

    answer = await node.preparer.prepare(CLAIM)

    assert isinstance(answer, str)
    assert "nic-0 has no firmware" in answer
    assert [entry.is_prepared for entry in node.checkpoint.entries()] == [False] * 3


@pytest.mark.parametrize(("forbidden", "files"), [(None, CLASSES), (NO, [])], ids=["allowed", "forbidden by now"])
async def test_files_that_a_reboot_removed_are_written_again(
    node: Node, forbidden: Refusal | None, files: list[str]
) -> None:
    """Before kubelet is served. A claim that the settings forbid by now stops no other one's files, and is
    refused when kubelet asks for it.
    """
    await node.preparer.prepare(CLAIM)
    for name in CLASSES:
        (node.folder / file_name(CDI_VENDOR, name, CLAIM.uid)).unlink()
    again = Node(node.folder)
    again.forbidden = forbidden

    await again.preparer.restore(is_offered=False)
    written = again.cdi_files()
    answer = await again.preparer.prepare(CLAIM)

    assert written == files
    assert ("no firmware" in answer) == (forbidden is not None)


@pytest.mark.parametrize(
    ("is_offered", "remarks"), [(True, ["cannot write /cdi/x: Read-only file system"]), (False, [])]
)
async def test_folder_of_files_is_tried_at_the_start_where_claims_are_offered(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_offered: bool, remarks: list[str]
) -> None:
    """The operator learns of it before the first claim."""

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system", "/cdi/x")

    monkeypatch.setattr("topobus.gateway.claims.claim_files.check_writable", fail)

    await node.preparer.restore(is_offered=is_offered)

    assert node.remarks == remarks


async def test_claim_whose_beginning_cannot_be_stored_has_the_file_as_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked before it is stored."""

    async def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "checkpoint.json")

    monkeypatch.setattr(node.checkpoint, "put", fail)

    answer = await node.preparer.prepare(CLAIM)

    assert (answer, node.asked) == (f"claim {CLAIM}: cannot write checkpoint.json: No space left on device", [])


async def test_claim_is_another_claims_rival_again_after_it_was_undone(node: Node) -> None:
    """Undone and prepared again it uses the device, so the end of another share does not undo it."""
    other = ClaimKey(namespace="default", name="d", uid=ClaimUid("u-d"))
    node.results = [{"request": "g", "driver": "topobus.dev", "pool": "n1", "device": "gpu-0", "shareID": "s"}]
    for claim in (CLAIM, other):
        await node.preparer.prepare(claim)
    await node.preparer.unprepare(CLAIM)
    await node.preparer.prepare(CLAIM)

    error = await node.preparer.unprepare(other)

    assert error == ""
    assert "unprepare gpu" not in node.verbs


def test_try_counts_as_running_until_its_last_call_has_ended() -> None:
    """Kubelet may ask again while the first call runs."""
    attempts = Attempts()
    ended = attempts.changed.ticket()
    with attempts.running(CLAIM.uid):
        with attempts.running(CLAIM.uid):
            during_both = attempts.is_running(CLAIM.uid)
        during_first = attempts.is_running(CLAIM.uid)

    assert (during_both, during_first, attempts.is_running(CLAIM.uid), ended.is_set()) == (True, True, False, True)


class AwayOnce:
    """In place of a node's undoing: each class takes a while, and the NIC's service is away at first."""

    def __init__(self, node: Node) -> None:
        self.is_away = True
        self._undo = node.unprepare
        cast(Any, node).unprepare = self.unprepare

    async def unprepare(self, op_id: str, owner: Owner, device_class: str, names: Sequence[str]) -> Refusal | None:
        """Undo, or be away."""
        await asyncio.sleep(0.1)
        if device_class == "nic" and self.is_away:
            self.is_away = False
            raise AWAY
        return await self._undo(op_id, owner, device_class, names)


@pytest.mark.virtual_time
async def test_claim_that_another_call_has_undone_meanwhile_is_not_left(node: Node) -> None:
    """Both calls of kubelet succeed, and nothing is left to be done."""
    await node.preparer.prepare(CLAIM)
    AwayOnce(node)

    errors = await asyncio.gather(node.preparer.unprepare(CLAIM), node.preparer.unprepare(CLAIM))

    assert (errors, node.checkpoint.entries(), node.verbs.count("release all")) == (["", ""], (), 1)


@pytest.mark.virtual_time
async def test_claim_that_another_call_has_prepared_meanwhile_is_not_left(node: Node) -> None:
    """Kubelet would take it for undone while containers may have its devices."""
    await node.preparer.prepare(CLAIM)
    AwayOnce(node)

    error, answer = await asyncio.gather(node.preparer.unprepare(CLAIM), node.preparer.prepare(CLAIM))

    assert error == f"claim {CLAIM}: the nic service is away"
    assert len(_devices(answer)) == 4
    assert all(map(node.checkpoint.is_ready, node.checkpoint.entries()))


@pytest.mark.virtual_time
async def test_claim_whose_container_runs_is_undone_with_its_end(node: Node) -> None:
    """Kubelet has forgotten the pod and may go on. No service is asked before."""
    await node.preparer.prepare(CLAIM)
    container = LiveContainer(id="c1", name="c", namespace="d", pod="p", pod_uid="p", cdi_devices=("claim-u-c-nic-0",))
    node.state.containers.made(container)

    error, took_s = await elapsed_s(node.preparer.unprepare(CLAIM))
    left = {entry.device_class: (entry.is_left, entry.left_for) for entry in node.checkpoint.entries()}
    asked = list(node.verbs)
    undoing = asyncio.create_task(node.preparer.undo_left())
    node.state.containers.synchronize([])
    node.state.containers.ended("c1")
    await asyncio.sleep(1)
    undoing.cancel()

    assert (error, took_s) == ("", 1.0)
    assert left == {"cpu": (True, ()), "gpu": (True, ()), "nic": (True, ("c1",))}
    assert not any(verb.startswith("unprepare") for verb in asked)
    assert node.checkpoint.entries() == ()


async def elapsed_s(work: Awaitable[object]) -> tuple[object, float]:
    """The result, and how long it took."""
    began_s = asyncio.get_running_loop().time()
    return await work, asyncio.get_running_loop().time() - began_s


@pytest.mark.virtual_time
async def test_service_that_works_on_is_waited_for_almost_to_the_end(node: Node) -> None:
    """Its present work becomes the error a second before kubelet's call would be cut off."""
    node.trouble["gpu"] = StillAtWork("the gpu service cleans gpu-0", retry_after_s=0.4)

    answer, took_s = await elapsed_s(node.preparer.prepare(CLAIM))

    assert answer == f"claim {CLAIM}: the gpu service cleans gpu-0"
    assert DeadlineSettings().claim_s - 2.1 < took_s <= DeadlineSettings().claim_s - 1.0


@pytest.mark.virtual_time
async def test_service_that_is_away_is_tried_again_for_a_while(tmp_path: Path) -> None:
    """Kubelet itself would ask only after more than a minute. The last pause never goes beyond the limit."""
    node = Node(tmp_path, retry_s=5.0)
    node.trouble["nic"] = AWAY

    answer, took_s = await elapsed_s(node.preparer.prepare(CLAIM))

    assert answer == f"claim {CLAIM}: the nic service is away"
    assert 4.0 <= took_s <= 5.0
    assert node.verbs.count("prepare nic") >= 5


@pytest.mark.virtual_time
async def test_claim_whose_service_hangs_has_its_limit_as_error(node: Node) -> None:
    """Ours comes before kubelet's own, which would say nothing."""
    node.hangs.add("gpu")

    answer, took_s = await elapsed_s(node.preparer.prepare(CLAIM))

    limit_s = DeadlineSettings().claim_s
    assert (answer, took_s) == (f"claim {CLAIM}: not prepared within {limit_s} s", limit_s)


@pytest.mark.virtual_time
async def test_left_claim_is_undone_when_its_service_is_back(node: Node) -> None:
    """Whatever the tries until then end with."""
    await node.preparer.prepare(CLAIM)
    node.trouble["nic"] = AWAY
    await node.preparer.unprepare(CLAIM)
    undoing = asyncio.create_task(node.preparer.undo_left())
    for trouble in (AWAY, NO):
        node.trouble["nic"] = trouble
        await asyncio.sleep(5)
    still = [entry.is_left for entry in node.checkpoint.entries()]
    node.trouble.clear()
    await asyncio.sleep(5)
    first = node.checkpoint.entries()
    await node.preparer.prepare(CLAIM)
    node.trouble["gpu"] = AWAY
    await node.preparer.unprepare(CLAIM)
    node.trouble.clear()
    await asyncio.sleep(5)
    undoing.cancel()

    assert (still, first, node.checkpoint.entries()) == ([True] * 3, (), ())
    assert node.verbs.count("release all") == 2


@pytest.mark.parametrize("fails_at", [1, 2], ids=["beginning to undo", "leaving it"])
async def test_claim_stays_when_its_end_cannot_be_stored(
    node: Node, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Kubelet gets an error and asks again. What was not stored does not count."""
    await node.preparer.prepare(CLAIM)
    node.trouble["nic"] = AWAY
    change, calls = node.checkpoint.change_claim, 0

    async def full(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(28, "No space left on device", "checkpoint.json")
        return await change(*arguments)

    monkeypatch.setattr(node.checkpoint, "change_claim", full)

    error = await node.preparer.unprepare(CLAIM)

    assert error == f"claim {CLAIM}: " + (
        "cannot write checkpoint.json: No space left on device" if fails_at == 1 else "the nic service is away"
    )
    entries = node.checkpoint.entries()
    assert [(entry.is_undoing, entry.is_left) for entry in entries] == [(fails_at == 2, False)] * 3


def holding(uid: str, *, is_prepared: bool = True) -> Allocation:
    """What a claim has in the ledger."""
    owner = ClaimKey(namespace="default", name=uid.removeprefix("u-"), uid=ClaimUid(uid)).owner
    return Allocation(owner=owner, decision_id="d", is_prepared=is_prepared)


@pytest.mark.virtual_time
async def test_claim_that_only_the_ledger_has_is_undone(node: Node) -> None:
    """Not one that the checkpoint has, nor one that is not prepared; one with a container waits for its end.

    Each is tried again after a failure, and all are looked at again when the ledger went back.
    """
    await node.preparer.prepare(CLAIM)
    node.asked.clear()
    claims = (holding(CLAIM.uid), holding("u-idle", is_prepared=False), holding("u-runs"), holding("u-gone"))
    node.state.ledger = Holders(node="n1", allocations={each.owner.key: each for each in claims})
    container = LiveContainer(
        id="c1", name="c", namespace="d", pod="p", pod_uid="p", cdi_devices=("claim-u-runs-gpu-7",)
    )
    node.state.containers.made(container)
    node.trouble["ledger"] = AWAY
    undoing = asyncio.create_task(node.preparer.undo_unknown())
    await asyncio.sleep(1)
    node.trouble["ledger"] = NO
    await asyncio.sleep(5)
    failed = list(node.verbs)
    node.asked.clear()
    node.trouble.clear()
    await asyncio.sleep(5)
    waiting = list(node.verbs)
    node.asked.clear()
    node.state.containers.ended("c1")
    node.state.ledger = Holders(node="n1", allocations={claims[2].owner.key: claims[2]})
    await asyncio.sleep(5)
    ended = list(node.verbs)
    await asyncio.sleep(60)
    quiet = list(node.verbs)
    node.state.ledger = Holders(node="n1", allocations={claims[3].owner.key: claims[3]})
    node.state.ledger_went_back.announce()
    await asyncio.sleep(1)
    undoing.cancel()

    assert (failed, waiting) == (["release u-gone"] * 2, ["release u-gone"])
    assert (ended, quiet, node.verbs) == (["release u-runs"], ["release u-runs"], ["release u-runs", "release u-gone"])
