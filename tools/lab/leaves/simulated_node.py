"""One simulated node of a fleet: it sends the hub what a node's relay would send, waits for
acknowledgements, answers the hub's requests, and is otherwise silent.

A node whose connection ended connects again as a leaf server does: at once, then after a second and
up to a second more each time (nats-server: leafnodes `reconnect: 1` and its jitter).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

from docpages.nats_files import DENIED_IMPORTS, domain_of
from lab.leaves.leaf_connection import LeafConnection, NoAnswer
from lab.leaves.leaf_wire import Message
from lab.leaves.node_content import NodeContent, Saying
from topobus.bus.asks.ask_headers import PING
from topobus.bus.server_config.up_subjects import up_nouns, up_stored_subject, up_subject
from topobus.bus.streams.provision import bucket_subject
from topobus.formats.messages.catalogue import ASKS, FORGET, PLACE, PLAN, PREFER
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import PlaceReply, PreferReply
from topobus.formats.messages.nouns import Ask, State
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Reason, Refusal

__all__ = ["SimulatedNode", "asked_subjects", "read_headers", "stored_messages", "write_headers"]

_FIRST_LINE = "NATS/1.0"
_RECONNECT_S = 1.0
# For a busy disk under all nodes at once: longer than any of them waited here.
_SAY_LIMIT_S = 600.0
_NOUNS = {noun.name: noun for noun in up_nouns()}


class SimulatedNode:
    """Make one, then `join`. `leave` at the end."""

    def __init__(self, name: str, content: NodeContent, host: str, port: int, *, cluster: str = "") -> None:
        """Prepare a node. `cluster` is the common name of a fleet's leaves, for which a hub before
        2.12 does not send each of them the interest of all others.
        """
        self.name = name
        self._cluster = cluster
        self._sayings = content.for_node(name)
        self._host = host
        self._port = port
        self._connection: LeafConnection | None = None
        self.losses = 0
        """How often the link ended while a message was sent."""
        self._answers = {
            PREFER.subject(node=name): encode(PreferReply(devices=())),
            PLACE.subject(node=name): encode(
                PlaceReply(decision_id=f"simulated-{name}", node=name, result=_refusal(name))
            ),
        }

    @property
    def connection(self) -> LeafConnection:
        """The present connection.

        Errors: raises RuntimeError before the node has joined.
        """
        if self._connection is None:
            raise RuntimeError(f"{self.name} has not joined")
        return self._connection

    async def join(self) -> None:
        """Connect, and listen to the requests for this node. Returns when the hub knows.

        Errors: raises PeerUnavailable.
        """
        connection = await LeafConnection.open(
            self._host,
            self._port,
            name=self.name,
            domain=domain_of(self.name),
            cluster=self._cluster,
            denied=DENIED_IMPORTS,
        )
        device_classes = sorted(
            {saying.parts["device_class"] for saying in self._sayings if "device_class" in saying.parts}
        )
        for subject in asked_subjects(self.name, device_classes):
            connection.listen(subject, lambda message: self._answer(connection, message))
        await connection.barrier()
        self._connection = connection

    async def rejoin(self) -> int:
        """Wait until the connection has ended, then `persist`."""
        await self.connection.ended
        return await self.persist()

    async def persist(self) -> int:
        """Join, as often as necessary: a hub that is busy with all the others refuses a leaf that
        is not done in time.

        Returns the number of attempts.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                await self.join()
                return attempts
            except PeerUnavailable:
                await asyncio.sleep(_RECONNECT_S + random.uniform(0.0, _RECONNECT_S))

    def leave(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()

    async def say_all(self) -> list[float]:
        """Send each state and event and await its acknowledgement, one after the other.

        Returns the times until it came, in milliseconds. A link that ends meanwhile is made again
        (`losses` counts that), and what was not acknowledged is sent again.
        Errors: raises NoAnswer when the hub refuses one.
        """
        times_ms: list[float] = []
        for saying in self._sayings:
            while True:
                try:
                    times_ms.append(await self.say(saying))
                    break
                except NoAnswer:
                    if not self.connection.ended.done():
                        raise
                    self.losses += 1
                    await self.persist()
        return times_ms

    async def say(self, saying: Saying) -> float:
        """Send one state or event.

        Returns the milliseconds until the hub's stream has acknowledged it.

        Errors: raises NoAnswer when the hub's stream did not answer in time, or refused it.
        """
        subject = up_subject(_NOUNS[saying.noun], node=self.name, **saying.parts)
        began = time.monotonic()
        answer = await self.connection.request(
            subject,
            saying.data,
            headers=write_headers(saying.headers) if saying.headers else b"",
            timeout_s=_SAY_LIMIT_S,
        )
        if b'"stream"' not in answer.data or b'"error"' in answer.data:
            raise NoAnswer(f"{self.name}: the hub did not store {subject}: {(answer.data or answer.headers)[:300]!r}")
        return (time.monotonic() - began) * 1000

    async def change(self, noun: str, until: float) -> list[float]:
        """Send one state again and again, each time when the one before is acknowledged, until the
        monotonic clock reaches `until`, but at least once.
        """
        saying = next(saying for saying in self._sayings if saying.noun == noun)
        times_ms = [await self.say(saying)]
        while time.monotonic() < until:
            times_ms.append(await self.say(saying))
        return times_ms

    async def compare(self) -> list[float]:
        """Ask the hub for what it has of each state, as a relay does after a cut.

        Returns the times until the answers, in milliseconds.

        Errors: raises NoAnswer.
        """
        times_ms: list[float] = []
        for saying in self._sayings:
            noun = _NOUNS[saying.noun]
            if isinstance(noun, State):
                began = time.monotonic()
                await self.connection.request(
                    up_stored_subject(noun, node=self.name, **saying.parts), b"", timeout_s=_SAY_LIMIT_S
                )
                times_ms.append((time.monotonic() - began) * 1000)
        return times_ms

    def _answer(self, connection: LeafConnection, message: Message) -> None:
        if not message.reply:
            return
        asked = read_headers(message.headers)
        if PING in asked:
            connection.publish(message.reply, b"", headers=write_headers({PING: f"simulated-{self.name}"}))
            return
        connection.publish(message.reply, self._answers.get(message.subject, b"{}"))


def stored_messages(node: str, content: NodeContent) -> list[tuple[str, bytes, bytes]]:
    """Return a node's messages as the hub stores them: subject, headers and data."""
    messages: list[tuple[str, bytes, bytes]] = []
    for saying in content.for_node(node):
        noun = _NOUNS[saying.noun]
        parts = {"node": node, **saying.parts}
        subject = bucket_subject(noun, noun.key(**parts)) if isinstance(noun, State) else noun.subject(**parts)
        messages.append((subject, write_headers(saying.headers) if saying.headers else b"", saying.data))
    return messages


def asked_subjects(node: str, device_classes: Iterable[str]) -> tuple[str, ...]:
    """List the subjects of requests to one node: the interest that its leaf sends to the hub when
    topology, gateway and device services listen behind it.

    >>> len(asked_subjects("n1", ["gpu", "nic"]))
    24
    """
    own = [ask for ask in ASKS if ask not in (PLAN, FORGET)]
    classes = sorted(device_classes)
    return tuple(subject for ask in own for subject in _subjects(ask, node, classes))


def write_headers(headers: Mapping[str, str]) -> bytes:
    r"""Write headers as NATS does.

    >>> write_headers({"a": "b"})
    b'NATS/1.0\r\na: b\r\n\r\n'
    """
    return "".join([f"{_FIRST_LINE}\r\n", *(f"{key}: {value}\r\n" for key, value in headers.items()), "\r\n"]).encode()


def read_headers(headers: bytes) -> dict[str, str]:
    r"""Read headers as NATS writes them. Other lines are left out.

    >>> read_headers(b"NATS/1.0\r\na: b\r\n\r\n")
    {'a': 'b'}
    """
    pairs = (line.partition(":") for line in headers.decode("utf-8", "replace").splitlines()[1:])
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _subjects(ask: Ask[Any, Any], node: str, device_classes: list[str]) -> list[str]:
    if "device_class" in ask.parts:
        return [ask.subject(node=node, device_class=device_class) for device_class in device_classes]
    return [ask.subject(node=node)]


def _refusal(node: str) -> Refusal:
    return Refusal(reasons=(Reason(code="policy-forbidden", message=f"{node} is simulated", facts={"node": node}),))
