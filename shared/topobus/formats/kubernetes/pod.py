"""Pods: the part of a v1 Pod that alignment reads, and the request that follows from it.

Exclusive CPUs are given as kubelet's static CPU manager gives them: to a container whose cpu limit
is a whole number and equals its request (a request left out equals the limit). kubelet also
requires the whole pod to be Guaranteed, and so memory limits. Topobus requires less, so that a pod
can be tried before its memory is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec import Struct

from topobus.formats.kubernetes.alignment_request import read_annotations
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.resource import QuantityText
from topobus.formats.kubernetes.shape import did_you_mean, read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.names import is_dns_label, is_extended_resource_name
from topobus.values.quantity import Quantity
from topobus.values.request import ContainerKind, ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest
from topobus.values.resource_names import RESOURCE_PREFIX, is_of_device_service

__all__ = ["RESOURCE_PREFIX", "ClaimSource", "Container", "PodClaim", "PodSpec", "Resources", "pod_request"]

_DOMAIN = RESOURCE_PREFIX.rstrip("/")

_NATIVE = ("cpu", "memory", "ephemeral-storage")
# A kubelet serves at most this many devices of a resource in practice; more is a typing
# error that would only cost time.
_MAX_COUNT = 1 << 16


class ResourceClaimUse(Struct, frozen=True, kw_only=True):
    """A container's use of one of the pod's claims."""

    name: str
    request: str = ""


class Resources(Struct, frozen=True, kw_only=True):
    """ResourceRequirements."""

    limits: dict[str, QuantityText] = {}
    requests: dict[str, QuantityText] = {}
    claims: tuple[ResourceClaimUse, ...] = ()


class Container(Struct, frozen=True, kw_only=True, rename="camel"):
    """A container. `restartPolicy: Always` makes an init container a sidecar."""

    name: str
    resources: Resources = Resources()
    restart_policy: str = ""


class ClaimSource(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a pod's claim comes from, as pods were written for Kubernetes 1.26 to 1.30."""

    resource_claim_name: str = ""
    resource_claim_template_name: str = ""


class PodClaim(Struct, frozen=True, kw_only=True, rename="camel"):
    """A claim of the pod, by name or by template."""

    name: str
    resource_claim_name: str = ""
    resource_claim_template_name: str = ""
    source: ClaimSource | None = None
    """The older form of the two names above."""

    @property
    def claim_name(self) -> str:
        """The claim's name, in whichever form it was written. Empty for a claim made from a
        template.
        """
        return self.resource_claim_name or (self.source.resource_claim_name if self.source is not None else "")

    @property
    def template_name(self) -> str:
        """The template's name, in whichever form it was written. Empty for a claim without a
        template.
        """
        return self.resource_claim_template_name or (
            self.source.resource_claim_template_name if self.source is not None else ""
        )


class PodSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """PodSpec, as far as we use it."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()
    node_name: str = ""
    node_selector: dict[str, str] = {}


def pod_request(pod: ApiObject, *, uid: str) -> PodRequest:
    """Turn a Pod into its request to a node.

    Shapes: containers — init containers first, then the others, as kubelet admits them. A resource
            of another domain is requested by its full name, because only the node knows whether a
            device service offers it. Resources that the pod's claim for extended resources serves
            are left out.
    Errors: raises ContractError that names the container, the resource, what was found and what was
            wanted.
    """
    where = name_of(pod)
    if pod.kind != "Pod":
        raise ContractError(f"{where}: wanted a Pod, got a {pod.kind}")
    spec = read_as(pod.spec, PodSpec, where=f"{where}: spec")
    if not spec.containers:
        raise ContractError(f"{where}: spec.containers is empty: wanted at least one container")
    metadata = metadata_of(pod)
    wishes = read_annotations(metadata.annotations, where)
    claimed = _claimed(pod)
    containers = (
        *(
            _container(
                init_container,
                _init_kind(init_container, where),
                f"{where}: init container {init_container.name}",
                claimed,
            )
            for init_container in spec.init_containers
        ),
        *(
            _container(container, ContainerKind.APP, f"{where}: container {container.name}", claimed)
            for container in spec.containers
        ),
    )
    names = [container.name for container in containers]
    for name in names:
        if names.count(name) > 1:
            raise ContractError(f"{where}: two containers are named {name}: wanted a name of its own for each")
    return PodRequest(
        owner=Owner(kind=OwnerKind.POD, namespace=metadata.namespace or "default", name=metadata.name, uid=uid),
        containers=containers,
        policy=wishes.policy,
        scope=wishes.scope,
        locality=wishes.locality,
    )


def _init_kind(init_container: Container, where: str) -> ContainerKind:
    if init_container.restart_policy not in ("", "Always"):
        raise ContractError(
            f"{where}: init container {init_container.name}: restartPolicy is "
            f"{init_container.restart_policy!r}: wanted Always or none"
        )
    return ContainerKind.SIDECAR if init_container.restart_policy else ContainerKind.INIT


def _claimed(pod: ApiObject) -> frozenset[tuple[str, str]]:
    """List the containers and resources that the pod's special claim serves (KEP-5004), from the
    pod's status.
    """
    status = pod.status.get("extendedResourceClaimStatus")
    mappings = status.get("requestMappings") if isinstance(status, dict) else None
    entries = [mapping for mapping in mappings if isinstance(mapping, dict)] if isinstance(mappings, list) else []
    return frozenset((str(entry.get("containerName")), str(entry.get("resourceName"))) for entry in entries)


def _container(
    container: Container, kind: ContainerKind, where: str, claimed: frozenset[tuple[str, str]]
) -> ContainerRequest:
    limits = {name: _quantity(value, f"{where}: limits.{name}") for name, value in container.resources.limits.items()}
    requests = {
        name: _quantity(value, f"{where}: requests.{name}") for name, value in container.resources.requests.items()
    }
    for part, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            if "/" not in name and name not in _NATIVE and not name.startswith("hugepages-"):
                raise ContractError(
                    f"{where}: {part}.{name} is not a resource of Kubernetes{did_you_mean(name, _NATIVE)}"
                )
            domain = name.partition("/")[0]
            if "/" in name and domain != _DOMAIN and did_you_mean(domain.strip(), [_DOMAIN]):
                raise ContractError(
                    f"{where}: {part}.{name}: there are no resources of "
                    f"{domain!r}{did_you_mean(domain.strip(), [_DOMAIN])}"
                )
            if amount.nano < 0:
                raise ContractError(f"{where}: {part}.{name} is {amount}: wanted 0 or more")
    for name, asked in requests.items():
        if name in limits and asked > limits[name]:
            raise ContractError(f"{where}: requests.{name} is {asked}, more than its limit {limits[name]}")
    memory = requests.get("memory", limits.get("memory", Quantity(0)))
    return ContainerRequest(
        name=container.name,
        kind=kind,
        cpus=_exclusive_cpus(limits, requests),
        memory_bytes=memory.units,
        is_memory_fixed="memory" in limits and requests.get("memory", limits["memory"]) == limits["memory"],
        hugepages={
            name: limits[name].units for name in sorted(limits) if name.startswith("hugepages-") and limits[name].units
        },
        devices=(
            *_devices(limits, requests, where),
            *_foreign_devices(
                limits, requests, where, {resource for name, resource in claimed if name == container.name}
            ),
        ),
    )


def _exclusive_cpus(limits: dict[str, Quantity], requests: dict[str, Quantity]) -> int:
    """Count CPUs as kubelet's static policy does (pkg/kubelet/cm/cpumanager/policy_static.go,
    guaranteedCPUs), container by container.
    """
    limit = limits.get("cpu", Quantity(0))
    asked = requests.get("cpu", limit)
    has_equal_memory = "memory" not in requests or requests["memory"] == limits.get("memory")
    return limit.units if limit.is_whole and asked == limit and has_equal_memory else 0


def _devices(limits: dict[str, Quantity], requests: dict[str, Quantity], where: str) -> tuple[DeviceRequest, ...]:
    device_requests: list[DeviceRequest] = []
    for name in sorted(limits.keys() | requests.keys()):
        if not is_of_device_service(name):
            continue
        device_class = name.removeprefix(RESOURCE_PREFIX)
        if not is_dns_label(device_class):
            raise ContractError(
                f"{where}: {name}: {device_class!r} is no device class: wanted lower-case letters, digits and "
                "'-', such as gpu"
            )
        amount = limits.get(name)
        if amount is None or requests.get(name, amount) != amount:
            raise ContractError(
                f"{where}: requests.{name} is {requests[name]} and limits.{name} is {amount or 'missing'}: "
                "devices need a limit, and a request equal to it"
            )
        if not amount.is_whole or not 1 <= amount.units <= _MAX_COUNT:
            next_step = "leave the line out to ask for none" if amount.nano == 0 else ""
            raise ContractError(
                f"{where}: limits.{name} is {amount}: wanted a whole number from 1 to {_MAX_COUNT}", next_step=next_step
            )
        device_requests.append(DeviceRequest(device_class=device_class, count=amount.units))
    return tuple(device_requests)


def _foreign_devices(
    limits: dict[str, Quantity], requests: dict[str, Quantity], where: str, claimed: Collection[str]
) -> Iterator[DeviceRequest]:
    """Read what is requested of other domains, and shapes. An amount of 0 requests nothing, as in
    Kubernetes.
    """
    for name in sorted(limits.keys() | requests.keys()):
        if "/" not in name or is_of_device_service(name) or name in claimed:
            continue
        amount = limits.get(name, requests.get(name, Quantity(0)))
        if is_extended_resource_name(name) and (name not in limits or requests.get(name, amount) != amount):
            raise ContractError(
                f"{where}: requests.{name} is {requests[name]} and limits.{name} is {limits.get(name, 'missing')}: "
                "extended resources need a limit, and a request equal to it"
            )
        if not amount.is_whole:
            raise ContractError(f"{where}: {name} is {amount}: wanted a whole number")
        if amount.units:
            yield DeviceRequest(device_class=name, count=amount.units)


def _quantity(value: QuantityText, where: str) -> Quantity:
    try:
        return Quantity.parse(value)
    except ValueError as err:
        raise ContractError(f"{where} is {err}") from err
