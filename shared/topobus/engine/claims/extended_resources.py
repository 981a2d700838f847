"""Extended resources served by claims: a container asks for `example.com/gpu: 2`, a DeviceClass
names that resource, the pod gets one claim.

A class is found by `spec.extendedResourceName` (of several the newest, then the first by name), or
by the implicit name `deviceclass.resource.kubernetes.io/CLASS`. Init containers end before the
others start, so they use the same devices.
Source: KEP-5004; k8s.io/kubernetes
pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go, 1.36.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from topobus.formats.kubernetes.objects import admit, metadata_of, name_of, pod_as_owner
from topobus.formats.kubernetes.pod import Container, PodSpec
from topobus.formats.kubernetes.resource import DeviceClassSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.quantity import Quantity
from topobus.values.resource_names import CLASS_RESOURCE_PREFIX, is_of_device_service

__all__ = [
    "EXTENDED_CLAIM",
    "ClassName",
    "ExtendedClaim",
    "Mapped",
    "claim_of_pod",
    "class_for",
    "extended_claim",
    "extended_claim_name",
    "served_resources",
    "with_extended_status",
]

EXTENDED_CLAIM = "resource.kubernetes.io/extended-resource-claim"
"""On a claim: it was made for a pod's extended resources."""


class ClassName(NamedTuple):
    """The fields of a class that matter here."""

    name: str
    resource: str
    """Its `extendedResourceName`; empty when it has none."""
    created: str
    """RFC 3339, UTC."""


class Mapped(NamedTuple):
    """The request of the claim that serves a container's resource."""

    container: str
    resource: str
    request: str


class ExtendedClaim(NamedTuple):
    """The claim for a pod's extended resources."""

    spec: dict[str, Any]
    mappings: tuple[Mapped, ...]


class _Request(NamedTuple):
    name: str
    device_class: str
    devices: int


def class_for(resource: str, classes: Sequence[ClassName]) -> str | None:
    """Name the class that serves a resource.

    >>> old, new = ClassName("a", "example.com/gpu", "2026-01-01T00:00:00Z"), ClassName("b", "example.com/gpu", "2026-02-01T00:00:00Z")
    >>> class_for("example.com/gpu", [old, new]), class_for("deviceclass.resource.kubernetes.io/a", [old]), class_for("example.com/nic", [old])
    ('b', 'a', None)
    """  # noqa: E501
    by_name = {device_class.name for device_class in classes}
    named = sorted(
        (device_class for device_class in classes if device_class.resource == resource),
        key=lambda device_class: device_class.name,
    )
    if named:
        return max(named, key=lambda class_name: class_name.created).name
    implicit = resource.removeprefix(CLASS_RESOURCE_PREFIX)
    return implicit if resource.startswith(CLASS_RESOURCE_PREFIX) and implicit in by_name else None


def served_resources(classes: Mapping[str, DeviceClassSpec]) -> frozenset[str]:
    """Name the extended resources that classes serve: by the name that a class gives itself, and by
    the implicit name of every class.
    """
    named = {device_class.extended_resource_name or "" for device_class in classes.values()} - {""}
    return frozenset(named | {f"{CLASS_RESOURCE_PREFIX}{name}" for name in classes})


def extended_claim(pod: ApiObject, classes: Sequence[ClassName]) -> ExtendedClaim | None:
    """Compute the special claim of a pod. None when no class serves any of its resources.

    Order: requests by name, as upstream has them; resources by name, long-lived containers first in
            the mappings.
    Errors: raises ContractError for a pod that cannot be read, or that asks for a part of a device.
    """
    spec = read_as(pod.spec, PodSpec, where=f"{name_of(pod)}: spec")
    containers = (*spec.init_containers, *spec.containers)
    asked = [_asked(container, name_of(pod)) for container in containers]
    resources = sorted({resource for amounts in asked for resource in amounts})
    served = {resource: served_by for resource in resources if (served_by := class_for(resource, classes)) is not None}
    if not served:
        return None
    is_short = [
        index < len(spec.init_containers) and container.restart_policy != "Always"
        for index, container in enumerate(containers)
    ]
    requests: list[_Request] = []
    mappings: list[Mapped] = []
    for resource, device_class in served.items():
        more, mapped = _serve(resource, device_class, containers, asked, is_short)
        requests.extend(more)
        mappings.extend(mapped)
    if not requests:
        return None
    entries = [
        {
            "name": request.name,
            "exactly": {
                "deviceClassName": request.device_class,
                "allocationMode": "ExactCount",
                "count": request.devices,
            },
        }
        for request in sorted(requests)
    ]
    return ExtendedClaim({"devices": {"requests": entries}}, tuple(mappings))


def _serve(
    resource: str,
    device_class: str,
    containers: Sequence[Container],
    asked: Sequence[Mapping[str, int]],
    is_short: Sequence[bool],
) -> tuple[list[_Request], list[Mapped]]:
    """Make the requests for one resource: one for each long-lived container, and one for the init
    container that wants most beyond what those have.
    """
    lasting: dict[int, _Request] = {}
    mappings: list[Mapped] = []
    for index, container in enumerate(containers):
        count = asked[index].get(resource, 0)
        if count and not is_short[index]:
            lasting[index] = _Request(_request_name(index, asked[index], resource), device_class, count)
            mappings.append(Mapped(container.name, resource, lasting[index].name))
    largest: _Request | None = None
    extra: dict[str, str] = {}
    for index, container in enumerate(containers):
        count = asked[index].get(resource, 0)
        if not count or not is_short[index]:
            continue
        # Devices that containers hold which start later are free while this one runs.
        for later in sorted(place for place in lasting if place >= index):
            if count > 0:
                mappings.append(Mapped(container.name, resource, lasting[later].name))
                count -= lasting[later].devices
        if count > 0:
            request = _Request(_request_name(index, asked[index], resource), device_class, count)
            extra[container.name] = request.name
            largest = request if largest is None or request.devices > largest.devices else largest
    if largest is not None:
        mappings.extend(Mapped(name, resource, largest.name) for name in extra)
    return [*([largest] if largest is not None else []), *lasting.values()], mappings


def _request_name(index: int, asked: Mapping[str, int], resource: str) -> str:
    """Name a request after the container's place and the resource's place among all that the
    container asks for.
    """
    return f"container-{index}-request-{sorted(asked).index(resource)}"


def _asked(container: Container, where: str) -> dict[str, int]:
    """List the amounts that a container asks for, by name. A device amount must be whole, and any
    other resource counts 0.
    """
    # Kubernetes uses a limit as the request where there is none.
    amounts = {**container.resources.limits, **container.resources.requests}
    units: dict[str, int] = {}
    for name, value in amounts.items():
        is_device = "/" in name and not is_of_device_service(name)
        try:
            amount = Quantity.parse(value)
        except ValueError as err:
            raise ContractError(f"{where}: container {container.name}: {name} is {err}") from err
        if is_device and (not amount.is_whole or amount.nano < 0):
            raise ContractError(
                f"{where}: container {container.name}: {name} is {amount}, wanted a whole number of devices"
            )
        units[name] = amount.units if is_device else 0
    return units


def extended_claim_name(pod: ApiObject) -> str:
    """Name the special claim in a pod's status. Empty before there is one."""
    status = pod.status.get("extendedResourceClaimStatus")
    name = status.get("resourceClaimName") if isinstance(status, dict) else None
    return name if isinstance(name, str) else ""


def claim_of_pod(pod: ApiObject, wanted: ExtendedClaim, *, now: str) -> ApiObject:
    """Make the special claim, owned by the pod.

    Name and uid follow from the pod's, so two replicas make the same claim once.
    """
    metadata = metadata_of(pod)
    digest = hashlib.sha256(f"{metadata.uid}/extended".encode()).hexdigest()[:8]
    made = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={
            "name": f"{metadata.name[:35].rstrip('-.')}-extended-resources-{digest}",
            "namespace": metadata.namespace or "default",
            "annotations": {EXTENDED_CLAIM: "true"},
            "ownerReferences": [pod_as_owner(metadata)],
        },
        spec=wanted.spec,
    )
    return admit(made, uid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{metadata.uid}/extended")), now=now)


def with_extended_status(pod: ApiObject, claim: str, wanted: ExtendedClaim) -> ApiObject:
    """Write into the pod's status which claim serves its extended resources, and how."""
    mappings = [
        {"containerName": mapping.container, "resourceName": mapping.resource, "requestName": mapping.request}
        for mapping in wanted.mappings
    ]
    status = {"resourceClaimName": claim, "requestMappings": mappings}
    return msgspec.structs.replace(pod, status={**pod.status, "extendedResourceClaimStatus": status})
