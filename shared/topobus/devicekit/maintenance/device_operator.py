"""Performs what an operator wants of one device: withhold it, offer it again, forgive its faults,
reset it, bind it to its kernel driver again, test it.

Only topology asks, after it has written the decision. Each operation has an id, and the same id
gets the same answer once it is done. A refusal changes nothing and is not kept. A lasting decision
is stored, and visible in the inventory, before it is answered. What needs a device without an owner
continues when it takes longer than an answer may, and the same request gets its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import structs

from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.host.publishing import DevicePublisher
from topobus.devicekit.maintenance import maintenance, verdicts
from topobus.devicekit.maintenance.maintenance_store import MaintenanceStore
from topobus.devicekit.settings import BurnInSettings
from topobus.devicekit.verbs.burn_in import begin_burn_in, run_burn_in
from topobus.devicekit.verbs.device_hands import DeviceHands, device_unknown, driver_not_loaded
from topobus.devicekit.verbs.operator_verbs import rebind_device, reset_device
from topobus.engine.ledger.device_users import reset_together
from topobus.formats.messages.operation_messages import Operated, PerformReply, PerformRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.device import Device
from topobus.values.errors import PeerUnavailable, TopobusError, UnderWay
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.maintenance import DeviceVerb
from topobus.values.outcome import Refusal, refuse

__all__ = ["DeviceOperator"]

T = TypeVar("T")

_UNSEEN = DeviceHealth(state=HealthState.UNKNOWN)
# Seconds until an asker learns that the work is under way. Topology waits 12 s; a turn and a reset
# take 10 s at most.
_ANSWER_S = 11.0
# How often to check whether a late driver has come back.
_LOOK_S = 1.0


@dataclass(kw_only=True, eq=False)
class _Work:
    """What is done to a device that has no owner."""

    request: PerformRequest
    device: Device
    result: asyncio.Future[Operated | Refusal]
    isolated: IsolatedDriver | None = None
    """The driver that acts, or has acted."""

    @property
    def is_test(self) -> bool:
        """Say whether it is a burn-in that is under way."""
        return self.request.operation.verb is DeviceVerb.BURN_IN and not self.result.done()

    def is_of(self, request: PerformRequest) -> bool:
        """Say whether a request asks for this."""
        return (self.request.op_id, self.request.operation) == (request.op_id, request.operation)


class DeviceOperator:
    """Performs operations on single devices of one class."""

    def __init__(
        self,
        device_class: str,
        hands: DeviceHands,
        store: MaintenanceStore,
        publisher: DevicePublisher,
        holders: DeviceHolders,
        *,
        burn_in: BurnInSettings,
        clock: Clock,
    ) -> None:
        """Keep the collaborators."""
        self._class = device_class
        self._hands = hands
        self._store = store
        self._publisher = publisher
        self._holders = holders
        self._settings = burn_in
        self._clock = clock
        self._works: dict[str, _Work] = {}
        self._new: asyncio.Queue[_Work] = asyncio.Queue()

    async def run(self) -> None:
        """Act on devices that have no owner, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._work(await self._new.get()))

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
        else:
            result = await self._alone(request, device)
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
        async with self._store.writing:
            earlier = self._done(request)
            work = self._works.get(request.operation.device)
            if earlier is None and request.operation.verb is DeviceVerb.RETURN and work is not None and work.is_test:
                text = f"burn-in of {request.operation.device} is under way"
                earlier = refuse("device-busy", text, device=request.operation.device)
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
        is_sticky, is_reported = _is_sticky(device), await self._forgive_verdicts(device)
        if is_sticky:
            self._publisher.forgive(device.name)
        if (is_sticky or is_reported) and not await self._publisher.publish():
            raise PeerUnavailable(
                f"{device.name}: its faults are forgiven, but that could not be published yet",
                next_step="ask again",
            )
        after = self._hands.find(device.name) or device
        return await self._keep(
            request, Operated(health=after.health, maintenance=after.maintenance, is_changed=is_sticky or is_reported)
        )

    async def _forgive_verdicts(self, device: Device) -> bool:
        """Let what sources say of a device now count no more. False: there was nothing."""
        async with self._store.writing:
            before = self._store.value
            after = structs.replace(before, verdicts=verdicts.with_forgiven(before.verdicts, device))
            await self._store.put(after)
        return after != before

    async def _alone(self, request: PerformRequest, device: Device) -> Operated | Refusal:
        """Have done what needs the device without an owner, or wait for it.

        Errors: raises UnderWay when it takes longer. The same request gets its result later.
        """
        earlier = self._done(request)
        if earlier is not None:
            return earlier
        if request.operation.verb is DeviceVerb.BURN_IN and device.name not in self._store.value.devices:
            text = f"{device.name} is offered: `topobus device maintain` it first, so that it gets no owner meanwhile"
            return refuse("not-maintained", text, device=device.name)
        work = self._works.get(device.name)
        if work is None or (work.result.done() and not work.is_of(request)):
            work = self._works[device.name] = _Work(
                request=request, device=device, result=asyncio.get_running_loop().create_future()
            )
            self._new.put_nowait(work)
        elif not work.is_of(request):
            text = f"{work.request.operation.verb} of {device.name} is under way"
            return refuse("device-busy", text, device=device.name)
        try:
            async with self._clock.timeout(_ANSWER_S):
                await asyncio.wait({work.result})
        except TimeoutError as err:
            raise UnderWay(f"{request.operation.verb} of {device.name} is under way") from err
        if self._works.get(device.name) is work:
            # Kept longer, a refusal would also be the answer when its cause is gone.
            del self._works[device.name]
        return work.result.result()

    async def _work(self, work: _Work) -> None:
        request, device = work.request, work.device
        names = [other.name for other in reset_together(device, self._publisher.devices)]
        async with self._hands.turn(names) as obstacle:
            try:
                refusal = obstacle or await self._in_use(request.operation.verb, device, names)
                refusal = refusal or await self._act(work)
                work.result.set_result(
                    refusal or await self._keep(request, Operated(health=device.health, maintenance=device.maintenance))
                )
            except TopobusError as err:
                work.result.set_exception(err)
                # Read here, since the asker may be gone.
                work.result.exception()
            # A driver that is late still acts on the device, so no other request gets its turn.
            while work.isolated is not None and work.isolated.is_hung:
                await self._clock.sleep(_LOOK_S)
        if work.isolated is not None:
            self._hands.look_again(device.driver)

    async def _act(self, work: _Work) -> Refusal | None:
        device, hands, verb = work.device, self._hands, work.request.operation.verb
        isolated = hands.drivers.get(device.driver)
        if isolated is None:
            return driver_not_loaded(device)
        driver = isolated.driver
        if verb is DeviceVerb.BURN_IN:
            return await self._burn_in(work, isolated)
        if verb is DeviceVerb.REBIND:
            beside, switch = hands.switching(isolated)
            return await _call(work, beside, partial(rebind_device, hands.journal, driver, switch, device))
        reset = partial(reset_device, hands.journal, driver, hands.tree, device, op_id=work.request.op_id)
        return await _call(work, isolated, reset)

    async def _burn_in(self, work: _Work, isolated: IsolatedDriver) -> Refusal | None:
        """Test a device by its driver and by the operator's program: it must pass both.

        The journal has it meanwhile, also when the service ends before.
        """
        device, driver, command = work.device, isolated.driver, self._settings.command
        if not driver.capabilities.burns_in and not command:
            text = f"driver {driver.name} cannot test {device.name}, and the setting burn_in.command is empty"
            return refuse("burn-in-unsupported", text, device=device.name, driver=driver.name)
        journal, tree = self._hands.journal, self._hands.tree
        nodes = await _call(work, isolated, partial(begin_burn_in, journal, driver, tree, device, work.request.op_id))
        if isinstance(nodes, Refusal):
            return nodes
        refusal = None
        if driver.capabilities.burns_in:
            beside = isolated.beside(timeout_s=self._settings.timeout_s)
            refusal = await _call(work, beside, partial(driver.burn_in, tree, device))
        if refusal is None and command:
            refusal = await run_burn_in(self._settings, device, nodes, clock=self._clock)
        await asyncio.to_thread(journal.operation_record(device).undone, DeviceVerb.BURN_IN.value)
        return refusal

    async def _in_use(self, verb: DeviceVerb, device: Device, names: Iterable[str]) -> Refusal | None:
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
            text = f"no {verb} of {device.name} while it is held: {'; '.join(users.values())}"
            return refuse("device-held", text, device=device.name, owners=tuple(users))
        unclean = self._hands.cleaner.obstacle(names)
        if isinstance(unclean, Accepted):
            return refuse("device-busy", f"no {verb} of {device.name} yet: {unclean.what}", device=device.name)
        return unclean

    def _done(self, request: PerformRequest) -> Operated | Refusal | None:
        """Return the answer of an operation that was performed before, or refuse one that expects
        another maintenance.
        """
        earlier = maintenance.performed(self._store.value, request.op_id)
        if earlier is None:
            return maintenance.fault_of_expectation(self._store.value, request.operation)
        if earlier.operation == request.operation:
            return earlier.result
        text = (
            f"operation {request.op_id} was {earlier.operation.verb} {earlier.operation.device} before: choose "
            "another op_id"
        )
        return refuse("operation-reused", text, op_id=request.op_id)

    async def _keep(self, request: PerformRequest, result: Operated) -> Operated:
        async with self._store.writing:
            await self._store.put(maintenance.with_operation(self._store.value, request, result))
        return result


async def _call(work: _Work, isolated: IsolatedDriver, act: Callable[[], T]) -> T | Refusal:
    work.isolated = isolated
    return await isolated.ask(str(work.request.operation.verb), act)


def _is_sticky(device: Device) -> bool:
    return any(condition.is_sticky for condition in device.health.conditions)
