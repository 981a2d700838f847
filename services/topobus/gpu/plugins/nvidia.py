"""NVIDIA GPUs: by PCI id and class from sysfs, by the kernel module's /proc files, and by NVML
where it loads.

NVML is used on the live machine, or when a library folder is set. Devices have UUID, model, memory
and NVLink peers. Containers get device nodes, the driver's user-space files and
`NVIDIA_VISIBLE_DEVICES`. Without NVML the driver works with the data of sysfs, /proc and the
product table, and `warnings` names what is missing.

These GPUs are not offered, and the inventory's warnings name them:
- a GPU that a passthrough driver (vfio-pci) holds, and a physical function with virtual functions
  enabled;
- a GPU in MIG mode: CUDA finds no device on the whole card, and its instances are devices instead
  (`topobus.gpu.mig`), where NVML lists them.

An NVML session that became invalid (the driver was replaced) makes the GPUs Unknown with reason
`unmonitored`, and is renewed with growing pauses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import Discovery, HostServices, LongWork, PrepareContext
from topobus.devicekit.edits_text import (
    is_offered,
    own_variable,
    unusable,
)
from topobus.devicekit.function_health import FunctionHealth
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.pci import (
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    select_functions,
)
from topobus.devicekit.sharing.sharing import sharing_of
from topobus.formats.kubernetes.classic.classic_parameters import MPS, TIME_SLICING
from topobus.gpu.driver_root.access import access_nodes, read_access
from topobus.gpu.driver_root.bring import DriverFileSource
from topobus.gpu.drm_edits import by_path_nodes, groups_of
from topobus.gpu.host_services import GpuServices
from topobus.gpu.leftovers import ChecksLeftovers, GpuUse, Leftovers
from topobus.gpu.mig.offer import MigOffer, instance_edits, is_mig
from topobus.gpu.mig.on_demand import destroy
from topobus.gpu.mig.values import LiveInstance, MigGpu
from topobus.gpu.mps.claims import MpsPlan, MpsSharing, operators_edits
from topobus.gpu.nvidia_proc import PROC, driver_version, information, information_if_readable, information_path
from topobus.gpu.nvml.nvml import Nvml, NvmlGpu, load_nvml
from topobus.gpu.nvml.nvml_library import NvmlUnavailable
from topobus.gpu.processes import holders_of, process_of
from topobus.gpu.products import ProductTable
from topobus.gpu.time_slices import TimeSlicePlan, TimeSlices
from topobus.sysfs.drm import function_drm_nodes
from topobus.sysfs.nodes import device_node
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device, DeviceRole, Link, LinkClass
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.health_reasons import sign
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading
from topobus.values.request import Owner

__all__ = ["NvidiaDriver"]

_VENDOR = 0x10DE
# VGA controller and 3D controller: what NVIDIA's GPUs are, with and without a display engine.
_CLASSES = (0x0300, 0x0302)
# Nodes of the driver rather than of one GPU; every CUDA program opens the first two.
_SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
# Seconds that the making of one MIG instance may take: one or two on an idle node, ten under load
# (comments in NVIDIA's DRA driver, nvlib.go).
_MAKING_S = 15.0
_ALWAYS_SHARED = ("nvidiactl", "nvidia-uvm")


class NvidiaDriver(ChecksLeftovers):
    """Finds and watches NVIDIA GPUs.

    It keeps the NVML session and error counters, and nothing of a container's.
    """

    name = "nvidia"
    device_class = "gpu"
    sharing_strategies = frozenset({TIME_SLICING, MPS})
    # Without it NVIDIA's runtime would add every GPU that it finds to an image that sets "all".
    passthrough_variables = MappingProxyType({"NVIDIA_VISIBLE_DEVICES": "void"})

    def __init__(self, nvml: Nvml | None = None) -> None:
        self._products = ProductTable()
        self._health = FunctionHealth()
        self._nvml = nvml
        self.leftovers = Leftovers()
        self._driver_files = DriverFileSource()
        self._mig = MigOffer()
        self.mps = MpsSharing()
        self._time_slices = TimeSlices()

    def configure(self, host: HostServices) -> None:
        """Take the operator's settings."""
        super().configure(host)
        if isinstance(host, GpuServices) and host.mps is not None:
            self.mps = MpsSharing(host.mps)

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the GPUs, by address."""
        warnings = LeftOut()
        functions = [
            function
            for function in select_functions(tree, machine, vendors=(_VENDOR,), base_classes=_CLASSES)
            if is_offered(tree, function.address, warnings)
        ]
        nvml_gpus = self._ask_nvml(tree, [function.address for function in functions], warnings)
        version = driver_version(tree)
        devices: list[Device] = []
        self._mig.forget()
        for function in functions:
            gpu = nvml_gpus.get(function.address)
            device = self._device(tree, function, nvml_gpus, version)
            if _is_partitioned(tree, function.address, gpu):
                mig = gpu.mig if gpu is not None else MigGpu(fault="NVML, which reports its instances, is not used")
                if self.host.cuts_on_demand:
                    devices += self._mig.possible(tree, self._nvml, device, mig, warnings, self.host.recorded)
                else:
                    devices += self._mig.devices(device, mig, warnings, is_counted=self.host.offers_parents)
            else:
                devices.append(device)
        if devices:
            warnings.extend(self._driver_files.warnings(tree, version))
        return Discovery(
            devices=tuple(devices), counter_sets=self._mig.counter_sets, warnings=tuple(warnings), kept=warnings.kept
        )

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe the PCI function, the kernel module's files, and NVML."""
        addresses = {device.name: device.pci for device in devices if device.pci is not None}
        present = [address for address in sorted(set(addresses.values())) if tree.exists(pci_folder(address))]
        by_nvml = self._nvml.observe(present) if self._nvml else {}
        by_instance = self._mig.faults(self._nvml, devices) if self._nvml else {}
        by_mps = self.mps.observe()
        by_function = self._health.observe(tree, addresses.values(), partial(_observe_driver, tree))
        return {
            name: (*by_function[address], *by_nvml.get(address, ()), *by_instance.get(name, ()), *by_mps.get(name, ()))
            for name, address in addresses.items()
        }

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read GPUs and MIG instances from NVML. Without NVML there is nothing.

        An instance that was made for a claim has its UUID only now.
        """
        nvml = self._nvml
        if nvml is None:
            return {}
        made = self._mig.uuids(nvml, [device for device in devices if self._is_made(device)])
        return {
            device.name: nvml.readings(device.pci, device.uuid or made[device.name] if is_mig(device) else "")
            for device in devices
            if device.pci is not None and (not self._is_made(device) or device.name in made)
        }

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Give each GPU's nodes, the driver's shared nodes and files, and the variable that
        NVIDIA's container runtime reads.

        A MIG instance that does not exist yet is made first, which is long work.
        """
        nvml = self._session(tree)
        wanted = [device for device in devices if self._is_made(device)]
        if nvml is not None and (missing := self._mig.to_make(tree, nvml, wanted, context.records)):
            what = f"making MIG instances: {', '.join(missing)}"
            return LongWork(
                limit_s=_MAKING_S * (1 + len(missing)),
                what=what,
                work=lambda: _finished(self._prepare(tree, devices, context)),
            )
        return self._prepare(tree, devices, context)

    def _prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        whole = [device for device in devices if not is_mig(device) and device.role is not DeviceRole.PARTITION_PARENT]
        if (refusal := unusable(tree, devices) or _refuse_cut(tree, whole)) is not None:
            return refusal
        wanted = [device for device in devices if self._is_made(device)]
        self.leftovers.before(context, [device for device in devices if device not in wanted], partial(self.use, tree))
        version = driver_version(tree)
        shared_ways = self._plan_sharing(
            tree, devices, context, [each for each in devices if each not in whole], version
        )
        if isinstance(shared_ways, Refusal):
            return shared_ways
        plan, slices, shares = shared_ways
        access = read_access([context.config_of(device.name) for device in devices])
        if isinstance(access, Refusal):
            return access
        more_nodes = access_nodes(tree, access)
        if isinstance(more_nodes, Refusal):
            return more_nodes
        files = self._driver_files.edits(tree, version, context.owner, has_storage=access.gpu_direct_storage)
        if isinstance(files, Refusal):
            return files
        given = self._given(tree, devices, whole, wanted, context)
        if isinstance(given, Refusal):
            return given
        edits, uuids, is_cuda = given
        shared = [
            shared_node
            for shared_node in _SHARED_NODES
            if is_cuda and (tree.exists(f"dev/{shared_node}") or (not tree.is_live and shared_node in _ALWAYS_SHARED))
        ]
        env = {"NVIDIA_VISIBLE_DEVICES": _visible(uuids, len(devices)) if files is None else "void"}
        files = files or ContainerEdits()
        shared += more_nodes
        common = ContainerEdits(
            env={**env, **files.env, **shares.env},
            device_nodes=tuple(device_node(name) for name in shared),
            mounts=(*files.mounts, *shares.mounts),
            hooks=files.hooks,
            additional_gids=groups_of(tree, shared, context.owner),
        )
        if slices is not None and (refusal := self._time_slices.begin(slices, context)) is not None:
            return refusal
        answer = {**edits, "": common}
        return answer if plan is None else self.mps.begin(plan, context, answer)

    def _plan_sharing(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext, parts: Sequence[Device], version: str
    ) -> tuple[MpsPlan | None, TimeSlicePlan | None, ContainerEdits] | Refusal:
        """Plan how the owner shares its GPUs: by a daemon of MPS, by time slices, or by a daemon that an
        operator runs, for which there are edits alone.
        """
        sharing = sharing_of(devices, context)
        if isinstance(sharing, Refusal):
            return sharing
        names, driver_files = [device.name for device in parts], tree.settings.driver_files
        plan = self.mps.plan(devices, context, sharing, driver_files, version=version, partitions=names)
        if isinstance(plan, Refusal):
            return plan
        slices = self._time_slices.plan(devices, context, sharing, driver_files, version=version, partitions=names)
        if isinstance(slices, Refusal):
            return slices
        if plan is not None or sharing.strategy != MPS:
            return plan, slices, ContainerEdits() if plan is None else plan.edits
        shares = operators_edits(tree, sharing, len(devices))
        return shares if isinstance(shares, Refusal) else (None, slices, shares)

    def _given(
        self,
        tree: Tree,
        devices: Sequence[Device],
        whole: Sequence[Device],
        wanted: Sequence[Device],
        context: PrepareContext,
    ) -> tuple[dict[str, ContainerEdits], list[str], bool] | Refusal:
        """Give each device's own edits by its name, the UUIDs by PCI address, and whether CUDA is
        among it.

        Shapes: whole — those that are no parts; wanted — instances that are made for their owner.
        """
        nvml = self._session(tree)
        live = self._mig.live(nvml, [device for device in devices if is_mig(device) and device not in wanted])
        if isinstance(live, Refusal):
            return live
        made = self._mig.made(tree, nvml, wanted, context.records)
        if isinstance(made, Refusal):
            return made
        instances = {**live, **made}
        edits: dict[str, ContainerEdits] = {}
        uuids: list[str] = []
        is_cuda = False
        for address, device in sorted(
            ((device.pci, device) for device in devices if device.pci is not None), key=lambda pair: pair[0]
        ):
            if device not in whole:
                own = self._part_edits(tree, device, instances.get(device.name))
                if isinstance(own, Refusal):
                    return own
                edits[device.name], is_cuda = own, True
                uuids.extend([instances[device.name].uuid] if device.name in instances else [])
                continue
            edits[device.name] = _whole_edits(tree, address, device, context.owner)
            is_cuda = is_cuda or "Device Minor" in information(tree, address)
            uuids.extend([device.uuid] if device.uuid else [])
        return edits, uuids, is_cuda

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Destroy the MIG instances that were made for the owner.

        When the last owner leaves, end the MPS control daemon and set the time slice back.

        Errors: raises HardwareError, which names each instance that cannot be destroyed now, after
        all others are.
        """
        left: list[str] = []
        for device in devices:
            record = context.records.get(device.name)
            if record is None or not record.steps:
                continue
            try:
                destroy(tree, self._session(tree), device, record)
            except HardwareError as err:
                left.append(err.message)
        self.mps.undo(devices, context)
        self._time_slices.undo(devices, context, tree.settings.driver_files, driver_version(tree))
        if left:
            raise HardwareError("; ".join(left), driver=self.name)

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Wait until nothing of the last owner is left.

        An instance that was made for an owner needs no check: it was destroyed with all that it
        had.
        """
        return None if self._is_made(device) else super().clean(tree, device, record)

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return True for whole GPUs that are not shared: no instance is made and no slice is set.

        False where the service owns daemons of MPS, because stale ones may be ended.
        """
        return not self.mps.is_owned and all(
            not is_mig(device) and device.role is DeviceRole.COMPUTE and device.sharing is None for device in devices
        )

    def own_nodes(self, tree: Tree, device: Device) -> Sequence[str]:
        """Name the GPU's own node, which sysfs does not list. Nodes that all GPUs share do not show
        the use of this one.
        """
        minor = information_if_readable(tree, device.pci).get("Device Minor", "") if device.pci is not None else ""
        return (f"nvidia{minor}",) if minor else ()

    def let_go(self, tree: Tree, device: Device) -> None:
        """Close what NVML has open on the GPU: otherwise NVIDIA's module would wait for it in
        `unbind` without end.
        """
        if self._nvml is not None and device.pci is not None:
            self._nvml.give_away(device.pci, is_away=True)

    def take_back(self, tree: Tree, device: Device) -> None:
        """Begin a session that includes the GPU again."""
        if self._nvml is not None and device.pci is not None:
            self._nvml.give_away(device.pci, is_away=False)

    def _is_made(self, device: Device) -> bool:
        """Return whether a device is an instance that is made for its owner: such a device has no
        UUID, because its instance is another one each time.
        """
        return is_mig(device) and not device.uuid

    def use(self, tree: Tree, device: Device) -> GpuUse:
        """Find what uses a GPU, by NVML where it answers, else by the processes that have its node
        open, without the memory.
        """
        if device.pci is None:
            return GpuUse(blind=f"{device.name} has no PCI address")
        if self._nvml is not None:
            seen = self._nvml.use(device.pci, device.uuid if is_mig(device) else "")
            if isinstance(seen, str):
                return GpuUse(blind=seen)
            return GpuUse(
                processes=tuple(process_of(tree, pid, used) for pid, used in seen.processes.items()),
                used_bytes=seen.used_bytes,
            )
        minor = information_if_readable(tree, device.pci).get("Device Minor", "")
        holders = holders_of(tree, [f"nvidia{minor}"] if minor else ())
        return GpuUse(processes=holders.processes, unseen=holders.unseen)

    def _part_edits(self, tree: Tree, device: Device, instance: LiveInstance | None) -> ContainerEdits | Refusal:
        """Give a MIG instance, or a GPU with all of its instances, where it is offered beside
        them.
        """
        assert device.pci is not None
        minor = information(tree, device.pci).get("Device Minor", "")
        if instance is not None:
            return instance_edits(tree, device, minor, instance, own_variable(device))
        nodes = self._mig.parent_nodes(tree, self._session(tree), device, minor)
        if isinstance(nodes, Refusal):
            return nodes
        names = (f"nvidia{minor}", *nodes)
        return ContainerEdits(env={own_variable(device): str(device.pci)}, device_nodes=tuple(map(device_node, names)))

    def _device(self, tree: Tree, function: PciDevice, nvml_gpus: Mapping[PciAddress, NvmlGpu], version: str) -> Device:
        facts = information_if_readable(tree, function.address)
        product = self._products.product(function)
        gpu = nvml_gpus.get(function.address, NvmlGpu())
        attributes: dict[str, AttributeValue] = {"type": "gpu", **gpu.facts}
        if version:
            attributes["driverVersion"] = version
        memory_bytes = gpu.memory_bytes or product.memory_bytes
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="nvidia",
            model=gpu.name or facts.get("Model", "") or product.name or f"NVIDIA device {function.device:04x}",
            uuid=gpu.uuid or facts.get("GPU UUID", ""),
            parent="" if function.physfn is None else pci_device_name(self.device_class, function.physfn),
            links=_links_of(self.device_class, function.address, nvml_gpus),
            attributes=attributes,
            capacity={"memory": memory_bytes} if memory_bytes else {},
        )

    def _ask_nvml(
        self, tree: Tree, addresses: Sequence[PciAddress], warnings: list[str]
    ) -> Mapping[PciAddress, NvmlGpu]:
        nvml = self._session(tree, warnings) if addresses else None
        if nvml is None:
            return {}
        nvml_gpus = nvml.describe(addresses)
        warnings.extend(nvml.warnings)
        return nvml_gpus

    def _session(self, tree: Tree, warnings: list[str] | None = None) -> Nvml | None:
        """Open the session with NVML where it may be asked, or return None."""
        if self._nvml is None and (tree.is_live or tree.settings.library_path):
            try:
                self._nvml = load_nvml(tree)
            except NvmlUnavailable as err:
                if warnings is not None:
                    warnings.append(f"{err}; GPUs are described from sysfs and /proc alone, without NVLink and ECC")
        return self._nvml


def _finished(answer: Mapping[str, ContainerEdits] | Refusal | LongWork) -> Mapping[str, ContainerEdits] | Refusal:
    """Run long work to its end, inside other long work."""
    return answer.work() if isinstance(answer, LongWork) else answer


def _observe_driver(tree: Tree, address: PciAddress) -> list[Observation]:
    if unbound := observe_kernel_driver(tree, address):
        return unbound
    facts = information(tree, address)
    if facts.get("GPU Excluded", "No").lower() == "yes":
        return [
            sign(
                "gpu-excluded",
                "the nvidia module is configured to ignore this GPU (NVreg_ExcludedGpus)",
                information_path(address),
                "GPU Excluded: Yes",
            )
        ]
    return []


def _whole_edits(tree: Tree, address: PciAddress, device: Device, owner: Owner) -> ContainerEdits:
    """Give the nodes of a whole GPU."""
    # The minor number may change with a reboot, so it is read each time.
    minor = information(tree, address).get("Device Minor")
    drm = function_drm_nodes(tree, address)
    names = [*([f"nvidia{minor}"] if minor is not None else []), *drm.paths]
    nodes = [node for node in names if not tree.is_live or tree.exists(f"dev/{node}")]
    return ContainerEdits(
        env={own_variable(device): str(address)},
        device_nodes=(*(device_node(node) for node in nodes), *by_path_nodes(tree, address, drm)),
        additional_gids=groups_of(tree, nodes, owner),
    )


def _is_partitioned(tree: Tree, address: PciAddress, gpu: NvmlGpu | None) -> bool:
    """Return whether a GPU is in MIG mode, by NVML, or by the kernel module's list of its instances
    where NVML is not asked.
    """
    if gpu is not None and gpu.facts.get("migEnabled"):
        return True
    minor = information_if_readable(tree, address).get("Device Minor", "")
    # Source: NVIDIA, "MIG User Guide", device nodes and capabilities: gpu<minor>/mig/gi<instance>.
    return any(name.startswith("gi") for name in tree.names(f"{PROC}/capabilities/gpu{minor}/mig")) if minor else False


def _refuse_cut(tree: Tree, devices: Sequence[Device]) -> Refusal | None:
    """Refuse GPUs that were cut into MIG instances since the last look.

    The kernel module's files are read, because NVML takes long to ask.
    """
    cut = tuple(
        sorted(device.name for device in devices if device.pci is not None and _is_partitioned(tree, device.pci, None))
    )
    text = f"in MIG mode by now, which CUDA cannot use as a whole: {', '.join(cut)}"
    return refuse("device-not-offered", text, devices=cut) if cut else None


def _visible(uuids: Sequence[str], count: int) -> str:
    """Return the GPUs that NVIDIA's container runtime is to add by itself: those asked for here, or
    none when the UUID of one of them is not known.

    The variable is always set, because CUDA images set it to "all" and the runtime obeys that.
    UUIDs are given only where this runtime brings the driver's libraries. Where Topobus does it is
    "void", as in NVIDIA's own CDI files. The gateway prepares each request of a claim by itself, so
    no container gets the GPUs of another request.
    """
    return ",".join(uuids) if uuids and len(uuids) == count else "void"


def _links_of(device_class: str, address: PciAddress, nvml_gpus: Mapping[PciAddress, NvmlGpu]) -> tuple[Link, ...]:
    """List the links of one GPU to others that are there, by address."""
    own = nvml_gpus.get(address)
    if own is None:
        return ()
    peers = {peer: (gbps, own.counts.get(peer, 0)) for peer, gbps in own.links.items() if peer in nvml_gpus}
    if own.switch_gbps:
        # Two GPUs on NVSwitches reach each other at the full width of the narrower one.
        reached = {
            peer: (min(own.switch_gbps, gpu.switch_gbps), min(own.switch_count, gpu.switch_count))
            for peer, gpu in nvml_gpus.items()
            if peer != address and gpu.switch_gbps
        }
        peers.update(reached)
    return tuple(
        Link(peer=pci_device_name(device_class, peer), kind=LinkClass.FABRIC, bandwidth_gbps=gbps, count=count)
        for peer, (gbps, count) in sorted(peers.items())
    )
