"""The types of expressions, and when a value of one may stand where another is wanted.

`dyn` fits everything: what it holds is looked at when it is evaluated. A type whose name begins with a capital letter and has no dot (`A`, `K`) is a
parameter: it is bound by the first use and must agree afterwards. Source: cel-spec, langdef.md, "Gradual Type Checking".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import count

__all__ = [
    "BOOL",
    "BYTES",
    "DEVICE",
    "DOUBLE",
    "DURATION",
    "DYN",
    "INT",
    "NULL",
    "STRING",
    "TIMESTAMP",
    "UINT",
    "Bindings",
    "Type",
    "list_of",
    "map_of",
    "optional_of",
    "read_type",
    "type_of",
]


@dataclass(frozen=True)
class Type:
    """A type by name, with its parameters: `list(int)`."""

    name: str
    parameters: tuple[Type, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        """Say whether a value of it may be anything."""
        return self.name == "dyn"

    @property
    def is_parameter(self) -> bool:
        """Say whether it stands for a type that is not known yet."""
        return self.name[0] == "$"

    def __str__(self) -> str:
        if self.is_parameter:
            return "dyn"
        return f"{self.name}({', '.join(map(str, self.parameters))})" if self.parameters else self.name


DYN, BOOL, INT, UINT, DOUBLE = Type("dyn"), Type("bool"), Type("int"), Type("uint"), Type("double")
STRING, BYTES, NULL = Type("string"), Type("bytes"), Type("null_type")
DURATION, TIMESTAMP = Type("google.protobuf.Duration"), Type("google.protobuf.Timestamp")
DEVICE = Type("kubernetes.DRADevice")

_PRIMITIVES = frozenset(["bool", "int", "uint", "double", "string", "bytes", "list", "map", "type"])
# How signatures write types: short names for the longer ones.
_SHORT = {
    "Quantity": "kubernetes.Quantity",
    "Semver": "kubernetes.Semver",
    "URL": "kubernetes.URL",
    "Format": "kubernetes.NamedFormat",
    "IP": "net.IP",
    "CIDR": "net.CIDR",
    "duration": DURATION.name,
    "timestamp": TIMESTAMP.name,
    "optional": "optional_type",
    "null": NULL.name,
}
_WORD = re.compile(r"\s*([A-Za-z_.]+|[<>,])")


def list_of(item: Type) -> Type:
    """Make the type of a list."""
    return Type("list", (item,))


def map_of(key: Type, value: Type) -> Type:
    """Make the type of a map."""
    return Type("map", (key, value))


def optional_of(value: Type) -> Type:
    """Make the type of an optional value."""
    return Type("optional_type", (value,))


def type_of(one: Type) -> Type:
    """Make the type of a type."""
    return Type("type", (one,))


@cache
def read_type(text: str) -> Type:
    """Read a type as signatures write it.

    >>> str(read_type("map<string, list<Quantity>>"))
    'map(string, list(kubernetes.Quantity))'
    """
    words = _WORD.findall(text)
    found, rest = _read(words)
    if rest:
        raise ValueError(f"not a type: {text!r}")
    return found


def _read(words: list[str]) -> tuple[Type, list[str]]:
    name, rest = words[0], words[1:]
    if len(name) == 1 and name.isupper():
        return Type("$" + name), rest
    parameters: list[Type] = []
    if rest[:1] == ["<"]:
        while rest[0] in ("<", ","):
            one, rest = _read(rest[1:])
            parameters.append(one)
        rest = rest[1:]
    return Type(_SHORT.get(name, name), tuple(parameters)), rest


class Bindings:
    """What type parameters stand for in one expression."""

    def __init__(self) -> None:
        self._known: dict[str, Type] = {}
        self._numbers = count()

    def fresh(self) -> Type:
        """Make a parameter that nobody has."""
        return Type(f"${next(self._numbers)}")

    def instantiate(self, types: tuple[Type, ...]) -> tuple[Type, ...]:
        """Give the parameters of a signature names of their own."""
        names: dict[str, Type] = {}

        def rename(one: Type) -> Type:
            if one.is_parameter:
                return names.setdefault(one.name, self.fresh())
            return Type(one.name, tuple(map(rename, one.parameters))) if one.parameters else one

        return tuple(map(rename, types))

    def resolve(self, one: Type) -> Type:
        """Follow a parameter to what it stands for, as far as is known."""
        while one.is_parameter and one.name in self._known:
            one = self._known[one.name]
        return one

    def finish(self, one: Type) -> Type:
        """Replace all parameters; what stayed open is `dyn`."""
        one = self.resolve(one)
        if one.is_parameter:
            return DYN
        return Type(one.name, tuple(map(self.finish, one.parameters))) if one.parameters else one

    def fit_all(self, wanted: tuple[Type, ...], given: tuple[Type, ...]) -> bool:
        """Fit several types at once; nothing is bound when one does not fit."""
        before = dict(self._known)
        if len(wanted) == len(given) and all(self.fit(one, other) for one, other in zip(wanted, given, strict=True)):
            return True
        self._known = before
        return False

    def fit(self, wanted: Type, given: Type) -> bool:
        """Say whether a value of the given type may stand where the wanted one does; binds parameters on the way."""
        parameter = wanted
        wanted, given = self.resolve(wanted), self.resolve(given)
        if wanted == given:
            return True
        if wanted.is_parameter:
            return self._bind(wanted, given)
        if given.is_parameter:
            return self._bind(given, wanted)
        if given.is_dynamic:
            if parameter.is_parameter and not wanted.is_dynamic:
                self._known[parameter.name] = given  # the more general one stands for both
            return True
        if wanted.is_dynamic:
            return True
        if given == NULL:
            return wanted.name not in _PRIMITIVES
        if wanted.name != given.name or len(wanted.parameters) != len(given.parameters):
            return False
        return all(self.fit(one, other) for one, other in zip(wanted.parameters, given.parameters, strict=True))

    def _bind(self, parameter: Type, to: Type) -> bool:
        if self._occurs(parameter, to):
            return False
        self._known[parameter.name] = to
        return True

    def _occurs(self, parameter: Type, inside: Type) -> bool:
        inside = self.resolve(inside)
        return inside == parameter or any(self._occurs(parameter, one) for one in inside.parameters)
