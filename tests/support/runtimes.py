"""What a service runs in, for tests that run one in their own process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from topobus.bus.bus import Bus
from topobus.process.clock import Clock, SystemClock
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime

__all__ = ["runtime_of"]


def runtime_of(
    name: str, node: str, bus: Bus, *, clock: Clock | None = None, readiness: Readiness | None = None
) -> Runtime:
    """Make a service's runtime on a bus, with metrics of its own."""
    return Runtime(
        name=name,
        node=node,
        bus=bus,
        clock=clock or SystemClock(),
        readiness=readiness or Readiness(),
        registry=CollectorRegistry(),
    )
