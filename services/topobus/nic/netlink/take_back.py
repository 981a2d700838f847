"""Takes an interface back from a pod, and restores its state from before it was handed over.

The record's steps are undone in reverse. The plan starts from what is found. So it works after a
crash at any step, twice in a row, after the namespace is gone (the kernel returns hardware to the
first namespace, under whatever name the pod gave it), and after a pod with NET_ADMIN has changed
its interface. A virtual interface that died with its namespace is reported as lost.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from itertools import chain, count
from typing import Any

from msgspec import Struct, structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.interfaces.rules.interface_state import InterfaceState, state_from_journal
from topobus.nic.netlink.applying import apply_change, move_link, remove_rules
from topobus.nic.netlink.hand_over_plan import HOST_CHANGES, POD_CHANGES, plan_restore
from topobus.nic.netlink.identity import boot_id, find_interface, present_of
from topobus.nic.netlink.places import Places, missing_package, open_host, open_namespace, with_netlink
from topobus.nic.netlink.reading import get_link, kind_of, link_names, read_state
from topobus.nic.netlink.vf_settings import restore_vf
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason

__all__ = ["TakenBack", "take_back"]

# How often the move is tried again when a name was taken since it was looked up. If names are taken
# all the time, the next call tries again.
_MOVES = 4


class TakenBack(Struct, frozen=True, kw_only=True):
    """What became of an interface."""

    outcome: str
    """`nothing` (it was not handed over), `restored`, `deleted` (a child) or `lost`."""
    name: str = ""
    """On the host, where it is there."""
    reasons: tuple[Reason, ...] = ()
    """What a person should know: another name, or how it was lost."""


class _Away(Struct, frozen=True, kw_only=True):
    """The record's facts about the interface that is away."""

    tag: str
    before: InterfaceState | None
    """None: only a child was begun."""
    macs: frozenset[str]
    is_child: bool
    boot: str
    """In which boot of the node it went."""
    rules: tuple[dict[str, Any], ...]


def take_back(places: Places, namespace: str, record: DeviceRecord) -> TakenBack:
    """Undo a hand-over, whole or in part.

    Shapes: namespace — empty when it is not known; it may be gone.
    Errors: raises HardwareError when the interface exists and could not be restored, or is hardware
    that is not found anywhere yet; the caller repeats the call.
    """
    away = _read_record(record)
    if away is None:
        return TakenBack(outcome="nothing", reasons=restore_vf(places, record))
    missing = missing_package()
    if missing is not None:
        raise HardwareError(missing.reasons[0].message)
    from pyroute2.netlink.exceptions import NetlinkError

    # In another boot the path leads to nothing, or to another pod: no namespace of a pod outlives
    # its node.
    descriptor = open_namespace(places, namespace) if namespace and away.boot == boot_id(places) else None
    try:
        taken = _bring_home(places, descriptor if isinstance(descriptor, int) else None, away, record)
    except (NetlinkError, OSError) as err:
        words = err.args[1] if len(err.args) > 1 else err
        name = away.before.name if away.before is not None else away.tag
        raise HardwareError(
            f"{name} cannot be taken back from {namespace or 'its namespace'}: {words}", interface=name
        ) from err
    finally:
        if isinstance(descriptor, int):
            os.close(descriptor)
    # What identifies the interface is removed last: until then, all of this can be repeated.
    for step in reversed(record.steps):
        if step.name in HOST_CHANGES or step.name == "share":
            record.undone(step.name)
    return taken


def _read_record(record: DeviceRecord) -> _Away | None:
    mark, share, rules, mac = (record.step(name) for name in ("mark", "share", "rules", "mac"))
    if mark is None and share is None:
        return None
    begun = mark or share
    return _Away(
        tag=begun.before["tag"] if begun is not None else "",
        before=state_from_journal(mark.before["state"]) if mark is not None else None,
        macs=frozenset({mac.before["wanted"]} if mac is not None else ()),
        is_child=share is not None,
        boot=str(
            (mark.before["state"] if mark is not None else share.before if share is not None else {}).get("boot_id", "")
        ),
        rules=tuple(rules.before["wanted"]) if rules is not None else (),
    )


def _bring_home(places: Places, descriptor: int | None, away: _Away, record: DeviceRecord) -> TakenBack:
    is_deleted = False
    if descriptor is not None:
        is_deleted = _from_pod(places, descriptor, away)
    for step in reversed(record.steps):
        if step.name in POD_CHANGES:
            record.undone(step.name)
    # Before the interface's own settings: a driver takes the former hardware address only when the
    # physical function requires no other.
    refused = restore_vf(places, record)
    if away.is_child:
        if away.boot == boot_id(places):
            is_deleted = (
                with_netlink(places, None, lambda socket: _delete_child(socket, places, away, record)) or is_deleted
            )
        return (
            TakenBack(outcome="deleted")
            if is_deleted
            else _lost(away, "with the pod's namespace, as the kernel does with virtual interfaces")
        )
    restored = with_netlink(places, None, lambda socket: _restore(socket, places, away))
    taken = restored if restored is not None else _nowhere(places, away)
    return structs.replace(taken, reasons=(*taken.reasons, *refused))


def _from_pod(places: Places, descriptor: int, away: _Away) -> bool:
    """Take the interface out of the pod's namespace. True when it was a child and is deleted."""
    before = away.before

    def leave(socket: Any) -> bool:
        from pyroute2.netlink.exceptions import NetlinkError

        remove_rules(socket, away.rules)
        if before is None:
            return False
        index = find_interface(socket, before, present_of(before, places), tag=away.tag, macs=away.macs)
        if index is None:
            return False
        if away.is_child:
            socket.link("del", index=index)
            return True
        try:
            # The alias first: a pod may have changed it, and on the host the interface is found by
            # it.
            socket.link("set", index=index, ifalias=away.tag)
            _move_home(socket, places, index, before)
        except NetlinkError as err:
            raise HardwareError(
                f"{before.name} cannot be moved back to the host: {err.args[1]}", error=err.code
            ) from err
        return False

    return with_netlink(places, descriptor, leave)


def _move_home(socket: Any, places: Places, index: int, before: InterfaceState) -> None:
    """Move it to the host under its own name, or a spare one, with those of its alternative names
    that are free.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    home = open_host(places)
    try:
        for last in (*[False] * _MOVES, True):
            taken = with_netlink(places, None, link_names)
            name = next(
                name
                for name in chain([before.name], (f"tb{index}x{number}" for number in count()))
                if name not in taken
            )
            try:
                move_link(socket, index, home, name, taken=taken, kept=before.alternative_names)
            except NetlinkError as err:
                # A name was taken meanwhile, or the pod gave it to another interface. That must not
                # stop the host's own interface from coming back.
                if last or err.code != errno.EEXIST:
                    raise
            else:
                return
    finally:
        os.close(home)


def _restore(socket: Any, places: Places, away: _Away) -> TakenBack | None:
    """Restore the interface on the host, or return None when it is not there."""
    from pyroute2.netlink.exceptions import NetlinkError

    before = away.before
    if before is None:
        return None
    index = find_interface(socket, before, present_of(before, places), tag=away.tag, macs=away.macs, host=places)
    now = read_state(socket, places.proc, index=index) if index is not None else None
    if index is None or now is None:
        return None
    taken = {name for name, holder in link_names(socket).items() if holder != index}
    for change in plan_restore(now, before, taken=taken):
        try:
            apply_change(socket, places.proc, index, change)
        except (NetlinkError, OSError) as err:
            words = err.args[1] if len(err.args) > 1 else err
            raise HardwareError(
                f"{before.name} cannot be restored: step {change.name} ({change.value}): {words}", step=change.name
            ) from err
    name = now.name if before.name in taken else before.name
    return TakenBack(outcome="restored", name=name, reasons=tuple(_names_lost(before, name, taken)))


def _names_lost(before: InterfaceState, name: str, taken: Collection[str]) -> Iterator[Reason]:
    """Report the names that it could not get back."""
    if name != before.name:
        message = (
            f"another interface is called {before.name} by now, so this one is {name}; rename it when the other "
            "one is gone"
        )
        yield Reason(code="interface-renamed", message=message, facts={"interface": before.name, "name": name})
    for other in before.alternative_names:
        if other in taken:
            message = (
                f"another interface is called {other} by now, so {name} has lost this alternative name; `ip link "
                f"property add dev {name} altname {other}` gives it back when the other one is gone"
            )
            yield Reason(code="interface-name-lost", message=message, facts={"interface": name, "name": other})


def _delete_child(socket: Any, places: Places, away: _Away, record: DeviceRecord) -> bool:
    step = record.step("share")
    # Until it moves, a child has the name that follows only from its tag.
    link = get_link(socket, name=step.before["name"]) if step is not None else None
    if (
        link is not None
        and step is not None
        and (link.get("ifname"), kind_of(link)) == (step.before["name"], step.before["kind"])
    ):
        index: int | None = link["index"]
    else:
        before = away.before
        index = find_interface(socket, before, present_of(before, places), tag=away.tag) if before is not None else None
    if index is None:
        return False
    socket.link("del", index=index)
    return True


def _nowhere(places: Places, away: _Away) -> TakenBack:
    """Return what became of an interface that is in no visible namespace.

    Errors: raises HardwareError while it may still appear.
    """
    before = away.before
    if before is None:
        return _lost(away, "before it was marked")
    present = present_of(before, places)
    if not present.is_same_boot and not before.bus_device:
        return _lost(away, "when the node was restarted, as all virtual interfaces do")
    if before.kind:
        if (
            before.link
            and before.link_namespace is None
            and with_netlink(places, None, lambda socket: _is_other_end_there(socket, before))
        ):
            raise HardwareError(
                f"{before.name} is in a namespace that is being taken down: its other end is on the host still",
                interface=before.name,
            )
        return _lost(away, "with the pod's namespace, as the kernel does with virtual interfaces")
    if not present.is_there:
        return _lost(away, f"with its device: {before.bus_device} is not on its bus any more")
    if not present.is_same_device:
        what = "its function was created again" if present.is_virtual_function else "another card is in its place"
        return _lost(
            away, f"with its device: {before.bus_device} is there, but {what}; nothing was changed on that one"
        )
    if not present.has_interface:
        return _lost(away, f"with its driver: {before.bus_device} has no interface in any namespace")
    raise HardwareError(
        f"{before.name} is neither in the pod's namespace nor on the host: the kernel returns hardware when "
        "it has taken the namespace down",
        next_step="it is looked for again; `ip -all netns exec ip link` finds it where a process keeps a namespace of "
        "its own",
        interface=before.name,
    )


def _is_other_end_there(socket: Any, before: InterfaceState) -> bool:
    if before.kind != "veth":
        return False
    other_end = get_link(socket, index=before.link)
    return other_end is not None and bool(other_end.get("link"))


def _lost(away: _Away, how: str) -> TakenBack:
    name = away.before.name if away.before is not None else away.tag
    kind = ("child" if away.before is None else away.before.kind) or "hardware"
    message = f"{name} ({kind}) went away {how}"
    return TakenBack(
        outcome="lost",
        reasons=(Reason(code="interface-lost", message=message, facts={"interface": name, "kind": kind}),),
    )
