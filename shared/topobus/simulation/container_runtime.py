"""A container runtime's side of NRI: sandboxes, containers with their CPUs, and the rules by which
a runtime treats its plugin.

Frames are encoded and decoded here independently of our own code, by the protocol's own
description, so that an error in ours is seen. As in containerd, there is one plugin call at a time,
under a lock that an update of the plugin's own accord also waits for. A call that takes longer than
the limit ends the connection, and the runtime continues without the plugin. Updates of containers
that are still being made are dropped silently. An update of a container that does not run yet
changes only its stored values, because its start has read them already (containerd,
container_update_resources.go and container_start.go). A call with one container that cannot be
changed fails as a whole, after the others were changed. A start that fails is not reported: NRI
only gets the container's removal. `tests/engine/test_cpus.py` checks the same promises on a real
containerd.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import Message

from topobus.formats.containers.cdi import parse
from topobus.process.broadcast import Broadcast
from topobus.runtimepb.nri.v1alpha1 import api_pb2 as nri
from topobus.runtimepb.ttrpc.v1 import api_pb2 as ttrpc
from topobus.values.edits import Mount
from topobus.values.idset import CpuSet

__all__ = ["MadeContainer", "NotStarted", "NotStopped", "Refused", "SimulatedRuntime"]

_TO_PLUGIN, _TO_RUNTIME = 1, 2
_REQUEST, _RESPONSE = 1, 2
# The status of an error that has none (gRPC's codes).
_UNKNOWN = 2
_EVENTS_WITH_OWN_METHODS = {nri.CREATE_CONTAINER, nri.UPDATE_CONTAINER, nri.STOP_CONTAINER}


class Refused(Exception):
    """Raised where the plugin answers with an error: the runtime starts nothing."""


class NotStopped(Exception):
    """Raised where a container cannot be stopped now and continues to run."""


class NotStarted(Exception):
    """Raised where a container was made and cannot be started: a mount has no source."""


@dataclass
class MadeContainer:
    """A container as its cgroup shows it."""

    id: str
    message: nri.Container
    cpus: CpuSet
    """What it runs on; until it is started, what it would."""
    stored: CpuSet | None = None
    """What the runtime has written down for it, and shows; None: nothing."""
    mems: str = ""
    quota: int = 0
    is_made: bool = False
    state: nri.ContainerState = nri.CONTAINER_CREATED
    mounts: tuple[str, ...] = ()
    """Where something is mounted in it."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the plugin gave it."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations that the plugin gave it."""


@dataclass
class SimulatedRuntime:
    """One runtime.

    `dialect` is how it sends events that have no answer: by one method (before NRI 0.11), or each
    by its own.
    """

    socket: Path
    online: CpuSet
    dialect: str = "methods"
    limit_s: float = 2.0
    containers: dict[str, MadeContainer] = field(default_factory=dict)
    refuses_updates: set[str] = field(default_factory=set)
    """Containers that it cannot change. It reports each by name, in an answer without an error."""
    hung: set[str] = field(default_factory=set)
    """Containers whose shim does not answer, or whose process waits in the kernel: an update that
    names one of them changes the others and then fails as a whole, without a name. No signal ends
    them, and the plugin hears nothing of them until they have ended after all."""
    silent: bool = False
    """Whether updates are done and not answered."""
    updates: list[tuple[str, ...]] = field(default_factory=list)
    """Which containers each call of the plugin's own accord named."""
    ignores_term: set[str] = field(default_factory=set)
    """Containers that end by KILL alone, which kubelet sends at the end of the grace period: two
    seconds after a deletion by force."""
    unlisted: set[str] = field(default_factory=set)
    """Containers whose state a runtime that was started again could not read: they run, and no
    plugin hears of them."""
    sandboxes: dict[str, nri.PodSandbox] = field(default_factory=dict)
    """Those that are there, stopped ones too, by id."""
    synchronized: asyncio.Event = field(default_factory=asyncio.Event)
    registered: list[str] = field(default_factory=list)
    piece_bytes: int = 4096
    cdi_dir: Path | None = None
    """Where CDI files are; None: names bring nothing."""
    while_making: Callable[[], Awaitable[None]] | None = None
    """Awaited when the plugin has answered what a container gets, and
    the container does not exist yet."""
    while_starting: Callable[[], Awaitable[None]] | None = None
    """Awaited when a container is there and its start has read what was stored of it, and it does
    not run yet."""
    control_groups: Path | None = None
    """Where the root of the machine is whose control groups containers have, one named like each;
    None: they have none that anybody could read."""
    cgroup_version: int = 1
    when_applied: Callable[[MadeContainer], None] | None = None
    """Called when a container's cgroup has changed: a real process may act as the container."""
    _writer: asyncio.StreamWriter | None = None
    _mask: int = 0
    _count: int = 0
    _stream: int = 1
    _waiting: dict[int, asyncio.Future[ttrpc.Response]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: Broadcast = field(default_factory=Broadcast)
    """Set, and replaced, whenever a container or the connection has changed."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[SimulatedRuntime]:
        """Listen for the length of a block.

        Afterwards the socket is gone and the plugin is disconnected.
        """
        async with asyncio.TaskGroup() as group:
            tasks: set[asyncio.Task[None]] = set()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                tasks.add(group.create_task(self._plugin(reader, writer)))

            server = await asyncio.start_unix_server(accept, self.socket)
            try:
                yield self
            finally:
                server.close()
                self.socket.unlink(missing_ok=True)
                self.disconnect()
                for task in tasks:
                    task.cancel()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        It is checked whenever a container, or the connection, has changed.
        """
        if not await self._changed.until(holds, asyncio.timeout(60)):
            raise TimeoutError

    def disconnect(self) -> None:
        """End the connection, as a runtime does with a plugin that was too slow."""
        self.synchronized.clear()
        self._changed.announce()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for response in self._waiting.values():
            if not response.done():
                response.set_exception(ConnectionError("closed"))

    async def create(
        self, name: str, *, pod: str = "pod", cdi: tuple[str, ...] = (), env: tuple[str, ...] = (), cpus: str = ""
    ) -> MadeContainer:
        """Make a container as kubelet requests it and start it.

        Errors: raises Refused when the plugin refuses, NotStarted when it was made and a mount of
        it has no source.
        """
        self._count += 1
        message = nri.Container(id=f"{self._count:064x}", pod_sandbox_id=f"sandbox-{pod}", name=name, env=list(env))
        message.CDI_devices.extend(nri.CDIDevice(name=device) for device in cdi)
        message.linux.resources.cpu.cpus = cpus
        message.linux.cgroups_path = (
            f"/kubepods/besteffort/pod{pod}/{message.id}" if self.control_groups is not None else ""
        )
        # A file is read again for each container, and of two mounts on one place the later one
        # stays.
        mounts = {mount.container_path: mount for mount in self._mounts_of(cdi)}
        message.mounts.extend(
            nri.Mount(destination=path, type="bind", source=mount.host_path) for path, mount in mounts.items()
        )
        sandbox = self._sandbox_of(pod)
        message.pod_sandbox_id = sandbox.id
        asked = CpuSet.parse(cpus) if cpus else None
        made = MadeContainer(id=message.id, message=message, cpus=asked or self.online, stored=asked)
        async with self._lock:
            answer = await self._event(
                nri.CREATE_CONTAINER,
                "CreateContainer",
                nri.CreateContainerRequest(pod=sandbox, container=message),
                message,
            )
            if answer is not None:
                adjustment = nri.CreateContainerResponse.FromString(answer).adjust
                self._store(made, adjustment.linux.resources)
                _change_mounts(mounts, adjustment.mounts)
                made.env = {variable.key: variable.value for variable in adjustment.env}
                made.annotations = dict(adjustment.annotations)
        missing = _sources_missing(mounts.values())
        made.mounts = tuple(mounts)
        self.containers[made.id] = made
        if self.while_making is not None:
            await self.while_making()
        made.is_made = True
        await self._tell(nri.POST_CREATE_CONTAINER, "PostCreateContainer", sandbox, made)
        # From here on the start uses what it has read, whatever is stored meanwhile.
        started_with = made.stored or self.online
        if self.while_starting is not None:
            await self.while_starting()
        if missing:
            made.state = nri.CONTAINER_STOPPED
            raise NotStarted(f"stat {missing[0]}: no such file or directory")
        made.state = nri.CONTAINER_RUNNING
        self._set_cpus(made, started_with)
        await self._tell(nri.POST_START_CONTAINER, "PostStartContainer", sandbox, made)
        return made

    async def _tell(self, event: nri.Event, method: str, sandbox: nri.PodSandbox, made: MadeContainer) -> None:
        async with self._lock:
            await self._event(
                event, method, nri.ContainerRequest(pod=sandbox, container=self._shown(made)), made.message
            )

    def _mounts_of(self, names: tuple[str, ...]) -> tuple[Mount, ...]:
        if self.cdi_dir is None:
            return ()
        specs = []
        for path in sorted(self.cdi_dir.glob("*.json")):
            # The claim of a file may end meanwhile.
            with suppress(FileNotFoundError):
                specs.append(parse(path.read_bytes()))
        devices = {
            spec.qualified_name(device.name): (*spec.common.mounts, *device.edits.mounts)
            for spec in specs
            for device in spec.devices
        }
        if unresolvable := set(names) - devices.keys():
            raise Refused(f"unresolvable CDI devices {', '.join(sorted(unresolvable))}")
        return tuple(mount for name in names for mount in devices[name])

    async def run_pod(
        self, name: str, *, namespace: str = "default", is_on_host_network: bool = False, network_namespace: str = ""
    ) -> nri.PodSandbox:
        """Start a pod's sandbox, one more if it had some.

        Its uid is `uid-<name>`, its network namespace the given one, or a path where none is given.

        Errors: raises Refused when the plugin refuses, which it must not: containerd before 2.2.6
        would leave the sandbox's process behind, and end at its next restart.
        """
        self._count += 1
        sandbox = nri.PodSandbox(id=f"sandbox-{name}-{self._count}", name=name, uid=f"uid-{name}", namespace=namespace)
        # As in containerd 2: a pod on the host's network has no path.
        path = "" if is_on_host_network else network_namespace or f"/var/run/netns/cni-{self._count}"
        network = nri.LinuxNamespace(type="network", path=path)
        sandbox.linux.namespaces.extend([nri.LinuxNamespace(type="pid"), network])
        async with self._lock:
            await self._event(nri.RUN_POD_SANDBOX, "RunPodSandbox", nri.PodSandboxRequest(pod=sandbox), nri.Container())
        self.sandboxes[sandbox.id] = sandbox
        return sandbox

    async def stop_pod(self, sandbox: nri.PodSandbox) -> None:
        """Stop a sandbox. It stays listed. The plugin is called when nothing in it runs any more.

        Errors: raises NotStopped when a container in it cannot be stopped. The plugin is not called
        then.
        """
        self._refuse_hung(sandbox)
        async with self._lock:
            await self._event(
                nri.STOP_POD_SANDBOX, "StopPodSandbox", nri.PodSandboxRequest(pod=sandbox), nri.Container()
            )

    def _refuse_hung(self, sandbox: nri.PodSandbox) -> None:
        for made in self.containers.values():
            if made.message.pod_sandbox_id == sandbox.id and made.id in self.hung:
                raise NotStopped(f'failed to stop container "{made.id}": context deadline exceeded')

    async def remove_pod(self, sandbox: nri.PodSandbox) -> None:
        """Remove a sandbox."""
        async with self._lock:
            await self._event(
                nri.REMOVE_POD_SANDBOX, "RemovePodSandbox", nri.PodSandboxRequest(pod=sandbox), nri.Container()
            )
        self.sandboxes.pop(sandbox.id, None)

    def _sandbox_of(self, pod: str) -> nri.PodSandbox:
        """Find a pod's newest sandbox.

        Where none was started, a pod has one that was not reported to the plugin.
        """
        nameless = nri.PodSandbox(id=f"sandbox-{pod}", name=pod, uid=f"uid-{pod}", namespace="default")
        return next((sandbox for sandbox in reversed(self.sandboxes.values()) if sandbox.name == pod), nameless)

    async def resize(self, made: MadeContainer, *, cpus: str = "") -> None:
        """Update a container as kubelet does."""
        asked = nri.LinuxResources(cpu=nri.LinuxCPU(cpus=cpus))
        async with self._lock:
            request = nri.UpdateContainerRequest(container=self._shown(made), linux_resources=asked)
            answer = await self._event(nri.UPDATE_CONTAINER, "UpdateContainer", request, made.message)
            updates = nri.UpdateContainerResponse.FromString(answer).update if answer is not None else []
            self._apply(made, updates[-1].linux.resources if updates else asked)

    async def end(self, made: MadeContainer, *, is_killed: bool = True) -> None:
        """Stop and remove a container. `is_killed`: the grace period is over.

        Errors: raises NotStopped when it continues to run.
        """
        if made.id in self.hung or (made.id in self.ignores_term and not is_killed):
            raise NotStopped(
                f"an error occurs during waiting for container {made.id} to be killed: wait container: "
                "context deadline exceeded"
            )
        async with self._lock:
            await self._event(
                nri.STOP_CONTAINER, "StopContainer", nri.StopContainerRequest(container=made.message), made.message
            )
            del self.containers[made.id]
            await self._event(
                nri.REMOVE_CONTAINER, "RemoveContainer", nri.ContainerRequest(container=made.message), made.message
            )

    async def event(self, event: nri.Event, method: str, request: Message) -> bytes | None:
        """Send any event."""
        async with self._lock:
            return await self._event(event, method, request, nri.Container())

    async def _event(self, event: nri.Event, method: str, request: Message, container: nri.Container) -> bytes | None:
        """Send an event that the plugin wants.

        None when it is not connected, wants none, or is too slow.
        """
        if self._writer is None or not self.synchronized.is_set() or not self._mask & (1 << (event - 1)):
            return None
        if self.dialect == "state-change" and event not in _EVENTS_WITH_OWN_METHODS:
            fields = {
                name: getattr(request, name)
                for name in ("pod", "container")
                if name in request.DESCRIPTOR.fields_by_name
            }
            method, request = "StateChange", nri.StateChangeEvent(event=event, **fields)
        try:
            return await self._call(method, request)
        except (TimeoutError, ConnectionError):
            self.disconnect()
            return None

    def _shown(self, made: MadeContainer) -> nri.Container:
        shown = nri.Container()
        shown.CopyFrom(made.message)
        shown.state = made.state
        shown.linux.resources.cpu.cpus = str(made.stored) if made.stored is not None else ""
        return shown

    async def _plugin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._stream = 1
        streams: dict[int, bytearray] = {}
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    channel, length = struct.unpack(">II", await reader.readexactly(8))
                    if length > self.piece_bytes and not streams.get(channel):
                        raise ConnectionError(f"a piece of {length} bytes would not fit into a reader's buffer")
                    stream = streams.setdefault(channel, bytearray())
                    stream += await reader.readexactly(length)
                    while len(stream) >= 10 and len(stream) >= 10 + struct.unpack_from(">I", stream)[0]:
                        size, stream_id, kind, _ = struct.unpack_from(">IIBB", stream)
                        data = bytes(stream[10 : 10 + size])
                        del stream[: 10 + size]
                        if (channel, kind) == (_TO_RUNTIME, _REQUEST):
                            group.create_task(self._serve(stream_id, ttrpc.Request.FromString(data)))
                        elif (channel, kind) == (_TO_PLUGIN, _RESPONSE) and stream_id in self._waiting:
                            waiting = self._waiting.pop(stream_id)
                            # Who waited may have given up.
                            if not waiting.done():
                                waiting.set_result(ttrpc.Response.FromString(data))
            except (asyncio.IncompleteReadError, ConnectionError):
                if self._writer is writer:
                    self.disconnect()

    async def _serve(self, stream_id: int, request: ttrpc.Request) -> None:
        assert request.service == "nri.pkg.api.v1alpha1.Runtime"
        if request.method == "RegisterPlugin":
            asked = nri.RegisterPluginRequest.FromString(request.payload)
            self.registered.append(f"{asked.plugin_idx}-{asked.plugin_name}")
            self._send(_TO_RUNTIME, stream_id, _RESPONSE, ttrpc.Response(payload=nri.Empty().SerializeToString()))
            await self._begin()
            return
        assert request.method == "UpdateContainers"
        async with self._lock:
            failed = []
            updates = nri.UpdateContainersRequest.FromString(request.payload).update
            self.updates.append(tuple(update.container_id for update in updates))
            for update in updates:
                made = self.containers.get(update.container_id)
                if made is None or not made.is_made or made.id in self.hung:
                    continue
                if made.id in self.refuses_updates:
                    failed.append(update)
                else:
                    self._apply(made, update.linux.resources)
            self._changed.announce()
            if self.silent:
                return
            response = ttrpc.Response(payload=nri.UpdateContainersResponse(failed=failed).SerializeToString())
            if self.hung.intersection(self.updates[-1]):
                response = ttrpc.Response(
                    status=ttrpc.Status(code=_UNKNOWN, message="NRI update of some containers failed")
                )
            self._send(_TO_RUNTIME, stream_id, _RESPONSE, response)

    async def _begin(self) -> None:
        try:
            configured = await self._call(
                "Configure", nri.ConfigureRequest(runtime_name="simulated", request_timeout=int(self.limit_s * 1000))
            )
            self._mask = nri.ConfigureResponse.FromString(configured).events
            async with self._lock:
                shown = [
                    self._shown(made)
                    for made in self.containers.values()
                    if made.is_made and made.state != nri.CONTAINER_STOPPED and made.id not in self.unlisted
                ]
                # In two parts, as of a runtime with many.
                pods = list(self.sandboxes.values())
                first = await self._call(
                    "Synchronize", nri.SynchronizeRequest(pods=pods, containers=shown[:1], more=True)
                )
                assert nri.SynchronizeResponse.FromString(first) == nri.SynchronizeResponse(more=True)
                answer = await self._call("Synchronize", nri.SynchronizeRequest(containers=shown[1:]))
                for update in nri.SynchronizeResponse.FromString(answer).update:
                    self._apply(self.containers[update.container_id], update.linux.resources)
        except (TimeoutError, ConnectionError):
            self.disconnect()
            return
        self.synchronized.set()
        self._changed.announce()

    async def _call(self, method: str, request: Message) -> bytes:
        stream_id, self._stream = self._stream, self._stream + 2
        response: asyncio.Future[ttrpc.Response] = asyncio.get_running_loop().create_future()
        self._waiting[stream_id] = response
        envelope = ttrpc.Request(
            service="nri.pkg.api.v1alpha1.Plugin",
            method=method,
            payload=request.SerializeToString(),
            timeout_nano=int(self.limit_s * 1e9),
        )
        self._send(_TO_PLUGIN, stream_id, _REQUEST, envelope)
        async with asyncio.timeout(self.limit_s):
            answer = await response
        if answer.status.code:
            raise Refused(answer.status.message)
        return answer.payload

    def _send(self, channel: int, stream_id: int, kind: int, message: Message) -> None:
        if self._writer is None:
            raise ConnectionError("closed")
        data = message.SerializeToString()
        stream = struct.pack(">IIBB", len(data), stream_id, kind, 0) + data
        for start in range(0, len(stream), self.piece_bytes):
            piece = stream[start : start + self.piece_bytes]
            self._writer.write(struct.pack(">II", channel, len(piece)) + piece)

    def _apply(self, made: MadeContainer, resources: nri.LinuxResources) -> None:
        """Change a container: what is stored of it, and its cgroup if it runs."""
        self._store(made, resources)
        if made.state == nri.CONTAINER_RUNNING and made.stored is not None:
            self._set_cpus(made, made.stored)
        self._changed.announce()

    def _store(self, made: MadeContainer, resources: nri.LinuxResources) -> None:
        """Store the changes of a container. What is not named stays."""
        if resources.cpu.cpus:
            made.stored = CpuSet.parse(resources.cpu.cpus)
        if resources.cpu.mems:
            made.mems = resources.cpu.mems
        if resources.cpu.HasField("quota"):
            made.quota = resources.cpu.quota.value
        if made.state != nri.CONTAINER_RUNNING:
            made.cpus = made.stored or self.online

    def _set_cpus(self, made: MadeContainer, cpus: CpuSet) -> None:
        """Write a running container's cgroup, as the kernel shows it."""
        made.cpus = cpus
        if self.control_groups is not None:
            self.control_group(made).parent.mkdir(parents=True, exist_ok=True)
            self.control_group(made).write_text(f"{cpus}\n", encoding="ascii")
        if self.when_applied is not None:
            self.when_applied(made)
        self._changed.announce()

    def control_group(self, made: MadeContainer) -> Path:
        """Name the cgroup file with the CPUs of a container."""
        assert self.control_groups is not None
        hierarchy = self.control_groups / "sys/fs/cgroup" / ("cpuset" if self.cgroup_version == 1 else "")
        return hierarchy / made.message.linux.cgroups_path.lstrip("/") / "cpuset.cpus"


def _change_mounts(mounts: dict[str, Mount], changes: Iterable[nri.Mount]) -> None:
    """Mount what a plugin adds, and take away what it removes: its place with a minus before it."""
    for change in changes:
        if change.destination.startswith("-"):
            del mounts[change.destination[1:]]
        else:
            mounts[change.destination] = Mount(
                host_path=change.source, container_path=change.destination, options=tuple(change.options)
            )


def _sources_missing(mounts: Iterable[Mount]) -> list[str]:
    return [mount.host_path for mount in mounts if not Path(mount.host_path).exists()]
