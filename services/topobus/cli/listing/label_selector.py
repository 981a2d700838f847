"""Reads and applies label selectors as Kubernetes writes them: `a=b`, `a==b`, `a!=b`, `a in (b,c)`,
`a notin (b,c)`, `a`, `!a`, all joined by commas.

Pure. As in Kubernetes, `!=` and `notin` also select what has no such label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from topobus.cli.exits import UsageError

__all__ = ["LabelSelector", "Requirement"]

_NEXT = "write it as for kubectl: -l 'class in (gpu,nic),health!=healthy,!holder'"
_KEY = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"[^,()=!]*?"
_TERM = re.compile(
    rf"\s*(?:(?P<absent>!)\s*(?P<absent_key>{_KEY})"
    rf"|(?P<set_key>{_KEY})\s+(?P<word>in|notin)\s*\((?P<values>[^()]*)\)"
    rf"|(?P<key>{_KEY})\s*(?:(?P<sign>==|=|!=)\s*(?P<value>{_VALUE}))?)\s*(?P<end>,|$)"
)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One term of a selector."""

    key: str
    values: frozenset[str] = frozenset()
    is_negated: bool = False
    is_about_presence: bool = False

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Say whether labels meet it."""
        if self.is_about_presence:
            return (self.key in labels) is not self.is_negated
        return (labels.get(self.key) in self.values) is not self.is_negated


@dataclass(frozen=True, kw_only=True)
class LabelSelector:
    """All terms of a selector. Without any it selects everything."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def read(cls, text: str) -> LabelSelector:
        """Read a selector.

        >>> selector = LabelSelector.read("class in (gpu,nic), model!=H100, !rdma")
        >>> selector.selects({"class": "gpu"}), selector.selects({"class": "gpu", "model": "H100"}), selector.selects({})
        (True, False, False)

        Errors: raises UsageError that names the place where it cannot be read.
        """  # noqa: E501
        requirements: list[Requirement] = []
        place = 0
        while place < len(text):
            term = _TERM.match(text, place)
            if term is None or (term["end"] == "," and term.end() == len(text)):
                raise UsageError(
                    f"cannot read the label selector {text!r} at {text[place:].strip() or 'its end'!r}", next_step=_NEXT
                )
            requirements.append(_requirement(term))
            place = term.end()
        return cls(requirements=tuple(requirements))

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Say whether labels meet every term."""
        return all(requirement.is_met(labels) for requirement in self.requirements)


def _requirement(term: re.Match[str]) -> Requirement:
    if term["absent"]:
        return Requirement(key=term["absent_key"], is_negated=True, is_about_presence=True)
    if term["set_key"]:
        values = frozenset(value.strip() for value in term["values"].split(","))
        return Requirement(key=term["set_key"], values=values, is_negated=term["word"] == "notin")
    if term["sign"]:
        return Requirement(key=term["key"], values=frozenset((term["value"].strip(),)), is_negated=term["sign"] == "!=")
    return Requirement(key=term["key"], is_about_presence=True)
