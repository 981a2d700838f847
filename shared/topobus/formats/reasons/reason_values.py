"""What the catalogue of reason codes is made of: groups of codes that say the same, in sections of
one stage each.

Flows in: nothing. Flows out: the values of `reasons` and `placement_reasons`.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ReasonGroup", "ReasonSection"]


class ReasonGroup(Struct, frozen=True):
    """Codes that say the same of different things.

    A `*` in a code stands for one of a few words, which `says` lists.
    """

    codes: tuple[str, ...]
    says: str
    facts: tuple[str, ...] = ()
    """Keys of `facts`: numbers, names and cpulists, never sentences."""
    facts_note: str = ""
    """What the table says of the facts beyond their keys."""
    codes_note: str = ""
    """What the table says of the codes beyond their names."""


class ReasonSection(Struct, frozen=True, kw_only=True):
    """Codes of one stage, in the order of the page; `before` and `after` are paragraphs around the
    table, as Markdown.
    """

    title: str
    groups: tuple[ReasonGroup, ...]
    before: str = ""
    after: str = ""
