"""Devices that a pod gets by a claim only, never by count: those that several owners may hold, and
those that can exclude each other.

A planner or kubelet's device plugin that chooses by count only counts devices. Counters and shares
are available only to claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from topobus.values.counters import CounterSet
from topobus.values.device import Device
from topobus.values.device_sharing import HeldShare
from topobus.values.outcome import Fact, Reason, Refusal
from topobus.values.partitions import Partitions
from topobus.values.request import PodRequest
from topobus.values.shares import shortage_of
from topobus.values.view import NodeView

__all__ = ["by_count", "capacity_shortages", "claims_only", "explain_claims_only", "share_faults", "shortages"]


_Facts = dict[str, Fact]


def claims_only(devices: Iterable[Device], counter_sets: Sequence[CounterSet]) -> frozenset[str]:
    """Name the devices of a class that cannot be requested by count.

    >>> claims_only([Device(name="a", device_class="nic"), Device(name="b", device_class="nic", allows_multiple=True)], ())
    frozenset({'b'})
    """  # noqa: E501
    devices = tuple(devices)
    shared = frozenset(device.name for device in devices if device.allows_multiple)
    return (
        shared | Partitions(devices, counter_sets).rivals()
        if counter_sets or any(device.consumes for device in devices)
        else shared
    )


def by_count(view: NodeView, request: PodRequest) -> NodeView:
    """Return the view in which devices are counted and chosen. Devices that the request names stay
    in it, and are no spares: a claim was allocated them before they became spares, or tolerates it.
    """
    hidden = _hidden(view)
    if not any(hidden.values()) and not any(device.is_spare for devices in view.devices.values() for device in devices):
        return view
    named = _names(request, ("whole", "share", "look"))

    def shown(device: Device) -> Device:
        is_named = device.is_spare and device.name in named.get(device.device_class, ())
        return structs.replace(device, is_spare=False) if is_named else device

    devices = {
        name: tuple(
            shown(device) for device in devices if device.name not in hidden[name] or device.name in named.get(name, ())
        )
        for name, devices in view.devices.items()
    }
    return structs.replace(view, devices=devices)


def share_faults(view: NodeView, request: PodRequest) -> list[Reason]:
    """List why devices that a request names are not available: a counter is short, or a share is
    wanted of a device that is held whole, not shared or unhealthy.
    """
    whole, shares = _names(request, ("whole",)), _names(request, ("share",))
    reasons = capacity_shortages(view, _amounts(request), view.held_shares)
    reasons += shortages(
        view, {name: (*whole.get(name, ()), *shares.get(name, ())) for name in sorted({*whole, *shares})}
    )
    for device_class, names in sorted(shares.items()):
        held = view.held_devices.get(device_class, {})
        devices = {device.name: device for device in view.devices.get(device_class, ())}
        for name in names:
            facts: _Facts = {"resource": device_class, "device": name}
            if name in held and name not in view.shared_devices.get(device_class, ()):
                reasons.append(
                    Reason(
                        code="device-held",
                        message=f"{name} is held whole by {held[name]}",
                        facts={**facts, "owner": held[name]},
                    )
                )
            elif name in devices and not devices[name].allows_multiple:
                reasons.append(
                    Reason(
                        code="not-shared",
                        message=f"{name} is given whole only: its driver does not share it",
                        facts=facts,
                    )
                )
            elif name in devices and devices[name].maintenance is not None:
                reasons.append(
                    Reason(code="device-kept-back", message=f"{name} is {devices[name].why_not}", facts=facts)
                )
            elif name in devices and not devices[name].is_allocatable:
                state = devices[name].health.state.value
                reasons.append(
                    Reason(code="device-unhealthy", message=f"{name} is {state}", facts={**facts, "state": state})
                )
    return reasons


def shortages(view: NodeView, wanted: Mapping[str, Iterable[str]]) -> list[Reason]:
    """List the counters that are short when these devices (class to names) are held in addition to
    the present ones.

    One for each class.
    """
    reasons: list[Reason] = []
    for device_class, names in sorted(wanted.items()):
        devices, held = view.devices.get(device_class, ()), view.held_devices.get(device_class, {})
        names = tuple(names)
        if not any(device.consumes for device in devices):
            continue
        short = Partitions(devices, view.counter_sets.get(device_class, ())).shortage(tuple(held), names)
        if short is None:
            continue
        owners = sorted({held[name] for name in short.devices})
        by = f", {short.in_use} in use by {', '.join(short.devices)} of {', '.join(owners)}" if short.devices else ""
        message = (
            f"{', '.join(sorted(names))}: {short.wanted} of {short.counter_set}/{short.counter} wanted, "
            f"{short.total} there{by}"
        )
        facts: _Facts = {
            "resource": device_class,
            "counter": f"{short.counter_set}/{short.counter}",
            "total": short.total,
            "in_use": short.in_use,
            "wanted": short.wanted,
            "devices": short.devices,
        }
        reasons.append(Reason(code="counter-short", message=message, facts=facts))
    return reasons


def capacity_shortages(
    view: NodeView,
    wanted: Mapping[str, Mapping[str, HeldShare]],
    held: Mapping[str, Mapping[str, Mapping[str, HeldShare]]],
) -> list[Reason]:
    """List the shared devices that have too little left, one reason for each device.

    Shapes: wanted — class to device to the share wanted of it; held — class to device to owner key
            to the share that the owner has.
    """
    reasons: list[Reason] = []
    for device_class, shares in sorted(wanted.items()):
        devices = {device.name: device for device in view.devices.get(device_class, ())}
        for name, share in sorted(shares.items()):
            others = held.get(device_class, {}).get(name, {})
            short = shortage_of(devices[name], share.amounts, others) if name in devices else None
            if short is None:
                continue
            by = f", {short.in_use} in use by {', '.join(short.owners)}" if short.owners else ""
            message = f"{name}: {short.capacity}: {short.wanted} wanted, {short.left} left of {short.total}{by}"
            facts: _Facts = {
                "resource": device_class,
                "device": name,
                "capacity": short.capacity,
                "wanted": short.wanted,
                "left": short.left,
                "total": short.total,
                "owners": short.owners,
            }
            reasons.append(Reason(code="capacity-short", message=message, facts=facts))
    return reasons


def explain_claims_only(view: NodeView, request: PodRequest, refusal: Refusal) -> Refusal:
    """Add to a refusal that devices of a class that was requested by count are available to a
    claim.
    """
    asked = {
        device.device_class for container in request.containers for device in container.devices if not device.names
    }
    short = {
        reason.facts.get("resource")
        for reason in refusal.reasons
        if reason.code in ("not-enough-devices", "numa-capacity")
    }
    reasons = [
        Reason(
            code="claims-only",
            message=f"{len(names)} devices of class {device_class} are shared, or exclude each other: ask for them by "
            "a ResourceClaim",
            facts={"resource": device_class, "exists": len(names)},
        )
        for device_class, names in sorted(_hidden(view).items())
        if names and device_class in asked and device_class in short
    ]
    return structs.replace(refusal, reasons=(*refusal.reasons, *reasons)) if reasons else refusal


def _hidden(view: NodeView) -> dict[str, frozenset[str]]:
    return {name: claims_only(devices, view.counter_sets.get(name, ())) for name, devices in view.devices.items()}


def _names(request: PodRequest, kinds: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """List the devices that a request names, by class: those that it holds whole, by share, or only
    accesses.
    """
    named: dict[str, list[str]] = {}
    for container in request.containers:
        for device in container.devices:
            kind = "look" if device.is_shared else "share" if device.by_share else "whole"
            if device.names and kind in kinds:
                named.setdefault(device.device_class, []).extend(device.names)
    return {name: tuple(sorted(set(names))) for name, names in named.items()}


def _amounts(request: PodRequest) -> dict[str, dict[str, HeldShare]]:
    """Add up how much a request wants of the shared devices that it names."""
    wanted: dict[str, dict[str, dict[str, int]]] = {}
    for container in request.containers:
        for device in container.devices:
            for name, amounts in device.amounts.items() if device.by_share else ():
                sums = wanted.setdefault(device.device_class, {}).setdefault(name, {})
                for capacity, amount in amounts.items():
                    sums[capacity] = sums.get(capacity, 0) + amount
    return {
        device_class: {name: HeldShare(amounts=amounts) for name, amounts in devices.items()}
        for device_class, devices in wanted.items()
    }
