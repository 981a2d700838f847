"""The types of expressions, and when a value of one type is assignable to another.

`dyn` fits every type: the check of its value is left to the evaluation. A type whose name
begins with a capital letter and has no dot (`A`, `K`) is a parameter: its first use binds
it, and later uses must agree.
Source: cel-spec, langdef.md, "Gradual Type Checking".
"""

from __future__ import annotations

import re
from functools import cache
from itertools import count

from topobus.values.errors import InvariantError

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


class Type:
    """A type by name, with its parameters: `list(int)`. Immutable.

    Types nest as deep as expressions do. So two types are compared by their hashes, and a type
    without open parameters is not searched for them.
    """

    __slots__ = ("_hash", "is_dynamic", "is_open", "is_parameter", "name", "parameters")

    def __init__(self, name: str, parameters: tuple[Type, ...] = ()) -> None:
        self.name = name
        self.parameters = parameters
        self.is_dynamic = name == "dyn"
        """Whether a value of it may be anything."""
        self.is_parameter = name[0] == "$"
        """Whether it is a placeholder for a type that is not known yet."""
        self.is_open: bool = self.is_parameter or any(parameter.is_open for parameter in parameters)
        """Whether it is such a parameter or has one somewhere."""
        self._hash = hash((name, parameters))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Type):
            return NotImplemented
        return self._hash == other._hash and self.name == other.name and self.parameters == other.parameters

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
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


def type_of(cel_type: Type) -> Type:
    """Make the type of a type."""
    return Type("type", (cel_type,))


@cache
def read_type(text: str) -> Type:
    """Read a type as signatures write it.

    Errors: raises InvariantError for a text that is no type.

    >>> str(read_type("map<string, list<Quantity>>"))
    'map(string, list(kubernetes.Quantity))'
    """
    words = _WORD.findall(text)
    cel_type, rest = _read(words)
    if rest:
        raise InvariantError(f"not a type: {text!r}")
    return cel_type


def _read(words: list[str]) -> tuple[Type, list[str]]:
    name, rest = words[0], words[1:]
    if len(name) == 1 and name.isupper():
        return Type("$" + name), rest
    parameters: list[Type] = []
    if rest[:1] == ["<"]:
        while rest[0] in ("<", ","):
            cel_type, rest = _read(rest[1:])
            parameters.append(cel_type)
        rest = rest[1:]
    return Type(_SHORT.get(name, name), tuple(parameters)), rest


class Bindings:
    """The types that parameters are bound to in one expression."""

    def __init__(self) -> None:
        self._known: dict[str, Type] = {}
        self._numbers = count()

    def fresh(self) -> Type:
        """Make a parameter that is not used yet."""
        return Type(f"${next(self._numbers)}")

    def instantiate(self, types: tuple[Type, ...]) -> tuple[Type, ...]:
        """Replace the parameters of a signature by new ones."""
        names: dict[str, Type] = {}

        def rename(cel_type: Type) -> Type:
            if cel_type.is_parameter:
                return names.setdefault(cel_type.name, self.fresh())
            return Type(cel_type.name, tuple(map(rename, cel_type.parameters))) if cel_type.is_open else cel_type

        return tuple(map(rename, types))

    def resolve(self, cel_type: Type) -> Type:
        """Follow a parameter to the type that it is bound to, as far as is known."""
        while cel_type.is_parameter and cel_type.name in self._known:
            cel_type = self._known[cel_type.name]
        return cel_type

    def substitute(self, cel_type: Type) -> Type:
        """Replace parameters by their present types. Unbound parameters stay."""
        if not cel_type.is_open:
            return cel_type
        cel_type = self.resolve(cel_type)
        return (
            Type(cel_type.name, tuple(map(self.substitute, cel_type.parameters))) if cel_type.parameters else cel_type
        )

    def finish(self, cel_type: Type) -> Type:
        """Replace all parameters. An unbound one becomes `dyn`."""
        if not cel_type.is_open:
            return cel_type
        cel_type = self.resolve(cel_type)
        if cel_type.is_parameter:
            return DYN
        return Type(cel_type.name, tuple(map(self.finish, cel_type.parameters))) if cel_type.parameters else cel_type

    def fit_all(self, wanted: tuple[Type, ...], given: tuple[Type, ...]) -> bool:
        """Fit several types at once. Nothing is bound when one does not fit."""
        before = dict(self._known)
        if len(wanted) == len(given) and all(
            self.fit(first, second) for first, second in zip(wanted, given, strict=True)
        ):
            return True
        self._known = before
        return False

    def fit(self, wanted: Type, given: Type) -> bool:
        """Say whether a value of the given type is allowed where the wanted one is.

        Binds parameters on the way. Of two types that fit one another a parameter is bound to the
        more general one. Source: cel-go checker/types.go.
        """
        if wanted == given:
            return True
        if wanted.is_parameter:
            is_valid, is_known = self._substitute(wanted, given)
            if is_valid or is_known:
                return is_valid
        if given.is_parameter:
            return self._substitute(given, wanted)[0]
        if wanted.is_dynamic or given.is_dynamic:
            return True
        if NULL in (wanted, given):
            return wanted == given or (given if wanted == NULL else wanted).name not in _PRIMITIVES
        if wanted.name != given.name:
            return False
        if wanted.name == "type":
            return True  # which types two types are is for the run to compare
        return len(wanted.parameters) == len(given.parameters) and all(
            map(self.fit, wanted.parameters, given.parameters)
        )

    def most_general(self, first: Type, second: Type) -> Type:
        """Return the more general one of two types that fit."""
        return first if _is_as_general(first, second) else second

    def _substitute(self, parameter: Type, cel_type: Type) -> tuple[bool, bool]:
        """Bind a parameter to a type.

        Shapes: result — whether that is possible, and whether it was bound before.
        """
        known_cel_type = self._known.get(parameter.name)
        if known_cel_type is None:
            if self._occurs(parameter, cel_type):
                return False, False
            self._known[parameter.name] = cel_type
            return True, False
        if cel_type == known_cel_type:
            return True, True
        if not self.fit(known_cel_type, cel_type):
            return False, True
        general = self.most_general(cel_type, known_cel_type)
        if not self._occurs(parameter, general):
            self._known[parameter.name] = general
        return True, True

    def _occurs(self, parameter: Type, inside: Type) -> bool:
        while inside.is_parameter:
            if inside == parameter:
                return True
            cel_type = self._known.get(inside.name)
            if cel_type is None:
                return False
            inside = cel_type
        return inside.is_open and any(self._occurs(parameter, other_parameter) for other_parameter in inside.parameters)


def _is_as_general(first: Type, second: Type) -> bool:
    """Say whether a type fits whenever the other one does."""
    if first.is_dynamic or first.is_parameter or first == second:
        return True
    if second.is_dynamic or second.is_parameter or first.name != second.name:
        return False
    return first.name == "type" or (
        len(first.parameters) == len(second.parameters)
        and all(map(_is_as_general, first.parameters, second.parameters))
    )
