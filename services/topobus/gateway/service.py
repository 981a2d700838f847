"""Runs the gateway: starts a task for each duty, and plugins for each class as soon as it has
devices.

The gateway is ready when it has received inventories and ledger once. Registration with kubelet
counts for readiness only on a node where kubelet runs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from topobus.bus.liveness import ServiceLiveness
from topobus.formats.messages.catalogue import PODS, PREPARE
from topobus.formats.messages.messages import ApiObject, KubeletRegistrations
from topobus.gateway.asks import NodeAsks
from topobus.gateway.boot import boot_id
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_devices import ClaimDevices
from topobus.gateway.claims.claim_files import ClaimFiles
from topobus.gateway.claims.claim_forwarder import ClaimForwarder
from topobus.gateway.claims.claim_ledger import ClaimLedger
from topobus.gateway.claims.claim_metadata import ClaimMetadata
from topobus.gateway.claims.claim_reading import stored_claims, without_claims
from topobus.gateway.claims.claim_reports import ClaimReports
from topobus.gateway.claims.claim_steps import ClaimSteps
from topobus.gateway.claims.claims import ClaimPreparer
from topobus.gateway.claims.dra_plugin import DraDriver
from topobus.gateway.claims.forgotten_claims import ForgottenClaims
from topobus.gateway.claims.ledger_release import LedgerRelease
from topobus.gateway.claims.rules.socket_paths import driver_sockets
from topobus.gateway.claims.sandbox_attachments import SandboxAttachments
from topobus.gateway.cluster.claim_statuses import ClaimStatuses
from topobus.gateway.cluster.device_health import DeviceHealthReports
from topobus.gateway.cluster.event_recorder import EventRecorder
from topobus.gateway.cluster.node_readiness import NodeReadiness
from topobus.gateway.cluster.node_verdicts import NodeVerdicts
from topobus.gateway.cluster.pod_details import ClusterPodDetails
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.pod_retries import PodRetries
from topobus.gateway.cluster.report_record import ReportRecord
from topobus.gateway.cluster.slice_publisher import SlicePublisher
from topobus.gateway.config import GatewaySettings, check, owned_cpus
from topobus.gateway.containers.rules.edit_limits import NO_RIGHTS, EditRights, rights_of
from topobus.gateway.device_plugins.allocation_record import AllocationRecord
from topobus.gateway.device_plugins.feature_file import FeatureFile
from topobus.gateway.device_plugins.foreign_plugins import ForeignPlugins
from topobus.gateway.device_plugins.plugin_set import DevicePlugins
from topobus.gateway.device_plugins.registration import KUBELET_SOCKET, socket_pattern
from topobus.gateway.device_plugins.sockets import FolderWatch, identity, remove_stale
from topobus.gateway.metrics import DISAGREEMENTS, CallMetrics, ClaimMetrics, CpusetMetrics
from topobus.gateway.node_lock import NodeLock, open_node_lock
from topobus.gateway.node_state import NodeState
from topobus.gateway.reconcile.pod_usage import PodLook
from topobus.gateway.reconcile.reconciliation import Reconciler
from topobus.gateway.reconcile.user_naming import UserNaming
from topobus.process.broadcast import Broadcast
from topobus.process.logging import get_logger
from topobus.process.packages import needing_extra
from topobus.process.service import Runtime
from topobus.sysfs.tree import Tree
from topobus.values.dra_names import DRIVER

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
    from topobus.gateway.cluster.served_by_claims import ServedByClaims
    from topobus.gateway.containers.cpu_pinning import CpuPinning
    from topobus.gateway.containers.runtime_events import RuntimeDoor

__all__ = ["serve"]

# Where installers put CDI files. It has a lower priority than our own folder.
_STATIC_CDI_DIR = Path("/etc/cdi")
# Seconds that a standby gateway waits for its drivers to be registered before it is ready. kubelet
# checks every second.
_STAND_BY_S = 15.0


async def serve(settings: GatewaySettings, runtime: Runtime) -> None:
    """Run the gateway until cancelled.

    Errors: raises ConfigError for settings or a checkpoint that cannot be used.
    """
    # First of all: NATS is ready already, and a gateway that counts as ready before it is on
    # standby would let a roll-over end the other one too early.
    runtime.readiness.set("inventories", is_ready=False, why="starting")
    check(settings)
    # Unique for this process where no pod's uid is given, because kubelet may still use a socket of
    # an earlier one.
    instance = settings.instance or uuid.uuid4().hex[:8]
    with open_node_lock(Path(settings.checkpoint_path), instance, runtime.readiness) as lock:
        async with _opened(settings) as cluster:
            await _Gateway(settings, runtime, cluster, lock).run()


@asynccontextmanager
async def _opened(settings: GatewaySettings) -> AsyncIterator[KubernetesCluster | None]:
    """Open the cluster, where one is configured."""
    if settings.cluster.mode == "off":
        yield None
        return
    # The client library costs memory and start-up time, so a gateway without a cluster never loads
    # it.
    with needing_extra("gateway"):
        from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

    cluster = KubernetesCluster.open(settings.cluster)
    try:
        yield cluster
    finally:
        await cluster.close()


@dataclass(frozen=True)
class _ClusterWork:
    """What tells the cluster of this node's claims, and reads of their pods what it alone knows."""

    statuses: ClaimStatuses
    events: PodEvents
    recorder: EventRecorder
    details: ClusterPodDetails


@dataclass(frozen=True)
class _Work:
    """The parts that run only in the gateway that holds the node lock."""

    preparer: ClaimPreparer
    forgotten: ForgottenClaims
    releaser: LedgerRelease | None
    pods: PodLook
    record: AllocationRecord
    runtime_door: RuntimeDoor | None
    """None where nothing needs the container runtime's plugin interface."""
    cluster: _ClusterWork | None
    """None without a cluster."""


def _foreign_plugins(settings: GatewaySettings, runtime: Runtime) -> ForeignPlugins | None:
    """Make the place where other vendors' device plugins register, where there is a folder for it."""
    if not settings.foreign.dir:
        return None
    folders = (_STATIC_CDI_DIR, Path(settings.cdi_dir))
    own_prefix, watchdog_s = settings.resource_prefix, settings.deadlines.watchdog_s
    return ForeignPlugins(
        settings.foreign, runtime, folders, watchdog_s, own_prefix=own_prefix, profiles=settings.profiles
    )


def _served_by_claims(
    cluster: KubernetesCluster | None, state: NodeState, settings: GatewaySettings
) -> ServedByClaims | None:
    """Make what decides which resources claims serve, where any may."""
    if cluster is None or settings.resources_by == "device-plugin":
        return None
    # It imports the evaluator of selectors, which a gateway without a cluster does not need.
    from topobus.gateway.cluster.served_by_claims import ServedByClaims

    return ServedByClaims(cluster, state, settings)


class _Gateway:
    def __init__(
        self, settings: GatewaySettings, runtime: Runtime, cluster: KubernetesCluster | None, lock: NodeLock
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._readiness = runtime.readiness
        self._state = NodeState(
            runtime.bus,
            runtime.node,
            self._own_resource,
            settings.ids_of,
            settings.profiles,
            # The stand-alone controller, which chooses shapes where there is no cluster, knows neither the exposure nor
            # which CPUs are not ours.
            in_claims=lambda device: cluster is None or settings.offers_dra(device.device_class, device.pool),
            owned_cpus=(owned_cpus(settings.cpus) or None) if cluster is not None else None,
        )
        self._state.containers.tree = Tree(settings.hardware)
        self._liveness = ServiceLiveness(
            runtime.bus,
            PREPARE,
            node=runtime.node,
            clock=runtime.clock,
            settings=settings.silence,
            classes=self._state.inventories,
            on_change=lambda: self._state.note_silence(dict(self._liveness.silent)),
        )
        self._asks = NodeAsks(
            runtime.bus, runtime.node, settings.deadlines, self._rights_of, owned_cpus(settings.cpus) or None
        )
        self._metrics = CallMetrics(runtime.registry)
        self._claim_metrics = ClaimMetrics(runtime.registry)
        self._cpuset_metrics = CpusetMetrics(runtime.registry)
        self._disagreements = DISAGREEMENTS.register(runtime.registry)
        self._cluster = cluster
        self._lock = lock
        self._forwarder = ClaimForwarder(settings.kubelet, lock, settings.deadlines.claim_s)
        self._checkpoint: Checkpoint | None = None
        """None: another gateway holds the lock, so this one must not read the file yet."""
        self._work: _Work | None = None
        self._is_awaited = False
        self._registered = Broadcast()
        """Announced when something else is registered with kubelet than before."""
        watchdog_s = settings.deadlines.watchdog_s
        self._plugin_watch = FolderWatch(Path(settings.kubelet.device_plugin_dir), watchdog_s)
        self._registry_watch = FolderWatch(Path(settings.kubelet.plugins_registry_dir), watchdog_s)
        self._foreign = _foreign_plugins(settings, runtime)
        self._claimed = _served_by_claims(cluster, self._state, settings)
        self._plugins = DevicePlugins(
            settings,
            watch=self._plugin_watch,
            state=self._state,
            asks=self._asks,
            metrics=self._metrics,
            foreign=self._foreign,
            clock=runtime.clock,
            is_awaited=lambda: self._is_awaited,
            claimed=self._claimed,
        )
        self._driver: DraDriver | None = None

    async def run(self) -> None:
        self._readiness.set("inventories", is_ready=False, why="waiting for inventories and the ledger")
        self._stands_by_until = 0.0
        # After a reboot all files are restored before anything is served. A standby gateway leaves
        # them to the lock's holder.
        work = await self._begin() if self._lock.try_begin() else None
        if work is None:
            # A checkpoint that could not be taken over must be detected before this gateway is
            # ready, because a roll-over then ends the one that works.
            await asyncio.to_thread(Checkpoint.load, Path(self._settings.checkpoint_path))
        # The sources of kubelet's lists end last, after the lock was released: see `lock`.
        async with asyncio.TaskGroup() as lists:
            try:
                await self._serve(lists, work)
            finally:
                self._is_awaited = self._lock.is_awaited()
                if self._is_awaited:
                    # Otherwise the next gateway finds another one that still answers, and reports
                    # this to the operator.
                    await self._runtime.bus.stop_answering()
                if self._work is not None:
                    # A write that is no longer awaited must not overwrite the next gateway's files.
                    await self._work.preparer.finish()
                    await self._work.record.finish()
                    if self._work.cluster is not None:
                        await self._work.cluster.statuses.finish()
                self._lock.end()

    async def _begin(self) -> _Work:
        """Take over the checkpoint, because this gateway holds the lock.

        Errors: raises ConfigError when it cannot be used.
        """
        settings = self._settings
        path = Path(settings.checkpoint_path)
        # In threads: when the lock comes from another gateway, kubelet is being served already.
        # What must survive a reboot is beside the checkpoint.
        checkpoint = await asyncio.to_thread(lambda: Checkpoint.load(path, boot_id=boot_id()))
        record = await asyncio.to_thread(AllocationRecord.open, path.with_name("given.json"), self._state.is_holder)
        self._state.containers.is_of_earlier_boot = record.is_of_earlier_boot
        read_claim = stored_claims(self._runtime.bus, settings.nats)
        releaser: LedgerRelease | None = None
        cluster: _ClusterWork | None = None
        if self._cluster is not None:
            read_claim = self._cluster.read_claim
            reported = await asyncio.to_thread(ReportRecord.open, path.with_name("reports.json"))
            cluster = self._cluster_work(self._cluster, reported, checkpoint)
            releaser = LedgerRelease(self._state, self._asks, read_claim, checkpoint, settings.deadlines)
        elif settings.nats.is_nodes_own and settings.offers_any_dra:
            # Not refused, because device plugins need no claims.
            err = without_claims()
            get_logger().warning("claims.unreadable", error=err.message, next_step=err.next_step)
        metadata = ClaimMetadata(
            Path(settings.metadata.dir or path.with_name("device-metadata")),
            settings.metadata.versions,
            self._state.inventories,
            checkpoint.of_claim,
        )
        reports = cluster.statuses if cluster is not None else ClaimReports()
        attachments = SandboxAttachments(
            self._asks,
            checkpoint,
            read_claim,
            self._runtime.clock,
            settings.runtime.attach_s,
            reports=reports,
            describe=metadata.attached,
            with_details=cluster.details.of if cluster is not None else None,
        )
        runtime_door = self._runtime_door(checkpoint, attachments, cluster)
        pinning = runtime_door.pinning if runtime_door is not None else None
        files = self._claim_files(metadata, pinning)
        ledger = ClaimLedger(self._state, self._asks, read_claim, checkpoint, releaser)
        devices = ClaimDevices(self._asks, checkpoint, self._state.device, self._state.containers.why_held)
        steps = ClaimSteps(self._state, read_claim, checkpoint, ledger, devices, attachments, pinning, files)
        preparer = ClaimPreparer(
            self._state, checkpoint, settings.deadlines, ledger, steps, files, reports, self._claim_metrics
        )
        await preparer.restore(is_offered=settings.offers_any_dra)
        await asyncio.to_thread(remove_stale, self._plugin_watch.folder, socket_pattern())
        self._checkpoint = checkpoint
        self._forwarder.open(preparer)
        look = self._pod_look(checkpoint, runtime_door)
        forgotten = ForgottenClaims(preparer, checkpoint, read_claim, look, settings.deadlines, self._runtime.node)
        self._work = _Work(preparer, forgotten, releaser, look, record, runtime_door, cluster)
        return self._work

    def _cluster_work(self, cluster: KubernetesCluster, reported: ReportRecord, checkpoint: Checkpoint) -> _ClusterWork:
        """Continue where the previous process ended, according to what it reported."""
        clock, node = self._runtime.clock, self._runtime.node
        recorder = EventRecorder(cluster, clock, node)
        events = PodEvents(recorder, node)
        tell = self._remark("claim-status")
        statuses = ClaimStatuses(cluster, reported, checkpoint, events, clock, node, tell=tell)
        statuses.restore()
        return _ClusterWork(statuses, events, recorder, ClusterPodDetails(cluster, clock))

    def _claim_files(self, metadata: ClaimMetadata, pinning: CpuPinning | None) -> ClaimFiles:
        return ClaimFiles(
            Path(self._settings.cdi_dir),
            metadata=metadata,
            pinning=pinning,
            metrics=self._claim_metrics,
            tell=self._remark("cdi"),
        )

    def _pod_look(self, checkpoint: Checkpoint, runtime_door: RuntimeDoor | None) -> PodLook:
        return PodLook(
            self._plugins.pods,
            self._state,
            checkpoint,
            runtime=lambda: runtime_door.connection() if runtime_door is not None else None,
            rivals=self._plugins.rivals,
            registrations=self._registrations,
            plugin_failures=self._foreign.failures if self._foreign is not None else dict,
            profiles=self._settings.profiles,
        )

    def _runtime_door(
        self, checkpoint: Checkpoint, attachments: SandboxAttachments, cluster: _ClusterWork | None
    ) -> RuntimeDoor | None:
        """Build the plugin of the container runtime.

        None where nothing needs one: such a gateway works without the runtime's messages.
        """
        if not self._settings.runtime.socket:
            return None
        from topobus.gateway.containers.cpuset_reports import CpusetReports
        from topobus.gateway.containers.runtime_events import RuntimeDoor

        return RuntimeDoor(
            self._settings,
            self._state,
            checkpoint,
            self._runtime.clock,
            attachments,
            self._asks,
            self._remark("nri"),
            CpusetReports(
                cluster.events.cpus_differed if cluster is not None else None,
                self._cpuset_metrics,
                self._remark("cpusets"),
            ),
            self._plugins.pods.cpus,
        )

    async def _serve(self, lists: asyncio.TaskGroup, work: _Work | None) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._state.follow_alignment())
            group.create_task(self._state.follow_inventories())
            group.create_task(self._state.follow_ledger())
            await self._state.wait_until_seen()
            if work is None:
                self._stands_by_until = asyncio.get_running_loop().time() + _STAND_BY_S
                self._readiness.set("registration", is_ready=False, why="looking for kubelet")
            self._readiness.set("inventories", is_ready=True)
            group.create_task(self._plugin_watch.run())
            group.create_task(self._registry_watch.run())
            # The driver first, because the report must not state that none is missing before there
            # is any.
            group.create_task(self._open_driver(group))
            group.create_task(self._report_registration())
            group.create_task(self._liveness.run())
            if self._claimed is not None:
                group.create_task(self._claimed.run())
            plugins: asyncio.Task[None] | None = None
            if work is None:
                await self._lock.begin()
                work = await self._begin()
                # The lists first: the gateway that held the lock keeps its own until then, and not
                # longer than three seconds.
                plugins = group.create_task(self._plugins.run(lists, work.record))
                if self._driver is not None:
                    await self._driver.take_over()
                self._state.changed.announce()
            if work.runtime_door is not None:
                group.create_task(work.runtime_door.run())
            group.create_task(work.preparer.undo_unknown())
            group.create_task(work.preparer.undo_left())
            group.create_task(work.forgotten.run())
            users = UserNaming(work.pods, self._state, self._asks, self._settings.deadlines.reconcile_s)
            group.create_task(users.run())
            cluster, deadlines = self._cluster, self._settings.deadlines
            pods_here = partial(cluster.may_run, node=self._runtime.node) if cluster is not None else None
            reconciler = Reconciler(
                work.pods, self._state, self._asks, deadlines, users, self._disagreements, pods_here
            )
            group.create_task(reconciler.run(self._runtime.beats.loop("pods")))
            await self._runtime.bus.answer(PODS, work.pods.answer, node=self._runtime.node)
            if self._foreign is not None:
                group.create_task(self._foreign.run())
            if self._settings.node_labels_dir:
                group.create_task(FeatureFile(Path(self._settings.node_labels_dir)).follow(self._state))
            self._join_cluster(group, work)
            if plugins is None:
                await self._plugins.run(lists, work.record)

    def _join_cluster(self, group: asyncio.TaskGroup, work: _Work) -> None:
        """Publish slices, settle claims and follow waiting pods, where there is a cluster."""
        releaser = work.releaser
        if self._cluster is None or releaser is None or self._checkpoint is None or work.cluster is None:
            return
        publisher = SlicePublisher(
            self._cluster,
            self._state,
            offers=self._offers_dra,
            shows=self._settings.shown,
            is_judged=self._liveness.is_judged,
            settings=self._settings.cluster,
            readiness=self._readiness,
            registry=self._runtime.registry,
        )
        work.pods.dropped_slice_fields = publisher.dropped
        group.create_task(publisher.run())
        conditions = NodeReadiness(
            self._cluster,
            self._state,
            awaited=lambda device_class: self._awaited(device_class, publisher),
            registered=self._registered,
            published=publisher.published,
            settings=self._settings.cluster,
            clock=self._runtime.clock,
            boot_id=self._checkpoint.boot_id,
            readiness=self._readiness,
            pass_on=self._pass_on_verdicts(),
        )
        group.create_task(conditions.run())
        group.create_task(releaser.run())
        statuses, events, clock = work.cluster.statuses, work.cluster.events, self._runtime.clock
        group.create_task(statuses.run())
        group.create_task(work.cluster.recorder.run())
        health = DeviceHealthReports(self._state, self._checkpoint, statuses, events, clock)
        attempts, settings = work.preparer.attempts, self._settings.cluster
        retries = PodRetries(self._cluster, self._state, attempts, self._checkpoint, settings, clock, events, health)
        group.create_task(retries.run())

    def _pass_on_verdicts(self) -> Callable[[ApiObject], Awaitable[None]] | None:
        """Return what passes on what the Node's conditions say of devices. None: nothing does."""
        mapping = self._settings.cluster.condition_verdicts
        if not mapping:
            return None
        return NodeVerdicts(self._runtime.bus, self._runtime.node, mapping, self._remark("node-verdicts")).pass_on

    def _remark(self, part: str) -> Callable[[str], None]:
        """Return what sets the remark of a part of the readiness without which the gateway is ready:
        what it does for pods and for other claims does not depend on it.
        """
        return lambda why: self._readiness.set(part, is_ready=True, why=why)

    async def _open_driver(self, group: asyncio.TaskGroup) -> None:
        """Serve the DRA driver from the first device on that is offered by it (or the first claim
        still to be undone), also on standby.
        """
        # What is no longer offered must still release what was prepared.
        while not any(map(self._offers_dra, self._state.classes())) and not (
            self._checkpoint is not None and self._checkpoint.entries()
        ):
            await self._state.changed.ticket().wait()
        kubelet = self._settings.kubelet
        self._driver = DraDriver(
            sockets=driver_sockets(kubelet.plugins_dir, kubelet.plugins_registry_dir, DRIVER, self._lock.instance),
            watch=self._registry_watch,
            state=self._state,
            forwarder=self._forwarder,
            metrics=self._metrics,
            deadlines=self._settings.deadlines,
            clock=self._runtime.clock,
        )
        group.create_task(self._driver.run())

    def _own_resource(self, device_class: str) -> str:
        """Return the resource of a class.

        Another vendor's resource keeps its name, so that pods need not change.
        """
        foreign = self._foreign.resource_of(device_class) if self._foreign is not None else ""
        return foreign or f"{self._settings.resource_prefix}/{device_class}"

    def _rights_of(self, device_class: str) -> EditRights:
        """Return what devices of a class may bring into a container."""
        is_foreign = self._foreign is not None and bool(self._foreign.resource_of(device_class))
        return rights_of(device_class, self._settings.edits.get(device_class, NO_RIGHTS), is_foreign=is_foreign)

    def _offers_dra(self, device_class: str) -> bool:
        """Return whether a class has anything for its DRA driver, in a pool or without one."""
        inventory = self._state.inventories().get(device_class)
        pools = {"", *(device.pool for device in inventory.devices)} if inventory is not None else {""}
        return any(self._settings.offers_dra(device_class, pool) for pool in pools)

    def _registrations(self) -> KubeletRegistrations:
        """Return what is registered with kubelet. What is not served yet counts as missing."""
        return KubeletRegistrations(
            folder=str(self._plugin_watch.folder.absolute()),
            has_kubelet=identity(self._plugin_watch.folder / KUBELET_SOCKET) is not None,
            plugins=self._plugins.statuses() if self._checkpoint is not None else {},
            drivers={DRIVER: self._driver.status} if self._driver is not None else {},
        )

    def _awaited(self, device_class: str, publisher: SlicePublisher) -> tuple[str, ...] | None:
        """Return what pods need to have a class's devices and is not there yet. None: pods cannot have them."""
        registrations = self._registrations()
        resources = {offer.resource for offer in self._state.offers() if offer.device_class == device_class}
        plugins = {name: status for name, status in registrations.plugins.items() if name in resources}
        if not plugins and not self._offers_dra(device_class):
            return None
        missing = [] if registrations.has_kubelet else ["kubelet"]
        if self._offers_dra(device_class):
            missing += [] if publisher.is_published(device_class) else ["its slices"]
            plugins |= {DRIVER: registrations.drivers.get(DRIVER, "not served yet")}
        return (*missing, *(f"{name} ({status})" for name, status in plugins.items() if status != "registered"))

    async def _report_registration(self) -> None:
        """Update the readiness part `registration` while there is a kubelet."""
        said: tuple[bool, str] | None = None
        registrations: KubeletRegistrations | None = None
        while True:
            before, registrations = registrations, self._registrations()
            if registrations != before:
                self._registered.announce()
            here = registrations.has_kubelet
            missing = [
                f"{resource}: {status}" for resource, status in registrations.plugins.items() if status != "registered"
            ]
            # A kubelet without DRA is ordinary, so the driver counts only where a class is offered in
            # no other way. A standby gateway waits for it at first, because once it is ready, the
            # one that kubelet uses is ended.
            is_patient = self._checkpoint is None and asyncio.get_running_loop().time() < self._stands_by_until
            needs_driver = is_patient or any(
                self._offers_dra(name) and not self._plugins.offers(name) for name in self._state.classes()
            )
            missing += [
                f"{driver}: {status}"
                for driver, status in registrations.drivers.items()
                if status != "registered" and needs_driver
            ]
            remark = (
                "device plugins are registered when it is our turn"
                if self._checkpoint is None
                else self._plugins.remarks()
            )
            news = (not missing, "; ".join(missing) or remark) if here else (True, "no kubelet here")
            if news != said and (here or said is not None or is_patient):
                said = news
                self._readiness.set("registration", *news)
            await self._plugin_watch.ticket().wait()
