"""Handles `adjust`: asks drivers what one container gets when it is made.

Nothing is written and nothing is kept.
"""

from __future__ import annotations

from functools import partial

from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.host.isolation import DriverFailed, DriverHung
from topobus.devicekit.verbs.device_hands import DeviceHands, driver_reason
from topobus.formats.messages.adjust_messages import Adjusted, AdjustReply, AdjustRequest
from topobus.process.logging import get_logger
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal, refuse

__all__ = ["Adjuster"]


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
            device = self._hands.find(name)
            if device is None:
                return _refuse("device-unknown", f"class {self._class} has no device {name!r} on this node", name)
            isolated = self._hands.drivers.get(device.driver)
            if isolated is None:
                return _refuse(
                    "driver-not-loaded", f"device {name} belongs to driver {device.driver!r}, which is not loaded", name
                )
            driver = isolated.driver
            if not driver.capabilities.adjusts:
                # The device was prepared by an earlier version that had the method: it adds nothing
                # now.
                edits[name] = ContainerEdits()
                continue
            try:
                answer = await isolated.call(
                    "adjust", partial(driver.adjust, self._hands.tree, device, context, request.container)
                )
            except (DriverFailed, DriverHung) as err:
                return Refusal(reasons=(driver_reason(driver.name, err),))
            if isinstance(answer, Refusal):
                return answer
            edits[name] = answer
        return Adjusted(edits=edits) if edits else _refuse("no-devices", "the request names no device", "")


def _refuse(code: str, message: str, device: str) -> Refusal:
    return refuse(code, message, **({"device": device} if device else {}))
