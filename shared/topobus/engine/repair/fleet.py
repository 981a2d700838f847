"""What repairs read of a fleet: devices with their faults, who holds them, and what persons did.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topobus.engine.ledger.device_users import owners_of_devices, reset_together
from topobus.formats.messages.operation_messages import ClassMaintenance, PerformedOperation
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, HealthState
from topobus.values.ledger import Holders
from topobus.values.maintenance import DeviceVerb
from topobus.values.repair import REPAIR_POLICY, Place, Protected, RepairPolicy, RepairRuleSettings, Step

__all__ = ["ANY_REASON", "Fleet", "codes_of", "disrupts", "rule_for", "withholds"]

ANY_REASON = "*"


@dataclass(frozen=True)
class Fleet:
    """The copies that a decision about repairs reads."""

    inventories: Mapping[tuple[str, str], Inventory]
    """By node and class."""
    ledgers: Mapping[str, Holders]
    maintenances: Mapping[tuple[str, str], ClassMaintenance]

    def device(self, place: Place) -> Device | None:
        """Return a device. None when it is not published."""
        inventory = self.inventories.get(place[:2])
        return inventory.device(place[2]) if inventory is not None else None

    def sick(self, policy: RepairPolicy) -> list[Place]:
        """List the devices for which a rule has steps, sorted.

        Cost: O(devices × rules).
        """
        classes = {rule.device_class for rule in policy.rules}
        return sorted(
            (*key, device.name)
            for key, inventory in self.inventories.items()
            if key[1] in classes
            for device in inventory.devices
            if device.health.conditions and rule_for(policy, device) is not None
        )

    def together(self, place: Place) -> tuple[Device, ...]:
        """List what a reset of a device also resets, with the device itself."""
        device = self.device(place)
        return reset_together(device, self.inventories[place[:2]].devices) if device is not None else ()

    def holders(self, place: Place) -> tuple[str, ...]:
        """Name who holds a device or what is reset with it, sorted.

        A node without a ledger counts as held, because its holders are not known.
        """
        ledger = self.ledgers.get(place[0])
        if ledger is None:
            return ("unknown: the node has no ledger",)
        owners = owners_of_devices(ledger, place[1])
        return tuple(sorted({str(owner) for device in self.together(place) for owner in owners.get(device.name, ())}))

    def newest_of_others(self, place: Place) -> PerformedOperation | None:
        """Return the newest operation on a device that no repair asked for, as far as it is kept."""
        maintenance = self.maintenances.get(place[:2])
        return next(
            (
                performed
                for performed in reversed(maintenance.operations if maintenance is not None else ())
                if performed.operation.device == place[2] and performed.operation.who != REPAIR_POLICY
            ),
            None,
        )

    def offered(self, protected: Protected) -> frozenset[Place]:
        """Find the devices of a protected group that new owners may get."""
        return frozenset(
            (*key, device.name)
            for key, inventory in self.inventories.items()
            if key[1] == protected.device_class
            for device in inventory.devices
            if device.is_allocatable and all(condition.holds(device) for condition in protected.where)
        )


def rule_for(policy: RepairPolicy, device: Device) -> RepairRuleSettings | None:
    """Return the rule that applies to a device's present faults. None when they are observed."""
    rule = next(
        (rule for rule in policy.rules if rule.device_class == device.device_class and codes_of(rule, device)), None
    )
    return rule if rule is not None and rule.steps != (Step.OBSERVE,) else None


def codes_of(rule: RepairRuleSettings, device: Device) -> tuple[str, ...]:
    """List the reasons of a device's faults that a rule names, sorted.

    A fault that heals is none. `*` means faults for which a device is Unhealthy: one that is merely
    Degraded or Unknown has to be named.
    """
    return tuple(sorted({each.reason for each in device.health.conditions if _is_named(rule, each)}))


def _is_named(rule: RepairRuleSettings, condition: Condition) -> bool:
    if condition.state is HealthState.UNHEALTHY and ANY_REASON in rule.reasons:
        return True
    return condition.state is not HealthState.RECOVERING and condition.reason in rule.reasons


def withholds(step: str) -> bool:
    """Say whether a step takes the device from new owners."""
    return step in (Step.DRAIN, DeviceVerb.MAINTAIN, DeviceVerb.EXCLUDE)


def disrupts(step: str) -> bool:
    """Say whether a step is an operation for which the device must have no owner, such as a reset."""
    return any(step == verb and verb.needs_no_owner for verb in DeviceVerb)
