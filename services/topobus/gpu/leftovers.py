"""Decides when a GPU is clean after its last owner: no process of the owner's is left on it, and
its memory is back at its level before.

It waits for what is left, and then kills it where the operator allows that (`leftovers.kill`). Only
processes of pods are killed, never those of the host. The time is bounded. The kit asks again
later, and the device is not allocated until then. A refusal names process and pod.

What ran on a GPU before its owner came (a display server, a monitor) is no leftover. After a
restart of this service with the GPU in use that is not known. Then processes outside pods are
ignored, and memory up to `leftovers.idle_memory_mib` counts as clean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import Capabilities, DeviceDriver, HostServices, PrepareContext
from topobus.devicekit.pauses import Pauses
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.processes import GpuProcess, end_process, own_processes
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import OwnerKind

__all__ = ["ChecksLeftovers", "GpuUse", "Leftovers"]

_LOOK_S = 0.1
_MIB = 1 << 20
# A clean GPU may use this much more memory than before its owner came: the driver keeps some for
# its own use.
_MEMORY_SLACK_MIB = 256
# The control daemon of MPS and its servers stay for the next client. The kernel cuts a program's
# name to 15 characters.
_DAEMONS = ("nvidia-cuda-mps",)


class GpuUse(Struct, frozen=True, kw_only=True):
    """What uses a GPU at one look."""

    processes: tuple[GpuProcess, ...] = ()
    used_bytes: int | None = None
    """Memory in use; None: not known."""
    unseen: int = 0
    """Number of processes whose use cannot be seen."""
    blind: str = ""
    """Why nothing can be seen at all; then no GPU is known to be clean."""


class _Idle(Struct, frozen=True, kw_only=True):
    """A GPU before its owner came."""

    processes: frozenset[tuple[int, str]]
    used_bytes: int | None


class Leftovers:
    """The check for the GPUs of one driver."""

    def __init__(self, settings: LeftoverSettings | None = None, *, pauses: Pauses | None = None) -> None:
        self.settings = settings or LeftoverSettings()
        self._pauses = pauses or Pauses()
        self._idle: dict[str, _Idle] = {}
        self._has_reported_unseen = False

    def before(self, context: PrepareContext, devices: Sequence[Device], look: Callable[[Device], GpuUse]) -> None:
        """Remember how those GPUs look that have no owner yet.

        kubelet's Allocate is repeated before each start of a container and must not wait, so for a
        device plugin the state at the last cleaning is used.
        """
        is_known = self.settings.check and context.owner.kind is not OwnerKind.DEVICE_PLUGIN
        for device in devices if is_known else ():
            if device.name in context.free:
                self.note_idle(device.name, look(device))

    def note_idle(self, device: str, use: GpuUse) -> None:
        """Remember how a GPU without an owner looks, before an owner gets it and when it was found
        clean.
        """
        if not use.blind:
            self._idle[device] = _Idle(
                processes=frozenset((process.pid, process.started) for process in use.processes),
                used_bytes=use.used_bytes,
            )

    def clean(self, tree: Tree, device: str, look: Callable[[], GpuUse]) -> Refusal | None:
        """Wait until a GPU is clean, within the settings' bounds, and return None when it is."""
        use, left = self._wait(tree, device, look, self.settings.wait_s)
        if left and self.settings.kill:
            for process in left:
                if process.pod_uid:
                    get_logger().warning(
                        "leftover.killed", device=device, process=str(process), error=end_process(tree, process)
                    )
            use, left = self._wait(tree, device, look, self.settings.wait_s)
        why = self._why(device, use, left)
        if not why:
            self.note_idle(device, use)
            return None
        facts = {
            "pids": ",".join(str(process.pid) for process in left),
            "pods": ",".join(sorted({process.pod_name or process.pod_uid for process in left if process.pod_uid})),
            "used_bytes": "" if use.used_bytes is None else str(use.used_bytes),
        }
        return refuse("leftovers", why, **{key: value for key, value in facts.items() if value})

    def _wait(
        self, tree: Tree, device: str, look: Callable[[], GpuUse], limit_s: float
    ) -> tuple[GpuUse, tuple[GpuProcess, ...]]:
        deadline = self._pauses.now() + limit_s
        while True:
            use = look()
            self._report_unseen(use)
            left = self._left(tree, device, use)
            if not self._why(device, use, left) or self._pauses.now() >= deadline:
                return use, left
            self._pauses.sleep(_LOOK_S)

    def _report_unseen(self, use: GpuUse) -> None:
        if use.unseen and not self._has_reported_unseen:
            self._has_reported_unseen = True
            next_step = "give the service CAP_SYS_PTRACE and the host's pid namespace, or NVML"
            get_logger().warning("leftovers.unseen", processes=use.unseen, next_step=next_step)

    def _left(self, tree: Tree, device: str, use: GpuUse) -> tuple[GpuProcess, ...]:
        idle = self._idle.get(device)
        own = own_processes(tree, use.processes)
        return tuple(
            process
            for process in use.processes
            if process.pid not in own
            and (process.pod_uid or not process.program.startswith(_DAEMONS))
            and (process.pod_uid or idle is not None)
            and (idle is None or (process.pid, process.started) not in idle.processes)
        )

    def _why(self, device: str, use: GpuUse, left: tuple[GpuProcess, ...]) -> str:
        if use.blind:
            return use.blind
        if left:
            return f"still on it: {', '.join(map(str, left))}"
        if use.used_bytes is None:
            return ""
        idle = self._idle.get(device)
        before_bytes = idle.used_bytes if idle is not None else None
        most = self.settings.idle_memory_mib * _MIB if before_bytes is None else before_bytes + _MEMORY_SLACK_MIB * _MIB
        if use.used_bytes <= most:
            return ""
        limit = f"leftovers.idle_memory_mib is {self.settings.idle_memory_mib}"
        before = f"{before_bytes // _MIB} MiB were before" if before_bytes is not None else limit
        return f"{use.used_bytes // _MIB} MiB of its memory are in use by no process that is seen, {before}"


class ChecksLeftovers(DeviceDriver):
    """Base of the GPU drivers that clean. A subclass implements `use`, and calls
    `self.leftovers.before` when it prepares.
    """

    leftovers: Leftovers

    @property
    def capabilities(self) -> Capabilities:
        """Add cleaning where the operator wants GPUs checked after their last owner."""
        return replace(super().capabilities, cleans=self.leftovers.settings.check)

    def configure(self, host: HostServices) -> None:
        """Take the operator's settings."""
        super().configure(host)
        if isinstance(host, GpuServices):
            self.leftovers.settings = host.leftovers

    def use(self, tree: Tree, device: Device) -> GpuUse:
        """Return what uses a GPU now."""
        raise NotImplementedError

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Wait until nothing of the last owner is left, and return None when the GPU is clean."""
        return self.leftovers.clean(tree, device.name, lambda: self.use(tree, device))
