"""Reads the order of words on a command line: options that every command has may precede the
command, as with kubectl and nats.

Only the standard library: this runs before anything is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["with_options_behind"]

_WITH_VALUE = ("--nats", "--context", "--config")
_WITHOUT_VALUE = ("--json",)


def with_options_behind(arguments: Sequence[str]) -> list[str]:
    """Move options before the command to the end of the command line, where each command reads its
    own.

    >>> with_options_behind(["--nats", "nats://a:1", "inventory", "gpu"])
    ['inventory', 'gpu', '--nats', 'nats://a:1']
    >>> with_options_behind(["--context=lab", "release", "--", "-x"])
    ['release', '--context=lab', '--', '-x']
    """
    rest = list(arguments)
    options: list[str] = []
    while rest:
        name, equals, _ = rest[0].partition("=")
        if name in _WITH_VALUE and (equals or len(rest) > 1):
            count = 1 if equals else 2
        elif rest[0] in _WITHOUT_VALUE:
            count = 1
        else:
            break
        options += rest[:count]
        del rest[:count]
    if not rest:
        return options
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *options, *rest[end:]]
