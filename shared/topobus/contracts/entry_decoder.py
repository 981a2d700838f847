"""Decodes the values of one key one after the other, and of each only what is new.

A ledger is one value, is written with every decision, and each decision changes one or two of its allocations. The decoder keeps the bytes of each entry of the value before: an
entry with the same bytes is taken over as it was decoded then, so it was held to its limits, too. Flows in: JSON bytes. Flows out: the value that `codec.decode` gives for them;
unchanged entries are the same objects as in the value before, so a reader finds the changed ones by identity.
"""

from __future__ import annotations

import typing
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from topobus.contracts.bounds import bounded
from topobus.contracts.codec import decode, decode_within

__all__ = ["EntryDecoder"]

M = TypeVar("M")


class EntryDecoder(Generic[M]):
    """Remembers one value: that of the last call."""

    def __init__(self, wanted: type[M], field: str) -> None:
        """Make a decoder of a message whose `field` is a map from names to structs."""
        assert issubclass(wanted, Struct)
        _, self._entry = typing.get_args(typing.get_type_hints(wanted)[field])
        self._wanted = wanted
        self._field = field
        self._limits = bounded(wanted, field)
        self._entry_limits = bounded(self._entry)
        self._rest = _without(wanted, field)
        self._known: dict[str, tuple[Raw, Struct]] = {}

    def decode(self, data: bytes, *, where: str) -> M:
        """Decode and validate JSON.

        Errors: raises ContractError as `codec.decode` does, in its words; what was known stays known. Of an entry that is written twice the last one counts, and the first is
                not looked at.
        Cost: one pass over the bytes, and the decoding of the entries that are new. The bytes are kept until the next value is decoded.
        """
        try:
            raw_entries: dict[str, Raw] = getattr(msgspec.json.decode(data, type=self._limits), self._field) or {}
            rest = decode_within(data, self._rest, None)
            entries = {key: (raw, self._entry_of(key, raw)) for key, raw in raw_entries.items()}
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Which entry it is, and where in it, the ordinary way says.
            return decode(data, self._wanted, where=where)
        # The new bytes stand for those that are equal to them: else each entry would keep the whole value alive that it once came with.
        self._known = entries
        return self._wanted(**msgspec.structs.asdict(rest), **{self._field: {key: value for key, (_, value) in entries.items()}})

    def _entry_of(self, key: str, raw: Raw) -> Struct:
        known = self._known.get(key)
        if known is not None and known[0] == raw:
            return known[1]
        return typing.cast("Struct", decode_within(raw, self._entry, self._entry_limits))


def _without(kind: type[Struct], field: str) -> type[Struct]:
    """Make a type with all fields but one, as they are."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [(each.name, hints[each.name], _optional(each)) for each in msgspec.structs.fields(kind) if each.name != field]
    return msgspec.defstruct(f"{kind.__name__}Without{field.title()}", fields, kw_only=True)


def _optional(field: msgspec.structs.FieldInfo) -> object:
    """Keep the name on the wire, and what stands for a field that is left out."""
    if field.required:
        return msgspec.field(name=field.encode_name)
    if field.default is not msgspec.NODEFAULT:
        return msgspec.field(name=field.encode_name, default=field.default)
    return msgspec.field(name=field.encode_name, default_factory=field.default_factory)
