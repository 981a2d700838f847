"""What a device service is asked for a claim's devices of a class, and what other claims mean for
that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from topobus.formats.containers.cdi import CdiDevice, CdiSpec
from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_devices import ClaimDevices
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice, ClaimAllocation
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.live_containers import StillRuns
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing
from topobus.values.edits import ContainerEdits
from topobus.values.errors import PeerUnavailable
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import Owner

CLAIM = ClaimKey(namespace="default", name="c", uid=ClaimUid("u-c"))
NO = refuse("edits-forbidden", "not that mount")


def allocated(name: str = "gpu-0", *, request: str = "r", share: str = "", is_shared: bool = False) -> AllocatedDevice:
    """A device of an allocation."""
    return AllocatedDevice(request=request, pool="n1", device=name, share_id=share, is_shared=is_shared)


def entry(*devices: AllocatedDevice, uid: str = "u-other", device_class: str = "gpu", **fields: Any) -> ClaimEntry:
    """What a claim has in the checkpoint."""
    fields = {"attempt": "a", "is_prepared": True, **fields}
    return ClaimEntry(
        namespace="default", name=uid, uid=ClaimUid(uid), device_class=device_class, devices=devices, **fields
    )


class Service:
    """A device service, and the claims beside the one that is looked at."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[PrepareRequest] = []
        self.undone: list[tuple[str, ...]] = []
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.held = ""
        self.is_shared = False
        self.checkpoint = Checkpoint(folder / "checkpoint.json", {})
        us: Any = self
        self.devices = ClaimDevices(us, self.checkpoint, self.device, lambda _: self.held)

    def device(self, device_class: str, name: str) -> Device:
        """The inventory's device, shared by the operator where the test wants that."""
        sharing = DeviceSharing(replicas=4) if self.is_shared else None
        return Device(name=name, device_class=device_class, sharing=sharing)

    async def prepare(self, _: str, request: PrepareRequest) -> Prepared:
        """Make ready what is named, when the test lets it."""
        self.asked.append(request)
        await self.going_on.wait()
        return Prepared(edits=dict.fromkeys(request.devices, ContainerEdits()))

    async def unprepare(self, _op: str, _owner: Owner, _class: str, names: Sequence[str]) -> Refusal | None:
        """Undo what is named."""
        self.undone.append(tuple(names))
        return None

    async def refuse_forbidden(self, _class: str, prepared: Prepared) -> Refusal | None:
        """Refuse what has a variable."""
        return NO if any(edits.env for edits in prepared.edits.values()) else None


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """A device service."""
    return Service(tmp_path)


async def test_request_of_a_part_names_what_concerns_its_own_devices(service: Service) -> None:
    """A claim with several requests is asked as a whole and by request. Admin access and tolerated
    sickness of another request's device are not its own.
    """
    allocation = ClaimAllocation(
        devices=(allocated("gpu-0", request="look", is_shared=True), allocated("gpu-1", request="use")),
        tolerated=("gpu-1",),
    )

    answers = await service.devices.prepare("op", CLAIM, "gpu", allocation, is_again=False)

    assert [(it.op_id, it.devices, it.looked_at, it.tolerated, it.is_again) for it in service.asked] == [
        ("op", ("gpu-0", "gpu-1"), ("gpu-0",), ("gpu-1",), False),
        ("op-of-look", ("gpu-0",), ("gpu-0",), (), False),
        ("op-of-use", ("gpu-1",), (), ("gpu-1",), False),
    ]
    assert {request: [*prepared.edits] for request, prepared in answers.by_request.items()} == {
        "look": ["gpu-0"],
        "use": ["gpu-1"],
    }


async def test_claims_of_one_device_are_prepared_one_after_the_other(service: Service) -> None:
    """Of another device at the same time."""
    service.going_on.clear()
    works = [
        asyncio.create_task(
            service.devices.prepare(name, CLAIM, "gpu", ClaimAllocation(devices=(allocated(name),)), is_again=False)
        )
        for name in ("gpu-0", "gpu-0", "gpu-1")
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    at_once = [request.devices for request in service.asked]
    service.going_on.set()
    await asyncio.gather(*works)

    assert sorted(at_once) == [("gpu-0",), ("gpu-1",)]
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("own", "other", "held", "error"),
    [
        (allocated(), entry(allocated()), "", ClaimFailed),
        (allocated(), entry(allocated(), is_prepared=False), "", None),
        (allocated(), entry(allocated(), device_class="nic"), "", None),
        (allocated(), entry(allocated("gpu-1")), "", None),
        (allocated(), entry(allocated(), uid=CLAIM.uid), "", None),
        (allocated(), entry(allocated(is_shared=True)), "", None),
        (allocated(is_shared=True), entry(allocated()), "", None),
        (allocated(is_shared=True, share="s"), entry(allocated()), "", None),
        (allocated(share="s"), entry(allocated(share="t")), "", None),
        (allocated(share="s"), entry(allocated()), "", ClaimFailed),
        (allocated(), entry(allocated(share="t")), "", ClaimFailed),
        (allocated(share="s"), entry(allocated("gpu-1")), "", None),
        (allocated(), entry(allocated(), is_undoing=True), "", PeerUnavailable),
        (allocated(), entry(allocated(), is_undoing=True), "it runs", StillRuns),
        (allocated(), entry(allocated()), "it runs", ClaimFailed),
        (allocated(), entry(allocated(), is_undoing=True, is_left=True), "", ClaimFailed),
        (allocated(), entry(allocated(), is_undoing=True, is_left=True, left_for=("c1",)), "", PeerUnavailable),
    ],
    ids=[
        "both whole",
        "not prepared",
        "another class",
        "another device",
        "itself",
        "the other looks",
        "looks",
        "looks at a share",
        "two shares",
        "share of what is held whole",
        "whole of what is shared",
        "share of another",
        "being undone",
        "held by a container",
        "running with a container",
        "left",
        "left for a container",
    ],
)
async def test_device_of_another_prepared_claim_is_refused(
    service: Service, own: AllocatedDevice, other: ClaimEntry, held: str, error: type[Exception] | None
) -> None:
    """Whatever the ledger says: containers run with what is in the checkpoint."""
    await service.checkpoint.put(entry(allocated(), uid=CLAIM.uid))
    await service.checkpoint.put(other)
    service.held = held
    seen: type[Exception] | None = None

    try:
        service.devices.check_rivals(CLAIM, "gpu", ClaimAllocation(devices=(own,)))
    except (ClaimFailed, PeerUnavailable) as err:
        seen = type(err)

    assert seen is error


@pytest.mark.parametrize(
    ("own", "other", "is_shared", "undone"),
    [
        (allocated(), entry(allocated("gpu-1")), False, True),
        (allocated(share="s"), entry(allocated(share="t")), False, False),
        (allocated(share="s"), entry(allocated(share="t")), True, True),
        (allocated(is_shared=True), entry(allocated()), True, False),
        (allocated(is_shared=True, share="s"), entry(allocated(is_shared=True, share="t")), True, False),
        (allocated(), entry(allocated(is_shared=True)), False, True),
        (allocated(is_shared=True), entry(allocated(is_shared=True)), False, False),
        (allocated(), entry(allocated(), device_class="nic"), False, True),
    ],
    ids=[
        "alone",
        "another share",
        "another share that the driver tracks",
        "looks at what is held",
        "both look at a share",
        "others only look",
        "both look",
        "another class",
    ],
)
async def test_device_is_undone_with_its_last_user(
    service: Service, own: AllocatedDevice, other: ClaimEntry, is_shared: bool, undone: bool
) -> None:
    """Shares that a driver tracks are undone each by itself."""
    own_entry = entry(own, uid=CLAIM.uid)
    await service.checkpoint.put(own_entry, other)
    service.is_shared = is_shared

    names = await service.devices.undo(own_entry, CLAIM)

    assert (names, service.undone) == ((("gpu-0",), [("gpu-0",)]) if undone else ((), []))


async def test_claim_that_is_undone_is_no_user_until_it_is_prepared_again(service: Service) -> None:
    """Of two that end together the second undoes the device. A forgotten one counts again."""
    first, second = entry(allocated(share="s"), uid="u-1"), entry(allocated(share="t"), uid="u-2")
    await service.checkpoint.put(first, second)
    ends = [await service.devices.undo(first, first.claim), await service.devices.undo(second, second.claim)]
    service.devices.forget(first)

    again = await service.devices.undo(second, second.claim)

    assert (*ends, again) == ((), ("gpu-0",), ())


@pytest.mark.parametrize(("env", "refusal"), [(None, None), ({}, None), ({"A": "1"}, NO)])
async def test_prepared_claim_is_held_to_the_present_rights(
    service: Service, env: dict[str, str] | None, refusal: Refusal | None
) -> None:
    """One that brings nothing cannot be forbidden."""
    cdi = None
    if env is not None:
        devices = (CdiDevice(name="claim-u-c-gpu-0", edits=ContainerEdits(env=env)),)
        cdi = CdiSpec(vendor="topobus.dev", device_class="gpu", devices=devices)

    assert await service.devices.forbidden(entry(allocated(), cdi=cdi)) == refusal
