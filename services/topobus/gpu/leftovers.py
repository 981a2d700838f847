"""Decides when a GPU is clean after its last owner: no process of the owner's is left on it, and
its memory is back where it was.

Flows in: what a driver sees of a GPU's use, before an owner came and after it left. Flows out:
None when it is clean, else a refusal that names process and pod. What is left is waited for,
then killed where an operator wants that (`leftovers.kill`), and only what runs in a pod: a
process of the host's is never ended. The time is bounded; the kit asks again later, and
meanwhile nobody gets the device.

What ran on a GPU before its owner came (a display server, a monitor) is no leftover. After a
restart of this service with the GPU in use nobody knows what that was: then processes outside pods
are passed over, and `leftovers.idle_memory_mib` stands for the memory.
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
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import OwnerKind

__all__ = ["ChecksLeftovers", "GpuUse", "Leftovers"]

_LOOK_S = 0.1
_MIB = 1 << 20
# By which a clean GPU's memory may exceed what was in use before its owner came: the
# driver keeps some for what it did.
_MEMORY_SLACK_MIB = 256
# The control daemon of MPS and its servers stay for the next client; the kernel cuts a
# program's name to 15 characters.
_DAEMONS = ("nvidia-cuda-mps",)


class GpuUse(Struct, frozen=True, kw_only=True):
    """What uses a GPU at one look."""

    processes: tuple[GpuProcess, ...] = ()
    used_bytes: int | None = None
    """Memory in use; None: not known."""
    unseen: int = 0
    """Processes of which nobody may see what they use."""
    blind: str = ""
    """Why it cannot be seen at all; then nothing is known to be clean."""


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
        self._has_told_unseen = False

    def before(self, context: PrepareContext, devices: Sequence[Device], look: Callable[[Device], GpuUse]) -> None:
        """Remember what those GPUs look like that nobody has yet.

        kubelet's Allocate waits for nothing, and is repeated before each start of a container, so
        there what was found at the last cleaning is enough.
        """
        is_known = self.settings.check and context.owner.kind is not OwnerKind.DEVICE_PLUGIN
        for device in devices if is_known else ():
            if device.name in context.free:
                self.note_idle(device.name, look(device))

    def note_idle(self, device: str, use: GpuUse) -> None:
        """Remember what a GPU looks like that nobody has: called before an owner gets it, and when
        it was found clean.
        """
        if not use.blind:
            self._idle[device] = _Idle(
                processes=frozenset((process.pid, process.started) for process in use.processes),
                used_bytes=use.used_bytes,
            )

    def clean(self, tree: Tree, device: str, look: Callable[[], GpuUse]) -> Refusal | None:
        """Wait until a GPU is clean, within the settings' bounds; None is clean."""
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
        return Refusal(
            reasons=(
                Reason(code="leftovers", message=why, facts={key: value for key, value in facts.items() if value}),
            )
        )

    def _wait(
        self, tree: Tree, device: str, look: Callable[[], GpuUse], limit_s: float
    ) -> tuple[GpuUse, tuple[GpuProcess, ...]]:
        deadline = self._pauses.now() + limit_s
        while True:
            use = look()
            self._tell_unseen(use)
            left = self._left(tree, device, use)
            if not self._why(device, use, left) or self._pauses.now() >= deadline:
                return use, left
            self._pauses.sleep(_LOOK_S)

    def _tell_unseen(self, use: GpuUse) -> None:
        if use.unseen and not self._has_told_unseen:
            self._has_told_unseen = True
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
    """What a GPU driver inherits to be a driver that cleans: it says `use` of one GPU, and calls
    `self.leftovers.before` when it prepares.
    """

    leftovers: Leftovers

    @property
    def capabilities(self) -> Capabilities:
        """It cleans where the operator wants GPUs looked at after their last owner."""
        return replace(super().capabilities, cleans=self.leftovers.settings.check)

    def configure(self, host: HostServices) -> None:
        """Take the operator's settings."""
        super().configure(host)
        if isinstance(host, GpuServices):
            self.leftovers.settings = host.leftovers

    def use(self, tree: Tree, device: Device) -> GpuUse:
        """See what uses a GPU now."""
        raise NotImplementedError

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Wait until nothing of the last owner is left; None is clean."""
        return self.leftovers.clean(tree, device.name, lambda: self.use(tree, device))
