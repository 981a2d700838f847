"""The opaque configuration of a network interface in a claim or class: its values, as users write
them and as a driver reads them.

`topobus.nic.interfaces.rules.interface_reading` reads them from a claim, and
`topobus.nic.interfaces.rules.interface_checks` compares them with a device. A field that is None
was not written, and the interface keeps what it has. Names in JSON are camelCase, and
docs/reference/nic-configuration.md lists them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from topobus.values.device import Device

__all__ = [
    "CONFIG_KIND",
    "CONFIG_VERSION",
    "SUBMODES",
    "InterfaceConfig",
    "InterfaceFields",
    "Neighbour",
    "RdmaFields",
    "Route",
    "Rule",
    "ShareFields",
    "VfFields",
    "interface_of",
]

CONFIG_VERSION = "nic.topobus.dev/v1"
CONFIG_KIND = "Interface"
SUBMODES = {"macvlan": ("bridge", "private", "vepa", "passthru"), "ipvlan": ("l2", "l3", "l3s")}
"""Of a share, by mode; the first counts where none is written."""


class _Wire(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Camel-case names in JSON. Fields with their default are left out."""


class InterfaceFields(_Wire, frozen=True, kw_only=True):
    """The interface as the pod is to see it."""

    name: str | None = None
    """At most 15 bytes. None: the host's name for it."""
    mtu: int | None = None
    """Bytes; None: as on the host."""
    mac: str | None = None
    """Lower case with colons; None: as on the host."""
    addresses: tuple[str, ...] | None = None
    """`10.1.2.3/24`, `fd00::3/64`, always with the length. None: those that the host gave the
    interface, unless a CNI chain brings its own; an empty list: none."""
    up: bool | None = None
    """Whether the interface is switched on in the pod; None: it is."""
    duplicate_address_detection: str | None = None
    """For IPv6: `wait` until the kernel has found each address unique, `background` (None means
    this), or `off`."""


class Route(_Wire, frozen=True, kw_only=True):
    """One route over the interface."""

    destination: str
    """`10.0.0.0/8` or `::/0`. A user may write `default` where a gateway gives the family."""
    gateway: str | None = None
    source: str | None = None
    """The address that packets of this route leave with, where the interface has several."""
    metric: int | None = None
    table: int | None = None
    """None: the main table (254)."""
    scope: str | None = None
    """`link`, `global` or `host`; None: `link` without a gateway, else `global`."""
    onlink: bool = False
    """The gateway is a neighbour though no address of the interface has it in its network."""


class Rule(_Wire, frozen=True, kw_only=True):
    """One rule of policy routing: which table routes what."""

    source: str | None = field(default=None, name="from")
    destination: str | None = field(default=None, name="to")
    table: int
    priority: int
    """Required: without it, two rules of one claim have an order that depends on who came first."""
    family: str | None = None
    """`ipv4` or `ipv6`, where neither `from` nor `to` gives it."""


class Neighbour(_Wire, frozen=True, kw_only=True):
    """One permanent entry of the ARP or neighbour table."""

    address: str
    mac: str


class VfFields(_Wire, frozen=True, kw_only=True):
    """What the physical function does for this virtual function: what is to be so, or is so by the
    kernel's list.

    None: it is left as it is, or the driver does not show it. Needs a device that is a virtual
    function.
    """

    mac: str | None = None
    """The hardware address that the physical function gives it; a pod cannot change it unless it is
    trusted."""
    vlan: int | None = None
    """The switch tag; 0: none."""
    qos: int | None = None
    """Priority in the tag, 0 to 7."""
    vlan_protocol: str | None = None
    """`802.1Q` or `802.1ad`."""
    trust: bool | None = None
    spoof_check: bool | None = None
    link_state: str | None = None
    """`auto`, `enable` or `disable`."""
    min_tx_rate: int | None = None
    """Mbit/s; 0: none."""
    max_tx_rate: int | None = None
    """Mbit/s; 0: no limit."""


class RdmaFields(_Wire, frozen=True, kw_only=True):
    """How the pod gets the RDMA device of the interface."""

    mode: str = "shared"
    """`shared`: device nodes only. `exclusive`: the RDMA device moves into the pod's network
    namespace with the interface."""


class ShareFields(_Wire, frozen=True, kw_only=True):
    """The pod gets a child of the device, and the device stays on the host for others."""

    mode: str
    """`macvlan` or `ipvlan`."""
    submode: str | None = None
    """macvlan: `bridge` (None means this), `private`, `vepa` or `passthru`. ipvlan: `l2` (None
    means this), `l3` or `l3s`."""


class InterfaceConfig(_Wire, frozen=True, kw_only=True):
    """The merged configuration of one interface, of all classes and claims."""

    mode: str | None = None
    """`pod`: the interface is handed over (None means this). `host`: it stays on the host, and
    containers get device nodes and variables alone."""
    interface: InterfaceFields = InterfaceFields()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    sysctls: dict[str, int] = {}
    """`net.ipv4.conf.IFNAME.rp_filter` and the like. IFNAME is replaced by the interface's name in
    the pod."""
    vf: VfFields | None = None
    rdma: RdmaFields | None = None
    share: ShareFields | None = None
    cni: dict[str, Any] | None = None
    """A CNI network configuration; read by `topobus.nic.cni`."""

    @property
    def stays_on_host(self) -> bool:
        """Whether the interface is not handed over."""
        return self.mode == "host"

    @property
    def is_rdma_exclusive(self) -> bool:
        """Whether the RDMA device leaves the host with the interface."""
        return self.rdma is not None and self.rdma.mode == "exclusive"

    @property
    def has_own_addressing(self) -> bool:
        """Whether addresses come from a CNI chain when the interface is attached."""
        return self.cni is not None


def interface_of(device: Device) -> str:
    """Return the name of the device's interface on the host, or "" when it has none."""
    name = device.attributes.get("interface", "")
    return name if isinstance(name, str) else ""
