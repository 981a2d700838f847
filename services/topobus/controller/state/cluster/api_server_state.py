"""The cluster home's part of the state: nodes, pods, claims and templates of the API server,
slices, and claims that lost their allocation.

Devices are those of ResourceSlices of any driver. Their holders are taken from claims and, where a
node has a ledger, from the ledger as well. There is no I/O. The copy is the only mutable value, and
belongs to the event loop that runs the controller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from topobus.controller.state.cluster.changed_pods import ChangedPods
from topobus.controller.state.cluster.gated_pods_index import GatedPodsIndex
from topobus.controller.state.cluster.intents_under_way import IntentsUnderWay
from topobus.controller.state.cluster.slice_origin import classes_in, only_known_devices, why_foreign
from topobus.controller.state.cluster_objects import read_object, salvaged_claim
from topobus.controller.state.cluster_state import ClusterState, read_class, read_slice
from topobus.controller.state.links import Links
from topobus.controller.state.taint_index import read_rule
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.values import DeviceId, Node
from topobus.engine.claims.gate import version_number, version_of
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.node_fit import NodeFacts, node_facts
from topobus.engine.scheduling.node_resources import NodeResources
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER, node_of_pool
from topobus.values.errors import ContractError

__all__ = ["ApiServerState", "Key"]

Key = tuple[str, str]
"""Namespace (empty for a kind of the whole cluster) and name."""


class ApiServerState(ClusterState):
    """All copies of the cluster home."""

    def __init__(self) -> None:
        super().__init__()
        self.node_facts: dict[str, NodeFacts] = {}
        self.node_names: tuple[str, ...] = ()
        """All nodes, by name. The same tuple while the names are the same."""
        self.objects: dict[ObjectKey, Stored] = {}
        """Pods and claims by kind. `pods` and `claims` have the same objects."""
        self.pods: dict[Key, Stored] = {}
        self.claims: dict[Key, Stored] = {}
        self.templates: dict[Key, Stored] = {}
        self.room = NodeResources()
        self.unreleased: dict[Key, Stored] = {}
        """Claims as they were when they lost an allocation of ours: their nodes' ledgers must
        release it."""
        self.foreign: dict[str, str] = {}
        """Slices that name our driver and are not from its node, with the reason. They are
        ignored."""
        self.node_objects: dict[str, Stored] = {}
        """Nodes as stored, for the origin of slices and as the objects of events."""
        self._slices: dict[str, Slice] = {}
        self._owners: dict[str, tuple[dict[str, Any], ...]] = {}
        self._of_node: Links[str, str] = Links()
        """Each slice of our driver with the node of its pool."""
        self._devices: Links[Key, DeviceId] = Links()
        """Each claim with the devices that its status allocates whole."""
        self.gated_pods = GatedPodsIndex()
        self._doubles: set[DeviceId] = set()
        self._taken: dict[str, int] = {}
        self.changed_pods = ChangedPods()
        self.under_way = IntentsUnderWay(self.stock)
        self._unreadable: dict[Key, Stored] = {}
        """Claims that cannot be read now, as they were before. They are not reconciled, and keep
        what they held."""

    def put(self, kind: str, version: str, plain: Mapping[str, Any]) -> None:
        """Store an object of the API server. An older version than the stored one is ignored.

        Errors: raises ContractError for an object that cannot be read. It counts as absent then,
        but a claim keeps what it holds.
        """
        key = _key_of(plain)
        if self._is_kept(kind, key, plain):
            return
        try:
            api_object = read_object(kind, version, plain)
            if kind == "Pod":
                self.room.put_pod(key, plain, is_ours=api_object is not None)
            elif kind == "Node":
                self.room.put_node(key[1], (plain.get("status") or {}).get("allocatable"))
            if api_object is None:
                self._drop_pod(key)
                return
            stored = Stored(version_of(api_object), api_object)
            match kind:
                case "Node":
                    self._put_node(stored)
                case "Pod":
                    self.put_pod(key, stored)
                case "ResourceClaim":
                    self.put_claim(key, stored)
                case "ResourceClaimTemplate":
                    self.templates[key] = stored
                case "DeviceClass":
                    self._put_class(key[1], read_class(api_object))
                case "ResourceSlice":
                    self._file_slice(key[1], Slice(key[1], read_slice(api_object)), stored.metadata.owner_references)
                    self._show(key[1])
                case "DeviceTaintRule":
                    self._put_rule(key[1], read_rule(api_object))
        except Exception:
            # Any error is raised again, and the informer's boundary reports it. Here the stored
            # object is removed.
            if kind == "ResourceClaim":
                self._put_unreadable_claim(key, plain)
            else:
                self.drop(kind, key)
            raise

    def _is_kept(self, kind: str, key: Key, plain: Mapping[str, Any]) -> bool:
        """Say whether this version of a pod or claim, or a later one, is stored. Our own writes
        arrive by the watch as well, and a list sends all objects again.
        """
        kept, metadata = self.objects.get(ObjectKey(kind.lower(), *key)), plain.get("metadata")
        return (
            kept is not None
            and isinstance(metadata, Mapping)
            and metadata.get("uid") == kept.uid
            and 0 < version_number(metadata) <= kept.revision
        )

    def drop(self, kind: str, key: Key) -> None:
        """Remove an object, if it is stored."""
        match kind:
            case "Node":
                self.room.drop_node(key[1])
                self.node_objects.pop(key[1], None)
                if self.node_facts.pop(key[1], None) is not None:
                    self.node_names = tuple(sorted(self.node_facts))
                    self.stock.outdate(key[1])
            case "Pod":
                self.room.put_pod(key, None)
                self._drop_pod(key)
            case "ResourceClaim":
                gone = self._pop_claim(key) or self._unreadable.pop(key, None)
                if gone is not None:
                    self._note_loss(key, gone, None)
                    self._taken.pop(gone.uid, None)
                    self._hold(key, None)
            case "ResourceClaimTemplate":
                self.templates.pop(key, None)
            case "DeviceClass":
                if key[1] in self.classes:
                    self._put_class(key[1], None)
            case "ResourceSlice":
                if key[1] in self._slices:
                    self._file_slice(key[1], None, ())
                    self._put_slices((1, key[1]), ())
            case "DeviceTaintRule":
                self._put_rule(key[1], None)

    def _drop_pod(self, key: Key) -> None:
        self.pods.pop(key, None)
        self.objects.pop(ObjectKey("pod", *key), None)
        self.changed_pods.put_pod(key, None)
        self.gated_pods.put_pod(key, None)

    def put_pod(self, key: Key, pod: Stored) -> None:
        """Store a pod."""
        before = self.pods.get(key)
        if before is not None and _is_older(pod, before):
            return
        uses = tuple((key[0], claim_use.claim) for claim_use in pod.pod.uses if claim_use.claim)
        self.pods[key] = self.objects[ObjectKey("pod", *key)] = pod
        self.changed_pods.put_pod(key, uses)
        self.gated_pods.put_pod(key, pod)

    def put_claim(self, key: Key, claim: Stored) -> None:
        """Store a claim."""
        claim.claim.check_status()
        before = self.claims.get(key) or self._unreadable.get(key)
        if before is not None:
            if _is_older(claim, before):
                return
            self._note_loss(key, before, claim)
        self._unreadable.pop(key, None)
        self.claims[key] = self.objects[ObjectKey("resourceclaim", *key)] = claim.unread()
        self._hold(key, claim)

    def _pop_claim(self, key: Key) -> Stored | None:
        self.objects.pop(ObjectKey("resourceclaim", *key), None)
        return self.claims.pop(key, None)

    def _put_unreadable_claim(self, key: Key, plain: Mapping[str, Any]) -> None:
        """Set a claim aside that cannot be read: what it held, or seems to hold now, is neither
        allocated to another claim nor released.
        """
        before = self._pop_claim(key) or self._unreadable.get(key)
        self.changed_pods.put_claim(key)
        if before is None:
            before = Stored(0, salvaged_claim(key, plain))
            self._hold(key, before)
        self._unreadable[key] = before

    def count(self, kind: str) -> int:
        """Count the stored objects of a kind."""
        kept: dict[str, Mapping[Any, object]] = {
            "Node": self.node_facts,
            "Pod": self.pods,
            "ResourceClaim": self.claims,
            "ResourceClaimTemplate": self.templates,
            "DeviceClass": self.classes,
            "ResourceSlice": self._slices,
            "DeviceTaintRule": {str(key): rule for key, rule in self.taints.rules.items()},
        }
        return len(kept.get(kind, {}))

    def pool_node(self, name: str) -> str:
        """Name the node of a slice's pool. Empty when the slice is unknown."""
        published = self._slices.get(name)
        return node_of_pool(published.spec.pool.name) if published is not None else ""

    def claims_of(self, pod: Key) -> tuple[Key, ...]:
        """List the claims that a pod names, or that were made for it."""
        return self.changed_pods.claims_of(pod)

    def is_taken_back(self, key: Key) -> bool:
        """Say whether the allocation that a claim's note records was deallocated.

        The note is no intent then.
        """
        claim, note = self.claims.get(key), self.gated_pods.note(key)
        return claim is not None and note is not None and self._taken.get(claim.uid) == note.number

    def doubles(self) -> tuple[tuple[DeviceId, tuple[Key, ...]], ...]:
        """List the devices that are allocated whole to several claims, because two writers
        allocated at the same moment. A shape counts as the parts that it had when its claim was read.
        """
        return tuple((device, tuple(sorted(self._devices.keys_of(device)))) for device in sorted(self._doubles))

    def intended_on(self, node: str, *, without: str, ignoring: Collection[str] = ()) -> frozenset[Key]:
        """Name the pods that have no node yet and for which this one is intended, by the intents
        and allocations noted in their claims.

        Shapes: without — uid of a pod that is left out; ignoring — uids of claims whose notes are
        ignored.
        """
        noted = self.gated_pods.intended_on(node, lambda key: self._is_note_live(key, ignoring), without=without)
        return noted | self.under_way.intended_on(node, without=without, ignoring=ignoring)

    def _is_note_live(self, key: Key, ignoring: Collection[str]) -> bool:
        claim = self.claims.get(key)
        return claim is not None and claim.uid not in ignoring and not self.is_taken_back(key)

    def settle(self, key: Key) -> None:
        """Count a claim's devices by its stored object again: its intent was written and is in the
        copy, or was not written.
        """
        if self.under_way.drop(key):
            self.stock.put_claim(ObjectKey("resourceclaim", *key), self.claims.get(key) or self._unreadable.get(key))

    def put_inventory(self, inventory: Inventory) -> None:
        """Store a node's inventory.

        Devices for allocation come from its ResourceSlices, not from here.
        """
        before = self._device_names(inventory.node, inventory.device_class)
        super().put_inventory(inventory)
        if self._device_names(inventory.node, inventory.device_class) != before:
            self._show_of_node(inventory.node)

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Remove an inventory."""
        was_known = (node, device_class) in self.inventories
        super().drop_inventory(node, device_class)
        if was_known:
            self._show_of_node(node)

    def describe(self, node: str) -> Node:
        """Describe a node for node selectors.

        A node that the API server has not listed has no labels.
        """
        facts = self.node_facts.get(node)
        return facts.node if facts is not None else Node(node)

    def _put_node(self, node: Stored) -> None:
        facts = node_facts(node.value)
        known_node = self.node_facts.get(facts.node.name)
        if known_node != facts:
            self.node_facts[facts.node.name] = facts
            if known_node is None:
                self.node_names = tuple(sorted(self.node_facts))
            self.stock.outdate(facts.node.name)
        before = self.node_objects.get(facts.node.name)
        self.node_objects[facts.node.name] = node
        if before is None or before.uid != node.uid:
            self._show_of_node(facts.node.name)

    def _file_slice(self, name: str, published: Slice | None, owners: tuple[dict[str, Any], ...]) -> None:
        """Store a slice, or remove it with None."""
        self._slices.pop(name, None)
        self._owners.pop(name, None)
        self.foreign.pop(name, None)
        self._of_node.put(name)
        if published is None:
            return
        self._slices[name], self._owners[name] = published, owners
        if published.spec.driver == DRIVER:
            self._of_node.put(name, (node_of_pool(published.spec.pool.name),))

    def _show_of_node(self, node: str) -> None:
        """Check again whether a node's slices of our driver are its own, as the node's
        publications changed.
        """
        for name in sorted(self._of_node.keys_of(node)):
            self._show(name)

    def _show(self, name: str) -> None:
        """Put a slice into the stock of devices, unless it names our driver and is not from
        its node.
        """
        spec = self._slices[name].spec
        node = node_of_pool(spec.pool.name)
        stored = self.node_objects.get(node)
        uid = stored.uid if stored is not None else None
        named = {device_class: self._device_names(node, device_class) for device_class in classes_in(spec)}
        device_names = {device_class: names for device_class, names in named.items() if names is not None}
        why = why_foreign(spec, self._owners[name], node_uid=uid, device_names=device_names)
        if why:
            self.foreign[name] = why
            self._put_slices((1, name), ())
            return
        self.foreign.pop(name, None)
        self._put_slices((1, name), (Slice(name, only_known_devices(spec, device_names)),))

    def _device_names(self, node: str, device_class: str) -> frozenset[str] | None:
        inventory = self.inventories.get((node, device_class))
        return frozenset([device.name for device in inventory.devices]) if inventory is not None else None

    def _hold(self, key: Key, claim: Stored | None) -> None:
        """Record what a claim holds by its allocation or its intent.

        A note counts until it is withdrawn, even after the allocation was lost: another replica
        that did not see the loss may take it for an intent.
        """
        self.under_way.drop(key)
        self.changed_pods.put_claim(key)
        self.gated_pods.put_claim(key, claim)
        self.stock.put_claim(ObjectKey("resourceclaim", *key), claim)
        before, after = self._devices.targets_of(key), self._devices_of(claim)
        self._devices.put(key, after)
        for device in after.symmetric_difference(before):
            if len(self._devices.keys_of(device)) > 1:
                self._doubles.add(device)
            else:
                self._doubles.discard(device)

    def _devices_of(self, claim: Stored | None) -> frozenset[DeviceId]:
        # A single CPU has no parts, and is in use itself.
        return frozenset(part for device in _devices_of(claim) for part in self.taints.parts.get(device) or (device,))

    def _note_loss(self, key: Key, before: Stored, after: Stored | None) -> None:
        """Record that an allocation of ours was removed: the note that stays is no intent from now
        on.
        """
        note, uid = self.gated_pods.note(key), before.uid
        keeps = after is not None and after.uid == uid and after.claim.is_allocated
        if note is not None and before.claim.is_allocated and not keeps:
            self._taken[uid] = note.number
            self.unreleased[key] = before


def _key_of(plain: Mapping[str, Any]) -> Key:
    metadata = plain.get("metadata")
    fields = metadata if isinstance(metadata, Mapping) else {}
    return str(fields.get("namespace") or ""), str(fields.get("name") or "")


def _is_older(stored: Stored, before: Stored) -> bool:
    """Say whether this version arrived after a newer one of the same object."""
    return stored.uid == before.uid and stored.revision < before.revision


def _devices_of(claim: Stored | None) -> frozenset[DeviceId]:
    """List the devices that a claim's status allocates whole."""
    if claim is None or not claim.claim.is_allocated:
        return frozenset()
    try:
        allocation = claim.claim.allocation
    except ContractError:
        return frozenset()
    results = allocation.devices.results if allocation is not None else ()
    return frozenset(
        DeviceId.of(granted) for granted in results if not granted.admin_access and granted.share_id is None
    )
