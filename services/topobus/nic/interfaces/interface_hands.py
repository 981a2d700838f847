"""Hands the interface of a device over to a pod's sandbox, and takes it back, for all drivers of
class `nic`.

`topobus.nic.netlink` changes the kernel, and CNI plugins (`topobus.nic.cni`) where the claim asks
for them. Each of them writes its steps into the device's record, and this module undoes them in
reverse order.

Only claims attach: a device plugin's Allocate names no pod. An interface whose claim has
`mode: host` stays on the host. So does every device without an interface (a function that is bound
to vfio-pci). Their containers get device nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import PrepareContext
from topobus.nic.cni.attachment import CniAttachment
from topobus.nic.cni.settings import CniSettings
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, ShareFields, interface_of
from topobus.nic.interfaces.rules.interface_fields import Faults
from topobus.nic.interfaces.rules.interface_reading import read_interface_config
from topobus.nic.netlink.hand_over import check_hand_over, hand_over, mark, read_interface
from topobus.nic.netlink.kept_namespaces import KEEP, KeptNamespaces
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.take_back import take_back
from topobus.nic.netlink.vf_settings import VfPlace
from topobus.nic.rdma.rdma_hand_over import check_rdma, hand_over_rdma, take_back_rdma
from topobus.process.logging import get_logger
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.request import OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["SHARE_MODE", "SHARE_SUBMODE", "InterfaceHands", "read_config"]

SHARE_MODE = "shareMode"
SHARE_SUBMODE = "shareSubmode"
# Names for an interface whose own name the pod has already. A pod has a few interfaces, and the
# kernel's limit is far higher.
_MOST_NAMES = 256


class InterfaceHands:
    """Attaches and detaches interfaces. All calls block, for a driver's thread."""

    def __init__(self, places: Places | None = None, cni: CniAttachment | None = None) -> None:
        """Work in these places. The defaults are those of a process on the host itself."""
        self._places = places or Places()
        self._cni = cni or CniAttachment(CniSettings())
        self._kept = KeptNamespaces(self._places)

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> tuple[str, ...]:
        """Name those devices whose interface moves into the pod."""
        if context.owner.kind is not OwnerKind.CLAIM:
            return ()
        return tuple(device.name for device in devices if interface_of(device) and not _stays(device, context))

    def check(
        self,
        devices: Sequence[Device],
        context: PrepareContext,
        *,
        vf_of: Callable[[Device], VfPlace | Refusal | None] = lambda _device: None,
        rdma_of: Callable[[Device], Sequence[str]] = lambda _device: (),
    ) -> Refusal | None:
        """Refuse what cannot be attached, before anything is changed.

        Shapes: vf_of — where the physical function of a virtual one is, or why that is not known;
        rdma_of — a device's RDMA devices.
        """
        reasons: list[Reason] = []
        for device in devices:
            config = read_config(device, context)
            if isinstance(config, Refusal):
                refusal: Refusal | None = config
            elif device.name not in self.to_attach([device], context) or device.name in context.attached:
                refusal = None
            else:
                refusal = self._check_one(device, config, context, vf_of, rdma_of)
            reasons += [_of_device(reason, device) for reason in (refusal.reasons if refusal is not None else ())]
        return Refusal(reasons=tuple(reasons)) if reasons else None

    def attach(
        self,
        device: Device,
        context: PrepareContext,
        sandbox: Sandbox,
        record: DeviceRecord,
        *,
        vf: VfPlace | Refusal | None = None,
        rdma: Sequence[str] = (),
    ) -> AttachedInterface | Refusal:
        """Put the interface into the sandbox.

        `detach` undoes what was done before a Refusal.
        """
        config = read_config(device, context)
        if isinstance(config, Refusal):
            return config
        vf = vf if config.vf is not None else None
        if isinstance(vf, Refusal):
            return vf
        namespace, name = sandbox.network_namespace, interface_of(device)
        config = self._with_free_name(config, name, namespace)
        if isinstance(config, Refusal):
            return config
        refusal = self._kept.keep(namespace, record, f"{device.name}@{context.owner.uid}")
        if refusal is not None:
            return refusal
        attached = self._attach_kept(device, context, sandbox, record, config, vf, rdma)
        if isinstance(attached, Refusal) and [step.name for step in record.steps] == [KEEP]:
            # It was refused before anything was changed.
            self._kept.let_go(record)
        return attached

    def _attach_kept(
        self,
        device: Device,
        context: PrepareContext,
        sandbox: Sandbox,
        record: DeviceRecord,
        config: InterfaceConfig,
        vf: VfPlace | None,
        rdma: Sequence[str],
    ) -> AttachedInterface | Refusal:
        namespace, name = sandbox.network_namespace, interface_of(device)
        tag = f"topobus {device.name} {context.owner.uid}"
        if config.cni is not None:
            # A chain may move the interface (host-device), and restores no more than its name. A
            # shared interface stays, and several chains use it.
            refusal = None if device.allows_multiple else mark(self._places, name, record, tag=tag)
            return refusal or self._cni.attach(
                config.cni, sandbox, config.interface.name or name, device, record, on_host=name
            )
        if config.is_rdma_exclusive:
            refusal = hand_over_rdma(self._places, rdma, namespace, record)
            if refusal is not None:
                return refusal
        return hand_over(self._places, name, namespace, config, record, tag=tag, vf=vf)

    def detach(self, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Undo all that the record has, whether the sandbox still exists or not.

        Errors: raises HardwareError when something could not be undone; the record keeps it, and
        the next call continues there.
        """
        sandbox = sandbox or record.sandbox
        namespace = self._kept.open(sandbox.network_namespace if sandbox is not None else "", record)
        refusal = self._cni.detach(record)
        if refusal is not None:
            raise HardwareError(f"{device.name}: {refusal.why}", device=device.name)
        taken = take_back(self._places, namespace, record)
        take_back_rdma(self._places, namespace, record, is_lost=taken.outcome == "lost")
        self._kept.let_go(record)
        why = "; ".join(reason.message for reason in taken.reasons)
        if taken.outcome == "lost":
            get_logger().warning("interface.lost", device=device.name, interface=taken.name, why=why)
        elif taken.reasons:
            get_logger().warning(
                "interface.changed", device=device.name, interface=taken.name, outcome=taken.outcome, why=why
            )
        elif taken.outcome != "nothing":
            get_logger().info("interface.returned", device=device.name, interface=taken.name, outcome=taken.outcome)

    def _check_one(
        self,
        device: Device,
        config: InterfaceConfig,
        context: PrepareContext,
        vf_of: Callable[[Device], VfPlace | Refusal | None],
        rdma_of: Callable[[Device], Sequence[str]],
    ) -> Refusal | None:
        name = interface_of(device)
        if config.cni is not None:
            return self._cni.check(config.cni, device, f"{context.owner}", interface=name)
        if config.is_rdma_exclusive:
            refusal = check_rdma(rdma_of(device))
            if refusal is not None:
                return refusal
        # The place of the physical function is needed only by a configuration of it.
        vf = vf_of(device) if config.vf is not None else None
        return vf if isinstance(vf, Refusal) else check_hand_over(self._places, name, config, vf=vf)

    def _with_free_name(self, config: InterfaceConfig, name: str, namespace: str) -> InterfaceConfig | Refusal:
        """Choose `net1`, `net2` … where no name is configured and the pod already has the host's
        name (mostly `eth0`).
        """
        if config.interface.name is not None:
            return config
        for wanted in (name, *(f"net{number}" for number in range(1, _MOST_NAMES + 1))):
            there = read_interface(self._places, wanted, namespace)
            if isinstance(there, Refusal):
                return there
            if there is None:
                return msgspec.structs.replace(config, interface=msgspec.structs.replace(config.interface, name=wanted))
        return refuse(
            "interface-config-invalid",
            f"the pod has {name} and net1 to net{_MOST_NAMES}; configure interface.name",
            field="interface.name",
        )


def read_config(device: Device, context: PrepareContext) -> InterfaceConfig | Refusal:
    """Read a device's configuration, for a shared one with the mode that the operator has set."""
    config = read_interface_config(context.config_of(device.name))
    if isinstance(config, Refusal) or not device.allows_multiple:
        return config
    mode, submode = str(device.attributes.get(SHARE_MODE, "")), str(device.attributes.get(SHARE_SUBMODE, ""))
    asked = config.share
    faults = Faults()
    if asked is not None and asked.mode != mode:
        faults.wrong("share.mode", asked.mode, f"{mode}, as the operator shares this interface")
    if asked is not None and asked.submode not in (None, submode):
        faults.wrong("share.submode", asked.submode, f"{submode}, as the operator shares this interface")
    if config.vf is not None:
        faults.wrong("vf", "set", "none: a child of a shared interface is configured by itself")
    if config.is_rdma_exclusive:
        faults.wrong("rdma.mode", "exclusive", "shared: the device stays on the host for its other children")
    if mode == "ipvlan" and config.interface.mac is not None:
        faults.wrong(
            "interface.mac", config.interface.mac, "none: an ipvlan child has the hardware address of its parent"
        )
    share = None if config.cni is not None or config.stays_on_host else ShareFields(mode=mode, submode=submode or None)
    return faults.refusal() or msgspec.structs.replace(config, share=share)


def _stays(device: Device, context: PrepareContext) -> bool:
    config = read_interface_config(context.config_of(device.name))
    # A configuration that cannot be read is refused by `check`, before this is called.
    return isinstance(config, InterfaceConfig) and config.stays_on_host


def _of_device(reason: Reason, device: Device) -> Reason:
    return msgspec.structs.replace(
        reason, message=f"{device.name}: {reason.message}", facts={**reason.facts, "device": device.name}
    )
