"""How reconcilers write: a write that is lost is dropped, and one without an answer ends the work on the object, to be begun anew with what is there then.

Flows in: objects as decided. Flows out: what is stored; None for a write that somebody else's came before, for the copy then has the newer object, or the watch brings it.
"""

from __future__ import annotations

from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.store.protocol import Deleted, ObjectStore, Unknown, WriteOutcome

__all__ = ["ObjectWriter", "confirmed"]


class ObjectWriter:
    """Writes objects into a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def read(self, key: ObjectKey) -> Stored | None:
        """Read an object as it is now, not as the copy shows it; None when there is none.

        Errors: raises PeerUnavailable; ContractError when nobody can read it.
        """
        return await self._store.get(key)

    async def create(self, key: ObjectKey, value: ApiObject) -> Stored | None:
        """Make an object; None says that it is there already.

        Errors: raises PeerUnavailable when it is not known whether it was made.
        """
        return confirmed(await self._store.create(key, value))

    async def write(self, key: ObjectKey, revision: int, value: ApiObject) -> Stored | None:
        """Write an object unless somebody else did since `revision`; None says that somebody did.

        Errors: raises PeerUnavailable when it is not known whether it was written.
        """
        return confirmed(await self._store.put(key, revision, value))

    async def delete(self, key: ObjectKey, revision: int) -> bool:
        """Delete an object as it was at `revision`; False says that it is another one by now, or gone. The watch tells the state either way.

        Errors: raises PeerUnavailable when it is not known whether it was deleted.
        """
        outcome = await self._store.delete(key, revision)
        if isinstance(outcome, Unknown):
            raise outcome.error
        return isinstance(outcome, Deleted)


def confirmed(outcome: WriteOutcome) -> Stored | None:
    """Give what was stored; None when somebody else was faster.

    Errors: raises the PeerUnavailable of a write whose outcome is not known.
    """
    if isinstance(outcome, Unknown):
        raise outcome.error
    return outcome if isinstance(outcome, Stored) else None
