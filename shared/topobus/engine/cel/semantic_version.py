"""Semantic versions, compared by the rules of semver 2.0.0.

Pure. The CEL functions `semver`, `compareTo` and the like use it.
Source: semver.org, items 9 to 11.
"""

from __future__ import annotations

import re
from functools import total_ordering

__all__ = ["SemanticVersion"]

# Twenty digits hold 64 bits, which is what a number of a version may have.
_NUMBER = r"(0|[1-9][0-9]{0,19})"
_LARGEST = (1 << 64) - 1
_SHAPE = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-([0-9A-Za-z.-]+))?(?:\+([0-9A-Za-z.-]+))?")
_PARTS = 3
_DIGITS = frozenset("0123456789")


def _is_sound(match: re.Match[str]) -> bool:
    """Say whether the parts are well-formed: none is empty, and numbers have no leading zeros and
    fit 64 bits.
    """
    labels = (match[4] or "0").split(".")
    numbers = [*match.groups()[:3], *[label for label in labels if label.isdecimal()]]
    if not all(labels) or not all((match[5] or "0").split(".")):
        return False
    return all(
        number == "0" or (number[0] != "0" and len(number) <= 20 and int(number) <= _LARGEST) for number in numbers
    )


def _without_zeros(part: str) -> str:
    if len(part) <= 1:
        return part
    short = part.lstrip("0")
    return short if short[:1] in _DIGITS and short else "0" + short


@total_ordering
class SemanticVersion:
    """A version. Build data takes no part in comparison.

    >>> SemanticVersion.parse("1.10.0") > SemanticVersion.parse("1.9.9") > SemanticVersion.parse("1.9.9-rc.1")
    True
    """

    __slots__ = ("build", "numbers", "prerelease")

    def __init__(self, numbers: tuple[int, int, int], prerelease: str, build: str) -> None:
        self.numbers = numbers
        self.prerelease = prerelease
        self.build = build

    @classmethod
    def parse(cls, text: str, *, is_loose: bool = False) -> SemanticVersion:
        """Read a version.

        Shapes: is_loose — accept a leading v, missing parts and leading zeros.
        Errors: raises ValueError that shows the text.
        """
        written = text
        if is_loose:
            parts = [_without_zeros(part) for part in text.removeprefix("v").split(".", 2)]
            if len(parts) < _PARTS and any(mark in parts[-1] for mark in "+-"):
                raise ValueError(
                    f"not a semantic version: {text!r}, a short one cannot have a prerelease or build data"
                )
            written = ".".join([*parts, *["0"] * (_PARTS - len(parts))])
        match = _SHAPE.fullmatch(written)
        if match is None or not _is_sound(match):
            raise ValueError(f"not a semantic version: {text!r}, wanted MAJOR.MINOR.PATCH")
        return cls((int(match[1]), int(match[2]), int(match[3])), match[4] or "", match[5] or "")

    @property
    def _order(self) -> tuple[tuple[int, int, int], bool, list[tuple[bool, int, str]]]:
        parts = [
            (not part.isdecimal(), int(part) if part.isdecimal() else 0, "" if part.isdecimal() else part)
            for part in self.prerelease.split(".")
        ]
        return (self.numbers, not self.prerelease, parts if self.prerelease else [])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SemanticVersion) and self._order == other._order

    def __lt__(self, other: SemanticVersion) -> bool:
        return self._order < other._order

    def __hash__(self) -> int:
        return hash((self.numbers, self.prerelease))

    def __str__(self) -> str:
        text = ".".join(str(number) for number in self.numbers)
        return text + (f"-{self.prerelease}" if self.prerelease else "") + (f"+{self.build}" if self.build else "")
