"""Settings of the controller."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from topobus.controller.core.values import Mode
from topobus.runtime.config import ServiceSettings

__all__ = ["ControllerSettings"]


class ControllerSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the controller."""

    mode: Mode = Mode.CORRECTED
    """`corrected` keeps every constraint; `compatible` has the defects of Kubernetes 1.36 too, for whoever must get the very devices that kube-scheduler
    would choose. docs/reference/allocation.md lists the differences."""
    step_budget: Annotated[int, Meta(ge=100)] = 200_000
    """Steps of one search on one node before it gives up, which is never reported as "does not fit". The default is about a second of work."""
    ask_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """How long one node may take to answer. 2 s: several times a node's p99, and a plan over silent nodes still ends within its own 10 s."""
    parallel_asks: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Nodes asked at the same time for one plan. 32 keeps one plan from flooding the bus in a large cluster."""
    retry_s: Annotated[float, Meta(gt=0, le=300)] = 2.0
    """How long to wait before a node that did not answer is asked again for a claim. Changes on the bus are acted upon at once, without this wait."""
