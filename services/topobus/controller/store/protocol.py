"""The object store's protocol for both homes: keys, revisions and the three outcomes of a
write.

A NATS stream counts its messages and an API server its resource versions. Both refuse a write whose
revision is not the stored one, and both may leave a write without an answer. So one protocol serves
both homes, and one contract suite holds both stores to it
(`tests/integration/controller/test_object_store.py`).

A store puts what it wrote into its copy at once, so that the next decision sees it. Writes of
others arrive by a watch (`NatsWatch`, or an `Informer` for each kind). `ObjectFeed` applies both to
the copy in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import PeerUnavailable

__all__ = ["Conflict", "Deleted", "ObjectStore", "Unknown", "WriteOutcome"]


@dataclass(frozen=True)
class Conflict:
    """The stored revision is another one: the object was changed, deleted or created by another
    writer.

    The copy has it, or the watch brings it.
    """


@dataclass(frozen=True)
class Unknown:
    """The write was sent and not answered: it may or may not take effect, even later.

    The next decision starts from what is then stored.
    """

    error: PeerUnavailable


@dataclass(frozen=True)
class Deleted:
    """The object is gone, or, on an API server, will be when its finalizers are removed."""


WriteOutcome = Stored | Conflict | Unknown


class ObjectStore(Protocol):
    """A store of objects with compare-and-set.

    Errors: each method raises ContractError for an object that cannot be read, and PeerUnavailable
    when the store refuses a request for another reason than a conflict (a right is missing, the
    object is invalid): then nothing was written. `get` raises PeerUnavailable when there is no
    answer.
    """

    async def get(self, key: ObjectKey) -> Stored | None:
        """Read an object from the store, not from the copy. None when there is none."""
        ...

    async def create(self, key: ObjectKey, value: ApiObject) -> WriteOutcome:
        """Create an object. Conflict when it exists."""
        ...

    async def put(self, key: ObjectKey, revision: int, value: ApiObject) -> WriteOutcome:
        """Write an object if its stored revision is still the one on which the write was decided.

        Shapes: value — differs from what was stored in its status or in all else: an API server
        changes the one or the other by one write, never both.
        """
        ...

    async def delete(self, key: ObjectKey, revision: int) -> Deleted | Conflict | Unknown:
        """Delete an object at a revision. What a user has created under the same name since, and
        what another replica has protected, stays.
        """
        ...
