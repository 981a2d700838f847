"""Makes one planned change of an interface by netlink, or by a file of /proc/sys.

Each change can be repeated. Errors are pyroute2's NetlinkError (with the kernel's own message) and
OSError.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from topobus.formats.first_read import ready
from topobus.nic.interfaces.rules.interface_config import Neighbour, Route, Rule
from topobus.nic.interfaces.rules.interface_state import HeldAddress, HeldRoute
from topobus.nic.netlink.hand_over_plan import Change
from topobus.nic.netlink.reading import get_link, names_of, read_state, sysctl_path

__all__ = ["announce_addresses", "apply_change", "move_link", "remove_rules"]

_LOOPBACK = 1
"""The index of `lo` in every namespace."""
_AF_INET, _AF_INET6 = 2, 10
_NUD_PERMANENT = 0x80
_ONLINK = 4
_NODAD = 0x02
_MAIN_TABLE = 254
# linux/rtnetlink.h: RTPROT_STATIC, as an administrator's routes have it.
_STATIC = 4
_ANNOUNCING = ("net.ipv4.conf.IFNAME.arp_notify", "net.ipv6.conf.IFNAME.ndisc_notify")
_SCOPES = {"global": 0, "link": 253, "host": 254}


def apply_change(socket: Any, proc: str, index: int, change: Change, *, has_detection: bool = True) -> None:
    """Make one change. Nothing happens when it is made already.

    Shapes: socket — open in the interface's namespace; has_detection — whether new IPv6 addresses
    are looked for on the network before they are used.
    Errors: raises NetlinkError or OSError.
    """
    value = change.value
    links: Mapping[str, Callable[[], dict[str, Any]]] = {
        "mark": lambda: {"ifalias": value},
        "alias": lambda: {"ifalias": value},
        "name": lambda: {"ifname": value},
        "mtu": lambda: {"mtu": value},
        "queue": lambda: {"txqlen": value},
        "up": lambda: {"state": "up"},
        "down": lambda: {"state": "down"},
        "master": lambda: {"master": _index_of(socket, value)},
    }
    if change.name in links:
        socket.link("set", index=index, **links[change.name]())
    elif change.name == "mac":
        _set_address(socket, index, value)
    elif change.name == "drop-names":
        _drop_names(socket, index, value)
    elif change.name == "add-names":
        for name in value:
            _once(socket.link, "property_add", index=index, altname=[name])
    elif change.name == "loopback":
        socket.link("set", index=_LOOPBACK, state="up")
    elif change.name == "sysctls":
        _write_sysctls(socket, proc, index, value)
    elif change.name == "addresses":
        for address in value:
            flags: dict[str, Any] = {} if has_detection or ":" not in address else {"flags": _NODAD}
            _once(socket.addr, "add", index=index, address=address, **flags)
    elif change.name == "held-addresses":
        _restore_addresses(socket, proc, index, msgspec.convert(value, type=ready(tuple[HeldAddress, ...])))
    elif change.name == "neighbours":
        for neighbour in msgspec.convert(value, type=ready(tuple[Neighbour, ...])):
            socket.neigh("replace", ifindex=index, dst=neighbour.address, lladdr=neighbour.mac, state=_NUD_PERMANENT)
    elif change.name == "routes":
        for route in msgspec.convert(value, type=ready(tuple[Route, ...])):
            _once(socket.route, "add", **_route(route, index))
    elif change.name == "held-routes":
        _restore_routes(socket, proc, index, msgspec.convert(value, type=ready(tuple[HeldRoute, ...])))
    elif change.name == "rules":
        for rule in msgspec.convert(value, type=ready(tuple[Rule, ...])):
            _once(socket.rule, "add", **_rule(rule))


def move_link(
    socket: Any, index: int, target: int, name: str, *, taken: Collection[str], kept: Collection[str] | None = None
) -> None:
    """Move an interface into another namespace, under a name that is free there.

    Shapes: target — descriptor of that namespace; taken — all names of others there: the kernel
    does not move an interface when one of its names is taken, so such an alternative name is
    deleted. kept — the alternative names that it may bring along; None: all that are free.
    Errors: raises NetlinkError; with EEXIST, a name was taken since, here or there.
    """
    link = get_link(socket, index=index)
    others = names_of(link) - {link.get("ifname")} if link is not None else set()
    # To the kernel an interface's own alternative name is not free either.
    _drop_names(
        socket,
        index,
        {other for other in others if other == name or other in taken or (kept is not None and other not in kept)},
    )
    # One request: where the old name is taken, the kernel gives the new one during the move.
    socket.link("set", index=index, net_ns_fd=target, ifname=name)


def announce_addresses(socket: Any, proc: str, index: int, chosen: Mapping[str, int]) -> None:
    """Have the kernel announce the interface's addresses when it is switched on: neighbours may
    remember another pod's interface for them.

    A setting that cannot be written is left. The neighbours then notice later by themselves.

    Shapes: chosen — settings of the claim, which take precedence.
    """
    for setting in _ANNOUNCING:
        if setting not in chosen:
            with suppress(OSError, ValueError):
                _write_sysctls(socket, proc, index, {setting: 1})


def remove_rules(socket: Any, rules: Sequence[Mapping[str, Any]]) -> None:
    """Remove rules from a namespace that continues to exist.

    Rules that are gone already were removed by another.
    """
    for rule in msgspec.convert(rules, type=ready(tuple[Rule, ...])):
        _once(socket.rule, "del", gone=True, **_rule(rule))


def _set_address(socket: Any, index: int, address: str) -> None:
    """Set the hardware address, after a reset of the interface where the driver refuses it at
    first.

    A virtual function's driver (igbvf) learns the address that its physical function allows only at
    its own reset, and switching it off and on is one.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        socket.link("set", index=index, address=address)
    except NetlinkError as err:
        if err.code != errno.EADDRNOTAVAIL:
            raise
        socket.link("set", index=index, state="up")
        socket.link("set", index=index, state="down")
        socket.link("set", index=index, address=address)


def _once(act: Callable[..., Any], verb: str, *, gone: bool = False, **arguments: Any) -> None:
    """Call a change that may have been made already."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        act(verb, **arguments)
    except NetlinkError as err:
        if err.code not in ((errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL) if gone else (errno.EEXIST,)):
            raise


def _drop_names(socket: Any, index: int, names: Collection[str]) -> None:
    for name in sorted(names):
        _once(socket.link, "property_del", gone=True, index=index, altname=[name])


def _write_sysctls(socket: Any, proc: str, index: int, values: Mapping[str, int]) -> None:
    link = get_link(socket, index=index)
    name = link.get("ifname") if link is not None else ""
    for setting, number in values.items():
        path = sysctl_path(proc, setting, name)
        if int(path.read_text(encoding="ascii")) != number:
            path.write_text(f"{number}\n", encoding="ascii")


def _restore_addresses(socket: Any, proc: str, index: int, wanted: Sequence[HeldAddress]) -> None:
    def present() -> tuple[HeldAddress, ...]:
        state = read_state(socket, proc, index=index)
        return state.addresses if state is not None else ()

    kept = {held.address for held in wanted}
    for held in present():
        if held.address not in kept:
            _once(socket.addr, "del", gone=True, index=index, address=held.address)
    # Read again: with the first address of a network, the kernel removes the others of that
    # network.
    there = {held.address for held in present()}
    for held in wanted:
        if held.address in there:
            _once(socket.addr, "del", gone=True, index=index, address=held.address)
        arguments: dict[str, Any] = {"index": index, "address": held.address, "scope": held.scope}
        if held.peer:
            text, _, length = held.address.partition("/")
            arguments |= {"address": held.peer, "local": text, "prefixlen": int(length)}
        if held.broadcast:
            arguments["broadcast"] = held.broadcast
        if held.label:
            arguments["label"] = held.label
        if held.flags:
            arguments["flags"] = held.flags
        if held.valid_s is not None or held.preferred_s is not None:
            arguments["valid_lft"], arguments["preferred_lft"] = (
                held.valid_s or 0xFFFFFFFF,
                held.preferred_s or 0xFFFFFFFF,
            )
        _once(socket.addr, "add", **arguments)


def _restore_routes(socket: Any, proc: str, index: int, wanted: Sequence[HeldRoute]) -> None:
    state = read_state(socket, proc, index=index)
    for held in state.routes if state is not None else ():
        if held not in wanted:
            _once(socket.route, "del", gone=True, **_held_route(held, index))
    for held in wanted:
        _once(socket.route, "add", **_held_route(held, index))


def _index_of(socket: Any, name: str) -> int:
    # 0 takes an interface out of its bridge, and so does a bridge that no longer exists. An
    # interface that has the name only as an alternative name is another one.
    link = get_link(socket, name=name) if name else None
    return int(link["index"]) if link is not None and link.get("ifname") == name else 0


def _family(address: str) -> int:
    return _AF_INET6 if ":" in address else _AF_INET


def _route(route: Route, index: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "family": _family(route.destination),
        "dst": route.destination,
        "oif": index,
        "proto": _STATIC,
        "type": 1,
        "table": route.table or _MAIN_TABLE,
        "scope": _SCOPES[route.scope or ("link" if route.gateway is None else "global")],
    }
    optional = {
        "gateway": route.gateway,
        "prefsrc": route.source,
        "priority": route.metric,
        "flags": _ONLINK if route.onlink else None,
    }
    return arguments | {key: value for key, value in optional.items() if value is not None}


def _held_route(held: HeldRoute, index: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "family": _family(held.destination),
        "dst": held.destination,
        "oif": index,
        "proto": held.protocol,
        "type": held.type,
        "table": held.table,
        "scope": held.scope,
    }
    optional = {
        "gateway": held.gateway,
        "prefsrc": held.source,
        "priority": held.metric,
        "flags": _ONLINK if held.is_onlink else 0,
    }
    return arguments | {key: value for key, value in optional.items() if value}


def _rule(rule: Rule) -> dict[str, Any]:
    family = _AF_INET6 if rule.family == "ipv6" or ":" in (rule.source or rule.destination or "") else _AF_INET
    arguments: dict[str, Any] = {"family": family, "table": rule.table, "priority": rule.priority, "action": 1}
    for key, network in (("src", rule.source), ("dst", rule.destination)):
        if network is not None:
            address, _, length = network.partition("/")
            arguments |= {key: address, f"{key}_len": int(length)}
    return arguments
