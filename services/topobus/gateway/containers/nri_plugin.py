"""The gateway as a plugin of the container runtime (NRI): connects, registers, receives the events
of every sandbox and container, and reconnects when either side restarts.

The runtime starts nothing while it waits for an answer to an event, at most 2 s by default. A
plugin that takes longer is disconnected, and the runtime continues without it. So an event's
handler never waits for another process longer than that. It also never calls the runtime, which
holds its lock until the event is answered. Changes of existing containers are part of the answer
or, at other times, made by `update`.

A handler is called in the order of the events. Runtimes before NRI 0.11 send most events as
StateChange, newer ones as methods of their own. Both are served. Source: containerd/nri
pkg/api/api.proto, pkg/adaptation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError, Message

from topobus.gateway.containers.connection import CallFailed, RuntimeConnection, StatusCode
from topobus.gateway.containers.rules.cpusets import ContainerCpuset
from topobus.gateway.containers.values import (
    ContainerAnswer,
    CpusetUpdate,
    RunningContainer,
    adjustment_of,
    container_of,
    cpus_of,
    resources_of,
    sandbox_of,
    update_of,
)
from topobus.process.backoff import full_jitter
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.tracing import entered
from topobus.runtimepb.nri.v1alpha1 import api_pb2 as nri
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal
from topobus.values.sandbox import Sandbox

__all__ = ["PLUGIN_INDEX", "PLUGIN_NAME", "NriPlugin", "RuntimeEvents"]

PLUGIN_NAME = "topobus"
PLUGIN_INDEX = "90"
"""Late: our decisions about CPUs override those of other plugins, and not the other way round."""

_PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
_RUNTIME = "nri.pkg.api.v1alpha1.Runtime"
_EVENTS = (
    nri.RUN_POD_SANDBOX,
    nri.STOP_POD_SANDBOX,
    nri.REMOVE_POD_SANDBOX,
    nri.CREATE_CONTAINER,
    nri.POST_START_CONTAINER,
    nri.UPDATE_CONTAINER,
    nri.STOP_CONTAINER,
    nri.REMOVE_CONTAINER,
)
_EVENT_MASK = sum(1 << (event - 1) for event in _EVENTS)
# In seconds: the runtime's own limit for a registration.
_REGISTER_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


class RuntimeEvents(Protocol):
    """Receives the runtime's events.

    Calls come one after the other, and the runtime waits for each.
    """

    def synchronize(
        self, sandboxes: Sequence[Sandbox], containers: Sequence[RunningContainer]
    ) -> Sequence[CpusetUpdate]:
        """Take over all existing containers after each connection. Returns their changes."""
        ...

    async def sandbox_started(self, sandbox: Sandbox) -> None:
        """Handle a new sandbox before any container is in it.

        It cannot be refused, because some runtimes do not clean up after that. Its containers can.
        """
        ...

    async def sandbox_stopped(self, sandbox: Sandbox) -> None:
        """Handle the end of a sandbox. Its namespaces still exist."""
        ...

    def sandbox_removed(self, sandbox: Sandbox) -> None:
        """Handle the removal of a sandbox."""
        ...

    async def create_container(self, sandbox: Sandbox, container: RunningContainer) -> ContainerAnswer | Refusal:
        """Return what a container gets before it is created. A Refusal prevents its creation.

        Kubelet then tries again.
        """
        ...

    def container_started(self, container: RunningContainer) -> None:
        """Handle the start of a container. Only from now on does an update take effect."""
        ...

    def update_container(self, container: RunningContainer, asked: CpuSet | None) -> ContainerCpuset | None:
        """Return what a container must have that kubelet updates, perhaps with CPUs that it
        requests.

        None: nothing of ours.
        """
        ...

    def container_ended(self, container_id: str) -> None:
        """Handle a container that has stopped or is gone."""
        ...


class NriPlugin:
    """One plugin, connected while the runtime is running."""

    def __init__(
        self, socket: str, events: RuntimeEvents, clock: Clock, report: Callable[[str], None] = lambda _: None
    ) -> None:
        """`report` gets why there is no connection, or an empty text when there is one."""
        self.socket = socket
        self._events = events
        self._clock = clock
        self._report = report
        self._connection: RuntimeConnection | None = None
        self._refused = ""
        """Why the runtime ended the last connection, as it was logged. Empty: it did not."""
        self._parts: tuple[list[Sandbox], list[RunningContainer]] = ([], [])
        self.why_not = "not connected yet"
        """Why no call can be made. Empty while one can."""
        self._handlers: dict[str, Callable[[bytes], Awaitable[Message]]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "CreateContainer": self._create_container,
            "UpdateContainer": self._update_container,
            "StopContainer": self._stop_container,
            "Shutdown": self._shutdown,
            # All other events, as runtimes before NRI 0.11 send them. Newer ones have a method for
            # each.
            "StateChange": self._state_change,
            "RunPodSandbox": partial(self._pod_event, nri.RUN_POD_SANDBOX),
            "StopPodSandbox": partial(self._pod_event, nri.STOP_POD_SANDBOX),
            "RemovePodSandbox": partial(self._pod_event, nri.REMOVE_POD_SANDBOX),
            "PostStartContainer": partial(self._container_event, nri.POST_START_CONTAINER),
            "RemoveContainer": partial(self._container_event, nri.REMOVE_CONTAINER),
        }

    @property
    def is_ready(self) -> bool:
        """Return whether the runtime reports every container before it starts."""
        return not self.why_not

    @property
    def is_connected(self) -> bool:
        """Return whether there is a connection, ready or not."""
        return self._connection is not None

    async def run(self) -> None:
        """Stay connected until cancelled."""
        attempt = 0
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self.socket)
            except OSError as err:
                self._say(f"no container runtime answers at {self.socket}: {err.strerror or err}")
            else:
                if await self._serve(reader, writer):
                    attempt = 0
            await self._clock.sleep(full_jitter(attempt, least_s=_FIRST_PAUSE_S, most_s=_LONGEST_PAUSE_S))
            attempt += 1

    async def update(self, updates: Sequence[CpusetUpdate], within_s: float) -> tuple[str, ...]:
        """Change existing containers. Returns the ids of those that the runtime could not change.

        A container that is gone by now is no failure.

        Errors: raises PeerUnavailable when there is no connection, when it ends, or without an
        answer in time. Raises ContractError when the runtime refuses or its answer cannot be read.
        In each case all or a part of it may have been done: containerd refuses a call of which it
        has done all but one container. Must not be called from a handler of events.
        """
        connection = self._connection
        if connection is None or not self.is_ready:
            raise PeerUnavailable(f"NRI: {self.why_not}")
        request = nri.UpdateContainersRequest(update=update_of(updates))
        answer = await connection.call(_RUNTIME, "UpdateContainers", request.SerializeToString(), within_s)
        try:
            return tuple(failed.container_id for failed in nri.UpdateContainersResponse.FromString(answer).failed)
        except DecodeError as err:
            raise ContractError(f"NRI: UpdateContainers: the container runtime's answer is none: {err}") from err

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve until the connection ends. True when the runtime had reported its containers."""
        connection = self._connection = RuntimeConnection(reader, writer, self._answer)
        was_ready, was_refused, self._refused = False, self._refused, ""
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(connection.run())
                request = nri.RegisterPluginRequest(plugin_name=PLUGIN_NAME, plugin_idx=PLUGIN_INDEX)
                with suppress(PeerUnavailable):
                    # Without an answer the connection has ended, and `run` with it, or the runtime
                    # ends it.
                    await connection.call(_RUNTIME, "RegisterPlugin", request.SerializeToString(), _REGISTER_S)
                await serving
        except* ContractError as errors:
            self._refused = str(_first_cause(errors))
            if self._refused != was_refused:
                get_logger().error(
                    "nri.refused",
                    error=self._refused,
                    next_step=f"look into the container runtime's log, and at who listens at {self.socket}",
                )
        finally:
            was_ready = self.is_ready
            self._connection = None
            self._say("the container runtime has ended the connection")
        return was_ready

    async def _answer(self, service: str, method: str, request: bytes) -> bytes:
        handler = self._handlers.get(method)
        if service != _PLUGIN or handler is None:
            raise CallFailed(StatusCode.UNIMPLEMENTED, f"topobus has no {service}/{method}")
        try:
            with entered(f"runtime {method}"):
                answer = await handler(request)
        except (DecodeError, ContractError) as err:
            raise CallFailed(StatusCode.INVALID_ARGUMENT, f"topobus: {method}: {err}") from err
        return answer.SerializeToString()

    async def _configure(self, request: bytes) -> Message:
        asked = nri.ConfigureRequest.FromString(request)
        get_logger().info(
            "nri.configured",
            runtime=asked.runtime_name,
            version=asked.runtime_version,
            request_timeout_ms=asked.request_timeout,
        )
        self._parts = ([], [])
        return nri.ConfigureResponse(events=_EVENT_MASK)

    async def _synchronize(self, request: bytes) -> Message:
        asked = nri.SynchronizeRequest.FromString(request)
        sandboxes, containers = self._parts
        sandboxes += map(sandbox_of, asked.pods)
        containers += self._readable(asked.containers)
        if asked.more:
            return nri.SynchronizeResponse(more=True)
        self._parts = ([], [])
        updates = self._events.synchronize(sandboxes, containers)
        get_logger().info(
            "nri.synchronized", sandboxes=len(sandboxes), containers=len(containers), updates=len(updates)
        )
        self._say("")
        return nri.SynchronizeResponse(update=update_of(updates))

    def _readable(self, containers: Iterable[nri.Container]) -> list[RunningContainer]:
        """Read containers, except those that have ended.

        One that cannot be read is logged by name, and the others are still read.
        """
        readable: list[RunningContainer] = []
        for container in containers:
            if container.state == nri.CONTAINER_STOPPED:
                continue
            try:
                readable.append(container_of(container))
            except ContractError as err:
                get_logger().error("nri.container-unreadable", container_id=container.id[:80], error=str(err))
        return readable

    async def _create_container(self, request: bytes) -> Message:
        asked = nri.CreateContainerRequest.FromString(request)
        sandbox, container = sandbox_of(asked.pod), container_of(asked.container)
        given = await self._events.create_container(sandbox, container)
        if isinstance(given, Refusal):
            raise _refused(sandbox, container.name, given)
        return (
            nri.CreateContainerResponse()
            if given == ContainerAnswer()
            else nri.CreateContainerResponse(adjust=adjustment_of(given))
        )

    async def _update_container(self, request: bytes) -> Message:
        asked = nri.UpdateContainerRequest.FromString(request)
        container = container_of(asked.container)
        given = self._events.update_container(container, cpus_of(asked.linux_resources, container.id))
        if given is None:
            return nri.UpdateContainerResponse()
        resources = resources_of(given.cpus, given.mems, is_unlimited=given.is_exclusive)
        update = nri.ContainerUpdate(container_id=container.id, linux=nri.LinuxContainerUpdate(resources=resources))
        return nri.UpdateContainerResponse(update=[update])

    async def _stop_container(self, request: bytes) -> Message:
        self._events.container_ended(nri.StopContainerRequest.FromString(request).container.id)
        return nri.StopContainerResponse()

    async def _state_change(self, request: bytes) -> Message:
        change = nri.StateChangeEvent.FromString(request)
        await self._happened(change.event, change.pod, change.container)
        return nri.Empty()

    async def _happened(self, event: int, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Pass on an event that has no answer."""
        if event == nri.RUN_POD_SANDBOX:
            await self._events.sandbox_started(sandbox_of(pod))
        elif event == nri.STOP_POD_SANDBOX:
            await self._events.sandbox_stopped(sandbox_of(pod))
        elif event == nri.REMOVE_POD_SANDBOX:
            self._events.sandbox_removed(sandbox_of(pod))
        elif event == nri.POST_START_CONTAINER:
            self._events.container_started(container_of(container))
        elif event == nri.REMOVE_CONTAINER:
            self._events.container_ended(container.id)

    async def _pod_event(self, event: int, request: bytes) -> Message:
        await self._happened(event, nri.PodSandboxRequest.FromString(request).pod, nri.Container())
        return nri.Empty()

    async def _container_event(self, event: int, request: bytes) -> Message:
        asked = nri.ContainerRequest.FromString(request)
        await self._happened(event, asked.pod, asked.container)
        return nri.Empty()

    async def _shutdown(self, request: bytes) -> Message:
        self._say("the container runtime shuts down")
        return nri.Empty()

    def _say(self, why_not: str) -> None:
        if why_not == self.why_not:
            return
        self.why_not = why_not
        if why_not:
            get_logger().warning("nri.absent", why=why_not)
        self._report(why_not)


def _refused(sandbox: Sandbox, container: str, refusal: Refusal) -> CallFailed:
    text = f"topobus: container {container} of pod {sandbox} cannot start: {refusal.why}"
    return CallFailed(StatusCode.FAILED_PRECONDITION, text)


def _first_cause(error: BaseException) -> BaseException:
    """Find the original error within nested groups, because tasks have tasks of their own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
