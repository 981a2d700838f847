"""Performs what an operator wants of one device: withhold it, offer it again, forgive its faults,
reset it.

Only topology asks, after it has written the decision. Each operation has an id, and the same id
gets the same answer once it is done. A refusal changes nothing and is not kept. A lasting decision
is stored, and visible in the inventory, before it is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.host.isolation import DriverFailed, DriverHung
from topobus.devicekit.host.publishing import DevicePublisher
from topobus.devicekit.maintenance import maintenance
from topobus.devicekit.maintenance.maintenance_store import MaintenanceStore
from topobus.devicekit.verbs.device_hands import DeviceHands, device_unknown, driver_not_loaded, driver_reason
from topobus.devicekit.verbs.device_reset import reset_device
from topobus.engine.ledger.device_users import reset_together
from topobus.formats.messages.operation_messages import Operated, PerformReply, PerformRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.logging import get_logger
from topobus.values.device import Device
from topobus.values.errors import PeerUnavailable
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.maintenance import DeviceVerb
from topobus.values.outcome import Refusal, refuse

__all__ = ["DeviceOperator"]

_UNSEEN = DeviceHealth(state=HealthState.UNKNOWN)


class DeviceOperator:
    """Performs operations on single devices of one class."""

    def __init__(
        self,
        device_class: str,
        hands: DeviceHands,
        store: MaintenanceStore,
        publisher: DevicePublisher,
        holders: DeviceHolders,
        look_again: Callable[[str], None],
    ) -> None:
        """Keep the collaborators. `look_again` makes a driver, by name, look for its devices at
        once.
        """
        self._class = device_class
        self._hands = hands
        self._store = store
        self._publisher = publisher
        self._holders = holders
        self._look_again = look_again
        # The stored decisions are one value of all devices, so a change reads it under the same
        # lock.
        self._writing = asyncio.Lock()

    async def perform(self, request: PerformRequest) -> PerformReply:
        """Perform an operation, or refuse it with the reason."""
        operation = request.operation
        device = self._hands.find(operation.device)
        result: Operated | Refusal
        if device is None and operation.device not in self._store.value.devices:
            result = device_unknown(operation.device, self._class)
        elif operation.verb.is_lasting or operation.verb is DeviceVerb.RETURN:
            result = await self._keep_back(request, device)
        elif device is None:
            result = refuse("device-unknown", f"device {operation.device} is not there now", device=operation.device)
        elif operation.verb is DeviceVerb.FORGIVE:
            result = await self._forgive(request, device)
        elif operation.verb is DeviceVerb.RESET:
            result = await self._reset(request, device)
        else:
            code = "rebind-unsupported" if operation.verb is DeviceVerb.REBIND else "burn-in-unsupported"
            text = f"this service has no {operation.verb} of {device.name}"
            result = refuse(code, text, device=device.name)
        get_logger().info(
            "device.operated" if isinstance(result, Operated) else "operation.refused",
            device_class=self._class,
            device=operation.device,
            verb=str(operation.verb),
            who=operation.who,
            why=operation.why,
            op_id=request.op_id,
            reasons=[reason.message for reason in result.reasons] if isinstance(result, Refusal) else [],
        )
        return PerformReply(result=result)

    async def _keep_back(self, request: PerformRequest, device: Device | None) -> Operated | Refusal:
        async with self._writing:
            earlier = self._done(request)
            if earlier is not None:
                return earlier
            before = self._store.value
            changed = maintenance.changed_by(before, request)
            name = request.operation.device
            result = Operated(
                health=device.health if device is not None else _UNSEEN,
                maintenance=changed.devices.get(name),
                is_changed=changed.devices.get(name) != before.devices.get(name),
            )
            await self._store.put(maintenance.with_operation(changed, request, result))
        # Stored, so it applies, whether or not it is published when this is answered.
        await self._publisher.publish()
        return result

    async def _forgive(self, request: PerformRequest, device: Device) -> Operated | Refusal:
        earlier = self._done(request)
        if earlier is not None:
            return earlier
        if not _is_sticky(device):
            # A step in progress may have published a fault that this process stores only when the
            # step ends. That fault must be forgiven as well.
            await self._publisher.publish()
            device = self._hands.find(device.name) or device
        is_sticky = _is_sticky(device)
        if is_sticky:
            self._publisher.forgive(device.name)
            if not await self._publisher.publish():
                raise PeerUnavailable(
                    f"{device.name}: its faults are forgiven, but that could not be published yet",
                    next_step="ask again",
                )
        after = self._hands.find(device.name) or device
        return await self._keep(
            request, Operated(health=after.health, maintenance=after.maintenance, is_changed=is_sticky)
        )

    async def _reset(self, request: PerformRequest, device: Device) -> Operated | Refusal:
        names = [other.name for other in reset_together(device, self._publisher.devices)]
        async with self._hands.turn(names) as obstacle:
            # An earlier request with this id may have been performed before us.
            refusal = self._done(request) or obstacle or await self._in_use(device, names)
            if refusal is not None:
                return refusal
            isolated = self._hands.drivers.get(device.driver)
            if isolated is None:
                return driver_not_loaded(device)
            reset = partial(
                reset_device, self._hands.journal, isolated.driver, self._hands.tree, device, op_id=request.op_id
            )
            try:
                refused = await isolated.call("reset", reset)
            except (DriverFailed, DriverHung) as err:
                return Refusal(reasons=(driver_reason(isolated.name, err),))
            if refused is not None:
                return refused
            result = await self._keep(request, Operated(health=device.health, maintenance=device.maintenance))
        self._look_again(device.driver)
        return result

    async def _in_use(self, device: Device, names: Iterable[str]) -> Refusal | None:
        """Refuse devices that have a holder, by the ledger or by the journal, or that are not
        clean.
        """
        if not await self._holders.read():
            raise PeerUnavailable(
                f"the holders of {device.name} are not known: the ledger cannot be read",
                next_step="see `topobus doctor`",
            )
        users: dict[str, str] = {}
        for name in names:
            for owner in self._holders.owners(name):
                users[owner.key] = f"{owner} holds {name}"
            entry = self._hands.journal.entries.get(name)
            for owner_entry in entry.owners if entry is not None else ():
                users.setdefault(owner_entry.owner.key, f"{owner_entry.owner} has {name} prepared")
        if users:
            text = f"{device.name} cannot be reset while it is held: {'; '.join(users.values())}"
            return refuse("device-held", text, device=device.name, owners=tuple(users))
        unclean = self._hands.cleaner.obstacle(names)
        if isinstance(unclean, Accepted):
            return refuse("device-busy", f"{device.name} cannot be reset yet: {unclean.what}", device=device.name)
        return unclean

    def _done(self, request: PerformRequest) -> Operated | Refusal | None:
        earlier = maintenance.performed(self._store.value, request.op_id)
        if earlier is None or earlier.operation == request.operation:
            return earlier.result if earlier is not None else None
        text = (
            f"operation {request.op_id} was {earlier.operation.verb} {earlier.operation.device} before: choose "
            "another op_id"
        )
        return refuse("operation-reused", text, op_id=request.op_id)

    async def _keep(self, request: PerformRequest, result: Operated) -> Operated:
        async with self._writing:
            await self._store.put(maintenance.with_operation(self._store.value, request, result))
        return result


def _is_sticky(device: Device) -> bool:
    return any(condition.is_sticky for condition in device.health.conditions)
