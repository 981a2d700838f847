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
    by_share: frozenset[tuple[str, str]] = frozenset()
    """Of what it holds, that of which others may hold a share as well."""
    shares: dict[str, dict[str, HeldShare]] = {}
    """How much of it, where that is known, by class and device."""
    group_cpus: dict[str, CpuSet] = {}
    """Which CPUs it has of groups of CPUs, by group."""


class Lacking(Struct, frozen=True, kw_only=True):
    """Devices in use that have no owner in the ledger.

    `owner` None: the holder is kubelet's own allocation of `resource`.
    """

    device_class: str
    devices: tuple[str, ...]
    where: str
    resource: str = ""
    owner: Owner | None = None
    whole: tuple[tuple[str, tuple[str, ...]], ...]
    """What is to be adopted, by class. For a claim it is all that it holds, because an owner has
    one entry in the ledger."""
    by_share: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Those of `whole` that have to be adopted by share."""
    shares: tuple[tuple[str, tuple[tuple[str, tuple[tuple[str, int], ...]], ...]], ...] = ()
    """How much of those of `by_share`: class, device, capacity and amount."""
    group_cpus: tuple[tuple[str, CpuSet], ...] = ()
    """Those of `whole` that are groups of CPUs, with the CPUs that its containers run on."""


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
            if claim is not None and (use.device_class, name) in claim.by_share and (holder is None or sharing):
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
                    owner=claim.owner if claim is not None else None,
                    whole=tuple(sorted(claim.held.items()))
                    if claim is not None
                    else ((use.device_class, tuple(sorted(free))),),
                    by_share=_by_class(claim.by_share) if claim is not None else (),
                    shares=_amounts(claim.shares) if claim is not None else (),
                    group_cpus=tuple(sorted(claim.group_cpus.items())) if claim is not None else (),
                )
            )
    return Comparison(lacking=tuple(lacking), disagreements=tuple(disagreements))


def is_listed(uses: Iterable[PodUse], namespace: str, claim: str) -> bool:
    """Return whether kubelet lists a container with a claim. It lists a claim only by its name."""
    return any((use.claim_namespace, use.claim) == (namespace, claim) for use in uses)


def _by_class(devices: Iterable[tuple[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names: dict[str, list[str]] = {}
    for device_class, name in sorted(devices):
        names.setdefault(device_class, []).append(name)
    return tuple((device_class, tuple(listed)) for device_class, listed in names.items())


def _amounts(
    shares: Mapping[str, Mapping[str, HeldShare]],
) -> tuple[tuple[str, tuple[tuple[str, tuple[tuple[str, int], ...]], ...]], ...]:
    return tuple(
        (device_class, tuple((name, tuple(sorted(share.amounts.items()))) for name, share in sorted(devices.items())))
        for device_class, devices in sorted(shares.items())
    )


def _is_the_same(use: PodUse, holder: Owner) -> bool:
    if use.claim:
        return holder.kind is OwnerKind.CLAIM and (holder.namespace, holder.name) == (use.claim_namespace, use.claim)
    return holder.kind is OwnerKind.DEVICE_PLUGIN and holder.name == use.resource
