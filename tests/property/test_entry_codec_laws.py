"""Decoder and encoder that take over known entries, over whole histories of a ledger: each gives
what the ordinary one gives, whatever came before.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.laws import examples
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.entry_codec import EntryDecoder, EntryEncoder
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.request import Owner, OwnerKind

OWNERS = st.integers(0, 4).map(
    lambda number: Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=f"{number}")
)
HOLDINGS = st.builds(
    Holding,
    devices=st.dictionaries(st.sampled_from(["gpu", "nic"]), st.tuples(st.sampled_from(["a", "b"])), max_size=2),
    cpus=st.frozensets(st.integers(0, 9)).map(CpuSet.of),
)
ALLOCATIONS = st.builds(
    Allocation, owner=OWNERS, holdings=st.tuples(HOLDINGS), decision_id=st.sampled_from(["d1", "d2"])
)
LEDGERS = st.builds(
    Holders,
    node=st.just("n"),
    sequence=st.integers(0, 9),
    allocations=st.lists(ALLOCATIONS, max_size=5).map(
        lambda held: {allocation.owner.key: allocation for allocation in held}
    ),
)
SPOILS = st.none() | st.tuples(
    st.integers(0, 10_000), st.sampled_from([b"", b"}", b'"', b"0", b"\xff", b"[", b"9999999"])
)


def spoil(data: bytes, by: tuple[int, bytes] | None) -> bytes:
    """Put something in the place of one byte."""
    if by is None:
        return data
    place = by[0] % len(data)
    return data[:place] + by[1] + data[place + 1 :]


@given(st.lists(st.tuples(LEDGERS, SPOILS), min_size=1, max_size=6))
@settings(max_examples=examples(400))
def test_each_value_is_read_as_the_ordinary_decoder_reads_it(
    history: list[tuple[Holders, tuple[int, bytes] | None]],
) -> None:
    """Values and errors are the ordinary decoder's.

    Of two good values in a row an entry is the same object exactly where it is equal.
    """
    decoder = EntryDecoder(Holders, "allocations")
    last: Holders | None = None

    for value, by in history:
        data = spoil(encode(value), by)
        try:
            expected: Holders | str = decode(data, Holders, where="x")
        except ContractError as err:
            expected = err.message
        try:
            read: Holders | str = decoder.decode(data, where="x")
        except ContractError as err:
            read = err.message
        assert read == expected
        if isinstance(read, Holders) and last is not None and by is None:
            same = {key for key, allocation in read.allocations.items() if allocation is last.allocations.get(key)}
            assert same == {
                key for key, allocation in read.allocations.items() if allocation == last.allocations.get(key)
            }
        if isinstance(read, Holders):
            last = read if by is None else None


@given(st.lists(st.tuples(LEDGERS, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=examples(400))
def test_each_value_is_written_as_the_ordinary_encoder_writes_it(history: list[tuple[Holders, bool]]) -> None:
    """Byte for byte, with owners that come, go, change and stay."""
    encoder = EntryEncoder("allocations")
    last = Holders(node="n")

    for value, keeps_others in history:
        # A transition keeps the objects that it does not change.
        last = structs.replace(value, allocations={**last.allocations, **value.allocations}) if keeps_others else value
        assert encoder.encode(last) == encode(last)
