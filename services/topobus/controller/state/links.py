"""A many-to-many index: what each key refers to, and which keys refer to a target."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

__all__ = ["Links"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class Links(Generic[K, T]):
    """Keys with their targets.

    >>> uses = Links[str, str]()
    >>> uses.put("pod", ("fast", "large"))
    >>> uses.targets_of("pod"), set(uses.keys_of("fast"))
    (('fast', 'large'), {'pod'})
    >>> uses.put("pod", ("large",))
    >>> set(uses.keys_of("fast")), set(uses.targets)
    (set(), {'large'})
    """

    def __init__(self) -> None:
        self._targets: dict[K, tuple[T, ...]] = {}
        self._keys: dict[T, set[K]] = {}

    def put(self, key: K, targets: Iterable[T] = ()) -> None:
        """Replace the targets of a key. One without targets is not kept."""
        for target in self._targets.pop(key, ()):
            self._keys[target].discard(key)
            if not self._keys[target]:
                del self._keys[target]
        kept = tuple(dict.fromkeys(targets))
        if kept:
            self._targets[key] = kept
        for target in kept:
            self._keys.setdefault(target, set()).add(key)

    def targets_of(self, key: K) -> tuple[T, ...]:
        """List the targets of a key, in the order in which they were given."""
        return self._targets.get(key, ())

    def keys_of(self, target: T) -> AbstractSet[K]:
        """Return the keys that refer to a target: as they are now, so do not change them meanwhile."""
        return self._keys.get(target, frozenset())

    @property
    def targets(self) -> AbstractSet[T]:
        """The targets to which any key refers."""
        return self._keys.keys()
