"""A snapshot as a scheduler sees it: devices with their holders, nodes with what is left of them,
pods and volumes as the rules about other pods see them.

Objects can be replaced and removed again, so that a change is tried on the same view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from topobus.controller.snapshots.rules.placed_pods import PlacedPods
from topobus.controller.snapshots.rules.snapshot import (
    EXTENDED_RESOURCE,
    TAINT_RULES,
    Snapshot,
    gates_on,
    has_broken_taint_rules,
)
from topobus.controller.snapshots.rules.volume_index import VOLUME_KINDS, VolumeIndex
from topobus.controller.state.cluster_objects import read_object
from topobus.controller.state.cluster_state import ClusterState, read_class
from topobus.controller.state.slice_index import Origin
from topobus.controller.state.taint_index import read_rule
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.tolerations import TaintRule
from topobus.engine.allocation.values import DeviceId, Node
from topobus.engine.claims.extended_resources import ClassName
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.node_fit import NodeFacts, node_facts
from topobus.engine.scheduling.node_resources import NodeResources
from topobus.formats.kubernetes.resource import SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.quantity import Quantity

__all__ = ["ClusterView", "Edits", "Key", "Place", "Plain", "key_of", "names_of", "shown"]

Key = tuple[str, str]
"""Namespace (empty for a kind of the whole cluster) and name."""
Place = tuple[str, Key]
"""Kind and key of an object."""
Plain = Mapping[str, Any]
Edits = Mapping[Place, Plain | None]
"""Objects as they would be; None for one that would be gone."""


class ClusterView(ClusterState):
    """The objects of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(gates_on(snapshot.server.gates))
        self.server = snapshot.server
        self._heeds_rules = self.server.gates.get(TAINT_RULES, True) and not has_broken_taint_rules(self.server)
        self.unseen = snapshot.unseen
        self.objects: dict[Place, Plain] = {}
        self.faults: dict[Place, str] = {}
        """What is wrong with objects that cannot be read. They count as absent."""
        self.node_facts: dict[str, NodeFacts] = {}
        self.claims: dict[Key, Stored] = {}
        self.room = NodeResources()
        self.placed = PlacedPods()
        self.volumes = VolumeIndex()
        self._slices: dict[str, Slice] = {}
        for plain in snapshot.items:
            self.put(plain)

    @property
    def node_names(self) -> tuple[str, ...]:
        """All nodes, by name."""
        return tuple(sorted(self.node_facts))

    @property
    def slices(self) -> Mapping[str, Slice]:
        """All ResourceSlices that can be read, by name."""
        return self._slices

    @property
    def serves_resources(self) -> bool:
        """Whether kube-scheduler makes claims for extended resources that classes serve."""
        return self.server.gates.get(EXTENDED_RESOURCE, True)

    def of_kind(self, kind: str) -> Iterator[tuple[Key, Plain]]:
        """List the objects of a kind."""
        return ((key, plain) for (each_kind, key), plain in self.objects.items() if each_kind == kind)

    def pod(self, key: Key) -> Pod | None:
        """Return a pod. None when there is none of that name."""
        plain = self.objects.get(("Pod", key))
        return Pod(_whole(plain)) if plain is not None else None

    def claim(self, key: Key) -> Claim | None:
        """Return a claim. None when there is none of that name."""
        stored = self.claims.get(key)
        return stored.claim if stored is not None else None

    def template(self, key: Key) -> ApiObject | None:
        """Return a claim template. None when there is none of that name."""
        plain = self.objects.get(("ResourceClaimTemplate", key))
        return read_object("ResourceClaimTemplate", _version(plain), plain) if plain is not None else None

    def class_names(self) -> tuple[ClassName, ...]:
        """List the classes by name, with the extended resources that they serve."""
        return tuple(
            ClassName(name, spec.extended_resource_name or "", self._created(("DeviceClass", ("", name))))
            for name, spec in sorted(self.classes.items())
        )

    def labels_of(self, namespace: str) -> Mapping[str, str]:
        """Return the labels of a namespace. Empty when it was not read."""
        labels: Mapping[str, str] = self._metadata(("Namespace", ("", namespace))).get("labels") or {}
        return labels

    def describe(self, node: str) -> Node:
        """Describe a node for node selectors."""
        facts = self.node_facts.get(node)
        return facts.node if facts is not None else Node(node)

    def users_of(self, claim: Claim) -> tuple[Key, ...]:
        """Name the pods that have reserved a claim."""
        namespace = claim.owner.namespace
        return tuple((namespace, user.name) for user in claim.consumers if user.resource == "pods")

    def released(self, key: Key) -> dict[Place, Plain | None]:
        """Return the edits that take a pod off its node, with the allocations of the claims that no
        other pod has reserved. It takes nothing then.

        Errors: raises ContractError for a pod that cannot be read.
        """
        place = ("Pod", key)
        spec = {name: value for name, value in self.objects[place]["spec"].items() if name != "nodeName"}
        edits: dict[Place, Plain | None] = {place: {**self.objects[place], "spec": spec}}
        for claim in self.claims_of(key):
            place = ("ResourceClaim", (key[0], claim.owner.name))
            if set(self.users_of(claim)) <= {key}:
                edits[place] = {**self.objects[place], "status": {}}
        return edits

    def claims_of(self, key: Key) -> tuple[Claim, ...]:
        """List the claims of a pod that are there.

        Errors: raises ContractError for a pod that cannot be read.
        """
        pod = self.pod(key)
        claims = (self.claim((key[0], use.claim)) for use in (pod.uses if pod is not None else ()))
        return tuple(claim for claim in claims if claim is not None)

    def holders_on(self, node: str) -> dict[Key, tuple[DeviceId, ...]]:
        """Map each claim that holds devices which a node can reach to these devices."""
        held: dict[Key, list[DeviceId]] = {}
        usage = self.stock.usage_for(node, (), {})
        for device, holder in usage.holders.items():
            namespace, _, name = holder.removeprefix("claim ").partition("/")
            held.setdefault((namespace, name), []).append(device)
        # Of a device that claims share the usage has amounts without holders.
        for key, stored in self.claims.items() if usage.consumed else ():
            shares = [device for device in _shared_by(stored) if device in usage.consumed]
            if shares:
                held.setdefault(key, []).extend(shares)
        return {key: tuple(sorted(devices)) for key, devices in sorted(held.items())}

    @contextmanager
    def changed(self, edits: Edits) -> Iterator[None]:
        """Look at the cluster as it would be after some edits. They end with the block."""
        before = {place: self.objects.get(place) for place in edits}
        self._apply(edits)
        try:
            yield
        finally:
            self._apply(before)

    def put(self, plain: Plain) -> None:
        """Store an object of the API server. One that cannot be read is among the `faults`."""
        kind, key = str(plain.get("kind")), key_of(plain)
        self.objects[kind, key] = plain
        self.faults.pop((kind, key), None)
        try:
            self._read(kind, key, plain)
        except ContractError as err:
            self.faults[kind, key] = err.message

    def drop(self, kind: str, key: Key) -> None:
        """Remove an object."""
        if self.objects.pop((kind, key), None) is None:
            return
        match kind:
            case "Node":
                self.node_facts.pop(key[1], None)
                self.room.drop_node(key[1])
                self.stock.outdate(key[1])
            case "Pod":
                self._place(key, None)
            case "ResourceClaim":
                self.claims.pop(key, None)
                self.stock.put_claim(ObjectKey("resourceclaim", *key), None)
            case "DeviceClass":
                self._put_class(key[1], None)
            case "ResourceSlice":
                self._slices.pop(key[1], None)
                self._put_slices((1, key[1]), ())
            case "DeviceTaintRule":
                self._put_rule(key[1], None)
            case kind if kind in VOLUME_KINDS:
                self.volumes.drop(kind, key)

    def _apply(self, edits: Edits) -> None:
        for (kind, key), plain in edits.items():
            if plain is None:
                self.drop(kind, key)
            else:
                self.put(plain)

    def _read(self, kind: str, key: Key, plain: Plain) -> None:
        if kind in VOLUME_KINDS:
            self.volumes.put(kind, key, plain)
            return
        if kind == "Pod":
            self._place(key, plain)
            return
        if kind not in ("Node", "ResourceClaim", "DeviceClass", "ResourceSlice", "DeviceTaintRule"):
            return
        api_object = read_object(kind, _version(plain), plain)
        assert api_object is not None  # only pods are left out
        match kind:
            case "Node":
                self.node_facts[key[1]] = node_facts(api_object)
                self.room.put_node(key[1], (plain.get("status") or {}).get("allocatable"))
                self.stock.outdate(key[1])
            case "ResourceClaim":
                stored = self.claims[key] = Stored(1, api_object)
                self.stock.put_claim(ObjectKey("resourceclaim", *key), stored)
                if api_object.status.get("allocation") and not self.stock.holds(ObjectKey("resourceclaim", *key)):
                    # One that cannot be read stays, and is among the faults.
                    stored.claim.check_status()
            case "DeviceClass":
                self._put_class(key[1], read_class(api_object))
            case "ResourceSlice":
                spec = read_as(api_object.spec, SliceSpec, where=shown(kind, key))
                _check_amounts(spec, shown(kind, key))
                self._slices[key[1]] = Slice(key[1], spec)
                self._put_slices((1, key[1]), (self._slices[key[1]],))
            case "DeviceTaintRule" if self._heeds_rules:
                self._put_rule(key[1], read_rule(api_object))

    def _place(self, key: Key, plain: Plain | None) -> None:
        """Count a pod where it is. One without a node has volumes and takes nothing."""
        self.room.put_pod(key, plain)
        self.placed.put_pod(key, plain)
        self.volumes.put_pod(key, plain)

    def _put_slices(self, origin: Origin, slices: tuple[Slice, ...]) -> None:
        # The taint that keeps kube-scheduler from devices of ours stays: it is one of its reasons.
        self.stock.put_slices(origin, self.taints.put(origin, slices))

    def _put_rule(self, key: Any, rule: TaintRule | None) -> None:
        for origin, slices in self.taints.put_rule(key, rule).items():
            self.stock.put_slices(origin, slices)

    def _created(self, place: Place) -> str:
        return str(self._metadata(place).get("creationTimestamp") or "")

    def _metadata(self, place: Place) -> Mapping[str, Any]:
        return self.objects.get(place, {}).get("metadata") or {}


def names_of(view: ClusterView, kind: str, namespace: str) -> Collection[str]:
    """Name the objects of a kind in a namespace."""
    return [key[1] for key, _ in view.of_kind(kind) if key[0] == namespace]


def key_of(plain: Plain) -> Key:
    """Name an object by namespace and name."""
    metadata = plain.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _check_amounts(spec: SliceSpec, where: str) -> None:
    """Make sure that the amounts of devices can be read. All other limits an API server has checked; a
    file may be written by hand, and one wrong amount would end each search that reads it.

    Errors: raises ContractError.
    """
    for device in spec.devices:
        for name, capacity in device.capacity.items():
            problem = _amount_problem(str(capacity.value))
            if problem:
                raise ContractError(f"{where}: device {device.name}: capacity {name}: {problem}")


@lru_cache(maxsize=4096)
def _amount_problem(text: str) -> str:
    """Explain why a text is no amount. Empty when it is one. Devices have few amounts between them."""
    try:
        Quantity.parse(text)
    except ValueError as err:
        return str(err)
    return ""


def _shared_by(stored: Stored) -> list[DeviceId]:
    """List the devices that a claim shares with others. None for a claim that cannot be read."""
    try:
        allocation = stored.claim.allocation
    except ContractError:
        return []
    return [
        DeviceId(granted.driver, granted.pool, granted.device)
        for granted in (allocation.devices.results if allocation is not None else ())
        if granted.share_id is not None
    ]


def _version(plain: Plain) -> str:
    return str(plain.get("apiVersion") or "").rpartition("/")[2]


def _whole(plain: Plain) -> ApiObject:
    """Take an object with all its fields."""
    return ApiObject(
        api_version=str(plain.get("apiVersion") or "v1"),
        kind=str(plain.get("kind")),
        metadata=dict(plain.get("metadata") or {}),
        spec=dict(plain.get("spec") or {}),
        status=dict(plain.get("status") or {}),
    )


def shown(kind: str, key: Key) -> str:
    """Name an object for people: `ResourceClaim default/fast`."""
    return f"{kind} {key[0]}/{key[1]}" if key[0] else f"{kind} {key[1]}"
