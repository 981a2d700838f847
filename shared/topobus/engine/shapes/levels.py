"""Finds the equal parts of a machine at each level of its tree: pairs of a GPU and a NIC, switches,
NUMA nodes, sockets, quarters, halves, the whole machine. And the parts that an operator adds: so
many devices of each class within one place of a level.

Each part of the tree has GPUs, so a machine without GPUs has none: who asks for half a machine
never gets half of its NICs. A level belongs to the machine, not to its state: a device that is sick
or held is counted like any other, so that a fault changes no shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from topobus.engine.alignment.devices.proximity import Site, site_of
from topobus.values.device import Device
from topobus.values.idset import NodeSet
from topobus.values.own_shapes import OwnShape
from topobus.values.resource_names import SHAPE_LEVELS

__all__ = ["PAIR", "Region", "regions"]

PAIR = SHAPE_LEVELS[0]
_GPU, _NIC = "gpu", "nic"
_TIERS: tuple[Callable[[Site], str | int], ...] = (
    lambda site: site.switch,
    lambda site: site.root,
    lambda site: site.numa if len(NodeSet.from_bits(site.numa)) == 1 else 0,
)
"""How near a NIC is to its GPU, nearest first. Falsy: unknown, and near to nothing."""
_WIDER: tuple[Callable[[Site], str | int], ...] = (*_TIERS, lambda site: site.sockets, lambda _: 1)
"""How near the parts are of a shape that an operator adds. In the last tier all are."""


_Kind = tuple[str, str | None]
"""A class, and a model where models are told apart."""


class Region(Struct, frozen=True, kw_only=True):
    """One part of the machine at a level: at least two devices, or one with CPUs."""

    level: str
    id: str
    """Stable over reboots and unique in the level: a number, or a name of hardware."""
    parts: tuple[Device, ...]
    """By class and name."""
    cpus: int = 0
    """How many CPUs it has beside them."""


class _Place(Struct, frozen=True):
    """A device with where it is."""

    device: Device
    site: Site

    @property
    def order(self) -> tuple[int, int, str, str]:
        """Sort by socket, NUMA node, switch and name. What is unknown comes last."""
        far = 1 << 128
        return self.site.sockets or far, self.site.numa or far, self.site.switch or self.site.root, self.device.name


def regions(
    devices: Iterable[Device], sockets: Mapping[int, int], own_shapes: Sequence[OwnShape] = ()
) -> tuple[tuple[Region, ...], dict[str, str]]:
    """Find the regions of all levels.

    A class belongs to a level where more than half of the level's regions with GPUs have some of it.
    Each shape has as many GPUs as the region with most of them, and as many of the other classes as
    the fullest region with so many GPUs: a region that has fewer is no shape. Of NICs, those that no
    GPU is paired with may be left over, so that a NIC for storage on one socket does not make the
    sockets unequal. Virtual functions without a GPU always are: a NIC has more than its GPUs need.
    Models are told apart where more than half of the regions have some of the same model, so that a
    NIC for management is no part.

    The shapes that an operator adds have what they list, GPUs or not, as often as each place has the
    devices. Their CPUs are counted elsewhere.

    Shapes: devices — whole ones that one holder gets each; sockets — node id to bits of socket ids;
            result — regions, smallest level first and the operator's last, in the machine's order,
            and level to why it, or a part of it, is left out.
    Cost: O(GPUs × NICs).
    """
    places = sorted((_Place(device, site_of(device, sockets)) for device in devices), key=lambda place: place.order)
    of_levels: list[Region] = []
    remarks: dict[str, str] = {}
    paired: set[str] = set()
    partners: dict[str, str] = {}
    for level in SHAPE_LEVELS:
        full, partial = _pairs(places) if level == PAIR else _equal(_groups(places, level), paired)
        if level == PAIR:
            partners = {nic.name: gpu.name for gpu, nic in full.values()}
            paired = {*partners, *partners.values()}
            places = [place for place in places if not _is_function(place.device) or place.device.name in paired]
        of_levels += [
            Region(level=level, id=name, parts=tuple(sorted(parts, key=lambda part: (part.device_class, part.name))))
            for name, parts in full.items()
            if len(parts) > 1
        ]
        if partial:
            remarks[level] = f"{', '.join(partial)}: less than the others of this level have"
    for shape in own_shapes:
        own = _own_regions(shape, places, partners)
        of_levels += own
        if not own:
            remarks[shape.name] = _lack(shape, places)
    return tuple(of_levels), remarks


def _groups(places: Sequence[_Place], level: str) -> dict[str, list[Device]]:
    """Group devices by a level's regions, in the machine's order."""
    if level == "machine":
        return {"0": [place.device for place in places]}
    if level in ("half", "quarter"):
        return _cut(places, 2 if level == "half" else 4)
    groups: dict[str, list[Device]] = {}
    for place in places:
        name = _name(place.site, level)
        if name:
            groups.setdefault(name, []).append(place.device)
    return groups


def _name(site: Site, level: str) -> str:
    if level == "switch":
        return site.switch.replace(":", "-").replace(".", "-")
    bits = site.numa if level == "numa" else site.sockets
    ids = NodeSet.from_bits(bits).ids
    return str(ids[0]) if len(ids) == 1 else ""


def _cut(places: Sequence[_Place], count: int) -> dict[str, list[Device]]:
    """Cut the machine into halves or quarters along the coarsest level whose regions divide so.

    The regions are all of the level, so that a NIC on the node beside its GPU's is in the same part,
    or else those with GPUs. Where half of the cut's parts have no GPU, GPUs are lost or elsewhere.
    """
    for level in ("socket", "numa", "switch"):
        groups = _groups(places, level)
        for names in ([*groups], [name for name, group in groups.items() if _has_gpu(group)]):
            step, rest = divmod(len(names), count)
            if not step or rest or not _is_even(places, level, names, step):
                continue
            parts = [names[start : start + step] for start in range(0, len(names), step)]
            cut = {str(index): [device for name in part for device in groups[name]] for index, part in enumerate(parts)}
            if 2 * sum(map(_has_gpu, cut.values())) > count:
                return cut
    return {}


def _is_even(places: Sequence[_Place], level: str, names: Sequence[str], step: int) -> bool:
    """Say whether all sockets are cut, and no part takes some regions of one socket, or of one NUMA
    node, and some of another.
    """
    sites = {name: place.site for place in places if (name := _name(place.site, level))}
    cut = [[sites[name] for name in names[start : start + step]] for start in range(0, len(names), step)]
    if {site.sockets for site in sites.values()} != {site.sockets for part in cut for site in part}:
        return False
    return _is_undivided([[site.sockets for site in part] for part in cut]) and _is_undivided(
        [[site.numa for site in part] for part in cut]
    )


def _is_undivided(parts: Iterable[Sequence[int]]) -> bool:
    counts = [Counter(part) for part in parts]
    whole = sum(counts, Counter[int]())
    return all(len(part) == 1 or all(part[key] == whole[key] for key in part) for part in counts)


def _equal(
    groups: Mapping[str, Sequence[Device]], paired: Collection[str]
) -> tuple[dict[str, list[Device]], tuple[str, ...]]:
    """Keep what the groups have alike. Return the full groups, and the names of those with less."""
    with_gpus = [group for group in groups.values() if _has_gpu(group)]
    if not with_gpus:
        return {}, ()
    kinds = _kinds(with_gpus)
    taken = {
        name: {
            kind: sorted((device for device in group if _is_of(device, kind)), key=lambda each: each.name not in paired)
            for kind in kinds
        }
        for name, group in groups.items()
    }
    wanted = {kind: max(len(of_kind[kind]) for of_kind in taken.values()) for kind in kinds if kind[0] == _GPU}
    fullest = [of_kind for of_kind in taken.values() if all(len(of_kind[kind]) == wanted[kind] for kind in wanted)]
    for kind in kinds if fullest else ():
        counts = [len(of_kind[kind]) for of_kind in fullest]
        if kind[0] == _NIC:
            in_pairs = max(sum(device.name in paired for device in of_kind[kind]) for of_kind in fullest)
            wanted[kind] = max(min(counts), in_pairs)
        else:
            wanted[kind] = max(counts)
    full = {
        name: [device for kind in kinds for device in of_kind[kind][: wanted[kind]]]
        for name, of_kind in taken.items()
        if fullest and all(len(of_kind[kind]) >= wanted[kind] for kind in kinds)
    }
    return full, tuple(name for name, of_kind in taken.items() if name not in full and any(of_kind.values()))


def _kinds(groups: Collection[Sequence[Device]]) -> list[_Kind]:
    """List the kinds that more than half of the groups have."""
    models: dict[str, set[str]] = {}
    for device in (device for group in groups for device in group):
        models.setdefault(device.device_class, set()).add(device.model)
    kinds: list[_Kind] = []
    for device_class in sorted(models):
        of_models = [
            kind for model in sorted(models[device_class]) if _is_common(groups, kind := (device_class, model))
        ]
        kinds += of_models or [kind for kind in [(device_class, None)] if _is_common(groups, kind)]
    return kinds


def _is_common(groups: Collection[Sequence[Device]], kind: _Kind) -> bool:
    having = sum(any(_is_of(device, kind) for device in group) for group in groups)
    return 2 * having > len(groups)


def _is_of(device: Device, kind: _Kind) -> bool:
    return device.device_class == kind[0] and kind[1] in (None, device.model)


def _has_gpu(group: Iterable[Device]) -> bool:
    return any(device.device_class == _GPU for device in group)


def _is_function(device: Device) -> bool:
    """Say whether it is a virtual function of a NIC."""
    return device.device_class == _NIC and bool(device.parent)


def _pairs(places: Sequence[_Place]) -> tuple[dict[str, list[Device]], tuple[str, ...]]:
    """Give each GPU the nearest NIC that is left, of equally near ones that of the model which is near
    to most GPUs. Kept are, for each model of GPU, the pairs of the most frequent kind. Return them,
    and the names of the GPUs without one.
    """
    gpus = {place.device.name: place for place in places if place.device.device_class == _GPU}
    left = {place.device.name: place for place in places if place.device.device_class == _NIC}
    pairs: dict[str, tuple[tuple[str, int, str], list[Device]]] = {}
    for tier, key in enumerate(_TIERS):
        near = {
            name: [nic.device for nic in left.values() if key(gpu.site) and key(gpu.site) == key(nic.site)]
            for name, gpu in gpus.items()
            if name not in pairs
        }
        spread = Counter(model for nics in near.values() for model in {nic.model for nic in nics})
        for name, nics in near.items():
            free = [nic for nic in nics if nic.name in left]
            if free:
                nic = min(free, key=lambda nic: (-spread[nic.model], nic.model))
                del left[nic.name]
                gpu = gpus[name].device
                pairs[name] = (gpu.model, tier, nic.model), [gpu, nic]
    counts = Counter(kind for kind, _ in pairs.values())
    # The last one stays: the most frequent, of equally frequent ones the nearest.
    most = {kind[0]: kind for kind in sorted(sorted(counts, reverse=True), key=counts.__getitem__)}
    kept = {name: pair for name, (kind, pair) in pairs.items() if kind == most[kind[0]]}
    full = {name.removeprefix(f"{_GPU}-"): kept[name] for name in gpus if name in kept}
    return full, tuple(name for name in gpus if kept and name not in kept)


def _own_regions(shape: OwnShape, places: Sequence[_Place], partners: Mapping[str, str]) -> list[Region]:
    """Find the disjoint regions of an operator's shape, as many as each place of its level has. Each is
    named after its first GPU, or its first device where it has none.
    """
    by_name = {place.device.name: place for place in places}
    own: list[Region] = []
    for group in _groups(places, shape.within).values():
        for near in _sets_of_parts(shape.devices, [by_name[device.name] for device in group], partners):
            first, parts = near[0].device, [place.device for place in near]
            own.append(
                Region(
                    level=shape.name,
                    id=first.name.removeprefix(f"{first.device_class}-"),
                    parts=tuple(sorted(parts, key=lambda part: (part.device_class, part.name))),
                    cpus=shape.cpus,
                )
            )
    return own


def _sets_of_parts(
    wanted: Mapping[str, int], places: Iterable[_Place], partners: Mapping[str, str]
) -> list[list[_Place]]:
    """Take the wanted devices as often as there are: under one switch first, then of one root, one NUMA
    node, one socket, and of what is left.
    """
    left = [place for place in places if place.device.device_class in wanted]
    sets: list[list[_Place]] = []
    for key in _WIDER:
        groups: dict[str | int, list[_Place]] = {}
        for place in left:
            groups.setdefault(key(place.site), []).append(place)
        # What is unknown is near to nothing.
        groups.pop("", None)
        groups.pop(0, None)
        for group in groups.values():
            while all(_count(group, device_class) >= count for device_class, count in wanted.items()):
                near = _nearest(wanted, group, partners)
                sets.append(near)
                for place in near:
                    group.remove(place)
                    left.remove(place)
    return sets


def _nearest(wanted: Mapping[str, int], places: Sequence[_Place], partners: Mapping[str, str]) -> list[_Place]:
    """Take the first GPU, and one after the other what is nearest to that which is taken: of NICs those
    that a taken GPU is paired with.
    """
    near: list[_Place] = []
    for device_class in sorted(wanted, key=lambda each: (each != _GPU, each)):
        for _ in range(wanted[device_class]):
            taken = [place.device.name for place in near]
            distances = [
                (partners.get(place.device.name) not in taken, _distance(place, near), index)
                for index, place in enumerate(places)
                if place.device.device_class == device_class and place.device.name not in taken
            ]
            near.append(places[min(distances)[-1]])
    return near


def _distance(place: _Place, near: Iterable[_Place]) -> int:
    """Return the number of the first tier in which a device is near to another of these."""
    return min(
        (
            tier
            for tier, key in enumerate(_WIDER)
            for other in near
            if key(place.site) and key(place.site) == key(other.site)
        ),
        default=0,
    )


def _count(places: Iterable[_Place], device_class: str) -> int:
    return sum(place.device.device_class == device_class for place in places)


def _lack(shape: OwnShape, places: Sequence[_Place]) -> str:
    """Explain why a machine has no region of an operator's shape."""
    for device_class in sorted(shape.devices):
        if not _count(places, device_class):
            return f"no device of class {device_class} here can be a part"
    counts = {
        name: Counter(device.device_class for device in group) for name, group in _groups(places, shape.within).items()
    }
    wanted = _listed(shape.devices)
    if not counts:
        return f"wanted {wanted} within one {shape.within}, and this machine is not divided so"
    most = max(counts, key=lambda name: sum(min(counts[name][each], count) for each, count in shape.devices.items()))
    has = _listed({device_class: counts[most][device_class] for device_class in shape.devices})
    place = "this one" if shape.within == "machine" else f"{shape.within} {most}"
    return f"wanted {wanted} within one {shape.within}; {place} comes nearest with {has}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[device_class]} {device_class}" for device_class in sorted(counts))
