"""The topology service: the node's ledger and every alignment, over the bus."""

from __future__ import annotations

import asyncio

from topobus.bus.liveness import ServiceLiveness
from topobus.formats.messages.catalogue import ADOPT, COMMIT, HINT, OPERATE, PLACE, PREFER, RELEASE
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.topology.announcer import Announcer
from topobus.topology.ask_handlers import AskHandlers
from topobus.topology.config import TopologySettings
from topobus.topology.device_operations import DeviceOperations
from topobus.topology.ledger_store import LedgerStore
from topobus.topology.metrics import TopologyMetrics
from topobus.topology.node_inputs import NodeInputs
from topobus.topology.options import AlignmentPublisher
from topobus.topology.reservations import Reservations
from topobus.values.idset import CpuSet
from topobus.values.view import NodeAlignment

__all__ = ["serve"]

_PLANS_AT_A_TIME = 8


async def serve(settings: TopologySettings, runtime: Runtime) -> None:
    """Answer place, prefer, adopt, commit, release and operate for this node until cancelled."""
    bus, node = runtime.bus, runtime.node
    metrics = TopologyMetrics(runtime.registry)
    alignment = _alignment_of(settings, node)
    options = alignment.options
    inputs = NodeInputs(bus, alignment, runtime.readiness)
    store = LedgerStore(bus, node=node, readiness=runtime.readiness, metrics=metrics)
    announcer = Announcer(bus, node=node, store=store, metrics=metrics)
    answers = AskHandlers(
        bus,
        node=node,
        inputs=inputs,
        store=store,
        announcer=announcer,
        clock=runtime.clock,
        metrics=metrics,
        hint_timeout_s=settings.hints.timeout_s,
    )
    operations = DeviceOperations(bus, node=node, inputs=inputs, store=store, announcer=announcer, clock=runtime.clock)
    reservations = Reservations(
        store=store, announcer=announcer, clock=runtime.clock, expire_s=settings.reservations.expire_s
    )
    published = AlignmentPublisher(bus, alignment, runtime.clock)

    def note_silence() -> None:
        inputs.note_silence(dict(liveness.silent))
        published.note_silence(liveness.silent)
        metrics.silent_classes.clear()
        for device_class in liveness.silent:
            metrics.silent_classes.labels(device_class).set(1)

    liveness = ServiceLiveness(
        bus,
        HINT,
        node=node,
        clock=runtime.clock,
        settings=settings.silence,
        classes=lambda: inputs.inventories,
        on_change=note_silence,
    )
    await store.open()
    get_logger().info(
        "topology.opened", policy=options.policy.value, scope=options.scope.value, mode=options.mode.value
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(inputs.watch())
        group.create_task(store.repair_loop(runtime.beats.loop("ledger")))
        group.create_task(announcer.run())
        group.create_task(reservations.run())
        group.create_task(liveness.run())
        group.create_task(published.run())
        # Few at a time: plans are made one after the other, and a request that waits in the bus is
        # dropped there when its requester has given up.
        await bus.answer(PLACE, answers.place, concurrency=_PLANS_AT_A_TIME, node=node)
        await bus.answer(PREFER, answers.prefer, node=node)
        await bus.answer(ADOPT, answers.adopt, node=node)
        await bus.answer(COMMIT, answers.commit, node=node)
        await bus.answer(RELEASE, answers.release, node=node)
        await bus.answer(OPERATE, operations.operate, node=node)


def _alignment_of(settings: TopologySettings, node: str) -> NodeAlignment:
    return NodeAlignment(
        node=node,
        options=settings.alignment.options(),
        reserved_cpus=CpuSet.parse(settings.alignment.reserved_cpus),
        reserved_memory=dict(settings.alignment.memory.reserved_bytes),
        own_shapes=tuple(own.shape() for own in settings.own_shapes),
    )
