"""Neighbours of a pod learn at once which interface has an address now."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("pyroute2", reason="NOT CHECKED: pyroute2 is not installed (extra nic)")

from support.hand_over_rig import FULL, TAG, Rig, configured, rig
from support.real_interfaces import ip, why_not_here
from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.netlink.hand_over import hand_over
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.take_back import take_back
from topobus.values.sandbox import AttachedInterface

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "interfaces can be made"),
]


@pytest.fixture
def machine() -> Iterator[Rig]:
    """Two namespaces with an interface to hand over."""
    with rig() as made:
        yield made


@pytest.mark.parametrize("address", ["10.0.0.9", "fd00::9"])
def test_neighbours_learn_at_once_where_an_address_is_now(machine: Rig, address: str) -> None:
    """Another pod had the address a moment ago, and a neighbour remembers its hardware address: it
    is told, instead of sending there until it gives up.

    Between hosts a switch keeps the neighbour's link up. Here it goes down with the
    interface that moves, and a kernel that notes this in time (it looks once a second)
    forgets the neighbour by itself.
    """
    before, record = machine.state(), DeviceRecord()
    old_mac = "02:00:00:00:00:55"
    ip("-n", machine.world, "neigh", "replace", address, "lladdr", old_mac, "dev", "far", "nud", "reachable")

    hand_over(machine.places, "eth1", machine.namespace, configured(**FULL), record, tag=TAG)
    end = time.monotonic() + 60.0
    while old_mac in (remembered := ip("-n", machine.world, "neigh", "show", address)) and time.monotonic() < end:
        pass  # each look is a process of its own, and the kernel tells nobody
    take_back(machine.places, machine.namespace, record)

    assert FULL["interface"]["mac"] in remembered or "lladdr" not in remembered
    assert machine.state() == before


def test_neighbours_are_told_nothing_when_the_claim_says_so(machine: Rig) -> None:
    """A setting of the claim wins."""
    record, silent = DeviceRecord(), {"net.ipv4.conf.IFNAME.arp_notify": 0}

    hand_over(machine.places, "eth1", machine.namespace, configured(**{**FULL, "sysctls": silent}), record, tag=TAG)
    inside = machine.state("net1", machine.namespace)

    assert inside.sysctls["net.ipv4.conf.IFNAME.arp_notify"] == 0


def test_interface_is_handed_over_when_settings_cannot_be_written(machine: Rig) -> None:
    """Telling the neighbours is a help and no promise: without a writable /proc/sys the pod has its
    interface all the same.
    """
    record = DeviceRecord()
    places = Places(proc="/nonexistent")

    attached = hand_over(
        places,
        "eth1",
        machine.namespace,
        configured(interface={"name": "net1", "addresses": ["10.0.0.9/24"]}),
        record,
        tag=TAG,
    )

    assert isinstance(attached, AttachedInterface)
