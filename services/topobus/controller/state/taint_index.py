"""Taints of devices from three sources: slices, DeviceTaintRules, and device services that do not
answer.

A rule selects by driver, pool and device, each of which may be omitted. A rule without a selector
taints nothing, one with an empty selector everything. One that selects a part of a shape taints the
shape as well.

Source: KEP-5055; k8s.io/dynamic-resource-allocation/resourceslice/tracker, 1.36.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import msgspec

from topobus.controller.state.slice_index import Origin
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.tolerations import EXECUTES, SILENT_TAINT, RuleTaint, TaintRule, matches
from topobus.engine.allocation.values import DeviceId
from topobus.engine.shapes.shape_parts import Parts, parts_in_slices
from topobus.formats.kubernetes import limits
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.resource import (
    SliceDevice,
    SliceSpec,
    Taint,
    TaintRuleSpec,
)
from topobus.formats.kubernetes.shape import read_as, refuse_problems
from topobus.formats.messages.messages import ApiObject

__all__ = ["TaintIndex", "read_rule", "silenced", "tainted"]


def read_rule(rule: ApiObject) -> TaintRule:
    """Read a stored rule.

    Errors: raises ContractError.
    """
    spec = read_as(rule.spec, TaintRuleSpec, where=name_of(rule))
    refuse_problems(limits.check_taint_rule(spec), name_of(rule))
    metadata = metadata_of(rule)
    since = spec.taint.time_added or metadata.creation_timestamp or None
    return TaintRule(metadata.name, spec.device_selector, msgspec.structs.replace(spec.taint, time_added=since))


def tainted(slices: tuple[Slice, ...], rules: Iterable[TaintRule]) -> tuple[Slice, ...]:
    """Add the rules' taints to the devices that they select.

    Slices that no rule selects stay the same objects.

    Shapes: rules — in order of name, which is the order of their taints.
    """
    taint_rules = tuple(rules)
    return tuple(_tainted(resource_slice, taint_rules) for resource_slice in slices) if taint_rules else slices


def _tainted(resource_slice: Slice, rules: tuple[TaintRule, ...]) -> Slice:
    parts = parts_in_slices((resource_slice,))

    def taint(device: SliceDevice) -> SliceDevice:
        device_id = DeviceId(resource_slice.spec.driver, resource_slice.spec.pool.name, device.name)
        added = tuple(rule.taint for rule in rules if _selects(rule, device_id, parts))
        return msgspec.structs.replace(device, taints=(*device.taints, *added)) if added else device

    devices = tuple(map(taint, resource_slice.spec.devices))
    return (
        resource_slice
        if devices == resource_slice.spec.devices
        else replace(resource_slice, spec=_with_devices(resource_slice.spec, devices))
    )


def _selects(rule: TaintRule, device: DeviceId, parts: Parts) -> bool:
    return any(matches(rule.selector, each) for each in (device, *parts.get(device, ())))


def silenced(device: SliceDevice, since: str) -> SliceDevice:
    """Add a taint to a device whose service does not answer."""
    mark = Taint(key=SILENT_TAINT, value=since, effect="NoSchedule", time_added=since or None)
    return msgspec.structs.replace(device, taints=(mark, *device.taints))


def _with_devices(spec: SliceSpec, devices: tuple[SliceDevice, ...]) -> SliceSpec:
    return msgspec.structs.replace(spec, devices=devices)


class TaintIndex:
    """All slices as published and all rules.

    It has one owner, which applies the changed slices that each update returns.
    """

    def __init__(self) -> None:
        self._published: dict[Origin, tuple[Slice, ...]] = {}
        self._rules: dict[Hashable, TaintRule] = {}
        self._evicting: dict[Origin, dict[DeviceId, tuple[Taint, ...]]] = {}
        self.parts: dict[DeviceId, tuple[DeviceId, ...]] = {}
        """Of all published shapes."""
        self._shapes: dict[Origin, tuple[DeviceId, ...]] = {}
        self.has_seen_binding = False
        """Whether any device with binding conditions was ever published. Without one, claims need
        not be checked for them."""

    @property
    def rules(self) -> Mapping[Hashable, TaintRule]:
        """The rules, by their keys."""
        return self._rules

    def put(self, origin: Origin, slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
        """Store the slices of an origin, and return them with the rules' taints."""
        self._published.pop(origin, None)
        for shape in self._shapes.pop(origin, ()):
            self.parts.pop(shape, None)
        parts = parts_in_slices(slices)
        if parts:
            self._shapes[origin] = tuple(parts)
            self.parts |= parts
        self._evicting.pop(origin, None)
        if not slices:
            return ()
        self._published[origin] = slices
        self.has_seen_binding = self.has_seen_binding or any(
            device.binding_conditions for resource_slice in slices for device in resource_slice.spec.devices
        )
        evicting = {
            DeviceId(resource_slice.spec.driver, resource_slice.spec.pool.name, device.name): taints
            for resource_slice in slices
            for device in resource_slice.spec.devices
            if (taints := tuple(taint for taint in device.taints if taint.effect == EXECUTES))
        }
        if evicting:
            self._evicting[origin] = evicting
        return tainted(slices, self._in_order())

    def put_rule(self, key: Hashable, rule: TaintRule | None) -> dict[Origin, tuple[Slice, ...]]:
        """Store a rule, or remove it with None.

        Returns the slices of the origins whose taints changed.
        """
        before = self._in_order()
        self._rules.pop(key, None)
        if rule is not None:
            self._rules[key] = rule
        after = self._in_order()
        if before == after:
            return {}
        return {
            origin: now
            for origin, slices in self._published.items()
            if (now := tainted(slices, after)) != tainted(slices, before)
        }

    def evicting(self, device: DeviceId) -> tuple[RuleTaint, ...]:
        """List the evicting taints of a device: the driver's, then the rules'."""
        own = tuple(RuleTaint(taint) for taints in self._evicting.values() for taint in taints.get(device, ()))
        ruled = (
            taint_rule
            for taint_rule in self._in_order()
            if taint_rule.taint.effect == EXECUTES and _selects(taint_rule, device, self.parts)
        )
        return (*own, *(RuleTaint(taint_rule.taint, taint_rule.name) for taint_rule in ruled))

    @property
    def may_evict(self) -> bool:
        """Say whether any device may carry a taint that evicts."""
        return bool(self._evicting) or any(rule.taint.effect == EXECUTES for rule in self._rules.values())

    def count(self, rule: TaintRule) -> int:
        """Count the published devices that a rule selects."""
        return sum(
            matches(rule.selector, DeviceId(resource_slice.spec.driver, resource_slice.spec.pool.name, device.name))
            for slices in self._published.values()
            for resource_slice in slices
            for device in resource_slice.spec.devices
        )

    def _in_order(self) -> tuple[TaintRule, ...]:
        return tuple(sorted(self._rules.values(), key=lambda rule: rule.name))
