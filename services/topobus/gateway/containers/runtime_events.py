"""The gateway's one plugin of the container runtime, which passes each event to the parts that need
it: CPUs (`cpu_pinning`), sandboxes (`claims.sandbox_attachments`), containers (`live_containers`).

The runtime gets one answer from all parts. A container with the guard of a claim
(`container_guard`) may start only when the claim is prepared here and every part has done its work
for this container.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from topobus.formats.messages.messages import RuntimeConnection
from topobus.gateway.asks import NodeAsks
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.sandbox_attachments import SandboxAttachments
from topobus.gateway.config import GatewaySettings, owned_cpus
from topobus.gateway.containers.container_adjustments import ContainerAdjustments
from topobus.gateway.containers.cpu_pinning import CpuPinning
from topobus.gateway.containers.cpuset_reports import CpusetReports
from topobus.gateway.containers.kernel_cpusets import KernelCpusets
from topobus.gateway.containers.live_containers import LiveContainer
from topobus.gateway.containers.nri_plugin import NriPlugin
from topobus.gateway.containers.rules.cpusets import ContainerCpuset
from topobus.gateway.containers.values import ContainerAnswer, CpusetUpdate, RunningContainer
from topobus.gateway.node_state import NodeState
from topobus.process.clock import Clock
from topobus.sysfs.tree import Tree
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import Sandbox

__all__ = ["RuntimeDoor"]

# In seconds. A gateway that starts gets the runtime's list within a second. A runtime that is
# started with it needs longer.
_STARTING_S = 60.0
# For a container whose sandbox the runtime does not list: it is known only by its devices' CDI
# names.
_UNTOLD = Sandbox(id="", uid="", namespace="", name="")


class RuntimeDoor:
    """The connection to the runtime, which passes its events on."""

    def __init__(
        self,
        settings: GatewaySettings,
        state: NodeState,
        checkpoint: Checkpoint,
        clock: Clock,
        attachments: SandboxAttachments,
        asks: NodeAsks,
        report: Callable[[str], None],
        reports: CpusetReports,
        kubelet_cpus: Callable[[], Awaitable[CpuSet]],
    ) -> None:
        """`report` is called with the reason why there is no connection, or with an empty text when
        there is one. `kubelet_cpus` returns the CPUs that kubelet's CPU manager may give.
        """
        self.plugin = NriPlugin(settings.runtime.socket, self, clock, report)
        self.pinning: CpuPinning | None = None
        """None where Topobus gives no CPUs of the node."""
        owned = owned_cpus(settings.cpus)
        if owned is None or owned:
            self.pinning = CpuPinning(
                self.plugin,
                owned,
                state,
                checkpoint.entries,
                clock,
                kubelet_cpus,
                KernelCpusets(Tree(settings.hardware)),
                reports,
            )
        self._entry = checkpoint.ready
        self._clock = clock
        self._begun_s = clock.monotonic()
        self._containers = state.containers
        self._containers.expect(self._why_absent)
        self._attachments = attachments
        attachments.why_no_runtime = lambda: self.plugin.why_not
        self._adjustments = ContainerAdjustments(asks, self._entry, clock, settings.runtime.adjust_s)

    def connection(self) -> RuntimeConnection:
        """Return the state of the connection to the container runtime."""
        unseen = self.pinning.reports.unseen if self.pinning is not None else ""
        pins_cpus = self.pinning is not None
        return RuntimeConnection(
            socket=self.plugin.socket, why_not=self.plugin.why_not, pins_cpus=pins_cpus, cpusets_unseen=unseen
        )

    def _why_absent(self, is_needed: bool) -> str:
        """Return why the runtime has not reported its containers.

        A connected runtime will certainly report them: containerd delays it while it cannot stop a
        container. A runtime that is not connected, but whose socket exists, is waited for after a
        start.
        """
        is_starting = self._clock.monotonic() - self._begun_s < _STARTING_S and Path(self.plugin.socket).exists()
        return self.plugin.why_not if is_needed or self.plugin.is_connected or is_starting else ""

    async def run(self) -> None:
        """Stay connected and run all parts, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._attachments.run())
            group.create_task(self.plugin.run())
            group.create_task(self._containers.run())
            if self.pinning is not None:
                group.create_task(self.pinning.run())

    # The runtime's events.

    def synchronize(
        self, sandboxes: Sequence[Sandbox], containers: Sequence[RunningContainer]
    ) -> Sequence[CpusetUpdate]:
        """Replace what is known by the sandboxes and containers that exist."""
        pods = {sandbox.id: sandbox for sandbox in sandboxes}
        self._containers.synchronize(
            _live(pods.get(container.sandbox_id, _UNTOLD), container)
            for container in containers
            if not container.has_ended
        )
        self._attachments.synchronize(sandboxes)
        return self.pinning.synchronize(sandboxes, containers) if self.pinning is not None else ()

    async def sandbox_started(self, sandbox: Sandbox) -> None:
        """Bring the devices of the pod's claims into it, before it has any container."""
        await self._attachments.sandbox_started(sandbox)

    async def sandbox_stopped(self, sandbox: Sandbox) -> None:
        """Take the devices out while the sandbox's namespaces still exist."""
        if self.pinning is not None:
            self.pinning.sandbox_stopped(sandbox.id)
        self._containers.sandbox_stopped(sandbox.id)
        await self._attachments.sandbox_stopped(sandbox)

    def sandbox_removed(self, sandbox: Sandbox) -> None:
        """Handle the removal of a sandbox."""
        self._attachments.sandbox_removed(sandbox)

    async def create_container(self, sandbox: Sandbox, container: RunningContainer) -> ContainerAnswer | Refusal:
        """Return what a container gets from its claims, or a refusal to create it."""
        since_s = self._clock.monotonic()
        for uid, device_class in container.guards:
            if self._entry(uid, device_class) is None:
                return _not_prepared(uid, device_class)
        refusal = await self._attachments.admit(sandbox, container.guards)
        if refusal is not None:
            return refusal
        edits = await self._adjustments.adjust(sandbox, container, since_s)
        if isinstance(edits, Refusal):
            return edits
        self._containers.made(_live(sandbox, container))
        cpuset = self.pinning.create_container(sandbox, container) if self.pinning is not None else None
        return ContainerAnswer(cpuset=cpuset, passed=container.guards, edits=edits)

    def container_started(self, container: RunningContainer) -> None:
        """Handle the start of a container."""
        if self.pinning is not None:
            self.pinning.container_started(container)

    def update_container(self, container: RunningContainer, asked: CpuSet | None) -> ContainerCpuset | None:
        """Keep a container's CPUs when kubelet updates it."""
        return self.pinning.update_container(container, asked) if self.pinning is not None else None

    def container_ended(self, container_id: str) -> None:
        """Forget a container. What waits for its end continues."""
        if self.pinning is not None:
            self.pinning.container_ended(container_id)
        self._containers.ended(container_id)


def _live(sandbox: Sandbox, container: RunningContainer) -> LiveContainer:
    return LiveContainer(
        id=container.id,
        name=container.name,
        namespace=sandbox.namespace,
        pod=sandbox.name,
        pod_uid=sandbox.uid,
        sandbox_id=container.sandbox_id,
        cdi_devices=container.cdi_devices,
    )


def _not_prepared(uid: ClaimUid, device_class: str) -> Refusal:
    text = f"it names devices of class {device_class} of a claim (uid {uid}) that is not prepared on this node"
    return refuse("claim-not-prepared", text, claim_uid=uid, device_class=device_class)
