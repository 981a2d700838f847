"""nats-py's client with a check before it sends anything: where TLS is required, no byte crosses a
connection without it.

nats-py upgrades a connection only when the server's greeting asks for it, and the greeting is plain
text. An attacker in between could remove that request and receive user and password in clear. So
the connection itself is checked at the last step before CONNECT, whatever the greeting asked for:
at the first connect, at each later one, and at every server that a greeting named. A client is
connected once. Reconnecting is switched off, and the owner of a lost client makes another.

It also avoids two queues of nats-py that cost turns of the event loop. Data is written to the
socket directly while the socket takes it, not by a task. Messages are passed from the parser to
their callback, not by a queue and a task. Each of the two saves a fifth of a request's time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.command import hpub_cmd, pub_cmd

from topobus.bus.login.login import Login
from topobus.process.config import NatsSettings
from topobus.values.errors import PeerUnavailable, TopobusError

__all__ = ["GatedClient", "NotEncrypted", "connect_client", "headers_bytes"]

_CONNECT_TIMEOUT_S = 2
# Headers that read and write alike in every way: names of letters, digits, '-' and '_', one blank,
# and a value of ASCII with no blanks around it.
_PLAIN_LINES = re.compile(r"(?:[A-Za-z0-9_-]+: [!-~](?:[ -~]*[!-~])?\r\n)+(?:\r\n)?")


class NotEncrypted(nats.errors.Error):
    """Raised when a server offers no TLS where it is wanted: nothing was sent to it."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(
            f"the server at {server} offers no TLS, which {why} wants: nothing was sent to it, no password either"
        )


class GatedClient(Client):
    """A client that connects by TLS only, when `tls_because` names a reason for it."""

    def __init__(self, tls_because: str = "") -> None:
        super().__init__()
        self._tls_because = tls_because
        self._takers: dict[int, Callable[[Msg], Awaitable[None]]] = {}
        self._has_written = False
        """Whether something was written in this turn of the event loop."""

    async def listen_at_once(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> Subscription:
        """Subscribe, and call back for each message while it is parsed. The callback must not wait."""
        live = await self.subscribe(subject, queue=queue, cb=callback)
        self._takers[live._id] = callback
        return live

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._takers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        taker = self._takers.get(sid)
        if taker is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            await taker(self._build_message(sid, subject, reply, data, await self._process_headers(headers)))
        except Exception as err:  # noqa: BLE001
            # boundary: the client's read loop. nats-py ends it for
            # good when anything is raised here.
            await self._error_cb(err)

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        """Write a message at once, the first in a turn of the event loop: what many tasks send in one
        turn goes to the socket together at its end.

        When the socket accepts no more, nats-py's own task waits for it, and everything sent
        meanwhile waits too, so that the order stays.
        """
        block = _plain_block(headers) if headers else None
        stream = self._idle_stream()
        if stream is None or not subject or (block is None and headers is not None):
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(
            pub_cmd(subject, reply, payload) if block is None else hpub_cmd(subject, reply, block, payload)
        )
        if not self._has_written:
            self._write_pending(stream)
            self._has_written = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _write_pending(self, stream: asyncio.StreamWriter) -> None:
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        stream.writelines(pending)

    def _end_turn(self) -> None:
        """Write what was sent in the turn after the first.

        Where the socket takes no more, nats-py's own task writes it.
        """
        self._has_written = False
        stream = self._idle_stream() if self._pending else None
        if stream is not None:
            self._write_pending(stream)
        elif self._pending and self._flush_queue is not None and not self._flush_queue.full():
            # The task that checks for a full queue is the one that writes all that is pending.
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def _idle_stream(self) -> asyncio.StreamWriter | None:
        """Return the stream to write to if it has nothing buffered and no other task is about to
        write.

        None otherwise.
        """
        transport, queue = self._transport, self._flush_queue
        if not self.is_connected or not isinstance(transport, TcpTransport) or queue is None or not queue.empty():
            return None
        stream: asyncio.StreamWriter | None = transport._io_writer
        if stream is None or stream.is_closing() or stream.transport.get_write_buffer_size() > 0:
            return None
        return stream

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """Read headers as nats-py does: at once where all are plain, else by its own way."""
        text = raw.decode("ascii") if raw.isascii() else ""
        if _PLAIN_LINES.fullmatch(text) is None:
            return Client._parse_header_lines(raw)
        return dict([line.split(": ", 1) for line in text.strip().split("\r\n")])

    def _connect_command(self) -> bytes:
        if self._tls_because and not self.is_encrypted:
            server = self._current_server.uri if self._current_server is not None else None
            raise NotEncrypted(f"{server.hostname}:{server.port}" if server is not None else "?", self._tls_because)
        self._keep_quiet_at_the_end()
        return super()._connect_command()

    def _keep_quiet_at_the_end(self) -> None:
        """Mark this connection as encrypted for asyncio. nats-py's upgrade does not, and each end
        of it would be logged.
        """
        transport = self._transport
        if self.is_encrypted and isinstance(transport, TcpTransport) and transport._io_writer is not None:
            stream: Any = transport._io_writer.transport
            stream.get_protocol()._over_ssl = True

    @property
    def peer_certificate(self) -> bytes | None:
        """The server's certificate (DER), as it was verified when this client connected.

        None: no TLS.
        """
        transport = self._transport
        writer = transport._io_writer if isinstance(transport, TcpTransport) else None
        encrypted = writer.get_extra_info("ssl_object") if writer is not None else None
        shown: bytes | None = encrypted.getpeercert(binary_form=True) if encrypted is not None else None
        return shown

    @property
    def is_encrypted(self) -> bool:
        """Say whether what is sent now is encrypted."""
        transport = self._transport
        if isinstance(transport, TcpTransport):
            writer = transport._io_writer
            return writer is not None and writer.get_extra_info("ssl_object") is not None
        # A websocket is encrypted from its first byte or never.
        return self._current_server is not None and self._current_server.uri.scheme == "wss"


def headers_bytes(headers: Mapping[str, str]) -> int:
    """Count the bytes of headers in a message, without its first line."""
    text = "".join([*headers, *headers.values()])
    return 4 * len(headers) + (len(text) if text.isascii() else len(text.encode()))


def _plain_block(headers: dict[str, str]) -> bytes | None:
    """Write headers at once that need no change.

    None for all others, which nats-py checks letter by letter and writes one by one.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    is_plain = _PLAIN_LINES.fullmatch(lines) is not None and lines.count("\n") == len(headers)
    return f"NATS/1.0\r\n{lines}\r\n".encode() if is_plain else None


async def connect_client(
    client: Client,
    servers: list[str],
    settings: NatsSettings,
    *,
    name: str,
    login: Login,
    on_closed: Callable[[], Awaitable[None]],
    on_error: Callable[[Exception], Awaitable[None]],
) -> None:
    """Connect a new client to one of the servers, with nats-py's own reconnecting switched off.

    Shapes: login — as `topobus.bus.login.login.read_login` returns it; on_closed — called once when
    the client is lost; on_error — called with each later error of the client or the server.
    Errors: raises OSError, TimeoutError, nats.errors.Error or PeerUnavailable when no server takes us.
    Cost: up to 2 s per server, 6 s in all.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S * 3):
            await client.connect(
                servers,
                name=name,
                allow_reconnect=False,
                # One more try at each server, at once, then NoServersError: the caller decides how long
                # to wait.
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=_CONNECT_TIMEOUT_S,
                # A canary finds a lost server sooner. This ping stays as nats-py's own last resort.
                ping_interval=30,
                max_outstanding_pings=2,
                pending_size=0,
                user=login.user or None,
                password=login.password,
                tls=login.tls,
                closed_cb=on_closed,
                error_cb=on_error,
            )
    except (OSError, nats.errors.Error, TopobusError):
        raise
    except Exception as err:
        # boundary: the greeting of whatever listens there. nats-py looks into it without a check.
        raise PeerUnavailable(f"no NATS server listens there: {type(err).__name__}: {err}") from err
