"""The rules of access to the page: the name that was requested, whether a form came from the page
itself, and how many wrong passwords are too many.

Pure: it compares no password and reads no clock.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable

__all__ = ["Attempts", "Places", "allowed_hosts", "is_allowed_host", "is_same_origin"]

# A name or an address, and a port. Other characters that a browser could send are refused
# (`localhost:1@evil.example`).
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_WINDOW_S = 60.0
# All addresses together: a user with many addresses must not have many times as many tries.
_TOGETHER = 20
# Addresses remembered. The oldest is dropped first.
_MOST_ADDRESSES = 1024


def allowed_hosts(host: str, more: Iterable[str]) -> frozenset[str]:
    """Return the names, in lower case and without ports, by which browsers may ask for the page.

    >>> sorted(allowed_hosts("0.0.0.0", ["Console.example"]))
    ['127.0.0.1', '::1', 'console.example', 'localhost']
    """
    own = () if host in ("0.0.0.0", "::") else (host,)
    return frozenset(name.strip("[]").lower().rstrip(".") for name in (*_LOOPBACK_NAMES, *own, *more))


def is_allowed_host(header: str, allowed: frozenset[str]) -> bool:
    """Say whether a Host header names us. An empty one does not.

    >>> names = allowed_hosts("127.0.0.1", [])
    >>> is_allowed_host("localhost:8765", names), is_allowed_host("[::1]:1", names), is_allowed_host("evil.example:8765", names)
    (True, True, False)
    >>> is_allowed_host("localhost:8765@evil.example", names), is_allowed_host("", names), is_allowed_host("[::1]x", names)
    (False, False, False)
    """  # noqa: E501
    return _host_of(header) in allowed


def is_same_origin(origin: str, header: str) -> bool:
    """Say whether a form came from the page that it was sent to.

    Browsers name the origin with every form.

    >>> is_same_origin("http://localhost:8765", "localhost:8765"), is_same_origin("https://evil.example", "localhost:8765")
    (True, False)
    >>> is_same_origin("null", "localhost:8765")
    False
    """  # noqa: E501
    scheme, separator, host = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and host.lower() == header.lower()


class Attempts:
    """Counts wrong passwords by address, within a minute. Times are seconds of one monotonic clock.

    >>> attempts = Attempts(1)
    >>> attempts.wait_s("a", 0.0), attempts.note_wrong("a", 0.0), attempts.wait_s("a", 20.0), attempts.wait_s("b", 20.0)
    (0.0, None, 40.0, 0.0)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []

    def wait_s(self, address: str, now: float) -> float:
        """Return how long an address has to wait until its next try counts. 0: it may try now."""
        own = [at for at in self._wrong.get(address, ()) if now - at < _WINDOW_S]
        together = [at for at in self._all if now - at < _WINDOW_S]
        waits = [0.0]
        if len(own) >= self._most:
            waits.append(_WINDOW_S - (now - own[-self._most]))
        if len(together) >= self._most * _TOGETHER:
            waits.append(_WINDOW_S - (now - together[-self._most * _TOGETHER]))
        return max(waits)

    def note_wrong(self, address: str, now: float) -> None:
        """Record a wrong password."""
        self._wrong[address] = [*self._wrong.get(address, ()), now][-self._most :]
        self._wrong.move_to_end(address)
        while len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)
        self._all = [*self._all, now][-self._most * _TOGETHER :]


class Places:
    """The limited places for open pages, by address. Times are seconds of one monotonic clock.

    >>> places = Places(2, least_s=10.0)
    >>> places.enter(1, "a", 0.0), places.enter(2, "a", 5.0), places.enter(3, "b", 9.0), places.enter(3, "b", 10.0)
    ((), (), None, (1,))
    """

    def __init__(self, most: int, *, least_s: float) -> None:
        self._most = most
        self._least_s = least_s
        self._taken: dict[int, tuple[str, float]] = {}
        """By page, the oldest first."""

    def enter(self, page: int, address: str, now: float) -> tuple[int, ...] | None:
        """Give a place to a page.

        Returns the page that loses its place, if any. None when the page gets no place: the oldest
        page of the address with the most pages is not open for long enough.
        """
        gone: tuple[int, ...] = ()
        if len(self._taken) >= self._most:
            counts = Counter(owner for owner, _ in self._taken.values())
            crowded = max(counts, key=lambda owner: (counts[owner], owner == address))
            oldest = next(other for other, (owner, _) in self._taken.items() if owner == crowded)
            if now - self._taken[oldest][1] < self._least_s:
                return None
            del self._taken[oldest]
            gone = (oldest,)
        self._taken[page] = (address, now)
        return gone

    def leave(self, page: int) -> None:
        """Free the place of a page that is closed."""
        self._taken.pop(page, None)


def _host_of(header: str) -> str:
    match = _HOST.fullmatch(header.strip().lower())
    return (match[1] or match[2].rstrip(".")) if match is not None else ""
