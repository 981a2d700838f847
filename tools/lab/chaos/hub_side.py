"""The hub side of a node that has a server of its own: the hub, its controller, the link, and a
check of what the hub has of the node.

Its faults are caused on demand. The check finds what the hub lacks or has twice. It reads both
servers past all proxies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from docpages.nats_files import domain_of, render_hub, render_leaf
from lab.chaos.faults import Fault, Planned
from lab.servers.shaped_servers import Link, ShapedServer, version_of
from topobus.bus.bus import Bus
from topobus.bus.streams.state import Entry
from topobus.bus.streams.uplink import Delivery, Mark
from topobus.formats.messages.catalogue import ALIGNMENT, DECISION, DISAGREEMENT, HEALTH, INVENTORY, LEDGER, MACHINE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.nouns import Event, State
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, find_nats_server, free_port
from topobus.values.errors import ConfigError

__all__ = ["LEAF_SETTINGS", "HubSide", "compare_events", "hub_side", "leaf_servers"]

LEAF_SETTINGS = {
    "TOPOBUS_ALL__NATS__PROVISIONER": "topology",
    # Two controllers run at this node's server, and the claims are its objects (docs/adr/0038): the
    # gateway reads them there, as at a shared server.
    "TOPOBUS_GATEWAY__NATS__PROVISIONER": "controller",
    "TOPOBUS_RELAY__CHECK_S": "1",
    "TOPOBUS_RELAY__RETRY_S": "0.5",
}
"""Settings of the services of a node with a server of its own. The relay checks more often than as
shipped (10 s), since a run must see it."""

_STATES: tuple[State[Any], ...] = (MACHINE, INVENTORY, LEDGER, ALIGNMENT)
_EVENTS: tuple[Event[Any], ...] = (HEALTH, DECISION, DISAGREEMENT)
# The id under which the hub stores an event has the relay's suffix. The id in this header is passed
# on unchanged.
_EVENT_ID = "ce-id"
_READ_S = 10.0


class HubSide:
    """The hub of one node."""

    def __init__(self, node: str, hub: ShapedServer, link: Link, hub_bus: Bus, leaf_bus: Bus) -> None:
        self.server = hub
        self.losses = 0
        """How often one of both stores was restored to an earlier time: then an event may be sent
        again."""
        self.counts: Counter[str] = Counter()
        """What was compared when everything was well."""
        self._node = node
        self._link = link
        self._hub_bus = hub_bus
        self._leaf_bus = leaf_bus

    async def do(self, planned: Planned) -> None:
        """Cause one fault of the hub or of the link.

        Errors: raises ValueError for a fault of another kind.
        """
        match planned.fault:
            case Fault.CUT_LINK:
                self._link.cut()
                await asyncio.sleep(planned.lasts_s * 2)
                self._link.join()
            case Fault.FREEZE_HUB:
                self.server.pause()
                await asyncio.sleep(planned.lasts_s)
                self.server.resume()
            case Fault.KILL_HUB:
                await self.server.kill()
                await asyncio.sleep(planned.lasts_s)
                await self.server.start()
            case Fault.ROLL_BACK_HUB:
                copy = self.server.folder / "older-store"
                self.server.pause()
                try:
                    await asyncio.to_thread(self.server.copy_store, copy)
                finally:
                    self.server.resume()
                await asyncio.sleep(planned.lasts_s)
                await self._lose(copy)
            case Fault.EMPTY_HUB:
                await self._lose(None)
            case fault:
                raise ValueError(f"{fault} is none of the hub's")

    async def _lose(self, copy: Path | None) -> None:
        self.losses += 1
        await self.server.kill()
        await asyncio.to_thread(self.server.lose_store if copy is None else lambda: self.server.restore_store(copy))
        await self.server.start()
        # The hub's controller finds its streams lost and makes them again.

    async def problems(self) -> list[str]:
        """Return what the hub lacks of the node, or has more than once."""
        said: list[str] = []
        async with asyncio.timeout(_READ_S):
            wanted, got = await _states(self._leaf_bus, self._node), await _states(self._hub_bus, self._node)
            differing = sorted(key for key in wanted.keys() | got.keys() if wanted.get(key) != got.get(key))
            if differing:
                said.append(f"the hub's copy is another one of {', '.join(differing)}")
            for event in _EVENTS:
                stored, copied = (
                    await _event_ids(self._leaf_bus, event, self._node),
                    await _event_ids(self._hub_bus, event, self._node),
                )
                said += compare_events(event.name, stored, copied, may_repeat=self.losses > 0)
                self.counts[f"{event.name} at the hub"] = len(copied)
                self.counts[f"{event.name} repeated"] = len(repeated(copied))
        self.counts["states at the hub"] = len(got)
        return said


def compare_events(name: str, stored: Sequence[str], copied: Sequence[str], *, may_repeat: bool) -> list[str]:
    """Return what is wrong with the hub's copy of a node's events.

    Shapes: stored, copied — the ids in the order of the node's stream and of the hub's; may_repeat
    — one of the stores was restored to an earlier time: a repeated event then has its former id.
    Ids that only the hub has are its own controller's, or older than what the node keeps.

    >>> compare_events("health", ["a", "b"], ["a", "x", "b"], may_repeat=False)
    []
    >>> compare_events("health", ["a", "b"], ["b", "a", "a"], may_repeat=False)
    ['the hub has 1 events health more than once, first a', 'the hub has the events health in another order']
    """
    copied_ids, stored_ids = set(copied), set(stored)
    if missing := [event_id for event_id in stored if event_id not in copied_ids]:
        return [f"the hub does not have {len(missing)} of {len(stored)} events {name}, first {missing[0]}"]
    if may_repeat:
        return []
    twice = repeated(copied)
    said = [f"the hub has {len(twice)} events {name} more than once, first {twice[0]}"] if twice else []
    order = list(dict.fromkeys(event_id for event_id in copied if event_id in stored_ids))
    return said if order == list(stored) else [*said, f"the hub has the events {name} in another order"]


def repeated(ids: Iterable[str]) -> list[str]:
    """List the ids that occur more than once."""
    return [event_id for event_id, count in Counter(ids).items() if count > 1]


async def _states(bus: Bus, node: str) -> dict[str, bytes]:
    states: dict[str, bytes] = {}
    for state in _STATES:
        entries: tuple[Entry[Any], ...] = await bus.list(state, node=node)
        states |= {f"{state.name}/{state.key(**entry.parts)}": encode(entry.value) for entry in entries}
    return states


async def _event_ids(bus: Bus, event: Event[Any], node: str) -> list[str]:
    """Return the ids of a node's events in the order of the stream."""
    ids: list[str] = []
    async with aclosing(bus.uplink().events(event, node=node, behind=0)) as items:
        async for item in items:
            if item is Mark.CAUGHT_UP:
                break
            if isinstance(item, Delivery):
                ids.append(item.headers.get(_EVENT_ID, f"sequence {item.sequence}"))
            else:
                ids.clear()
    return ids


def leaf_servers(node: str, folder: Path, binary: Path | None) -> tuple[ShapedServer, ShapedServer, Link]:
    """Prepare the node's own server, the hub's, and the link between them.

    Errors: raises ConfigError for a server before 2.10, which no node may have for its own.
    """
    binary = binary or find_nats_server()
    version = version_of(binary)
    if version < (2, 10):
        got = ".".join(str(part) for part in version)
        raise ConfigError(
            f"a node's own server is 2.10 or later, {binary} is {got}", next_step="name another one by --nats-server"
        )
    ports: tuple[int, ...] = ()
    while len(ports) < 2:
        ports = tuple(dict.fromkeys((*ports, free_port())))
    # Otherwise the hub sends the leaf its own address (2.10 does so even with `no_advertise`), and
    # the leaf bypasses the link that is cut.
    listen = f'"127.0.0.1:{ports[0]}"\n  advertise: "127.0.0.1:{ports[1]}"'
    text = render_hub(version).replace('"0.0.0.0:7422"', listen)
    hub = ShapedServer(binary=binary, text=text, environment={"TOPOBUS_HUB_NAME": "hub"}, parent=folder)
    environment = {"TOPOBUS_LEAF_DOMAIN": domain_of(node), "TOPOBUS_LEAF_HUB_URL": f"nats://127.0.0.1:{ports[1]}"}
    leaf = ShapedServer(binary=binary, text=render_leaf(version), environment=environment, parent=folder)
    # Beside the services' logs, which are kept when something was violated.
    hub.log, leaf.log = folder / "nats-hub.log", folder / "nats.log"
    return leaf, hub, Link(ports[1], ports[0])


@asynccontextmanager
async def hub_side(node: str, leaf: NatsServer, hub: ShapedServer, link: Link) -> AsyncIterator[HubSide]:
    """Run the hub and the link until the block ends. The node's own server runs already."""
    async with (
        link,
        hub,
        Bus.session(NatsSettings(url=hub.url), name="topobus-cli") as hub_bus,
        Bus.session(NatsSettings(url=leaf.url, provisioner="topology"), name="topobus-cli") as leaf_bus,
    ):
        yield HubSide(node, hub, link, hub_bus, leaf_bus)
