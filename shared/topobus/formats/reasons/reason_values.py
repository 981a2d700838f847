"""The parts of the catalogue of reason codes: groups of codes with one meaning, in sections of one
stage each.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ReasonGroup", "ReasonSection"]


class ReasonGroup(Struct, frozen=True):
    """Codes with the same meaning for different things.

    A `*` in a code is a placeholder for one of a few words, which `says` lists.
    """

    codes: tuple[str, ...]
    says: str
    facts: tuple[str, ...] = ()
    """Keys of `facts`: numbers, names and cpulists, never sentences."""
    facts_note: str = ""
    """Text of the table about the facts, in addition to their keys."""
    codes_note: str = ""
    """Text of the table about the codes, in addition to their names."""


class ReasonSection(Struct, frozen=True, kw_only=True):
    """Codes of one stage, in the order of the page.

    `before` and `after` are paragraphs around the table, as Markdown.
    """

    title: str
    groups: tuple[ReasonGroup, ...]
    before: str = ""
    after: str = ""
