"""What the ledger is asked for a claim, and how an attempt that it refuses ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from topobus.formats.containers.cdi import CdiDevice, CdiSpec
from topobus.formats.messages.messages import Adopted, AdoptRequest, ApiObject
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey
from topobus.gateway.claims.claim_ledger import ClaimLedger
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice, ClaimAllocation
from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR, cdi_device_name
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, Cpuset
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal, refuse

CLAIM = ClaimKey(namespace="default", name="c", uid=ClaimUid("u-c"))
TAKEN = refuse("device-taken", "gpu-0 is held by another claim")
GROUP = Device(name="cpu-machine", device_class="cpu", near_cpus=CpuSet.parse("0-7"), allows_multiple=True)


def entry(device_class: str = "gpu", uid: ClaimUid = CLAIM.uid, cpus: str = "", **fields: Any) -> ClaimEntry:
    """One claim's devices of a class, with exclusive CPUs."""
    devices: tuple[AllocatedDevice, ...] = ()
    cdi = None
    if cpus:
        devices = (AllocatedDevice(request="r", pool="n1/cpu", device="cpu-machine"),)
        edits = ContainerEdits(cpuset=Cpuset(cpus=CpuSet.parse(cpus)))
        brought = (CdiDevice(name=cdi_device_name(uid, "cpu-machine"), edits=edits),)
        cdi = CdiSpec(vendor=CDI_VENDOR, device_class=device_class, devices=brought)
    fields = {"attempt": "a", **fields}
    return ClaimEntry(
        namespace="default", name="c", uid=uid, device_class=device_class, devices=devices, cdi=cdi, **fields
    )


class Ledger:
    """The ledger, a releaser where the test wants one, and the API server's claim."""

    def __init__(self, folder: Path, *, has_releaser: bool = False) -> None:
        self.adopted: list[tuple[AdoptRequest, CpuSet]] = []
        self.released: list[tuple[str, bool]] = []
        self.refusals: list[Refusal] = []
        self.frees = False
        self.claim: ApiObject | None = None
        self.is_unreadable = False
        self.owned_cpus: CpuSet | None = None
        self.handed_out: list[str] = []
        self.checkpoint = Checkpoint(folder / "checkpoint.json", {})
        us: Any = self
        state: Any = SimpleNamespace(node="n1", device=lambda *_: GROUP, hand_out=self.hand_out)
        self.ledger = ClaimLedger(state, us, self.read, self.checkpoint, us if has_releaser else None)

    def hand_out(self, device_class: str, *_: object) -> None:
        """Note what is given."""
        self.handed_out.append(device_class)

    async def adopt(self, request: AdoptRequest, *, but_cpus: CpuSet | None = None) -> Adopted | Refusal:
        """Refuse as long as the test wants."""
        self.adopted.append((request, but_cpus or CpuSet()))
        return self.refusals.pop(0) if self.refusals else Adopted(decision_id="d", cpus={"cpu-machine": CpuSet(1)})

    async def release(self, op_id: str, *_: object, is_undone: bool, keeps_devices: bool) -> Refusal | None:
        """Note the end."""
        assert is_undone
        self.released.append((op_id, keeps_devices))
        return self.refusals.pop(0) if self.refusals else None

    async def settle(self) -> bool:
        """Release claims that are over."""
        return self.frees

    async def read(self, _namespace: str, _name: str) -> ApiObject | None:
        """Read the claim."""
        if self.is_unreadable:
            raise ConfigError("no claim can be read", next_step="")
        return self.claim


def allocation(*, is_looking: bool = True) -> ClaimAllocation:
    """A GPU of its own, perhaps one that it looks at, and a group of CPUs as a whole."""
    devices = [
        AllocatedDevice(request="r", pool="n1", device="gpu-0"),
        AllocatedDevice(request="c", pool="n1/cpu", device="cpu-machine"),
    ]
    if is_looking:
        devices.append(AllocatedDevice(request="look", pool="n1", device="gpu-1", is_shared=True))
    return ClaimAllocation(devices=tuple(devices), held={"cpu": ("cpu-machine",), "gpu": ("gpu-0",)})


async def test_what_a_claim_looks_at_is_recorded_before_what_it_holds(tmp_path: Path) -> None:
    """A refusal of it has taken nothing. What is held counts as prepared from then on."""
    ledger = Ledger(tmp_path)
    entries = [entry("cpu"), entry()]

    adopted = await ledger.ledger.adopt(entries, CLAIM, allocation())

    assert [(it.op_id, it.devices, it.is_shared, it.is_prepared) for it, _ in ledger.adopted] == [
        ("a-adopt-shared", {"gpu": ("gpu-1",)}, True, False),
        ("a-adopt", {"cpu": ("cpu-machine",), "gpu": ("gpu-0",)}, False, True),
    ]
    assert [each.cpus for each in adopted] == [{"cpu-machine": CpuSet(1)}] * 2
    assert ledger.handed_out == ["cpu", "gpu"]


@pytest.mark.parametrize(("owned", "count"), [(None, 8), (CpuSet.parse("4-9"), 4)])
async def test_group_as_a_whole_is_as_many_cpus_as_may_be_given_of_it(
    tmp_path: Path, owned: CpuSet | None, count: int
) -> None:
    """A cluster without consumable capacity gives a group like any device."""
    ledger = Ledger(tmp_path)
    ledger.owned_cpus = owned

    await ledger.ledger.adopt([entry()], CLAIM, allocation(is_looking=False))

    assert ledger.adopted[0][0].group_cpus == {"cpu-machine": count}


async def test_cpus_of_other_running_claims_are_not_chosen(tmp_path: Path) -> None:
    """Containers may run on them, also when a lost ledger does not have them. Its own may be chosen
    again.
    """
    ledger = Ledger(tmp_path)
    await ledger.checkpoint.put(entry("cpu", cpus="1", is_prepared=True))
    await ledger.checkpoint.put(entry("cpu", ClaimUid("u-2"), "2-3", is_prepared=True))
    await ledger.checkpoint.put(entry("cpu", ClaimUid("u-3"), "4"))

    await ledger.ledger.adopt([entry()], CLAIM, allocation(is_looking=False))

    assert ledger.adopted[0][1] == CpuSet.parse("2-3")


@pytest.mark.parametrize(
    ("has_releaser", "frees", "refusals", "tries"),
    [(False, True, 1, 1), (True, False, 1, 1), (True, True, 2, 2)],
    ids=["no releaser", "nothing to release", "refused twice"],
)
async def test_refused_claim_leaves_the_checkpoint(
    tmp_path: Path, has_releaser: bool, frees: bool, refusals: int, tries: int
) -> None:
    """Nothing was taken, so nothing has to be undone."""
    ledger = Ledger(tmp_path, has_releaser=has_releaser)
    ledger.frees, ledger.refusals = frees, [TAKEN] * refusals
    entries = [entry("cpu"), entry()]
    await ledger.checkpoint.put(*entries)

    with pytest.raises(ClaimFailed, match="gpu-0 is held by another claim"):
        await ledger.ledger.adopt(entries, CLAIM, allocation(is_looking=False))

    assert (len(ledger.adopted), ledger.checkpoint.entries(), ledger.handed_out) == (tries, (), [])


async def test_claim_is_adopted_by_another_operation_when_a_holder_was_over(tmp_path: Path) -> None:
    """The refused operation would be refused for ever. All classes have the new attempt."""
    ledger = Ledger(tmp_path, has_releaser=True)
    ledger.frees, ledger.refusals = True, [TAKEN]
    entries = [entry("cpu"), entry()]
    await ledger.checkpoint.put(*entries)

    adopted = await ledger.ledger.adopt(entries, CLAIM, allocation(is_looking=False))

    (attempt,) = {each.attempt for each in adopted}
    assert [it.op_id for it, _ in ledger.adopted] == ["a-adopt", f"{attempt}-adopt"]
    assert attempt != "a"
    assert [each.attempt for each in ledger.checkpoint.entries()] == [attempt, attempt]


HERE = {"allocation": {"devices": {"results": [{"driver": "d", "pool": "n1", "device": "x", "request": "r"}]}}}


@pytest.mark.parametrize(
    ("has_releaser", "status", "is_unreadable", "keeps"),
    [(True, None, False, True), (False, None, False, False), (False, HERE, False, True), (False, None, True, True)],
    ids=["a releaser releases it", "deallocated", "still allocated", "no claims are read here"],
)
async def test_undone_claim_keeps_its_devices_while_it_may_be_allocated(
    tmp_path: Path, has_releaser: bool, status: dict[str, Any] | None, is_unreadable: bool, keeps: bool
) -> None:
    """Whoever deallocates it releases them."""
    ledger = Ledger(tmp_path, has_releaser=has_releaser)
    ledger.is_unreadable = is_unreadable
    if status is not None:
        metadata = {"uid": CLAIM.uid}
        ledger.claim = ApiObject(api_version="v1", kind="ResourceClaim", metadata=metadata, status=status)

    await ledger.ledger.let_go("a", CLAIM)

    assert ledger.released == [("a-keep" if keeps else "a-release", keeps)]
    assert ledger.ledger.is_settled is has_releaser


async def test_end_that_the_ledger_refuses_is_the_claims_failure(tmp_path: Path) -> None:
    """The claim stays as it is, and kubelet gets the reason."""
    ledger = Ledger(tmp_path, has_releaser=True)
    ledger.refusals = [TAKEN]

    with pytest.raises(ClaimFailed, match="held by another claim"):
        await ledger.ledger.let_go("a", CLAIM)
