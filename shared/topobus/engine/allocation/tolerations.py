"""Taints of devices for allocation and eviction: the source of each taint, and the devices that a
DeviceTaintRule selects.

Whether a claim tolerates a taint is decided in `topobus.formats.kubernetes.tolerations`. Source:
KEP-5055; k8s.io/dynamic-resource-allocation/resourceslice/tracker, 1.36.
"""

from __future__ import annotations

from dataclasses import dataclass

from topobus.engine.allocation.values import DeviceId
from topobus.formats.kubernetes.resource import Taint, TaintSelector

__all__ = ["EXECUTES", "SILENT_TAINT", "RuleTaint", "TaintRule", "matches"]

EXECUTES = "NoExecute"
SILENT_TAINT = "topobus.dev/service-silent"
"""On devices whose service does not answer, by the reader: nothing is allocated there, whatever is
tolerated, and nothing is released."""


@dataclass(frozen=True)
class TaintRule:
    """A stored DeviceTaintRule."""

    name: str
    selector: TaintSelector | None
    taint: Taint
    """With its time: the server's, else that of the rule."""


@dataclass(frozen=True)
class RuleTaint:
    """A taint on a device, and the rule that set it. The rule is empty for a taint of the driver's
    own.
    """

    taint: Taint
    rule: str = ""


def matches(selector: TaintSelector | None, device: DeviceId) -> bool:
    """Say whether a rule selects a device."""
    if selector is None:
        return False
    pairs = ((selector.driver, device.driver), (selector.pool, device.pool), (selector.device, device.device))
    return all(wanted is None or wanted == value for wanted, value in pairs)
