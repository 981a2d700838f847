"""Bytes to values and back: JSON by msgspec, with the domain's own types as text.

Unknown fields are ignored, and missing ones take their default. Anything else that does not fit is
a ContractError that names the place. Messages of the catalogue have limits (`bounds`) as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from topobus.formats.first_read import ready
from topobus.formats.messages.bounds import bounded
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet, IdSet, NodeSet
from topobus.values.pci import PciAddress

__all__ = ["decode", "decode_within", "encode", "to_builtins"]

T = TypeVar("T")

# A message that no contract accepts is kept in logs up to this many bytes.
_SAMPLE_BYTES = 200
_NO_CPUS = CpuSet()
_TEXTS = (IdSet, PciAddress)


def _encode_custom(value: object) -> object:
    if isinstance(value, _TEXTS):
        return str(value)
    raise NotImplementedError(f"no wire form for {type(value).__name__}")


def _decode_custom(wanted: type, raw: object) -> object:
    if wanted is CpuSet and raw == "":
        # What most holdings of a ledger have. All of them can share one value, because it cannot
        # change.
        return _NO_CPUS
    if wanted in (NodeSet, CpuSet, IdSet) or wanted is PciAddress:
        if not isinstance(raw, str):
            raise ValueError(f"wanted text, got {type(raw).__name__}")
        return wanted.parse(raw)
    raise NotImplementedError(f"no wire form for {wanted.__name__}")


def encode(value: object) -> bytes:
    """Encode a contract message as JSON.

    Order: struct fields keep their order, dicts are sorted by key, so
    equal values give equal bytes.
    Errors: raises NotImplementedError for a value of a type that has no wire form.

    >>> encode({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}'
    """
    return msgspec.json.encode(value, enc_hook=_encode_custom, order="deterministic")


def decode(data: bytes | str, wanted: type[T], *, where: str = "message") -> T:
    """Decode and validate JSON into `wanted`.

    A message of the catalogue is held to its limits first.

    Shapes: where — the subject, key or file, for messages.
    Errors: raises ContractError with the JSON path of the first misfit and a sample of the bytes.
    """
    try:
        message = _messages().get(wanted)
        return decode_within(data, wanted, bounded(message) if message is not None else None)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as err:
        # RecursionError: nested deeper than msgspec goes, at which it raises Python's own error.
        raw = data.encode() if isinstance(data, str) else bytes(data)
        sample = raw[:_SAMPLE_BYTES].decode("utf-8", "replace")
        raise ContractError(
            f"{where}: cannot read this as {getattr(wanted, '__name__', wanted)}: {err}",
            sample=sample,
            size_bytes=len(raw),
        ) from err


def decode_within(data: bytes | str | msgspec.Raw, wanted: type[T], limits: type[Struct] | None) -> T:
    """Hold JSON to the limits of a twin (`bounds.bounded`), then read it.

    Errors: raises msgspec's own errors, ValueError, UnicodeDecodeError and RecursionError, which
            name no message.
    """
    if limits is not None:
        msgspec.json.decode(data, type=ready(limits))
    return msgspec.json.decode(data, type=ready(wanted), dec_hook=_decode_custom)


@cache
def _messages() -> dict[type, type[Struct]]:
    """List the messages that cross NATS. Called late: the catalogue's own imports run before it is
    complete.
    """
    from topobus.formats.messages.catalogue import ASKS, EVENTS, NOTICES, STATES

    kinds: list[type[Struct]] = [
        *(noun.message for noun in (*STATES, *EVENTS, *NOTICES)),
        *(kind for ask in ASKS for kind in (ask.request, ask.reply)),
    ]
    # A ledger's readers leave out a part of it.
    return {base: base for kind in kinds for base in kind.__mro__ if base is not Struct and issubclass(base, Struct)}


def to_builtins(value: object) -> Any:
    """Turn a message into dicts, lists and scalars, for YAML and for people.

    Shapes: result — keys are the fields' names on the wire; sets of ids are written as in JSON.
    Order: as in `encode`.
    Errors: as in `encode`.
    """
    return msgspec.to_builtins(value, enc_hook=_encode_custom, order="deterministic")
