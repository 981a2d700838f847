"""What was done to one device for one owner, step by step. The driver records each act before and
after it, so that a crash leaves nothing that cannot be undone.

`journal` writes the record to a file. No step is forgotten before it is undone. A record without a
file (`DeviceRecord()`) is for tests of a driver. Only one thread writes a record at a time: the
driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Union

import msgspec
from msgspec import Struct

from topobus.values.errors import InvariantError
from topobus.values.request import Owner
from topobus.values.sandbox import Sandbox

__all__ = ["DeviceRecord", "Json", "RecordState", "Step"]

Json = Union[None, bool, int, float, str, Sequence["Json"], Mapping[str, "Json"]]  # noqa: UP007 - refers to itself, which `|` cannot
"""What a journal can keep."""


class Step(Struct, frozen=True, kw_only=True):
    """One act on a device, in the order of intent."""

    name: str
    """The driver's own: `netns`, `rename`."""
    before: dict[str, Any] = {}
    """What was there before."""
    after: dict[str, Any] = {}
    """What the driver noted when it was done."""
    is_done: bool = False
    """False: it may be done, half done or not done at all; to undo it must work in each case."""


class RecordState(Struct, frozen=True, kw_only=True):
    """The present content of a record."""

    owner: Owner | None = None
    sandbox: Sandbox | None = None
    steps: tuple[Step, ...] = ()


class DeviceRecord:
    """The host's durable journal of one device for one owner.

    Every method is synced before it returns.
    """

    def __init__(
        self, state: RecordState | None = None, write: Callable[[RecordState], None] = lambda _state: None
    ) -> None:
        """Begin with what is known. `write` makes a state durable, and raises when it cannot."""
        self._state = state or RecordState()
        self._write = write

    @property
    def owner(self) -> Owner | None:
        """The owner of the device. None in a record of no owner."""
        return self._state.owner

    @property
    def sandbox(self) -> Sandbox | None:
        """Where the device is, or was about to be. None while it is only prepared."""
        return self._state.sandbox

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps that are not undone yet, in order of intent. Undo them in reverse."""
        return self._state.steps

    def step(self, name: str) -> Step | None:
        """Find a step by name. None when it was never intended, or is undone."""
        return next((step for step in self.steps if step.name == name), None)

    def intend(self, step: str, before: Mapping[str, Json] = MappingProxyType({})) -> None:
        """Record what is about to be done, and the state before it.

        A step that is recorded already keeps its `before`: only the first state counts.
        """
        if self.step(step) is None:
            self._keep((*self.steps, Step(name=step, before=_plain(before))))

    def done(self, step: str, after: Mapping[str, Json] = MappingProxyType({})) -> None:
        """Record that it is done.

        Errors: raises InvariantError for a step that was never intended: the driver has acted
        before it recorded the intent.
        """
        if self.step(step) is None:
            raise InvariantError(
                f"step {step!r} is done and was never intended: call intend before the act",
                steps=[it.name for it in self.steps],
            )
        self._keep(
            tuple(
                msgspec.structs.replace(kept, is_done=True, after=_plain(after)) if kept.name == step else kept
                for kept in self.steps
            )
        )

    def undone(self, step: str) -> None:
        """Record that it is undone. Does nothing when it was never intended."""
        if self.step(step) is not None:
            self._keep(tuple(kept for kept in self.steps if kept.name != step))

    def _keep(self, steps: tuple[Step, ...]) -> None:
        state = msgspec.structs.replace(self._state, steps=steps)
        # Written first: a change that could not be written does not count.
        self._write(state)
        self._state = state


def _plain(facts: Mapping[str, Json]) -> dict[str, Any]:
    """Make a copy as it will be read again. What JSON cannot keep fails here, before the act."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(facts)))
    return plain
