"""Kubernetes quantities, exact: `1536Mi`, `0.5`, `2e3`, `250m`.

A value is a whole number of billionths, as in apimachinery: anything finer is rounded away from
zero, and a binary amount (`Ki`, ...) beyond 2^63-1 is capped. Only ASCII digits are accepted. As in
apimachinery, a suffix without digits (`G`) is 0 where apimachinery's short way of reading takes it.
Source: k8s.io/apimachinery/pkg/api/resource/quantity.go.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import total_ordering

__all__ = ["Quantity", "QuantityForm"]

_NANO = 10**9
_SHAPE = re.compile(r"([+-]?)0*([0-9]*)(?:\.([0-9]*))?(?:([eE][+-]?[0-9]+)|(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]))?")
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_DECIMAL_SUFFIX = {exponent: suffix for suffix, exponent in _DECIMAL.items()} | {0: ""}
# apimachinery caps binary amounts that do not fit 64 bits instead of refusing
# them (quantity.go, "maxAllowed").
_LARGEST = (2**63 - 1) * _NANO
# This many decimal digits fit 64 bits whatever they are (quantity.go, "maxInt64Factors"), and fewer
# with a binary suffix.
_SHORT_DIGITS = 18
_SHORT_BINARY_DIGITS = {"Ki": 11, "Mi": 8, "Gi": 5, "Ti": 2, "Pi": -1, "Ei": -4}
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

    __slots__ = ("form", "nano", "scale")

    nano: int
    form: QuantityForm
    scale: int | None
    """The power of ten in which apimachinery keeps it in 64 bits; None
    when it keeps a long number."""

    def __init__(self, nano: int, form: QuantityForm = QuantityForm.DECIMAL, scale: int | None = 0) -> None:
        object.__setattr__(self, "nano", nano)
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "scale", scale)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Quantity is immutable")

    @classmethod
    def parse(cls, text: str | float) -> Quantity:
        """Read a quantity as Kubernetes does. A bare number is its own value.

        Errors: raises ValueError that shows the text.
        """
        if isinstance(text, bool):
            raise ValueError(
                f"not a quantity: {text}, wanted a number with an optional suffix, such as 2, 500m or 64Gi"
            )
        if isinstance(text, int):
            return cls(text * _NANO)
        written = repr(text) if isinstance(text, float) else text
        match = _SHAPE.fullmatch(written) if 0 < len(written) <= _MAX_CHARACTERS else None
        if match is None:
            raise _not_a_quantity(written)
        sign, digits, fraction, power, suffix = match.groups()
        whole = -int(digits or "0") if sign == "-" else int(digits or "0")
        if not fraction and power is None:
            # Nearly every amount is written so.
            if suffix in _BINARY:
                if max(len(digits), 1) <= _SHORT_BINARY_DIGITS[suffix]:
                    return cls(whole * _BINARY[suffix] * _NANO, QuantityForm.BINARY)
                if "0" not in written and not digits:
                    raise _not_a_quantity(written)
                return cls(_capped(whole * _BINARY[suffix] * _NANO), QuantityForm.BINARY, None)
            exponent = _DECIMAL[suffix] if suffix else 0
            return cls(whole * 10 ** (9 + exponent), scale=exponent if len(digits) <= _SHORT_DIGITS else None)
        return cls._parse_fraction(written, sign == "-", digits + (fraction or ""), len(fraction or ""), power, suffix)

    @classmethod
    def _parse_fraction(
        cls, written: str, is_negative: bool, digits: str, behind_point: int, power: str | None, suffix: str | None
    ) -> Quantity:
        form, scale, factor = QuantityForm.DECIMAL, -behind_point, 1
        if power is not None:
            form = QuantityForm.EXPONENT
            if len(power) > _MAX_CHARACTERS or abs(int(power[1:])) > _MAX_EXPONENT:
                raise ValueError(f"not a quantity: {written!r}, its exponent is out of range")
            scale += int(power[1:])
        elif suffix in _BINARY:
            form, factor = QuantityForm.BINARY, _BINARY[suffix]
        elif suffix:
            scale += _DECIMAL[suffix]
        # apimachinery counts a zero before the point as a digit.
        is_short = (
            form is not QuantityForm.BINARY
            and max(len(digits) - behind_point, 1) + behind_point <= _SHORT_DIGITS
            and scale >= -9
        )
        if not digits and "0" not in written.partition(power or "\n")[0] and not is_short:
            raise _not_a_quantity(written)
        amount = int(digits or "0") * factor
        # Rounded up: an amount below one billionth is not nothing.
        nano = amount * 10 ** (9 + scale) if scale >= -9 else -(-amount // 10 ** (-9 - scale))
        if form is QuantityForm.BINARY:
            nano = _capped(nano)
        return cls(-nano if is_negative else nano, form, scale if is_short else None)

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

    @property
    def is_integer(self) -> bool:
        """Say whether apimachinery returns it as a 64-bit number without arithmetic (AsInt64):
        `1k`, but neither `1000m` nor `1Pi`.
        """
        return self.scale is not None and self.scale >= 0 and abs(self.nano) <= _LARGEST

    def approximate(self) -> float:
        """Return it as a double, with the rounding of apimachinery (AsApproximateFloat64)."""
        if self.scale is None or self.scale < -9:
            return float(self.nano) * 1e-9
        number = float(self.nano // 10 ** (9 + self.scale))
        return number * float(f"1e{self.scale}") if self.scale else number

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(
            self.nano + other.nano,
            self.form if self.nano else other.form,
            self._scale_with(other, self.nano + other.nano),
        )

    def __sub__(self, other: Quantity) -> Quantity:
        return Quantity(
            self.nano - other.nano,
            self.form if self.nano else other.form,
            self._scale_with(other, self.nano - other.nano),
        )

    def _scale_with(self, other: Quantity, nano: int) -> int | None:
        if self.scale is None or other.scale is None:
            return None
        if not other.nano:
            return self.scale
        scale = other.scale if not self.nano else min(self.scale, other.scale)
        largest = max(abs(self.nano), abs(other.nano), abs(nano))
        return scale if largest <= (2**63 - 1) * 10 ** (9 + scale) else None

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


def _not_a_quantity(written: str) -> ValueError:
    return ValueError(
        f"not a quantity: {written[:_MAX_CHARACTERS]!r}, wanted a number with an optional suffix, such as 2, "
        "500m or 64Gi"
    )


def _capped(nano: int) -> int:
    return max(-_LARGEST, min(_LARGEST, nano))
