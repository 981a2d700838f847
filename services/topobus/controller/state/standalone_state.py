"""The stand-alone home's part of the state: the objects of the store, the users of each claim, and
slices and classes derived from inventories.

There is no I/O. The copy is the only mutable value, and belongs to the event loop that runs the
controller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from topobus.controller.state.age_order import AgeOrder
from topobus.controller.state.claim_users import ClaimUsers
from topobus.controller.state.cluster_state import ClusterState, read_class, read_slice
from topobus.controller.state.inventory_slices import ClassDevices, devices_of_class, slices_of_pool
from topobus.controller.state.pod_links import PodLinks
from topobus.controller.state.shared_values import shape_key
from topobus.controller.state.taint_index import read_rule, silenced
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.values import Node, node_of
from topobus.engine.claims.extended_resources import ClassName
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import owner_pod_uid
from topobus.engine.health.silence import unheard
from topobus.engine.health.strays import without_strays
from topobus.engine.shapes.cpu_places import cpus_left
from topobus.engine.shapes.in_slices import SliceShapes
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.objects import NODE_ANNOTATION
from topobus.formats.kubernetes.resource import DeviceClassSpec
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.device import Inventory
from topobus.values.dra_names import CPU_CLASS, class_of_group, group_of_class, node_of_pool, pool_of_class
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.own_shapes import OwnShape
from topobus.values.resource_names import SHAPE_LEVELS
from topobus.values.view import NodeAlignment

__all__ = ["StandaloneState"]

# The next step of these objects depends only on themselves and on the free devices. All other kinds
# are read for them.
_OWN_KINDS = ("pod", "resourceclaim", "podschedulingcontext")
_OF_SHAPES = {group_of_class(level): built_in_class(level, is_level=True) for level in SHAPE_LEVELS}


class StandaloneState(ClusterState):
    """All copies of the stand-alone home: objects by their key in the store, and slices derived
    from inventories.
    """

    def __init__(self) -> None:
        super().__init__()
        self._described: dict[str, Node] = {}
        self.objects: dict[ObjectKey, Stored] = {}
        self.watched_revision = 0
        """Of the bucket's newest change that the watch has brought; 0 before it, and after the bucket
        was lost."""
        self.shared_epoch = 0
        """Grows with every change of an object that others refer to: classes, templates, slices,
        rules, parameters and nodes, but not claims and pods."""
        self.pod_epoch = 0
        """Grows with every change of a pod."""
        self.claim_set_epoch = 0
        """Grows when a claim is created or deleted, not when it changes."""
        self._in_pool: dict[tuple[str, str], ClassDevices] = {}
        """What each node and class has in its pool."""
        self._shape_keys: dict[str, dict[str, bytes]] = {}
        """By node and class."""
        self._shapes: dict[str, SliceShapes] = {}
        self._left: dict[str, dict[str, int]] = {}
        """By node and group, the CPUs that claims have or can have, as the slices count them."""
        self._built_in: dict[str, DeviceClassSpec] = {}
        self._all_classes: tuple[int, dict[str, DeviceClassSpec]] | None = None
        self._of_kind: dict[str, dict[ObjectKey, Stored]] = {}
        self._claims = AgeOrder()
        self._unsettled = AgeOrder()
        self._links = PodLinks()
        self._classic: set[ObjectKey] = set()
        self.users = ClaimUsers(self.objects)

    def put_machine(self, machine: Machine) -> None:
        """Store a machine."""
        before = self.machines.get(machine.node)
        super().put_machine(machine)
        if before is None or before.node_set != machine.node_set:
            # Devices change, if they lie on NUMA nodes that the machine did not have before or no
            # longer has.
            self._publish(machine.node, self.classes_on(machine.node))

    def put_alignment(self, node: str, alignment: NodeAlignment | None) -> None:
        """Store a node's alignment options, and the slices of the shapes that its operator adds."""
        before = self._shapes_asked_of(node)
        super().put_alignment(node, alignment)
        if self._shapes_asked_of(node) != before:
            self._put_pools(node, ())

    def put_ledger(self, ledger: Ledger) -> None:
        """Store a ledger, and the slices that count the CPUs that it leaves to claims."""
        super().put_ledger(ledger)
        self._count_cpus(ledger.node)

    def drop_ledger(self, node: str) -> None:
        """Remove a ledger."""
        super().drop_ledger(node)
        self._count_cpus(node)

    def put_inventory(self, inventory: Inventory) -> None:
        """Store an inventory, and the slices of its devices."""
        super().put_inventory(inventory)
        self._shape_keys.setdefault(inventory.node, {})[inventory.device_class] = shape_key(inventory)
        self._publish(inventory.node, (inventory.device_class,))
        name = group_of_class(inventory.device_class)
        if name not in self._built_in:
            self._built_in[name] = built_in_class(inventory.device_class)
            self.class_epoch += 1

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Remove an inventory."""
        super().drop_inventory(node, device_class)
        if self._in_pool.pop((node, device_class), None) is not None:
            del self._shape_keys[node][device_class]
            self._put_pools(node, (device_class,))
        name = group_of_class(device_class)
        if name in self._built_in and not any(other_class == device_class for _, other_class in self.inventories):
            del self._built_in[name]
            self.class_epoch += 1

    def note_silence(self, silent: Mapping[tuple[str, str], str]) -> None:
        """Store the services that do not answer, by node and class, with the time of the first
        silence.

        Their devices are Unknown and are not allocated.
        """
        before = self.silent
        super().note_silence(silent)
        changed: dict[str, list[str]] = {}
        for node, device_class in sorted(before.keys() ^ self.silent.keys()):
            if (node, device_class) in self.inventories:
                changed.setdefault(node, []).append(device_class)
        for node, device_classes in changed.items():
            self._publish(node, device_classes)

    def _publish(self, node: str, changed: Collection[str]) -> None:
        """Convert the inventories of these classes, and put the pools that they are in."""
        for device_class in changed:
            self._in_pool[node, device_class] = self._shown(self.inventories[node, device_class])
        self._put_pools(node, changed)

    def _put_pools(self, node: str, changed: Collection[str]) -> None:
        """Put the pools that these classes are in, and those with the shapes and the CPUs if shapes changed:
        the CPUs, which are in a pool of their own, tell the sockets, and may be counted by shapes.
        """
        of_node = {key: self.inventories[node, name] for name, key in self._shape_keys.get(node, {}).items()}
        shapes = self.shared.shapes(of_node, *self._shapes_asked_of(node))
        pools = {pool_of_class(node, device_class) for device_class in changed}
        before = self._shapes.get(node, SliceShapes())
        if shapes != before or (shapes.groups and CPU_CLASS in changed):
            pools.add(node)
        if shapes.groups.keys() != before.groups.keys():
            pools.add(pool_of_class(node, CPU_CLASS))
        self._shapes[node] = shapes
        for pool in sorted(pools):
            self._put_pool(node, pool)
        if not of_node:
            self._shapes.pop(node)
            self._shape_keys.pop(node, None)
            self._left.pop(node, None)

    def _shapes_asked_of(self, node: str) -> tuple[tuple[OwnShape, ...], CpuSet]:
        """Return what the operator adds, and the CPUs that no claim gets."""
        alignment = self.alignments.get(node)
        return (alignment.own_shapes, alignment.reserved_cpus) if alignment is not None else ((), CpuSet())

    def _count_cpus(self, node: str) -> None:
        """Put the slices with shapes again, if others than claims have more or fewer of the CPUs that are
        counted.
        """
        shapes = self._shapes.get(node)
        if shapes is not None and cpus_left(shapes.groups, self.ledgers.get(node)) != self._left[node]:
            self._put_pool(node, node)

    def _put_pool(self, node: str, pool: str) -> None:
        classes = sorted(name for name in self.classes_on(node) if pool_of_class(node, name) == pool)
        of_classes = [self._in_pool[node, name] for name in classes]
        shapes = self._shapes[node]
        cpus = self._in_pool[node, CPU_CLASS].devices if shapes.groups else ()
        left = self._left[node] = cpus_left(shapes.groups, self.ledgers.get(node))
        slices = slices_of_pool(pool, of_classes, shapes, cpus=cpus, left=left)
        self._put_slices((0, pool), slices if classes else ())

    def _shown(self, inventory: Inventory) -> ClassDevices:
        since = self.silent.get((inventory.node, inventory.device_class))
        machine = self.machines.get(inventory.node)
        if machine is not None:
            inventory = without_strays(inventory, machine)
        if since is None:
            return devices_of_class(inventory, self.shared.slice_device)
        return devices_of_class(unheard(inventory, since=since), lambda device: silenced(slice_device(device), since))

    def put_object(self, key: ObjectKey, stored: Stored) -> None:
        """Store an object.

        Errors: raises ContractError for a class, slice or rule that cannot be read, which then
        counts as absent.
        """
        self._drop_derived(key)
        self.shared_epoch += key.kind not in _OWN_KINDS
        self.objects[key] = stored
        self._of_kind.setdefault(key.kind, {})[key] = stored
        if key.kind == "resourceclaim":
            self.stock.put_claim(key, stored)
            self._put_claim(key, stored)
        elif key.kind == "pod":
            self._put_pod(key, stored)
        elif key.kind == "node":
            self._relabel(key.name)
        if key.kind == "deviceclass":
            self._put_class(key.name, read_class(stored.value))
        elif key.kind == "resourceslice":
            self._put_slices((1, key), (Slice(key.name, read_slice(stored.value)),))
        elif key.kind == "devicetaintrule":
            try:
                rule = read_rule(stored.value)
            except ContractError:
                self._put_rule(key, None)
                raise
            self._put_rule(key, rule)

    def _drop_derived(self, key: ObjectKey) -> None:
        """Drop what was derived from a class or slice."""
        if key.kind == "deviceclass":
            self._put_class(key.name, None)
        elif key.kind == "resourceslice":
            self._put_slices((1, key), ())
        elif key.kind in ("resourceclass", "namespace") or key.kind.endswith("parameters"):
            self.stock.free(None)

    def _put_claim(self, key: ObjectKey, claim: Stored) -> None:
        """Put a claim into its order. A changed claim may have a next step."""
        self.claim_set_epoch += key not in self._claims and key not in self._classic
        created = _creation_of(claim)
        if is_classic(claim.value):
            self._classic.add(key)
            self._claims.drop(key)
            self._unsettled.drop(key)
        else:
            self._classic.discard(key)
            self._claims.put(key, created)
            self._unsettled.put(key, created)
        # A copy, as parsed parts of a stored claim stay in memory as long as the claim.
        users = claim.unread().known_consumers if claim.value.status.get("reservedFor") else ()
        self._links.put_claim(
            key, owner_pod_uid(claim.value) if claim.value.metadata.get("ownerReferences") else None, users
        )

    def assume(self, key: ObjectKey, claim: ApiObject) -> None:
        """Count a claim's devices as taken while its next version is being written.

        The stored object stays as it is, until `put_object` or `restore`.
        """
        self.stock.put_claim(key, Stored(0, claim))

    def restore(self, key: ObjectKey) -> None:
        """Count the devices of the stored claim again, as the assumed version was not written."""
        self.stock.put_claim(key, self.objects.get(key))

    def _put_pod(self, key: ObjectKey, pod: Stored | None) -> None:
        """Record which claims a pod uses."""
        self.pod_epoch += 1
        if pod is not None:
            self._links.put_pod(key, pod.uid)
            self.users.put(key, pod)
        else:
            self._links.drop_pod(key)
            self.users.drop(key)

    def drop_object(self, key: ObjectKey) -> Stored | None:
        """Remove an object, and return it."""
        self._drop_derived(key)
        self.shared_epoch += key.kind not in _OWN_KINDS
        if key.kind == "resourceclaim":
            self.stock.put_claim(key, None)
            self._classic.discard(key)
            self._claims.drop(key)
            self._unsettled.drop(key)
            self._links.put_claim(key, None, ())
            self.claim_set_epoch += 1
        elif key.kind == "pod":
            self._put_pod(key, None)
        elif key.kind == "devicetaintrule":
            self._put_rule(key, None)
        elif key.kind == "node":
            self._relabel(key.name)
        self._of_kind.get(key.kind, {}).pop(key, None)
        return self.objects.pop(key, None)

    def of_kind(self, kind: str) -> Mapping[ObjectKey, Stored]:
        """Return the objects of one kind, in time independent of the number of other objects."""
        return self._of_kind.get(kind, {})

    @property
    def device_classes(self) -> frozenset[str]:
        """Name the classes of which any node has an inventory."""
        return frozenset(class_of_group(name) or "" for name in self._built_in)

    def clear_objects(self) -> None:
        """Remove all objects: the store was lost, and a new snapshot follows."""
        for key in tuple(self.objects):
            self.drop_object(key)

    def claims(self) -> tuple[tuple[ObjectKey, Stored], ...]:
        """List all claims of structured parameters, oldest first."""
        return tuple((key, self.objects[key]) for key in self._claims)

    def claims_of_gone_pods(self) -> list[tuple[ObjectKey, Stored]]:
        """List the claims, including classic ones, that were made for a pod that is not stored."""
        return [(key, self.objects[key]) for key in self._links.owned_by_gone_pods()]

    def claims_with_gone_users(self) -> list[tuple[ObjectKey, Stored]]:
        """List the claims of structured parameters that a pod has reserved which is not stored."""
        return [(key, self.objects[key]) for key in self._links.reserved_by_gone_pods() if key not in self._classic]

    def unsettled_claims(self) -> tuple[ObjectKey, ...]:
        """List the claims of structured parameters that have changed since `settle`, oldest first.

        Cost: O(unsettled claims).
        """
        return tuple(self._unsettled)

    def settle(self, key: ObjectKey) -> None:
        """Record that only a change of the claim itself gives it a next step."""
        self._unsettled.drop(key)

    def has_waiting(self) -> bool:
        """Say whether any claim waits for its devices, or any pod for its node.

        Cost: reads each claim and pod until it finds one that waits.
        """
        return any(
            not stored.value.status.get("allocation") for stored in self.of_kind("resourceclaim").values()
        ) or any(not stored.pod.is_bound for stored in self.of_kind("pod").values())

    def classic_claims(self) -> tuple[tuple[ObjectKey, Stored], ...]:
        """List all claims of classic DRA, oldest first."""
        return _by_age((key, self.objects[key]) for key in self._classic)

    def nodes_for(self, claim: Claim) -> tuple[str, ...]:
        """List the nodes to try, in order.

        These are the nodes where the claim holds devices already, else the node that it names, else
        that of other claims of its pod, else all by name.
        """
        holding = self.stock.nodes_holding(claim.owner.key)
        if holding:
            return holding
        named = claim.metadata.annotations.get(NODE_ANNOTATION) or self._node_of_mates(claim)
        return (named,) if named else self.nodes()

    def mates(self, claim: Claim) -> tuple[tuple[ObjectKey, Stored], ...]:
        """List the other structured claims of the pods that use this one, by name: a pod runs on
        one node, so they are best served together.
        """
        return tuple((key, stored) for key, stored in self.users.mates(_key_of(claim)) if key not in self._classic)

    def _node_of_mates(self, claim: Claim) -> str | None:
        """Name the node on which another claim of the same pod is allocated."""
        for _, other in self.users.mates(_key_of(claim)):
            try:
                allocation = other.structured.held
            except ContractError:
                continue
            results = allocation.devices.results if allocation is not None else ()
            nodes = {node_of_pool(granted_device.pool) for granted_device in results} & set(self.nodes())
            if nodes:
                return min(nodes)
        return None

    @property
    def classes(self) -> Mapping[str, DeviceClassSpec]:
        """Return all classes: the built-in one of each device class, where there is one those of all
        levels of shapes, and the stored ones, which take precedence.
        """
        if self._all_classes is None or self._all_classes[0] != self.class_epoch:
            built_in = _OF_SHAPES | self._built_in if self._built_in else {}
            self._all_classes = self.class_epoch, built_in | self._classes
        return self._all_classes[1]

    def class_names(self) -> tuple[ClassName, ...]:
        """List the classes by name, with the extended resources that they serve."""
        return tuple(
            ClassName(name, spec.extended_resource_name or "", self._created(ObjectKey("deviceclass", CLUSTER, name)))
            for name, spec in sorted(self.classes.items())
        )

    def describe(self, node: str) -> Node:
        """Return a node as node selectors see it: its host name, and the labels of its Node object
        where one is stored.
        """
        known_node = self._described.get(node)
        if known_node is None:
            stored = self.objects.get(ObjectKey("node", CLUSTER, node))
            labels = stored.metadata.labels if stored is not None else {}
            known_node = self._described[node] = Node(node, {**node_of(node).labels, **labels})
        return known_node

    def _relabel(self, node: str) -> None:
        self._described.pop(node, None)
        self.stock.outdate(node)

    def labels_of(self, namespace: str) -> Mapping[str, str]:
        """Return the labels of a namespace. Empty when it is not stored."""
        stored = self.objects.get(ObjectKey("namespace", CLUSTER, namespace))
        return stored.metadata.labels if stored is not None else {}

    def _created(self, key: ObjectKey) -> str:
        stored = self.objects.get(key)
        return stored.metadata.creation_timestamp if stored is not None else ""

    def holds_devices(self, claim: Claim) -> bool:
        """Say whether a ledger holds devices for the claim, regardless of its status."""
        return bool(self.stock.nodes_holding(claim.owner.key))


def _key_of(claim: Claim) -> ObjectKey:
    return ObjectKey("resourceclaim", claim.owner.namespace, claim.owner.name)


def _creation_of(stored: Stored) -> str:
    return str(stored.value.metadata.get("creationTimestamp") or "")


def _by_age(items: Iterable[tuple[ObjectKey, Stored]]) -> tuple[tuple[ObjectKey, Stored], ...]:
    return tuple(sorted(items, key=lambda item: (_creation_of(item[1]), item[0])))
