"""Who holds a device and which pods use it, by the ledger, whichever the door; and what a reset of
it touches.
"""

from __future__ import annotations

import pytest

from topobus.engine.ledger.device_users import (
    DeviceHolder,
    holders_of_devices,
    owners_of_devices,
    pods_of_devices,
    reset_together,
)
from topobus.values.device import Device
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u")
UNNAMED = Owner(kind=OwnerKind.POD, name="trainer", uid="")
GPU = (Holding(devices={"gpu": ("gpu-0",)}),)


def _owner(kind: OwnerKind, name: str = "x") -> Owner:
    return Owner(kind=kind, name=name, uid="u1")


@pytest.mark.parametrize(
    ("allocation", "device_class", "wanted"),
    [
        pytest.param(Allocation(owner=POD, holdings=GPU), "gpu", {"gpu-0": (POD,)}, id="a placed pod"),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU, pods=(POD,)), "gpu", {"gpu-0": (POD,)}, id="a claim"
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU), "gpu", {"gpu-0": ()}, id="a claim of nobody"
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.DEVICE_PLUGIN), holdings=GPU, pods=(UNNAMED,)),
            "gpu",
            {"gpu-0": (UNNAMED,)},
            id="an allocation",
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.CONTAINER, "trainer"), holdings=(Holding(cpus=CpuSet(3)),)),
            "cpu",
            {"cpu-3": (UNNAMED,)},
            id="a container",
        ),
    ],
)
def test_pods_of_devices_names_them_whatever_holds_the_device(
    allocation: Allocation, device_class: str, wanted: dict[str, tuple[Owner, ...]]
) -> None:
    """A pod itself, a claim's pods, the pod of kubelet's allocation, the pod of a container with
    CPUs of its own.
    """
    ledger = Holders(node="n", allocations={allocation.owner.key: allocation})

    assert pods_of_devices(ledger, device_class) == wanted


_BY_CLAIM = DeviceHolder(namespace="default", claim="x")


@pytest.mark.parametrize(
    ("allocation", "wanted"),
    [
        pytest.param(
            Allocation(owner=POD, holdings=(Holding(container="main", devices={"gpu": ("gpu-0",)}),)),
            (DeviceHolder(namespace="default", pod="trainer", container="main"),),
            id="a placed pod",
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.DEVICE_PLUGIN), holdings=GPU, pods=(UNNAMED,), container="main"),
            (DeviceHolder(namespace="default", pod="trainer", container="main"),),
            id="an allocation",
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.DEVICE_PLUGIN), holdings=GPU),
            (DeviceHolder(),),
            id="an allocation of a pod that is not named yet",
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU, pods=(POD,), is_prepared=True),
            (DeviceHolder(namespace="default", pod="trainer", claim="x"),),
            id="a prepared claim",
        ),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU, pods=(POD,)),
            (_BY_CLAIM,),
            id="a claim whose pod has ended",
        ),
        pytest.param(Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU), (_BY_CLAIM,), id="a claim of nobody"),
    ],
)
def test_holders_of_devices_have_the_names_that_people_know(
    allocation: Allocation, wanted: tuple[DeviceHolder, ...]
) -> None:
    """Namespace and pod, its container where kubelet allocates for it, and the claim."""
    ledger = Holders(node="n", allocations={allocation.owner.key: allocation})

    assert holders_of_devices(ledger, "gpu") == {"gpu-0": wanted}


def test_owners_of_devices_lists_each_holder_once_by_its_shown_name() -> None:
    """Two claims share a GPU; a CPU of the ledger is a device by its id.

    A class that nobody holds is empty; no ledger is nobody.
    """
    first, second = (_owner(OwnerKind.CLAIM, name) for name in ("a", "b"))
    holdings = (Holding(devices={"gpu": ("gpu-0",)}), Holding(devices={"gpu": ("gpu-0",)}, cpus=CpuSet(3)))
    ledger = Holders(
        node="n", allocations={owner.key: Allocation(owner=owner, holdings=holdings) for owner in (second, first)}
    )

    assert owners_of_devices(ledger, "gpu") == {"gpu-0": (first, second)}
    assert owners_of_devices(ledger, "cpu") == {"cpu-3": (first, second)}
    assert owners_of_devices(ledger, "nic") == {}
    assert owners_of_devices(None, "gpu") == {}


def test_reset_touches_the_parts_of_a_card_and_what_is_the_same_function() -> None:
    """A card with its parts and its virtual function.

    A part with its siblings of the same function; a neighbour never.
    """
    function = PciAddress.parse("0000:18:00.0")
    card = Device(name="gpu-0", device_class="gpu", pci=function)
    part = Device(name="gpu-0-part-a", device_class="gpu", pci=function, partition_of="gpu-0")
    child = Device(name="gpu-0-vf-1", device_class="gpu", pci=PciAddress.parse("0000:18:00.1"), parent="gpu-0")
    neighbour = Device(name="gpu-1", device_class="gpu", pci=PciAddress.parse("0000:1a:00.0"))
    nameless = Device(name="gpu-2", device_class="gpu")
    devices = (neighbour, child, part, nameless, card)

    assert reset_together(card, devices) == (card, part, child)
    assert reset_together(part, devices) == (card, part)
    assert reset_together(nameless, devices) == (nameless,)
