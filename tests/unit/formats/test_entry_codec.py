"""Promises of the decoder that takes over the entries it knows: it gives what the ordinary decoder
gives, and decodes nothing twice.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from docpages.samples import sample
from support.malformed import GARBAGE, spoilt
from topobus.formats.messages import bounds
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.entry_codec import EntryDecoder
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders, Holding, Ledger
from topobus.values.request import Owner, OwnerKind


def ledger(*holdings: Holding, sequence: int = 1) -> Holders:
    """A ledger in which so many owners hold something."""
    owners = [
        Owner(kind=OwnerKind.CLAIM, namespace="default", name=f"claim-{number}", uid=f"u{number}")
        for number in range(len(holdings))
    ]
    return Holders(
        node="n",
        sequence=sequence,
        allocations={
            owner.key: Allocation(owner=owner, holdings=(holding,))
            for owner, holding in zip(owners, holdings, strict=True)
        },
    )


def outcome(read: Any, data: bytes) -> object:
    """What a decoder makes of bytes: the value, or the error with all that it says."""
    try:
        return read(data, where="ledgers/n")
    except ContractError as err:
        return (err.message, err.facts)


def plain(data: bytes, *, where: str) -> Holders:
    """The ordinary decoder."""
    return decode(data, Holders, where=where)


def test_decoder_takes_entries_over_when_their_bytes_are_those_of_before() -> None:
    """Of a ledger in which one owner changed the others are the same objects, so a reader finds the
    change without a comparison of values.
    """
    decoder = EntryDecoder(Holders, "allocations")
    gpu, cpus = Holding(devices={"gpu": ("gpu-0",)}), Holding(cpus=CpuSet(0, 1))
    first = decoder.decode(encode(ledger(gpu, cpus)), where="x")

    second = decoder.decode(encode(ledger(gpu, Holding(cpus=CpuSet(4)), sequence=2)), where="x")

    assert second == ledger(gpu, Holding(cpus=CpuSet(4)), sequence=2)
    same, other = second.allocations
    assert second.allocations[same] is first.allocations[same]
    assert second.allocations[other] is not first.allocations[other]


def test_decoder_forgets_an_entry_when_a_value_lacks_it() -> None:
    """An owner that let go is in no later value, and is not remembered."""
    decoder = EntryDecoder(Holders, "allocations")
    full = encode(ledger(Holding(cpus=CpuSet(0))))
    first = decoder.decode(full, where="x")

    assert decoder.decode(encode(ledger()), where="x") == ledger()
    again = decoder.decode(full, where="x")
    assert again == first
    assert [again.allocations[key] is first.allocations[key] for key in first.allocations] == [False]


@pytest.mark.parametrize("kind", [Holders, Ledger])
def test_decoder_reads_all_fields_when_a_value_has_them(kind: type[Holders]) -> None:
    """What stands beside the entries is read anew each time, with the domain's own types, and
    fields that are left out have their defaults.
    """
    decoder = EntryDecoder(kind, "allocations")
    full, bare = sample(kind), kind(node="n")

    assert [decoder.decode(encode(value), where="x") for value in (full, bare, full)] == [full, bare, full]
    assert decoder.decode(b'{"node": "n", "from-a-later-release": [1]}', where="x") == bare


@pytest.mark.parametrize("is_warm", [False, True], ids=["at-first", "after-a-good-one"])
def test_decoder_says_what_the_ordinary_one_says_when_a_value_is_malformed(*, is_warm: bool) -> None:
    """A ledger with any single place spoilt, and garbage, get the ordinary decoder's value or its
    error, with the same place and sample.
    """
    good = encode(sample(Holders))
    different: list[str] = []
    for name, data in (*GARBAGE.items(), *spoilt(json.loads(good))):
        decoder = EntryDecoder(Holders, "allocations")
        if is_warm:
            decoder.decode(good, where="x")
        if outcome(decoder.decode, data) != outcome(plain, data):
            different.append(name)

    assert different == []


def test_decoder_goes_on_from_the_last_good_value_when_one_was_malformed() -> None:
    """Garbage in between costs nothing: what was known stays known."""
    decoder = EntryDecoder(Holders, "allocations")
    good = encode(ledger(Holding(cpus=CpuSet(0))))
    before = decoder.decode(good, where="x")
    with pytest.raises(ContractError):
        decoder.decode(b"{", where="x")

    after = decoder.decode(good, where="x")

    assert [after.allocations[key] is before.allocations[key] for key in before.allocations] == [True]


def test_decoder_refuses_an_entry_when_it_is_out_of_bounds() -> None:
    """Limits hold within a single entry and for their number, as in the ordinary decoder."""
    decoder = EntryDecoder(Holders, "allocations")
    decoder.decode(encode(ledger(Holding(cpus=CpuSet(0)))), where="x")
    owner = {"kind": "pod", "name": "p", "uid": "u"}
    many = {f"pod/default/p/{number}": {"owner": owner} for number in range(bounds.MAX_ENTRIES + 1)}
    wide = {"pod/default/p/u": {"owner": owner, "holdings": [{"cpus": "0-8192"}]}}

    for allocations, why in (
        (many, r"length <= 8192.*\$\.allocations"),
        (wide, r"wanted 0 to 8191.*\$\.allocations\[\.\.\.\]\.holdings\[0\]\.cpus"),
    ):
        with pytest.raises(ContractError, match=why):
            decoder.decode(json.dumps({"node": "n", "allocations": allocations}).encode(), where="x")


def test_decoder_lets_the_bytes_of_before_go_when_an_entry_is_taken_over() -> None:
    """An entry that never changes does not keep the first value's bytes alive: only those of the
    last value are kept.
    """
    decoder = EntryDecoder(Holders, "allocations")
    first, second = (encode(ledger(Holding(cpus=CpuSet(0)), sequence=sequence)) for sequence in (1, 2))
    unkept = sys.getrefcount(first)
    decoder.decode(first, where="x")
    while_last = sys.getrefcount(first)

    decoder.decode(second, where="x")

    assert while_last > unkept
    assert sys.getrefcount(first) == unkept
