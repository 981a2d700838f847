"""What the controller remembers of objects that are gone: enough to give back what they hold, and
no more however many go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from topobus.bus.bus import Bus
from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.standalone.release_orphans import OrphanedAllocations
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import object_parts, placed_uid
from topobus.formats.messages.catalogue import LEDGER, OBJECT, RELEASE
from topobus.formats.messages.messages import ApiObject, ReleaseReply, ReleaseRequest
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue
from topobus.testing.clock import ManualClock
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind


def claim(name: str, uid: str = "") -> ApiObject:
    """A claim as it is stored."""
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"namespace": "default", "name": name, "uid": uid or f"u-{name}"},
    )


_LOST = Owner(kind=OwnerKind.CLAIM, name="lost", uid="u-lost")


@dataclass(frozen=True, kw_only=True)
class _Home:
    """A controller whose store has no trace of the claim that a node's ledger has."""

    bus: Bus
    state: StandaloneState
    orphans: OrphanedAllocations
    released: list[Owner]
    registry: CollectorRegistry


@asynccontextmanager
async def _home(owner: Owner = _LOST, *, is_prepared: bool = False) -> AsyncIterator[_Home]:
    ledger = Ledger(
        node="n1",
        sequence=1,
        allocations={
            owner.key: Allocation(
                owner=owner, holdings=(Holding(devices={"gpu": ("gpu-0",)}),), is_prepared=is_prepared
            )
        },
    )
    released: list[Owner] = []

    async def release(request: ReleaseRequest) -> ReleaseReply:
        released.append(request.owner)
        return ReleaseReply()

    server = MemoryNats()
    async with MemoryBus.session(server, name="controller") as bus, MemoryBus.session(server, name="topology") as node:
        await bus.provision()
        await node.put(LEDGER, ledger, node="n1")
        await node.answer(RELEASE, release, node="n1")
        registry, state, settings = CollectorRegistry(), StandaloneState(), ControllerSettings()
        runtime = Runtime(
            name="controller", node="central", bus=bus, clock=ManualClock(), readiness=Readiness(), registry=registry
        )
        metrics = ControllerMetrics(registry)
        allocator = Allocator(settings, runtime, state, CelCompiler(), metrics)
        queue = WorkQueue("orphans", runtime.clock, settings.retry_s)
        ledgers = NodeLedgers(bus, state, settings.ask_timeout_s)
        orphans = OrphanedAllocations(settings, runtime, state, allocator, metrics, ledgers, queue)
        state.put_ledger(ledger)
        yield _Home(bus=bus, state=state, orphans=orphans, released=released, registry=registry)


async def test_claim_is_released_when_it_was_lost_with_the_store_and_is_restored_and_deleted() -> None:
    """A store without a trace of an owner proves nothing, so its devices stay and it is told, once.

    When its object was here again and was deleted, they are let go.
    """
    async with _home() as home:
        with capture_logs() as lines:
            await home.orphans.reconcile_all()
            await home.orphans.reconcile_all()
        released_before = list(home.released)
        home.orphans.note(Stored(1, claim("lost")))
        await home.orphans.reconcile_all()

    warnings = [line for line in lines if line["event"] == "holders.without-object"]
    assert [(line["of"], line["owners"]) for line in warnings] == [("n1", ["claim default/lost"])]
    assert released_before == []
    assert home.released == [_LOST]


@pytest.mark.parametrize(
    ("kind", "uid", "is_released"),
    [
        pytest.param(OwnerKind.CLAIM, "u-lost", True, id="another claim has its name"),
        pytest.param(OwnerKind.CLAIM, "u-again", False, id="the claim is there again"),
        pytest.param(OwnerKind.POD, placed_uid("default", "lost"), False, id="a pod of topobus place"),
    ],
)
async def test_holder_of_a_lost_object_is_released_when_its_name_belongs_to_another_one(
    kind: OwnerKind, uid: str, is_released: bool
) -> None:
    """Whoever applies a claim from a backup has a new one, and gets the devices of the old one back."""
    owner = Owner(kind=kind, name="lost", uid=uid)
    async with _home(owner) as home:
        await home.orphans.reconcile_all()
        released_before = list(home.released)
        again = claim("lost", uid="u-again")
        again = structs.replace(again, kind="Pod" if kind is OwnerKind.POD else again.kind)
        key = ObjectKey(**object_parts(again))
        home.state.put_object(key, Stored(await home.bus.put(OBJECT, again, **key._asdict()), again))
        await home.orphans.reconcile_all()

    assert released_before == []
    assert home.released == ([owner] if is_released else [])


async def test_owner_is_counted_while_its_node_keeps_the_devices_of_a_deleted_claim() -> None:
    """A container may be using them: the node is not asked, and the metric counts the claim."""
    async with _home(is_prepared=True) as home:
        home.orphans.note(Stored(1, claim("lost")))
        await home.orphans.reconcile_all()
        counted = home.registry.get_sample_value("topobus_controller_owners_quarantined")

    assert counted == 1
    assert home.released == []


async def test_orphans_forget_objects_that_no_ledger_names() -> None:
    """Ten thousand deleted claims that hold nothing leave no trace.

    Nothing is asked of the bus for them.
    """
    no_bus: Any = None
    registry, state, settings = CollectorRegistry(), StandaloneState(), ControllerSettings()
    runtime = Runtime(
        name="controller", node="central", bus=no_bus, clock=ManualClock(), readiness=Readiness(), registry=registry
    )
    metrics = ControllerMetrics(registry)
    allocator = Allocator(settings, runtime, state, CelCompiler(), metrics)
    queue = WorkQueue("orphans", runtime.clock, settings.retry_s)
    ledgers = NodeLedgers(no_bus, state, settings.ask_timeout_s)
    orphans = OrphanedAllocations(settings, runtime, state, allocator, metrics, ledgers, queue)
    for number in range(10_000):
        orphans.note(Stored(number, claim(f"c{number}")))

    await orphans.reconcile_all()

    assert queue.wait_s() is None
    assert orphans.conclusion_count == 0
