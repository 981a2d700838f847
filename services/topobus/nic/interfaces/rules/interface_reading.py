"""Reads the opaque configurations of classes and claims as one InterfaceConfig.

Configurations come in the order of `PrepareContext.config_of(device)`, classes before claims. The
result is in canonical form, and a Refusal has one reason for each wrong field. Nothing here depends
on a device: `topobus.nic.interfaces.rules.interface_checks` compares with one.

Precedence: of two configurations that write one field, the later one counts, so a claim refines its
class. Lists (addresses, routes, rules, neighbours) and `cni` are replaced as a whole, `sysctls` by
name. The fields that decide who may reach whom (`mode`, `vf`, `share`) keep their first value. An
administrator's class that sets a VLAN keeps it, and a claim that writes another one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from topobus.formats.first_read import ready
from topobus.formats.kubernetes.classic.classic_parameters import SHARING_KIND
from topobus.formats.kubernetes.shape import Problem, check_names, did_you_mean
from topobus.nic.interfaces.rules.interface_config import (
    CONFIG_KIND,
    CONFIG_VERSION,
    SUBMODES,
    InterfaceConfig,
    InterfaceFields,
    Neighbour,
    RdmaFields,
    Route,
    Rule,
    ShareFields,
    VfFields,
)
from topobus.nic.interfaces.rules.interface_fields import SYSCTLS, Faults, Interface
from topobus.values.outcome import Reason, Refusal

__all__ = ["read_interface_config"]

S = TypeVar("S", bound=Struct)

_MODES = ("pod", "host")
_DAD = ("wait", "background", "off")
_SCOPES = ("global", "link", "host")
_FAMILIES = ("ipv4", "ipv6")
_PROTOCOLS = ("802.1Q", "802.1ad")
_LINK_STATES = ("auto", "enable", "disable")
_RDMA_MODES = ("shared", "exclusive")
# 12 bits, of which 4095 is reserved (IEEE 802.1Q).
_LARGEST_VLAN = 4094
_LARGEST_U32 = 2**32 - 1
# A claim's configuration has 10 KiB at most (resource.k8s.io), so this limit only keeps one netlink
# round within its time.
_MOST_ENTRIES = 256
# The rules of every namespace: local at 0, main at 32766, default at 32767.
_LARGEST_PRIORITY = 32765


def read_interface_config(entries: Sequence[Mapping[str, Any]]) -> InterfaceConfig | Refusal:
    """Read and merge all entries of kind Interface.

    Shapes: entries — classes before claims; of kind Interface, or SharingParameters, which are read
    elsewhere. result — canonical: lower-case hardware addresses, networks without bits of a host;
    the default when there is no entry.
    Errors: raises nothing; returns a Refusal that names each wrong field as
    `config[1].interface.mtu`.
    >>> read_interface_config([{"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": {"mtu": 67}}]).reasons[0].message
    'config[0].interface.mtu is 67, wanted 68 to 65535 bytes'
    """  # noqa: E501
    faults = Faults()
    merged = InterfaceConfig()
    for index, entry in enumerate(entries):
        where = f"config[{index}]"
        config = _read_entry(where, entry, faults)
        if config is not None:
            merged = _merge(where, merged, config, faults)
    if not faults.reasons:
        _check_together(merged, faults)
    return faults.refusal() or merged


def _read_entry(where: str, entry: object, faults: Faults) -> InterfaceConfig | None:
    if not isinstance(entry, Mapping):
        faults.wrong(where, entry, f"an object of kind {CONFIG_KIND}")
        return None
    kind, version = entry.get("kind"), entry.get("apiVersion")
    if kind == SHARING_KIND:
        return None
    if kind != CONFIG_KIND:
        faults.wrong(
            f"{where}.kind",
            kind,
            f"{CONFIG_KIND} or {SHARING_KIND}{did_you_mean(str(kind), (CONFIG_KIND, SHARING_KIND))}",
        )
        return None
    if version != CONFIG_VERSION:
        faults.wrong(f"{where}.apiVersion", version, CONFIG_VERSION)
        return None
    problems: list[Problem] = []
    try:
        body = {key: value for key, value in entry.items() if key not in ("apiVersion", "kind")}
        plain = check_names(body, InterfaceConfig, where, {}, problems)
        config = msgspec.convert(plain, type=ready(InterfaceConfig))
    except RecursionError:
        faults.wrong(where, "nested too deeply", "an object of few levels")
        return None
    except msgspec.ValidationError as err:
        _note(problems, faults)
        message, at, path = str(err).partition(" - at `$")
        field = where + path.rstrip("`") if at else where
        faults.reasons.append(
            Reason(code="interface-config-invalid", message=f"{field}: {message}", facts={"field": field})
        )
        return None
    _note(problems, faults)
    return _Entry(where, faults).checked(config)


def _note(problems: Sequence[Problem], faults: Faults) -> None:
    for problem in problems:
        faults.reasons.append(
            Reason(code="interface-config-invalid", message=str(problem), facts={"field": problem.path})
        )


class _Entry:
    """Checks each field of one entry by itself, and returns it in canonical form."""

    def __init__(self, where: str, faults: Faults) -> None:
        self._where, self._faults = where, faults

    def checked(self, config: InterfaceConfig) -> InterfaceConfig:
        where, faults = self._where, self._faults
        for name, entries in (("routes", config.routes), ("rules", config.rules), ("neighbours", config.neighbours)):
            if len(entries) > _MOST_ENTRIES:
                faults.wrong(f"{where}.{name}", f"{len(entries)} entries", f"{_MOST_ENTRIES} at most")
                return config
        return InterfaceConfig(
            mode=self._word(f"{where}.mode", config.mode, _MODES),
            interface=self._interface(config.interface),
            routes=tuple(self._route(f"{where}.routes[{index}]", route) for index, route in enumerate(config.routes)),
            rules=tuple(self._rule(f"{where}.rules[{index}]", rule) for index, rule in enumerate(config.rules)),
            neighbours=tuple(
                self._neighbour(f"{where}.neighbours[{index}]", entry) for index, entry in enumerate(config.neighbours)
            ),
            sysctls=self._sysctls(config.sysctls),
            vf=self._vf(config.vf) if config.vf is not None else None,
            rdma=self._rdma(config.rdma) if config.rdma is not None else None,
            share=self._share(config.share) if config.share is not None else None,
            cni=config.cni,
        )

    def _interface(self, fields: InterfaceFields) -> InterfaceFields:
        where, faults = f"{self._where}.interface", self._faults
        addresses: list[Interface] = []
        if len(fields.addresses or ()) > _MOST_ENTRIES:
            faults.wrong(f"{where}.addresses", f"{len(fields.addresses or ())} addresses", f"{_MOST_ENTRIES} at most")
            return fields
        for index, text in enumerate(fields.addresses or ()):
            address = faults.address(f"{where}.addresses[{index}]", text)
            if address is not None and any(address.ip == other.ip for other in addresses):
                faults.wrong(f"{where}.addresses[{index}]", text, "an address that is in the list once")
            elif address is not None:
                addresses.append(address)
        return InterfaceFields(
            name=faults.name(f"{where}.name", fields.name) if fields.name is not None else None,
            mtu=faults.mtu(f"{where}.mtu", fields.mtu) if fields.mtu is not None else None,
            mac=faults.mac(f"{where}.mac", fields.mac) if fields.mac is not None else None,
            addresses=tuple(map(str, addresses)) if fields.addresses is not None else None,
            up=fields.up,
            duplicate_address_detection=self._word(
                f"{where}.duplicateAddressDetection", fields.duplicate_address_detection, _DAD
            ),
        )

    def _route(self, where: str, route: Route) -> Route:
        faults = self._faults
        gateway = faults.host(f"{where}.gateway", route.gateway) if route.gateway is not None else None
        destination = route.destination
        if destination == "default":
            if route.gateway is None:
                faults.wrong(
                    f"{where}.destination", destination, "0.0.0.0/0 or ::/0, since no gateway gives the family"
                )
            destination = "::/0" if ":" in (gateway or "") else "0.0.0.0/0"
        network = faults.network(f"{where}.destination", destination)
        source = faults.host(f"{where}.source", route.source) if route.source is not None else None
        for name, text in (("gateway", gateway), ("source", source)):
            if text is not None and network is not None and (":" in text) != (network.version == 6):
                faults.wrong(f"{where}.{name}", text, f"an address of the family of {network}")
        if route.onlink and route.gateway is None:
            faults.wrong(f"{where}.onlink", got=True, wanted="a gateway beside it")
        scope = self._word(f"{where}.scope", route.scope, _SCOPES)
        if scope is not None and scope != "global" and route.gateway is not None:
            faults.wrong(f"{where}.scope", scope, "global, since packets go by a gateway")
        self._range(f"{where}.metric", route.metric, 0, _LARGEST_U32)
        self._table(f"{where}.table", route.table)
        return structs.replace(
            route,
            destination=str(network) if network is not None else destination,
            gateway=gateway,
            source=source,
            scope=scope,
        )

    def _rule(self, where: str, rule: Rule) -> Rule:
        faults = self._faults
        source = faults.network(f"{where}.from", rule.source) if rule.source is not None else None
        destination = faults.network(f"{where}.to", rule.destination) if rule.destination is not None else None
        family = self._word(f"{where}.family", rule.family, _FAMILIES)
        families = {f"ipv{network.version}" for network in (source, destination) if network is not None} | (
            {family} if family else set()
        )
        if not families and rule.source is None and rule.destination is None:
            faults.wrong(f"{where}.family", rule.family, "ipv4 or ipv6, since neither from nor to gives the family")
        elif len(families) > 1:
            faults.wrong(where, ", ".join(sorted(families)), "from, to and family of one family")
        self._table(f"{where}.table", rule.table)
        faults.number(f"{where}.priority", rule.priority, 1, _LARGEST_PRIORITY)
        return structs.replace(
            rule,
            source=str(source) if source is not None else rule.source,
            destination=str(destination) if destination is not None else rule.destination,
            family=family,
        )

    def _neighbour(self, where: str, neighbour: Neighbour) -> Neighbour:
        address = self._faults.host(f"{where}.address", neighbour.address)
        mac = self._faults.mac(f"{where}.mac", neighbour.mac)
        return Neighbour(address=address or neighbour.address, mac=mac or neighbour.mac)

    def _sysctls(self, sysctls: Mapping[str, int]) -> dict[str, int]:
        for name, value in sorted(sysctls.items()):
            where = f"{self._where}.sysctls[{name}]"
            if name not in SYSCTLS:
                # For a name that is no interface setting at all, the nearest one would be a wrong
                # suggestion.
                nearest = (
                    did_you_mean(name, sorted(SYSCTLS))
                    if ".conf." in name
                    else ", all of net.ipv4.conf.IFNAME or net.ipv6.conf.IFNAME"
                )
                self._faults.wrong(where, value, f"a setting that a claim may have{nearest}")
            else:
                self._faults.number(where, value, *SYSCTLS[name])
        return dict(sorted(sysctls.items()))

    def _vf(self, vf: VfFields) -> VfFields:
        where, faults = f"{self._where}.vf", self._faults
        self._range(f"{where}.vlan", vf.vlan, 0, _LARGEST_VLAN)
        self._range(f"{where}.qos", vf.qos, 0, 7)
        self._range(f"{where}.minTxRate", vf.min_tx_rate, 0, _LARGEST_U32)
        self._range(f"{where}.maxTxRate", vf.max_tx_rate, 0, _LARGEST_U32)
        return structs.replace(
            vf,
            mac=faults.mac(f"{where}.mac", vf.mac) if vf.mac is not None else None,
            vlan_protocol=self._word(f"{where}.vlanProtocol", vf.vlan_protocol, _PROTOCOLS),
            link_state=self._word(f"{where}.linkState", vf.link_state, _LINK_STATES),
        )

    def _rdma(self, rdma: RdmaFields) -> RdmaFields:
        return RdmaFields(mode=self._faults.word(f"{self._where}.rdma.mode", rdma.mode, _RDMA_MODES) or rdma.mode)

    def _share(self, share: ShareFields) -> ShareFields:
        where = f"{self._where}.share"
        mode = self._faults.word(f"{where}.mode", share.mode, tuple(SUBMODES))
        submode = self._word(f"{where}.submode", share.submode, SUBMODES[mode]) if mode is not None else share.submode
        return ShareFields(mode=mode or share.mode, submode=submode)

    def _word(self, where: str, value: str | None, words: Sequence[str]) -> str | None:
        return self._faults.word(where, value, words) if value is not None else None

    def _range(self, where: str, value: int | None, least: int, most: int) -> None:
        if value is not None:
            self._faults.number(where, value, least, most)

    def _table(self, where: str, value: int | None) -> None:
        self._range(where, value, 1, _LARGEST_U32)
        if value == 255:
            self._faults.wrong(where, value, "another table: 255 is the kernel's own (local)")


def _merge(where: str, merged: InterfaceConfig, later: InterfaceConfig, faults: Faults) -> InterfaceConfig:
    if merged.mode is not None and later.mode not in (None, merged.mode):
        faults.wrong(f"{where}.mode", later.mode, f"{merged.mode!r}, which an earlier configuration (a class) fixes")
    return InterfaceConfig(
        mode=merged.mode or later.mode,
        interface=_refine(merged.interface, later.interface),
        routes=later.routes or merged.routes,
        rules=later.rules or merged.rules,
        neighbours=later.neighbours or merged.neighbours,
        sysctls=dict(sorted({**merged.sysctls, **later.sysctls}.items())),
        vf=_fixed(f"{where}.vf", merged.vf, later.vf, faults),
        rdma=later.rdma or merged.rdma,
        share=_fixed(f"{where}.share", merged.share, later.share, faults),
        cni=later.cni if later.cni is not None else merged.cni,
    )


def _refine(earlier: InterfaceFields, later: InterfaceFields) -> InterfaceFields:
    written = {name: value for name in later.__struct_fields__ if (value := getattr(later, name)) is not None}
    return structs.replace(earlier, **written)


def _fixed(where: str, earlier: S | None, later: S | None, faults: Faults) -> S | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    written: dict[str, Any] = {}
    for name, key in zip(later.__struct_fields__, later.__struct_encode_fields__, strict=True):
        before, after = getattr(earlier, name), getattr(later, name)
        if after is not None and before is not None and after != before:
            faults.wrong(f"{where}.{key}", after, f"{before!r}, which an earlier configuration (a class) fixes")
        written[name] = before if before is not None else after
    return structs.replace(earlier, **written)


def _check_together(config: InterfaceConfig, faults: Faults) -> None:
    vf, share = config.vf, config.share
    if config.stays_on_host and structs.replace(config, mode=None, rdma=None) != InterfaceConfig():
        faults.wrong(
            "mode",
            "host",
            "pod, since there is more to configure; an interface that stays on the host is left as it is",
        )
    if config.stays_on_host and config.rdma is not None and config.rdma.mode == "exclusive":
        faults.wrong("rdma.mode", config.rdma.mode, "shared: with mode host nothing leaves the host")
    if vf is not None:
        for name, value in (("qos", vf.qos), ("vlanProtocol", vf.vlan_protocol)):
            if value and not vf.vlan:
                faults.wrong(f"vf.{name}", value, "a VLAN beside it (vf.vlan of 1 to 4094)")
        if vf.max_tx_rate and (vf.min_tx_rate or 0) > vf.max_tx_rate:
            faults.wrong("vf.minTxRate", vf.min_tx_rate, f"no more than vf.maxTxRate, {vf.max_tx_rate}")
    if share is not None and vf is not None:
        faults.wrong("share", share.mode, "no vf beside it: a child is configured by itself")
    if share is not None and share.mode == "ipvlan" and config.interface.mac is not None:
        faults.wrong(
            "interface.mac", config.interface.mac, "none: an ipvlan child has the hardware address of its parent"
        )
    if share is not None and config.rdma is not None and config.rdma.mode == "exclusive":
        faults.wrong("rdma.mode", config.rdma.mode, "shared: the device stays on the host for its other children")
    if config.cni is not None:
        _check_beside_chain(config, faults)
    if vf is not None and vf.mac is not None and config.interface.mac not in (None, vf.mac):
        faults.wrong(
            "interface.mac",
            config.interface.mac,
            f"{vf.mac} as vf.mac, or none: the physical function lets no other through",
        )
    for index, neighbour in enumerate(config.neighbours):
        if neighbour.address in [other.address for other in config.neighbours[:index]]:
            faults.wrong(f"neighbours[{index}].address", neighbour.address, "an address that is in the list once")
    for index, rule in enumerate(config.rules):
        if rule in config.rules[:index]:
            faults.wrong(f"rules[{index}]", rule.priority, "a rule that is in the list once")
    keys = [(route.destination, route.table, route.metric) for route in config.routes]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            faults.wrong(
                f"routes[{index}].destination",
                key[0],
                "a route that is in the list once, or another metric or table",
            )


def _check_beside_chain(config: InterfaceConfig, faults: Faults) -> None:
    """Refuse fields that a chain of plugins would not apply: a field is applied or refused, and a
    claim cannot escape a class's VLAN by naming a chain.
    """
    interface = config.interface
    written = {
        **{f"interface.{name}": getattr(interface, name) for name in ("mtu", "mac", "addresses", "up")},
        "interface.duplicateAddressDetection": interface.duplicate_address_detection,
        **{name: getattr(config, name) or None for name in ("routes", "rules", "neighbours", "sysctls", "vf")},
    }
    for name, value in written.items():
        if value is not None:
            faults.wrong(
                name,
                value if name.startswith("interface.") else "set",
                "none beside cni: plugins of the chain configure the interface",
            )
