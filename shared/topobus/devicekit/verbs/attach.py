"""Handles `attach` and `detach`: chooses the driver, and gives the same answer for the same owner,
device and sandbox.

The gateway asks when the runtime starts or stops a pod's sandbox. The answer has the interfaces
that the devices became, or the reason why not. The journal, and not this module, knows what is
attached, so a service that was restarted answers the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.host.isolation import DriverFailed, DriverHung
from topobus.devicekit.verbs import journaled_verbs
from topobus.devicekit.verbs.device_hands import DeviceHands, driver_reason
from topobus.formats.messages.sandbox_messages import (
    Accepted,
    Attached,
    AttachReply,
    AttachRequest,
    DetachReply,
    DetachRequest,
)
from topobus.process.logging import get_logger
from topobus.values.device import Device
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import AttachedInterface

__all__ = ["Attacher"]


class Attacher:
    """Attaches devices of one class to sandboxes through their drivers."""

    def __init__(self, device_class: str, hands: DeviceHands) -> None:
        """Attach with these hands."""
        self._class = device_class
        self._hands = hands

    async def attach(self, request: AttachRequest) -> AttachReply:
        """Attach devices one after the other, or refuse with the reason.

        What was attached before a refusal stays for the next try, or for `detach`.
        """
        async with self._hands.turn(request.devices) as obstacle:
            result = obstacle or await self._attach_all(request)
        get_logger().info(
            "devices.attached"
            if isinstance(result, Attached)
            else "attach.refused"
            if isinstance(result, Refusal)
            else "attach.accepted",
            device_class=self._class,
            devices=list(request.devices),
            owner=request.owner.key,
            sandbox=request.sandbox.id,
            reasons=[reason.message for reason in result.reasons] if isinstance(result, Refusal) else [],
        )
        return AttachReply(result=result)

    async def detach(self, request: DetachRequest) -> DetachReply:
        """Undo `attach`.

        Devices that are not in this sandbox (any more, or never were) are no error.
        """
        async with self._hands.turn(request.devices) as obstacle:
            refusal = obstacle or await self._detach_all(request)
        get_logger().info(
            "devices.detached" if refusal is None else "detach.refused",
            device_class=self._class,
            devices=list(request.devices),
            owner=request.owner.key,
            sandbox=request.sandbox.id,
            reasons=[reason.message for reason in refusal.reasons] if refusal is not None else [],
        )
        return DetachReply(refusal=refusal)

    async def _attach_all(self, request: AttachRequest) -> Attached | Refusal | Accepted:
        unclean = self._hands.cleaner.obstacle(request.devices)
        if unclean is not None:
            return unclean
        devices = self._known(request.devices)
        if isinstance(devices, Refusal):
            return devices
        context = PrepareContext(owner=request.owner, config=request.config, device_config=request.device_config)
        interfaces: dict[str, AttachedInterface] = {}
        for device in devices:
            isolated = self._hands.drivers[device.driver]
            driver = isolated.driver
            if not driver.capabilities.attaches:
                return refuse(
                    "attach-unsupported",
                    f"driver {driver.name} attaches no device",
                    driver=driver.name,
                    device=device.name,
                )
            attach = partial(
                journaled_verbs.attach, self._hands.journal, driver, self._hands.tree, device, context, request.sandbox
            )
            try:
                answer = await isolated.call("attach", attach)
            except (DriverFailed, DriverHung) as err:
                return Refusal(reasons=(driver_reason(driver.name, err),))
            if isinstance(answer, Refusal):
                return answer
            if answer is not None:
                interfaces[device.name] = answer
        return Attached(interfaces=interfaces)

    async def _detach_all(self, request: DetachRequest) -> Refusal | None:
        for name in sorted(set(request.devices)):
            entry = self._hands.journal.owner_entry(name, request.owner)
            sandbox = entry.attach.sandbox if entry is not None else None
            device = self._hands.find(name)
            if device is None or sandbox is None or sandbox.id != request.sandbox.id:
                continue
            isolated = self._hands.drivers.get(device.driver)
            driver = isolated.driver if isolated is not None else None
            if isolated is None or driver is None or not driver.capabilities.attaches:
                return refuse(
                    "driver-not-loaded",
                    f"device {name} belongs to driver {device.driver!r}, which is not loaded",
                    device=name,
                )
            detach = partial(
                journaled_verbs.detach,
                self._hands.journal,
                driver,
                self._hands.tree,
                device,
                request.owner,
                request.sandbox,
            )
            try:
                await isolated.call("detach", detach)
            except (DriverFailed, DriverHung) as err:
                return Refusal(reasons=(driver_reason(driver.name, err),))
        return None

    def _known(self, names: Sequence[str]) -> list[Device] | Refusal:
        devices: list[Device] = []
        for name in sorted(set(names)):
            device = self._hands.find(name)
            if device is None:
                return refuse("device-unknown", f"class {self._class} has no device {name!r} on this node", device=name)
            if device.driver not in self._hands.drivers:
                return refuse(
                    "driver-not-loaded",
                    f"device {name} belongs to driver {device.driver!r}, which is not loaded",
                    device=name,
                )
            devices.append(device)
        return devices or refuse("no-devices", "the request names no device")
