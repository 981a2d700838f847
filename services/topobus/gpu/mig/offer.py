"""Decides which devices a GPU in MIG mode is offered as, and finds the instance of a device, and its
device nodes, when a claim is prepared.

A claim gets exactly the instance that was offered. An instance that was destroyed and made again
has another UUID, and the claim is refused. A container with the capabilities of the GPU instance
and of the compute instance, and with the GPU's node, can use that instance alone: CUDA finds the
others but may not open them.
Source: MIG User Guide, "Device Nodes and Capabilities":
/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<id>/access with `DeviceFileMinor: 12`, and
/proc/driver/nvidia-caps/mig-minors with `gpu0/gi1/ci0/access 13`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from topobus.devicekit.device_record import DeviceRecord, Step
from topobus.devicekit.left_out import LeftOut
from topobus.gpu.mig.devices import (
    MIG_TYPE,
    counter_set,
    gi_of,
    is_blocked,
    live_of,
    place_names,
    placed_devices,
    possible_devices,
)
from topobus.gpu.mig.on_demand import is_ours, make, ready_instance
from topobus.gpu.mig.values import LiveInstance, MigGpu
from topobus.gpu.nvml.nvml import Nvml, NvmlSilent
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree
from topobus.values.counters import CounterSet
from topobus.values.device import Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.health import Observation
from topobus.values.health_reasons import sign
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["MigOffer", "instance_edits", "is_mig"]

Recorded = Callable[[str], Sequence[Step]]
_WHOLE = "MIG mode is on, and CUDA finds no device on the whole GPU"
_ACCESS = "proc/driver/nvidia/capabilities"
_MINORS = "proc/driver/nvidia-caps/mig-minors"
_MINOR_KEY = "DeviceFileMinor"


def is_mig(device: Device) -> bool:
    """Return whether a device is a MIG instance."""
    return device.attributes.get("type") == MIG_TYPE


class MigOffer:
    """The instances of one node's GPUs, as they were at the last look."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._seen: dict[PciAddress, MigGpu] = {}
        self._sets: dict[str, CounterSet] = {}
        self._blocked: dict[str, str] = {}

    def forget(self) -> None:
        """Begin a new look."""
        self._seen, self._sets, self._blocked = {}, {}, {}

    @property
    def counter_sets(self) -> tuple[CounterSet, ...]:
        """Return the counters that instances made for claims take from, by GPU."""
        return tuple(self._sets[name] for name in sorted(self._sets))

    def possible(
        self, tree: Tree, nvml: Nvml | None, gpu: Device, mig: MigGpu, warnings: LeftOut, recorded: Recorded
    ) -> list[Device]:
        """List the instances that can be made of a GPU in MIG mode.

        `warnings` gets the names of instances that others have made. They stay and keep what they
        take.

        Shapes: recorded — by device, the steps that the journal has of it.
        """
        assert gpu.pci is not None
        self._seen[gpu.pci] = mig
        why = "MIG mode is on, and its instances are made when claims get them"
        warnings.keep(
            gpu.pci,
            DeviceRole.PARTITION_PARENT,
            f"{why}; {mig.fault}" if mig.fault else why,
            has_warning=bool(mig.fault),
        )
        boot = read_boot_id(tree)
        names = place_names(gpu, mig)
        foreign = [
            instance
            for instance in mig.instances
            if not is_ours(recorded(names.get((instance.profile, instance.start), "")), instance, boot)
        ]
        if foreign and nvml is not None:
            # An own instance that was destroyed since NVML was asked has no record any more, and
            # would count as foreign.
            try:
                still = nvml.mig(gpu.pci).instances
                foreign = [instance for instance in foreign if instance in still]
            except NvmlSilent as err:
                warnings.append(f"{gpu.pci}: {err}")
        devices = possible_devices(gpu, mig, foreign)
        self._sets[gpu.name] = counter_set(gpu, mig, foreign)
        for instance in foreign:
            profile = mig.profile(instance.profile)
            what = f"{profile.name} from memory slice {instance.start} on" if profile is not None else "of unknown size"
            warnings.append(
                f"{gpu.pci}: GPU instance {instance.id} ({what}) is somebody else's: it stays, and what it "
                "takes is not offered"
            )
        others = ", ".join(str(instance.id) for instance in foreign)
        self._blocked |= {device.name: others for device in devices if is_blocked(mig, device, foreign)}
        return devices

    def devices(self, gpu: Device, mig: MigGpu, warnings: LeftOut, *, is_counted: bool) -> list[Device]:
        """List the devices that a GPU in MIG mode is offered as.

        `warnings` gets the reason when the GPU itself is not offered.

        Shapes: gpu — the whole GPU as a device; is_counted — offer it beside its instances as well.
        """
        assert gpu.pci is not None
        self._seen[gpu.pci] = mig
        instances = placed_devices(gpu, mig)
        if is_counted and instances:
            return [
                msgspec.structs.replace(
                    gpu, role=DeviceRole.PARTITION_PARENT, attributes={**gpu.attributes, "type": "card"}
                ),
                *instances,
            ]
        why = f"MIG mode is on, and its instances are offered instead ({len(instances)})" if instances else _WHOLE
        warnings.keep(gpu.pci, DeviceRole.PARTITION_PARENT, f"{why}; {mig.fault}" if mig.fault else why)
        return instances

    def faults(self, nvml: Nvml, devices: Sequence[Device]) -> dict[str, list[Observation]]:
        """Return the faults of single instances that NVML reported since the last look, by device.

        A fault names a GPU instance: all compute instances in it share its memory and its engines.
        """
        seen = {
            device.name: [_occupied(self._blocked[device.name])] for device in devices if device.name in self._blocked
        }
        for address, faults in nvml.instance_faults.items():
            own = [device for device in devices if device.pci == address and is_mig(device)]
            numbers = self._numbers(nvml, address, own, {gi for gi, _ in faults})
            for gi, observation in faults:
                for name in sorted(name for name, number in numbers.items() if number == gi):
                    seen.setdefault(name, []).append(observation)
        return seen

    def live(self, nvml: Nvml | None, devices: Sequence[Device]) -> Mapping[str, LiveInstance] | Refusal:
        """Find the instances of devices, as they are now.

        Errors: raises nothing; refuses when one of them is missing or has another UUID.
        """
        migs: dict[PciAddress, MigGpu] = {}
        live: dict[str, LiveInstance] = {}
        gone: dict[str, str] = {}
        for device in devices:
            if device.pci is None or nvml is None:
                return _refuse(
                    "mig-unreadable", f"only NVML can identify {device.name}, and it is not available", (device.name,)
                )
            if device.pci not in migs:
                try:
                    migs[device.pci] = nvml.mig(device.pci)
                except NvmlSilent as err:
                    return _refuse("mig-unreadable", str(err), (device.name,))
            instance = live_of(migs[device.pci], device)
            if instance is None or instance[1] is None:
                gone[device.name] = "there is no such instance by now"
            elif device.uuid and instance[1].uuid != device.uuid:
                gone[device.name] = f"it was created again: its UUID was {device.uuid} and is {instance[1].uuid}"
            else:
                live[device.name] = LiveInstance(gi=instance[0].id, ci=instance[1].id, uuid=instance[1].uuid)
        if gone:
            text = "; ".join(f"{name}: {why}" for name, why in sorted(gone.items()))
            return _refuse("device-not-offered", text, tuple(sorted(gone)))
        return live

    def uuids(self, nvml: Nvml, devices: Sequence[Device]) -> dict[str, str]:
        """Find the UUIDs of those devices whose instances exist now. Empty where NVML is silent."""
        uuids: dict[str, str] = {}
        for address in {device.pci for device in devices if device.pci is not None}:
            try:
                mig = nvml.mig(address)
            except NvmlSilent:
                # The next look at its health reports it.
                continue
            for device in devices:
                live = live_of(mig, device) if device.pci == address else None
                if live is not None and live[1] is not None:
                    uuids[device.name] = live[1].uuid
        return uuids

    def to_make(
        self, tree: Tree, nvml: Nvml, devices: Sequence[Device], records: Mapping[str, DeviceRecord]
    ) -> tuple[str, ...]:
        """Name those devices whose instances are still to be made for this owner.

        All of them when NVML does not answer.
        """
        boot = read_boot_id(tree)
        migs: dict[PciAddress, MigGpu] = {}
        for address in sorted({device.pci for device in devices if device.pci is not None}):
            try:
                migs[address] = nvml.mig(address)
            except NvmlSilent:
                migs[address] = MigGpu()
        return tuple(
            device.name
            for device in devices
            if device.pci is not None
            and ready_instance(migs[device.pci], records.get(device.name, DeviceRecord()).steps, boot) is None
        )

    def made(
        self, tree: Tree, nvml: Nvml | None, devices: Sequence[Device], records: Mapping[str, DeviceRecord]
    ) -> Mapping[str, LiveInstance] | Refusal:
        """Make the instances of devices for one owner.

        An instance that was made before is returned again.
        """
        live: dict[str, LiveInstance] = {}
        for device in sorted(devices, key=lambda device: device.name):
            if nvml is None:
                return _refuse(
                    "mig-unreadable",
                    f"only NVML can create {device.name}, and it is not available",
                    (device.name,),
                )
            instance = make(tree, nvml, device, records.get(device.name, DeviceRecord()))
            if isinstance(instance, Refusal):
                return instance
            live[device.name] = instance
        return live

    def parent_nodes(self, tree: Tree, nvml: Nvml | None, device: Device, minor: str) -> tuple[str, ...] | Refusal:
        """Name the capabilities of all instances of a GPU that is offered as a whole beside
        them.
        """
        if nvml is None or device.pci is None:
            return _refuse(
                "mig-unreadable",
                f"only NVML can list the instances of {device.name}, and it is not available",
                (device.name,),
            )
        try:
            mig = nvml.mig(device.pci)
        except NvmlSilent as err:
            return _refuse("mig-unreadable", str(err), (device.name,))
        if not any(instance.computes for instance in mig.instances):
            text = f"{device.name}: it was offered with all of its MIG instances, and has none now"
            return _refuse("device-not-offered", text, (device.name,))
        nodes: list[str] = []
        for instance in mig.instances:
            for compute in instance.computes:
                own = _capability_nodes(tree, minor, instance.id, compute.id)
                if isinstance(own, Refusal):
                    return own
                nodes += own
        return tuple(dict.fromkeys(nodes))

    def _numbers(
        self, nvml: Nvml, address: PciAddress, devices: Sequence[Device], wanted: set[int]
    ) -> Mapping[str, int]:
        """Find each device's GPU instance in the last look, or in a new one when the last does not
        have all that are wanted.
        """
        numbers = gi_of(self._seen.get(address, MigGpu()), devices)
        if wanted <= set(numbers.values()):
            return numbers
        try:
            self._seen[address] = nvml.mig(address)
        except NvmlSilent:
            return numbers
        return gi_of(self._seen[address], devices)


def _occupied(others: str) -> Observation:
    return sign(
        "mig-occupied",
        f"it does not fit beside GPU instances that somebody else has made: {others}",
        evidence={"source": "nvml", "value": others},
    )


def instance_edits(
    tree: Tree, device: Device, minor: str, instance: LiveInstance, variable: str
) -> ContainerEdits | Refusal:
    """Give a container one instance: the GPU's node, and the capabilities of this instance
    alone.
    """
    nodes = _capability_nodes(tree, minor, instance.gi, instance.ci)
    if isinstance(nodes, Refusal):
        return nodes
    return ContainerEdits(
        env={variable: f"{device.pci}/{instance.gi}/{instance.ci}"},
        device_nodes=tuple(device_node(node) for node in (f"nvidia{minor}", *nodes)),
    )


def _refuse(code: str, message: str, devices: tuple[str, ...]) -> Refusal:
    return refuse(code, message, devices=devices)


def _capability_nodes(tree: Tree, minor: str, gi: int, ci: int) -> tuple[str, ...] | Refusal:
    """Name the nodes of a GPU's instance, relative to dev, that of the GPU instance first.

    Shapes: minor — the GPU's number in /dev/nvidia<minor>, by which the module's files are named.
    Errors: returns Refusal code mig-capability-missing with what the host lacks; raises
    HardwareError when a file exists and cannot be read.
    """
    nodes: list[str] = []
    # The list is long (each instance that could ever exist), and needed only where the first file
    # is missing.
    listed: dict[str, str] | None = None
    for path, short in (
        (f"gpu{minor}/mig/gi{gi}", f"gpu{minor}/gi{gi}"),
        (f"gpu{minor}/mig/gi{gi}/ci{ci}", f"gpu{minor}/gi{gi}/ci{ci}"),
    ):
        number = _minor_of(tree.read(f"{_ACCESS}/{path}/access") or "")
        if not number:
            listed = _read_list(tree) if listed is None else listed
            number = listed.get(f"{short}/access", "")
        if not number:
            text = (
                f"the kernel module names no capability for {short}: neither /{_ACCESS}/{path}/access nor "
                f"/{_MINORS} has its number"
            )
            return refuse("mig-capability-missing", text, capability=short)
        nodes.append(f"nvidia-caps/nvidia-cap{number}")
    missing = [node for node in nodes if tree.is_live and not tree.exists(f"dev/{node}")]
    if missing:
        text = (
            f"the host has no {', '.join(f'/dev/{node}' for node in missing)}: nvidia-modprobe makes it "
            "(nvidia-modprobe -f <access file>)"
        )
        return refuse("mig-capability-missing", text, capability=",".join(missing))
    return tuple(nodes)


def _minor_of(text: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == _MINOR_KEY and value.strip().isdecimal():
            return value.strip()
    return ""


def _read_list(tree: Tree) -> dict[str, str]:
    words = (line.split() for line in (tree.read(_MINORS) or "").splitlines())
    return {pair[0]: pair[1] for pair in words if len(pair) == 2 and pair[1].isdecimal()}
