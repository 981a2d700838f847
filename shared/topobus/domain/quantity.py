"""Kubernetes quantities, exact: `1536Mi`, `0.5`, `2e3`, `250m`.

A value is a whole number of billionths, as in apimachinery: anything finer is rounded away from zero and anything beyond 2^63-1 is capped.
Source: k8s.io/apimachinery/pkg/api/resource/quantity.go.
"""

from __future__ import annotations

import re
from enum import StrEnum
from fractions import Fraction
from functools import total_ordering

__all__ = ["Quantity", "QuantityForm"]

_NANO = 10**9
_SHAPE = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d+)|(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]))?")
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_DECIMAL_SUFFIX = {exponent: suffix for suffix, exponent in _DECIMAL.items()} | {0: ""}
# apimachinery caps what does not fit 64 bits instead of refusing it (quantity.go, "maxAllowed").
_LARGEST = (2**63 - 1) * _NANO
# A number with more digits than this is no amount of anything; it only costs time to read.
_MAX_CHARACTERS = 64
_MAX_EXPONENT = 100


class QuantityForm(StrEnum):
    """How a quantity was written, which decides how it is written again."""

    BINARY = "binary"
    DECIMAL = "decimal"
    EXPONENT = "exponent"


@total_ordering
class Quantity:
    """An exact amount. Equal and ordered by value alone.

    >>> Quantity.parse("1Ki") == Quantity.parse("1024"), str(Quantity.parse("0.5Gi")), str(Quantity.parse("1500m"))
    (True, '512Mi', '1500m')
    """

    __slots__ = ("form", "nano")

    nano: int
    form: QuantityForm

    def __init__(self, nano: int, form: QuantityForm = QuantityForm.DECIMAL) -> None:
        object.__setattr__(self, "nano", max(-_LARGEST, min(_LARGEST, nano)))
        object.__setattr__(self, "form", form)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Quantity is immutable")

    @classmethod
    def parse(cls, text: str | float) -> Quantity:
        """Read a quantity as Kubernetes does; a bare number stands for itself.

        Errors: raises ValueError that shows the text.
        """
        if isinstance(text, bool):
            raise ValueError(f"not a quantity: {text}, wanted a number with an optional suffix, such as 2, 500m or 64Gi")
        if isinstance(text, int):
            return cls(text * _NANO)
        written = repr(text) if isinstance(text, float) else text
        found = _SHAPE.fullmatch(written) if len(written) <= _MAX_CHARACTERS else None
        if found is None:
            raise ValueError(
                f"not a quantity: {written[:_MAX_CHARACTERS]!r}, wanted a number with an optional suffix, such as 2, 500m or 64Gi"
            )
        sign, digits, exponent, suffix = found.groups()
        if exponent is None and "." not in digits:
            # Nearly every amount is written so, and fractions cost ten times as much.
            factor = _BINARY[suffix] * _NANO if suffix in _BINARY else 10 ** (9 + _DECIMAL[suffix]) if suffix else _NANO
            whole = int(digits) * factor
            return cls(-whole if sign == "-" else whole, QuantityForm.BINARY if suffix in _BINARY else QuantityForm.DECIMAL)
        amount = Fraction(digits)
        form = QuantityForm.DECIMAL
        if exponent:
            power = int(exponent[1:])
            if abs(power) > _MAX_EXPONENT:
                raise ValueError(f"not a quantity: {written!r}, its exponent is out of range")
            amount *= Fraction(10) ** power
            form = QuantityForm.EXPONENT
        elif suffix in _BINARY:
            amount *= _BINARY[suffix]
            form = QuantityForm.BINARY
        elif suffix:
            amount *= Fraction(10) ** _DECIMAL[suffix]
        nano = -((-amount * _NANO) // 1)  # rounded up: an amount below one billionth is not nothing
        return cls(int(-nano if sign == "-" else nano), form)

    @classmethod
    def of(cls, units: int, form: QuantityForm = QuantityForm.DECIMAL) -> Quantity:
        """Make a quantity of whole units."""
        return cls(units * _NANO, form)

    @property
    def is_whole(self) -> bool:
        """Say whether it is a whole number of units."""
        return self.nano % _NANO == 0

    @property
    def units(self) -> int:
        """Whole units, rounded up (a part of a byte takes a byte)."""
        return -(-self.nano // _NANO)

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.nano + other.nano, self.form if self.nano else other.form)

    def __sub__(self, other: Quantity) -> Quantity:
        return Quantity(self.nano - other.nano, self.form if self.nano else other.form)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantity) and self.nano == other.nano

    def __lt__(self, other: Quantity) -> bool:
        return self.nano < other.nano

    def __hash__(self) -> int:
        return hash(self.nano)

    def __repr__(self) -> str:
        return f"Quantity.parse({str(self)!r})"

    def __str__(self) -> str:
        """Write the canonical form: no fraction, the largest suffix that keeps it exact."""
        if self.nano == 0:
            return "0"
        if self.form is QuantityForm.BINARY and self.is_whole and abs(self.nano) >= 1024 * _NANO:
            units, suffix = self.nano // _NANO, ""
            for name in _BINARY:
                if units % 1024:
                    break
                units, suffix = units // 1024, name
            return f"{units}{suffix}"
        mantissa, power = self.nano, -9
        while mantissa % 1000 == 0 and power < 18:
            mantissa, power = mantissa // 1000, power + 3
        if self.form is QuantityForm.EXPONENT:
            return f"{mantissa}e{power}" if power else str(mantissa)
        return f"{mantissa}{_DECIMAL_SUFFIX[power]}"
