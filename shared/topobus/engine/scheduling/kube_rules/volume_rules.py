"""Where the volumes of a pod let it go: which volumes are not ready on any node, and which volumes
keep the pod off one.

Pure. The data that a choice needs of each node is prepared once.
Source: kube-scheduler's VolumeBinding (GetPodVolumeClaims, FindPodVolumes), VolumeZone,
VolumeRestrictions (ReadWriteOncePod) and NodeVolumeLimits plugins, FindMatchingVolume and
CheckNodeAffinity, 1.36. Left out: free capacity of storage (CSIStorageCapacity), volumes of drivers
that moved out of Kubernetes (CSI migration), disks that a pod names itself, VolumeAttachments of no
pod, and volumes that a pod placed a moment ago is about to get.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from topobus.engine.allocation.node_selectors import selector_matches
from topobus.engine.allocation.values import Node
from topobus.engine.scheduling.kube_rules.label_selectors import selects
from topobus.engine.scheduling.kube_rules.volumes import Attachment, PodVolume, Volume, VolumeClaim, VolumeClass
from topobus.formats.kubernetes.resource import NodeRequirement, NodeSelector
from topobus.values.outcome import Reason

__all__ = ["PodVolumes", "VolumeView", "attachment_of", "read_pod_volumes"]

_ONE_POD = "ReadWriteOncePod"
_NO_PROVISIONER = frozenset({"", "kubernetes.io/no-provisioner"})
_ZONE, _REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
# Labels of volumes that name zones and regions, with the newer name of each.
_PLACES = {
    "failure-domain.beta.kubernetes.io/zone": _ZONE,
    "failure-domain.beta.kubernetes.io/region": _REGION,
    _ZONE: _ZONE,
    _REGION: _REGION,
}
_BETWEEN_ZONES = "__"
# Values that a message shows of a requirement.
_SHOWN = 3

Key = tuple[str, str]


class VolumeView(Protocol):
    """The claims, volumes and classes of a cluster."""

    @property
    def claims(self) -> Mapping[Key, VolumeClaim]:
        """By namespace and name."""
        ...

    @property
    def volumes(self) -> Mapping[str, Volume]:
        """By name."""
        ...

    @property
    def classes(self) -> Mapping[str, VolumeClass]:
        """By name."""
        ...

    def of_class(self, name: str) -> Iterable[Volume]:
        """List the volumes of a class."""
        ...

    def users_of(self, claim: Key) -> Collection[Key]:
        """Name the pods on nodes that use a claim."""
        ...

    def limits_of(self, node: str) -> Mapping[str, int]:
        """Return how many volumes each CSI driver may attach to a node."""
        ...

    def attached_to(self, node: str) -> Collection[Attachment]:
        """List the volumes of CSI drivers that pods on a node use."""
        ...


class _Candidates:
    """Volumes that a claim may be bound to apart from the node: the best first, found by the node's
    labels.

    Shapes: own — the volume that names the claim; with it no other is allowed.
    """

    def __init__(self, own: Volume | None, volumes: Sequence[Volume]) -> None:
        self._own = own
        self._anywhere: list[tuple[int, Volume]] = []
        self._by_label: dict[str, dict[str, list[tuple[int, Volume]]]] = {}
        for place, volume in enumerate(volumes):
            label = _only_label(volume.nodes)
            if label is None:
                self._anywhere.append((place, volume))
            else:
                for value in label.values:
                    self._by_label.setdefault(label.key, {}).setdefault(value, []).append((place, volume))

    def first_on(self, node: Node, chosen: Collection[str]) -> Volume | None:
        """Return the first volume that can be used on a node and is not chosen yet.

        None when there is none.
        """
        if self._own is not None:
            return self._own if _is_usable(self._own, node) else None
        near = [
            volume for key, by_value in self._by_label.items() for volume in by_value.get(node.labels.get(key, ""), ())
        ]
        for _, volume in sorted([*self._anywhere, *near], key=lambda placed: placed[0]):
            if volume.name not in chosen and _is_usable(volume, node):
                return volume
        return None


@dataclass(frozen=True)
class PodVolumes:
    """The volumes of one pod."""

    view: VolumeView
    blockers: tuple[Reason, ...] = ()
    """What is not ready wherever the pod goes."""
    bound: tuple[tuple[VolumeClaim, Volume], ...] = ()
    zoned: frozenset[str] = frozenset()
    """Volumes whose labels about zones count: those of claims that the pod names itself."""
    delayed: tuple[tuple[VolumeClaim, _Candidates], ...] = ()
    """Claims that get their volume where the pod goes, the smallest first."""

    def reasons(self, node: Node) -> Iterator[Reason]:
        """Return all reasons by which volumes keep the pod off a node."""
        for claim, volume in self.bound:
            if not _is_usable(volume, node):
                where = f"PersistentVolume {volume.name} of {claim} can be used on other nodes only"
                yield _reason(
                    "volume-elsewhere",
                    node,
                    f"{where} ({_shown(volume.nodes)})",
                    volume=volume.name,
                    claim=claim.key[1],
                )
        yield from (
            reason for _, volume in self.bound if volume.name in self.zoned for reason in _zone_reasons(volume, node)
        )
        yield from self._unavailable(node)
        yield from self._over_limits(node)

    def _unavailable(self, node: Node) -> Iterator[Reason]:
        """List the claims for which there is no volume here, and none can be made."""
        chosen: set[str] = set()
        for claim, candidates in self.delayed:
            why = ""
            if claim.selected_node:
                why = (
                    f"its volume is being made for node {claim.selected_node}"
                    if claim.selected_node != node.name
                    else self._unmade(claim, node)
                )
            else:
                volume = candidates.first_on(node, chosen)
                if volume is not None:
                    chosen.add(volume.name)
                else:
                    why = self._unmade(claim, node)
            if why:
                yield _reason(
                    "volume-unavailable", node, f"{claim}: {why}", claim=claim.key[1], storage_class=claim.class_name
                )

    def _unmade(self, claim: VolumeClaim, node: Node) -> str:
        """Explain why no volume can be made for a claim here. Empty when one can."""
        storage = self.view.classes[claim.class_name]
        if storage.provisioner in _NO_PROVISIONER:
            return (
                f"no free volume of StorageClass {storage.name} that it could have is here, and none is made for "
                "that class"
            )
        fits = not storage.topologies or any(
            term and all(node.labels.get(key) in values for key, values in term) for term in storage.topologies
        )
        return "" if fits else f"StorageClass {storage.name} makes no volumes here (allowedTopologies)"

    def _over_limits(self, node: Node) -> Iterator[Reason]:
        """List the CSI drivers that may attach no more volumes here."""
        limits = self.view.limits_of(node.name)
        if not limits:
            return
        claims = [*(claim for claim, _ in self.bound), *(claim for claim, _ in self.delayed)]
        wanted = {attachment for claim in claims if (attachment := attachment_of(claim, self.view)) is not None}
        attached = set(self.view.attached_to(node.name))
        for driver in sorted({driver for driver, _ in wanted - attached} & limits.keys()):
            new, present = (sum(each == driver for each, _ in volumes) for volumes in (wanted - attached, attached))
            if new + present > limits[driver]:
                text = (
                    f"CSI driver {driver} may attach {limits[driver]} volumes there, {present} are, and the pod "
                    f"has {new} more"
                )
                over = new + present - limits[driver]
                yield _reason(
                    "volume-limit",
                    node,
                    text,
                    driver=driver,
                    wanted=new,
                    attached=present,
                    limit=limits[driver],
                    hindrances=over,
                )


def read_pod_volumes(pod: Key, uid: str, volumes: Sequence[PodVolume], view: VolumeView) -> PodVolumes:
    """Look up a pod's volumes.

    Cost: for each claim that has no volume yet one look at each volume of its class.
    """
    blockers: list[Reason] = []
    bound: dict[Key, tuple[VolumeClaim, Volume]] = {}
    delayed: dict[Key, VolumeClaim] = {}
    zoned: set[str] = set()
    for wanted in volumes:
        key = (pod[0], wanted.claim)
        claim = view.claims.get(key)
        blocker = _blocker(wanted, key, claim, pod, uid, view)
        if blocker is not None or claim is None:
            blockers += [blocker] if blocker is not None else []
        elif claim.is_bound:
            bound[key] = (claim, view.volumes[claim.volume])
            zoned |= set() if wanted.is_ephemeral else {claim.volume}
        else:
            delayed[key] = claim
    by_size = sorted(delayed.values(), key=lambda claim: (claim.size, claim.key))
    return PodVolumes(
        view,
        tuple(blockers),
        tuple(bound.values()),
        frozenset(zoned),
        tuple((claim, _candidates(claim, view)) for claim in by_size),
    )


def attachment_of(claim: VolumeClaim, view: VolumeView) -> Attachment | None:
    """Name the volume that has to be attached for a claim.

    None when it belongs to no CSI driver, as far as is known. A claim without a volume counts for
    the driver that will make it.
    """
    volume = view.volumes.get(claim.volume) if claim.volume else None
    if volume is not None:
        return volume.attachment
    storage = view.classes.get(claim.class_name)
    return (
        (storage.provisioner, f"{claim.key[0]}/{claim.key[1]}")
        if storage is not None and storage.provisioner not in _NO_PROVISIONER
        else None
    )


def _blocker(
    wanted: PodVolume,
    key: Key,
    claim: VolumeClaim | None,
    pod: Key,
    uid: str,
    view: VolumeView,
) -> Reason | None:
    """Explain why a pod cannot use a claim on any node. None when it can."""
    named = f"PersistentVolumeClaim {key[0]}/{key[1]}"
    if claim is None:
        why = f"there is no {named}" if not wanted.is_ephemeral else f"{named} is not made yet"
        return _blocked("volume-claim-missing", wanted, why)
    if claim.is_lost:
        return _blocked("volume-claim-lost", wanted, f"{named} has lost its PersistentVolume {claim.volume}")
    if claim.is_deleting:
        return _blocked("volume-claim-deleting", wanted, f"{named} is being deleted")
    if wanted.is_ephemeral and uid not in claim.controllers:
        return _blocked(
            "volume-claim-of-another", wanted, f"{named} was not made for this pod: another object of that name exists"
        )
    if not claim.is_bound:
        storage = view.classes.get(claim.class_name)
        if claim.volume:
            return _blocked(
                "volume-claim-unbound",
                wanted,
                f"{named} is not bound yet to PersistentVolume {claim.volume}, which it names",
            )
        if storage is None or not storage.is_delayed:
            how = "it names no StorageClass" if not claim.class_name else f"there is no StorageClass {claim.class_name}"
            how = (
                how if storage is None else f"StorageClass {storage.name} binds at once (Immediate), whatever pod comes"
            )
            return _blocked("volume-claim-unbound", wanted, f"{named} is not bound to a volume yet, and {how}")
    elif claim.volume not in view.volumes:
        return _blocked(
            "volume-missing", wanted, f"{named} is bound to PersistentVolume {claim.volume}, which does not exist"
        )
    users = (
        sorted(user for user in view.users_of(key) if user != pod)
        if _ONE_POD in claim.access and not wanted.is_ephemeral
        else []
    )
    if users:
        return _blocked(
            "volume-in-use", wanted, f"{named} is for one pod ({_ONE_POD}), and pod {'/'.join(users[0])} uses it"
        )
    return None


def _candidates(claim: VolumeClaim, view: VolumeView) -> _Candidates:
    """Find the volumes that a claim may be bound to apart from the node: the one that names it, or
    the free ones, the smallest first, then by name.
    """
    own: list[Volume] = []
    free: list[Volume] = []
    for volume in view.of_class(claim.class_name):
        if (
            volume.is_deleting
            or volume.size < claim.size
            or (volume.mode, volume.attributes_class) != (claim.mode, claim.attributes_class)
        ):
            continue
        if volume.is_for(claim):
            own.append(volume)
        elif volume.claim is None and volume.is_available and claim.access <= volume.access:
            free += [volume] if claim.selector is None or selects(claim.selector, volume.labels) else []
    return _Candidates(
        min(own, key=lambda volume: volume.name, default=None),
        sorted(free, key=lambda volume: (volume.size, volume.name)),
    )


def _zone_reasons(volume: Volume, node: Node) -> Iterator[Reason]:
    """List the labels about zones and regions of a volume that a node does not match.

    A node that has none of them is in a cluster of one zone.
    """
    if not any(label in node.labels for label in _PLACES):
        return
    for label, newer in _PLACES.items():
        values = [value.strip() for value in volume.labels.get(label, "").split(_BETWEEN_ZONES)]
        place = node.labels.get(label, node.labels.get(newer))
        # A label that names an empty zone cannot be read, and excludes no node.
        if all(values) and place not in values:
            have = f"in {place}" if place is not None else "in none"
            text = f"PersistentVolume {volume.name} is in {label} {', '.join(values)}, the node is {have}"
            yield _reason("volume-zone", node, text, volume=volume.name, label=label)


def _is_usable(volume: Volume, node: Node) -> bool:
    """Say whether a volume can be used on a node.

    Only labels count, as in CheckNodeAffinity, so a term that names nodes holds nowhere.
    """
    return volume.nodes is None or selector_matches(volume.nodes, Node("", node.labels))


def _only_label(selector: NodeSelector | None) -> NodeRequirement | None:
    """Return the one label of which a selector wants one of several values, as local volumes have
    it.

    None for any other selector.
    """
    terms = selector.node_selector_terms if selector is not None else ()
    if len(terms) != 1 or terms[0].match_fields or len(terms[0].match_expressions) != 1:
        return None
    requirement = terms[0].match_expressions[0]
    return requirement if requirement.operator == "In" else None


def _shown(selector: NodeSelector | None) -> str:
    """Write for a person where a volume can be used: the first requirement, and that there are
    more.
    """
    terms = selector.node_selector_terms if selector is not None else ()
    requirements = [requirement for term in terms for requirement in (*term.match_expressions, *term.match_fields)]
    if not requirements:
        return "on none"
    first = requirements[0]
    values = ", ".join(first.values[:_SHOWN]) + (", ..." if len(first.values) > _SHOWN else "")
    return " ".join(filter(None, (first.key, first.operator, values))) + (", and more" if len(requirements) > 1 else "")


def _blocked(code: str, wanted: PodVolume, why: str) -> Reason:
    return Reason(
        code=code, message=f"volume {wanted.name}: {why}", facts={"volume": wanted.name, "claim": wanted.claim}
    )


def _reason(code: str, node: Node, why: str, **facts: str | int) -> Reason:
    return Reason(code=code, message=f"node {node.name}: {why}", facts={"node": node.name, **facts})
