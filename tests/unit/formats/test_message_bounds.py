"""The limits of messages: every field of every message of the catalogue, made too large, is refused
where the wire is read, and nowhere later.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from docpages.samples import (
    MESSAGES,
    file_stem,
    sample,
    variants,
)
from topobus.formats.messages import bounds
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import AdoptRequest, ApiObject
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.ledger import Holders

# Kubernetes' own objects and opaque configuration are of any shape: what is inside
# is checked by whoever reads it.
_OF_ANY_SHAPE = ("config", "device_config", "metadata", "spec", "status")

Path = tuple[str | int, ...]


def hostile_values(value: Any, name: str, path: Path = ()) -> Iterator[tuple[Path, str, Any]]:
    """Give, for each place in a sample message, values that are too large there: where, what it is,
    and the value.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _OF_ANY_SHAPE:
                yield from hostile_values(inner, key, (*path, key))
        if path and all(inner == value[next(iter(value))] for inner in value.values()) and set(value) & {"some-key"}:
            inner = value["some-key"]
            yield path, "entries", {f"k{number}": inner for number in range(bounds.MAX_ENTRIES + 1)}
            yield path, "key", {"k" * (bounds.MAX_NAME + 1): inner}
    elif isinstance(value, list):
        if len(value) == 1:
            yield path, "entries", value * (bounds.MAX_ENTRIES + 1)
        for number, inner in enumerate(value):
            yield from hostile_values(inner, name, (*path, number))
    elif isinstance(value, bool):
        return
    elif isinstance(value, str):
        yield path, "text", "x" * (bounds.MAX_TEXT + 1)
        if value == "0-3,8":
            for ids in ("0-1048575", "0-8192", "8192", "0," * 40_000, "9" * 5000, f"0-{'9' * 60}"):
                yield path, f"ids {ids[:12]}", ids
    elif isinstance(value, int):
        yield path, "number", 2**63
        yield path, "number below zero", -(2**63) - 1
        yield path, "digits", int("9" * 4000)


def replaced(value: Any, path: Path, by: Any) -> Any:
    """Give a copy of a plain value with one place replaced."""
    if not path:
        return by
    here, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {key: replaced(inner, rest, by) if key == here else inner for key, inner in value.items()}
    return [replaced(inner, rest, by) if number == here else inner for number, inner in enumerate(value)]


def as_json(kind: type[msgspec.Struct], variant: str = "") -> Any:
    """Give a sample message as JSON's own values."""
    return json.loads(encode(sample(kind, variant)))


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same rules with smaller numbers, so that a message of every kind may break each of them
    within milliseconds.
    """
    for name, limit in (
        ("MAX_NAME", 100),
        ("MAX_TEXT", 200),
        ("MAX_ID_TEXT", 200),
        ("MAX_ENTRIES", 8),
        ("MAX_MEMORY_BLOCKS", 4),
        ("MAX_SHARES", 4),
        ("MAX_COUNTERS", 4),
        ("MAX_USES", 4),
        ("MAX_VALID_VALUES", 4),
    ):
        monkeypatch.setattr(bounds, name, limit)
    bounds.bounded.cache_clear()
    yield
    bounds.bounded.cache_clear()


KINDS = [
    *(
        (kind, variant, file_stem(kind, variant))
        for kind in MESSAGES
        if kind is not ApiObject
        for variant in variants(kind)
    ),
    (Holders, "", "holders"),
]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("kind", "variant"), [case[:2] for case in KINDS], ids=[case[2] for case in KINDS])
def test_message_is_refused_when_any_field_of_it_is_too_large(kind: type[msgspec.Struct], variant: str) -> None:
    """Whatever field of a message somebody makes hostile, the reader gets a ContractError and
    nothing else.
    """
    plain = as_json(kind, variant)
    accepted: list[str] = []

    tried = 0
    for path, what, hostile in hostile_values(plain, ""):
        tried += 1
        try:
            decode(_json(replaced(plain, path, hostile)), kind)
        except ContractError:
            continue
        accepted.append(f"{'.'.join(map(str, path))}: {what}")

    assert accepted == []
    assert tried > 0 or not msgspec.structs.fields(kind)


@pytest.mark.parametrize(("kind", "variant"), [case[:2] for case in KINDS], ids=[case[2] for case in KINDS])
def test_message_is_read_as_before_when_it_is_within_bounds(kind: type[msgspec.Struct], variant: str) -> None:
    """The limits change nothing of a message that keeps to them."""
    value = sample(kind, variant)

    assert decode(encode(value), kind) == value


def test_adoption_is_refused_when_it_has_thousands_of_memory_blocks() -> None:
    """400 kB of blocks on nodes that no machine has were gigabytes in three services.

    Now they are a ContractError that names the place.
    """
    blocks = [{"kind": "memory", "nodes": f"{1_048_576 - number}", "shares": []} for number in range(9_000)]
    request = as_json(AdoptRequest) | {"memory": blocks}

    with pytest.raises(ContractError, match=r"length <= 64.*\$\.memory"):
        decode(_json(request), AdoptRequest)


def test_inventory_is_refused_when_it_has_more_devices_than_a_machine_may_have_cpus() -> None:
    """The real limit on devices is that of CPUs, each of which is a device."""
    plain = as_json(Inventory)
    device = {"name": "gpu-0", "device_class": "gpu"}

    assert len(decode(_json(plain | {"devices": [device] * 8192}), Inventory).devices) == 8192
    with pytest.raises(ContractError, match=r"length <= 8192.*\$\.devices"):
        decode(_json(plain | {"devices": [device] * 8193}), Inventory)


def test_ledger_is_refused_when_it_has_more_owners_than_a_node_may_have() -> None:
    """The real limit on a ledger's owners is far above the pods of a node."""
    owners = {
        f"pod/default/p/{number}": {"owner": {"kind": "pod", "name": "p", "uid": str(number)}} for number in range(8193)
    }

    with pytest.raises(ContractError, match=r"length <= 8192.*\$\.allocations"):
        decode(_json({"node": "n", "allocations": owners}), Holders)


def test_every_type_of_the_catalogue_has_limits() -> None:
    """A field of a type that nobody gave limits to is noticed here, not by an attacker."""
    for kind in MESSAGES:
        twin = bounds.bounded(kind)

        names = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert {field.encode_name for field in msgspec.structs.fields(twin)} == names


def _json(value: Any) -> bytes:
    """Write JSON as an attacker can: numbers of any length too, which msgspec's writer refuses."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(before)


def test_the_table_finds_the_hostile_places_of_a_message() -> None:
    """The table of hostile values reaches texts, lists, maps, numbers and id lists inside of lists
    inside of maps.
    """
    places = {what.split(" ")[0] for _, what, _ in hostile_values(as_json(Holders), "")}

    assert places >= {"text", "entries", "key", "number", "digits", "ids"}
