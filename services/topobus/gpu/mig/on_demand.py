"""Makes a MIG instance when a claim gets it, and destroys it when the claim releases it. The
journal has each intent before the act.

An instance is ours when the record identifies it: by its number, by its compute instance's UUID, or
by its place. The place is used after a crash between making the instance and noting it: it was free
when the intent was written. All other instances are left alone. Instances do not survive a reboot,
so the record of an earlier boot identifies none.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.device_record import DeviceRecord, Step
from topobus.gpu.mig.nvml_mig import destroy_instance, make_compute_instance, make_gpu_instance
from topobus.gpu.mig.values import LiveInstance, MigGpu, MigInstance, MigProfile
from topobus.gpu.nvml.nvml import Nvml, NvmlSilent
from topobus.gpu.processes import process_of
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse

__all__ = ["destroy", "is_ours", "make", "own_instance", "ready_instance"]

_GPU_INSTANCE = "gpu-instance"
_COMPUTE_INSTANCE = "compute-instance"


def is_ours(steps: Sequence[Step], instance: MigInstance, boot: str) -> bool:
    """Return whether a record's steps have made the instance at the place of the record's
    device.
    """
    by_name = {step.name: step for step in steps}
    step = by_name.get(_GPU_INSTANCE)
    if step is None or step.before.get("boot") != boot:
        return False
    if (instance.profile, instance.start) != (step.before.get("profile"), step.before.get("start")):
        return False
    if step.is_done and step.after.get("gi") != instance.id:
        return False
    compute = by_name.get(_COMPUTE_INSTANCE)
    if compute is None or not compute.is_done or not instance.computes:
        return True
    return any(own.uuid == compute.after.get("uuid") for own in instance.computes)


def own_instance(mig: MigGpu, steps: Sequence[Step], boot: str) -> MigInstance | None:
    """Find the instance that a record's steps have made.

    None when it is gone, or was never made.
    """
    return next((instance for instance in mig.instances if is_ours(steps, instance, boot)), None)


def ready_instance(mig: MigGpu, steps: Sequence[Step], boot: str) -> LiveInstance | None:
    """Find the instance of a record when it is complete."""
    instance = own_instance(mig, steps, boot)
    if instance is None or not instance.computes:
        return None
    compute = instance.computes[0]
    is_noted = any(step.name == _COMPUTE_INSTANCE and step.after.get("uuid") == compute.uuid for step in steps)
    return LiveInstance(gi=instance.id, ci=compute.id, uuid=compute.uuid) if is_noted else None


def make(tree: Tree, nvml: Nvml, device: Device, record: DeviceRecord) -> LiveInstance | Refusal:
    """Make the instance of a device.

    An instance that this record has made already is returned again.

    Errors: refuses what does not fit beside the instances of others; raises HardwareError when the
    journal cannot be written, or the rest of an earlier try cannot be destroyed.
    """
    assert device.pci is not None
    try:
        mig = nvml.mig(device.pci)
        ready = ready_instance(mig, record.steps, read_boot_id(tree))
        if ready is not None:
            return ready
        if record.steps:
            # It is of an earlier boot, or incomplete.
            destroy(tree, nvml, device, record)
            mig = nvml.mig(device.pci)
        profile = next((profile for profile in mig.profiles if profile.name == device.attributes.get("profile")), None)
        start = device.attributes.get("placement")
        if profile is None or start not in profile.starts or not isinstance(start, int):
            return _refuse(
                "device-not-offered",
                f"{device.name}: the GPU is not in MIG mode any more, or does not know this size",
                device,
            )
        rivals = [instance for instance in mig.instances if _overlaps(instance, start, profile.size)]
        if rivals:
            return _occupied(device, ", ".join(f"GPU instance {instance.id}" for instance in rivals))
        return _make(tree, nvml, device, record, profile, start)
    except NvmlSilent as err:
        return _refuse("mig-unreadable", f"{device.name}: {err}", device)


def destroy(tree: Tree, nvml: Nvml | None, device: Device, record: DeviceRecord) -> None:
    """Destroy the instance that a record has, or was about to make.

    Nothing is done when the record has none, or the instance now belongs to another.

    Errors: raises HardwareError while NVML does not answer, or a program uses the instance.
    """
    if record.step(_GPU_INSTANCE) is None:
        return
    if nvml is None or device.pci is None:
        raise HardwareError(
            f"{device.name}: only NVML can destroy its instances, and it is not available", device=device.name
        )
    instance: MigInstance | None = None
    try:
        instance = own_instance(nvml.mig(device.pci), record.steps, read_boot_id(tree))
        if instance is not None:
            gi = instance.id
            nvml.with_gpu(device.pci, lambda library, handle: destroy_instance(library, handle, gi))
    except NvmlSilent as err:
        users = _users(tree, nvml, device, instance) if err.is_in_use and instance is not None else ""
        why = f"its MIG instance cannot be destroyed: {users or err}"
        raise HardwareError(f"{device.name}: {why}", device=device.name) from err
    record.undone(_COMPUTE_INSTANCE)
    record.undone(_GPU_INSTANCE)


def _make(
    tree: Tree, nvml: Nvml, device: Device, record: DeviceRecord, profile: MigProfile, start: int
) -> LiveInstance | Refusal:
    assert device.pci is not None
    record.intend(_GPU_INSTANCE, {"boot": read_boot_id(tree), "profile": profile.id, "start": start})
    try:
        gi = nvml.with_gpu(device.pci, lambda library, handle: make_gpu_instance(library, handle, profile, start))
    except NvmlSilent as err:
        if not err.has_no_room:
            raise
        # Another process was quicker, and the instance at the place is its own.
        record.undone(_GPU_INSTANCE)
        return _occupied(device, str(err))
    record.done(_GPU_INSTANCE, {"gi": gi})
    record.intend(_COMPUTE_INSTANCE)
    compute = nvml.with_gpu(
        device.pci, lambda library, handle: make_compute_instance(library, handle, gi, profile.slices)
    )
    record.done(_COMPUTE_INSTANCE, {"ci": compute.id, "uuid": compute.uuid})
    return LiveInstance(gi=gi, ci=compute.id, uuid=compute.uuid)


def _overlaps(instance: MigInstance, start: int, size: int) -> bool:
    # An instance without a known place may be anywhere.
    return instance.start is None or (instance.start < start + size and start < instance.start + instance.size)


def _users(tree: Tree, nvml: Nvml, device: Device, instance: MigInstance) -> str:
    assert device.pci is not None
    names: list[str] = []
    for compute in instance.computes:
        use = nvml.use(device.pci, compute.uuid)
        if not isinstance(use, str):
            names += [str(process_of(tree, pid, used)) for pid, used in sorted(use.processes.items())]
    return f"still in use by {', '.join(names)}" if names else ""


def _occupied(device: Device, what: str) -> Refusal:
    return _refuse(
        "mig-occupied", f"{device.name} does not fit beside instances that somebody else has made: {what}", device
    )


def _refuse(code: str, message: str, device: Device) -> Refusal:
    return refuse(code, message, devices=(device.name,))
