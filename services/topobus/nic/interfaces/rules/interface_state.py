"""The state of one network interface at a moment: everything that a hand-over changes or loses, so
that it can be restored.

States are read from netlink and /proc/sys (`topobus.nic.netlink.reading`). They pass through a
device's journal as JSON and come back equal. Queueing disciplines, filters, attached BPF programs,
and the offloads and channels of ethtool are not part of it, and are not restored.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from topobus.formats.first_read import ready

__all__ = ["HeldAddress", "HeldRoute", "InterfaceState", "state_from_journal", "state_to_journal"]


class HeldAddress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One address of an interface, as the kernel has it."""

    address: str
    """`10.1.2.3/24`."""
    peer: str = ""
    """The other end of a point-to-point link, without a length."""
    broadcast: str = ""
    label: str = ""
    scope: int = 0
    flags: int = 0
    """Those of IFA_FLAGS that somebody set: no route of its own, no duplicate detection, home
    address."""
    valid_s: int | None = None
    """Seconds for which it is valid; None: without limit. The host's DHCP client renews it."""
    preferred_s: int | None = None


class HeldRoute(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One route over an interface that was set explicitly. Routes that the kernel derives from
    addresses come back with them.
    """

    destination: str
    gateway: str = ""
    source: str = ""
    metric: int = 0
    table: int = 254
    scope: int = 0
    protocol: int = 4
    type: int = 1
    is_onlink: bool = False


class InterfaceState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One interface with its addresses and routes."""

    name: str
    alternative_names: tuple[str, ...] = ()
    """Sorted. The kernel finds it by each of them, and gives none of them to another one (`ip link
    property`); udev makes some for each card."""
    index: int
    mac: str
    permanent_mac: str = ""
    """The hardware's own; empty for a virtual interface, and for a virtual function, whose own is
    another one after each reset."""
    mtu: int
    least_mtu: int = 0
    largest_mtu: int = 0
    """0: the driver names none."""
    is_up: bool = False
    has_carrier: bool = False
    kind: str = ""
    """`veth`, `macvlan` and so on; empty for hardware."""
    alias: str = ""
    tx_queue_length: int = 0
    link: int = 0
    """The index of the interface below or at the other end, in the namespace
    `link_namespace`; 0: none."""
    link_namespace: int | None = None
    """None: the same namespace."""
    bus_device: str = ""
    """`pci/0000:3b:00.0`, `virtio/virtio2`: the same in every namespace; empty for a virtual
    interface."""
    boot_id: str = ""
    """In which boot of the node it was so: its indices and inodes mean nothing in another one."""
    device_inode: int = 0
    """Inode of the device's folder in sysfs: another one when the device
    was created again; 0: not known."""
    is_virtual_function: bool = False
    port_name: str = ""
    """Name of the device's port, as netlink reports it in every namespace;
    empty: the driver reports none."""
    device_port: int | None = None
    """Number of the device's port, as sysfs shows it on the host."""
    is_only_port: bool = False
    """Whether its device had no other interface on the host: then no other one can be meant,
    whatever its driver calls its permanent address."""
    master: str = ""
    """The bridge or bond that it is a port of."""
    addresses: tuple[HeldAddress, ...] = ()
    routes: tuple[HeldRoute, ...] = ()
    sysctls: dict[str, int] = {}
    """By the names of `topobus.nic.interfaces.rules.interface_fields.SYSCTLS`, those that the
    kernel has."""


def state_to_journal(state: InterfaceState) -> dict[str, Any]:
    """Write a state as JSON values."""
    fields: dict[str, Any] = msgspec.to_builtins(state)
    return fields


def state_from_journal(fields: object) -> InterfaceState:
    """Read a state from a journal.

    Errors: raises msgspec.ValidationError for fields that are no state.
    """
    return msgspec.convert(fields, type=ready(InterfaceState))
