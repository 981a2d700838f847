"""Decides whether a history of one object is linearizable: whether each operation may have happened
at a single moment between its call and its return.

Calls and returns come in the order in which they were seen, each with what the operation did and
answered (its action). The history is linearizable if a sequential object would have answered the
same in some order of the operations. The check keeps the set of all configurations that are still
possible. A configuration is a state of the object with those open operations that have happened in
it. So a history of any length is checked in the memory of its widest moment. An operation happens
in a configuration no sooner than some return needs it to.

Source: Wing & Gong, "Testing and Verifying Concurrent Objects" (1993); Lowe, "Testing for
Linearizability" (2017), the just-in-time search; Horn & Kroening, "Faster Linearizability Checking
via P-Compositionality" (2015), by which a history is checked object by object. Maintained checkers
exist for Go, Clojure and Rust; none for Python.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["History"]

S = TypeVar("S", bound=Hashable)
A = TypeVar("A")


class History(Generic[S, A]):
    """The history of one object, checked as it grows.

    Shapes: step — the state after an action, None where a sequential object in this state would not
    have answered so; observes — returns whether an action is known to change no state. Actions that
    only observe happen as soon as a state allows it, which loses no order and keeps the search
    small.
    Cost: O(configurations x open operations) for each return. Without operations of unknown outcome
    there are few of them.
    """

    def __init__(
        self, initial: S, step: Callable[[S, A], S | None], observes: Callable[[A], bool] = lambda _: False
    ) -> None:
        self._step = step
        self._observes = observes
        self._changing: dict[int, A] = {}
        self._observing: dict[int, A] = {}
        self._possible: set[tuple[S, frozenset[int]]] = {(initial, frozenset())}

    @property
    def states(self) -> frozenset[S]:
        """The states that the object may be in after the returns so far."""
        return frozenset(state for state, _ in self._possible)

    @property
    def width(self) -> int:
        """The number of possible configurations, which is the cost of the search."""
        return len(self._possible)

    def call(self, number: int, action: A) -> None:
        """Record that an operation begins, with the action that it will have done.

        An operation that never returns has an unknown outcome, and may happen at any later moment
        or never.
        """
        if not self._observes(action):
            self._changing[number] = action
            return
        self._observing[number] = action
        self._possible = {
            (state, happened | {number} if self._step(state, action) is not None else happened)
            for state, happened in self._possible
        }

    def end(self, number: int) -> bool:
        """Record that an operation has returned.

        False: no order allows its answer, and the history is checked no further.
        """
        possible: set[tuple[S, frozenset[int]]] = set()
        seen, stack = set(self._possible), list(self._possible)
        while stack:
            state, happened = stack.pop()
            if number in happened:
                possible.add((state, happened - {number}))
                continue
            for configuration in self._next(state, happened):
                if configuration not in seen:
                    seen.add(configuration)
                    stack.append(configuration)
        if not possible:
            return False
        self._possible = possible
        self._changing.pop(number, None)
        self._observing.pop(number, None)
        return True

    def forget(self, number: int) -> None:
        """Settle an operation of unknown outcome: if it has not happened by now, it will not."""
        self._close()
        self._possible = {(state, happened - {number}) for state, happened in self._possible}
        self._changing.pop(number, None)
        self._observing.pop(number, None)

    def _close(self) -> None:
        """Add every configuration that may have been reached by now, so that the set is complete
        for this moment.
        """
        stack = list(self._possible)
        while stack:
            for configuration in self._next(*stack.pop()):
                if configuration not in self._possible:
                    self._possible.add(configuration)
                    stack.append(configuration)

    def _next(self, state: S, happened: frozenset[int]) -> Iterator[tuple[S, frozenset[int]]]:
        """Yield the configurations after one more open operation that changes something."""
        for number, action in self._changing.items():
            if number not in happened:
                after = self._step(state, action)
                if after is not None:
                    yield after, self._observed(after, happened | {number})

    def _observed(self, state: S, happened: frozenset[int]) -> frozenset[int]:
        """Add the open observations that this state allows."""
        more = [
            number
            for number, action in self._observing.items()
            if number not in happened and self._step(state, action) is not None
        ]
        return happened.union(more) if more else happened
