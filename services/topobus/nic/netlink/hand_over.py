"""Hands an interface over to a pod's network namespace: name, MTU, hardware address, addresses,
routes, rules, neighbours, settings, and switches it on.

Everything that can be refused is refused before the first change. What the kernel refuses later is
a Refusal as well, and `take_back` undoes the changes made until then. Each change is written to the
record before it is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.interfaces.rules.interface_checks import check_interface_config, name_in_pod
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig
from topobus.nic.interfaces.rules.interface_state import InterfaceState, state_to_journal
from topobus.nic.netlink.applying import announce_addresses, apply_change, move_link
from topobus.nic.netlink.hand_over_plan import HOST_CHANGES, Change, plan_hand_over
from topobus.nic.netlink.identity import find_interface, identified, present_of
from topobus.nic.netlink.places import Places, kernels_refusal, missing_package, open_namespace, with_netlink
from topobus.nic.netlink.reading import get_link, link_names, read_state
from topobus.nic.netlink.shares import make_child
from topobus.nic.netlink.vf_settings import VfPlace, configure_vf
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import AttachedInterface

__all__ = ["check_hand_over", "hand_over", "mark", "read_interface"]

# The kernel sends its probe within a second and waits one more (RFC 4862 section 5.4). A link that
# just came up adds its own delay.
_DETECTION_S = 4.0
_POLL_S = 0.05
_TENTATIVE, _FAILED = 0x40, 0x08


def read_interface(places: Places, name: str, namespace: str = "") -> InterfaceState | Refusal | None:
    """Read an interface by one of its names on the host, or in a namespace.

    None when there is none of that name.
    """
    refusal = missing_package()
    if refusal is not None:
        return refusal
    descriptor = open_namespace(places, namespace) if namespace else None
    if isinstance(descriptor, Refusal):
        return descriptor
    try:
        return with_netlink(places, descriptor, lambda socket: _by_name(socket, places, name))
    except OSError as err:
        return kernels_refusal(err, f"{name} cannot be read in {namespace or 'the host namespace'}", "enter")
    finally:
        if descriptor is not None:
            os.close(descriptor)


def check_hand_over(places: Places, name: str, config: InterfaceConfig, *, vf: VfPlace | None = None) -> Refusal | None:
    """Refuse an interface that cannot be handed over as configured, as far as the host can show.

    Changes nothing.
    """
    state = _read_on_host(places, name)
    if isinstance(state, Refusal):
        return state
    return check_interface_config(config, state, is_virtual_function=vf is not None)


def hand_over(
    places: Places,
    name: str,
    namespace: str,
    config: InterfaceConfig,
    record: DeviceRecord,
    *,
    tag: str,
    vf: VfPlace | None = None,
) -> AttachedInterface | Refusal:
    """Hand an interface over, or a child of it where the configuration shares it.

    Shapes: name — on the host; namespace — as the runtime names it; record — without steps of an
    earlier hand-over; tag — the alias that the interface has while it is away, by which it is found
    again.
    Errors: refuses `package-missing`, `namespace-gone`, `namespace-of-host`, `interface-gone`,
    `interface-config-invalid`, `name-taken` before any change, and `hand-over-failed`,
    `address-in-use` and `address-not-ready` after some changes, which `take_back` then undoes.
    Cost: some 20 netlink requests and one synced write to the record before and after each change;
    with `wait`, the kernel's detection (2 s).
    """
    refusal = missing_package()
    if refusal is not None:
        return refusal
    from pyroute2.netlink.exceptions import NetlinkError

    descriptor = open_namespace(places, namespace)
    if isinstance(descriptor, Refusal):
        return descriptor
    try:
        state = _read_on_host(places, name)
        if isinstance(state, Refusal):
            return state
        refusal = check_interface_config(config, state, is_virtual_function=vf is not None) or _taken(
            places, descriptor, name_in_pod(config, state)
        )
        if refusal is None and vf is not None and config.vf is not None:
            refusal = configure_vf(places, vf, config.vf, record, state)
        if refusal is not None:
            return refusal
        return _change_all(places, descriptor, state, config, record, tag)
    except (NetlinkError, OSError) as err:
        return kernels_refusal(err, f"{name} cannot be handed over to {namespace}", "enter")
    finally:
        os.close(descriptor)


def mark(places: Places, name: str, record: DeviceRecord, *, tag: str) -> Refusal | None:
    """Record the state of an interface and give it our alias, before another program (a CNI plugin)
    moves it.

    `take_back` then restores the state from whatever that left.

    Errors: refuses `package-missing`, `interface-gone`, `not-permitted` and `hand-over-failed`.
    """
    state = _read_on_host(places, name)
    if isinstance(state, Refusal):
        return state
    change = Change(name="mark", value=tag, before=state_to_journal(state))
    try:
        return with_netlink(
            places,
            None,
            lambda socket: _make(record, change, partial(apply_change, socket, places.proc, state.index, change)),
        )
    except OSError as err:
        return kernels_refusal(err, f"{name} cannot be marked", "enter")


def _change_all(
    places: Places, descriptor: int, state: InterfaceState, config: InterfaceConfig, record: DeviceRecord, tag: str
) -> AttachedInterface | Refusal:
    wanted_name = name_in_pod(config, state)
    if config.share is not None:
        child = make_child(places, state, config.share, record, tag=tag)
        if isinstance(child, Refusal):
            return child
        state = child
        config = structs.replace(
            config, interface=structs.replace(config.interface, name=wanted_name), share=None, vf=None
        )
        if config.interface.addresses is None:
            config = structs.replace(config, interface=structs.replace(config.interface, addresses=()))
    changes = plan_hand_over(state, config, tag=tag)
    here = [change for change in changes if change.name in HOST_CHANGES]
    there = [change for change in changes if change.name not in HOST_CHANGES]

    def on_host(socket: Any) -> Refusal | None:
        for change in here:
            refusal = _make(record, change, partial(_on_host, socket, places, state.index, change, descriptor))
            if refusal is not None:
                return refusal
        return None

    refusal = with_netlink(places, None, on_host)
    if refusal is not None:
        return refusal
    return with_netlink(places, descriptor, lambda socket: _in_pod(socket, places, state, config, there, record, tag))


def _in_pod(
    socket: Any,
    places: Places,
    state: InterfaceState,
    config: InterfaceConfig,
    changes: list[Change],
    record: DeviceRecord,
    tag: str,
) -> AttachedInterface | Refusal:
    index = find_interface(socket, state, present_of(state, places), tag=tag)
    if index is None:
        return refuse(
            "hand-over-failed", f"{state.name} is not in the pod's namespace after it was moved there", step="move"
        )
    detection = config.interface.duplicate_address_detection
    for change in changes:
        if change.name == "up":
            announce_addresses(socket, places.proc, index, config.sysctls)
        refusal = _make(
            record, change, partial(apply_change, socket, places.proc, index, change, has_detection=detection != "off")
        )
        if refusal is not None:
            return refusal
    if detection == "wait" and config.interface.up is not False:
        refusal = _wait_for_addresses(socket, index)
        if refusal is not None:
            return refusal
    now = read_state(socket, places.proc, index=index)
    if now is None:
        return refuse(
            "hand-over-failed", f"{name_in_pod(config, state)} left the pod's namespace while it was set up", step="up"
        )
    return AttachedInterface(
        name=now.name, mac=now.mac, addresses=tuple(held.address for held in now.addresses), mtu=now.mtu
    )


def _make(record: DeviceRecord, change: Change, act: Callable[[], None]) -> Refusal | None:
    """Make one change, with its intent recorded before.

    A refusal of the kernel keeps the intent, because the change may have been made in part.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    before = (
        {"tag": change.value, "state": change.before}
        if change.name == "mark"
        else {"was": change.before, "wanted": change.value}
    )
    record.intend(change.name, before)
    try:
        act()
    except (NetlinkError, OSError) as err:
        return kernels_refusal(err, f"the kernel refuses step {change.name} ({change.value})", change.name)
    record.done(change.name)
    return None


def _on_host(socket: Any, places: Places, index: int, change: Change, descriptor: int) -> None:
    if change.name == "move":
        move_link(socket, index, descriptor, change.value, taken=with_netlink(places, descriptor, link_names))
    else:
        apply_change(socket, places.proc, index, change)


def _taken(places: Places, descriptor: int, name: str) -> Refusal | None:
    if name not in with_netlink(places, descriptor, link_names):
        return None
    return refuse(
        "name-taken",
        f"the pod has an interface {name} already; interface.name of the claim names another one",
        field="interface.name",
        name=name,
    )


def _wait_for_addresses(socket: Any, index: int) -> Refusal | None:
    end = time.monotonic() + _DETECTION_S
    while True:
        flags = {
            message.get("IFA_ADDRESS"): message.get("IFA_FLAGS") or message["flags"]
            for message in socket.get_addr(family=10)
            if message["index"] == index
        }
        failed = sorted(address for address, flag in flags.items() if flag & _FAILED)
        if failed:
            return refuse(
                "address-in-use",
                f"{failed[0]} is in use on the network: another machine answers for it",
                address=failed[0],
            )
        waiting = sorted(address for address, flag in flags.items() if flag & _TENTATIVE)
        if not waiting:
            return None
        if time.monotonic() >= end:
            return refuse(
                "address-not-ready",
                f"{waiting[0]} is not found unique within {_DETECTION_S:g} s: the link has no carrier, or "
                "duplicateAddressDetection is to be background",
                address=waiting[0],
            )
        time.sleep(_POLL_S)


def _by_name(socket: Any, places: Places, name: str) -> InterfaceState | None:
    link = get_link(socket, name=name)
    return read_state(socket, places.proc, index=link["index"]) if link is not None else None


def _read_on_host(places: Places, name: str) -> InterfaceState | Refusal:
    """Read the interface that has this name as its main one. As an alternative name it means
    another interface.
    """
    state = read_interface(places, name)
    if isinstance(state, Refusal):
        return state
    if state is not None and state.name == name:
        return identified(state, places)
    other = f"; it is an alternative name of {state.name}" if state is not None else ""
    return refuse("interface-gone", f"the host has no interface {name}{other}", interface=name)
