"""The writes of reconcilers: a lost compare-and-set is dropped, and a write without an answer ends
the work on the object.

After a lost write the copy has the newer object, or the watch brings it. The work starts again from
the stored state.
"""

from __future__ import annotations

from topobus.controller.store.protocol import Deleted, ObjectStore, Unknown, WriteOutcome
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject

__all__ = ["ObjectWriter", "confirmed"]


class ObjectWriter:
    """Writes objects into a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def read(self, key: ObjectKey) -> Stored | None:
        """Read an object from the store, not from the copy. None when there is none.

        Errors: raises PeerUnavailable, or ContractError when it cannot be read.
        """
        return await self._store.get(key)

    async def create(self, key: ObjectKey, value: ApiObject) -> Stored | None:
        """Create an object. None when it exists already.

        Errors: raises PeerUnavailable when it is not known whether it was created.
        """
        return confirmed(await self._store.create(key, value))

    async def write(self, key: ObjectKey, revision: int, value: ApiObject) -> Stored | None:
        """Write an object if its stored revision is `revision`. None when it is not.

        Errors: raises PeerUnavailable when it is not known whether it was written.
        """
        return confirmed(await self._store.put(key, revision, value))

    async def delete(self, key: ObjectKey, revision: int) -> bool:
        """Delete an object if its stored revision is `revision`.

        False when it is not, or the object is gone. The watch updates the state.

        Errors: raises PeerUnavailable when it is not known whether it was deleted.
        """
        outcome = await self._store.delete(key, revision)
        if isinstance(outcome, Unknown):
            raise outcome.error
        return isinstance(outcome, Deleted)


def confirmed(outcome: WriteOutcome) -> Stored | None:
    """Return the stored object. None when another writer was first.

    Errors: raises the PeerUnavailable of a write whose outcome is not known.
    """
    if isinstance(outcome, Unknown):
        raise outcome.error
    return outcome if isinstance(outcome, Stored) else None
