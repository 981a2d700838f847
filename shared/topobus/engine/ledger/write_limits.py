"""What a request may write into the ledger: names and counts within bounds, so that no single
request can fill the ledger for all.

The ledger is one value of limited size that every service of the node reads. Kubernetes' own limits
are far below these, so an honest request never reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from topobus.values.device_sharing import HeldShare
from topobus.values.idset import NodeSet
from topobus.values.outcome import MemoryBlock
from topobus.values.request import Owner, OwnerKind, PodRequest
from topobus.values.resource_names import is_resource_name

__all__ = [
    "complaint_of_devices",
    "complaint_of_memory",
    "complaint_of_operation",
    "complaint_of_owner",
    "complaint_of_pod",
    "complaint_of_pods",
    "complaint_of_shares",
]

# A DNS subdomain (RFC 1123), the longest name that Kubernetes accepts for anything.
_NAME_CHARACTERS = 253
# A DNS label: containers and device classes.
_LABEL_CHARACTERS = 63
# A qualified name: a DNS subdomain, a slash, and 63 characters.
_RESOURCE_CHARACTERS = _NAME_CHARACTERS + 1 + _LABEL_CHARACTERS
# etcd takes 1.5 MiB per object, and a container with an image and a request has 100 bytes and more.
# No pod with more than tens of containers is known.
_CONTAINERS = 256
_DEVICE_REQUESTS = 64
# As many as a claim can be reserved for (resource.k8s.io/v1, ResourceClaimReservedForMaxSize).
_PODS = 256
# More CPUs than Linux can be built for on x86 (NR_CPUS): the longest
# list of names that can make sense.
_DEVICES = 8192
# A device has 32 capacities at most (resource.k8s.io/v1), and a setting allows 128 replicas.
_CAPACITIES = 32
_REPLICAS = 128
# One for plain memory and one for each size of huge pages; no
# architecture has more than five of these.
_MEMORY_BLOCKS = 64
_BYTES = 2**63 - 1
# JSON numbers above this are not the same number to every reader.
_COUNT = 2**53


def complaint_of_operation(op_id: str, owner: Owner) -> str:
    """Explain what is wrong with an operation's id or its owner. Empty when nothing is."""
    if not op_id:
        return "op_id is empty: every change needs an operation id, the same on every retry"
    wrong = _wrong_text(op_id, _NAME_CHARACTERS)
    return f"op_id {wrong}" if wrong else complaint_of_owner(owner, "owner")


def complaint_of_owner(owner: Owner, field: str) -> str:
    """Explain what is wrong with the owner in a field. Empty when nothing is."""
    for key, text in (("namespace", owner.namespace), ("name", owner.name), ("uid", owner.uid)):
        wrong = _wrong_text(text, _NAME_CHARACTERS)
        if wrong:
            return f"{field}.{key} {wrong}"
    # The owner's key has the namespace before the name and the uid after it: without a slash in
    # them no two owners share a key.
    for key, text in (("namespace", owner.namespace), ("uid", owner.uid)):
        if "/" in text:
            return f"{field}.{key} is {text!r}, wanted no '/' in it"
    return (
        f"{field}.name is empty: an owner without a name cannot be distinguished from another" if not owner.name else ""
    )


def complaint_of_pods(pods: Sequence[Owner], container: str) -> str:
    """Explain what is wrong with the pods that use something, or with their container. Empty when
    nothing is.
    """
    if wrong := _wrong_text(container, _LABEL_CHARACTERS):
        return f"container {wrong}"
    if len(pods) > _PODS:
        return f"the request names {len(pods)} pods, wanted at most {_PODS}"
    strange = next((pod for pod in pods if pod.kind is not OwnerKind.POD), None)
    if strange is not None:
        return f"pods names {strange.kind} {strange.name[:80]!r}, wanted pods alone"
    return next((complaint for pod in pods if (complaint := complaint_of_owner(pod, "pods"))), "")


def complaint_of_pod(pod: PodRequest) -> str:
    """Explain what is out of bounds in a pod's request. Empty when nothing is.

    A request that merely cannot be met is refused later, with reasons.
    """
    if len(pod.containers) > _CONTAINERS:
        return f"the request has {len(pod.containers)} containers, wanted at most {_CONTAINERS}"
    for container in pod.containers:
        wrong = _wrong_text(container.name, _LABEL_CHARACTERS)
        if wrong:
            return f"a container's name {wrong}"
        if len(container.devices) > _DEVICE_REQUESTS:
            return (
                f"container {container.name!r} has {len(container.devices)} device requests, wanted at most "
                f"{_DEVICE_REQUESTS}"
            )
        if not 0 <= container.memory_bytes <= _BYTES:
            return (
                f"container {container.name!r}: memory_bytes is {container.memory_bytes}, wanted 0 or more, below 2^63"
            )
        counts = {
            "cpus": container.cpus,
            **{f"{device.device_class} count": device.count for device in container.devices},
        }
        for key, count in counts.items():
            if abs(count) > _COUNT:
                return f"container {container.name!r}: {key} is {count}, wanted at most {_COUNT}"
        for device in container.devices:
            most = _RESOURCE_CHARACTERS if is_resource_name(device.device_class) else _LABEL_CHARACTERS
            wrong = _wrong_text(device.device_class, most)
            if wrong:
                return f"container {container.name!r}: a device class {wrong}"
        wrong = _complaint_of_names(("", device.names) for device in container.devices)
        if wrong:
            return f"container {container.name!r}: {wrong}"
    return ""


def complaint_of_devices(devices: Mapping[str, tuple[str, ...]]) -> str:
    """Explain what is out of bounds in device names by class. Empty when nothing is."""
    return _complaint_of_names(devices.items())


def complaint_of_shares(shares: Mapping[str, Mapping[str, HeldShare]]) -> str:
    """Explain what is out of bounds in shares by class and device. Empty when nothing is."""
    for device_class, devices in shares.items():
        wrong = _complaint_of_names([(device_class, tuple(devices))])
        if wrong:
            return wrong
        for name, share in devices.items():
            if len(share.amounts) > _CAPACITIES or len(share.replicas) > _REPLICAS:
                return (
                    f"the share of {name} has {len(share.amounts)} amounts and {len(share.replicas)} replicas, "
                    f"wanted at most {_CAPACITIES} and {_REPLICAS}"
                )
            if any(not 0 <= number < _REPLICAS for number in share.replicas):
                return (
                    f"the share of {name} names replicas {share.replicas[:8]}, wanted numbers from 0 to {_REPLICAS - 1}"
                )
    return ""


def _complaint_of_names(devices: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    total = 0
    for device_class, names in devices:
        total += len(names)
        if total > _DEVICES:
            return f"more than {_DEVICES} devices are named, wanted at most so many"
        for key, text in (("a device class", device_class), *(("a device's name", name) for name in names)):
            wrong = _wrong_text(text, _LABEL_CHARACTERS)
            if wrong:
                return f"{key} {wrong}"
    return ""


def complaint_of_memory(blocks: Sequence[MemoryBlock]) -> str:
    """Explain what is out of bounds in memory blocks. Empty when nothing is."""
    if len(blocks) > _MEMORY_BLOCKS:
        return f"{len(blocks)} memory blocks are named, wanted at most {_MEMORY_BLOCKS}"
    for block in blocks:
        wrong = _wrong_text(block.kind, _LABEL_CHARACTERS)
        if wrong:
            return f"a memory block's kind {wrong}"
        if len(block.shares) > NodeSet.MAX_ID + 1:
            return f"a block of {block.kind} has {len(block.shares)} shares, wanted at most one a NUMA node"
        for node, size_bytes in block.shares:
            if not 0 <= node <= NodeSet.MAX_ID:
                return f"a block of {block.kind} has a share on NUMA node {node}, wanted 0 to {NodeSet.MAX_ID}"
            if not 0 <= size_bytes <= _BYTES:
                return (
                    f"a block of {block.kind} has {size_bytes} bytes on NUMA node {node}, wanted 0 or more, below 2^63"
                )
    return ""


def _wrong_text(text: str, most: int) -> str:
    if len(text) > most:
        return f"has {len(text)} characters ({text[:20]!r}…), wanted at most {most}"
    return "" if text.isprintable() else f"is {text!r}, wanted printable characters only"
