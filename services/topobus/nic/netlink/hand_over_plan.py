"""Plans the changes, in order, that hand an interface over, and those that restore it. Pure.

The way back is planned from the interface as it is found, not from what was done: whatever a pod
with NET_ADMIN did to it, the plan leads to the state before the hand-over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from topobus.nic.interfaces.rules.interface_checks import addresses_in_pod, name_in_pod
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig
from topobus.nic.interfaces.rules.interface_state import HeldAddress, HeldRoute, InterfaceState, state_to_journal

__all__ = ["HOST_CHANGES", "POD_CHANGES", "Change", "plan_hand_over", "plan_restore"]

HOST_CHANGES = ("mark", "master", "down", "mac", "mtu", "move")
"""Made on the host, in this order; `move` is the last one there."""
POD_CHANGES = ("sysctls", "loopback", "addresses", "up", "neighbours", "routes", "rules")
"""Made in the pod's namespace, in this order."""
_DISABLE_IPV6 = "net.ipv6.conf.IFNAME.disable_ipv6"


class Change(Struct, frozen=True, kw_only=True):
    """One change of an interface, as JSON for the journal."""

    name: str
    value: Any = None
    before: Any = None
    """What it replaces, on the way into the pod."""


def plan_hand_over(state: InterfaceState, config: InterfaceConfig, *, tag: str) -> tuple[Change, ...]:
    """Plan the way into the pod.

    Shapes: state — on the host; tag — the alias that identifies the interface wherever it is.
    result — changes in order; what needs no change is left out, except `mark`, which has the whole
    state before, and `move`.
    """
    wanted = config.interface
    addresses = addresses_in_pod(config, state)
    sysctls = dict(config.sysctls)
    if any(":" in address for address in addresses):
        # Runtimes switch IPv6 off in sandboxes of IPv4 clusters. An IPv6 address of the claim needs
        # it on this interface.
        sysctls.setdefault(_DISABLE_IPV6, 0)
    changes = [Change(name="mark", value=tag, before=state_to_journal(state))]
    if state.master:
        changes.append(Change(name="master", value="", before=state.master))
    if state.is_up:
        changes.append(Change(name="down", value=False, before=True))
    # The function must send with the address that the physical function lets through.
    mac = wanted.mac or (config.vf.mac if config.vf is not None else None)
    if mac is not None and mac != state.mac:
        changes.append(Change(name="mac", value=mac, before=state.mac))
    if wanted.mtu is not None and wanted.mtu != state.mtu:
        changes.append(Change(name="mtu", value=wanted.mtu, before=state.mtu))
    changes.append(Change(name="move", value=name_in_pod(config, state), before=state.name))
    if sysctls:
        changes.append(Change(name="sysctls", value=dict(sorted(sysctls.items()))))
    changes.append(Change(name="loopback", value=True))
    if addresses:
        changes.append(Change(name="addresses", value=list(addresses), before=[]))
    if wanted.up is not False:
        changes.append(Change(name="up", value=True, before=False))
    for name, entries in (("neighbours", config.neighbours), ("routes", config.routes), ("rules", config.rules)):
        if entries:
            # Routes without a gateway first, because the others need them.
            changes.append(Change(name=name, value=msgspec.to_builtins(_in_order(entries)), before=[]))
    return tuple(changes)


def plan_restore(now: InterfaceState, before: InterfaceState, *, taken: Collection[str] = ()) -> tuple[Change, ...]:
    """Plan how an interface that is on the host again gets its earlier state.

    Shapes: now — as it is found; taken — the names that others have on the host, of all kinds: when
    its own is among them, it keeps the name that it came back with. result — changes in order; none
    when its state is the earlier one. The alias comes last: until then it shows that something is
    left to do.
    """
    name = now.name if before.name in taken else before.name
    changes: list[Change] = []
    # To the kernel a name that it already has as an alternative one is not free. Names that a pod
    # or udev added meanwhile are removed as well.
    kept = {other for other in before.alternative_names if other not in taken and other != name}
    changes += _names("drop-names", set(now.alternative_names) - kept)
    # Many drivers change a name or a hardware address only while the interface is off.
    is_up = now.is_up
    if is_up and (not before.is_up or now.name != name or now.mac != before.mac):
        changes.append(Change(name="down", value=False))
        is_up = False
    fields: Sequence[tuple[str, Any, Any]] = (
        ("name", name, now.name),
        ("mac", before.mac, now.mac),
        ("mtu", before.mtu, now.mtu),
        ("queue", before.tx_queue_length, now.tx_queue_length),
    )
    changes.extend(Change(name=field, value=value) for field, value, present in fields if value != present)
    changes += _names("add-names", kept - set(now.alternative_names))
    sysctls = {key: value for key, value in before.sysctls.items() if now.sysctls.get(key, value) != value}
    if sysctls:
        changes.append(Change(name="sysctls", value=sysctls))
    if before.master != now.master:
        changes.append(Change(name="master", value=before.master))
    has_other_addresses = _without_times(before.addresses) != _without_times(now.addresses)
    if has_other_addresses:
        changes.append(Change(name="held-addresses", value=msgspec.to_builtins(before.addresses)))
    if before.is_up and not is_up:
        changes.append(Change(name="up", value=True))
    # Routes are lost when the interface is switched off, and some with an address.
    if before.is_up and (
        set(before.routes) != set(now.routes if is_up else ()) or (before.routes and has_other_addresses)
    ):
        changes.append(Change(name="held-routes", value=msgspec.to_builtins(_by_gateway(before.routes))))
    if before.alias != now.alias:
        changes.append(Change(name="alias", value=before.alias))
    return tuple(changes)


def _names(change: str, names: Collection[str]) -> list[Change]:
    return [Change(name=change, value=sorted(names))] if names else []


def _in_order(entries: Sequence[Any]) -> list[Any]:
    return sorted(entries, key=lambda entry: getattr(entry, "gateway", None) is not None)


def _by_gateway(routes: Sequence[HeldRoute]) -> tuple[HeldRoute, ...]:
    return tuple(sorted(routes, key=lambda route: bool(route.gateway)))


def _without_times(addresses: Sequence[HeldAddress]) -> tuple[HeldAddress, ...]:
    # Remaining seconds change all the time. The order is kept: packets leave with the first address
    # of an IPv4 network.
    return tuple(msgspec.structs.replace(held, valid_s=None, preferred_s=None) for held in addresses)
