"""Claims of a simulation: allocated by the controller's own engine, held in the simulation's ledger
like a pod's devices.

There is one answer for each pod with claims, and one for each claim that no pod uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from topobus.cli.engine_process import ask_dry_run
from topobus.cli.objects.manifests import request_of
from topobus.cli.render.answers import with_parts
from topobus.cli.simulation.node import Simulation
from topobus.engine.alignment.planning.node_view import cpu_of_name
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.objects import metadata_of, object_parts
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, node_of_pool
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import ContainerRequest, Owner, OwnerKind, PodRequest
from topobus.values.resource_names import is_resource_name

__all__ = ["ClaimAnswer", "ClaimSimulation", "claim_lines"]


class ClaimAnswer(Struct, frozen=True, kw_only=True):
    """The engine's answer for a pod's claims, or for one claim."""

    name: str
    condition: str
    node: str = ""
    allocations: dict[str, AllocationResult] = {}
    parts: dict[str, tuple[str, ...]] = {}
    """Each shape among the allocated devices to its parts: of CPUs the group that they will be of."""
    reasons: tuple[Reason, ...] = ()
    stored: tuple[ApiObject, ...] = ()
    """The claims as they would be stored, allocated."""
    request: PodRequest | None = None
    """What the pod itself requests besides its claims, with the claims that it wishes to be aligned
    with."""

    @property
    def is_allocated(self) -> bool:
        """Say whether all of it is allocated."""
        return self.condition == "Allocated"


class ClaimSimulation:
    """Allocates the claims of a folder's pods, and those that no pod names."""

    def __init__(self, simulation: Simulation, objects: Sequence[ApiObject]) -> None:
        self._simulation = simulation
        self._pods = [api_object for api_object in objects if api_object.kind == "Pod"]
        self.left_out = tuple(
            api_object for api_object in objects if api_object.kind != "Pod" and is_classic(api_object)
        )
        """Objects of classic DRA, which only running drivers can answer."""
        self._objects = {
            tuple(object_parts(api_object).values()): api_object
            for api_object in objects
            if api_object.kind != "Pod" and not is_classic(api_object)
        }

    def place(self, pod: ApiObject) -> tuple[Placement | Refusal, ClaimAnswer | None]:
        """Plan a pod with its claims, and hold what all of them get.

        If any part does not fit, nothing is held.
        """
        request = request_of(pod)
        if not self._has_claims(pod, request):
            return self._simulation.place(request), None
        identified = msgspec.structs.replace(pod, metadata={**pod.metadata, "uid": request.owner.uid})
        answer = self._ask(identified)
        if answer is None:
            return self._simulation.place(request), None  # all its claims are allocated already
        if not answer.is_allocated:
            refusal = Refusal(reasons=answer.reasons)
            self._simulation.refuse(request, refusal)
            return refusal, answer
        before = self._simulation.ledger
        self._hold(answer)
        outcome = self._simulation.place(answer.request or msgspec.structs.replace(request, containers=_idle(request)))
        if isinstance(outcome, Refusal):
            self._simulation.undo(before)
        else:
            self._keep(answer)
        return outcome, answer

    def rest(self) -> Iterator[ClaimAnswer]:
        """Allocate the claims that no pod names, as the controller does at once."""
        named = {
            (
                metadata_of(pod).namespace or "default",
                str(use.get("resourceClaimName") or (use.get("source") or {}).get("resourceClaimName")),
            )
            for pod in self._pods
            for use in pod.spec.get("resourceClaims") or ()
        }
        for (kind, namespace, name), claim in tuple(self._objects.items()):
            if kind == "resourceclaim" and (namespace, name) not in named and not claim.status.get("allocation"):
                answer = self._ask(claim)
                if answer is not None:
                    if answer.is_allocated:
                        self._hold(answer)
                        self._keep(answer)
                    yield answer

    def _has_claims(self, pod: ApiObject, request: PodRequest) -> bool:
        """Say whether the pod has claims, or asks for a resource that a class may serve by one."""
        offered = {inventory.resource for inventory in self._simulation.inventories}
        asked = {
            device.device_class
            for container in self._simulation.named(request).containers
            for device in container.devices
        }
        return bool(pod.spec.get("resourceClaims")) or any(
            is_resource_name(resource) and resource not in offered for resource in asked
        )

    def _ask(self, wanted: ApiObject) -> ClaimAnswer | None:
        situation: dict[str, Any] = {
            "wanted": [wanted],
            "objects": [api_object for api_object in self._objects.values() if api_object is not wanted],
            "machines": [self._simulation.machine],
            "inventories": self._simulation.inventories,
            "ledgers": [self._simulation.ledger],
            "alignments": [self._simulation.alignment],
        }
        answers = asyncio.run(ask_dry_run(situation))["answers"]
        return msgspec.convert(answers[0], ClaimAnswer) if answers else None

    def _hold(self, answer: ClaimAnswer) -> None:
        for claim in answer.stored:
            metadata = metadata_of(claim)
            owner = Owner(
                kind=OwnerKind.CLAIM, namespace=metadata.namespace or "default", name=metadata.name, uid=metadata.uid
            )
            allocation = msgspec.convert(claim.status["allocation"], AllocationResult)
            self._simulation.hold(owner, *_held_by(allocation, self._simulation.machine.node, answer.parts))

    def _keep(self, answer: ClaimAnswer) -> None:
        self._objects |= {tuple(object_parts(claim).values()): claim for claim in answer.stored}


def claim_lines(answer: ClaimAnswer) -> list[str]:
    """Return what each claim gets.

    >>> claim_lines(ClaimAnswer(name="ResourceClaim default/a", condition="DoesNotFit"))
    []
    """
    return [
        f"claim {claim}: "
        + ", ".join(
            with_parts(granted.device, answer.parts)
            + f" ({class_of_device(granted.driver, granted.device) or granted.driver})"
            for granted in result.devices.results
        )
        for claim, result in answer.allocations.items()
    ]


def _idle(request: PodRequest) -> tuple[ContainerRequest, ...]:
    """The containers of a pod that requests nothing besides its claims."""
    return tuple(ContainerRequest(name=container.name, kind=container.kind) for container in request.containers)


def _held_by(
    allocation: AllocationResult, node: str, parts: Mapping[str, tuple[str, ...]]
) -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    """Return the devices of a node that an allocation holds, of shapes the parts, and those of which
    it holds a share, both by class.
    """
    held: dict[str, tuple[str, ...]] = {}
    shared: dict[str, tuple[str, ...]] = {}
    for granted_device in allocation.devices.results:
        device_class = class_of_device(granted_device.driver, granted_device.device)
        if granted_device.admin_access or device_class is None or node_of_pool(granted_device.pool) != node:
            continue
        for name in parts.get(granted_device.device, (granted_device.device,)):
            part_class = class_of_device(DRIVER, name) or ""
            if part_class == CPU_CLASS and cpu_of_name(name) is None:
                continue  # which CPUs of a group a claim has is decided when it is prepared
            held[part_class] = (*held.get(part_class, ()), name)
        if granted_device.share_id is not None and device_class in held:
            shared[device_class] = (*shared.get(device_class, ()), granted_device.device)
    return held, shared
