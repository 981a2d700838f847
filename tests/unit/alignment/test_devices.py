"""Promises of the choice of devices: exact goals in their order, deterministic, bounded."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import structs

from topobus.engine.alignment.devices.device_choice import choose_devices, split_by_affinity
from topobus.engine.alignment.devices.device_groups import Links
from topobus.engine.alignment.devices.proximity import Site, matching, site_of
from topobus.values.device import Device, Link, LinkClass
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.idset import NodeSet
from topobus.values.pci import PciAddress

SOCKETS = {node: 1 << node // 2 for node in range(8)}


def gpu(place: int, *links: tuple[int, float], per_switch: int = 2, nodes: str | None = "") -> Device:
    """GPU number so-and-so; two a switch, two switches a NUMA node, two nodes a socket."""
    switch = place // per_switch
    return Device(
        name=f"gpu-{place:02d}",
        device_class="gpu",
        numa_nodes=None if nodes is None else NodeSet.parse(nodes) or NodeSet(switch // 2 % 8),
        pcie_root=f"root-{switch}",
        pcie_switch=PciAddress(0, switch + 1, 0, 0) if per_switch else None,
        links=tuple(Link(peer=f"gpu-{peer:02d}", bandwidth_gbps=speed) for peer, speed in links),
    )


def sites(devices: list[Device]) -> dict[str, Site]:
    """Where they sit."""
    return {device.name: site_of(device, SOCKETS) for device in devices}


def test_choose_devices_takes_the_widest_bottleneck_when_links_differ() -> None:
    """One slow pair spoils a set, however fast the other pairs are."""
    devices = [
        gpu(0, (1, 900.0), (2, 900.0)),
        gpu(1, (0, 900.0)),
        gpu(2, (0, 900.0)),
        gpu(4, (5, 50.0), (6, 50.0)),
        gpu(5, (6, 50.0)),
        gpu(6),
    ]

    choice = choose_devices(devices, sites(devices), 3)

    assert choice.names == ("gpu-04", "gpu-05", "gpu-06")
    assert choice.bottleneck is LinkClass.FABRIC


def test_choose_devices_takes_the_most_bandwidth_when_bottlenecks_tie() -> None:
    """Among sets with the same bottleneck the total of link speeds decides."""
    devices = [gpu(0, (2, 100.0), (4, 100.0)), gpu(2, (4, 100.0)), gpu(4, (6, 400.0)), gpu(6)]

    assert choose_devices(devices, sites(devices), 2).names == ("gpu-04", "gpu-06")


def test_choose_devices_counts_a_degraded_device_as_a_last_resort() -> None:
    """A degraded device is taken only when the healthy ones are too few."""
    devices = [structs.replace(gpu(0), health=DeviceHealth(state=HealthState.DEGRADED)), gpu(1), gpu(2)]

    assert choose_devices(devices, sites(devices), 2).names == ("gpu-01", "gpu-02")
    assert len(choose_devices(devices, sites(devices), 3).names) == 3


def test_choose_devices_takes_as_few_degraded_ones_as_it_can_when_healthy_ones_are_too_few() -> None:
    """Whatever the places, another degraded device is never taken for a healthy one."""
    sick = [
        structs.replace(gpu(place, per_switch=1), health=DeviceHealth(state=HealthState.DEGRADED)) for place in range(4)
    ]
    devices = [*sick, gpu(4, per_switch=1), gpu(5, per_switch=1)]

    assert choose_devices(devices, sites(devices), 4).names == ("gpu-00", "gpu-01", "gpu-04", "gpu-05")


def test_links_between_are_the_worst_when_nothing_is_known() -> None:
    """Two devices without any known place are as far apart as can be."""
    device, other = Device(name="a", device_class="gpu"), Device(name="b", device_class="gpu")

    assert Links([device, other]).between("a", "b", site_of(device, {}), site_of(other, {})).rank == list(
        LinkClass
    ).index(LinkClass.SYSTEM)


@pytest.mark.parametrize("count", range(1, 8))
def test_choose_devices_is_exact_when_compared_with_all_subsets(count: int) -> None:
    """On irregular machines the choice has the best bottleneck and bandwidth of all subsets, and
    the smallest names that have.
    """
    drawn = random.Random(count)
    for _ in range(20):
        speeds = {pair: drawn.choice([0, 0, 25, 50, 100]) for pair in itertools.combinations(range(7), 2)}
        devices = [
            gpu(
                place,
                *((b, float(speed)) for (a, b), speed in speeds.items() if a == place and speed),
                nodes="0",
                per_switch=7,
            )
            for place in range(7)
        ]
        where = sites(devices)
        known_links = Links(devices)

        def goal(
            subset: tuple[Device, ...], where: dict[str, Site] = where, graph: Links = known_links
        ) -> tuple[int, float, tuple[str, ...]]:
            links = [
                graph.between(a.name, b.name, where[a.name], where[b.name])
                for a, b in itertools.combinations(subset, 2)
            ]
            return (
                max((link.rank for link in links), default=0),
                -sum(link.bandwidth_gbps for link in links),
                tuple(sorted(device.name for device in subset)),
            )

        best = min(goal(subset) for subset in itertools.combinations(devices, count))
        choice = choose_devices(devices, where, count)

        assert choice.is_exact
        assert choice.names == best[2]


def test_choose_devices_answers_the_same_when_devices_come_in_any_order() -> None:
    """The order in which devices are listed does not matter."""
    devices = [gpu(place) for place in range(8)]
    answers = set()
    for seed in range(10):
        shuffled = random.Random(seed).sample(devices, k=len(devices))
        answers.add(choose_devices(shuffled, sites(shuffled), 3).names)

    assert len(answers) == 1


def test_choose_devices_stays_bounded_when_there_are_512_virtual_functions() -> None:
    """Alike devices form classes, so hundreds of them are chosen from at once."""
    devices = [
        Device(
            name=f"nic-{card}-{place:02d}",
            device_class="nic",
            parent=f"nic-{card}",
            numa_nodes=NodeSet(card // 4),
            pcie_root=f"root-{card}",
        )
        for card in range(8)
        for place in range(64)
    ]

    choice = choose_devices(devices, sites(devices), 4)

    assert choice.names == tuple(f"nic-0-{place:02d}" for place in range(4))


def test_split_by_affinity_counts_any_shared_node_when_a_device_spans_nodes() -> None:
    """A device on two nodes is aligned when one of them is in the mask.

    One that tells no node is apart.
    """
    devices = [gpu(0, nodes="0-1"), gpu(2, nodes="2"), gpu(4, nodes=None)]

    split = split_by_affinity(devices, NodeSet(1))

    assert (split.aligned, split.unaligned, split.no_affinity) == (("gpu-00",), ("gpu-02",), ("gpu-04",))


def test_matching_pairs_the_closest_first_when_places_nest() -> None:
    """Pairs are made under the same switch first, then under the same
    root, NUMA node and socket.
    """
    here, there, far = Site("s1", "r1", 1, 1), Site("s2", "r1", 1, 1), Site("s3", "r3", 2, 2)

    assert matching({here: 2, far: 1}, {here: 1, there: 1, far: 1}, 3) == (2, 1, 0, 0, 0)
