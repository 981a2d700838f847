"""Exchanges the devices that first fit found on a node for devices that lie closer together, where
no other claim is worse off.

It looks for devices under one PCIe switch, else on one NUMA node, else on one socket, that answer
the same requests. Where there are none it keeps what was found. Claims with an alignment request
are not handled here: this is for claims without one, which would otherwise get one device on each
socket while a pair under one switch is free.

Devices are equal when they answer the same requests by the same alternatives with as many devices
that wait for binding conditions. Mode `compatible` does not use it, because first fit is the
contract there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from topobus.engine.alignment.devices.proximity import site_of
from topobus.engine.alignment.planning.demands import ContainerDemand
from topobus.engine.alignment.planning.locality_domains import Domain, tiers
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.node_view import cpu_of_name
from topobus.engine.allocation.pools import Candidate, gather_pools
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, DeviceId
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.shapes.in_slices import parts_of
from topobus.engine.shapes.shapes import SHAPE_CLASS
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.values.device import Device
from topobus.values.dra_names import CPU_CLASS, class_of_device, is_of_node, node_of_pool
from topobus.values.idset import NodeSet
from topobus.values.request import ContainerKind, Locality, LocalityLevel
from topobus.values.view import NodeView

__all__ = ["bring_closer", "has_closer", "is_closest", "our_devices", "spanned_nodes"]

# The widest first: what is left out last is what is wished most.
_LEVELS = tuple(
    Locality(level=level, is_hard=False) for level in (LocalityLevel.SOCKET, LocalityLevel.NUMA, LocalityLevel.SWITCH)
)
# Places searched for one claim or pod. A place without enough free devices does not count.
_MOST_SEARCHES = 8
# A search within one place that has room ends in some dozen steps; one that does not
# is not worth a claim's waiting.
_STEPS = 1000


@dataclass(frozen=True)
class _Member:
    """One of our devices on this node."""

    id: DeviceId
    device_class: str
    cpu: int | None
    """Its number, where it is a single CPU."""
    parts: tuple[DeviceId, ...] = ()
    """What it consists of: of a shape its parts, else the device itself."""


def has_closer(results: Iterable[AllocationResult]) -> bool:
    """Say whether an exchange is possible: there are two devices at least, and not only CPUs, which
    are chosen as kubelet's static policy does.

    >>> has_closer([])
    False
    """
    own = [granted for result in results for granted in result.devices.results if not granted.admin_access]
    return len(own) > 1 and any(
        class_of_device(granted.driver, granted.device) not in (CPU_CLASS, None) for granted in own
    )


def is_closest(devices: Sequence[Device], nodes: NodeSet) -> bool:
    """Say whether devices lie under one PCIe switch, or on one card, on one NUMA node, so that
    `bring_closer` would find nothing closer.

    Shapes: devices — as their node published them; nodes — all NUMA nodes of the machine. CPUs are
            judged by the whole node: with one among the devices the answer is False.
    Cost: O(devices).

    >>> is_closest([], NodeSet(0))
    False
    """
    if not devices or any(device.device_class == CPU_CLASS for device in devices):
        return False
    sites = [site_of(device, {}) for device in devices]
    places = {site.switch or site.parent for site in sites}
    unknown = nodes if len(nodes) <= 1 else NodeSet()
    common = reduce(lambda shared, device: shared & (device.numa_nodes or unknown), devices, nodes)
    return len(places) == 1 and "" not in places and bool(common)


def bring_closer(
    given: AllocationInput,
    outcome: Allocated,
    view: NodeView,
    compiler: SelectorCompiler,
    *,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Allocated:
    """Find devices that lie closer together than those found and are equal otherwise.

    Return the outcome itself where there are none.

    Order: by level, then the place that is left with the fewest free devices, then its id. So large
            places stay whole for larger claims.
    Errors: raises ValueError for a slice that cannot be read. The search that found the outcome has
            read them all.
    Cost: at most 8 searches of 1,000 steps. None where the devices lie under one switch already.
    """
    if not has_closer(outcome.results):
        return outcome
    pools = gather_pools(given.slices, given.node, given.gates) if given.pools is None else given.pools
    members = {
        member.id: member
        for pool in pools
        for candidate in pool.candidates
        if (member := _member(candidate, given.node.name)) is not None
    }
    granted = [members[device] for device in _granted(outcome.results) if device in members]
    wanted = Counter(member.device_class for member in granted)
    taken = given.usage.holders.keys() | given.usage.excluded.keys()
    free = [
        member
        for member in members.values()
        if member.device_class in wanted and taken.isdisjoint((member.id, *member.parts))
    ]
    demand = ContainerDemand(name="", place=0, kind=ContainerKind.APP)
    steps, searches = outcome.steps, 0
    for domains in tiers(NodeAvailability(view).locality(), demand, _LEVELS)[:-1]:
        places = [domain for domain in domains if domain is not None]
        if any(all(_is_within(member, domain) for member in granted) for domain in places):
            return replace(outcome, steps=steps)
        for domain in _with_room(places, free, wanted):
            if searches >= _MOST_SEARCHES or is_abandoned():
                return replace(outcome, steps=steps)
            searches += 1
            outside = {
                member.id: f"outside {domain.key}" for member in members.values() if not _is_within(member, domain)
            }
            claims = tuple(replace(claim, outside=outside) for claim in given.claims)
            attempt = allocate(
                replace(given, claims=claims, pools=pools),
                compiler,
                step_budget=_STEPS,
                is_brief=True,
                is_abandoned=is_abandoned,
            )
            steps += attempt.steps
            if isinstance(attempt, Allocated) and _answers(attempt.results) == _answers(outcome.results):
                return replace(attempt, steps=steps)
    return replace(outcome, steps=steps)


def our_devices(results: Iterable[AllocationResult], node: str) -> list[DeviceId]:
    """List the granted devices that the node publishes itself, because the place of another vendor's
    device is unknown.
    """
    return [device for device in _granted(results) if is_of_node(device.driver, device.pool, node)]


def spanned_nodes(result: AllocationResult, numa_of: Callable[[DeviceId], NodeSet | None]) -> NodeSet:
    """Name the NUMA nodes of a claim's devices, when no single node has them all.

    Empty when one has, or when the nodes are unknown.

    Shapes: numa_of — the nodes that a device is local to; None when they are unknown.
    """
    homes = [numa_of(device) for device in _granted([result])]
    nodes = [home for home in homes if home]
    common = reduce(lambda shared, other: shared & other, nodes) if nodes else NodeSet()
    return NodeSet() if common or not nodes else reduce(lambda every, other: every | other, nodes)


def _member(candidate: Candidate, node: str) -> _Member | None:
    device_class = class_of_device(candidate.id.driver, candidate.id.device)
    if device_class is None or node_of_pool(candidate.id.pool) != node:
        # The place of another vendor's device is unknown, so it is not exchanged.
        return None
    cpu = cpu_of_name(candidate.id.device) if device_class == CPU_CLASS else None
    names = parts_of(candidate.device) if device_class == SHAPE_CLASS else (candidate.id.device,)
    return _Member(candidate.id, device_class, cpu, tuple(candidate.id._replace(device=name) for name in names))


def _is_within(member: _Member, domain: Domain) -> bool:
    """Say whether a device lies in a place.

    A group of CPUs lies in every place, because the node decides which of its CPUs are taken. A
    shape lies where all of its parts do.
    """
    if member.cpu is not None:
        return domain.cpus is None or member.cpu in domain.cpus
    return all(
        part_class not in domain.devices or part.device in domain.devices[part_class]
        for part in member.parts
        for part_class in [class_of_device(part.driver, part.device) or ""]
    )


def _with_room(places: Sequence[Domain], free: Sequence[_Member], wanted: Mapping[str, int]) -> list[Domain]:
    """List the places with enough free devices of each class, the fullest first."""
    counted = [
        (domain, Counter(member.device_class for member in free if _is_within(member, domain))) for domain in places
    ]
    fitting = [
        (domain, there) for domain, there in counted if all(there[name] >= count for name, count in wanted.items())
    ]
    return [
        domain
        for domain, _ in sorted(fitting, key=lambda place: sum(place[1][name] for name in wanted if name != CPU_CLASS))
    ]


def _granted(results: Iterable[AllocationResult]) -> list[DeviceId]:
    return [
        DeviceId.of(granted) for result in results for granted in result.devices.results if not granted.admin_access
    ]


def _answers(results: Sequence[AllocationResult]) -> list[tuple[list[str], int]]:
    """List the alternatives by which requests are answered, and count the devices that have to be
    waited for.
    """
    return [
        (
            [granted.request for granted in result.devices.results],
            sum(bool(granted.binding_conditions) for granted in result.devices.results),
        )
        for result in results
    ]
