"""The gateway's view of its node, kept up to date from the bus: inventories, the ledger, and
devices that were handed out but are not in the ledger yet.

Changes wake the streams of the lists. When NATS or its store is lost, the last known state stays: a
broken connection does not mean that devices are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct, structs

from topobus.bus.bus import Bus, ChangeKind
from topobus.engine.health.silence import unheard
from topobus.engine.shapes.cpu_places import cpus_left, for_claims
from topobus.engine.shapes.shapes import Shapes, shapes_of
from topobus.formats.messages.catalogue import ALIGNMENT, INVENTORY, LEDGER
from topobus.gateway.containers.live_containers import LiveContainers
from topobus.gateway.device_plugins.rules.device_ids import with_kubelet_ids
from topobus.gateway.device_plugins.rules.holdings import with_lingering
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.device_plugins.rules.lists import (
    HealthEntry,
    health_list,
    health_of_shapes,
    holders_of,
    ledgers_by_class,
    plugin_lists,
)
from topobus.gateway.device_plugins.rules.replicas import ShareHolders, share_holders
from topobus.gateway.hand_outs import HandOuts
from topobus.gateway.key_locks import KeyLocks
from topobus.process.broadcast import Broadcast
from topobus.process.logging import get_logger
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.ledger import Holders
from topobus.values.names import is_dns_label
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner
from topobus.values.vendor_profiles import IdProfile, VendorProfile, pool_in, profile_in

__all__ = ["NodeState", "Offer"]


class Offer(Struct, frozen=True, kw_only=True):
    """One resource that kubelet can be offered."""

    resource: str
    """`topobus.dev/gpu-h100`."""
    device_class: str
    pool: str = ""
    """Empty: the class's own resource, with the devices without a pool."""

    @property
    def name(self) -> str:
        """The pool, or the class."""
        return self.pool or self.device_class


class _List:
    """One resource's list, by position and by id."""

    def __init__(self, device_class: str, entries: tuple[ListEntry, ...]) -> None:
        self.device_class = device_class
        self.entries = entries
        self.by_id = {list_entry.id: list_entry for list_entry in entries}
        self.unnamed = tuple(list_entry.id for list_entry in entries if list_entry.is_unnamed)


class NodeState:
    """The node's devices by class, as last known."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        own_resource: Callable[[str], str],
        ids: Callable[[str, str], IdProfile] = lambda _class, _resource: "topobus",
        profiles: tuple[VendorProfile, ...] = (),
        *,
        in_claims: Callable[[Device], bool] = lambda _device: True,
        owned_cpus: CpuSet | None = None,
    ) -> None:
        """`own_resource` returns the resource of a class, `ids` the kind of ids that kubelet gets
        for the devices of a class's resource, `in_claims` whether claims may have a device. Of groups
        of CPUs they have `owned_cpus` (None: all).
        """
        self.node = node
        self.changed = Broadcast()
        self.ledger_changed = Broadcast()
        """Also announced when no holding has changed: a decision, or a pod's name, is another
        one."""
        self.ledger_went_back = Broadcast()
        """Announced when the ledger is older than the previous one, was rebuilt, or is in
        another store, so that it may be older although its number is not."""
        self.hand_overs = KeyLocks()
        """By class: held while kubelet is given devices, or while they are taken back and
        cleaned, so that the two never overlap."""
        self.containers = LiveContainers()
        """The existing containers, where the container runtime reports them."""
        self.lingering: Mapping[str, str] = {}
        """Allocations that kubelet has forgotten while a container that has them still runs: key
        of the owner to why they are not given to another one. Set by `linger`."""
        self.lingering_changed = Broadcast()
        self.awaited: frozenset[str] = frozenset()
        """Keys of owners that hold what a claim of a pod of this node waits for. Set by
        `wait_for`."""
        self.awaited_changed = Broadcast()
        self._bus = bus
        self._own_resource = own_resource
        self._ids = ids
        self._profiles = profiles
        self._names: dict[str, dict[str, str]] = {}
        """Resource to kubelet's id to name, also of devices that are gone, because pods may
        still have them."""
        self._inventories: dict[str, Inventory] = {}
        self._in_claims = in_claims
        self._owned_cpus = owned_cpus
        self._reserved_cpus = CpuSet()
        self._own_shapes: tuple[OwnShape, ...] = ()
        self._shapes: Shapes | None = None
        self._ledger: Holders | None = None
        self._ledgers: dict[str, Holders] = {}
        """By class: the part of the ledger that concerns it."""
        self._hand_outs = HandOuts()
        self._lists: dict[str, _List] = {}
        self._holders: dict[str, dict[str, Owner]] = {}
        self._sharers: dict[str, ShareHolders] = {}
        # Built on request, because each change wakes the streams of all classes.
        self._health: dict[str, tuple[HealthEntry, ...]] = {}
        self._silent: Mapping[str, str] = {}
        self._withheld: Mapping[str, Mapping[str, Owner]] = {}
        self._seen = {"alignment": asyncio.Event(), "inventories": asyncio.Event(), "ledger": asyncio.Event()}

    @property
    def is_connected(self) -> bool:
        """Return whether the known state is also the newest."""
        return self._bus.is_connected

    @property
    def ledger(self) -> Holders | None:
        """The ledger as last received."""
        return self._ledger

    async def wait_until_seen(self) -> None:
        """Wait until inventories, ledger and the operator's shapes have been received completely
        once.
        """
        for seen in self._seen.values():
            await seen.wait()

    def classes(self) -> tuple[str, ...]:
        """Return the classes with something to offer: devices, including those that only claims may
        have, and held ones that are gone.
        """
        listed = {resource_list.device_class for resource_list in self._lists.values() if resource_list.entries}
        return tuple(sorted(listed | {name for name, inventory in self._inventories.items() if inventory.devices}))

    def offers(self) -> tuple[Offer, ...]:
        """Return the resources with something to list, by name."""
        return tuple(
            Offer(
                resource=resource,
                device_class=resource_list.device_class,
                pool=self._pool(resource, resource_list.device_class),
            )
            for resource, resource_list in sorted(self._lists.items())
            if resource_list.entries
        )

    def _pool(self, resource: str, device_class: str) -> str:
        """Return the pool of a resource. Empty for the devices without a pool."""
        if resource == self._own_resource(device_class):
            return ""
        profile = profile_in(resource, device_class, self._profiles)
        return pool_in(resource, profile) if profile is not None else resource.rpartition("/")[2]

    def inventories(self) -> dict[str, Inventory]:
        """Return the inventories by class, as last received."""
        return dict(self._inventories)

    def shapes(self) -> Shapes:
        """Return the shapes of the devices that claims may have. It is the same object as long as neither
        an inventory nor the operator's own shapes change.
        """
        if self._shapes is None:
            in_claims = [
                structs.replace(inventory, devices=tuple(filter(self._in_claims, inventory.devices)))
                if inventory.device_class != CPU_CLASS
                # Those that are in no claim still tell the sockets.
                else for_claims(
                    inventory,
                    self._owned_cpus if all(map(self._in_claims, inventory.devices)) else CpuSet(),
                    self._reserved_cpus,
                )
                for inventory in self._inventories.values()
            ]
            self._shapes = shapes_of(in_claims, self._own_shapes)
        return self._shapes

    def cpus_left(self) -> dict[str, int]:
        """Count the CPUs that claims have or can have, by the groups that shapes count."""
        return cpus_left(self.shapes().groups, self._ledger)

    @property
    def own_shapes(self) -> tuple[OwnShape, ...]:
        """Return the shapes that the operator adds."""
        return self._own_shapes

    def holders(self, device_class: str) -> dict[str, Owner]:
        """Return the holder of each device of a class, including those handed out a moment ago."""
        return dict(self._holders.get(device_class, {}))

    def sharers(self, device_class: str) -> ShareHolders:
        """Return the owners with shares of each device of a class, just given ones included."""
        return self._sharers.get(device_class, {})

    def device(self, device_class: str, name: str) -> Device | None:
        """Return one device of the inventory."""
        inventory = self._inventories.get(device_class)
        return inventory.device(name) if inventory is not None else None

    def withheld(self, device_class: str) -> dict[str, Owner]:
        """Return the devices of a class that are not held and that are allocated to a claim on this
        node, with the claim.
        """
        held = self._holders.get(device_class, {})
        return {name: owner for name, owner in self._withheld.get(device_class, {}).items() if name not in held}

    def withhold(self, devices: Mapping[str, Mapping[str, Owner]]) -> None:
        """Store which devices are allocated to claims that are not prepared yet: class to device to
        claim.

        The lists stay unchanged. Listing these devices as unhealthy would remove them from the
        node's allocatable and permanently reject a pod that could run on one of them once the claim
        is gone. A claim's pod waits and is tried again.
        """
        self._withheld = devices

    def is_holder(self, owner_key: str) -> bool:
        """Return whether an owner may hold something. Also true while the ledger is not known."""
        if self._ledger is None or owner_key in self._ledger.allocations:
            return True
        return owner_key in self._hand_outs.owner_keys()

    @property
    def silent(self) -> frozenset[str]:
        """Classes whose service does not answer."""
        return frozenset(self._silent)

    def silent_since(self, device_class: str) -> str:
        """Return since when a class's service is silent. Empty while it answers."""
        return self._silent.get(device_class, "")

    def entries(self, resource: str) -> tuple[ListEntry, ...]:
        """Return the device plugin's complete list of a resource.

        It is the same object as long as nothing in it has changed. A silent service changes nothing
        here. This API knows only healthy and unhealthy. kubelet removes unhealthy devices from the
        node's allocatable and marks the pods that hold them, and silence is no evidence for that. A
        device of a silent class is refused later, when it should be prepared.
        """
        resource_list = self._lists.get(resource)
        return resource_list.entries if resource_list is not None else ()

    def entry(self, resource: str, name: str) -> ListEntry | None:
        """Return one device of a resource's list."""
        resource_list = self._lists.get(resource)
        return resource_list.by_id.get(name) if resource_list is not None else None

    def name_of(self, resource: str, wire_id: str) -> str:
        """Return the name of a device by kubelet's id.

        The id itself when it is not ours, or is a name from before the setting `ids`.
        """
        return self._names.get(resource, {}).get(wire_id, wire_id)

    def wait_for(self, keys: frozenset[str]) -> None:
        """Set the owners whose devices are awaited by claims of this node's pods.

        The parts that check for their end are woken.
        """
        if keys != self.awaited:
            self.awaited = keys
            self.awaited_changed.announce()

    def linger(self, lingering: Mapping[str, str]) -> None:
        """Store which allocations kubelet has forgotten while a container has them. Until that
        container has ended, the devices are listed as not healthy, so that no pod is bound for
        them.
        """
        if lingering != self.lingering:
            self.lingering = lingering
            self.lingering_changed.announce()
            self._refresh(list(self._inventories))

    def health(self, device_class: str) -> tuple[HealthEntry, ...]:
        """Return the DRA health stream's list of one class.

        That API has the state Unknown, which is used for the devices of a silent service.
        """
        health_entries = self._health.get(device_class)
        if health_entries is None:
            inventory = self._inventories.get(device_class)
            if inventory is not None and device_class in self._silent:
                inventory = unheard(inventory, since=self._silent[device_class])
            health_entries = self._health[device_class] = health_list(inventory, self._holders.get(device_class, {}))
        return health_entries

    def claims_health(self) -> tuple[HealthEntry, ...]:
        """Return the DRA health stream's complete list: the devices of all classes, by class, and the
        shapes.
        """
        entries = tuple(entry for device_class in sorted(self._inventories) for entry in self.health(device_class))
        return (*entries, *health_of_shapes(self.shapes().parts, entries))

    def note_silence(self, silent: Mapping[str, str]) -> None:
        """Store which classes' services are silent, and since when."""
        self._silent = silent
        self._health.clear()
        self.changed.announce()

    def hand_out(
        self,
        device_class: str,
        names: Iterable[str],
        owner: Owner,
        ledger_sequence: int,
        shares: Mapping[str, HeldShare] = MappingProxyType({}),
    ) -> None:
        """Remember what was just adopted until the ledger that contains it arrives: an allocated
        device must not leave the list in between.

        `shares` has the devices of which the owner has a share, and how much.
        """
        self._hand_outs.add(device_class, names, owner, ledger_sequence, shares)
        self._refresh_holders([device_class])

    def times_handed_out(self, owner: Owner) -> int:
        """Count how often this process gave an owner its devices. Without this, a new allocation of
        the same devices looks like the old one.
        """
        return self._hand_outs.times(owner)

    async def follow_alignment(self) -> None:
        """Follow the shapes that the operator adds until cancelled."""
        async for change in self._bus.watch(ALIGNMENT, node=self.node):
            if change.kind is ChangeKind.SNAPSHOT_END:
                self._seen["alignment"].set()
            elif change.kind is not ChangeKind.RESET:
                alignment = change.value if change.kind is ChangeKind.PUT else None
                self.take_own_shapes(
                    alignment.own_shapes if alignment is not None else (),
                    alignment.reserved_cpus if alignment is not None else CpuSet(),
                )

    def take_own_shapes(self, own_shapes: tuple[OwnShape, ...], reserved_cpus: CpuSet) -> None:
        """Store the shapes that the operator adds, and the CPUs that no claim gets."""
        if (own_shapes, reserved_cpus) != (self._own_shapes, self._reserved_cpus):
            self._own_shapes, self._reserved_cpus = own_shapes, reserved_cpus
            self._shapes = None
            self.changed.announce()

    async def follow_inventories(self) -> None:
        """Follow the inventories until cancelled."""
        async for change in self._bus.watch(INVENTORY, node=self.node):
            if change.kind is ChangeKind.SNAPSHOT_END:
                self._seen["inventories"].set()
                continue
            if change.kind is ChangeKind.RESET:
                get_logger().warning("inventories.reset", kept=sorted(self._inventories))
                continue
            self.take_inventory(change.parts["device_class"], change.value if change.kind is ChangeKind.PUT else None)

    def take_inventory(self, device_class: str, inventory: Inventory | None) -> None:
        """Store a class's inventory. None: it was deleted."""
        self._shapes = None
        if inventory is None:
            self._inventories.pop(device_class, None)
        else:
            self._inventories[device_class] = inventory
            illegal = [device.name for device in inventory.devices if not is_dns_label(device.name)]
            if illegal:
                get_logger().warning(
                    "devices.unlistable", device_class=device_class, devices=illegal, wanted="DNS labels"
                )
        self._refresh([device_class])

    async def follow_ledger(self) -> None:
        """Follow the ledger until cancelled."""
        is_other_store = False
        async for change in self._bus.watch(LEDGER.read_as(Holders), node=self.node):
            if change.kind is ChangeKind.SNAPSHOT_END:
                self._seen["ledger"].set()
            elif change.kind is ChangeKind.RESET:
                is_other_store = True
            elif change.kind is ChangeKind.PUT and change.value is not None:
                self.take_ledger(change.value, is_other_store=is_other_store)
                is_other_store = False

    def take_ledger(self, ledger: Holders, *, is_other_store: bool = False) -> None:
        """Store the ledger. `is_other_store`: the previous ledger was never stored in the present
        store.

        Cost: O(owners), and O(what they hold) for the classes of those that changed.
        """
        shown, self._ledger = self._ledger, ledger
        before = shown if shown is not None else Holders(node=self.node)
        classes: set[str] = set()
        if ledger.sequence < before.sequence:
            # The store was lost and the service began a new ledger, which will never confirm what
            # was adopted before. If these entries were kept, devices without a holder would look
            # held.
            classes |= self._hand_outs.clear()
        # An older ledger may have been continued beyond the number seen here before it was read.
        # Then its epoch, or the store, shows it.
        if shown is not None and (ledger.sequence < before.sequence or ledger.epoch != before.epoch or is_other_store):
            self.ledger_went_back.announce()
        self.ledger_changed.announce()
        of_classes = ledgers_by_class(self._ledgers, before, ledger)
        self._ledgers |= of_classes
        self._refresh_holders({*classes, *self._hand_outs.drop_confirmed(ledger), *of_classes})

    def _refresh_holders(self, classes: Iterable[str]) -> None:
        """Read again who holds what.

        Classes without a change keep their lists, because the ledger is written for each pod and
        each claim.
        """
        changed: list[str] = []
        for device_class in sorted(classes):
            shares = self._hand_outs.shares(device_class)
            ledger = self._ledgers.get(device_class)
            of_parts = {name: owner for name, owner, _ in shares}
            holders = {**of_parts, **holders_of(ledger, device_class), **self._hand_outs.whole(device_class)}
            sharers = {name: dict(owners) for name, owners in share_holders(ledger, device_class).items()}
            for name, owner, share in shares:
                sharers.setdefault(name, {})[owner] = share
            shown = {name: tuple(owners.items()) for name, owners in sharers.items()}
            if holders != self._holders.get(device_class, {}) or shown != self._sharers.get(device_class, {}):
                self._holders[device_class], self._sharers[device_class] = holders, shown
                changed.append(device_class)
        if changed:
            self._refresh(changed)

    def _refresh(self, classes: Iterable[str]) -> None:
        """Build the lists of these classes again and wake their streams."""
        for device_class in classes:
            self._health.pop(device_class, None)
            previous = {
                resource: resource_list.entries
                for resource, resource_list in self._lists.items()
                if resource_list.device_class == device_class
            }
            lists = plugin_lists(
                device_class,
                self._own_resource(device_class),
                self._inventories.get(device_class),
                self._holders.get(device_class, {}),
                previous=previous,
                classes=self._inventories.keys(),
                profiles=self._profiles,
                sharers=self._sharers.get(device_class, {}),
            )
            for resource, unnamed_entries in with_lingering(
                lists, self._ledgers.get(device_class), self.lingering
            ).items():
                entries = self._with_ids(resource, device_class, unnamed_entries, previous.get(resource, ()))
                if entries != previous.get(resource):
                    self._replace_list(resource, _List(device_class, entries))
        # Health messages are no part of the lists, so all streams check again. Each sends only what
        # has changed for it.
        self.changed.announce()

    def _with_ids(
        self, resource: str, device_class: str, entries: tuple[ListEntry, ...], previous: tuple[ListEntry, ...]
    ) -> tuple[ListEntry, ...]:
        """Add the ids by which kubelet knows the devices of a list."""
        profile = self._ids(device_class, resource)
        if profile == "topobus":
            return entries
        inventory = self._inventories.get(device_class)
        devices = {device.name: device for device in (inventory.devices if inventory is not None else ())}
        return with_kubelet_ids(entries, devices, profile, previous=previous)

    def _replace_list(self, resource: str, replaced: _List) -> None:
        before = self._lists.get(resource)
        self._lists[resource] = replaced
        names = {list_entry.kubelet_id: list_entry.id for list_entry in replaced.entries if list_entry.kubelet_id}
        if names:
            self._names.setdefault(resource, {}).update(names)
        if replaced.unnamed and (before is None or before.unnamed != replaced.unnamed):
            reasons = [replaced.by_id[name].reason for name in replaced.unnamed]
            next_step = (
                "put these devices into a pool of their own with another way of naming, or take the resource out "
                "of the setting ids"
            )
            get_logger().error(
                "ids.unusable", resource=resource, devices=list(replaced.unnamed), reasons=reasons, next_step=next_step
            )
