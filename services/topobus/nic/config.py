"""Settings of the nic service: those of every device service, and which interfaces without a PCI
function are offered.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta, Struct

from topobus.devicekit.settings import DeviceServiceSettings
from topobus.nic.cni.settings import CniSettings
from topobus.nic.interfaces.rules.interface_config import SUBMODES

__all__ = ["InterfaceRule", "InterfaceSettings", "NicSettings", "SharedInterface", "VirtualFunctions"]

_GLOB_CHARACTERS = frozenset("*?[")


class InterfaceRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interfaces that are offered by name and kind, both of which must fit."""

    name: str = "*"
    """The interface's name, or a pattern of the shell's kind: `tenant-*`. Only a name without a
    pattern offers an interface over which the node has an address or a route of its own, and one
    that is a port of a bridge or bond, as the ends of the node's other pods are."""
    kind: str = ""
    """What the interface is: `veth`, `bridge`, `bond`, `vlan`, `tun`, `tap`, `scalable-function` …,
    or a pattern. Empty: any kind."""

    def __post_init__(self) -> None:
        """Refuse a rule that offers everything."""
        if not self.name.strip("*") and not self.kind.strip("*"):
            raise ValueError(
                "an interface rule offers every interface of the node; wanted a name or a kind, such as "
                "{name = 'tenant-*', kind = 'veth'}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the rule names one interface."""
        return bool(self.name) and not _GLOB_CHARACTERS & set(self.name)

    def fits(self, name: str, kind: str) -> bool:
        """Return whether the rule includes an interface."""
        return fnmatchcase(name, self.name) and fnmatchcase(kind, self.kind or "*")


class SharedInterface(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An interface that several pods may have at once, each through a child of it."""

    name: str
    """The interface's exact name. A PCI function's interface may be named as well: it is then
    offered for sharing and no longer as a whole. The interface below the node's default route is
    allowed here, because sharing does not move it."""
    mode: Literal["macvlan", "ipvlan"] = "macvlan"
    """What a child is: `macvlan` has a MAC of its own, `ipvlan` its parent's, for switches and
    clouds that accept one MAC a port."""
    submode: str = ""
    """macvlan: `bridge` (empty means this), `private`, `vepa` or `passthru`; ipvlan: `l2` (empty
    means this), `l3` or `l3s`."""
    shares: Annotated[int, Meta(ge=1, le=1024)] = 16
    """How many pods may have one. 16: what a switch port that counts MAC addresses usually accepts,
    with room for the node's own."""

    def __post_init__(self) -> None:
        """Refuse names that are patterns, and submodes that do not fit."""
        if not self.name or self.name == "lo" or _GLOB_CHARACTERS & set(self.name):
            raise ValueError(f"name is {self.name!r}, wanted the name of one interface that is not lo")
        submodes = SUBMODES[self.mode]
        if self.submode and self.submode not in submodes:
            raise ValueError(f"submode is {self.submode!r}, wanted for {self.mode} one of {', '.join(submodes)}")
        if self.submode == "passthru" and self.shares > 1:
            raise ValueError(f"shares is {self.shares}, wanted 1: in submode passthru an interface has one child")


class InterfaceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which interfaces that are no PCI function of their own are offered."""

    offer: tuple[InterfaceRule, ...] = ()
    """Interfaces that pods may have for themselves. Empty, as by default: none, for the node's own
    bridges and its pods' veths look like any other."""
    share: tuple[SharedInterface, ...] = ()
    """Interfaces that pods share: each claim gets a child of its own, which is deleted when the pod
    ends."""
    kept_namespaces_dir: str = "/run/topobus/netns"
    """Where the network namespace of a pod is kept (bind-mounted) until its interface is back on
    the host, so that a virtual interface outlives a pod that ends while services are away. Below
    /run, for no namespace outlives a reboot. In a container it lasts as long as the container does,
    unless the folder is mounted with Bidirectional propagation."""

    def __post_init__(self) -> None:
        """Refuse an interface that is to be shared in two ways."""
        names = [shared.name for shared in self.share]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"share names {name!r} twice, wanted once")

    def shared(self, name: str) -> SharedInterface | None:
        """Return how an interface is shared, or None when it is not."""
        return next((shared for shared in self.share if shared.name == name), None)


class VirtualFunctions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many virtual functions a physical function must have."""

    address: str
    """PCI address of the physical function: `0000:3b:00.0`."""
    count: Annotated[int, Meta(ge=0, le=65535)]
    """0: none, and the physical function itself is offered. The card's limit is in its
    sriov_totalvfs."""


class NicSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the nic service."""

    interfaces: InterfaceSettings = InterfaceSettings()
    """Interfaces without a PCI function of their own (plugin `linux-netdev`);
    docs/how-to/put-a-nic-into-a-pod.md has an example."""
    cni: CniSettings = CniSettings()
    """Attaching through CNI plugins; docs/how-to/attach-through-cni.md."""
    virtual_functions: tuple[VirtualFunctions, ...] = ()
    """Physical functions whose number of virtual functions this service keeps. It changes the number
    only while they are not in use, and needs a writable /sys. Empty: none, because on most nodes an
    operator of the cluster or the boot sets the number, and two of them would undo each other's
    work."""
