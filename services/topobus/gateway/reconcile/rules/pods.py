"""Compares the devices that kubelet lists for its pods with the ledger.

The result is allocations that the ledger lacks and should adopt, and disagreements with both sides.
Devices of admin access are left out, because the ledger has no holder for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct

from topobus.formats.messages.messages import Disagreement
from topobus.gateway.containers.rules.exclusive import ExclusiveUse
from topobus.values.device_sharing import HeldShare
from topobus.values.idset import CpuSet
from topobus.values.request import Owner, OwnerKind

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
        """Describe the container and the claim or resource by which it has the device."""
        origin = f"claim {self.claim_namespace}/{self.claim}" if self.claim else self.resource
        return f"container {self.container} of pod {self.namespace}/{self.pod} ({origin})"


class PreparedHere(Struct, frozen=True, kw_only=True):
    """A claim that is prepared according to the checkpoint: its uid, what it holds, and its devices
    with admin access (as class and device).
    """

    owner: Owner
    held: dict[str, tuple[str, ...]]
    looked_at: frozenset[tuple[str, str]] = frozenset()
    by_share: dict[str, tuple[str, ...]] = {}
    """Of what it holds, that of which others may hold a share as well."""
    shares: dict[str, dict[str, HeldShare]] = {}
    """How much of it, where that is known, by class and device."""
    group_cpus: dict[str, CpuSet] = {}
    """Which CPUs it has of groups of CPUs, by group."""


class Lacking(Struct, frozen=True, kw_only=True):
    """Devices in use that have no owner in the ledger."""

    device_class: str
    devices: tuple[str, ...]
    where: str
    resource: str = ""
    """The resource by which kubelet allocated them. Empty: they are a claim's."""
    claim: PreparedHere | None = None
    """The claim whose they are. All that it holds is to be adopted, because an owner has one entry
    in the ledger. None: kubelet's own allocation of `resource` holds them."""


class Comparison(Struct, frozen=True, kw_only=True):
    """The differences between kubelet and the ledger, sorted by container."""

    lacking: tuple[Lacking, ...] = ()
    exclusive: tuple[ExclusiveUse, ...] = ()
    """What kubelet's own managers gave and the ledger lacks."""
    disagreements: tuple[Disagreement, ...] = ()


def compare(
    uses: Iterable[PodUse],
    holders: Mapping[str, Mapping[str, Owner]],
    prepared: Mapping[tuple[str, str], PreparedHere],
    sharers: Mapping[tuple[str, str], frozenset[Owner]] = MappingProxyType({}),
) -> Comparison:
    """Compare kubelet's list with the ledger.

    Shapes: holders — class to device to owner; prepared — namespace and name of a claim to what is
    prepared of it; sharers — class and device to those who hold a share of it.
    Errors: raises nothing; a claim that is not prepared here is a disagreement, because its devices
    could be given away.
    """
    lacking: list[Lacking] = []
    disagreements: list[Disagreement] = []
    for use in sorted(
        uses, key=lambda use: (use.namespace, use.pod, use.container, use.resource, use.claim, use.device_class)
    ):
        claim = prepared.get((use.claim_namespace, use.claim)) if use.claim else None
        free: list[str] = []
        for name in use.devices:
            if claim is not None and (use.device_class, name) in claim.looked_at:
                continue
            holder = holders.get(use.device_class, {}).get(name)
            sharing = sharers.get((use.device_class, name), frozenset())
            if (
                claim is not None
                and name in (claim.by_share.get(use.device_class) or ())
                and (holder is None or sharing)
            ):
                # Other owners of a share are no disagreement. The claim's own share is what the
                # ledger lacks.
                free += [] if claim.owner in sharing else [name]
                continue
            if holder is None and (claim is not None or not use.claim):
                free.append(name)
            elif holder is None or not _is_the_same(use, holder):
                side = (
                    f"{holder} holds it"
                    if holder is not None
                    else "no owner holds it, and the claim is not prepared here"
                )
                disagreements.append(
                    Disagreement(device_class=use.device_class, device=name, kubelet=use.where, ledger=side)
                )
        if free:
            lacking.append(
                Lacking(
                    device_class=use.device_class,
                    devices=tuple(sorted(free)),
                    where=use.where,
                    resource=use.resource,
                    claim=claim,
                )
            )
    return Comparison(lacking=tuple(lacking), disagreements=tuple(disagreements))


def is_listed(uses: Iterable[PodUse], namespace: str, claim: str) -> bool:
    """Return whether kubelet lists a container with a claim. It lists a claim only by its name."""
    return any((use.claim_namespace, use.claim) == (namespace, claim) for use in uses)


def _is_the_same(use: PodUse, holder: Owner) -> bool:
    if use.claim:
        return holder.kind is OwnerKind.CLAIM and (holder.namespace, holder.name) == (use.claim_namespace, use.claim)
    return holder.kind is OwnerKind.DEVICE_PLUGIN and holder.name == use.resource
