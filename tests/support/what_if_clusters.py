"""Random clusters of five racks of one node, with twenty pods for each, and what is changed in them.

A pod may go to the nodes of its own rack only. So which pods have a place depends on their order and
on their devices, not on kube-scheduler's choice among equal nodes, which nothing can predict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from support.why_objects import NVIDIA, Plain, asks, claim, class_of, interfaces, node, nvidia_gpus, pod, slice_of

__all__ = ["NEW_NODE", "Change", "changes"]

NEW_NODE = "rack-new-1"
_PRIORITIES = {"low": 10, "middle": 20, "high": 30}
_RACKS = ("a", "b", "c", "d")
_PODS_OF_A_RACK = 20
_SAME_ROOT = {"matchAttribute": "resource.kubernetes.io/pcieRoot", "requests": ["gpu", "nic"]}
_HOPPER = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].architecture == 'Hopper'"
_NEW_DRIVER = "device.attributes['gpu.nvidia.com'].driverVersion.isGreaterThan(semver('575.0.0'))"


@dataclass(frozen=True, slots=True)
class Change:
    """A cluster, its pods in the order in which they come, and what is other afterwards.

    Shapes: claims — what those claims are then whose pods wait; machine — a recorded machine whose
            slices come with `put`; without — as `what-if` takes it.
    """

    name: str
    objects: tuple[Plain, ...]
    pods: tuple[tuple[Plain, Plain], ...]
    put: tuple[Plain, ...] = ()
    claims: tuple[Plain, ...] = ()
    without: tuple[str, ...] = ()
    machine: str = ""


def changes(seed: int) -> Iterator[Change]:
    """Make each kind of change of a cluster of its own."""
    rng = random.Random(seed)
    nodes, slices, pods = _nodes(_RACKS), [each for rack in _RACKS for each in _slices(rack, "570.86.15")], _pods(rng)
    objects = (*map(_priority, _PRIORITIES), *_classes(), *nodes, *slices)

    yield Change("class-takes-older-cards", objects, pods, put=(class_of(NVIDIA),))
    yield Change(
        "driver-release",
        objects,
        _pods(rng, driver=(_NEW_DRIVER,)),
        put=tuple(
            each for rack in _RACKS[:2] for each in _slices(rack, "580.65.6") if each["spec"]["driver"] == NVIDIA
        ),
    )
    spare = _slices("a", "570.86.15", on="rack-a-2")
    yield Change("node-gone", (*objects, _node("a", "rack-a-2"), *spare), pods, without=("node/rack-a-1",))
    yield Change("node-of-a-recorded-machine", objects, pods, put=(_node("new", NEW_NODE),), machine="dgx")
    gone = [made["metadata"]["name"] for _, made in pods if made["metadata"]["name"].endswith(("2", "5"))]
    yield Change("pods-gone", objects, pods, without=tuple(f"pod/team/{name}" for name in gone))
    anywhere = [
        {**made, "spec": {"devices": {"requests": made["spec"]["devices"]["requests"]}}}
        for made, _ in pods
        if "constraints" in made["spec"]["devices"]
    ]
    yield Change("policy-of-claims", objects, pods, claims=tuple(anywhere))


def _classes() -> tuple[Plain, ...]:
    network = class_of("dra.net", name="nic")
    ours = (
        class_of("topobus.dev", expression=f"device.driver == 'topobus.dev' && {_of_class(each)}", name=f"new-{each}")
        for each in ("gpu", "nic")
    )
    return class_of(NVIDIA, expression=_HOPPER), network, *ours


def _priority(name: str) -> Plain:
    """Describe a priority for which no pod is evicted."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": _PRIORITIES[name],
        "preemptionPolicy": "Never",
    }


def _of_class(name: str) -> str:
    return f"device.attributes['topobus.dev'].class == '{name}'"


def _node(rack: str, name: str) -> Plain:
    return node(name, labels={"rack": rack}, cpu="64")


def _nodes(racks: Sequence[str]) -> tuple[Plain, ...]:
    return tuple(_node(rack, f"rack-{rack}-1") for rack in racks)


def _slices(rack: str, release: str, *, on: str = "") -> tuple[Plain, Plain]:
    """Describe 12 GPUs, of which three are older, and 12 NICs, five of them under roots of GPUs."""
    name = on or f"rack-{rack}-1"
    gpus = nvidia_gpus(12)
    for index, gpu in enumerate(gpus):
        gpu["attributes"]["driverVersion"] = {"version": release}
        if index < 3:
            gpu["attributes"]["architecture"] = {"string": "Ampere"}
    return slice_of(NVIDIA, name, gpus), slice_of("dra.net", name, interfaces(12, first_root=7))


def _pods(rng: random.Random, driver: tuple[str, ...] = ()) -> tuple[tuple[Plain, Plain], ...]:
    """Make claims with their pods, by falling priority. GPUs alone are to have a driver."""
    racks = [rack for rack in (*_RACKS, "new") for _ in range(_PODS_OF_A_RACK)]
    wishes = sorted(((rng.choice(list(_PRIORITIES)), rack, rng.random()) for rack in racks), key=_rank)
    return tuple(
        _pair(f"job-{number:03}", rack, priority, draw, driver if rack != "new" else ())
        for number, (priority, rack, draw) in enumerate(wishes)
    )


def _rank(wish: tuple[str, str, float]) -> tuple[int, float]:
    return -_PRIORITIES[wish[0]], wish[2]


def _pair(name: str, rack: str, priority: str, draw: float, driver: tuple[str, ...]) -> tuple[Plain, Plain]:
    gpu, nic = ("new-gpu", "new-nic") if rack == "new" else (NVIDIA, "nic")
    count = 1 + int(draw * 1000) % 3
    if draw < 0.25:
        made = claim(name, asks(gpu, count, *driver, name="gpu"))
    elif draw < 0.85:
        made = claim(name, asks(gpu, 1, name="gpu"), asks(nic, 1, name="nic"), constraints=(_SAME_ROOT,))
    else:
        made = claim(name, asks(nic, count, name="nic"))
    return made, pod(
        name,
        name,
        nodeSelector={"rack": rack},
        priorityClassName=priority,
        priority=_PRIORITIES[priority],
        preemptionPolicy="Never",
    )
