"""The nic service: the device host, run for class `nic`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.host.host import check_devices, serve_devices
from topobus.nic.cni.attachment import CniAttachment
from topobus.nic.config import NicSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.netlink.places import Places
from topobus.nic.virtual_functions import check_virtual_functions, keep_virtual_functions
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.sysfs.filesystem import is_kernels
from topobus.values.pci import PciAddress

__all__ = ["check", "serve"]

# Bits of linux/capability.h.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def check(settings: NicSettings) -> None:
    """Refuse plugins that are not installed, invalid pools, and invalid PCI addresses.

    Errors: raises ConfigError that names the key.
    """
    check_devices("nic", settings)
    check_virtual_functions(settings.virtual_functions)


async def serve(settings: NicSettings, runtime: Runtime) -> None:
    """Serve this node's NICs until cancelled."""
    cni = CniAttachment(settings.cni)
    why_not = _why_not(settings)
    if why_not:
        get_logger().info("interfaces.kept", why=f"claims that configure an interface are refused: {why_not}")
    hands = None if why_not else _make_hands(settings, cni)
    if not settings.interfaces.offer and not settings.interfaces.share:
        get_logger().info(
            "interfaces.unlisted", why="interfaces.offer and interfaces.share are empty: only PCI functions are offered"
        )
    async with asyncio.TaskGroup() as group:
        if hands is not None:
            # In its own task: a plugin that hangs must not delay the devices of the node.
            group.create_task(asyncio.to_thread(_tell_networks, cni))
        sys = str(Path(settings.hardware.root, settings.hardware.sys))
        if settings.virtual_functions and not _is_of_this_kernel(sys):
            get_logger().warning("functions.kept", why=f"virtual_functions does nothing: {sys} is a recorded machine's")
        elif settings.virtual_functions:
            holders = DeviceHolders(runtime.bus, node=runtime.node, device_class="nic")
            group.create_task(keep_virtual_functions(settings.virtual_functions, holders, sys))
        services = NicServices(
            interfaces=settings.interfaces,
            hands=hands,
            why_not=why_not,
            counted=frozenset(PciAddress.parse(wish.address) for wish in settings.virtual_functions),
        )
        await serve_devices(settings, runtime, "nic", host_services=services)


def _tell_networks(cni: CniAttachment) -> None:
    """Report at the start which networks cannot be used, before a pod names one. The others are
    still used.
    """
    for name, refusal in cni.check_networks().items():
        get_logger().error("network.unusable", network=name, reasons=[reason.message for reason in refusal.reasons])


def _why_not(settings: NicSettings) -> str:
    """Return why this process cannot hand interfaces over, or "" when it can.

    A recorded tree's names must not be looked up in this kernel. CAP_NET_ADMIN is needed to change
    interfaces, CAP_SYS_ADMIN to enter a pod's network namespace (setns(2)).
    """
    sys = str(Path(settings.hardware.root, settings.hardware.sys))
    if not _is_of_this_kernel(sys):
        return f"{sys} is a recorded machine's"
    missing = sorted(set(_CAPABILITIES) - _own_capabilities())
    return f"the process lacks {', '.join(missing)}" if missing else ""


def _is_of_this_kernel(sys: str) -> bool:
    return sys == "/sys" or is_kernels(sys)


def _make_hands(settings: NicSettings, cni: CniAttachment) -> InterfaceHands:
    hardware = settings.hardware
    sys, proc = (str(Path(hardware.root, top)) for top in (hardware.sys, hardware.proc))
    return InterfaceHands(
        Places(namespaces=hardware.root, proc=proc, sys=sys, kept=settings.interfaces.kept_namespaces_dir), cni
    )


def _own_capabilities() -> set[str]:
    """Read which of `_CAPABILITIES` this process has."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            bits = int(line.split()[1], 16)
            return {name for name, bit in _CAPABILITIES.items() if bits >> bit & 1}
    return set()
