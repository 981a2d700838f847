"""What the controller remembers of objects that are gone: enough to give back what they hold, and no more however many go."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from topobus.cel.selector import CelCompiler
from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import Stored
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.allocator import Allocator
from topobus.controller.reconcilers.node_ledgers import NodeLedgers
from topobus.controller.reconcilers.release_orphans import OrphanedAllocations
from topobus.controller.state.standalone_state import StandaloneState
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.testing.clock import ManualClock


async def test_orphans_forget_objects_that_no_ledger_names() -> None:
    """Ten thousand deleted claims that hold nothing leave no trace; nothing is asked of the bus for them."""
    no_bus: Any = None
    registry, world, settings = CollectorRegistry(), StandaloneState(), ControllerSettings()
    runtime = Runtime(name="controller", node="central", bus=no_bus, clock=ManualClock(), readiness=Readiness(), registry=registry)
    metrics = ControllerMetrics(registry)
    allocator = Allocator(settings, runtime, world, CelCompiler(), metrics)
    ledgers = NodeLedgers(no_bus, world, settings.ask_timeout_s)
    orphans = OrphanedAllocations(settings, runtime, world, allocator, metrics, ledgers)
    for number in range(10_000):
        gone = ApiObject(
            api_version="resource.k8s.io/v1",
            kind="ResourceClaim",
            metadata={"namespace": "default", "name": f"c{number}", "uid": f"u{number}"},
        )
        orphans.note(Stored(number, gone))

    is_due = await orphans.reconcile_all()

    assert not is_due
    assert orphans.remembered == 0
