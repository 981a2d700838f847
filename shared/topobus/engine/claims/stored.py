"""An object of a store: its key, the revision at which it was read, and its content, parsed
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.objects import Claim, Pod, ReadObject
from topobus.engine.claims.reservations import Consumer
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.kubernetes.objects import Metadata, ObjectKey
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

__all__ = ["ObjectKey", "Stored"]


@dataclass(frozen=True)
class Stored:
    """An object with the revision it was read at."""

    revision: int
    value: ApiObject
    """As stored: the next version is made of it."""

    def unread(self) -> Stored:
        """Return the same object with no part parsed yet.

        Parsed parts stay as long as the object does. A caller that reads an object only once, as it
        arrives, reads such a copy: most claims are never needed again, and keeping the parts of all
        of them costs the garbage collector a fifth of the rate of allocations (bench allocate,
        fill).
        """
        return Stored(self.revision, self.value)

    @cached_property
    def claim(self) -> Claim:
        """The object as a claim of structured parameters."""
        return Claim(self.value)

    @cached_property
    def pod(self) -> Pod:
        """The object as a pod."""
        return Pod(self.value)

    @cached_property
    def structured(self) -> Claim:
        """The object as a claim of structured parameters, even where it is one of classic DRA."""
        value = as_structured(self.value)
        return self.claim if value is self.value else Claim(value)

    @property
    def known_consumers(self) -> tuple[Consumer, ...]:
        """The consumers that have reserved a claim, also one of classic DRA.

        A claim that cannot be read has none.
        """
        try:
            return self.structured.consumers
        except ContractError:
            return ()

    @property
    def known_pods(self) -> tuple[Consumer, ...]:
        """The pods among the known consumers."""
        return tuple(consumer for consumer in self.known_consumers if consumer.resource == "pods")

    @property
    def known_attempt(self) -> Attempt | None:
        """The attempt in progress of a claim. None also for a claim that cannot be read."""
        try:
            return self.claim.attempt
        except ContractError:
            return None

    @property
    def metadata(self) -> Metadata:
        """The metadata. A field with a wrong type counts as absent."""
        return self._read.metadata

    @property
    def shown(self) -> str:
        """The object's name for people."""
        return self._read.shown

    @property
    def uid(self) -> str:
        """The uid. Empty when it has none."""
        return self._read.metadata.uid

    @cached_property
    def _read(self) -> ReadObject:
        match self.value.kind:
            case "ResourceClaim":
                return self.claim
            case "Pod":
                return self.pod
            case _:
                return ReadObject(self.value)
