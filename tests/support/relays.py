"""The relay in the test's own process, and what the hub has in comparison with the node's own
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry

from support.leaf_pair import NODE, LeafPair
from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import ALIGNMENT, DECISION, DISAGREEMENT, HEALTH, INVENTORY, LEDGER, MACHINE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import HealthEvent
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.relay.config import RelaySettings
from topobus.relay.service import serve_node
from topobus.values.errors import PeerUnavailable
from topobus.values.health import DeviceHealth

# Ends only a test that waits for what never comes.
LIMIT_S = 90.0
_PAUSE_S = 0.05
_STATES = (MACHINE, INVENTORY, LEDGER, ALIGNMENT)
_EVENTS = (HEALTH, DECISION, DISAGREEMENT)


class RunningRelay:
    """A relay, and what it reports of itself."""

    def __init__(self, readiness: Readiness, registry: CollectorRegistry, bus: Bus) -> None:
        self.readiness = readiness
        self.registry = registry
        self.bus = bus

    def said(self, noun: str, outcome: str) -> int:
        """Return how often something was published with an outcome."""
        return int(self.registry.get_sample_value("topobus_relay_said_total", {"noun": noun, "outcome": outcome}) or 0)

    @property
    def joins(self) -> int:
        """Give how often the hub was found."""
        return int(self.registry.get_sample_value("topobus_relay_joins_total") or 0)

    @property
    def remark(self) -> str:
        """Return the readiness report's text about the hub."""
        return self.readiness.report().get("hub", "")


@asynccontextmanager
async def relay(pair: LeafPair, *, forget_after_s: float = 0.2) -> AsyncIterator[RunningRelay]:
    """Run a relay on the leaf until the block ends."""
    settings = RelaySettings(
        node=NODE, nats=NatsSettings(url=pair.leaf.url), check_s=0.5, retry_s=0.3, forget_after_s=forget_after_s
    )
    readiness, registry = Readiness(), CollectorRegistry()
    async with Bus.session(settings.nats, name="relay") as bus:
        runtime = Runtime(name="relay", node=NODE, bus=bus, clock=SystemClock(), readiness=readiness, registry=registry)
        task = asyncio.create_task(serve_node(settings, runtime))
        try:
            yield RunningRelay(readiness, registry, bus)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def states(bus: Bus) -> dict[str, bytes]:
    """Give all states of the node that a server has."""
    return {
        f"{state.name}/{state.key(**entry.parts)}": encode(entry.value)
        for state in _STATES
        for entry in await bus.list(state, node=NODE)
    }


async def revisions(bus: Bus) -> dict[str, int]:
    """Give the sequence of each state of the node that a server has."""
    return {
        f"{state.name}/{state.key(**entry.parts)}": entry.revision
        for state in _STATES
        for entry in await bus.list(state, node=NODE)
    }


async def events(bus: Bus) -> dict[str, list[bytes]]:
    """Give all events of the node that a server has, in their order."""
    return {
        event.name: [encode(received.value) for received in await bus.last(event, limit=10_000, node=NODE)]
        for event in _EVENTS
    }


async def until_equal(hub: Bus, leaf: Bus, *, was_central: bool = False) -> None:
    """Wait until the hub has the node's states, and each of its events once, in their order.

    Shapes: was_central — the hub may have an event of the node's from before, when it was the
    node's server, and once more from the relay: both have one `ce-id`.
    """
    got: tuple[dict[str, bytes], dict[str, list[bytes]]] = ({}, {})
    wanted = got
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                with suppress(PeerUnavailable):
                    wanted, got = (await states(leaf), await events(leaf)), (await states(hub), await events(hub))
                    if was_central:
                        got = (got[0], {name: list(dict.fromkeys(values)) for name, values in got[1].items()})
                    if got == wanted:
                        return
                await next_look()
    except TimeoutError as err:
        raise AssertionError(
            f"the hub differs: {_differences(got[0], wanted[0])} {_differences(got[1], wanted[1])}"
        ) from err


def _differences(got: Mapping[str, object], wanted: Mapping[str, object]) -> dict[str, str]:
    """Give what differs with the first 200 characters of where it does."""
    return {
        name: f"hub: {got_text[max(start - 60, 0) : start + 140]!r}, node: "
        f"{wanted_text[max(start - 60, 0) : start + 140]!r}"
        for name in sorted({*got, *wanted})
        if (got_text := str(got.get(name))) != (wanted_text := str(wanted.get(name)))
        for start in [
            next(
                (place for place, pair in enumerate(zip(got_text, wanted_text, strict=False)) if pair[0] != pair[1]), 0
            )
        ]
    }


def sickness(generation: int, device: str = "gpu-0") -> HealthEvent:
    """Make a health event of the node."""
    return HealthEvent(
        node=NODE,
        device_class="gpu",
        device=device,
        health=DeviceHealth(),
        generation=generation,
        time="2026-01-01T00:00:00Z",
    )


async def tell_sickness(bus: Bus, generation: int, device: str = "gpu-0") -> None:
    """Publish a health event as the gpu service does."""
    await bus.publish(
        HEALTH,
        sickness(generation, device),
        event_id=f"{device}-{generation}",
        node=NODE,
        device_class="gpu",
        device=device,
    )
