"""Domains of locality: what lies within one PCIe switch, NUMA node, socket, L3 cache or group of
linked devices.

The domains are limits to plan within, in tiers: first those that keep every soft wish, last those
that keep only what is hard. A device whose place is unknown is in no domain. On a machine with one
NUMA node everything is on that node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

from msgspec import Struct

from topobus.engine.alignment.devices.proximity import Site
from topobus.engine.alignment.planning.demands import ContainerDemand
from topobus.values.device import Device, LinkClass
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import Locality, LocalityLevel

__all__ = ["Domain", "LocalityTopology", "tiers"]

# A machine has a few dozen places of each level; levels combined, and links that are no clean
# groups, could make more than anyone can try.
_MOST = 512


class Domain(Struct, frozen=True, kw_only=True):
    """One place and the units in it. CPUs that are None, and absent classes, are not limited by
    it.
    """

    key: str
    cpus: CpuSet | None = None
    devices: Mapping[str, frozenset[str]] = {}


class LocalityTopology(Struct, frozen=True, kw_only=True):
    """The place of each CPU and device of a node."""

    devices: Mapping[str, Mapping[str, Device]]
    sites: Callable[[str], Mapping[str, Site]]
    nodes: NodeSet
    online: CpuSet
    by_numa: Mapping[int, int]
    by_socket: Mapping[int, int]
    by_l3: Mapping[int, int]

    def cpus_of(self, nodes: Iterable[int]) -> CpuSet:
        """CPUs on these NUMA nodes."""
        if len(self.nodes) <= 1 and not self.by_numa:
            return self.online
        return CpuSet.from_bits(reduce(lambda bits, node: bits | self.by_numa.get(node, 0), nodes, 0))

    def nodes_of(self, device: Device) -> NodeSet:
        """NUMA nodes that a device is local to.

        Empty when they are unknown and the machine has several.
        """
        return device.numa_nodes or (self.nodes if len(self.nodes) <= 1 else NodeSet())


def tiers(
    topology: LocalityTopology, demand: ContainerDemand, localities: Sequence[Locality]
) -> list[list[Domain | None]]:
    """List the domains to plan within, the most local tier first. None is the whole node.

    Shapes: demand — whose classes must find links in a domain of linked devices; localities — as
            asked, the most important soft one first.
    Result: one list for each tier: all soft localities kept, then one less each time, at last the
            hard ones alone. A list is empty when the node has no such place.
    Errors: raises nothing.
    Cost: at most 512 domains for each tier.
    """
    hard = [locality for locality in localities if locality.is_hard]
    soft = [locality for locality in localities if not locality.is_hard]
    tier_domains: list[list[Domain | None]] = []
    for kept in range(len(soft), -1, -1):
        levels = [locality.level for locality in (*hard, *soft[:kept])]
        tier_domains.append([*_combined(topology, demand, levels)] if levels else [None])
    return tier_domains


def _combined(topology: LocalityTopology, demand: ContainerDemand, levels: Sequence[LocalityLevel]) -> list[Domain]:
    combined: list[Domain] = []
    for level in levels:
        domains = _of_level(topology, demand, level)
        combined = (
            domains
            if level is levels[0]
            else [
                both for domain in combined for other in domains if (both := _intersection(domain, other)) is not None
            ]
        )
        combined = combined[:_MOST]
    return combined


def _intersection(first: Domain, second: Domain) -> Domain | None:
    cpus = first.cpus if second.cpus is None else second.cpus if first.cpus is None else first.cpus & second.cpus
    devices = dict(first.devices)
    for device_class, names in second.devices.items():
        devices[device_class] = names & devices[device_class] if device_class in devices else names
    if not cpus and cpus is not None and not any(devices.values()):
        return None
    return Domain(key=f"{first.key}, {second.key}", cpus=cpus, devices=devices)


def _of_level(topology: LocalityTopology, demand: ContainerDemand, level: LocalityLevel) -> list[Domain]:
    if level is LocalityLevel.LINK:
        return _linked(topology, demand)
    if level is LocalityLevel.SWITCH:
        return _switches(topology)
    rows: list[tuple[str, CpuSet, NodeSet]] = []
    if level is LocalityLevel.NUMA:
        rows = [(f"NUMA node {node}", topology.cpus_of([node]), NodeSet(node)) for node in topology.nodes]
    else:
        name, units = ("socket", topology.by_socket) if level is LocalityLevel.SOCKET else ("L3 cache", topology.by_l3)
        for unit, bits in sorted(units.items()):
            nodes = NodeSet.of(node for node, cpus in topology.by_numa.items() if cpus & bits)
            # A CPU without an L3 of its own has a negative unit, which is its socket's and no real
            # cache.
            if unit >= 0:
                rows.append(
                    (
                        f"{name} {unit}",
                        CpuSet.from_bits(bits),
                        nodes or (topology.nodes if len(topology.nodes) <= 1 else nodes),
                    )
                )
    return [
        Domain(
            key=key,
            cpus=cpus,
            devices={
                device_class: frozenset(
                    name for name, device in devices.items() if not topology.nodes_of(device).isdisjoint(nodes)
                )
                for device_class, devices in topology.devices.items()
            },
        )
        for key, cpus, nodes in rows
    ]


def _switches(topology: LocalityTopology) -> list[Domain]:
    under: dict[str, dict[str, set[str]]] = {}
    nodes: dict[str, NodeSet] = {}
    for device_class, devices in topology.devices.items():
        for name, site in topology.sites(device_class).items():
            key = site.switch or site.parent
            if key:
                under.setdefault(key, {}).setdefault(device_class, set()).add(name)
                nodes[key] = nodes.get(key, NodeSet()) | topology.nodes_of(devices[name])
    return [
        Domain(
            key=f"switch {key}",
            cpus=topology.cpus_of(nodes[key]),
            devices={device_class: frozenset(names.get(device_class, ())) for device_class in topology.devices},
        )
        for key, names in sorted(under.items())
    ]


def _linked(topology: LocalityTopology, demand: ContainerDemand) -> list[Domain]:
    """Groups in which every device is linked with every other.

    Classes that report no links are not limited.
    """
    domains: list[Domain] = []
    for device in demand.devices:
        groups = _cliques(topology.devices.get(device.device_class, {}))
        own_domains = [
            Domain(key=f"linked {device.device_class} {', '.join(sorted(group))}", devices={device.device_class: group})
            for group in sorted(groups, key=sorted)
        ]
        if own_domains:
            domains = (
                [
                    both
                    for first in domains
                    for other in own_domains
                    if (both := _intersection(first, other)) is not None
                ]
                if domains
                else own_domains
            )
    if not demand.devices and (demand.cpus or demand.named_cpus):
        return [Domain(key="no devices")]
    return domains[:_MOST]


def _cliques(devices: Mapping[str, Device]) -> list[frozenset[str]]:
    """The largest groups of devices that are all linked pairwise (Bron
    and Kerbosch, with pivot).
    """
    peers: dict[str, set[str]] = {}
    for name, device in devices.items():
        for link in device.links:
            if link.kind is LinkClass.FABRIC and link.peer in devices and link.peer != name:
                peers.setdefault(name, set()).add(link.peer)
                peers.setdefault(link.peer, set()).add(name)
    cliques: list[frozenset[str]] = []

    def grow(group: frozenset[str], candidates: set[str], done: set[str]) -> None:
        if len(cliques) >= _MOST:
            return
        if not candidates and not done:
            cliques.append(group)
            return
        pivot = max(sorted(candidates | done), key=lambda name: len(peers[name] & candidates))
        for name in sorted(candidates - peers[pivot]):
            grow(group | {name}, candidates & peers[name], done & peers[name])
            candidates.discard(name)
            done.add(name)

    if peers:
        grow(frozenset(), set(peers), set())
        cliques += [frozenset({name}) for name in sorted(devices.keys() - peers.keys())]
    return cliques
