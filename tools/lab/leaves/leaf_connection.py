"""One simulated leaf's connection to a hub: interest, messages with their acknowledgement, and
pings.

It has nothing of a server's routing. The hub's messages go to the node's listeners. The hub's
interest (`interest`) is recorded, and all frames are counted. It does not connect again by itself:
the simulation of the node decides when.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from lab.leaves.leaf_wire import (
    Failed,
    Frame,
    HubInfo,
    Interest,
    LeafParser,
    Message,
    Ping,
    Pong,
    connect_line,
    interest_line,
    message_bytes,
)
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["LeafConnection", "NoAnswer"]

_LOOP_PREFIX = "$LDS."


class NoAnswer(PeerUnavailable):
    """The hub did not answer in time, or the connection ended meanwhile: the message may have been
    stored or not.
    """


class LeafConnection(asyncio.Protocol):
    """Made by `open`, and ended by `close`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.interest: set[str] = set()
        """Subjects with a listener behind the hub, as far as this leaf may send there."""
        self.counts: Counter[str] = Counter()
        """Frames and bytes since the connection began: `Message in`, `Message out`, `Interest in`,
        `bytes in`, …"""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended, with the hub's last message."""
        self._parser = LeafParser()
        self._transport: asyncio.Transport | None = None
        self._is_accepted = False
        self._judged = asyncio.Event()
        self._greeting: Callable[[], bytes] = bytes
        self._listeners: dict[str, Callable[[Message], None]] = {}
        self._inbox = f"_INBOX.relay.nats.{secrets.token_hex(8)}"
        self._answers: dict[str, asyncio.Future[Message]] = {}
        self._pongs: list[asyncio.Future[None]] = []
        self._asked = 0
        self._last_error = ""

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        name: str,
        account: str = "$G",
        domain: str = "",
        user: str = "",
        password: str = "",
        cluster: str = "",
        denied: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> LeafConnection:
        """Connect to a hub's leaf port. Returns when the hub has accepted the leaf.

        Errors: raises PeerUnavailable when no server listens there, when the hub refuses or when it
        does not answer in time.
        """
        connection = cls(name)
        server_id = f"N{secrets.token_hex(27).upper()}"
        connection._greeting = lambda: b"".join(
            (
                connect_line(
                    name=name,
                    server_id=server_id,
                    account=account,
                    domain=domain,
                    user=user,
                    password=password,
                    cluster=cluster,
                    denied=denied,
                ),
                # A server notices by its own subject of this kind that two of them are connected in
                # a circle.
                interest_line(f"{_LOOP_PREFIX}{secrets.token_hex(11)}"),
                interest_line(f"{connection._inbox}.*"),
                b"PING\r\n",
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
                await connection._judged.wait()
        except (OSError, TimeoutError) as err:
            connection.close()
            raise PeerUnavailable(
                f"{name}: cannot connect to the hub at {host}:{port}: {str(err) or f'no answer in {timeout_s:g} s'}"
            ) from err
        if connection.ended.done():
            raise PeerUnavailable(f"{name}: the hub at {host}:{port} refused the leaf: {connection.ended.result()}")
        return connection

    def listen(self, subject: str, listener: Callable[[Message], None]) -> None:
        """Send the hub an interest in a subject. `listener` is called with each message of exactly
        this subject.
        """
        self._listeners[subject] = listener
        self._send(interest_line(subject), "Interest")

    def publish(self, subject: str, data: bytes, *, headers: bytes = b"", reply: str = "") -> None:
        """Send one message, without a confirmation that it arrived."""
        self._send(message_bytes(subject, data, headers=headers, reply=reply), "Message")

    async def request(self, subject: str, data: bytes, *, headers: bytes = b"", timeout_s: float = 30.0) -> Message:
        """Send one message and wait for the answer.

        Errors: raises NoAnswer.
        """
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[reply] = answer
        try:
            self.publish(subject, data, headers=headers, reply=reply)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as err:
            raise NoAnswer(f"{self.name}: no answer at {subject} within {timeout_s:g} s") from err
        finally:
            self._answers.pop(reply, None)

    async def barrier(self, *, timeout_s: float = 60.0) -> None:
        """Wait until the hub has processed all that was sent.

        Errors: raises NoAnswer.
        """
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self._send(b"PING\r\n", "Ping")
        try:
            async with asyncio.timeout(timeout_s):
                await pong
        except TimeoutError as err:
            raise NoAnswer(f"{self.name}: no pong within {timeout_s:g} s") from err

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. The hub sends first."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Process what the hub sent."""
        self.counts["bytes in"] += len(data)
        try:
            for frame in self._parser.feed(data):
                self.counts[f"{type(frame).__name__} in"] += 1
                self._take(frame)
        except (ContractError, ValueError) as err:
            self._last_error = str(err)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everything that waits."""
        self._transport = None
        reason = self._last_error or (str(exc) if exc else "the connection ended")
        if not self.ended.done():
            self.ended.set_result(reason)
        self._judged.set()
        lost = NoAnswer(f"{self.name}: {reason}")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(lost)
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(lost)
        self._pongs.clear()

    def _take(self, frame: Frame) -> None:
        match frame:
            case HubInfo():
                if self.counts["HubInfo in"] == 1:
                    self._send(self._greeting(), "Greeting")
            case Pong():
                if not self._is_accepted:
                    self._is_accepted = True
                    self._judged.set()
                elif self._pongs and not (pong := self._pongs.pop(0)).done():
                    pong.set_result(None)
            case Ping():
                self._send(b"PONG\r\n", "Pong")
            case Interest():
                if not frame.subject.startswith(_LOOP_PREFIX):
                    (self.interest.add if frame.is_wanted else self.interest.discard)(frame.subject)
            case Failed():
                self._last_error = frame.text
            case Message():
                self._deliver(frame)

    def _deliver(self, message: Message) -> None:
        answer = self._answers.pop(message.subject, None)
        if answer is not None:
            if not answer.done():
                answer.set_result(message)
            return
        listener = self._listeners.get(message.subject)
        if listener is None:
            self.counts["unasked in"] += 1
            return
        listener(message)

    def _send(self, data: bytes, kind: str) -> None:
        if self._transport is None or self._transport.is_closing():
            raise NoAnswer(f"{self.name}: not connected to the hub")
        self._transport.write(data)
        self.counts[f"{kind} out"] += 1
        self.counts["bytes out"] += len(data)
