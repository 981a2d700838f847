"""Tracks the containers that exist on the node, as the container runtime reports them (NRI), so
that a device is given to another owner only after every container that has it has ended.

kubelet's list is not enough for that. kubelet forgets the devices of a pod that was deleted by
force at once, and has its claims undone within a minute, although a container of it still runs
(kubernetes issue 141471): one whose process waits in the kernel, one whose shim hangs, or, for two
seconds, one that ignores TERM.
When the connection ends, the known containers stay, because silence does not mean that a container
has ended. Where no runtime reports, no container is known here, and kubelet's list is the only
source.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from topobus.devicekit.passthrough.function_users import openers
from topobus.gateway.boot import LIVE
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.process.broadcast import Broadcast
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError, PeerUnavailable
from topobus.values.ledger import Allocation
from topobus.values.names import ClaimUid
from topobus.values.request import OwnerKind

__all__ = ["LiveContainer", "LiveContainers", "StillRuns", "nodes_of", "why_lingering", "with_processes"]

# Seconds between two checks of a container that the runtime no longer lists and that has processes.
_LOOK_S = 0.5
# A container's id is part of its control groups' names, with or without the runtime's name around
# it.
_ID = re.compile(r"[0-9a-f]{64}")


class StillRuns(PeerUnavailable):
    """Raised when a claim cannot be undone because a container has its devices. kubelet is answered
    that it is undone, and it is undone when the container has ended.
    """

    def __init__(self, message: str, *, nodes: Collection[str]) -> None:
        """`message` names the container, `nodes` are the host's device nodes of the claim."""
        super().__init__(message)
        self.nodes = nodes


class LiveContainer(Struct, frozen=True, kw_only=True):
    """A container that was created and has not ended."""

    id: str
    name: str
    namespace: str
    pod: str
    pod_uid: str
    sandbox_id: str = ""
    cdi_devices: tuple[str, ...] = ()
    """Names without vendor and class. Also empty where the runtime does not report them."""

    def __str__(self) -> str:
        return f"container {self.name} of pod {self.namespace}/{self.pod}"


class LiveContainers:
    """The containers that the runtime has reported."""

    def __init__(self) -> None:
        """Begin without containers."""
        self.tree = LIVE
        """Where the machine's processes are read, as far as they are visible."""
        self.changed = Broadcast()
        self.is_of_earlier_boot: Callable[[str], bool] = lambda _: False
        """Whether what a device plugin's owner has was last in a container of an earlier boot."""
        self.is_told = False
        """Whether the runtime has reported the existing containers once."""
        self._why_absent: Callable[[bool], str] = lambda _: ""
        self._containers: dict[str, LiveContainer] = {}
        self._unlisted: dict[str, LiveContainer] = {}
        """Containers that the runtime no longer lists, whose processes are checked instead."""

    def expect(self, why_absent: Callable[[bool], str]) -> None:
        """Set how to find out why no runtime has reported yet.

        Shapes: why_absent — called with whether the answer is needed in any case; empty when no
        runtime is waited for any longer, which is never the case with True.
        """
        self._why_absent = why_absent

    async def openers_of(self, paths: Collection[str]) -> str:
        """Describe which processes have device nodes of the host open, as the end of a sentence.

        Empty where none has, or none is visible.
        """
        nodes = {path.removeprefix("/dev/") for path in paths if path.startswith("/dev/")}
        try:
            node_users = await asyncio.to_thread(openers, self.tree, nodes)
        except HardwareError as err:
            get_logger().debug("processes.unseen", error=str(err))
            return ""
        return f" ({'; '.join(node_users.users)})" if node_users.users else ""

    async def run(self) -> None:
        """Check until cancelled the containers that a restarted runtime does not list. A container
        whose shim does not answer is missing in its list although it runs.
        """
        while True:
            ticket = self.changed.ticket()
            if not self._unlisted:
                await ticket.wait()
                continue
            # Containers that disappear from the list during the check were not checked, and have
            # not necessarily ended.
            looked_at = frozenset(self._unlisted)
            ended = looked_at - await asyncio.to_thread(with_processes, looked_at, self.tree)
            for container_id in ended:
                self._unlisted.pop(container_id, None)
            if ended:
                self.changed.announce()
            await asyncio.sleep(_LOOK_S)

    # Called for the runtime's events.

    def synchronize(self, containers: Iterable[LiveContainer]) -> None:
        """Replace what is known by the containers that exist."""
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
        """Add a container that is about to be created."""
        self._containers[container.id] = container

    def ended(self, container_id: str) -> None:
        """Remove a container that has ended or was not created after all."""
        if self._containers.pop(container_id, None) is not None or self._unlisted.pop(container_id, None) is not None:
            self.changed.announce()

    def sandbox_stopped(self, sandbox_id: str) -> None:
        """Remove all containers of a sandbox, which ends after everything that ran in it.

        For a container that could not be started, no other event comes before its removal.
        """
        ended = [container.id for container in self._all() if container.sandbox_id == sandbox_id]
        for container_id in ended:
            self.ended(container_id)

    # Which container has which devices.

    def why_untold(self, *, is_needed: bool = False) -> str:
        """Return why it is not known yet which containers exist.

        Empty: the runtime has reported, or no runtime does.

        Shapes: is_needed — the previous gateway knew of a container that has the devices.
        """
        return "" if self.is_told else self._why_absent(is_needed)

    def of_claim(self, entry: ClaimEntry) -> tuple[LiveContainer, ...]:
        """Return the containers that have a claim's devices: by CDI name or, where the runtime
        reports no names, by the claim's pods.
        """
        names = {cdi_device_name(entry.uid, device.device) for device in entry.devices}
        return tuple(
            container
            for container in self._all()
            if names & {*container.cdi_devices} or (not container.cdi_devices and container.pod_uid in entry.pods)
        )

    def why_held(self, entry: ClaimEntry) -> str:
        """Return which container still has a claim's devices, as text.

        Empty: none, or the runtime does not report containers.
        """
        running = self.of_claim(entry)
        if running:
            return (
                f"{', '.join(map(str, running))} has not ended and has "
                f"{', '.join(sorted({device.device for device in entry.devices}))}"
            )
        why_untold = self.why_untold(is_needed=bool(entry.left_for))
        return f"whether its containers have ended is not known: {why_untold}" if why_untold else ""

    def of_unknown_claim(self, uid: str) -> tuple[LiveContainer, ...]:
        """Return the containers that have devices of a claim of which only the uid is known."""
        return tuple(
            container
            for container in self._all()
            if any(name.startswith(cdi_device_name(ClaimUid(uid), "")) for name in container.cdi_devices)
        )

    def of_pod(self, namespace: str, pod: str) -> tuple[LiveContainer, ...]:
        """Return the containers of the pods with a name, a later pod of that name included."""
        return tuple(container for container in self._all() if (container.namespace, container.pod) == (namespace, pod))

    def _all(self) -> list[LiveContainer]:
        return [*self._containers.values(), *self._unlisted.values()]


def why_lingering(allocation: Allocation, containers: LiveContainers) -> str:
    """Return why devices that kubelet allocated to a pod may still be in use, whatever kubelet
    reports of the pod.

    Empty when there is no evidence. Without the pod's name, which kubelet lists a moment after the
    allocation, there is nothing to compare. After a reboot a kubelet with an old checkpoint gives
    the pod other devices, so its container is no evidence for those of the boot before.
    """
    owner = allocation.owner
    if owner.kind is not OwnerKind.DEVICE_PLUGIN or allocation.user is None or containers.is_of_earlier_boot(owner.key):
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


def with_processes(container_ids: Collection[str], tree: Tree) -> frozenset[str]:
    """Return which containers have processes on this machine, by the control groups.

    Empty where this process sees only its own container.

    Cost: one file read for each process of the machine.
    """
    wanted = frozenset(container_ids)
    containers: set[str] = set()
    # A new tree each time: one that caches what it listed would keep an entry for each process that
    # ever ran.
    tree = Tree(tree.settings)
    for process in tree.names("proc"):
        if process.isdecimal():
            try:
                groups = tree.read(f"proc/{process}/cgroup") or ""
            except HardwareError:
                # It has ended, or may not be read.
                continue
            containers |= wanted & {*_ID.findall(groups)}
    return frozenset(containers)


def nodes_of(entry: ClaimEntry) -> tuple[str, ...]:
    """Return the host's device nodes that a claim's containers get."""
    edits = [device.edits for device in entry.cdi.devices] if entry.cdi is not None else []
    return tuple(node.host_path or node.path for each in edits for node in each.device_nodes)
