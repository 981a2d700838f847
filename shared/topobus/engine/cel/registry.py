"""The registry of functions: by name, their signatures and implementations.

A signature has the form `string.indexOf(string, int) -> int` or `size(list<A>) -> int`. At check
time all overloads that fit are kept. At run time the overload is chosen only by the types of the
actual values, so that `dyn` needs no support of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from topobus.engine.cel.types import Type, read_type
from topobus.engine.cel.values import kind_of

__all__ = ["Functions", "Implementation", "Library", "Overload", "overload"]

# The values are checked against the signature before it is called, so an
# implementation names its own types.
Implementation = Callable[..., object]
_GLOBAL = re.compile(r"(?:sets|lists|optional|format|ip|strings|cel)\.[@\w]+\(")


@dataclass(frozen=True)
class Overload:
    """One way to call a function."""

    name: str
    signature: str
    is_member: bool
    parameters: tuple[Type, ...]
    """With the target first."""
    result: Type
    work: Implementation

    def takes(self, kinds: tuple[str, ...]) -> bool:
        """Say whether values of these types may be given."""
        return len(kinds) == len(self.parameters) and all(
            parameter.is_parameter or parameter.is_dynamic or parameter.name == kind
            for parameter, kind in zip(self.parameters, kinds, strict=True)
        )


Library = tuple[Overload, ...]


def overload(signature: str, work: Implementation) -> Overload:
    """Declare an overload by its signature.

    >>> overload("string.indexOf(string) -> int", str.find).is_member
    True
    """
    head, _, result = signature.rpartition(" -> ")
    before, _, parameters = head.rstrip(")").partition("(")
    target, name = ("", before) if _GLOBAL.match(signature) else _split_target(before)
    types = [read_type(text) for text in (*([target] if target else []), *_split_parameters(parameters))]
    return Overload(name, signature, bool(target), tuple(types), read_type(result), work)


def _split_target(before: str) -> tuple[str, str]:
    target, _, name = before.rpartition(".")
    return target, name


def _split_parameters(text: str) -> Iterable[str]:
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if text.strip():
        yield text[start:].strip()


_ARITHMETIC = frozenset(["_+_", "_-_", "_*_", "_/_", "_%_", "-_"])
_FIRST = ("bytes", "double", "google.protobuf.Duration", "google.protobuf.Timestamp", "int", "list", "string", "uint")


def _place(function: Overload) -> int:
    return _FIRST.index(function.parameters[0].name)


class Functions:
    """All functions of an environment."""

    def __init__(self, *libraries: Library) -> None:
        self._known: dict[tuple[str, bool], tuple[Overload, ...]] = {}
        for library in libraries:
            for each_overload in library:
                key = (each_overload.name, each_overload.is_member)
                self._known[key] = (*self._known.get(key, ()), each_overload)
        # A value of no known type (an item of `[]`) takes that of the first overload that
        # fits: upstream's order decides.
        self._known = {
            key: tuple(sorted(overloads, key=_place)) if key[0] in _ARITHMETIC else overloads
            for key, overloads in self._known.items()
        }
        self._chosen: dict[tuple[str, bool, tuple[str, ...]], Overload | None] = {}

    def find(self, name: str, *, is_member: bool) -> tuple[Overload, ...]:
        """List the overloads of a function."""
        return self._known.get((name, is_member), ())

    def choose(self, name: str, *, is_member: bool, values: tuple[object, ...]) -> Overload | None:
        """Choose the overload for values. None when there is none."""
        key = (name, is_member, tuple(map(kind_of, values)))
        if key not in self._chosen:
            self._chosen[key] = next(
                (
                    each_overload
                    for each_overload in self.find(name, is_member=is_member)
                    if each_overload.takes(key[2])
                ),
                None,
            )
        return self._chosen[key]

    def all(self) -> tuple[Overload, ...]:
        """List all overloads, by name."""
        return tuple(each_overload for _, overloads in sorted(self._known.items()) for each_overload in overloads)
