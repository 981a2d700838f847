"""Frames of the runtime's socket: whatever way the bytes are cut, the same messages.

What no peer may send is refused before it costs memory.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topobus.gateway.containers.frames import MAX_MESSAGE_BYTES, Channel, Demultiplexer, Message, MessageType, frames_of
from topobus.values.errors import ContractError

MESSAGES = st.builds(
    Message,
    st.sampled_from(list(Channel)).map(int),
    st.integers(min_value=0, max_value=2**32 - 1),
    st.sampled_from(list(MessageType)).map(int),
    st.one_of(st.binary(max_size=64), st.integers(min_value=4000, max_value=9000).map(lambda size: b"x" * size)),
)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(min_value=1, max_value=5000), min_size=1, max_size=40))
def test_demultiplexer_gives_what_was_framed_however_the_bytes_are_cut(
    messages: list[Message], cuts: list[int]
) -> None:
    """A socket gives bytes in pieces of its own choice."""
    stream = b"".join(map(frames_of, messages))
    demultiplexer = Demultiplexer()

    read: list[Message] = []
    position = 0
    while position < len(stream):
        size = cuts[position % len(cuts)]
        read += demultiplexer.feed(stream[position : position + size])
        position += size

    assert read == messages


def test_demultiplexer_joins_a_message_of_several_pieces_between_those_of_another_channel() -> None:
    """A runtime may cut a message anywhere and send another channel's bytes between the parts."""
    whole = struct.pack(">IIBB", 4, 7, 1, 0) + b"abcd"
    other = struct.pack(">IIBB", 1, 9, 2, 0) + b"z"
    pieces = [(1, whole[:3]), (2, other), (1, whole[3:12]), (1, whole[12:])]

    read = list(
        Demultiplexer().feed(b"".join(struct.pack(">II", channel, len(piece)) + piece for channel, piece in pieces))
    )

    assert read == [Message(2, 9, 2, b"z"), Message(1, 7, 1, b"abcd")]


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack(">II", 1, MAX_MESSAGE_BYTES + 11), id="piece"),
        pytest.param(struct.pack(">II", 1, 10) + struct.pack(">IIBB", MAX_MESSAGE_BYTES + 1, 1, 1, 0), id="message"),
    ],
)
def test_demultiplexer_refuses_a_length_that_no_peer_may_send(frame: bytes) -> None:
    """Its header alone is enough: nothing of that size is waited for."""
    with pytest.raises(ContractError, match="wanted at most"):
        list(Demultiplexer().feed(frame))


def test_frames_are_refused_when_the_message_is_too_long_to_be_read() -> None:
    """The peer would break the connection off."""
    with pytest.raises(ContractError, match="4194305 bytes"):
        frames_of(Message(Channel.RUNTIME, 1, MessageType.REQUEST, b"x" * (MAX_MESSAGE_BYTES + 1)))
