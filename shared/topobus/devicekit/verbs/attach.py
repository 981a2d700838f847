"""Handles `attach`, `detach` and `adjust`: chooses the driver, and gives the same answer for the same
owner, device and sandbox.

The gateway asks when the runtime starts or stops a pod's sandbox, and when it makes a container. The
answer has the interfaces that the devices became, or what the container gets of them, or the reason
why not. The journal, and not this module, knows what is attached, so a service that was restarted
answers the same. Nothing is written when a container is made.
"""

from __future__ import annotations

from functools import partial

from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.verbs.device_hands import DeviceHands, driver_not_loaded
from topobus.formats.messages.adjust_messages import Adjusted, AdjustReply, AdjustRequest
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
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import AttachedInterface

__all__ = ["Adjuster", "Attacher"]


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
        devices: list[tuple[Device, IsolatedDriver]] = []
        for name in sorted(set(request.devices)):
            own = self._hands.find_with_driver(name, self._class)
            if isinstance(own, Refusal):
                return own
            devices.append(own)
        if not devices:
            return refuse("no-devices", "the request names no device")
        context = PrepareContext(owner=request.owner, config=request.config, device_config=request.device_config)
        interfaces: dict[str, AttachedInterface] = {}
        for device, isolated in devices:
            driver = isolated.driver
            if not driver.capabilities.attaches:
                return refuse(
                    "attach-unsupported",
                    f"driver {driver.name} attaches no device",
                    driver=driver.name,
                    device=device.name,
                )
            attach = partial(self._hands.verbs(driver).attach, device, context, request.sandbox)
            answer = await isolated.ask("attach", attach)
            if isinstance(answer, Refusal):
                return answer
            if answer is not None:
                interfaces[device.name] = answer
        return Attached(interfaces=interfaces)

    async def _detach_all(self, request: DetachRequest) -> Refusal | None:
        for name in sorted(set(request.devices)):
            sandbox = self._hands.journal.owner_entry(name, request.owner).attach.sandbox
            device = self._hands.find(name)
            if device is None or sandbox is None or sandbox.id != request.sandbox.id:
                continue
            isolated = self._hands.drivers.get(device.driver)
            driver = isolated.driver if isolated is not None else None
            if isolated is None or driver is None or not driver.capabilities.attaches:
                return driver_not_loaded(device)
            detach = partial(self._hands.verbs(driver).detach, device, request.owner, request.sandbox)
            refusal = await isolated.ask("detach", detach)
            if refusal is not None:
                return refusal
        return None


class Adjuster:
    """Adjusts containers through the drivers of one class."""

    def __init__(self, device_class: str, hands: DeviceHands) -> None:
        """Adjust with these hands."""
        self._class = device_class
        self._hands = hands

    async def adjust(self, request: AdjustRequest) -> AdjustReply:
        """Return what a container gets of its devices, or why it cannot be made."""
        async with self._hands.turn(request.devices) as obstacle:
            result = obstacle or await self._adjust_all(request)
        if isinstance(result, Refusal):
            get_logger().info(
                "adjust.refused",
                device_class=self._class,
                devices=list(request.devices),
                container=str(request.container),
                reasons=[reason.message for reason in result.reasons],
            )
        return AdjustReply(result=result)

    async def _adjust_all(self, request: AdjustRequest) -> Adjusted | Refusal:
        context = PrepareContext(owner=request.owner, config=request.config, device_config=request.device_config)
        edits: dict[str, ContainerEdits] = {}
        for name in sorted(set(request.devices)):
            own = self._hands.find_with_driver(name, self._class)
            if isinstance(own, Refusal):
                return own
            device, isolated = own
            driver = isolated.driver
            if not driver.capabilities.adjusts:
                # The device was prepared by an earlier version that had the method: it adds nothing
                # now.
                edits[name] = ContainerEdits()
                continue
            adjust = partial(driver.adjust, self._hands.tree, device, context, request.container)
            answer = await isolated.ask("adjust", adjust)
            if isinstance(answer, Refusal):
                return answer
            edits[name] = answer
        return Adjusted(edits=edits) if edits else refuse("no-devices", "the request names no device")
