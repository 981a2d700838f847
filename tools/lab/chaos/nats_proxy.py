"""A TCP proxy between clients and a nats-server that loses, doubles, delays and reorders single
messages, and swallows the confirmations of writes.

All other protocol lines pass unchanged. It parses the protocol only to find where a message begins
and ends: PUB and HPUB from a client, MSG and HMSG from the server.

Source: https://docs.nats.io/reference/reference-protocols/nats-protocol.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Self

from msgspec import Struct

from topobus.bus.streams.provision import bucket_subject
from topobus.formats.messages.catalogue import BUCKETS

__all__ = ["NatsProxy", "Trouble"]

_WITH_PAYLOAD = (b"PUB ", b"HPUB ", b"MSG ", b"HMSG ")
_LONGEST_LINE = 1 << 16
_WRITES = tuple(bucket_subject(state, "").encode() for state in BUCKETS)


class Trouble(Struct, frozen=True, kw_only=True):
    """The probability of each fault for a message. All zero: no message is affected."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    """Later messages overtake it."""
    delay_s: float = 0.2
    swallow: float = 0.0
    """The write happens, but is not confirmed."""


class NatsProxy:
    """Listens at a port of its own. Use as `async with NatsProxy(server_port, seed) as proxy: …`.

    It has no port before.
    """

    def __init__(self, server_port: int, seed: int) -> None:
        self.port = 0
        self.trouble = Trouble()
        self.met: Counter[str] = Counter()
        """Number of affected messages by fault."""
        self._server_port = server_port
        self._chance = random.Random(seed)
        self._listening: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LONGEST_LINE)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
        self.cut()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def cut(self) -> None:
        """End all connections without a notice, as a network does that is down for a moment."""
        for link in tuple(self._links):
            link.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        try:
            server_reader, server_writer = await asyncio.open_connection(
                "127.0.0.1", self._server_port, limit=_LONGEST_LINE
            )
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, writer, server_writer)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(link.pump(reader, server_writer, link.upward))
                group.create_task(link.pump(server_reader, writer, link.downward))
        except* (OSError, asyncio.IncompleteReadError, ValueError, _Ended):
            # One side is gone, so the other must end as well.
            pass
        finally:
            self._links.discard(link)
            link.abort()

    def draws(self, share: float, what: str) -> bool:
        """Decide at random whether a fault applies, and count it."""
        if share <= 0 or self._chance.random() >= share:
            return False
        self.met[what] += 1
        return True

    @property
    def delay_s(self) -> float:
        """A random delay."""
        return self._chance.random() * self.trouble.delay_s


class _Ended(Exception):
    """Ends the other direction of a connection that has ended."""


class _Link:
    """One client's connection."""

    def __init__(self, proxy: NatsProxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._confirmations: set[bytes] = set()

    def abort(self) -> None:
        """End both sides."""
        self._client.transport.abort()
        self._server.transport.abort()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pass_on: Callable[[list[bytes], bytes], bool]
    ) -> None:
        """Carry one direction, until it ends."""
        while True:
            line = await reader.readline()
            if not line.endswith(b"\n"):
                raise _Ended
            if not line.upper().startswith(_WITH_PAYLOAD):
                writer.write(line)
            else:
                words = line.split()
                message = line + await reader.readexactly(int(words[-1]) + 2)
                if pass_on(words, message):
                    self._send(writer, message)
            # What a frozen peer does not read must not fill our memory.
            await writer.drain()

    def upward(self, words: list[bytes], _message: bytes) -> bool:
        """Process a message to the server. False: it is lost."""
        # Formats: PUB subject [reply] size, and HPUB subject [reply] headers size.
        has_reply = len(words) == (5 if words[0].upper() == b"HPUB" else 4)
        if has_reply and words[1].startswith(_WRITES) and self._proxy.draws(self._proxy.trouble.swallow, "swallowed"):
            self._confirmations.add(words[2])
            return True
        return not self._proxy.draws(self._proxy.trouble.lose, "lost")

    def downward(self, words: list[bytes], _message: bytes) -> bool:
        """Process a message from the server. False: it is lost."""
        if words[1] in self._confirmations:
            self._confirmations.discard(words[1])
            return False
        return not self._proxy.draws(self._proxy.trouble.lose, "lost")

    def _send(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        proxy = self._proxy
        if proxy.draws(proxy.trouble.delay, "delayed"):
            asyncio.get_running_loop().call_later(proxy.delay_s, _write, writer, message)
            return
        writer.write(message)
        if proxy.draws(proxy.trouble.double, "doubled"):
            writer.write(message)


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    if not writer.transport.is_closing():
        writer.write(message)
