"""Compares the release that a peer reports with our own.

Writers and peers report their release in the header `Topobus-Release`. Unknown fields are ignored
and new ones have defaults, so a peer of another release is reported but not refused. A message that
cannot be read is refused by its contract, and a stored value that another release wrote and that
cannot be read is never written over.
"""

from __future__ import annotations

import re
from enum import StrEnum

__all__ = [
    "RELEASE",
    "START_THAT_RELEASE",
    "Standing",
    "is_of_other_release",
    "release_remark",
    "shown_release",
    "standing",
]

RELEASE = "Topobus-Release"
"""The header in which each write, request and answer has the release of its sender. A header is
readable even where the message is not."""

START_THAT_RELEASE = (
    "start that release here again, what is stored is as it was; to stay with this one, see docs/how-to/"
    "deploy-on-kubernetes.md, Roll back"
)
"""The next step where a stored value of another release cannot be read and must not be lost."""

_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})(\.\S*)?")
# Characters of a foreign text that a line of a log or a table shows.
_SHOWN = 40


class Standing(StrEnum):
    """How a release compares with ours. The third number and what follows it change no message."""

    SAME = "same"
    OLDER = "older"
    NEWER = "newer"
    UNSAID = "unsaid"
    """The writer is no service: each service gives its release."""
    UNREADABLE = "unreadable"


def standing(release: str, own_release: str) -> Standing:
    """Compare two releases by their first two numbers.

    >>> [str(standing(release, "1.10.3")) for release in ("1.10.0rc1", "1.9.7", "2.0", "", "new; rm -rf /")]
    ['same', 'older', 'newer', 'unsaid', 'unreadable']
    """
    if not release:
        return Standing.UNSAID
    found_release, own = _RELEASE.fullmatch(release), _RELEASE.fullmatch(own_release)
    if found_release is None or own is None:
        return Standing.UNREADABLE
    numbers, own_numbers = ((int(match[1]), int(match[2])) for match in (found_release, own))
    if numbers == own_numbers:
        return Standing.SAME
    return Standing.OLDER if numbers < own_numbers else Standing.NEWER


def is_of_other_release(release: str, own_release: str) -> bool:
    """Return whether another release wrote something, so that what cannot be read of it may be right.

    >>> [is_of_other_release(release, "1.10.3") for release in ("1.10.0", "1.11.0", "")]
    [False, True, False]
    """
    return standing(release, own_release) not in (Standing.SAME, Standing.UNSAID)


def shown_release(release: str) -> str:
    r"""Return a peer's release text as a person may read it: printable, and of limited length.

    >>> shown_release("0.2.1"), shown_release("a\x1b[31m" + "b" * 99)
    ('0.2.1', 'a?[31mbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb')
    """
    return "".join(character if character.isprintable() else "?" for character in release[:_SHOWN])


def release_remark(who: str, release: str, own_release: str) -> str:
    """Write that a peer runs another release, and what to do. Empty when the two are the same.

    Shapes: `who` — one name, or several with commas.

    >>> release_remark("gpu", "0.1.0", "0.2.0")
    'gpu runs release 0.1.0, older than 0.2.0 here: upgrade it'
    """
    run, does, reports, it = ("run", "do", "report", "them") if ", " in who else ("runs", "does", "reports", "it")
    match standing(release, own_release):
        case Standing.SAME:
            return ""
        case Standing.OLDER:
            return f"{who} {run} release {shown_release(release)}, older than {own_release} here: upgrade {it}"
        case Standing.NEWER:
            return (
                f"{who} {run} release {shown_release(release)}, newer than {own_release} here: what is new in "
                "that is not understood here; upgrade this one"
            )
        case Standing.UNSAID:
            return f"{who} {does} not report a release: see what runs there"
        case Standing.UNREADABLE:
            return f"{who} {reports} release {shown_release(release)!r}, which is no release: see what runs there"
