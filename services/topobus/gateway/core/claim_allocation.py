"""Reads a claim's allocation for one driver on one node, and makes the CDI file of what was prepared.

Flows in: a ResourceClaim in Kubernetes' wire shape (v1, v1beta1 and v1beta2 agree in what is read here). Flows out: the devices of this driver on this node, or a
Refusal that names the first field that is wrong. An unreadable claim is always refused, because a guess could prepare somebody else's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from topobus.contracts.messages import ApiObject, Prepared
from topobus.devicekit.cdi import CdiDevice, CdiSpec
from topobus.domain.alignment.planning.node_view import CPU_CLASS
from topobus.domain.device import class_of_driver
from topobus.domain.device_sharing import HeldShare
from topobus.domain.edits import ContainerEdits
from topobus.domain.idset import CpuSet
from topobus.domain.names import ClaimUid, is_dns_label
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.request import Owner
from topobus.gateway.core.claim_pods import pod_claim_name, pods_of, users_of
from topobus.gateway.core.consumed_cpus import add_cpus
from topobus.gateway.core.consumed_shares import add_amounts, consumed_amounts
from topobus.gateway.core.naming_variables import naming
from topobus.kubernetes.api.resource import Toleration
from topobus.kubernetes.api.slices import SICK_TAINT
from topobus.kubernetes.api.tolerations import tolerates

__all__ = [
    "CDI_VENDOR",
    "AllocatedDevice",
    "ClaimAllocation",
    "allocation_of",
    "cdi_class",
    "cdi_device_name",
    "cdi_names",
    "cdi_request_name",
    "cdi_spec",
    "cdi_whole_name",
    "cdi_whole_names",
    "is_allocated_here",
]

CDI_VENDOR = "topobus.dev"
# Edits that are lists of things of which a container has each once.
_LISTS = ("device_nodes", "mounts", "hooks", "additional_gids", "net_devices")


class AllocatedDevice(Struct, frozen=True, kw_only=True):
    """One device of the allocation."""

    request: str
    """The request's name, without the part of an alternative that was chosen."""
    pool: str
    device: str
    is_shared: bool = False
    """Admin access: looks at the device, holds nothing."""
    alternative: str = ""
    """Of the request, which one was chosen; empty: it has none."""
    share_id: str = ""
    """The share that the claim has of a device with consumable capacity; empty: the whole device."""
    amounts: dict[str, int] = {}
    """How much of the device the share is: capacity to amount."""


class ClaimAllocation(Struct, frozen=True, kw_only=True):
    """What one driver must prepare."""

    devices: tuple[AllocatedDevice, ...]
    held: dict[str, tuple[str, ...]] = {}
    """Class to devices that the claim holds on this node, of all our drivers: the ledger's entry of a claim is one whole."""
    by_share: dict[str, tuple[str, ...]] = {}
    """Those of `held` of which the claim has a share: other claims may have one, too."""
    shares: dict[str, dict[str, HeldShare]] = {}
    """How much the claim has of those of `by_share`, where its allocation says so: class to device to amounts."""
    config: dict[str, tuple[dict[str, Any], ...]] = {}
    """Device to its opaque parameters: of the class before those of the claim, only such as mean the request that the device was given for."""

    group_cpus: dict[str, int] = {}
    """How many CPUs the claim has of groups of CPUs, by the group's device: its ledger's entry is one whole, whichever driver asks."""
    cpus: dict[str, CpuSet] = {}
    """Which these are, once the ledger has chosen them."""
    generation: int = 0
    """The claim's `metadata.generation`; 0: its API server counts none."""
    pod_claim_name: str = ""
    """The name that pods know the claim by, of one that was made of a template for a pod; empty: the claim's own."""
    pods: tuple[str, ...] = ()
    """Uids of the pods that the claim is reserved for, sorted."""
    users: tuple[Owner, ...] = ()
    """The same pods with their names."""
    tolerated: tuple[str, ...] = ()
    """Devices of this driver that the claim takes also when they are sick: its allocation tolerates the taint that a sick device has."""

    @property
    def names(self) -> tuple[str, ...]:
        """The devices, each once, sorted."""
        return tuple(sorted({device.device for device in self.devices}))

    @property
    def requests(self) -> dict[str, tuple[str, ...]]:
        """The devices of each request, sorted; requests in the order of the allocation."""
        by_class: dict[str, set[str]] = {}
        for allocated in self.devices:
            by_class.setdefault(allocated.request, set()).add(allocated.device)
        return {request: tuple(sorted(names)) for request, names in by_class.items()}


def allocation_of(
    claim: ApiObject | None, *, namespace: str, name: str, uid: ClaimUid, driver: str, node: str
) -> ClaimAllocation | Refusal:
    """Read what a driver must prepare of a claim on this node.

    Errors: raises nothing; Refusal codes claim-missing, claim-replaced, claim-unallocated, claim-malformed, claim-elsewhere.
    """
    where = f"claim {namespace}/{name}"
    if claim is None:
        return _refuse("claim-missing", f"{where} does not exist")
    found_uid = claim.metadata.get("uid", "")
    if found_uid != uid:
        return _refuse("claim-replaced", f"{where} has uid {found_uid or 'none'}, kubelet asked for {uid}", wanted=uid, got=str(found_uid))
    results = _results(claim)
    if results is None:
        return _refuse("claim-unallocated", f"{where} is not allocated")
    parameters = _parameters(claim, driver, where)
    if isinstance(parameters, Refusal):
        return parameters
    devices: list[AllocatedDevice] = []
    config: dict[str, list[dict[str, Any]]] = {}
    held: dict[str, set[str]] = {}
    whole: set[tuple[str, str]] = set()
    untolerated: set[str] = set()
    amounts: dict[str, dict[str, dict[str, int]]] = {}
    group_cpus: dict[str, int] = {}
    for index, result in enumerate(results):
        fields = [result.get(key) for key in ("request", "driver", "pool", "device")] if isinstance(result, Mapping) else []
        if not fields or not all(isinstance(field, str) and field for field in fields):
            text = f"{where}: status.allocation.devices.results[{index}] needs request, driver, pool and device, got {result!r}"
            return _refuse("claim-malformed", text)
        request, its_driver, pool, device = (str(field) for field in fields)
        if not all(map(is_dns_label, request.split("/", 1))):
            return _refuse(
                "claim-malformed", f"{where}: status.allocation.devices.results[{index}].request is {request!r}, wanted a DNS label"
            )
        is_shared = result.get("adminAccess") is True
        share_id = result.get("shareID") or ""
        if not isinstance(share_id, str):
            return _refuse("claim-malformed", f"{where}: status.allocation.devices.results[{index}].shareID is {share_id!r}, wanted text")
        device_class = class_of_driver(its_driver)
        if device_class and pool == node and not is_shared:
            held.setdefault(device_class, set()).add(device)
            if not share_id:
                whole.add((device_class, device))
            elif device_class == CPU_CLASS and not add_cpus(group_cpus, device, result):
                got = f"status.allocation.devices.results[{index}].consumedCapacity is {result.get('consumedCapacity')!r}"
                return _refuse("claim-malformed", f"{where}: {got}, wanted a number of cpus")
        consumed = consumed_amounts(result, its_driver) if share_id and device_class != CPU_CLASS else {}
        if consumed is None:
            got = f"status.allocation.devices.results[{index}].consumedCapacity is {result.get('consumedCapacity')!r}"
            return _refuse("claim-malformed", f"{where}: {got}, wanted names with quantities")
        if consumed and device_class and pool == node and not is_shared:
            add_amounts(amounts.setdefault(device_class, {}).setdefault(device, {}), consumed)
        if its_driver != driver:
            continue
        if not _tolerates_sickness(result):
            untolerated.add(device)
        if pool != node:
            return _refuse("claim-elsewhere", f"{where}: device {device} is in pool {pool}, this node is {node}", pool=pool, node=node)
        name, _, alternative = request.partition("/")
        devices.append(
            AllocatedDevice(
                request=name, pool=pool, device=device, is_shared=is_shared, alternative=alternative, share_id=share_id, amounts=consumed
            )
        )
        device_config = config.setdefault(device, [])
        device_config += [
            settings for requests, settings in parameters if (not requests or requests & {name, request}) and settings not in device_config
        ]
    if not devices:
        return _refuse("claim-elsewhere", f"{where} has no device of driver {driver}")
    sorted_held = {device_class: tuple(sorted(names)) for device_class, names in sorted(held.items())}
    by_share = {
        device_class: shares
        for device_class, names in sorted_held.items()
        if (shares := tuple(name for name in names if (device_class, name) not in whole))
    }
    tolerated = tuple(sorted({allocated_device.device for allocated_device in devices} - untolerated))
    configured = {device: tuple(settings) for device, settings in sorted(config.items()) if settings}
    return ClaimAllocation(
        devices=tuple(devices),
        held=sorted_held,
        by_share=by_share,
        shares={
            name: {device: HeldShare(amounts=sums) for device, sums in sorted(devices_of.items()) if device in by_share.get(name, ())}
            for name, devices_of in sorted(amounts.items())
        },
        config=configured,
        group_cpus=group_cpus,
        generation=_generation(claim),
        pod_claim_name=pod_claim_name(claim),
        pods=pods_of(claim),
        users=users_of(claim, namespace),
        tolerated=tolerated,
    )


def is_allocated_here(claim: ApiObject | None, uid: ClaimUid, node: str) -> bool:
    """Say whether the claim of this uid still has devices on this node: then they stay its own after an unprepare."""
    if claim is None or claim.metadata.get("uid") != uid:
        return False
    return any(isinstance(result, Mapping) and result.get("pool") == node for result in _results(claim) or ())


def cdi_device_name(uid: ClaimUid, device: str) -> str:
    """Name a claim's device in CDI.

    The claim's uid is in it, since two files that define one name cancel each other out. It begins with a letter, which every CDI version takes.

    >>> cdi_device_name("3cec", "gpu-0")
    'claim-3cec-gpu-0'
    """
    return f"claim-{uid}-{device}"


def cdi_request_name(uid: ClaimUid, request: str) -> str:
    """Name what the devices of one request have in common; no device has such a name, for those have no '_'.

    >>> cdi_request_name("3cec", "big")
    'claim-3cec_request-big'
    """
    return f"claim-{uid}_request-{request}"


def cdi_whole_name(uid: ClaimUid) -> str:
    """Name what all devices of a claim have in common, for containers that name no request."""
    return f"claim-{uid}_whole"


def cdi_spec(
    uid: ClaimUid, device_class: str, prepared: Prepared, requests: Mapping[str, Prepared] = MappingProxyType({})
) -> CdiSpec | None:
    """Describe a claim's CDI file; None when nothing is to be edited (a runtime refuses an empty file).

    Shapes: requests — what was prepared for each request alone, where the claim has several. Kubelet gives a container the names of the requests that it
    names, so what lists devices stands with its request, and once more for the whole claim; the file's common edits are what all of them say alike.
    """
    common = prepared.common if len(requests) < 2 else _alike((prepared.common, *(request.common for request in requests.values())))
    nameless = {name: _naming(uid, name) for name in prepared.to_attach}
    own = {name: (edits, prepared.common) for name, edits in prepared.edits.items()}
    joined: list[tuple[str, ContainerEdits]] = []
    if len(requests) > 1:
        # Made for the request alone: it knows of no sibling's device.
        own = {
            name: (edits, _without(request.common, common))
            for request in reversed(tuple(requests.values()))
            for name, edits in request.edits.items()
        }
        joined = [
            (cdi_request_name(uid, request), _of_request(device_class, request, other_request, common))
            for request, other_request in requests.items()
        ]
        joined.append((cdi_whole_name(uid), _without(prepared.common, common)))
    devices = [
        (
            cdi_device_name(uid, name),
            naming(
                _first_to_edit(edits, rest, common, nameless.get(name, edits)),
                name,
                cdi_device_name(uid, name),
                is_adjusted=name in prepared.to_adjust,
            ),
        )
        for name, (edits, rest) in sorted(own.items())
    ]
    entries = tuple(CdiDevice(name=name, edits=_bound(edits)) for name, edits in (*devices, *joined) if not edits.is_empty)
    if not entries:
        return None
    return CdiSpec(vendor=CDI_VENDOR, device_class=cdi_class(device_class), devices=entries, common=_bound(_without_annotations(common)))


def cdi_names(spec: CdiSpec | None, uid: ClaimUid, device: str, request: str) -> tuple[str, ...]:
    """List the names that give a container one device of a request; the device's own first, by which kubelet tells people of its health."""
    return _defined(spec, cdi_device_name(uid, device), cdi_request_name(uid, request))


def cdi_whole_names(spec: CdiSpec | None, uid: ClaimUid) -> tuple[str, ...]:
    """List the name that a container gets besides when it names no request; none where the claim has one request."""
    return _defined(spec, cdi_whole_name(uid))


def cdi_class(device_class: str) -> str:
    """Name a class in CDI."""
    # A class made of somebody else's resource may begin with a digit (`10g-nic-acme`), which CDI refuses. A letter of our own keeps them apart.
    return device_class if device_class[:1].isalpha() else f"c-{device_class}"


def _defined(spec: CdiSpec | None, *names: str) -> tuple[str, ...]:
    known_names = {device.name for device in spec.devices} if spec is not None else set()
    return tuple(spec.qualified_name(name) for name in names if name in known_names) if spec is not None else ()


def _first_to_edit(*choices: ContainerEdits) -> ContainerEdits:
    """Choose edits that are some, for CDI refuses a device without; what a container is given twice alike does it no harm."""
    return next((edits for edits in choices if not edits.is_empty), ContainerEdits())


def _naming(uid: ClaimUid, device: str) -> ContainerEdits:
    """Give a device edits that has none and is attached to the sandbox: without a name in CDI nothing would keep its container from starting too early."""
    return ContainerEdits(env={f"TOPOBUS_ATTACHED_{device.upper().replace('-', '_')}": cdi_device_name(uid, device)})


def _alike(parts: Sequence[ContainerEdits]) -> ContainerEdits:
    """Find what all parts say alike."""
    first, *others = parts
    lists = {name: tuple(edit for edit in getattr(first, name) if all(edit in getattr(other, name) for other in others)) for name in _LISTS}
    env = {key: value for key, value in first.env.items() if all(container_edits.env.get(key) == value for container_edits in others)}
    is_rdt_alike = all(container_edits.intel_rdt == first.intel_rdt for container_edits in others)
    return replace(ContainerEdits(env=env, intel_rdt=first.intel_rdt if is_rdt_alike else None), **lists)


def _without(edits: ContainerEdits, common: ContainerEdits) -> ContainerEdits:
    """Leave out what is said for all."""
    lists = {name: tuple(edit for edit in getattr(edits, name) if edit not in getattr(common, name)) for name in _LISTS}
    env = {key: value for key, value in edits.env.items() if key not in common.env}
    return replace(ContainerEdits(env=env, intel_rdt=edits.intel_rdt if edits.intel_rdt != common.intel_rdt else None), **lists)


def _of_request(device_class: str, request: str, prepared: Prepared, common: ContainerEdits) -> ContainerEdits:
    """Give the edits of one request, with a list under a name of its own: a container that names several requests has each one's."""
    rest = _without(prepared.common, common)
    words = f"topobus_{device_class}_devices_{request}".upper().replace("-", "_")
    return replace(rest, env={**rest.env, words: ",".join(sorted(prepared.edits))})


def _bound(edits: ContainerEdits) -> ContainerEdits:
    """Say of each mount that it is a bind mount: a runtime takes one that does not say so for a file system, and the container does not start."""
    if all(mount.kind or {"bind", "rbind"} & set(mount.options) for mount in edits.mounts):
        return edits
    mounts = [
        mount if mount.kind or {"bind", "rbind"} & set(mount.options) else replace(mount, options=(*mount.options, "rbind"))
        for mount in edits.mounts
    ]
    return replace(edits, mounts=tuple(mounts))


def _without_annotations(edits: ContainerEdits) -> ContainerEdits:
    return replace(edits, annotations={})


def _results(claim: ApiObject) -> list[Any] | None:
    allocation = claim.status.get("allocation")
    devices = allocation.get("devices") if isinstance(allocation, Mapping) else None
    results = devices.get("results") if isinstance(devices, Mapping) else None
    return results if isinstance(results, list) else None


def _tolerates_sickness(result: Mapping[str, Any]) -> bool:
    """Say whether a part of an allocation bears a sick device, for longer than a moment; what cannot be read bears nothing."""
    try:
        tolerations = msgspec.convert(result.get("tolerations") or [], tuple[Toleration, ...])
    except msgspec.ValidationError:
        return False
    return any(
        tolerates(toleration, SICK_TAINT) and (toleration.toleration_seconds is None or toleration.toleration_seconds > 0)
        for toleration in tolerations
    )


def _parameters(claim: ApiObject, driver: str, where: str) -> list[tuple[frozenset[str], dict[str, Any]]] | Refusal:
    """Read the opaque parameters for a driver with the requests that they mean (none: all), the class's before the claim's."""
    entries = claim.status["allocation"]["devices"].get("config") or []
    if not isinstance(entries, list):
        return _refuse("claim-malformed", f"{where}: status.allocation.devices.config is no list")
    settings: list[tuple[bool, frozenset[str], dict[str, Any]]] = []
    for index, entry in enumerate(entries):
        opaque = entry.get("opaque") if isinstance(entry, Mapping) else None
        if not isinstance(opaque, Mapping) or opaque.get("driver") != driver:
            continue
        requests, parameters = entry.get("requests") or [], opaque.get("parameters")
        if not isinstance(requests, list) or not all(isinstance(request, str) for request in requests) or not isinstance(parameters, dict):
            text = f"{where}: status.allocation.devices.config[{index}] needs requests as names and opaque.parameters as an object"
            return _refuse("claim-malformed", text)
        settings.append((entry.get("source") != "FromClass", frozenset(requests), parameters))
    return [(requests, parameters) for _, requests, parameters in sorted(settings, key=lambda entry: entry[0])]


def _generation(claim: ApiObject) -> int:
    generation = claim.metadata.get("generation")
    return generation if isinstance(generation, int) and generation > 0 else 0


def _refuse(code: str, message: str, **facts: str) -> Refusal:
    return Refusal(reasons=(Reason(code=code, message=message, facts=dict(facts)),))
