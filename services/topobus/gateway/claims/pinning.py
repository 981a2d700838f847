"""The interface for exclusive CPUs of claims, and its empty form where kubelet manages CPUs."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.values.outcome import Refusal

__all__ = ["NoPinning", "Pinning"]


class Pinning(Protocol):
    """Gives claims exclusive CPUs."""

    def promising(self, entry: ClaimEntry) -> AbstractAsyncContextManager[Refusal | None]:
        """Take the claim's CPUs from all other containers for the length of a block, in which the
        checkpoint has to get the claim. A Refusal means that nothing was taken.

        After the block the CPUs stay taken if the checkpoint has the claim as prepared.
        Errors: raises PeerUnavailable when the container runtime cannot be reached, ContractError
        when it could not change a container.
        """
        ...

    def pins(self, entry: ClaimEntry) -> bool:
        """Return whether a claim's containers may start only with their exclusive CPUs."""
        ...

    async def released(self) -> None:
        """Update the other containers after the checkpoint has lost a claim.

        It waits a moment for all containers to get their CPUs back. Raises nothing: what could not
        be changed now is changed later.
        """
        ...


class NoPinning:
    """Promises nothing and takes no CPUs."""

    def promising(self, entry: ClaimEntry) -> AbstractAsyncContextManager[Refusal | None]:
        """Allow the claim to be prepared."""
        return nullcontext()

    def pins(self, entry: ClaimEntry) -> bool:
        """Return False."""
        return False

    async def released(self) -> None:
        """Do nothing."""
