"""Frames of the NRI connection: bytes into ttrpc messages of two channels, and back.

Holds no socket. One Unix socket carries two byte streams, because the runtime calls the plugin and
the plugin calls the runtime. Each piece of a stream has a header of 8 bytes (channel, length).
Within a stream each ttrpc message has a header of 10 bytes (length, stream id, type, flags). A
message may be cut into pieces anywhere. Source: containerd/nri pkg/net/multiplex, containerd/ttrpc
PROTOCOL.md version 1.2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from topobus.values.errors import ContractError

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "Demultiplexer", "Message", "MessageType", "frames_of"]

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""The longest data of a message. ttrpc refuses a longer one."""

_PIECE = struct.Struct(">II")
_HEADER = struct.Struct(">IIBB")
# containerd reads a message's first bytes into a buffer of this size (bufio's default) and closes
# the connection when a piece is longer. The pieces after it are read directly to their destination.
_FIRST_PIECE_BYTES = 4096


class Channel(IntEnum):
    """The direction of a call."""

    PLUGIN = 1
    """The runtime calls the plugin."""
    RUNTIME = 2
    """The plugin calls the runtime."""


class MessageType(IntEnum):
    """The type of a message. Streaming has a third type, which NRI does not use."""

    REQUEST = 1
    RESPONSE = 2


class Message(NamedTuple):
    """One ttrpc message."""

    channel: int
    stream_id: int
    """Odd. The caller chooses it, higher with each call."""
    type: int
    data: bytes


def frames_of(message: Message) -> bytes:
    """Encode a message for the socket.

    Errors: raises ContractError when the message is longer than a peer accepts.

    >>> frames_of(Message(Channel.RUNTIME, 1, MessageType.REQUEST, b"ab")).hex(" ", 4)
    '00000002 0000000c 00000002 00000001 01006162'
    """
    if len(message.data) > MAX_MESSAGE_BYTES:
        raise ContractError(f"NRI: a message of {len(message.data)} bytes: wanted at most {MAX_MESSAGE_BYTES}")
    stream = _HEADER.pack(len(message.data), message.stream_id, message.type, 0) + message.data
    pieces = (stream[:_FIRST_PIECE_BYTES], stream[_FIRST_PIECE_BYTES:])
    return b"".join(_PIECE.pack(message.channel, len(piece)) + piece for piece in pieces if piece)


class Demultiplexer:
    """Reassembles the messages of all channels."""

    def __init__(self) -> None:
        self._socket_bytes = bytearray()
        self._streams: dict[int, bytearray] = {}

    def feed(self, received: bytes) -> Iterator[Message]:
        """Add bytes that came from the socket.

        Yields each message that is now complete, in the order of their last bytes.

        Errors: raises ContractError for a length that no peer may send. The connection cannot be
        used afterwards.
        Cost: O(bytes), each byte is copied twice.
        """
        self._socket_bytes += received
        while len(self._socket_bytes) >= _PIECE.size:
            channel, length = _PIECE.unpack_from(self._socket_bytes)
            if length > MAX_MESSAGE_BYTES + _HEADER.size:
                raise ContractError(
                    f"NRI: a piece of {length} bytes on channel {channel}: wanted at most "
                    f"{MAX_MESSAGE_BYTES + _HEADER.size}"
                )
            end = _PIECE.size + length
            if len(self._socket_bytes) < end:
                return
            stream = self._streams.setdefault(channel, bytearray())
            stream += self._socket_bytes[_PIECE.size : end]
            del self._socket_bytes[:end]
            yield from _messages(channel, stream)


def _messages(channel: int, stream: bytearray) -> Iterator[Message]:
    """Remove the complete messages from the beginning of a stream.

    Errors: raises ContractError for a length that no peer may send.
    """
    while len(stream) >= _HEADER.size:
        length, stream_id, message_type, _flags = _HEADER.unpack_from(stream)
        if length > MAX_MESSAGE_BYTES:
            raise ContractError(
                f"NRI: a message of {length} bytes on channel {channel}: wanted at most {MAX_MESSAGE_BYTES}"
            )
        end = _HEADER.size + length
        if len(stream) < end:
            return
        data = bytes(stream[_HEADER.size : end])
        del stream[:end]
        yield Message(channel, stream_id, message_type, data)
