"""The pods that use a device, by the ledger: whoever holds it, by whichever door."""

from __future__ import annotations

import pytest

from topobus.domain.device_users import pods_of_devices
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Allocation, Holders, Holding
from topobus.domain.request import Owner, OwnerKind

POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u")
UNNAMED = Owner(kind=OwnerKind.POD, name="trainer", uid="")
GPU = (Holding(devices={"gpu": ("gpu-0",)}),)


def _owner(kind: OwnerKind, name: str = "x") -> Owner:
    return Owner(kind=kind, name=name, uid="u1")


@pytest.mark.parametrize(
    ("allocation", "device_class", "wanted"),
    [
        pytest.param(Allocation(owner=POD, holdings=GPU), "gpu", {"gpu-0": (POD,)}, id="a placed pod"),
        pytest.param(Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU, pods=(POD,)), "gpu", {"gpu-0": (POD,)}, id="a claim"),
        pytest.param(Allocation(owner=_owner(OwnerKind.CLAIM), holdings=GPU), "gpu", {"gpu-0": ()}, id="a claim of nobody"),
        pytest.param(
            Allocation(owner=_owner(OwnerKind.DEVICE_PLUGIN), holdings=GPU, user=UNNAMED), "gpu", {"gpu-0": (UNNAMED,)}, id="an allocation"
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
    """A pod itself, a claim's pods, the pod of kubelet's allocation, the pod of a container with CPUs of its own."""
    ledger = Holders(node="n", allocations={allocation.owner.key: allocation})

    assert pods_of_devices(ledger, device_class) == wanted
