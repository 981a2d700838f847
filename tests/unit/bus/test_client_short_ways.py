"""What our client does otherwise than nats-py to save turns of the event loop: the same messages,
the same headers, the same order.
"""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from topobus.bus.connection.client import GatedClient, headers_bytes

LINES = st.lists(
    st.sampled_from(
        [
            b"Name: value",
            b"a:b",
            b": x",
            b"no colon",
            b"two words: x",
            b"\x1cname: x",
            b"na\xc3\xafve: x",
            b" Name : v\xff ",
            b"",
        ]
    )
)


@given(lines=LINES)
def test_headers_are_those_of_nats_py_when_lines_are_odd(lines: list[bytes]) -> None:
    """Names with blanks, names that are no ASCII and lines without a colon are left out, as nats-py
    does it.
    """
    raw = b"\r\n".join(lines)

    assert GatedClient._parse_header_lines(raw) == Client._parse_header_lines(raw)


@given(raw=st.binary(max_size=60))
def test_headers_are_those_of_nats_py_when_bytes_are_random(raw: bytes) -> None:
    """Whatever a peer sends is read in the same way."""
    assert GatedClient._parse_header_lines(raw) == Client._parse_header_lines(raw)


NAMES = st.sampled_from(
    ["Topobus-Sent-Ms", "traceparent", "A", "a b", " A", "", "\u00e4", "a:b", "Nats-Expected-Stream", "x_y"]
)
VALUES = st.sampled_from(["1", "", " padded ", "two\nlines", "carriage\rreturn", "\u00fcber", "a: b", "x" * 300])


@given(headers=st.none() | st.dictionaries(NAMES, VALUES, max_size=5), reply=st.sampled_from(["", "_INBOX.a"]))
async def test_sent_bytes_are_those_of_nats_py_when_headers_are_plain_or_odd(
    headers: dict[str, str] | None, reply: str
) -> None:
    """The short way writes what the long way would, and leaves to it what is not plain: its
    refusals stay, too.
    """
    stream, other = _Stream(), Client()
    client = _connected(stream)
    other._flush_queue = None
    errors: list[str] = []
    for sender in (client, other):
        try:
            await sender._send_publish("a.b", reply, b"payload", 7, headers)
        except nats.errors.BadHeaderError as err:
            errors.append(str(err))

    # What is not plain waits for nats-py's task.
    assert b"".join([*stream.written, *client._pending]) == b"".join(other._pending)
    assert len(errors) in (0, 2)
    assert len({*errors}) < 2


@pytest.mark.parametrize("headers", [{}, {"a": "b"}, {"Long": "\u00fc\u20ac", "B": ""}])
def test_headers_bytes_is_their_length_on_the_wire_when_letters_take_more_than_a_byte(headers: dict[str, str]) -> None:
    """A message is refused by its bytes, not by its letters."""
    assert headers_bytes(headers) == len("".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode())


async def test_taker_has_each_message_and_raises_nothing_into_the_read_loop_when_it_fails() -> None:
    """A fault in what takes a message is an error of the client's and does not end its reading. What
    comes after the end of a subscription is dropped.
    """
    client = _connected(_Stream())
    errors: list[Exception] = []

    async def note(err: Exception) -> None:
        errors.append(err)

    subjects: list[str] = []

    async def take(message: Any) -> None:
        subjects.append(message.subject)
        if message.subject == "bad":
            raise ValueError("bad")

    client._error_cb = note
    live = await client.listen_at_once("a.*", take)
    for subject in (b"bad", b"\xff", b"good"):
        await client._process_msg(live._id, subject, b"", b"data", b"NATS/1.0\r\nA: b\r\n\r\n")
    await live.unsubscribe()
    await client._process_msg(live._id, b"late", b"", b"", b"")

    assert subjects == ["bad", "good"]
    assert [type(err) for err in errors] == [ValueError, UnicodeDecodeError]
    assert (client.stats["in_msgs"], client.stats["in_bytes"]) == (4, 12)


async def test_flush_leaves_it_to_nats_py_when_there_is_no_connection() -> None:
    """Without a socket nothing is written, and nothing is lost that nats-py holds back."""
    client = GatedClient()
    client._pending = [b"PUB"]

    assert client._idle_stream() is None
    assert client._pending == [b"PUB"]


class _Stream:
    """A socket's writer that holds so many bytes back."""

    def __init__(self, waiting_bytes: int = 0) -> None:
        self.written: list[bytes] = []
        self.writes: list[bytes] = []
        self.waiting_bytes = waiting_bytes

    @property
    def transport(self) -> _Stream:
        return self

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: list[bytes]) -> None:
        self.written += parts
        self.writes.append(b"".join(parts))


def _connected(stream: _Stream) -> GatedClient:
    client = GatedClient()
    client._status = Client.CONNECTED
    client._max_payload = 1024
    client._transport = TcpTransport()
    client._transport._io_writer = stream  # type: ignore[assignment]
    client._flush_queue = asyncio.Queue()
    client._flusher_task = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[assignment]
    return client


async def test_publish_is_in_the_socket_when_it_returns_and_the_socket_is_idle() -> None:
    """No task comes in between, and what was pending goes first."""
    stream = _Stream()
    client = _connected(stream)
    client._pending, client._pending_data_size = [b"SUB inbox 1\r\n"], 13

    await client.publish("a.b", b"x")

    assert b"".join(stream.written) == b"SUB inbox 1\r\nPUB a.b  1\r\nx\r\n"
    assert (client._pending, client._pending_data_size) == ([], 0)


@pytest.mark.parametrize("waiting_bytes", [1, 65536])
async def test_publish_waits_its_turn_when_the_socket_has_not_taken_what_came_before(waiting_bytes: int) -> None:
    """What is sent while a socket holds back goes behind it, by nats-py's own task, which waits for
    the socket.
    """
    stream = _Stream(waiting_bytes)
    client = _connected(stream)

    await client.publish("a.b", b"x")
    stream.waiting_bytes = 0
    await client.publish("a.b", b"y")

    assert stream.written == []
    assert client._pending == [b"PUB a.b  1\r\nx\r\n", b"PUB a.b  1\r\ny\r\n"]
    assert client._flush_queue is not None
    assert client._flush_queue.qsize() == 1


async def test_messages_of_one_turn_go_to_the_socket_in_two_writes() -> None:
    """The first goes at once, for most are alone.

    All others together at the turn's end, in order.
    """
    stream = _Stream()
    client = _connected(stream)
    for number in range(4):
        await client.publish(f"a.{number}", b"x")
    in_turn = list(stream.writes)

    await asyncio.sleep(0)
    await client.publish("a.4", b"x")

    assert in_turn == [b"PUB a.0  1\r\nx\r\n"]
    assert stream.writes[1:] == [
        b"".join(b"PUB a.%d  1\r\nx\r\n" % number for number in (1, 2, 3)),
        b"PUB a.4  1\r\nx\r\n",
    ]


async def test_messages_of_one_turn_are_left_to_nats_py_when_the_socket_is_full_at_its_end() -> None:
    """What cannot be written now is not lost: nats-py's own task is told to write it."""
    stream = _Stream()
    client = _connected(stream)
    await client.publish("a.0", b"x")
    await client.publish("a.1", b"x")
    stream.waiting_bytes = 1

    await asyncio.sleep(0)

    assert client._pending == [b"PUB a.1  1\r\nx\r\n"]
    assert client._flush_queue is not None
    assert client._flush_queue.qsize() == 1
