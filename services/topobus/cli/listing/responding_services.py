"""Asks the services behind a command's inventories, all at once, whether they run, so that no table
shows the last state of a dead service as current.

The result is a snapshot: a service that restarts at this moment counts as silent here, while
topology waits some seconds before it reports that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, structs

from topobus.bus.bus import Bus
from topobus.engine.health.silence import SERVICE_SILENT, Answered, Silent, SilentBecause, unheard
from topobus.formats.messages.catalogue import HINT, PLAN, PREFER
from topobus.formats.messages.nouns import CLUSTER, Ask
from topobus.values.device import Inventory

__all__ = [
    "CONTROLLER",
    "Peer",
    "as_of_now",
    "device_service_on",
    "note_waiting",
    "side_by_side",
    "sign_of_life",
    "silence_text",
    "topology_on",
]

# A person waits for this once, for all services together. One that is well answers within
# milliseconds.
_PATIENCE_S = 1.0
# Nodes whose services are asked at the same time. All of a large fleet at once would have answers
# wait in this process for longer than the patience.
_AT_ONCE = 32

# After this time a user wonders whether anything happens.
_NOTE_AFTER_S = 2.0

T = TypeVar("T")


class Peer(Struct, frozen=True, kw_only=True):
    """A service that a command may have to wait for."""

    name: str
    """Its name for people: `gpu on n1`."""
    ask: Ask[Any, Any]
    """The request by which it gives a sign of life."""
    parts: Mapping[str, str]


CONTROLLER = Peer(name="the controller", ask=PLAN, parts={"node": CLUSTER})


def topology_on(node: str) -> Peer:
    """Name a node's topology."""
    return Peer(name=f"topology on {node}", ask=PREFER, parts={"node": node})


def device_service_on(node: str, device_class: str) -> Peer:
    """Name the service of a node's devices of one class."""
    return Peer(name=f"{device_class} on {node}", ask=HINT, parts={"node": node, "device_class": device_class})


async def note_waiting(bus: Bus, answer: Awaitable[T], peers: Sequence[Peer], note: Callable[[str], None]) -> T:
    """Wait for an answer. If it takes long, print once for which services.

    Shapes: peers — those that work on it, the one that is asked first; printed are those that give
    no sign of life, else the last, which does the work.
    """
    waited = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait({waited}, timeout=_NOTE_AFTER_S)
        if not done:
            reasons = await asyncio.gather(*(_why_silent(bus, peer.ask, **peer.parts) for peer in peers))
            silent = [f"{peer.name} ({why})" for peer, why in zip(peers, reasons, strict=True) if why]
            if not waited.done():
                note(f"waiting for {' and '.join(silent) or f'{peers[-1].name}, which is at work'}")
        return await waited
    finally:
        waited.cancel()


async def as_of_now(bus: Bus, inventories: Iterable[Inventory]) -> list[Inventory]:
    """Return the inventories with the devices of silent services as Unknown and a warning with the
    reason.
    """
    known_inventories = list(inventories)
    reasons = await asyncio.gather(
        *(
            _why_silent(bus, HINT, node=inventory.node, device_class=inventory.device_class)
            for inventory in known_inventories
        )
    )
    return [
        _unheard(inventory, why) if why else inventory
        for inventory, why in zip(known_inventories, reasons, strict=True)
    ]


async def side_by_side(nodes: Iterable[str], ask: Callable[[str], Awaitable[T]]) -> list[T]:
    """Ask all nodes, a bounded number at the same time. The answers are in the order of the
    nodes.
    """
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask_when_free(node: str) -> T:
        async with places:
            return await ask(node)

    return await asyncio.gather(*map(ask_when_free, nodes))


async def _why_silent(bus: Bus, ask: Ask[Any, Any], **parts: str) -> str:
    """Return why a service is silent. Empty when it answers."""
    return silence_text(await sign_of_life(bus, ask, **parts))


async def sign_of_life(bus: Bus, ask: Ask[Any, Any], **parts: str) -> Answered | Silent:
    """Ask for a service's sign of life, as long as a person waits for it."""
    return await bus.is_answered(ask, timeout_s=_PATIENCE_S, **parts)


def silence_text(answer: Answered | Silent, patience_s: float = _PATIENCE_S) -> str:
    """Return why there was no answer. Empty when there was one."""
    if isinstance(answer, Answered):
        return ""
    return {
        SilentBecause.NOBODY: "no service answers there",
        SilentBecause.TIMEOUT: f"no answer within {patience_s:g} s",
        SilentBecause.NO_BUS: "NATS went away",
    }[answer.because]


def _unheard(inventory: Inventory, why: str) -> Inventory:
    warning = f"{SERVICE_SILENT}: {why}; its devices are unknown, and new pods get none of them"
    return structs.replace(unheard(inventory), warnings=(warning, *inventory.warnings))
