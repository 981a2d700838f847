"""A kubelet for tests of device plugins and DRA drivers: real gRPC on real unix sockets, kubelet
1.36's order, limits and wording. No cluster.

For plugin authors: start it over a temporary folder, point the plugin's kubelet directories there,
and use it as a node.

    async with KubeletSimulator(root, numa_nodes=NodeSet(0, 1)) as kubelet:
        plugin = start_my_plugin(kubelet.device_plugin_dir)
        await kubelet.wait_for_resource("example.com/gpu", allocatable=8)
        answer = await kubelet.admit(Pod(name="p", uid="u", containers=(Container(name="c", resources={"example.com/gpu": 2}),)))
        assert isinstance(answer, Admission), answer
        print(answer.container("c").edits)

It has Registration on device-plugins/kubelet.sock, ListAndWatch, capacity, Topology Manager
policies and scopes, GetPreferredAllocation, Allocate, PreStartContainer, the plugin watcher over
plugins_registry, NodePrepareResources, NodeUnprepareResources, the DRA health stream, PodResources
on pod-resources/kubelet.sock, and restarts. `events` is the ordered log of every call, named as in
kubelet's recorded transcript. It lacks CPU packing (exclusive CPUs are taken by id), memory
manager, the node object, container runtimes.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from topobus.simulation.kubelet.admission import Admitter
from topobus.simulation.kubelet.checkpoint import CHECKPOINT_FILE
from topobus.simulation.kubelet.devices import DeviceStore, PluginDevice
from topobus.simulation.kubelet.drivers import DriverHealth, Drivers
from topobus.simulation.kubelet.endpoints import DevicePlugins
from topobus.simulation.kubelet.podresources import PodResources
from topobus.simulation.kubelet.values import (
    DEVICE_PLUGINS,
    PLUGINS,
    PLUGINS_REGISTRY,
    POD_RESOURCES,
    Admission,
    Capacity,
    ClaimDevice,
    ClaimReference,
    Container,
    ContainerGrant,
    EventLog,
    KubeletEvent,
    KubeletTimings,
    Pod,
    PreparedClaim,
    Rejection,
    make_folders,
)
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.view import AlignmentOptions

__all__ = [
    "Admission",
    "Capacity",
    "ClaimDevice",
    "ClaimReference",
    "Container",
    "ContainerGrant",
    "KubeletEvent",
    "KubeletSimulator",
    "KubeletTimings",
    "Pod",
    "PreparedClaim",
    "Rejection",
]


class KubeletSimulator:
    """One node's kubelet over the folder `root`.

    Args:
        root: in place of /var/lib/kubelet. Keep it short: a unix socket's path ends at 107 bytes.
        numa_nodes: the machine's NUMA nodes, memory-only ones included.
        options: Topology Manager policy and scope by kubelet's names. By default best-effort per
            container.
        distances: SLIT rows, for prefer-closest-numa-nodes.
        cpus: online CPUs by NUMA node, for containers that ask exclusive CPUs.
        wipe_slices: called with a driver's name to delete its ResourceSlices of this node, and with "" at kubelet's start to delete all of them:
            `lambda driver: server.wipe_slices("n1", driver)` with an ApiServerSimulator. None: a kubelet without an API server.
    """  # noqa: E501

    def __init__(
        self,
        root: Path,
        *,
        numa_nodes: NodeSet = NodeSet(0),  # noqa: B008  (immutable)
        options: AlignmentOptions = AlignmentOptions(),  # noqa: B008  (immutable)
        distances: Sequence[Sequence[int]] = (),
        cpus: Mapping[int, CpuSet] | None = None,
        timings: KubeletTimings = KubeletTimings(),  # noqa: B008  (immutable)
        monotonic: Callable[[], float] = time.monotonic,
        wipe_slices: Callable[[str], object] | None = None,
    ) -> None:
        self.root = root
        self._monotonic = monotonic
        self._log = EventLog(monotonic)
        self._store = DeviceStore(timings.grace_s)
        make_folders(root)
        self._plugins = DevicePlugins(self.device_plugin_dir, self._store, self._log, timings, monotonic)
        self._timings = timings
        self._changed_pods: dict[str, asyncio.Event] = {}
        self._drivers = Drivers(
            self.plugins_registry_dir,
            self._log,
            timings,
            monotonic,
            wipe_slices=wipe_slices,
            device_plugins=self._plugins,
        )
        self._admitter = Admitter(
            self._store,
            self._plugins,
            self._drivers,
            nodes=numa_nodes,
            options=options,
            distances=distances,
            cpus=cpus or {},
            checkpoint=self.device_plugin_dir / CHECKPOINT_FILE,
        )
        self._pod_resources = PodResources(
            root / POD_RESOURCES,
            self._store,
            self._admitter,
            self._log,
            monotonic,
            CpuSet.of(cpu for near in (cpus or {}).values() for cpu in near),
        )

    @property
    def device_plugin_dir(self) -> Path:
        """The folder of the plugins' sockets and of kubelet.sock."""
        return self.root / DEVICE_PLUGINS

    @property
    def plugins_registry_dir(self) -> Path:
        """Where registration sockets of DRA drivers go."""
        return self.root / PLUGINS_REGISTRY

    @property
    def plugins_dir(self) -> Path:
        """Where DRA drivers keep their service sockets, a folder each."""
        return self.root / PLUGINS

    @property
    def pod_resources_socket(self) -> Path:
        """The PodResources socket."""
        return self.root / POD_RESOURCES / "kubelet.sock"

    @property
    def events(self) -> tuple[KubeletEvent, ...]:
        """Every call so far, in order."""
        return self._log.all()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, *, is_restart: bool = False) -> None:
        """Start as kubelet does: read its checkpoint, delete the sockets in the device plugin
        folder, and serve there again.

        Errors: raises ValueError for a checkpoint that cannot be read.
        """
        if is_restart:
            self._store.restart()
        self._admitter.load()
        await self._plugins.start()
        await self._pod_resources.start()
        await self._drivers.start()

    async def stop(self) -> None:
        """Stop: every stream closes, kubelet's own sockets are removed, holdings and
        claims stay.
        """
        await self._drivers.stop()
        await self._pod_resources.stop()
        await self._plugins.stop()

    async def restart(self) -> None:
        """Stop and start: resources come back with capacity 0 until their plugins register again.

        Running pods keep what they hold.
        """
        await self.stop()
        await self.start(is_restart=True)

    async def reboot(self) -> None:
        """Start on a machine that was booted.

        No container runs and no claim counts as prepared, so every pod must be admitted again.
        Holdings and claims stay. kubelet starts before drivers that are pods themselves: a pod with
        claims fails with "DRA driver … is not registered", and is tried again after `pod_retry_s`.
        """
        await self.stop()
        self._admitter.forget_started()
        await self.start(is_restart=True)

    def wipe_at_once(self) -> None:
        """Delete the slices of drivers that are away now or go later without waiting `wipe_s`, for
        a test that has removed its drivers from the node for good.
        """
        self._drivers.wipe_at_once()

    async def admit(self, pod: Pod) -> Admission | Rejection:
        """Admit a pod, prepare its claims and start its containers.

        Called again after a rejection that is not final, it continues.
        """
        return (await self._admitter.admit(pod))[0]

    async def admit_together(self, pods: Iterable[Pod]) -> list[Admission | Rejection]:
        """Admit pods that were bound at once: first all are admitted, then all claims prepared,
        then all containers started.
        """
        return await self._admitter.admit(*pods)

    async def admit_with_retries(self, pod: Pod) -> Admission | Rejection:
        """Admit a pod and try again what can be tried again, as kubelet's pod workers do: each
        `pod_retry_s`, or when the pod has changed (`pod_changed`), five times in all.
        """
        for _ in range(4):
            changed = self._changed_pods.setdefault(pod.uid, asyncio.Event())
            changed.clear()
            answer = await self.admit(pod)
            if isinstance(answer, Admission) or answer.is_final:
                return answer
            try:
                async with asyncio.timeout(self._timings.pod_retry_s):
                    await changed.wait()
            except TimeoutError:
                continue
        return await self.admit(pod)

    def pod_changed(self, pod_uid: str) -> None:
        """Report a change of a pod at the API server, for example of its annotations. A pod worker
        that waits for its next try continues at once.
        """
        self._changed_pods.setdefault(pod_uid, asyncio.Event()).set()

    def sources_ready(self) -> None:
        """Report that all pods are known: devices that an earlier kubelet's checkpoint gives to
        others are free from the next look on.
        """
        self._admitter.sources_ready()

    async def restart_container(self, pod: Pod, container: str) -> str:
        """Start a container again: PreStartContainer, no new Allocate. An empty text is success."""
        return await self._admitter.start(pod.uid, container)

    async def remove(self, pod: Pod) -> dict[str, str]:
        """Delete a pod. Its claims are unprepared (the result is claim uid to error text), and its
        devices are free at the next look.
        """
        return await self._admitter.remove(pod.uid)

    def remove_by_force(self, pod: Pod) -> None:
        """Delete a pod by force (`--force --grace-period=0`): kubelet forgets it at once, whether
        its containers have ended or not.

        Its devices of plugins are free at the next look. Its claims are unprepared when claims are
        next compared with pods, each `reconcile_s` (`compare_claims`).
        """
        self._drivers.owe(self._admitter.forget(pod.uid))

    async def compare_claims(self) -> dict[str, str]:
        """Compare claims with pods now rather than after `reconcile_s`. Claims without a pod are
        unprepared when this ends.

        Return claim uid to error text.
        """
        return await self._drivers.compare()

    async def prepare_claims(self, claims: Iterable[ClaimReference]) -> tuple[PreparedClaim, ...]:
        """Prepare claims without a pod."""
        return await self._drivers.prepare(claims)

    async def unprepare_claims(self, claims: Iterable[ClaimReference]) -> dict[str, str]:
        """Unprepare claims without a pod. Return claim uid to error text, empty when all
        went well.
        """
        return await self._drivers.unprepare(claims)

    def capacity(self) -> dict[str, Capacity]:
        """What the node would report, by resource."""
        return self._store.capacity(self._monotonic())

    def healthy_counts(self, resource: str) -> tuple[int, ...]:
        """Return how many devices of a resource were healthy after each list, each plugin's end and
        each restart. It also shows short changes.
        """
        return self._store.healthy_counts(resource)

    def devices(self, resource: str) -> dict[str, PluginDevice]:
        """The present list of a resource."""
        return self._store.devices(resource)

    def drivers(self) -> tuple[str, ...]:
        """DRA drivers registered now."""
        return self._drivers.names()

    def device_health(self, driver: str, pool: str, device: str) -> DriverHealth:
        """What pod status would show for a DRA device."""
        return self._drivers.device_health(driver, pool, device)

    async def wait_for_more(self, count: int) -> tuple[KubeletEvent, ...]:
        """Wait, without limit, until there are more events than `count`, and return all of them."""
        return await self._log.more_than(count)

    async def wait_for_event(
        self, event: str, *, subject: str = "", count: int = 1, timeout_s: float = 60.0
    ) -> KubeletEvent:
        """Wait until an event of that name (and subject, when given) came `count` times.

        Return the last of them.
        """

        def matching() -> list[KubeletEvent]:
            return [
                kubelet_event
                for kubelet_event in self._log.all()
                if kubelet_event.event == event and subject in ("", kubelet_event.subject)
            ]

        await self._log.until(
            lambda: len(matching()) >= count, timeout_s, f"{event}({subject or 'anything'}) x {count}"
        )
        return matching()[count - 1]

    async def wait_for_resource(self, resource: str, *, allocatable: int, timeout_s: float = 60.0) -> Capacity:
        """Wait until a resource has so many allocatable devices."""

        def holds() -> bool:
            capacity = self.capacity().get(resource)
            return capacity is not None and capacity.allocatable == allocatable

        await self._log.until(
            holds, timeout_s, f"{allocatable} allocatable {resource}, now {self.capacity().get(resource)}"
        )
        return self.capacity()[resource]

    async def wait_for_driver(self, driver: str) -> None:
        """Wait until a DRA driver is registered."""
        await self._log.until(lambda: driver in self.drivers(), 60.0, f"driver {driver}")

    async def wait_for_health(
        self, driver: str, pool: str, device: str, state: str, *, timeout_s: float = 60.0
    ) -> DriverHealth:
        """Wait until a DRA device's health is `Healthy`, `Unhealthy` or `Unknown`."""
        await self._log.until(
            lambda: self.device_health(driver, pool, device).state == state,
            timeout_s,
            f"{driver}/{pool}/{device} to be {state}",
        )
        return self.device_health(driver, pool, device)
