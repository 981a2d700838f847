"""Base of the drivers of class `nic`: check, attach and detach by InterfaceHands.

Without hands (a recorded machine, a service without the rights) nothing is attached. A claim
without configuration gets device nodes and variables, and one that configures the interface is
refused. Interfaces of a tree that is not this kernel's must never be looked up in this kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import DeviceDriver, HostServices, PrepareContext
from topobus.nic.config import InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands, read_config
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, interface_of
from topobus.nic.netlink.vf_settings import VfPlace
from topobus.sysfs.net import default_route_interfaces, function_ports
from topobus.sysfs.netdevs import read_net_device
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["AttachesInterfaces"]


class AttachesInterfaces(DeviceDriver):
    """The attaching part of a driver. The driver itself knows where the parts of a device are."""

    def __init__(self, settings: InterfaceSettings | None = None) -> None:
        self._settings = settings or InterfaceSettings()
        self._hands: InterfaceHands | None = None
        self._why_not_handed = "it has no rights to"

    def configure(self, host: HostServices) -> None:
        """Take the service's settings, and its hands or the reason why it has none."""
        super().configure(host)
        if isinstance(host, NicServices):
            self._settings, self._hands, self._why_not_handed = (
                host.interfaces,
                host.hands,
                host.why_not or self._why_not_handed,
            )

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> Sequence[str]:
        """Name those devices whose interface moves into the pod."""
        return () if self._hands is None else self._hands.to_attach(devices, context)

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse a configuration that these devices cannot have, with the field, before anything is
        changed.
        """
        if self._hands is None:
            reasons = [reason for device in devices for reason in self._refuse_promises(device, context)]
            return Refusal(reasons=tuple(reasons)) if reasons else None
        leaving = set(self._hands.to_attach(devices, context)) - context.attached
        changed = [reason for device in devices if device.name in leaving for reason in _changed(tree, device)]
        if changed:
            return Refusal(reasons=tuple(changed))
        return self._hands.check(
            devices,
            context,
            vf_of=lambda device: self._find_vf(tree, device),
            rdma_of=lambda device: self._find_rdma(tree, device),
        )

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        """Put the device's interface into a sandbox, or return None for a device that stays on the
        host.
        """
        if self._hands is None:
            return Refusal(reasons=(self._unsupported(device),))
        if device.name not in self._hands.to_attach([device], context):
            return None
        # A claim may be prepared long before its pod's sandbox exists.
        if changed := _changed(tree, device):
            return Refusal(reasons=changed)
        return self._hands.attach(
            device, context, sandbox, record, vf=self._find_vf(tree, device), rdma=self._find_rdma(tree, device)
        )

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Undo all that the record has."""
        if self._hands is not None:
            self._hands.detach(device, sandbox, record)

    def names_in_container(self, device: Device, context: PrepareContext) -> tuple[str, ...]:
        """Name the interface as the pod will see it.

        Empty for a device whose interface stays on the host.
        """
        config = read_config(device, context)
        if device.name not in self.to_attach([device], context) or isinstance(config, Refusal):
            return ()
        return (config.interface.name or interface_of(device),)

    def takes_rdma_along(self, device: Device, context: PrepareContext) -> bool:
        """Return whether the device's RDMA devices leave the host with its interface."""
        config = read_config(device, context)
        return (
            device.name in self.to_attach([device], context)
            and not isinstance(config, Refusal)
            and config.is_rdma_exclusive
        )

    def _refuse_promises(self, device: Device, context: PrepareContext) -> tuple[Reason, ...]:
        """Refuse a configuration that cannot be applied without hands.

        Without a configuration the interface stays on the host, and the claim gets nodes and
        variables.
        """
        config = read_config(device, context)
        if isinstance(config, Refusal):
            return config.reasons
        return () if config.stays_on_host or config == InterfaceConfig() else (self._unsupported(device),)

    def _unsupported(self, device: Device) -> Reason:
        message = f"{device.name}: this nic service hands no interface over: {self._why_not_handed}"
        return Reason(code="attach-unsupported", message=message, facts={"driver": self.name, "device": device.name})

    def _find_vf(self, tree: Tree, device: Device) -> VfPlace | Refusal | None:
        """Find where a virtual function's physical one is, or why that is not known.

        None for a device that is no virtual function.
        """
        return None

    def _find_rdma(self, tree: Tree, device: Device) -> Sequence[str]:
        """Name the RDMA devices that belong to a device."""
        return ()


def _changed(tree: Tree, device: Device) -> tuple[Reason, ...]:
    """Return why an interface must not leave although it was offered: it has the node's default
    route since then (DHCP was late), or its name is another interface's by now.
    """
    name = interface_of(device)
    facts: dict[str, str | int | float | bool | tuple[str, ...]] = {"device": device.name, "interface": name}
    if not device.allows_multiple and name in default_route_interfaces(tree):
        message = (
            f"{device.name}: the default route of this node goes over {name} by now, so it stays on the host; "
            "move the route to another interface, or choose another device"
        )
        return (Reason(code="interface-of-node", message=message, facts=facts),)
    if device.pci is not None:
        now = [interface.name for interface in function_ports(tree, device.pci, only_link=True).interfaces]
        if name not in now:
            message = (
                f"{device.name}: the interface of {device.pci} was {name} and is {', '.join(now) or 'not there'} "
                "now; ask again when the inventory shows it"
            )
            return (Reason(code="interface-changed", message=message, facts=facts),)
        return ()
    there, kind = read_net_device(tree, name), device.attributes.get("kind")
    if there is not None and kind is not None and there.kind != kind:
        message = (
            f"{device.name}: {name} was of kind {kind} and is of kind {there.kind} now, so it is another "
            "interface; ask again when the inventory shows it"
        )
        return (Reason(code="interface-changed", message=message, facts=facts),)
    return ()
