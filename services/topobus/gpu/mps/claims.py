"""Decides which MPS daemon an owner of GPUs needs, with which limits, and when the daemon ends.

The GPUs that an owner has whole get one daemon together. A GPU of which several owners have a part
gets one daemon for all of them, which ends with the last owner. The plan has the container's
variables and mounts. Starting the daemon is long work. The journal's step `mps` is written before
anything is done. Where an operator runs a daemon on the node, owners use that one.
Source: CUDA Multi-Process Service guide, "Environment Variables" and "MPS control daemon" (default
folder /tmp/nvidia-mps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, Step
from topobus.devicekit.driver import LongWork, PrepareContext
from topobus.formats.kubernetes.classic.classic_parameters import MPS, Sharing
from topobus.gpu.mps.commands import PIPES_VARIABLE, find_programs
from topobus.gpu.mps.daemon_state import DaemonState, Limits, SharedGpu
from topobus.gpu.mps.daemons import MpsDaemons
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, Mount
from topobus.values.health import Observation
from topobus.values.outcome import Refusal, refuse
from topobus.values.quantity import Quantity
from topobus.values.request import OwnerKind
from topobus.values.shares import MEMORY, SHARES

__all__ = ["STEP", "MpsPlan", "MpsSharing", "client_limits", "client_variables", "operators_edits"]

STEP = "mps"
"""The journal's name for it."""

# The name of an operator's control daemon as the kernel cuts it (15 characters), which its server has
# as well, and the folder where it listens by default.
_OPERATORS_DAEMON = b"nvidia-cuda-mps"
_OPERATORS_PIPES = "/tmp/nvidia-mps"
# A longer environment is cut. In a daemon that was started by hand or by a unit, the variable is
# near the front.
_ENVIRONMENT_BYTES = 1 << 16
_SHARED_MEMORY = "/dev/shm"
_WRITABLE = ("rw", "nosuid", "nodev", "bind")
_MIB = 1 << 20
# Beyond the start's own limit: the journal is written, and the limits are set.
_SLACK_S = 5.0

Edits = Mapping[str, ContainerEdits]


class MpsPlan(Struct, frozen=True, kw_only=True):
    """The container's edits and the daemon that an owner gets."""

    edits: ContainerEdits
    daemon: DaemonState


class MpsSharing:
    """The daemons of a driver's GPUs, as their owners need them."""

    def __init__(self, daemons: MpsDaemons | None = None) -> None:
        """Own no daemons unless the service gives some."""
        self.daemons = daemons or MpsDaemons()

    @property
    def is_owned(self) -> bool:
        """Whether this service runs the daemons. Otherwise an operator does."""
        return self.daemons.settings.owned

    def observe(self) -> Mapping[str, tuple[Observation, ...]]:
        """Report the GPUs that have lost their daemon."""
        return (
            {name: (observation,) for name, observation in self.daemons.observations().items()} if self.is_owned else {}
        )

    def plan(
        self,
        devices: Sequence[Device],
        context: PrepareContext,
        sharing: Sharing,
        settings: DriverFilesSettings,
        *,
        version: str,
        partitions: Sequence[str],
    ) -> MpsPlan | Refusal | None:
        """Decide what an owner needs, or return None when it needs no daemon of this service.
        Nothing is begun.

        Shapes: version — of the loaded driver; partitions — those of the devices that are parts of
        GPUs, or GPUs that are cut into parts.
        Errors: raises HardwareError when a stale daemon cannot be ended.
        """
        if not self.is_owned:
            return None
        for name in sorted(context.free & {device.name for device in devices}):
            self.daemons.end_stale(name)
        if (refusal := _refuse_mixed(devices, context, is_mps=sharing.strategy == MPS)) is not None:
            return refusal
        if sharing.strategy != MPS:
            return None
        if partitions:
            text = (
                f"MPS on parts of GPUs is not served: {', '.join(partitions)}; compute mode and daemon are those "
                "of a whole GPU"
            )
            return refuse("mps-partition", text)
        ordered = sorted(devices, key=lambda device: (str(device.pci or ""), device.name))
        is_part = any(_is_part(device, context) for device in devices)
        if is_part and len(devices) > 1:
            text = (
                "a part of a GPU under MPS comes with no other GPU, for a process has one daemon: "
                f"{', '.join(device.name for device in ordered)}"
            )
            return refuse("mps-several-daemons", text)
        if nameless := [device.name for device in ordered if not device.uuid]:
            return refuse(
                "mps-uuid-unknown",
                f"MPS needs each GPU's UUID, but neither NVML nor /proc/driver/nvidia reports that of "
                f"{', '.join(nameless)}",
            )
        programs = find_programs(settings, version, wants_smi=self.daemons.settings.exclusive_process)
        if isinstance(programs, Refusal):
            return programs
        limits = client_limits(sharing, ordered, context)
        name = min(device.name for device in devices)
        daemon = DaemonState(
            name=name,
            owner="" if is_part else context.owner.key,
            gpus=tuple(SharedGpu(device=device.name, uuid=device.uuid) for device in ordered),
            limits=limits,
            programs=programs,
        )
        edits = _edits(self.daemons.pipes_of(name), self.daemons.settings.shared_memory, limits)
        return MpsPlan(edits=edits, daemon=daemon)

    def begin(self, plan: MpsPlan, context: PrepareContext, edits: Edits) -> Edits | Refusal | LongWork:
        """Start the planned daemon where it does not run, and return these edits when it
        answers.
        """
        records = [context.records.get(gpu.device, DeviceRecord()) for gpu in plan.daemon.gpus]
        is_known = all(record.step(STEP) is not None for record in records)
        if is_known and self.daemons.is_serving(plan.daemon):
            return edits
        # Write it now, and not in the work: an owner that leaves meanwhile must see this one.
        for record in records:
            record.intend(STEP, {"daemon": plan.daemon.name, "owner": plan.daemon.owner})

        def work() -> Edits | Refusal:
            if (refusal := self.daemons.ensure(plan.daemon)) is not None:
                return refusal
            for record in records:
                record.done(STEP)
            return edits

        if context.owner.kind is OwnerKind.DEVICE_PLUGIN:
            # kubelet's Allocate waits, and cannot be answered with "ask again".
            return work()
        what = f"starting the MPS control daemon of {', '.join(gpu.device for gpu in plan.daemon.gpus)}"
        return LongWork(limit_s=self.daemons.settings.start_s + _SLACK_S, what=what, work=work)

    def undo(self, devices: Sequence[Device], context: PrepareContext) -> None:
        """End an owner's daemon, unless other owners use it.

        Errors: raises HardwareError for what cannot be undone now.
        """
        for device in devices:
            record = context.records.get(device.name)
            step = record.step(STEP) if record is not None else None
            if record is None or step is None:
                continue
            if not any(_has_step(other.steps) for other in context.others.get(device.name, ())):
                self.daemons.end(str(step.before.get("daemon", device.name)), str(step.before.get("owner", "")))
            record.undone(STEP)


def operators_edits(tree: Tree, sharing: Sharing, count: int) -> ContainerEdits | Refusal:
    """Return what a container of a claim with `count` GPUs needs to share them by the daemon that an
    operator runs on the node.
    """
    pipes = _find_daemon(tree)
    if pipes is None:
        return refuse(
            "mps-not-running",
            "no MPS control daemon runs on this node: run nvidia-cuda-mps-control -d there, or let the gpu "
            "service own it (mps.owned)",
        )
    config = sharing.mps_config
    claimed = config.default_pinned_device_memory_limit if config is not None else None
    limits = Limits(
        threads_percent=(config.default_active_thread_percentage or 0) if config is not None else 0,
        memory_mib=() if claimed is None else (max(1, Quantity.parse(claimed).units // _MIB),) * count,
    )
    return _edits(pipes, _SHARED_MEMORY, limits)


def client_limits(sharing: Sharing, devices: Sequence[Device], context: PrepareContext) -> Limits:
    """Compute the limits of one process: those of the claim, and at most the owner's part of a GPU
    that it shares.

    Units: memory in whole MiB, rounded down, because a limit must not be exceeded; at least one,
    because 0 means all.
    """
    config = sharing.mps_config
    percents = (
        [config.default_active_thread_percentage]
        if config is not None and config.default_active_thread_percentage
        else []
    )
    claimed = config.default_pinned_device_memory_limit if config is not None else None
    memory: list[int] = []
    for device in devices:
        share = context.shares.get(device.name, {})
        amounts = [Quantity.parse(claimed).units] if claimed is not None else []
        amounts += [share[MEMORY]] if share.get(MEMORY) else []
        memory.append(max(1, min(amounts) // _MIB) if amounts else 0)
        total = device.capacity.get(SHARES, 0)
        percents += [max(1, 100 * share[SHARES] // total)] if share.get(SHARES) and total else []
    return Limits(threads_percent=min(percents, default=0), memory_mib=tuple(memory))


def client_variables(pipes: str, limits: Limits) -> dict[str, str]:
    """Return a client's variables. GPUs have the daemon's ordinals in them.

    >>> client_variables("/p", Limits(threads_percent=25, memory_mib=(1024, 0)))["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
    '0=1024M'
    """
    variables = {PIPES_VARIABLE: pipes}
    if limits.threads_percent:
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(limits.threads_percent)
    if any(limits.memory_mib):
        variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(
            f"{ordinal}={mib}M" for ordinal, mib in enumerate(limits.memory_mib) if mib
        )
    return variables


def _edits(pipes: str, shared_memory: str, limits: Limits) -> ContainerEdits:
    """Return a client's variables, and the folders by which it exchanges data with its daemon."""
    mounts = ((pipes, pipes), (shared_memory, _SHARED_MEMORY))
    return ContainerEdits(
        env=client_variables(pipes, limits),
        mounts=tuple(Mount(host_path=host, container_path=inside, options=_WRITABLE) for host, inside in mounts),
    )


def _is_part(device: Device, context: PrepareContext) -> bool:
    return device.name in context.shares or device.sharing is not None


def _has_step(steps: Sequence[Step]) -> bool:
    return any(step.name == STEP for step in steps)


def _refuse_mixed(devices: Sequence[Device], context: PrepareContext, *, is_mps: bool) -> Refusal | None:
    """Refuse an owner that would share a GPU in another way than its present owners: one by MPS and
    one without would not share it.
    """
    for device in devices:
        for other in context.others.get(device.name, ()):
            if _has_step(other.steps) != is_mps:
                how = (
                    "by MPS, and this one would not"
                    if not is_mps
                    else "without MPS, and this one would share it by MPS"
                )
                text = (
                    f"device {device.name}: {other.owner} has a part of it {how}: ask for the same strategy, or "
                    "for another device"
                )
                return refuse("mps-mixed", text, device=device.name)
    return None


def _find_daemon(tree: Tree) -> str | None:
    """Find the folder where the node's MPS control daemon listens, or return None when none
    runs.
    """
    for name in tree.names("proc"):
        # A process may end at any time, and another user's environment cannot be read. Then take
        # the default folder; a wrong one shows as errors of the clients.
        if not name.isdecimal() or (tree.read_bytes(f"proc/{name}/comm") or b"").strip() != _OPERATORS_DAEMON:
            continue
        environment = (tree.read_bytes(f"proc/{name}/environ", _ENVIRONMENT_BYTES) or b"").decode("utf-8", "replace")
        variables = {
            variable: value for variable, _, value in (part.partition("=") for part in environment.split("\0"))
        }
        return variables.get(PIPES_VARIABLE) or _OPERATORS_PIPES
    return None
