"""The store of objects as the controller writes it, whichever it is: keys, revisions, and three outcomes of a write.

A stream of NATS counts its messages and an API server its resource versions; both refuse a write onto another revision than the one on which it was decided, and both may
leave a write without an answer. So one port serves both homes, and one contract suite holds both stores to it (`tests/integration/test_object_store.py`).

Flows in: objects as decided. Flows out: the object as stored, or why it is not. A store shows what it wrote to its copy of the objects at once, so that the next decision
sees it; whatever others write comes by the watch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.domain.errors import PeerUnavailable

__all__ = ["Conflict", "Deleted", "ObjectStore", "Unknown", "WriteOutcome"]


@dataclass(frozen=True)
class Conflict:
    """Somebody else was faster: the object is another one by now, or gone, or there already. The copy has it, or the watch brings it."""

    why: str = ""


@dataclass(frozen=True)
class Unknown:
    """The write was sent and not answered: it is neither done nor undone, and may still happen. What is there then is what the next decision begins with."""

    error: PeerUnavailable


@dataclass(frozen=True)
class Deleted:
    """The object is gone, or, on an API server, on its way out as soon as its finalizers are off."""


WriteOutcome = Stored | Conflict | Unknown


class ObjectStore(Protocol):
    """A store of objects with compare-and-set.

    Errors: each method raises ContractError for an object that nobody can read, and PeerUnavailable when the store refuses what it is asked for another reason than a
    conflict (a right is missing, the object is invalid): then nothing was written. `get` raises PeerUnavailable when there is no answer.
    """

    async def get(self, key: ObjectKey) -> Stored | None:
        """Read an object as it is now, not as the copy shows it; None when there is none."""
        ...

    async def create(self, key: ObjectKey, value: ApiObject) -> WriteOutcome:
        """Make an object that does not exist; Conflict when it does."""
        ...

    async def put(self, key: ObjectKey, revision: int, value: ApiObject) -> WriteOutcome:
        """Write an object onto the revision on which that was decided.

        Shapes: value — differs from what was stored in its status or in all else: an API server changes the one or the other by one write, never both.
        """
        ...

    async def delete(self, key: ObjectKey, revision: int) -> Deleted | Conflict | Unknown:
        """Delete an object as it was at a revision: what a user has made under the same name since, and what another replica has protected, stays."""
        ...
