"""Golden files: bytes that were once on the wire are read for ever, and every message of the
catalogue has some.
"""

from __future__ import annotations

import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from docpages.describe import is_struct
from docpages.samples import (
    MESSAGES,
    file_stem,
    sample,
    variants,
)
from topobus.formats.messages.codec import decode, encode

GOLDEN = Path(__file__).parent / "golden"
_HOW = """
To add one: run `.venv/bin/python tools/add-golden`, look at the file that it writes, and commit it.
Never edit or delete a golden file of a released message: give a new field a default instead, and add-golden writes a further file beside it.
"""  # noqa: E501
_KINDS = {file_stem(kind): kind for kind in MESSAGES}


def _files() -> list[Path]:
    return sorted(GOLDEN.glob("*.json"))


def _kind(file: Path) -> type[Struct]:
    kind = _KINDS.get(file.name.partition(".")[0])
    if kind is None:
        pytest.fail(
            f"{file.name} belongs to no message of the catalogue: was a message renamed? Others on the wire "
            f"still say the old one.{_HOW}"
        )
    return kind


def _newest(kind: type[Struct], variant: str) -> Path | None:
    """Find the newest golden file of one form of a message: `place_reply.refusal.2.json` beats
    `place_reply.refusal.json`.
    """
    files = [
        (int(match[1] or 1), file)
        for file in _files()
        if (match := re.fullmatch(re.escape(file_stem(kind, variant)) + r"(?:\.(\d+))?\.json", file.name))
    ]
    return max(files)[1] if files else None


def _contains(larger: Any, smaller: Any) -> bool:
    """Say whether everything in `smaller` stands in `larger`, which may have more fields."""
    if isinstance(smaller, dict):
        return isinstance(larger, dict) and all(
            key in larger and _contains(larger[key], value) for key, value in smaller.items()
        )
    if isinstance(smaller, list):
        # A struct that travels as a list grows at its end.
        return isinstance(larger, list) and len(larger) >= len(smaller) and all(map(_contains, larger, smaller))
    return bool(larger == smaller) and type(larger) is type(smaller)


def _from_the_future(value: Any, hint: object) -> Any:
    """Put a field that no contract knows into every object that is a message (not into maps, whose
    keys mean something).
    """
    origin, arguments = (
        typing.get_origin(hint),
        [argument for argument in typing.get_args(hint) if argument not in (type(None), Ellipsis)],
    )
    if is_struct(hint) and isinstance(value, dict):
        hints = {field.encode_name: typing.get_type_hints(hint)[field.name] for field in msgspec.structs.fields(hint)}
        return {
            "field_from_the_future": {"x": 1},
            **{key: _from_the_future(inner, hints.get(key)) for key, inner in value.items()},
        }
    if origin in (typing.Union, types.UnionType):
        tagged = [
            argument
            for argument in arguments
            if is_struct(argument)
            and isinstance(value, dict)
            and argument.__struct_config__.tag == value.get("outcome")
        ]
        return _from_the_future(value, (tagged or arguments)[0])
    if origin is tuple and isinstance(value, list):
        return [_from_the_future(element, arguments[0]) for element in value]
    if origin is dict and isinstance(value, dict):
        return {key: _from_the_future(inner, arguments[1]) for key, inner in value.items()}
    return value


@pytest.mark.parametrize("file", _files(), ids=lambda file: file.stem)
def test_message_is_read_and_written_back_when_it_is_golden(file: Path) -> None:
    """Each golden file decodes, and what is encoded again has every field of it with the same
    value.
    """
    data = file.read_bytes()
    again = json.loads(encode(decode(data, _kind(file), where=file.name)))

    assert _contains(again, json.loads(data)), (
        f"{file.name} is not read as it was written: a field was renamed, removed or retyped.{_HOW}"
    )


@pytest.mark.parametrize("file", _files(), ids=lambda file: file.stem)
def test_message_is_read_the_same_when_it_has_unknown_fields(file: Path) -> None:
    """A newer writer's additional fields do not disturb an older reader."""
    kind = _kind(file)
    value = decode(file.read_bytes(), kind)
    future = json.dumps(_from_the_future(json.loads(file.read_bytes()), kind))

    assert "field_from_the_future" in future
    assert decode(future, kind) == value


@pytest.mark.parametrize(
    ("kind", "variant"),
    [(kind, variant) for kind in MESSAGES for variant in variants(kind)],
    ids=lambda kind: kind if isinstance(kind, str) else file_stem(kind),
)
def test_message_has_a_golden_file_that_is_complete_when_it_is_in_the_catalogue(
    kind: type[Struct], variant: str
) -> None:
    """Every form of every message has a golden file, and the newest one
    has every field of today.
    """
    file = _newest(kind, variant)
    if file is None:
        pytest.fail(f"there is no golden file {file_stem(kind, variant)}.json for {kind.__name__}.{_HOW}")
    wanted = json.loads(encode(sample(kind, variant)))

    assert json.loads(file.read_bytes()) == wanted, (
        f"{file.name} is not what {kind.__name__} looks like today: a field is new, or was changed.{_HOW}"
    )


def test_encode_gives_the_same_bytes_when_values_are_equal() -> None:
    """Equal values have equal bytes, so a writer can tell whether anything changed."""
    for kind in MESSAGES:
        value = sample(kind)

        assert encode(value) == encode(decode(encode(value), kind))
