"""The containers that exist on the node, as the container runtime tells them: no device is given on
while a container that has it has not ended.

kubelet's word is not enough for that. It forgets the devices of a pod that was deleted by
force at once, and has its claims undone within a minute, though a container of it runs on
(kubernetes issue 141471): one whose process waits in the kernel, one whose shim hangs, one
that ignores TERM, for two seconds.
Flows in: containers as the runtime tells of them (NRI). Flows out: which of them have a
claim's devices, or belong to a pod. When the connection ends, what was known stays:
silence ends no container. Where no runtime tells anything, nobody is known here, and
kubelet's word is all there is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from topobus.devicekit.passthrough.function_users import openers
from topobus.gateway.boot import LIVE
from topobus.gateway.broadcast import Broadcast
from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError, PeerUnavailable
from topobus.values.ledger import Allocation
from topobus.values.names import ClaimUid
from topobus.values.request import OwnerKind

__all__ = ["LiveContainer", "LiveContainers", "StillRuns", "nodes_of", "open_nodes", "why_lingering", "with_processes"]

# Between two looks at a container that the runtime does not list any more and that has processes.
_LOOK_S = 0.5
# A container's id stands in the names of its control groups, with or
# without the runtime's name around it.
_ID = re.compile(r"[0-9a-f]{64}")


class StillRuns(PeerUnavailable):
    """Raised when a claim cannot be undone, since a container has its devices: kubelet is told that
    it is undone, and it is when the container has ended.
    """

    def __init__(self, message: str, *, nodes: Collection[str]) -> None:
        """Say which container has what; `nodes` are the host's device nodes of it."""
        super().__init__(message)
        self.nodes = nodes


class LiveContainer(Struct, frozen=True, kw_only=True):
    """A container that was made and has not ended."""

    id: str
    name: str
    namespace: str
    pod: str
    pod_uid: str
    sandbox_id: str = ""
    cdi_devices: tuple[str, ...] = ()
    """Names without vendor and class; none, too, where the runtime does not tell them."""

    def __str__(self) -> str:
        return f"container {self.name} of pod {self.namespace}/{self.pod}"


class LiveContainers:
    """Keeps what the runtime tells."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self.tree = LIVE
        """Where the machine's processes are seen, as far as they may be."""
        self.changed = Broadcast()
        self.is_told = False
        """The runtime has told once what there is."""
        self._why_absent: Callable[[bool], str] = lambda _: ""
        self._containers: dict[str, LiveContainer] = {}
        self._unlisted: dict[str, LiveContainer] = {}
        """Known of before, not listed by the runtime any more, and looked at from the outside."""

    def expect(self, why_absent: Callable[[bool], str]) -> None:
        """Expect a runtime to tell; `why_absent` says why it has not yet, empty when it is waited
        for no longer, which with True is never.
        """
        self._why_absent = why_absent

    async def openers_of(self, paths: Collection[str]) -> str:
        """Tell which processes have device nodes of the host open, as the end of a sentence.

        Nothing where none has, or none may be seen.
        """
        return await open_nodes(paths, self.tree)

    async def run(self) -> None:
        """Look after containers that a runtime that was started again does not list, for ever: one
        whose shim does not answer is left out although it runs.
        """
        while True:
            ticket = self.changed.ticket()
            if not self._unlisted:
                await ticket.wait()
                continue
            # Those that the runtime leaves out during the look were not looked
            # at, and have not ended by that.
            looked_at = frozenset(self._unlisted)
            ended = looked_at - await asyncio.to_thread(with_processes, looked_at, self.tree)
            for container_id in ended:
                self._unlisted.pop(container_id, None)
            if ended:
                self.changed.announce()
            await asyncio.sleep(_LOOK_S)

    # What the runtime tells.

    def synchronize(self, containers: Iterable[LiveContainer]) -> None:
        """Begin anew with what is there."""
        earlier = {**self._unlisted, **self._containers}
        self._containers = {container.id: container for container in containers}
        self._unlisted = {
            container_id: container
            for container_id, container in earlier.items()
            if container_id not in self._containers
        }
        self.is_told = True
        self.changed.announce()

    def made(self, container: LiveContainer) -> None:
        """Hear of one that is about to be made."""
        self._containers[container.id] = container

    def ended(self, container_id: str) -> None:
        """Hear that one has ended, or was not made after all."""
        if self._containers.pop(container_id, None) is not None or self._unlisted.pop(container_id, None) is not None:
            self.changed.announce()

    def sandbox_stopped(self, sandbox_id: str) -> None:
        """Hear that a sandbox has ended, which it does after all that ran in it.

        Of a container that could not be started nothing else is told before its removal.
        """
        ended = [container.id for container in self._all() if container.sandbox_id == sandbox_id]
        for container_id in ended:
            self.ended(container_id)

    # Who has what.

    def why_untold(self, *, is_needed: bool = False) -> str:
        """Say why nobody knows yet which containers there are.

        Empty: the runtime has told, or none does.

        Shapes: is_needed — the gateway before this one knew of a container that has the devices.
        """
        return "" if self.is_told else self._why_absent(is_needed)

    def of_claim(self, entry: ClaimEntry) -> tuple[LiveContainer, ...]:
        """Find the containers that have a claim's devices: by CDI name, and where the runtime tells
        no names by the claim's pods.
        """
        names = {cdi_device_name(entry.uid, device.device) for device in entry.devices}
        return tuple(
            container
            for container in self._all()
            if names & {*container.cdi_devices} or (not container.cdi_devices and container.pod_uid in entry.pods)
        )

    def of_unknown_claim(self, uid: str) -> tuple[LiveContainer, ...]:
        """Find the containers that have devices of a claim of which no
        more than its uid is known.
        """
        return tuple(
            container
            for container in self._all()
            if any(name.startswith(cdi_device_name(ClaimUid(uid), "")) for name in container.cdi_devices)
        )

    def of_pod(self, namespace: str, pod: str) -> tuple[LiveContainer, ...]:
        """Find the containers of pods of a name; one of the same name may have come since."""
        return tuple(container for container in self._all() if (container.namespace, container.pod) == (namespace, pod))

    def _all(self) -> list[LiveContainer]:
        return [*self._containers.values(), *self._unlisted.values()]


def why_lingering(allocation: Allocation, containers: LiveContainers) -> str:
    """Say why devices that kubelet allocated to a pod may be in use, whatever kubelet says of the
    pod.

    Empty when nothing speaks for it. Without the pod's name, which kubelet tells a moment after it
    has allocated, there is nothing to compare.
    """
    if allocation.owner.kind is not OwnerKind.DEVICE_PLUGIN or allocation.user is None:
        return ""
    running = containers.of_pod(allocation.user.namespace, allocation.user.name)
    if running:
        return f"{', '.join(map(str, running))} has it and has not ended, though kubelet has forgotten the pod"
    why_untold = containers.why_untold()
    return (
        f"whether the containers of pod {allocation.user.namespace}/{allocation.user.name} have ended is not "
        f"known: {why_untold}"
        if why_untold
        else ""
    )


def with_processes(container_ids: Collection[str], tree: Tree = LIVE) -> frozenset[str]:
    """Say which containers have processes on this machine, by the control groups.

    None where this process sees its own container alone.

    Cost: a file for each process of the machine.
    """
    wanted = frozenset(container_ids)
    containers: set[str] = set()
    # A tree that remembers what it listed would keep each process for ever.
    tree = Tree(tree.settings)
    for process in tree.names("proc"):
        if process.isdecimal():
            try:
                groups = tree.read(f"proc/{process}/cgroup") or ""
            except HardwareError:
                # It has ended, or is not ours to look at.
                continue
            containers |= wanted & {*_ID.findall(groups)}
    return frozenset(containers)


def nodes_of(entry: ClaimEntry) -> tuple[str, ...]:
    """List the host's device nodes that a claim's containers get."""
    edits = [device.edits for device in entry.cdi.devices] if entry.cdi is not None else []
    return tuple(node.host_path or node.path for each in edits for node in each.device_nodes)


async def open_nodes(paths: Collection[str], tree: Tree = LIVE) -> str:
    """Tell which processes have device nodes of the host open, as the end of a sentence.

    Nothing where none has, or none may be seen.
    """
    nodes = {path.removeprefix("/dev/") for path in paths if path.startswith("/dev/")}
    try:
        node_users = await asyncio.to_thread(openers, tree, nodes)
    except HardwareError as err:
        get_logger().debug("processes.unseen", error=str(err))
        return ""
    return f" ({'; '.join(node_users.users)})" if node_users.users else ""
