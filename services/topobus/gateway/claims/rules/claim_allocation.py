"""Reads a claim's allocation on one node.

The claim is a ResourceClaim in Kubernetes' wire shape (v1, v1beta1 and v1beta2 agree in what is
read here). The result is our devices on this node, or a Refusal that names the first field that is
wrong. An unreadable claim is always refused, because a guess could prepare another
claim's device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from topobus.engine.shapes.shapes import SHAPE_CLASS
from topobus.formats.first_read import ready
from topobus.formats.kubernetes.opaque_parameters import is_for_class
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedConfiguration, GrantedDevice
from topobus.formats.kubernetes.slices import SICK_TAINT
from topobus.formats.kubernetes.tolerations import tolerates
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.rules.claim_pods import pod_claim_name, pods_of, users_of
from topobus.values.cpu_groups import GROUP_CAPACITY
from topobus.values.device_sharing import HeldShare
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, node_of_pool, pool_of_class
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid, is_dns_label
from topobus.values.outcome import Refusal, refuse
from topobus.values.quantity import Quantity
from topobus.values.request import Owner

__all__ = [
    "AllocatedDevice",
    "ClaimAllocation",
    "allocation_of",
    "is_allocated_here",
    "is_wanted_here",
    "names_by_class",
    "shares_by_class",
]

_PLACE = "status.allocation"
_LARGEST_AMOUNT = 2**63 - 1


class AllocatedDevice(Struct, frozen=True, kw_only=True):
    """One device of the allocation."""

    request: str
    """The request's name, without the part of an alternative that was chosen."""
    pool: str
    device: str
    is_shared: bool = False
    """Admin access: the claim accesses the device without holding it."""
    alternative: str = ""
    """The chosen alternative of the request. Empty: it has none."""
    share_id: str = ""
    """The claim's share of a device with consumable capacity. Empty: the whole device."""
    amounts: dict[str, int] = {}
    """How much of the device the share is, by capacity."""
    shape: str = ""
    """The device of the allocation that this one is a part of. Empty: it was allocated by itself."""
    cpus: int = 0
    """Of a group of CPUs that is a part of a shape, how many the shape has."""

    @property
    def device_class(self) -> str:
        """Return the class, which the device's name contains."""
        return class_of_device(DRIVER, self.device) or ""

    @property
    def is_share(self) -> bool:
        """Return whether the claim has only a share of the device."""
        return bool(self.share_id or self.cpus)

    @property
    def allocated(self) -> str:
        """Return the name by which the allocation has it."""
        return self.shape or self.device


class ClaimAllocation(Struct, frozen=True, kw_only=True):
    """What must be prepared of a claim, or the part of it that one device service prepares."""

    devices: tuple[AllocatedDevice, ...]
    held: dict[str, tuple[str, ...]] = {}
    """Devices that the claim holds on this node, by class, of all classes also in a part: a claim
    is one entry in the ledger."""
    by_share: dict[str, tuple[str, ...]] = {}
    """Those of `held` of which the claim has a share. Other claims may have a share as well."""
    shares: dict[str, dict[str, HeldShare]] = {}
    """How much the claim has of those of `by_share`, where its allocation contains it: class to
    device to amounts."""
    config: dict[str, tuple[dict[str, Any], ...]] = {}
    """Device to its opaque parameters: of the class before those of the claim, only those for
    the request that the device was given for."""

    group_cpus: dict[str, int] = {}
    """How many CPUs the claim has of groups of CPUs, by the group's device, also in a part."""
    cpus: dict[str, CpuSet] = {}
    """Which these are, once the ledger has chosen them."""
    generation: int = 0
    """The claim's `metadata.generation`. 0: its API server counts none."""
    pod_claim_name: str = ""
    """The name by which pods know the claim, if it was made from a template. Empty: the claim's
    own."""
    pods: tuple[str, ...] = ()
    """Uids of the pods that the claim is reserved for, sorted."""
    users: tuple[Owner, ...] = ()
    """The same pods with their names."""
    tolerated: tuple[str, ...] = ()
    """Devices that the claim takes even when they are unhealthy: its allocation tolerates the
    taint of an unhealthy device."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the devices, each once, sorted."""
        return tuple(sorted({device.device_class for device in self.devices}))

    def part(self, device_class: str) -> ClaimAllocation:
        """Return what the service of one class must prepare."""
        devices = tuple(device for device in self.devices if device.device_class == device_class)
        names = {device.device for device in devices}
        return msgspec.structs.replace(
            self,
            devices=devices,
            config={name: parameters for name, parameters in self.config.items() if name in names},
            tolerated=tuple(name for name in self.tolerated if name in names),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The devices, each once, sorted."""
        return tuple(sorted({device.device for device in self.devices}))

    @property
    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return each request's devices, sorted, with requests in the allocation's order."""
        by_class: dict[str, set[str]] = {}
        for allocated in self.devices:
            by_class.setdefault(allocated.request, set()).add(allocated.device)
        return {request: tuple(sorted(names)) for request, names in by_class.items()}


class _Grant(Struct, frozen=True, kw_only=True):
    """One device of the allocation, of any driver."""

    device_class: str
    """Empty: another vendor's driver."""
    device: AllocatedDevice
    cpus: int
    """Of a group of CPUs, how many the claim has. 0: it is no share of one."""
    tolerates_sickness: bool


def allocation_of(
    claim: ApiObject | None,
    *,
    namespace: str,
    name: str,
    uid: ClaimUid,
    node: str,
    parts: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    cpus: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> ClaimAllocation | Refusal:
    """Read what must be prepared of a claim on this node: of a shape its parts.

    Shapes: parts — shape of this node to its devices; cpus — shape to how many CPUs it has of which of them.
    Errors: raises nothing; Refusal codes claim-missing, claim-replaced, claim-unallocated,
    claim-malformed, claim-elsewhere, shape-unknown.
    """
    where = f"claim {namespace}/{name}"
    if claim is None:
        return refuse("claim-missing", f"{where} does not exist")
    stored_uid = claim.metadata.get("uid", "")
    if stored_uid != uid:
        return refuse(
            "claim-replaced",
            f"{where} has uid {stored_uid or 'none'}, kubelet asked for {uid}",
            wanted=uid,
            got=str(stored_uid),
        )
    if not claim.status.get("allocation"):
        return refuse("claim-unallocated", f"{where} is not allocated")
    try:
        allocated = _allocated(claim)
        grants = [_grant(index, result) for index, result in enumerate(allocated.results)]
        config = _config(allocated.config)
    except ContractError as err:
        return refuse("claim-malformed", f"{where}: {err}")
    allocated_here = [grant for grant in grants if grant.device_class]
    if not allocated_here:
        return refuse("claim-elsewhere", f"{where} has no device of driver {DRIVER}")
    own = _own_grants(allocated_here, where, node, parts, cpus)
    if isinstance(own, Refusal):
        return own
    held = [grant for grant in own if not grant.device.is_shared]
    whole = {(grant.device_class, grant.device.device) for grant in held if not grant.device.is_share}
    shares = [grant.device for grant in held if (grant.device_class, grant.device.device) not in whole]
    untolerated = {grant.device.device for grant in own if not grant.tolerates_sickness}
    return ClaimAllocation(
        devices=tuple(grant.device for grant in own),
        held=names_by_class(grant.device for grant in held),
        by_share=names_by_class(shares),
        shares=shares_by_class(shares),
        config=_config_by_device((grant.device for grant in own), config),
        group_cpus=_cpus_by_group(held),
        generation=_generation(claim),
        pod_claim_name=pod_claim_name(claim),
        pods=pods_of(claim),
        users=users_of(claim, namespace),
        tolerated=tuple(sorted({grant.device.device for grant in own} - untolerated)),
    )


def _own_grants(
    allocated: Iterable[_Grant],
    where: str,
    node: str,
    parts: Mapping[str, tuple[str, ...]],
    cpus: Mapping[str, Mapping[str, int]],
) -> list[_Grant] | Refusal:
    """Check that our devices are of this node, and replace a shape by its parts."""
    own: list[_Grant] = []
    for grant in allocated:
        device, pool = grant.device, pool_of_class(node, grant.device_class)
        if device.pool != pool:
            text = f"{where}: device {device.device} is in pool {device.pool}, wanted {pool}: this node is {node}"
            return refuse("claim-elsewhere", text, pool=device.pool, node=node)
        if grant.device_class == SHAPE_CLASS and device.device not in parts:
            text = (
                f"{where}: this machine has no shape {device.device} now: a device service has not reported yet, or "
                "the devices are others than when the claim was allocated"
            )
            return refuse("shape-unknown", text, device=device.device)
        is_shape = grant.device_class == SHAPE_CLASS
        own += _parts(grant, parts[device.device], cpus.get(device.device, {})) if is_shape else [grant]
    return own


def is_allocated_here(claim: ApiObject | None, uid: ClaimUid, node: str) -> bool:
    """Return whether the claim of this uid still has devices on this node. They then stay its own
    after an unprepare.

    An allocation that cannot be read counts as having some.
    """
    if claim is None or claim.metadata.get("uid") != uid:
        return False
    try:
        return any(node_of_pool(result.pool) == node for result in _allocated(claim).results)
    except ContractError:
        return True


def is_wanted_here(claim: ApiObject | None, uid: ClaimUid, node: str) -> bool:
    """Return whether some pod may still use the claim's devices on this node.

    A claim that is deleted gets no further pod, so without a reservation it has none.
    """
    if not is_allocated_here(claim, uid, node):
        return False
    assert claim is not None
    return not claim.metadata.get("deletionTimestamp") or bool(claim.status.get("reservedFor"))


def names_by_class(devices: Iterable[AllocatedDevice]) -> dict[str, tuple[str, ...]]:
    """Return the names of devices by class, both sorted."""
    names: dict[str, set[str]] = {}
    for device in devices:
        names.setdefault(device.device_class, set()).add(device.device)
    return {device_class: tuple(sorted(of_class)) for device_class, of_class in sorted(names.items())}


def shares_by_class(devices: Iterable[AllocatedDevice]) -> dict[str, dict[str, HeldShare]]:
    """Add up what a claim has of devices of which it has amounts, by class and device, sorted."""
    sums: dict[str, dict[str, dict[str, int]]] = {}
    for device in devices:
        for name, amount in device.amounts.items():
            amounts = sums.setdefault(device.device_class, {}).setdefault(device.device, {})
            amounts[name] = amounts.get(name, 0) + amount
    return {
        device_class: {name: HeldShare(amounts=amounts) for name, amounts in sorted(of_class.items())}
        for device_class, of_class in sorted(sums.items())
    }


def _allocated(claim: ApiObject) -> DevicesAllocated:
    """Read the devices of a claim's allocation. Empty for a claim without an allocation.

    Errors: raises ContractError that names the field.
    """
    try:
        return msgspec.convert(claim.status.get("allocation") or {}, ready(AllocationResult)).devices
    except msgspec.ValidationError as err:
        raise ContractError(str(err).replace("`$", f"`{_PLACE}")) from err


def _grant(index: int, result: GrantedDevice) -> _Grant:
    place = f"{_PLACE}.devices.results[{index}]"
    if not (result.driver and result.pool and result.device):
        raise ContractError(f"{place} needs driver, pool and device, got {result!r}")
    if not all(map(is_dns_label, result.request.split("/", 1))):
        raise ContractError(f"{place}.request is {result.request!r}, wanted a DNS label")
    request, _, alternative = result.request.partition("/")
    device_class = class_of_device(result.driver, result.device) or ""
    is_shared, is_share = result.admin_access is True, bool(result.share_id)
    return _Grant(
        device_class=device_class,
        device=AllocatedDevice(
            request=request,
            pool=result.pool,
            device=result.device,
            is_shared=is_shared,
            alternative=alternative,
            share_id=result.share_id or "",
            amounts=_amounts(result, place) if is_share and device_class != CPU_CLASS else {},
        ),
        cpus=_cpu_count(result, place) if is_share and device_class == CPU_CLASS and not is_shared else 0,
        tolerates_sickness=any(
            # The toleration must last longer than a moment.
            tolerates(toleration, SICK_TAINT)
            and (toleration.toleration_seconds is None or toleration.toleration_seconds > 0)
            for toleration in result.tolerations
        ),
    )


def _parts(grant: _Grant, parts: Iterable[str], cpus: Mapping[str, int]) -> list[_Grant]:
    """Return a shape's devices, each as the whole was granted."""
    replace = msgspec.structs.replace
    shape = grant.device.device
    devices = [replace(grant.device, device=name, shape=shape, cpus=cpus.get(name, 0)) for name in parts]
    return [replace(grant, device_class=device.device_class, device=device, cpus=device.cpus) for device in devices]


def _amounts(result: GrantedDevice, place: str) -> dict[str, int]:
    """Read how much of a shared device a result has, with fractions rounded up.

    Names are those of the driver's inventory, without the driver's domain.
    Errors: raises ContractError.

    >>> granted = GrantedDevice(
    ...     request="r", driver=DRIVER, pool="n", device="gpu-0", consumed_capacity={"memory": "20Gi", "topobus.dev/shares": "1"}
    ... )
    >>> _amounts(granted, "")
    {'memory': 21474836480, 'shares': 1}
    """  # noqa: E501
    try:
        quantities = {
            name.removeprefix(f"{result.driver}/"): Quantity.parse(text)
            for name, text in sorted(result.consumed_capacity.items())
        }
    except ValueError as err:
        raise ContractError(f"{place}.consumedCapacity: {err}") from err
    for name, quantity in quantities.items():
        if not 0 <= quantity.nano <= _LARGEST_AMOUNT * 10**9:
            raise ContractError(f"{place}.consumedCapacity: {name} is {quantity}, wanted 0 to {_LARGEST_AMOUNT}")
    return {name: -(-quantity.nano // 10**9) for name, quantity in quantities.items()}


def _cpu_count(result: GrantedDevice, place: str) -> int:
    """Read how many CPUs of a group a result has.

    Errors: raises ContractError.
    """
    consumed = result.consumed_capacity
    text = consumed.get(GROUP_CAPACITY, consumed.get(f"{DRIVER}/{GROUP_CAPACITY}", ""))
    try:
        count, rest = divmod(Quantity.parse(text).nano, 10**9)
    except ValueError:
        count, rest = 0, 0
    if rest or not 0 < count <= CpuSet.MAX_ID:
        raise ContractError(f"{place}.consumedCapacity is {consumed!r}, wanted a number of {GROUP_CAPACITY}")
    return count


def _config(entries: Sequence[GrantedConfiguration]) -> list[tuple[frozenset[str], dict[str, Any]]]:
    """List our opaque parameters with the requests that they apply to (none: all), the class's
    before the claim's.

    Errors: raises ContractError.
    """
    config: list[tuple[frozenset[str], dict[str, Any]]] = []
    for index, entry in sorted(enumerate(entries), key=lambda numbered: numbered[1].source != "FromClass"):
        if entry.opaque is None or entry.opaque.driver != DRIVER:
            continue
        if not isinstance(entry.opaque.parameters, dict):
            raise ContractError(f"{_PLACE}.devices.config[{index}].opaque.parameters is no object")
        config.append((frozenset(entry.requests), entry.opaque.parameters))
    return config


def _config_by_device(
    devices: Iterable[AllocatedDevice], config: Sequence[tuple[frozenset[str], dict[str, Any]]]
) -> dict[str, tuple[dict[str, Any], ...]]:
    """Return, by device, the parameters that apply to one of its requests and are for its class,
    each once.
    """
    own_devices = tuple(devices)
    classes = {device.device_class for device in own_devices}
    by_device: dict[str, list[dict[str, Any]]] = {}
    for device in own_devices:
        names = {device.request, f"{device.request}/{device.alternative}"}
        own = by_device.setdefault(device.device, [])
        own += [
            parameters
            for requests, parameters in config
            if (not requests or requests & names)
            and is_for_class(parameters, device.device_class, classes)
            and parameters not in own
        ]
    return {device: tuple(own) for device, own in sorted(by_device.items()) if own}


def _cpus_by_group(held: Iterable[_Grant]) -> dict[str, int]:
    cpus: dict[str, int] = {}
    for grant in held:
        if grant.cpus:
            cpus[grant.device.device] = cpus.get(grant.device.device, 0) + grant.cpus
    return cpus


def _generation(claim: ApiObject) -> int:
    generation = claim.metadata.get("generation")
    return generation if isinstance(generation, int) and generation > 0 else 0
