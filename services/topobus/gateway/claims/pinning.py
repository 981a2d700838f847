"""The door to what gives claims CPUs for themselves, and its empty form for nodes whose CPUs are
kubelet's.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.values.outcome import Refusal

__all__ = ["NoPinning", "Pinning"]


class Pinning(Protocol):
    """Gives claims CPUs for themselves."""

    def promising(self, entry: ClaimEntry) -> AbstractAsyncContextManager[Refusal | None]:
        """Take the claim's CPUs from all other containers for the length of a block, in which the
        checkpoint is to get the claim; a Refusal says that nothing was taken.

        After the block the CPUs stay taken if the checkpoint has the claim as prepared.
        Errors: raises PeerUnavailable when the container runtime cannot be told, ContractError when
        it could not change a container.
        """
        ...

    def pins(self, entry: ClaimEntry) -> bool:
        """Say whether a claim brings CPUs for its containers alone: none
        of them may start without.
        """
        ...

    async def released(self) -> None:
        """Hear that the checkpoint has a claim less.

        Waits a moment for everybody to have its CPUs again. Raises nothing: what could
        not be changed is changed later.
        """
        ...


class NoPinning:
    """Promises nothing, and takes nothing from anybody."""

    def promising(self, entry: ClaimEntry) -> AbstractAsyncContextManager[Refusal | None]:
        """Let the claim be prepared."""
        return nullcontext()

    def pins(self, entry: ClaimEntry) -> bool:
        """Say no."""
        return False

    async def released(self) -> None:
        """Do nothing."""
