"""Compares the devices that kubelet lists for its pods with the ledger.

Flows in: devices by container as kubelet lists them, who holds what, the claims prepared here. Flows out: allocations that the ledger lacks and should adopt, and
disagreements with both sides. Devices of admin access are left out: the ledger has no holder for them, so there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.contracts.messages import Disagreement
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.core.exclusive import ExclusiveUse

__all__ = ["Comparison", "Lacking", "PodUse", "PreparedHere", "compare", "is_listed"]


class PodUse(Struct, frozen=True, kw_only=True):
    """Devices of one class that one container has through one resource or one claim."""

    namespace: str
    pod: str
    container: str
    resource: str = ""
    claim_namespace: str = ""
    claim: str = ""
    device_class: str
    devices: tuple[str, ...]

    @property
    def where(self) -> str:
        """Name the container and the claim or resource by which it has the device."""
        origin = f"claim {self.claim_namespace}/{self.claim}" if self.claim else self.resource
        return f"container {self.container} of pod {self.namespace}/{self.pod} ({origin})"


class PreparedHere(Struct, frozen=True, kw_only=True):
    """A claim that the checkpoint calls prepared: its uid, what it holds, and what it only looks at (as class and device)."""

    owner: Owner
    held: dict[str, tuple[str, ...]]
    looked_at: frozenset[tuple[str, str]] = frozenset()


class Lacking(Struct, frozen=True, kw_only=True):
    """Devices in use that the ledger gives to nobody. `owner` None: the holder is kubelet's own allocation of `resource`."""

    device_class: str
    devices: tuple[str, ...]
    where: str
    resource: str = ""
    owner: Owner | None = None
    whole: tuple[tuple[str, tuple[str, ...]], ...]
    """What is to be adopted, by class: of a claim all that it holds, since the ledger's entry of an owner is one whole."""


class Comparison(Struct, frozen=True, kw_only=True):
    """What was found, sorted by container."""

    lacking: tuple[Lacking, ...] = ()
    exclusive: tuple[ExclusiveUse, ...] = ()
    """What kubelet's own managers gave and the ledger does not say so."""
    disagreements: tuple[Disagreement, ...] = ()


def compare(
    uses: Iterable[PodUse], holders: Mapping[str, Mapping[str, Owner]], prepared: Mapping[tuple[str, str], PreparedHere]
) -> Comparison:
    """Compare kubelet's word with the ledger's.

    Shapes: holders — class to device to owner; prepared — namespace and name of a claim to what is prepared of it.
    Errors: raises nothing; a claim that is not prepared here is a disagreement, for its devices could be given away.
    """
    lacking: list[Lacking] = []
    disagreements: list[Disagreement] = []
    for use in sorted(uses, key=lambda use: (use.namespace, use.pod, use.container, use.resource, use.claim, use.device_class)):
        claim = prepared.get((use.claim_namespace, use.claim)) if use.claim else None
        free: list[str] = []
        for name in use.devices:
            if claim is not None and (use.device_class, name) in claim.looked_at:
                continue
            holder = holders.get(use.device_class, {}).get(name)
            if holder is None and (claim is not None or not use.claim):
                free.append(name)
            elif holder is None or not _is_the_same(use, holder):
                side = f"{holder} holds it" if holder is not None else "nobody holds it, and the claim is not prepared here"
                disagreements.append(Disagreement(device_class=use.device_class, device=name, kubelet=use.where, ledger=side))
        if free:
            lacking.append(
                Lacking(
                    device_class=use.device_class,
                    devices=tuple(sorted(free)),
                    where=use.where,
                    resource=use.resource,
                    owner=claim.owner if claim is not None else None,
                    whole=tuple(sorted(claim.held.items())) if claim is not None else ((use.device_class, tuple(sorted(free))),),
                )
            )
    return Comparison(lacking=tuple(lacking), disagreements=tuple(disagreements))


def is_listed(uses: Iterable[PodUse], namespace: str, claim: str) -> bool:
    """Say whether kubelet lists a container with a claim; it tells a claim by its name alone."""
    return any((use.claim_namespace, use.claim) == (namespace, claim) for use in uses)


def _is_the_same(use: PodUse, holder: Owner) -> bool:
    if use.claim:
        return holder.kind is OwnerKind.CLAIM and (holder.namespace, holder.name) == (use.claim_namespace, use.claim)
    return holder.kind is OwnerKind.DEVICE_PLUGIN and holder.name == use.resource
