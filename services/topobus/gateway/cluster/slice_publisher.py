"""Keeps this node's ResourceSlices equal to the inventories: writes what differs, and writes again
what was deleted.

It writes what the pure plan (`cluster.rules.slices`) decides. Kubelet deletes a node's slices when
it starts, and a driver's when the driver stays away. The watch reports that, and the slices are
back within a second. While the API server is unreachable, the published slices become outdated and
nothing else is affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs
from prometheus_client import CollectorRegistry

from topobus.engine.shapes.in_slices import (
    SliceShapes,
    published_shapes,
    slice_shapes,
    with_shapes,
    without_groups,
)
from topobus.engine.shapes.shapes import SHAPE_CLASS, Shapes
from topobus.formats.kubernetes.pool_slices import own_part, publishable
from topobus.formats.kubernetes.resource import CounterSet, SliceDevice, SliceSpec, Taint
from topobus.formats.kubernetes.slices import shared_counters, slice_device, slice_order
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.node_readiness import read_node
from topobus.gateway.cluster.objects import SLICES, ClusterChangeKind, Rejected
from topobus.gateway.cluster.rules.slices import (
    LIST_FIELDS,
    SlicePlan,
    SlicePool,
    deletion_of,
    dropped_fields,
    has_gated_fields,
    has_lists,
    kept_devices,
    pool_devices,
    pool_of_slice,
    read_slice,
    shows_class,
    shows_silence,
    silence_taint,
    slice_plan,
)
from topobus.gateway.cluster.rules.uncounted import countable, keeps_counters
from topobus.gateway.cluster.slice_metrics import SliceMetrics
from topobus.gateway.config import ClusterSettings
from topobus.gateway.node_state import NodeState
from topobus.kubernetes.answers import CONFLICT, INVALID, NOT_FOUND
from topobus.process.backoff import full_jitter
from topobus.process.broadcast import Broadcast, first_of
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, pool_of_class
from topobus.values.errors import PeerUnavailable
from topobus.values.request import OwnerKind

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["SlicePublisher"]

_PART = "slices"
_BACKOFF_LIMIT_S = 10.0
_OVERTAKEN = "another writer changed a slice in the meantime"
_WITHOUT_LISTS = "the API server accepts no list attributes: the slice is written without them"
_UNCOUNTED = "the API server stores no counters: the pool is published again without partitions"


class SlicePublisher:
    """Publishes one node's slices."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        state: NodeState,
        *,
        offers: Callable[[str], bool],
        shows: Callable[[Device], Device | None],
        is_judged: Callable[[str], bool],
        settings: ClusterSettings,
        readiness: Readiness,
        registry: CollectorRegistry,
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._offers = offers
        self._shows = shows
        self._settings = settings
        self._readiness = readiness
        self._metrics = SliceMetrics(registry)
        self._wake = Broadcast()
        self.published = Broadcast()
        """Announced when slices were compared with the inventories."""
        self._present: dict[str, ApiObject] | None = None
        self._is_asked = False
        self._generations: dict[str, int] = {}
        self._node_uid = ""
        self._dropped: set[str] = set()
        self._reported: set[str] = set()
        self._troubles: dict[str, str] = {}
        self._has_published = False
        self._is_judged = is_judged
        self._left_out: dict[str, dict[str, str]] = {}
        self._shown: dict[str, tuple[Inventory, bool, Inventory, tuple[SliceDevice, ...]]] = {}
        """By class: the inventory, whether the server keeps counters, the part of it that is
        offered, and the slice devices for that part."""
        self._node_shapes: tuple[Shapes, SliceShapes] | None = None
        self._remarks: tuple[str, ...] = ()
        self._settled: dict[str, tuple[object, ...]] = {}
        """By pool: all inputs of the decision when there was nothing to write the last time."""
        self._specs: dict[str, tuple[ApiObject, SliceSpec | None]] = {}
        self._shown_inventories: dict[str, Inventory] = {}
        """By class: the inventory that the API server's slices show."""

    def dropped(self) -> tuple[str, ...]:
        """List the fields that the API server is known not to keep."""
        return tuple(sorted(self._dropped))

    def is_published(self, device_class: str) -> bool:
        """Return whether the API server's slices show the newest inventory of a class."""
        inventory = self._state.inventories().get(device_class)
        return inventory is not None and self._shown_inventories.get(device_class) is inventory

    async def run(self) -> None:
        """Publish until cancelled."""
        self._readiness.set(_PART, is_ready=False, why="waiting for the API server")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_slices())
            await self._publish()

    async def _follow_slices(self) -> None:
        fields = f"spec.nodeName={self._state.node}"
        async for change in self._cluster.watch(SLICES, fields=fields, lists_after_loss=True):
            if change.kind is ClusterChangeKind.SNAPSHOT:
                self._present = {_name(api_object): api_object for api_object in change.objects}
                self._shown_inventories.clear()
                # After a pause it may be another server, with another Node object as well.
                self._node_uid = ""
                self._dropped.clear()
                self._is_asked = False
            elif change.kind is ClusterChangeKind.DELETE:
                self._take(change.object, is_gone=True)
                self._shown_inventories.clear()
                # The garbage collector may have deleted it because the Node was replaced. With the
                # old Node as its owner it would be deleted again each time.
                self._node_uid = ""
            else:
                self._take(change.object)
            self._wake.announce()

    async def _publish(self) -> None:
        failures = 0
        while True:
            tickets = (self._wake.ticket(), self._state.changed.ticket())
            is_done = True
            if self._present is not None:
                is_done = await self._sync()
                self._report_readiness()
                self.published.announce()
            failures = 0 if is_done else failures + 1
            pause_s = full_jitter(failures, least_s=self._settings.retry_s, most_s=_BACKOFF_LIMIT_S)
            if await first_of(tickets, self._settings.resync_s if is_done else pause_s):
                # A burst of changes becomes one write.
                await asyncio.sleep(self._settings.publish_delay_s)
            else:
                self._node_uid = ""

    async def _sync(self) -> bool:
        """Write what differs. False when something has to be tried again.

        A failure of one pool does not affect the other.
        """
        if not self._is_asked:
            self._is_asked = True
            try:
                await self._ask_what_is_kept()
            except PeerUnavailable:
                self._is_asked = False
                return False
        node = self._state.node
        inventories = self._state.inventories()
        pools = {pool_of_class(node, name) for name in inventories if self._offers(name)} | {
            pool_of_slice(api_object, node) for api_object in self._all()
        } - {""}
        is_done = True
        for pool in sorted(pools):
            try:
                trouble = await self._sync_pool(pool)
            except PeerUnavailable as err:
                trouble = str(err)
            is_done = is_done and not trouble
            if not trouble:
                self._shown_inventories |= {
                    name: inventory
                    for name, inventory in inventories.items()
                    if pool_of_class(node, name) == pool and self._offers(name)
                }
            if (
                trouble
                and trouble not in (_OVERTAKEN, _UNCOUNTED, _WITHOUT_LISTS)
                and self._troubles.get(pool) != trouble
            ):
                get_logger().warning("slices.publish-failed", pool=pool, error=trouble)
            self._troubles[pool] = trouble
            self._metrics.slices.labels(pool).set(len(self._of(pool)))
        self._has_published = self._has_published or is_done
        return is_done

    async def _sync_pool(self, pool: str) -> str:
        """Bring one pool up to date. Returns the error, empty when there is none."""
        present = self._of(pool)
        specs = [spec for spec in map(self._read, present) if spec is not None and spec.pool.name == pool]
        inventories = self._state.inventories()
        classes = {class_of_device(DRIVER, device.name) or "" for spec in specs for device in spec.devices}
        members = {
            name
            for name in (classes | inventories.keys()) - {SHAPE_CLASS}
            if pool_of_class(self._state.node, name) == pool
        }
        offered = sorted(filter(self._offers, members))
        count = 0
        if offered:
            plan, count = await self._plan(pool, offered, specs, present)
        elif members:
            plan = SlicePlan(generation=0, deletes=tuple(map(deletion_of, present)))
        else:
            # Before the first inventory nothing is known of slices that show no device. The others
            # show devices that this pool cannot have.
            own = [spec for spec in specs if not spec.devices]
            strange = [api_object for api_object in present if self._read(api_object) not in own]
            deletes = tuple(map(deletion_of, strange))
            plan = SlicePlan(generation=0, deletes=deletes, foreign=tuple(map(_name, strange)))
        if plan.is_empty:
            return ""
        self._generations[pool] = plan.generation
        trouble = await self._execute(plan)
        if plan.foreign and not trouble:
            self._metrics.foreign.inc(len(plan.foreign))
            get_logger().warning(
                "slices.foreign-deleted",
                pool=pool,
                slices=plan.foreign,
                next_step="find out who may create ResourceSlices besides this node's gateway (kubectl auth can-i "
                "create resourceslices --as ...)",
            )
        log = get_logger().bind(pool=pool, generation=plan.generation)
        counts = {"deleted": len(plan.deletes), "updated": len(plan.updates), "created": len(plan.creates)}
        if not trouble:
            log.info("slices.published", devices=count, **counts)
        return trouble

    async def _plan(
        self, pool: str, offered: Sequence[str], specs: Sequence[SliceSpec], present: Sequence[ApiObject]
    ) -> tuple[SlicePlan, int]:
        """Decide what to write of a pool with these classes, and count the devices that it shows."""
        devices: tuple[SliceDevice, ...] = ()
        counter_sets: tuple[CounterSet, ...] = ()
        node_uid = await self._uid_of_node()
        inventories = self._state.inventories()
        for device_class in offered:
            inventory = inventories.get(device_class)
            # The silence of a device service proves nothing about its devices.
            shown, counted = (
                self._devices(device_class, inventory, present)
                if inventory is not None
                else kept_devices(device_class, specs)
            )
            devices, counter_sets = (*devices, *shown), (*counter_sets, *counted)
        if pool == self._state.node:
            shapes = self._shapes(offered, specs) if self._publishes_shapes() else SliceShapes()
            cpus, left = self._counted_cpus(shapes, present), self._state.cpus_left()
            devices, counter_sets = with_shapes(shapes, devices, counter_sets, cpus=cpus, left=left)
        elif self._publishes_shapes():
            devices = without_groups(devices, self._state.shapes().groups)
        state = (node_uid, devices, counter_sets, present, frozenset(self._dropped))
        if self._settled.get(pool) == state:
            # Most changes concern the other pool, or holders that make no difference here.
            return SlicePlan(generation=0), len(devices)
        plan = slice_plan(
            SlicePool(pool, node_uid),
            devices,
            present,
            counter_sets=counter_sets,
            dropped=self._dropped,
            last_generation=self._generations.get(pool, 0),
            read=self._read,
        )
        if plan.is_empty:
            self._settled[pool] = state
        return plan, len(devices)

    def _publishes_shapes(self) -> bool:
        """Return whether shapes are published: not where they are switched off, or where the server keeps no
        counters.
        """
        return self._settings.shapes and keeps_counters(self._dropped)

    def _counted_cpus(self, shapes: SliceShapes, present: Sequence[ApiObject]) -> Sequence[SliceDevice] | None:
        """Return the CPUs, where shapes count some. None: they are not known now."""
        if not shapes.groups:
            return ()
        inventory = self._state.inventories().get(CPU_CLASS)
        return self._devices(CPU_CLASS, inventory, present)[0] if inventory is not None else None

    def _shapes(self, offered: Sequence[str], specs: Sequence[SliceSpec]) -> SliceShapes:
        """Return the shapes of the node."""
        published = published_shapes(specs)
        counted = {CPU_CLASS} if published.groups and self._offers(CPU_CLASS) else set[str]()
        if not self._state.inventories().keys() >= {*offered, *counted}:
            # With a class that is not heard yet there would be others.
            return published
        shapes = self._state.shapes()
        if self._node_shapes is None or self._node_shapes[0] is not shapes:
            self._node_shapes = shapes, slice_shapes(shapes)
            if shapes.remarks != self._remarks:
                self._remarks = shapes.remarks
                get_logger().info("shapes.derived", shapes=len(shapes.devices), left_out=list(shapes.remarks))
        held = {
            name
            for device_class in offered
            for name, owner in self._state.holders(device_class).items()
            if owner.kind is OwnerKind.CLAIM
        }
        held |= {
            group
            for group, sharers in self._state.sharers(CPU_CLASS).items()
            if any(owner.kind is OwnerKind.CLAIM for owner, _ in sharers)
        }
        return self._node_shapes[1].keeping(published.devices, held)

    def _devices(
        self, device_class: str, inventory: Inventory, present: Sequence[ApiObject]
    ) -> tuple[tuple[SliceDevice, ...], tuple[CounterSet, ...]]:
        """Return the slice devices that a server accepts, and what they consume from.

        A device that exceeds a limit is left out and logged once, because its whole slice would be
        refused.
        """
        cached, is_counted = self._shown.get(device_class), keeps_counters(self._dropped)
        if cached is None or cached[0] is not inventory or cached[1] is not is_counted:
            kept, bad = own_part(inventory)
            # Devices of a pool that is not offered here are left out as well.
            kept = structs.replace(
                kept, devices=tuple(shown for shown in map(self._shows, kept.devices) if shown is not None)
            )
            kept, withheld = countable(kept, self._dropped)
            good, refused = publishable(map(slice_device, slice_order(kept.devices)))
            bad |= withheld | refused
            if bad != self._left_out.get(device_class, {}):
                for name, why in bad.items():
                    get_logger().warning("slice-device.left-out", device_class=device_class, device=name, why=why)
            self._left_out[device_class] = bad
            cached = self._shown[device_class] = (inventory, is_counted, kept, good)
        _, _, kept, good = cached
        silence = self._silence(device_class, present)
        devices = pool_devices(
            kept, self._state.holders(device_class), silence, shown=good, sharers=self._state.sharers(device_class)
        )
        return devices, shared_counters(kept.counter_sets)

    def _silence(self, device_class: str, present: Sequence[ApiObject]) -> Taint | None:
        """Return the taint of a class whose service is silent. None: it has none."""
        since = self._state.silent_since(device_class)
        if not since and self._is_judged(device_class):
            return None
        of_class = [
            api_object
            for api_object in present
            if (spec := self._read(api_object)) is not None and shows_class(device_class, spec)
        ]
        # Just after the start no silence is known yet, so taints of silence must stay.
        is_silent = bool(since) or shows_silence(of_class)
        return silence_taint(since, self._settings.silence_effect, of_class) if is_silent else None

    def _read(self, api_object: ApiObject) -> SliceSpec | None:
        """Read a slice, and cache the result as long as it is the same object."""
        name = _name(api_object)
        cached = self._specs.get(name)
        if cached is None or cached[0] is not api_object:
            self._specs = {key: value for key, value in self._specs.items() if key in (self._present or {})}
            cached = self._specs[name] = (api_object, read_slice(api_object))
        return cached[1]

    async def _execute(self, plan: SlicePlan) -> str:
        for deletion in plan.deletes:
            refused = await self._cluster.delete(
                SLICES, deletion.name, uid=deletion.uid, resource_version=deletion.resource_version
            )
            self._count("delete", refused)
            if refused is not None:
                return _OVERTAKEN if refused.code == CONFLICT else refused.message
            if self._present is not None:
                self._present.pop(deletion.name, None)
        for verb, objects, write in (
            ("update", plan.updates, self._cluster.update),
            ("create", plan.creates, self._cluster.create),
        ):
            for api_object in objects:
                stored = await write(SLICES, api_object)
                self._count(verb, stored)
                if isinstance(stored, Rejected):
                    return self._refused(api_object, stored)
                self._take(stored)
                was_counted = keeps_counters(self._dropped)
                self._notice_dropped(dropped_fields(api_object, stored))
                if was_counted and not keeps_counters(self._dropped):
                    # Detected before the pool is complete. Otherwise its partitions would be
                    # offered as if they used nothing in common.
                    return _UNCOUNTED
        return ""

    async def _ask_what_is_kept(self) -> None:
        """Find out which fields of its stored slices the server would not store again.

        Where a feature was switched off it keeps the fields of stored slices, in updates as well,
        and kube-scheduler does not use them: it gives no device that consumes counters.
        """
        for api_object in self._all():
            if not pool_of_slice(api_object, self._state.node) or not has_gated_fields(api_object):
                continue
            new = structs.replace(api_object, metadata={"generateName": "topobus-"})
            answer = await self._cluster.create(SLICES, new, is_dry_run=True)
            if not isinstance(answer, Rejected):
                self._notice_dropped(dropped_fields(new, answer))
            elif answer.code == INVALID and has_lists(new):
                self._notice_dropped(LIST_FIELDS)

    def _refused(self, api_object: ApiObject, answer: Rejected) -> str:
        if answer.code == NOT_FOUND and self._present is not None:
            self._present.pop(_name(api_object), None)
            self._wake.announce()
        if answer.code == INVALID and has_lists(api_object) and not self._dropped.issuperset(LIST_FIELDS):
            # A server that does not support lists sees an attribute without a value, and refuses
            # the slice as a whole.
            self._notice_dropped(LIST_FIELDS)
            return _WITHOUT_LISTS
        return _OVERTAKEN if answer.code in (NOT_FOUND, CONFLICT) else answer.message

    def _notice_dropped(self, fields: Sequence[str]) -> None:
        """Remember what this server does not keep, and log it once."""
        if not set(fields) <= self._dropped:
            self._dropped.update(fields)
            self._wake.announce()
        news = sorted(set(fields) - self._reported)
        if news:
            self._reported.update(news)
            # An alpha feature that is off on an ordinary server: `topobus doctor` reports it, so it
            # is no warning at each start.
            log = get_logger().info if set(news) <= set(LIST_FIELDS) else get_logger().warning
            log("slice-fields.dropped", fields=news, why="the API server is older, or a feature gate is off")

    async def _uid_of_node(self) -> str:
        if not self._node_uid:
            node = await read_node(self._cluster, self._state.node)
            self._node_uid = str(node.metadata.get("uid", ""))
        return self._node_uid

    def _all(self) -> tuple[ApiObject, ...]:
        return tuple((self._present or {}).values())

    def _of(self, pool: str) -> tuple[ApiObject, ...]:
        return tuple(api_object for api_object in self._all() if pool_of_slice(api_object, self._state.node) == pool)

    def _take(self, api_object: ApiObject, *, is_gone: bool = False) -> None:
        """Store a slice as written or deleted.

        A version older than the known one is a late event of our own writes.
        """
        if self._present is None:
            return
        known_api_object = self._present.get(_name(api_object))
        if known_api_object is not None and _version(api_object) < _version(known_api_object):
            return
        if is_gone:
            self._present.pop(_name(api_object), None)
        else:
            self._present[_name(api_object)] = api_object

    def _count(self, verb: str, answer: object) -> None:
        self._metrics.writes.labels(
            verb, answer.reason or str(answer.code) if isinstance(answer, Rejected) else "ok"
        ).inc()

    def _report_readiness(self) -> None:
        """Update the readiness part: ready once everything was published.

        A later failure is only a remark, because the node keeps working.
        """
        for field in self._reported:
            self._metrics.dropped.labels(field).set(field in self._dropped)
        remarks = [f"pool {name}: {text}" for name, text in sorted(self._troubles.items()) if text]
        remarks += [
            f"{device} is left out: {why}" for _, bad in sorted(self._left_out.items()) for device, why in bad.items()
        ]
        if self._dropped:
            remarks.append(f"the API server does not keep {', '.join(sorted(self._dropped))}")
        if self._state.own_shapes and not self._settings.shapes:
            remarks.append("the own_shapes of topology are not published: cluster.shapes is off")
        self._readiness.set(_PART, is_ready=self._has_published, why="; ".join(remarks))


def _name(api_object: ApiObject) -> str:
    return str(api_object.metadata.get("name", ""))


def _version(api_object: ApiObject) -> int:
    # Since Kubernetes 1.35 versions of one kind may be compared as numbers. Before, they were
    # numbers as well.
    text = str(api_object.metadata.get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
