"""Faults, each with the rule that repairs it and how that repair ends: one table for simulated
hardware and for the real kernel of `make vm`.

Values alone. How a fault is caused and taken back is the business of whoever runs a case:
`lab.device_faults` writes what a kernel would write, `vm.hands` does what hands do to a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topobus.values.repair import REPAIR_POLICY, RepairEnd, RepairRuleSettings

__all__ = ["GUEST", "PERSON", "SIMULATED", "RepairCase"]

PERSON = "ada"
"""Who takes a device over."""

_RESET = ("maintain", "wait-idle", "reset", "forgive", "wait-healthy", "return")
_REBIND = ("maintain", "wait-idle", "rebind", "wait-healthy", "return")
_REBIND_AND_TEST = ("maintain", "wait-idle", "rebind", "burn-in", "wait-healthy", "return")
_TEST = ("maintain", "wait-idle", "burn-in", "wait-healthy", "return")
_WAIT = ("maintain", "wait-healthy", "return")
_PERSON = ("maintain", "call-a-person")
_RETURNED, _GAVE_UP, _TAKEN_OVER = RepairEnd.REPAIRED, RepairEnd.GAVE_UP, RepairEnd.TAKEN_OVER


@dataclass(frozen=True, kw_only=True)
class RepairCase:
    """One fault with its rule, what happens to it, and how its repair ends."""

    code: str
    driver: str
    steps: tuple[str, ...]
    end: RepairEnd
    healed_by: int = 0
    """The number of the reset that takes it back; 0: none does."""
    tries: int = 1
    resets: int = 0
    """How often the kernel is to reset the device."""
    hands: str = ""
    """What hands do to the machine in the guest (`vm.hands`). Empty: nothing that an emulated card
    can have."""
    is_simulated: bool = True
    within_s: float = 1800.0

    @property
    def name(self) -> str:
        """Name the case, and its rule."""
        return f"{self.hands or self.code}-{self.steps[2 if len(self.steps) > 3 else 1]}-{self.end}"

    @property
    def waits(self) -> bool:
        """Say whether its steps do nothing to the fault, so that only somebody else ends it."""
        return self.steps == _WAIT

    @property
    def resets_it(self) -> bool:
        """Say whether the device is reset."""
        return self.steps == _RESET

    @property
    def withheld_by(self) -> str:
        """Name who withholds the device in the end; empty when it is offered."""
        return {_GAVE_UP: REPAIR_POLICY, _TAKEN_OVER: PERSON}.get(self.end, "")

    def rule(self, device_class: str) -> RepairRuleSettings:
        """Write its rule."""
        return RepairRuleSettings(
            name=self.name,
            device_class=device_class,
            reasons=(self.code,),
            steps=self.steps,
            tries=self.tries,
            hold_s=0.1,
            within_s=self.within_s,
        )


def _nic(code: str, hands: str, steps: tuple[str, ...], end: RepairEnd, **fields: Any) -> RepairCase:
    return RepairCase(
        code=code, driver="pci-netdev", hands=hands, steps=steps, end=end, **{"is_simulated": False, **fields}
    )


CASES = (
    RepairCase(code="fell-off-bus", driver="nvidia", steps=_WAIT, end=_RETURNED),
    RepairCase(code="no-kernel-driver", driver="nvidia", steps=_REBIND, end=_GAVE_UP),
    RepairCase(code="link-narrow", driver="nvidia", steps=_RESET, healed_by=1, resets=1, end=_RETURNED),
    RepairCase(code="gpu-excluded", driver="nvidia", steps=_PERSON, end=_GAVE_UP),
    RepairCase(code="too-hot", driver="amd-gpu", steps=_WAIT, end=_RETURNED),
    RepairCase(code="survivability-mode", driver="intel-gpu", steps=_RESET, resets=1, end=_GAVE_UP),
    RepairCase(
        code="health-indicator", driver="intel-gpu", steps=_RESET, tries=2, healed_by=2, resets=2, end=_RETURNED
    ),
    RepairCase(code="link-slow", driver="pci-netdev", steps=_RESET, resets=1, end=_GAVE_UP),
    RepairCase(code="rdma-port-down", driver="pci-netdev", steps=_WAIT, end=_TAKEN_OVER),
    RepairCase(code="half-duplex", driver="pci-netdev", steps=_RESET, healed_by=1, resets=1, end=_RETURNED),
    RepairCase(code="device-offline", driver="xilinx", steps=_RESET, healed_by=1, resets=1, end=_RETURNED),
    RepairCase(code="shell-not-ready", driver="xilinx", steps=_RESET, tries=2, resets=2, end=_GAVE_UP),
    RepairCase(code="firewall-tripped", driver="xilinx", steps=_WAIT, end=_RETURNED),
    RepairCase(code="function-crashed", driver="intel-dfl", steps=_RESET, healed_by=1, resets=1, end=_RETURNED),
    RepairCase(code="port-error", driver="intel-dfl", steps=_RESET, tries=3, healed_by=2, resets=2, end=_RETURNED),
    RepairCase(code="engine-fatal-error", driver="intel-dfl", steps=_RESET, resets=1, end=_GAVE_UP),
    RepairCase(code="power-stopped", driver="intel-dfl", steps=_WAIT, end=_TAKEN_OVER),
    RepairCase(code="power-limited", driver="intel-dfl", steps=_WAIT, end=_RETURNED),
    _nic("carrier-lost", "cable", _WAIT, _RETURNED, is_simulated=True),
    _nic("carrier-lost", "cable", _WAIT, _TAKEN_OVER),
    _nic("carrier-lost", "cable", _RESET, _RETURNED, resets=1),
    _nic("carrier-lost", "cable", _RESET, _GAVE_UP, resets=1, within_s=40.0),
    _nic("carrier-lost", "cable-without-reset", _RESET, _GAVE_UP, tries=2),
    _nic("carrier-lost", "cable", _TEST, _GAVE_UP, tries=2),
    _nic("no-kernel-driver", "card-unbound", _REBIND, _GAVE_UP),
    _nic("no-kernel-driver", "function-unbound", _WAIT, _RETURNED),
    _nic("fell-off-bus", "taken-out", _WAIT, _GAVE_UP, within_s=5.0),
    _nic("fell-off-bus", "parent-taken-out", _WAIT, _RETURNED),
    _nic("parent-carrier-lost", "parent-cable", _WAIT, _RETURNED),
    _nic("aer-correctable-storm", "storm", _WAIT, _RETURNED),
    _nic("aer-nonfatal", "errors", _WAIT, _RETURNED),
    _nic("speed-dropped", "slow", _PERSON, _GAVE_UP, is_simulated=True),
    _nic("half-duplex", "half-duplex", _REBIND_AND_TEST, _RETURNED),
    _nic("recovery-failed", "fatal-error", _RESET, _GAVE_UP, is_simulated=True, resets=1, within_s=40.0),
)
SIMULATED = tuple(case for case in CASES if case.is_simulated)
GUEST = tuple(case for case in CASES if case.hands)
