"""kubelet's admission: aligns a pod by policy, takes devices, calls the plugins, merges their
edits, prepares claims, starts containers.

The result for a pod is an Admission or a Rejection, never an exception for what kubelet would
answer with a reason. As in kubelet 1.36 (cm/topologymanager/scope*.go,
cm/devicemanager/manager.go): containers one after another without rollback, resources of a
container one after another, GetPreferredAllocation only when there is a choice, the plugin's answer
intersected with the free devices. Unlike kubelet, which takes devices of a set at random, this
takes them in the order of ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

from topobus.engine.alignment.cpus.cpu_hints import cpu_hints
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.simulation.kubelet.devices import DeviceStore, split_by_affinity
from topobus.simulation.kubelet.drivers import Drivers
from topobus.simulation.kubelet.endpoints import CallFailed, DevicePlugins, Endpoint
from topobus.simulation.kubelet.values import (
    Admission,
    ClaimReference,
    Container,
    ContainerGrant,
    Pod,
    PreparedClaim,
    Rejection,
)
from topobus.values.edits import ContainerEdits, DeviceNode, Mount
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import ContainerKind, Policy, Scope
from topobus.values.view import AlignmentOptions

__all__ = ["Admitter", "merge_responses"]

_NO_LOCALITY = "Resources cannot be allocated with Topology locality"

_V = TypeVar("_V")


class _MergeOptions(TypedDict):
    distances: Sequence[Sequence[int]]
    prefer_closest: bool


class Admitter:
    """Admits pods one at a time, as kubelet does."""

    def __init__(
        self,
        store: DeviceStore,
        plugins: DevicePlugins,
        drivers: Drivers,
        *,
        nodes: NodeSet,
        options: AlignmentOptions,
        distances: Sequence[Sequence[int]],
        cpus: Mapping[int, CpuSet],
        checkpoint: Path | None,
    ) -> None:
        self._store = store
        self._plugins = plugins
        self._drivers = drivers
        self._nodes = nodes
        self._options = options
        self._distances = distances
        self._cpus = cpus
        self._checkpoint = checkpoint
        self._awaited: frozenset[str] = frozenset()
        self._is_loaded = False
        self._active: dict[str, Pod] = {}
        self._grants: dict[tuple[str, str], ContainerGrant] = {}
        self._claims: dict[str, tuple[PreparedClaim, ...]] = {}
        self._lock = asyncio.Lock()

    def active(self) -> tuple[Pod, ...]:
        """Pods that were admitted and not removed."""
        return tuple(self._active.values())

    def grant(self, pod_uid: str, container: str) -> ContainerGrant | None:
        """The resources of a container of an active pod."""
        return self._grants.get((pod_uid, container)) if pod_uid in self._active else None

    def claims(self, pod_uid: str) -> tuple[PreparedClaim, ...]:
        """Prepared claims of an active pod."""
        return self._claims.get(pod_uid, ()) if pod_uid in self._active else ()

    def load(self) -> None:
        """Continue from the checkpoint of an earlier kubelet, if there is one: its pods hold their
        devices until `sources_ready`.
        """
        if not self._is_loaded and self._checkpoint is not None and self._checkpoint.exists():
            self._awaited = self._store.load(self._checkpoint.read_bytes())
        self._is_loaded = True

    def sources_ready(self) -> None:
        """Mark all pods as known: devices that the checkpoint gives to others are free at the next
        look.
        """
        self._awaited = frozenset()

    def forget_started(self) -> None:
        """Begin after a boot: pods keep their devices of the checkpoint, and none of their claims
        is prepared.
        """
        self._claims.clear()
        self._grants.clear()
        self._awaited |= self._active.keys()
        self._active.clear()

    def collect(self) -> None:
        """Free the devices of pods that are gone (kubelet does this lazily)."""
        self._store.keep_only({*self._active, *self._awaited})
        self._save()
        self._grants = {key: grant for key, grant in self._grants.items() if key[0] in self._active}

    async def admit(self, *pods: Pod) -> list[Admission | Rejection]:
        """Take bound pods all the way to started containers.

        Called again for the same pod, it continues where it stopped. All pods are admitted, then
        all claims prepared, then all containers started: kubelet admits one after another in its
        sync loop, and what follows is slower than the next admission.
        """
        answers: dict[str, Admission | Rejection] = {}
        for pod in pods:
            async with self._lock:
                self.collect()
                self._active[pod.uid] = pod
                rejection = await self._allocate(pod)
                self._save()
            if rejection is not None:
                del self._active[pod.uid]
                answers[pod.uid] = rejection
        for pod in pods:
            if pod.uid in answers:
                continue
            claims = await self._drivers.prepare(pod.claims)
            self._claims[pod.uid] = claims
            failed = [f"{claim.uid}: {claim.error}" for claim in claims if claim.error]
            if failed:
                answers[pod.uid] = Rejection(
                    pod=pod, reason="FailedPrepareDynamicResources", message="; ".join(failed), is_final=False
                )
        for pod in pods:
            if pod.uid not in answers:
                answers[pod.uid] = await self._start_all(pod)
        return [answers[pod.uid] for pod in pods]

    async def _start_all(self, pod: Pod) -> Admission | Rejection:
        for container in pod.containers:
            problem = await self.start(pod.uid, container.name)
            if problem:
                return Rejection(pod=pod, reason="CreateContainerConfigError", message=problem, is_final=False)
        grants = tuple(self._grants[(pod.uid, container.name)] for container in pod.containers)
        return Admission(pod=pod, containers=grants, claims=self._claims[pod.uid])

    def _save(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.write_bytes(self._store.checkpoint())

    async def start(self, pod_uid: str, container: str) -> str:
        """Start (or restart) a container: call PreStartContainer at each plugin that wants it.

        An empty text is success.
        """
        if self.grant(pod_uid, container) is None:
            return f"no admitted pod of uid {pod_uid} has a container {container}: there is nothing to start"
        for resource, ids in self._store.held_by(pod_uid, container).items():
            endpoint = self._plugins.endpoint(resource)
            if endpoint is None:
                continue
            try:
                await endpoint.pre_start(ids)
            except CallFailed as err:
                return str(err)
        return ""

    async def remove(self, pod_uid: str) -> dict[str, str]:
        """Handle a deleted pod: claims that no other pod uses are unprepared, and devices are freed
        lazily.

        Return claim uid to error text.
        """
        return await self._drivers.unprepare(self.forget(pod_uid))

    def forget(self, pod_uid: str) -> tuple[ClaimReference, ...]:
        """Drop a pod, and return the claims that no other pod uses."""
        pod = self._active.pop(pod_uid, None)
        self._claims.pop(pod_uid, None)
        in_use = {claim.uid for other in self._active.values() for claim in other.claims}
        return tuple(claim for claim in (pod.claims if pod is not None else ()) if claim.uid not in in_use)

    async def _allocate(self, pod: Pod) -> Rejection | None:
        reusable: dict[str, set[str]] = {}
        pod_hint: Hint | None = None
        if self._options.scope is Scope.POD and self._options.policy is not Policy.NONE:
            total = _pod_total(pod)
            merged = merge_hints(
                self._hint_lists(pod, total, {}), self._nodes, self._options.policy, **self._merge_options()
            )
            if not merged.is_admitted:
                return Rejection(pod=pod, reason="TopologyAffinityError", message=_NO_LOCALITY)
            pod_hint = merged.hint
        for container in pod.containers:
            if (pod.uid, container.name) in self._grants:
                continue
            hint = pod_hint
            if hint is None:
                merged = merge_hints(
                    self._hint_lists(pod, container, reusable),
                    self._nodes,
                    self._options.policy,
                    **self._merge_options(),
                )
                if not merged.is_admitted:
                    return Rejection(pod=pod, reason="TopologyAffinityError", message=_NO_LOCALITY)
                hint = merged.hint
            try:
                grant = await self._allocate_container(pod, container, hint, reusable)
            except CallFailed as err:
                return Rejection(
                    pod=pod,
                    reason="UnexpectedAdmissionError",
                    message=f"Allocate failed due to {err}, which is unexpected",
                )
            self._grants[(pod.uid, container.name)] = grant
            for resource, ids in grant.devices.items():
                if container.kind is ContainerKind.INIT:
                    reusable.setdefault(resource, set()).update(ids)
                else:
                    reusable.get(resource, set()).difference_update(ids)
        return None

    def _merge_options(self) -> _MergeOptions:
        return {"distances": self._distances, "prefer_closest": self._options.prefer_closest_numa_nodes}

    def _hint_lists(
        self, pod: Pod, container: Container, reusable: Mapping[str, set[str]]
    ) -> list[tuple[Hint, ...] | None]:
        if self._options.policy is Policy.NONE:
            return []
        lists: list[tuple[Hint, ...] | None] = [
            self._store.hints(
                resource,
                count,
                self._nodes,
                reusable.get(resource, ()),
                held=self._store.held(pod.uid, container.name, resource),
            )
            for resource, count in container.resources.items()
            if self._store.knows(resource)
        ]
        if container.cpus:
            lists.append(cpu_hints(self._cpus, self._free_cpus(), container.cpus))
        return lists

    async def _allocate_container(
        self, pod: Pod, container: Container, hint: Hint, reusable: Mapping[str, set[str]]
    ) -> ContainerGrant:
        responses: list[tuple[str, pb.ContainerAllocateResponse]] = []
        for resource, count in container.resources.items():
            if count == 0:
                continue
            held = self._store.held(pod.uid, container.name, resource)
            earlier = self._store.answer(pod.uid, container.name, resource)
            self._check_held(pod.uid, container.name, resource, count, held)
            if held and earlier is not None:
                # From the checkpoint: the stored answer is used, and the plugin is not called
                # again.
                responses.append((resource, pb.ContainerAllocateResponse.FromString(earlier)))
                continue
            if held:
                taken, endpoint = set(held), self._serving(resource)
            else:
                taken, endpoint = await self._choose(resource, count, hint.nodes, reusable.get(resource, set()))
            self._store.take(resource, taken)
            try:
                answer = await endpoint.allocate(taken)
                self._store.hold(pod.uid, container.name, resource, taken)
                self._store.keep_answer(pod.uid, container.name, resource, answer.SerializeToString())
                responses.append((resource, answer))
            except CallFailed:
                # The reservation of this resource is undone; what earlier resources of the pod hold
                # stays until the pod is collected.
                self._store.drop(pod.uid, container.name, resource)
                raise
        edits, cdi_devices, conflicts = merge_responses(responses)
        return ContainerGrant(
            name=container.name,
            devices=self._store.held_by(pod.uid, container.name),
            cpus=self._choose_cpus(container.cpus, hint.nodes),
            alignment=hint,
            edits=edits,
            cdi_devices=cdi_devices,
            conflicts=conflicts,
        )

    def _check_held(self, pod_uid: str, container: str, resource: str, count: int, held: Iterable[str]) -> None:
        """Refuse a pod that is admitted again, as after a reboot, when devices that it holds by the
        checkpoint are not there (yet).

        After a restart of kubelet alone its containers run, and nothing is checked.
        """
        own = set(held)
        if not own:
            return
        if len(own) != count:
            raise CallFailed(
                f'pod "{pod_uid}" container "{container}" changed request for resource "{resource}" from '
                f"{len(own)} to {count}"
            )
        healthy = self._store.healthy(resource)
        if not healthy:
            raise CallFailed(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if not own <= healthy:
            raise CallFailed(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            )

    async def _choose(
        self, resource: str, count: int, affinity: NodeSet | None, reusable: Iterable[str]
    ) -> tuple[set[str], Endpoint]:
        """Pick device ids by kubelet's order: reusable, preferred within the aligned, aligned,
        preferred, unaligned, without topology.
        """
        store = self._store
        if not store.knows(resource):
            raise CallFailed(f"cannot allocate unregistered device {resource}")
        if not store.healthy(resource):
            raise CallFailed(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        endpoint = self._serving(resource)
        taken: set[str] = set()

        def take(ids: Iterable[str]) -> bool:
            taken.update(sorted(set(ids) - taken)[: count - len(taken)])
            return len(taken) == count

        if take(reusable):
            return taken, endpoint
        available = store.available(resource) - taken
        missing = count - len(taken)
        if len(available) < missing:
            raise CallFailed(
                f"requested number of devices unavailable for {resource}. Requested: {missing}, Available: "
                f"{len(available)}"
            )
        split = split_by_affinity(store.devices(resource), available, affinity)
        aligned = set(split.aligned)
        if missing < len(aligned):
            if not take(await endpoint.preferred(aligned | taken, set(taken), count) & aligned):
                take(aligned)
            return taken, endpoint
        if not take(aligned) and not take(await endpoint.preferred(available | taken, set(taken), count) & available):
            for rest in (split.unaligned, split.no_topology):
                take(rest)
        return taken, endpoint

    def _serving(self, resource: str) -> Endpoint:
        endpoint = self._plugins.endpoint(resource)
        if endpoint is None:
            raise CallFailed(f"unknown Device Plugin {resource}")
        return endpoint

    def _free_cpus(self) -> CpuSet:
        online = CpuSet.from_bits(0)
        for cpus in self._cpus.values():
            online |= cpus
        for grant in self._grants.values():
            online -= grant.cpus
        return online

    def _choose_cpus(self, count: int, affinity: NodeSet | None) -> CpuSet:
        """Pick exclusive CPUs: aligned ones first, by id. kubelet's packing by core and socket is
        not simulated.
        """
        if not count:
            return CpuSet()
        free = self._free_cpus()
        if len(free) < count:
            raise CallFailed(f"not enough cpus available to satisfy request: requested={count}, available={len(free)}")
        near = CpuSet.from_bits(0)
        for node in affinity or ():
            near |= self._cpus.get(node, CpuSet())
        order = [*(free & near), *(free - near)]
        return CpuSet.of(order[:count])


def merge_responses(
    responses: Iterable[tuple[str, pb.ContainerAllocateResponse]],
) -> tuple[ContainerEdits, tuple[str, ...], tuple[str, ...]]:
    """Merge the answers of several resources as kubelet does: by key the first wins, and a
    different second value is only reported.
    """
    env: dict[str, str] = {}
    annotations: dict[str, str] = {}
    nodes: dict[str, DeviceNode] = {}
    mounts: dict[str, Mount] = {}
    cdi_devices: dict[str, None] = {}
    conflicts: list[str] = []

    def keep(what: str, resource: str, values: dict[str, _V], key: str, value: _V) -> None:
        if values.setdefault(key, value) != value:
            conflicts.append(f"{what} {key}: {resource} wants {value}, {values[key]} was there first")

    for resource, response in responses:
        for key, value in response.envs.items():
            keep("env", resource, env, key, value)
        for device in response.devices:
            node = DeviceNode(path=device.container_path, host_path=device.host_path, permissions=device.permissions)
            keep("device", resource, nodes, device.container_path, node)
        for mount in response.mounts:
            options = ("ro" if mount.read_only else "rw", "bind")
            bind = Mount(host_path=mount.host_path, container_path=mount.container_path, options=options)
            keep("mount", resource, mounts, mount.container_path, bind)
        for key, text in response.annotations.items():
            keep("annotation", resource, annotations, key, text)
        cdi_devices |= dict.fromkeys(cdi_device.name for cdi_device in response.cdi_devices)
    edits = ContainerEdits(
        env=dict(sorted(env.items())),
        device_nodes=tuple(nodes.values()),
        mounts=tuple(mounts.values()),
        annotations=dict(sorted(annotations.items())),
    )
    return edits, tuple(cdi_devices), tuple(conflicts)


def _pod_total(pod: Pod) -> Container:
    """What the pod needs at its peak: app containers and sidecars together, or one init container
    beside the sidecars before it.
    """
    steady: dict[str, int] = {}
    peak: dict[str, int] = {}
    cpus_steady = cpus_peak = 0
    for container in sorted(pod.containers, key=lambda container: container.kind is ContainerKind.APP):
        is_init = container.kind is ContainerKind.INIT
        for name, count in container.resources.items():
            if is_init:
                peak[name] = max(peak.get(name, 0), steady.get(name, 0) + count)
            else:
                steady[name] = steady.get(name, 0) + count
        if is_init:
            cpus_peak = max(cpus_peak, cpus_steady + container.cpus)
        else:
            cpus_steady += container.cpus
    total = {name: max(steady.get(name, 0), peak.get(name, 0)) for name in sorted({*steady, *peak})}
    return Container(name="", resources=total, cpus=max(cpus_steady, cpus_peak))
