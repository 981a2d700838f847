"""The object store's protocol for both homes: keys, revisions, and writes on the condition of one.

A NATS stream counts its messages and an API server its resource versions. Both refuse a write whose
revision is not the stored one, and both may leave a write without an answer. So one protocol serves
both homes, and one contract suite holds both stores to it
(`tests/integration/controller/test_object_store.py`).

A store puts what it wrote into its copy at once, so that the next decision sees it. Writes of
others arrive by a watch (`NatsWatch`, or an `Informer` for each kind). `ObjectFeed` applies both to
the copy in the same way.
"""

from __future__ import annotations

from typing import Protocol

from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject

__all__ = ["ObjectStore"]


class ObjectStore(Protocol):
    """A store of objects with compare-and-set.

    A lost write is dropped: the copy has the newer object, or the watch brings it, and the work
    starts again from there. A write without an answer may or may not take effect, even later, so it
    ends the work on the object.

    Errors: each method raises ContractError for an object that cannot be read, and PeerUnavailable
    without an answer, or when the store refuses a request for another reason than a conflict (a
    right is missing, the object is invalid): then nothing was written.
    """

    async def read(self, key: ObjectKey) -> Stored | None:
        """Read an object from the store, not from the copy. None when there is none."""
        ...

    async def create(self, key: ObjectKey, value: ApiObject) -> Stored | None:
        """Create an object. None when it exists."""
        ...

    async def write(self, key: ObjectKey, revision: int, value: ApiObject) -> Stored | None:
        """Write an object if its stored revision is still the one on which the write was decided.

        None when it is not: another writer changed, deleted or created the object.

        Shapes: value — differs from what was stored in its status or in all else: an API server
        changes the one or the other by one write, never both.
        """
        ...

    async def delete(self, key: ObjectKey, revision: int) -> bool:
        """Delete an object at a revision. False when it is another, or the object is gone. On an API
        server it may be there until its finalizers are removed. The watch updates the state.

        What a user has created under the same name since, and what another replica has protected,
        stays.
        """
        ...
