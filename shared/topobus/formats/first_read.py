"""Has msgspec read into a type for the first time in one thread at a time.

msgspec notes on a type what it learns of it when it first decodes or converts into it, and of the
types of its fields. A second thread that meets these notes half written ends the process with
SIGSEGV (0.22: most processes in which four threads began at once). Later reads only look them
up. So whatever may run in a thread names the type by `ready`.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

__all__ = ["ready"]

T = TypeVar("T")

_FIRST = threading.Lock()
_READY: set[object] = set()


def ready(kind: type[T]) -> type[T]:
    """Return a type after msgspec has all that it needs of it.

    Cost: some tens of microseconds for each of a type's structs at the first call, then a look-up.

    >>> msgspec.json.decode(b"[1]", type=ready(tuple[int, ...]))
    (1,)
    """
    if kind not in _READY:
        with _FIRST:
            msgspec.json.Decoder(kind)
            _READY.add(kind)
    return kind
