"""A card goes to VFIO, is opened as a virtual machine monitor opens it, and comes back to its
driver.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vm.kernel import PCI, driver, sh, state
from vm.node import Node

pytestmark = pytest.mark.short
_DEVICE, _ADDRESS = "nic-0000-63-00-0", "0000:63:00.0"
_VFIO = {"apiVersion": "topobus.dev/v1", "kind": "PassthroughParameters", "backend": "vfio"}
# linux/vfio.h
_GROUP_STATUS, _SET_CONTAINER, _SET_IOMMU, _DEVICE_DESCRIPTOR, _TYPE_1 = 0x3B67, 0x3B68, 0x3B66, 0x3B6A, 1


@contextmanager
def opened(group: str) -> Iterator[None]:
    """Open a group and its function: container, group, IOMMU, descriptor of the function."""
    container, of_group = os.open("/dev/vfio/vfio", os.O_RDWR), os.open(group, os.O_RDWR)
    try:
        status = bytearray(struct.pack("II", 8, 0))
        fcntl.ioctl(of_group, _GROUP_STATUS, status)
        assert struct.unpack("II", status)[1] & 1, "the group is not viable: a function of it has another driver"
        fcntl.ioctl(of_group, _SET_CONTAINER, struct.pack("i", container))
        fcntl.ioctl(container, _SET_IOMMU, _TYPE_1)
        os.close(fcntl.ioctl(of_group, _DEVICE_DESCRIPTOR, bytearray(_ADDRESS.encode() + b"\0")))
        yield
    finally:
        os.close(of_group)
        os.close(container)


async def test_card_in_vfio_can_be_opened_and_comes_back(nic: Node) -> None:
    """Its group also has the switch's port, which is no obstacle.

    While a program has the group open the card is not given back, and the program is named.
    """
    # A driver that is bound again makes a new interface: what was set on the old one is gone, and a
    # host's network manager sets it.
    sh("ip addr flush dev ens31; ip link set ens31 mtu 1500 down")
    before = state("ens31")
    group = (PCI / _ADDRESS / "iommu_group").resolve().name

    prepared = await nic.do("prepare", _DEVICE, _VFIO)
    assert driver(_ADDRESS) == "vfio-pci"
    assert f"/dev/vfio/{group}" in str(prepared.edits[_DEVICE].device_nodes)
    with opened(f"/dev/vfio/{group}"):
        refusal = await nic.refused("unprepare", _DEVICE)
        assert f"/dev/vfio/{group}" in str(refusal), refusal
    await nic.do("unprepare", _DEVICE)

    sh("until ip link show ens31; do sleep 0.2; done")
    assert driver(_ADDRESS) == "igb"
    assert (PCI / _ADDRESS / "driver_override").read_text().strip() == "(null)"
    assert state("ens31") == before


async def test_card_in_vfio_outlives_a_killed_service(nic: Node) -> None:
    """The next life keeps it for its claim, and gives it back to its driver."""
    await nic.do("prepare", _DEVICE, _VFIO)
    await nic.restart("nic")
    assert driver(_ADDRESS) == "vfio-pci"
    await nic.do("prepare", _DEVICE, _VFIO)
    await nic.do("unprepare", _DEVICE)
    assert driver(_ADDRESS) == "igb"
    sh("until ip link show ens31; do sleep 0.2; done; ip link set ens31 up")


async def test_card_that_the_host_uses_is_refused(nic: Node) -> None:
    """An address on the card is the host's use of it."""
    sh("ip addr add 10.5.0.1/24 dev ens31; ip link set ens31 up")
    refusal = await nic.refused("prepare", _DEVICE, _VFIO)
    assert refusal.reasons[0].code == "passthrough-busy", refusal
    assert driver(_ADDRESS) == "igb"
    sh("ip addr flush dev ens31")
    await nic.do("unprepare", _DEVICE)


async def test_iommufd_is_refused_where_the_kernel_has_none(nic: Node) -> None:
    """Debian's kernels are built without it."""
    assert sh("ls /dev/iommu 2> /dev/null || echo none") == "none\n"
    refusal = await nic.refused("prepare", _DEVICE, {**_VFIO, "backend": "iommufd"})
    assert refusal.reasons[0].code == "passthrough-unsupported", refusal
