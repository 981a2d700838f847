"""The publications of one simulated node: the values and events that real services wrote for one
node, with the names of other nodes put in.

They are recorded from a node of the benchmarks (`lab.bench.node_processes`) on a recorded machine,
with some pods placed, as a node's relay would send them. Each simulated node sends the same, so a
hub that kept equal bytes once would be measured too small, but nats-server stores every message
separately.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from lab.bench.node_processes import NODE, bench_node
from topobus.bus.bus import Bus, Start
from topobus.formats.messages.catalogue import EVENTS, PLACE, STATES
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import PlaceRequest
from topobus.formats.messages.nouns import Event, State
from topobus.formats.messages.stored import to_stored
from topobus.process.config import NatsSettings
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

__all__ = ["NodeContent", "Saying", "kept_content", "node_name", "read_content", "record_content"]

_SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology")
_PODS = 4


class Saying(Struct, frozen=True):
    """One message of a node: the noun, the other parts of its key or subject, the value, and the
    headers of an event.
    """

    noun: str
    parts: dict[str, str]
    data: bytes
    headers: dict[str, str] = {}


class NodeContent(Struct, frozen=True):
    """All messages of one node when it starts."""

    node: str
    """The name in the recorded bytes, which another node's replaces."""
    sayings: tuple[Saying, ...]

    def for_node(self, name: str) -> tuple[Saying, ...]:
        """Return the same messages for a node of another name."""
        return tuple(
            Saying(
                saying.noun,
                saying.parts,
                saying.data.replace(self.node.encode(), name.encode()),
                {key: value.replace(self.node, name) for key, value in saying.headers.items()},
            )
            for saying in self.sayings
        )

    def bytes_of(self, noun: str = "") -> int:
        """Add up the values of one noun, or of all."""
        return sum(len(saying.data) for saying in self.sayings if noun in ("", saying.noun))


def node_name(number: int) -> str:
    """Name a simulated node. All names are of one length.

    >>> node_name(7)
    'node-00007'
    """
    return f"node-{number:05d}"


def kept_content(file: Path | None, machine: str) -> NodeContent:
    """Read a content from a file, or record it and store it there. None stores nothing.

    Errors: raises OSError for a file that cannot be read or written.
    """
    if file is not None and file.exists():
        return msgspec.json.decode(file.read_bytes(), type=NodeContent)
    content = asyncio.run(record_content(machine))
    if file is not None:
        file.write_bytes(msgspec.json.encode(content))
    return content


async def record_content(machine: str = "dgx") -> NodeContent:
    """Run a node's services on a recorded machine, place some pods, and read what they wrote.

    Cost: some ten seconds. The processes have ended when it returns.
    """
    async with bench_node(_SERVICES, machine=machine) as node:
        async with Bus.session(NatsSettings(url=node.nats.url), name="topobus-cli") as asking:
            for number in range(_PODS):
                await asking.ask(PLACE, _pod(number), node=NODE)
        return await read_content(node.bus, NODE)


async def read_content(bus: Bus, node: str) -> NodeContent:
    """Read all that the buckets and streams hold of one node."""
    sayings: list[Saying] = []
    for state in STATES:
        if state.parts[0] == "node":
            sayings += await _read_state(bus, state, node)
    for event in EVENTS:
        sayings += await _read_event(bus, event, node)
    return NodeContent(node=node, sayings=tuple(sayings))


async def _read_state(bus: Bus, state: State[Any], node: str) -> list[Saying]:
    return [
        Saying(state.name, _without_node(entry.parts), to_stored(state, entry.value, where=state.name))
        for entry in await bus.list(state, node=node)
    ]


async def _read_event(bus: Bus, event: Event[Any], node: str) -> list[Saying]:
    span = await bus.span(event)
    if span.newest < span.oldest:
        return []
    sayings: list[Saying] = []
    async with aclosing(bus.follow(event, start=Start.PRESENT, node=node)) as received_events:
        async for received in received_events:
            # The headers of topobus.bus.streams.events that matter for the size: each of them is
            # stored with the event.
            event_id = f"{node}-{event.name}-{received.sequence}"
            headers = {
                "Nats-Msg-Id": event_id,
                "Content-Type": "application/json",
                "ce-specversion": "1.0",
                "ce-id": event_id,
                "ce-type": event.event_type,
                "ce-source": quote(f"/topobus/{event.writer[0]}"),
                "ce-subject": quote("/".join(received.parts[part] for part in event.parts)),
                "ce-time": received.time,
            }
            sayings.append(Saying(event.name, _without_node(received.parts), encode(received.value), headers))
            if received.sequence >= span.newest:
                break
    return sayings


def _without_node(parts: dict[str, str]) -> dict[str, str]:
    return {part: value for part, value in parts.items() if part != "node"}


def _pod(number: int) -> PlaceRequest:
    devices = tuple(DeviceRequest(device_class=name, count=2) for name in ("gpu", "nic"))
    owner = Owner(
        kind=OwnerKind.POD, name=f"training-{number}", namespace="default", uid=f"00000000-0000-0000-0000-{number:012d}"
    )
    pod = PodRequest(owner=owner, containers=(ContainerRequest(name="main", cpus=16, devices=devices),))
    return PlaceRequest(op_id=f"place-{owner.uid}", pod=pod)
