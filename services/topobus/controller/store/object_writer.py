"""Writes objects of the stand-alone API: by compare-and-set, and the world learns each at once, so that what comes next sees it."""

from __future__ import annotations

from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.state.standalone_state import StandaloneState
from topobus.domain.errors import ContractError
from topobus.kubernetes.api.objects import name_of
from topobus.runtime.bus import Bus, Conflict
from topobus.runtime.logging import get_logger

__all__ = ["ObjectWriter"]


class ObjectWriter:
    """The one way in which the controller writes objects."""

    def __init__(self, bus: Bus, world: StandaloneState) -> None:
        self._bus = bus
        self._world = world

    async def write(self, key: ObjectKey, revision: int, value: ApiObject) -> Stored | None:
        """Write an object unless somebody else did since `revision`; None says that somebody did, and the watch brings what they wrote.

        Errors: raises AmbiguousWrite when it is not known whether it was written.
        """
        written = await self._bus.compare_and_set(catalogue.OBJECT, value, revision, **key._asdict())
        if isinstance(written, Conflict):
            get_logger().debug("object.write-lost", object=name_of(value), revision=revision)
            return None
        made = Stored(written.revision, value)
        try:
            self._world.put_object(key, made)
        except ContractError as err:
            # It is written, and known as far as it can be read; that its content is malformed is what may have been told by this very write.
            get_logger().debug("object.written-malformed", object=name_of(value), error=str(err))
        return made

    async def erase(self, key: ObjectKey, revision: int) -> bool:
        """Delete an object as it was at `revision`; False says that it is another one by now, or gone. The watch tells the world either way.

        A deletion that asks for no revision would take away what a user has made under the same name since, and what another replica has protected.
        Errors: raises AmbiguousWrite when it is not known whether it was deleted.
        """
        if await self._bus.compare_and_delete(catalogue.OBJECT, revision, **key._asdict()) is not None:
            get_logger().debug("object.deletion-lost", object=f"{key.kind} {key.namespace}/{key.name}", revision=revision)
            return False
        return True
