"""Reads and writes nats-server's leaf protocol, as the side that connects to a hub.

Bytes from the hub, in any pieces, become frames (information, interest, messages, pings, errors).
It does no I/O.

Source: nats-server, server/parser.go and server/leafnode.go (processLeafSub, processLeafMsgArgs,
processLeafHeaderMsgArgs, leafConnectInfo); the lines are the same from 2.2 to 2.15. A hub that
offers compression in its INFO accepts a leaf that does not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from topobus.values.errors import ContractError

__all__ = [
    "Failed",
    "Frame",
    "HubInfo",
    "Interest",
    "LeafParser",
    "Message",
    "Ping",
    "Pong",
    "connect_line",
    "interest_line",
    "message_bytes",
]

_END = b"\r\n"
# nats-server's MAX_CONTROL_LINE_SIZE. An INFO may be longer, with the URLs of a large cluster.
_LONGEST_LINE = 64 * 1024


class HubInfo(Struct, frozen=True):
    """The hub's INFO: first when a connection begins, and again once it has accepted it."""

    server_name: str = ""
    version: str = ""
    max_payload: int = 0
    remote_account: str = ""
    """The hub's account that this leaf is bound to. Empty in the first INFO."""


class Interest(Struct, frozen=True):
    """The hub has a listener at a subject (LS+), or no longer has one (LS-)."""

    subject: str
    queue: str
    is_wanted: bool


class Message(Struct, frozen=True):
    """One message from the hub."""

    subject: str
    reply: str
    headers: bytes
    data: bytes


class Ping(Struct, frozen=True):
    """The hub asks for a sign of life."""


class Pong(Struct, frozen=True):
    """The hub answers our ping: it has processed all that we sent before."""


class Failed(Struct, frozen=True):
    """The hub refuses something, or ends the connection."""

    text: str


Frame = HubInfo | Interest | Message | Ping | Pong | Failed


class LeafParser:
    r"""The frames of one connection. Bytes that end within a frame wait for the rest.

    >>> parser = LeafParser()
    >>> list(parser.feed(b"PING\r\nLS+ up.*.mach"))
    [Ping()]
    >>> list(parser.feed(b"ine\r\nLMSG a.b 2\r\nhi\r\n"))
    [Interest(subject='up.*.machine', queue='', is_wanted=True), Message(subject='a.b', reply='', headers=b'', data=b'hi')]
    """  # noqa: E501

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._read = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes, and yield the frames that they complete.

        Errors: raises ContractError for a line that is not of the protocol.
        """
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame
        del self._buffer[: self._read]
        self._read = 0

    def _next(self) -> Frame | None:
        end = self._buffer.find(_END, self._read)
        if end < 0:
            if len(self._buffer) - self._read > _LONGEST_LINE:
                raise ContractError(f"leaf protocol: a line of more than {_LONGEST_LINE} bytes")
            return None
        line = bytes(self._buffer[self._read : end])
        word, _, rest = line.partition(b" ")
        operation = word.upper()
        if operation in (b"LMSG", b"HMSG"):
            return self._message(rest.split(), end + len(_END), has_headers=operation == b"HMSG")
        self._read = end + len(_END)
        return _read_line(operation, rest.decode(), line)

    def _message(self, words: list[bytes], start: int, *, has_headers: bool) -> Message | None:
        sizes = 2 if has_headers else 1
        try:
            headers_bytes = int(words[-2]) if has_headers else 0
            total_bytes = int(words[-1])
            names = [word.decode() for word in words[:-sizes]]
            subject = names[0]
        except (IndexError, ValueError) as err:
            raise ContractError(f"leaf protocol: cannot read the arguments of a message: {words!r}") from err
        end = start + total_bytes
        if len(self._buffer) < end + len(_END):
            return None
        # With queue groups the reply has a mark before it: `+ reply queue…`, or `| queue…` where
        # there is none.
        reply = ""
        if len(names) > 1 and names[1] != "|":
            reply = names[2] if names[1] == "+" else names[1]
        self._read = end + len(_END)
        body = start + headers_bytes
        return Message(
            subject=subject, reply=reply, headers=bytes(self._buffer[start:body]), data=bytes(self._buffer[body:end])
        )


def connect_line(
    *,
    name: str,
    server_id: str,
    account: str,
    domain: str = "",
    user: str = "",
    password: str = "",
    cluster: str = "",
    denied: Sequence[str] = (),
) -> bytes:
    """Build the line that a leaf begins with.

    Shapes: name — the leaf's server name; server_id — one of its own for each connection that may
    exist at the same time; account — the leaf's own account; cluster — the hub does not send leaves
    of one cluster each other's interest; denied — what the leaf does not accept from the hub
    (`deny_imports`).
    """
    options: dict[str, object] = {
        "version": "2.10.27",
        "server_id": server_id,
        "name": name,
        "headers": True,
        "jetstream": bool(domain),
        "remote_account": account,
        "protocol": 1,
    }
    more = {"domain": domain, "user": user, "pass": password, "cluster": cluster, "deny_pub": list(denied)}
    options |= {key: value for key, value in more.items() if value}
    return b"CONNECT " + msgspec.json.encode(options) + _END


def interest_line(subject: str) -> bytes:
    r"""Build the line for a listener at this leaf.

    >>> interest_line("place.n1")
    b'LS+ place.n1\r\n'
    """
    return b"LS+ %b%b" % (subject.encode(), _END)


def message_bytes(subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> bytes:
    r"""Build one message for the hub. `headers` are as NATS writes them, with their first line and
    the empty one at the end.

    >>> message_bytes("a", b"hi", reply="b")
    b'LMSG a b 2\r\nhi\r\n'
    """
    words = [
        subject,
        *([reply] if reply else []),
        *([str(len(headers))] if headers else []),
        str(len(headers) + len(data)),
    ]
    return b"".join((b"HMSG " if headers else b"LMSG ", " ".join(words).encode(), _END, headers, data, _END))


def _read_line(operation: bytes, rest: str, line: bytes) -> Frame:
    match operation:
        case b"PING":
            return Ping()
        case b"PONG":
            return Pong()
        case b"INFO":
            return msgspec.json.decode(rest, type=HubInfo)
        case b"LS+" | b"LS-":
            # A queue group has a number of listeners. One that has ended has none.
            subject, *queue = rest.split()
            return Interest(subject=subject, queue=queue[0] if queue else "", is_wanted=operation == b"LS+")
        case b"-ERR":
            return Failed(text=rest.strip("'"))
        case _:
            raise ContractError(f"leaf protocol: a line that begins with {line[:40]!r}")
