"""Objects of the stand-alone API, in a bucket of NATS: the revision is the message's sequence in the bucket's stream.

Flows in: objects as decided. Flows out: compare-and-set writes; the state learns each at once, so that what comes next sees it.
"""

from __future__ import annotations

from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.protocol import Conflict, Deleted, Unknown, WriteOutcome
from topobus.domain.errors import ContractError
from topobus.kubernetes.api.objects import name_of
from topobus.runtime import bus
from topobus.runtime.bus import AmbiguousWrite, Bus
from topobus.runtime.logging import get_logger

__all__ = ["NatsStore"]


class NatsStore:
    """The bucket of objects, and the copy that learns what was written there."""

    def __init__(self, bus: Bus, world: StandaloneState) -> None:
        self._bus = bus
        self._world = world

    async def get(self, key: ObjectKey) -> Stored | None:
        """Read an object from the leader; None when there is none."""
        entry = await self._bus.get(catalogue.OBJECT, **key._asdict())
        return Stored(entry.revision, entry.value) if entry is not None else None

    async def create(self, key: ObjectKey, value: ApiObject) -> WriteOutcome:
        """Make an object that does not exist."""
        return await self.put(key, 0, value)

    async def put(self, key: ObjectKey, revision: int, value: ApiObject) -> WriteOutcome:
        """Write an object onto a revision; 0: that of an object that does not exist."""
        try:
            written = await self._bus.compare_and_set(catalogue.OBJECT, value, revision, **key._asdict())
        except AmbiguousWrite as err:
            return Unknown(err)
        if isinstance(written, bus.Conflict):
            get_logger().debug("object.write-lost", object=name_of(value), revision=revision)
            return Conflict()
        stored = Stored(written.revision, value)
        try:
            self._world.put_object(key, stored)
        except ContractError as err:
            # It is written, and known as far as it can be read; that its content is malformed is what may have been told by this very write.
            get_logger().debug("object.written-malformed", object=name_of(value), error=str(err))
        return stored

    async def delete(self, key: ObjectKey, revision: int) -> Deleted | Conflict | Unknown:
        """Delete an object as it was at a revision; the watch tells the state either way."""
        try:
            conflict = await self._bus.compare_and_delete(catalogue.OBJECT, revision, **key._asdict())
        except AmbiguousWrite as err:
            return Unknown(err)
        if conflict is not None:
            get_logger().debug("object.deletion-lost", object=f"{key.kind} {key.namespace}/{key.name}", revision=revision)
            return Conflict()
        return Deleted()
