"""Inputs of the allocator's benchmarks: clusters, claims and hard puzzles, generated from a few
numbers.

Every input is a Kubernetes object as `kubectl get -o yaml` shows it, so a case can be read, stored
and tried elsewhere. Nothing is random: equal numbers give equal objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DRIVER",
    "ROOT",
    "Cluster",
    "Puzzle",
    "claim",
    "device_class",
    "node_name",
    "puzzle_slices",
    "puzzles",
    "slices",
    "taken_devices",
]

DRIVER = "gpu.example.com"
ROOT = "resource.kubernetes.io/pcieRoot"
NUMA = "resource.kubernetes.io/numaNode"

# A card modelled on NVIDIA's MIG: how many partitions of each profile it offers, and what one takes
# of the card's 7 compute and 8 memory slices.
PROFILES = {"whole": (1, 7, 8), "3g": (2, 3, 4), "2g": (3, 2, 2), "1g": (7, 1, 1)}


@dataclass(frozen=True)
class Cluster:
    """Nodes with cards.

    - nodes — how many
    - devices — cards per node. Two neighbours share a PCIe root, four a NUMA node
    - kinds — in how many ways nodes differ: model, memory, and which cards share a root. Every
      node's ids and addresses are its own in any case
    - partitions — each card is offered whole and in parts, by shared counters
    - is_plain — with partitions: the same devices without counters, to compare with
    - taken — share of each node's cards that is held already, scattered
    """

    nodes: int
    devices: int = 8
    kinds: int = 1
    partitions: bool = False
    is_plain: bool = False
    taken: float = 0.0


def node_name(index: int) -> str:
    """Name a node, so that names sort like numbers."""
    return f"node-{index:05d}"


def device_class() -> dict[str, Any]:
    """Make the one class."""
    spec = {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "gpu"}, "spec": spec}


def slices(cluster: Cluster, index: int) -> Iterator[dict[str, Any]]:
    """Publish one node's devices: four cards per slice where they come in parts (a slice may have
    64 such devices), and one slice for the counters.
    """
    node = node_name(index)
    with_counters = cluster.partitions and not cluster.is_plain
    step = 4 if cluster.partitions else cluster.devices
    starts = range(0, cluster.devices, step)
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(starts) + with_counters}
    for start in starts:
        devices = [
            offer
            for card in range(start, min(start + step, cluster.devices))
            for offer in _offers(cluster, index, card)
        ]
        yield _slice(f"{node}-gpu-{start}", {"driver": DRIVER, "pool": pool, "nodeName": node, "devices": devices})
    if with_counters:
        amounts = {"compute": {"value": "7"}, "memory": {"value": "8"}}
        counters = [{"name": f"card-{card}", "counters": amounts} for card in range(cluster.devices)]
        yield _slice(f"{node}-counters", {"driver": DRIVER, "pool": pool, "nodeName": node, "sharedCounters": counters})


def claim(number: int, *, count: int = 2, match: str | None = ROOT, where: str = "", uid: str = "") -> dict[str, Any]:
    """Request devices, all with one value of an attribute unless `match` is None, for which the CEL
    expression `where` holds.
    """
    selectors = [{"cel": {"expression": where}}] if where else []
    request = {"name": "gpus", "exactly": {"deviceClassName": "gpu", "count": count, "selectors": selectors}}
    constraints = [{"requests": ["gpus"], "matchAttribute": match}] if match else []
    name = f"claim-{number:06d}"
    metadata = {
        "name": name,
        "namespace": "bench",
        "uid": uid or f"uid-{number:06d}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    spec = {"devices": {"requests": [request], "constraints": constraints}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}


def taken_devices(cluster: Cluster, index: int) -> tuple[str, ...]:
    """Name a node's cards that are held already. Every node has another pattern of them."""
    # A checksum scatters like a random choice, and gives the same cards every time.
    scattered = sorted(range(cluster.devices), key=lambda card: hashlib.sha256(f"{index}/{card}".encode()).digest())
    return tuple(f"card-{card}" for card in sorted(scattered[: round(cluster.devices * cluster.taken)]))


@dataclass(frozen=True)
class Puzzle:
    """Claims for one node that are hard to refuse, or to serve: a search of all combinations does
    not end.
    """

    name: str
    claims: tuple[dict[str, Any], ...]
    """Their specs, which are to be allocated together."""
    devices: tuple[dict[str, Any], ...]


def puzzles(size: int) -> Iterator[Puzzle]:
    """Make puzzles of about `size` devices."""
    half = size // 2
    same = [_device(index, model="a") for index in range(size)]
    yield _puzzle(f"{size + 1} of {size} equal ones", same, *(_ask(("r", count, "a")) for count in _in_parts(size + 1)))
    sides = [_device(index, model="a", side=index % 2) for index in range(size)]
    for more, text in ((0, "twice all there are"), (1, "one more than there are")):
        wanted = min(half // 2 + more, 32)
        asked = [_ask(("r", wanted, "a"), match="side") for _ in range(3 + more)]
        yield _puzzle(f"{len(asked)} claims of {wanted} on a side each, 2 sides of {half}: {text}", sides, *asked)
    values = [_device(index, model="a", value=index % min(half, 31)) for index in range(size)]
    yield _puzzle(
        f"{min(half, 31) + 1} different of {min(half, 31)} values",
        values,
        _ask(("r", min(half, 31) + 1, "a"), distinct="value"),
    )
    mixed = [_device(index, model="ab"[index % 2], side=index // 2) for index in range(size)]
    count = min(half, 28)
    yield _puzzle(
        f"{count} a, then more b than there are",
        mixed,
        _ask(("a", count, "a"), ("b", 1, "b")),
        *(_ask(("b", n, "b")) for n in _in_parts(half)),
    )
    apart = [_device(index, model="ab"[index % 2], side=index) for index in range(size)]
    yield _puzzle(
        "4 a and 1 b of one side, of which every device has its own",
        apart,
        _ask(("a", 4, "a")),
        _ask(("a", 1, "a"), ("b", 1, "b"), match="side"),
    )
    cards = [_device(index, model="ab"[index % 2], parts=1 + index % 2) for index in range(size)]
    yield _puzzle(
        "small parts of a card, then more big ones than go in",
        cards,
        _ask(("a", min(half, 20), "a")),
        _ask(("b", min(half, 20), "b")),
    )
    chain = [_device(index, model="abc"[index % 3], side=index // 3, colour=index % 5) for index in range(size)]
    yield _puzzle(
        "6 of other colours, of which there are 5",
        chain,
        _ask(("a", 2, "a"), ("b", 2, "b"), ("c", 2, "c"), distinct="colour"),
    )
    overlapping = [_device(index, model="ab"[index >= size - 4], near=[index, index + 1]) for index in range(size)]
    yield _puzzle(
        "a chain of 3 that share a value, which no 3 have",
        overlapping,
        _ask(("a", 5, "a")),
        _ask(("b", 3, "b"), match="near"),
    )
    unlike = [
        _device(index, model="ab"[index >= size - 3], side=index, near=[index // 2, index // 2 + 1])
        for index in range(size)
    ]
    yield _puzzle(
        "6 unlike ones without a constraint, then 3 that cannot be had together",
        unlike,
        _ask(*(("a", 6, "a"), ("b", 3, "b")), match="near", only=("b",), distinct="side"),
    )
    fits = [_device(index, model="ab"[index >= half], side=index % half) for index in range(size)]
    yield _puzzle(
        "the last of many: a and b of the one side that is left",
        fits,
        *(_ask(("a", 1, "a"), ("b", 1, "b"), match="side") for _ in range(half)),
    )


def puzzle_slices(puzzle: Puzzle, node: str) -> Iterator[dict[str, Any]]:
    """Publish a puzzle's devices.

    Those that take counters share one card, which has room for half of what they would take.
    """
    chunks = [puzzle.devices[start : start + 64] for start in range(0, len(puzzle.devices), 64)]
    has_counters = any("consumesCounters" in device for device in puzzle.devices)
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(chunks) + has_counters}
    for index, devices in enumerate(chunks):
        yield _slice(f"{node}-{index}", {"driver": DRIVER, "pool": pool, "nodeName": node, "devices": list(devices)})
    if has_counters:
        counters = [{"name": "card", "counters": {"parts": {"value": str(len(puzzle.devices) * 3 // 4)}}}]
        yield _slice(f"{node}-counters", {"driver": DRIVER, "pool": pool, "nodeName": node, "sharedCounters": counters})


def _slice(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def _offers(cluster: Cluster, index: int, card: int) -> Iterator[dict[str, Any]]:
    """Offer a card: whole, or whole and in all its parts."""
    kind = index % cluster.kinds
    root = (card + kind) % cluster.devices // 2
    attributes: dict[str, Any] = {
        "model": {"string": f"model-{kind}"},
        "uuid": {"string": f"GPU-{index:05d}-{card}"},
        "index": {"int": card},
        ROOT: {"string": f"pci{index % 7:04x}:{root:02x}"},
        "resource.kubernetes.io/pciBusID": {"string": f"0000:{root:02x}:{card:02x}.0"},
        NUMA: {"int": card * 2 // cluster.devices},
    }
    memory = 80 + 8 * kind
    if not cluster.partitions:
        yield {"name": f"card-{card}", "attributes": attributes, "capacity": {"memory": {"value": f"{memory}Gi"}}}
        return
    for profile, (count, compute, slots) in PROFILES.items():
        for part in range(count):
            device: dict[str, Any] = {
                "name": f"card-{card}" if profile == "whole" else f"card-{card}-{profile}-{part}",
                "attributes": attributes | {"profile": {"string": profile}},
                "capacity": {"memory": {"value": f"{memory * slots // 8}Gi"}},
            }
            if not cluster.is_plain:
                takes = {"compute": {"value": str(compute)}, "memory": {"value": str(slots)}}
                device["consumesCounters"] = [{"counterSet": f"card-{card}", "counters": takes}]
            yield device


def _puzzle(name: str, devices: list[dict[str, Any]], *claims: dict[str, Any]) -> Puzzle:
    return Puzzle(name, claims, tuple(devices))


def _in_parts(count: int) -> list[int]:
    """Divide a count into claims: one may have 32 devices at most."""
    return [min(32, count - start) for start in range(0, count, 32)]


def _device(index: int, *, parts: int = 0, near: list[int] | None = None, **attributes: str | int) -> dict[str, Any]:
    values: dict[str, Any] = {
        key: {"string" if isinstance(value, str) else "int": value} for key, value in attributes.items()
    }
    if near is not None:
        values["near"] = {"ints": near}
    device: dict[str, Any] = {"name": f"dev-{index:03d}", "attributes": values}
    if parts:
        device["consumesCounters"] = [{"counterSet": "card", "counters": {"parts": {"value": str(parts)}}}]
    return device


def _ask(
    *wanted: tuple[str, int, str], match: str = "", distinct: str = "", only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Request counts of models (request, count, model). Only the requests in `only` must match."""
    requests = []
    for name, count, model in wanted:
        expression = f"device.attributes['{DRIVER}'].model == '{model}'"
        exactly = {"deviceClassName": "gpu", "count": count, "selectors": [{"cel": {"expression": expression}}]}
        requests.append({"name": name, "exactly": exactly})
    constraints: list[dict[str, Any]] = (
        [{"requests": list(only), "matchAttribute": f"{DRIVER}/{match}"}] if match else []
    )
    if distinct:
        constraints.append({"distinctAttribute": f"{DRIVER}/{distinct}"})
    return {"devices": {"requests": requests, "constraints": constraints}}
