"""Handles `prepare` and `unprepare`: chooses the driver, joins the edits, and gives the same answer
to the same operation.

Drivers must be idempotent. The newest answers are also cached, so that a repeated request costs
nothing. A refusal changes nothing and is not cached: the same operation may succeed later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.devicekit.host.isolation import DriverError, IsolatedDriver
from topobus.devicekit.journal.journal_values import OwnerEntry
from topobus.devicekit.passthrough.passthrough_request import asks_for_passthrough
from topobus.devicekit.sharing.sharing import refuse_sharing, with_operators_sharing
from topobus.devicekit.verbs.device_hands import DeviceHands, device_unknown, driver_not_loaded
from topobus.devicekit.verbs.journaled_verbs import Edits, JournaledWork
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest, UnprepareReply, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.logging import get_logger
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, DeviceNode, join_edits
from topobus.values.health import HealthState
from topobus.values.outcome import Fact, Reason, Refusal, refuse
from topobus.values.request import OwnerKind

__all__ = ["Preparer", "place_nodes"]

# Answers kept for repeated questions; a caller repeats within seconds, and a node starts far
# fewer containers in that time.
_KEPT_ANSWERS = 256
# Drivers name nodes as a container sees them.
_DEV = "/dev"


class Preparer:
    """Prepares and unprepares devices of one class through their drivers."""

    def __init__(self, device_class: str, hands: DeviceHands, find_device: Callable[[str], Device | None]) -> None:
        """Prepare with these hands the devices that `find_device` knows."""
        self._class = device_class
        self._hands = hands
        self._find = find_device
        self._answers: OrderedDict[str, tuple[PrepareRequest, PrepareReply]] = OrderedDict()

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Make devices ready, or refuse with the reason.

        An answer is complete: every requested device has its edits.
        """
        async with self._hands.turn(request.devices) as obstacle:
            kept = self._answers.get(request.op_id)
            if kept is not None:
                if kept[0] == request:
                    return kept[1]
                return PrepareReply(
                    result=refuse(
                        "operation-reused", f"operation {request.op_id} was another request before", op_id=request.op_id
                    )
                )
            devices = [self._find(name) for name in request.devices]
            result: Prepared | Refusal | Accepted | None = (
                obstacle or self._check(request, devices) or self._refuse_passed_through(request)
            )
            if result is None:
                result = await self._prepare_all([device for device in devices if device is not None], request)
        reply = PrepareReply(result=result)
        if isinstance(result, Prepared):
            self._keep(request, reply)
        if isinstance(result, Accepted):
            get_logger().info(
                "prepare.accepted", device_class=self._class, devices=list(request.devices), what=result.what
            )
            return reply
        get_logger().info(
            "devices.prepared" if isinstance(result, Prepared) else "prepare.refused",
            device_class=self._class,
            devices=list(request.devices),
            owner=request.owner.key,
            op_id=request.op_id,
            reasons=[] if isinstance(result, Prepared) else [reason.message for reason in result.reasons],
        )
        return reply

    async def unprepare(self, request: UnprepareRequest) -> UnprepareReply:
        """Undo `prepare`, and `attach` before it.

        A device that is unknown or was never prepared is no error. A device whose driver cleans is
        clean when this is answered, or published as not clean.
        """
        # A later prepare must run again, whatever its operation id:
        # the device is not ready any more.
        for op_id in [key for key, (kept, _) in self._answers.items() if set(kept.devices) & set(request.devices)]:
            del self._answers[op_id]
        async with self._hands.turn(request.devices) as obstacle:
            reasons = list(obstacle.reasons) if obstacle is not None else await self._unprepare_all(request)
        if not reasons:
            self._hands.jobs.forget(request.owner, request.devices)
            await self._hands.clean(request.devices)
        get_logger().info(
            "devices.unprepared" if not reasons else "unprepare.refused",
            device_class=self._class,
            devices=list(request.devices),
            owner=request.owner.key,
            op_id=request.op_id,
            reasons=[reason.message for reason in reasons],
        )
        return UnprepareReply(refusal=Refusal(reasons=tuple(reasons)) if reasons else None)

    def _check(self, request: PrepareRequest, devices: Sequence[Device | None]) -> Refusal | Accepted | None:
        may_be_sick = {*request.looked_at, *request.tolerated}
        if not request.devices:
            return refuse("no-devices", "the request names no device")
        unclean = self._hands.cleaner.obstacle(name for name in request.devices if name not in request.looked_at)
        if unclean is not None:
            return unclean
        for name, device in zip(request.devices, devices, strict=True):
            if device is None:
                return device_unknown(name, self._class)
            if device.health.state is HealthState.UNHEALTHY and name not in may_be_sick:
                worst = device.health.worst
                why = f"{worst.reason} ({worst.message})" if worst else "unhealthy"
                return refuse(
                    "device-unhealthy",
                    f"device {name} is unhealthy: {why}",
                    device=name,
                    reason=worst.reason if worst else "",
                )
            if device.maintenance is not None and not request.is_again and name not in request.looked_at:
                return refuse("device-kept-back", f"device {name} is {device.why_not}", device=name)
            if device.driver not in self._hands.drivers:
                return driver_not_loaded(device)
        return None

    def _refuse_passed_through(self, request: PrepareRequest) -> Refusal | None:
        asked = [
            name for name in request.devices if asks_for_passthrough(request.device_config.get(name, request.config))
        ]
        for name in asked:
            if name in request.looked_at:
                return refuse(
                    "passthrough-malformed",
                    f"device {name} is had with admin access, so no virtual machine can have it",
                    device=name,
                )
        return self._hands.refuse_passed_through(request.devices, request.owner, asked)

    def _groups(
        self, devices: Sequence[Device], context: PrepareContext
    ) -> list[tuple[IsolatedDriver, DeviceDriver, tuple[Device, ...]]]:
        """Group devices by the driver that prepares them: their own, or its replacement for those
        that go to virtual machines.
        """
        groups: list[tuple[IsolatedDriver, DeviceDriver, tuple[Device, ...]]] = []
        for name, own_devices in self._hands.by_driver(devices).items():
            isolated = self._hands.drivers[name]
            passed = tuple(device for device in own_devices if asks_for_passthrough(context.config_of(device.name)))
            kept = tuple(device for device in own_devices if device not in passed)
            if kept:
                groups.append((isolated, isolated.driver, kept))
            if passed:
                groups.append((isolated, self._hands.passthrough_driver(isolated.driver, context.owner), passed))
        return groups

    async def _prepare_all(self, devices: Sequence[Device], request: PrepareRequest) -> Prepared | Refusal | Accepted:
        names = sorted(device.name for device in devices)
        # One variable per class that every container with these devices can rely on, whichever
        # driver prepared them.
        common = ContainerEdits(env={f"TOPOBUS_{self._class.upper().replace('-', '_')}_DEVICES": ",".join(names)})
        edits: dict[str, ContainerEdits] = {}
        to_attach: list[str] = []
        context = PrepareContext(
            owner=request.owner,
            config=request.config,
            device_config=with_operators_sharing(devices, request.config, request.device_config),
            cpus=request.cpus,
            shares={name: amounts for name, amounts in request.shares.items() if name in names},
            looked_at=frozenset(request.looked_at),
            attached=frozenset(name for name in names if self._hands.journal.owner_entry(name, request.owner).is_away),
        )
        groups = self._groups(devices, context)
        for isolated, driver, own_devices in groups:
            refusal = refuse_sharing(driver, own_devices, context) or await self._ask_check(
                isolated, driver, own_devices, context
            )
            if refusal is not None:
                return refusal
        for isolated, driver, own_devices in groups:
            name = driver.name
            answer, attached = await self._prepare_own(
                isolated, driver, own_devices, context, request.looked_at, is_ahead=request.is_ahead
            )
            if isinstance(answer, Refusal | Accepted):
                return answer
            missing = sorted(device.name for device in own_devices if device.name not in answer)
            if missing:
                text = f"driver {name} prepared no edits for {', '.join(missing)}"
                return refuse("driver-incomplete", text, driver=name, devices=tuple(missing))
            edits.update({device.name: answer[device.name] for device in own_devices})
            to_attach += attached
            joined = join_edits((common, answer.get("", ContainerEdits())))
            if isinstance(joined, Refusal):
                return joined
            common = joined
        self._hands.jobs.forget(request.owner, names)
        seen = self._hands.tree.settings.runtime_dev
        return Prepared(
            edits={name: place_nodes(edit, seen) for name, edit in edits.items()},
            common=place_nodes(common, seen),
            to_attach=tuple(sorted(to_attach)),
            to_adjust=self._to_adjust(devices, request, context),
        )

    def _to_adjust(
        self, devices: Sequence[Device], request: PrepareRequest, context: PrepareContext
    ) -> tuple[str, ...]:
        """Name the devices whose containers are adjusted before they start."""
        if request.owner.kind is not OwnerKind.CLAIM:
            return ()  # only a claim's containers can be kept from starting without it
        adjusting = [name for name, isolated in self._hands.drivers.items() if isolated.driver.capabilities.adjusts]
        return tuple(
            sorted(
                device.name
                for device in devices
                if device.driver in adjusting
                and device.name not in request.looked_at
                and not asks_for_passthrough(context.config_of(device.name))
            )
        )

    async def _ask_check(
        self, isolated: IsolatedDriver, driver: DeviceDriver, devices: Sequence[Device], context: PrepareContext
    ) -> Refusal | None:
        # Devices in work were checked when the work began, and may be in an intermediate state now.
        is_begun = any(self._hands.jobs.is_under_way(device.name, context.owner) for device in devices)
        if is_begun or not driver.capabilities.checks:
            return None
        return await isolated.ask("check", partial(driver.check, self._hands.tree, devices, context))

    async def _prepare_own(
        self,
        isolated: IsolatedDriver,
        driver: DeviceDriver,
        devices: Sequence[Device],
        context: PrepareContext,
        looked_at: Sequence[str],
        *,
        is_ahead: bool,
    ) -> tuple[Mapping[str, ContainerEdits] | Refusal | Accepted, Sequence[str]]:
        """Make one driver prepare its devices. Return also those that must be attached.

        A request that only looks attaches nothing, and leaves nothing to clean. Ahead of its owner
        a driver is called only when that changes nothing, because the ledger may still refuse.
        """
        hands = self._hands
        names = [device.name for device in devices]

        stands = hands.jobs.result(context.owner, names)
        if isinstance(stands, Refusal | Accepted):
            return stands, ()

        def prepare() -> tuple[Edits | Refusal | JournaledWork, Sequence[str]]:
            wanted = driver.to_attach(devices, context) if driver.capabilities.attaches else ()
            to_attach = [name for name in names if name in wanted and name not in looked_at]
            # Kubelet waits for Allocate, so such an owner is recorded in the journal only when the
            # gateway sees that its pod has gone. For a shared device all owners must be recorded,
            # to know which one is the last to leave.
            is_plugin = context.owner.kind is OwnerKind.DEVICE_PLUGIN
            if is_ahead and not (is_plugin and _only_reads(driver, devices)):
                text = f"preparing {', '.join(names)} changes something, so it waits until they are somebody's"
                return refuse("not-ahead", text, devices=",".join(names)), ()
            shared = {device.name for device in devices if device.sharing is not None}
            used = [name for name in names if name not in looked_at and (not is_plugin or name in shared)]
            kept = [name for name in used if driver.capabilities.cleans or name in to_attach or name in shared]
            if stands is not None:
                return stands, to_attach
            return hands.verbs(driver).prepare(devices, context, kept), to_attach

        prepared = await isolated.ask("prepare", prepare)
        if isinstance(prepared, Refusal):
            return prepared, ()
        answer, to_attach = prepared
        if isinstance(answer, JournaledWork):
            beside = isolated.beside(driver, timeout_s=answer.limit_s)
            return hands.jobs.begin(context.owner, names, beside, answer), ()
        return answer, to_attach

    async def _unprepare_all(self, request: UnprepareRequest) -> list[Reason]:
        hands, owner = self._hands, request.owner
        for name in request.devices:
            if hands.jobs.is_under_way(name, owner):
                text = f"device {name}: long work for {owner} has not ended yet"
                return [Reason(code="work-under-way", message=text, facts={"device": name})]
        reasons: list[Reason] = []
        devices = [device for device in map(hands.find, request.devices) if device is not None]
        for name, own_devices in hands.by_driver(devices).items():
            isolated = hands.drivers.get(name)
            entries = {device.name: hands.journal.owner_entry(device.name, owner) for device in own_devices}
            changed = [device for device, entry in entries.items() if not entry.is_empty]
            if isolated is not None:
                try:
                    await self._unprepare_own(isolated, own_devices, entries, PrepareContext(owner=owner))
                except DriverError as err:
                    reasons.append(err.reason)
            elif changed:
                text = f"{', '.join(changed)}: what was done cannot be undone: driver {name!r} is not loaded"
                facts: dict[str, Fact] = {"driver": name, "device": changed[0]}
                reasons.append(Reason(code="driver-not-loaded", message=text, facts=facts))
        return reasons

    async def _unprepare_own(
        self,
        isolated: IsolatedDriver,
        devices: Sequence[Device],
        entries: Mapping[str, OwnerEntry],
        context: PrepareContext,
    ) -> None:
        """Have one driver undo what it did for an owner."""
        hands, verbs = self._hands, self._hands.verbs(isolated.driver)
        for device in devices if isolated.driver.capabilities.attaches else ():
            entry = entries[device.name]
            if entry.is_away:
                await isolated.call("detach", partial(verbs.detach, device, context.owner, entry.attach.sandbox))
        passed = [device for device in devices if entries[device.name].is_passed_through]
        kept = [device for device in devices if device not in passed]
        for undoing, undone in (
            *(((isolated, kept),) if kept else ()),
            *((hands.undoing_driver(isolated, device.name, context.owner), [device]) for device in passed),
        ):
            unprepare = hands.verbs(undoing.driver).unprepare
            await undoing.call("unprepare", partial(unprepare, undone, context))
        if passed:
            await hands.looked_again(isolated.name)

    def _keep(self, request: PrepareRequest, reply: PrepareReply) -> None:
        if not request.op_id:
            return
        self._answers[request.op_id] = (request, reply)
        while len(self._answers) > _KEPT_ANSWERS:
            self._answers.popitem(last=False)


def _only_reads(driver: DeviceDriver, devices: Sequence[Device]) -> bool:
    """Return whether preparing devices changes nothing.

    A shared device is never so, because the journal must record its owner.
    """
    return all(device.sharing is None for device in devices) and driver.only_reads(devices)


def place_nodes(edits: ContainerEdits, folder: str) -> ContainerEdits:
    """Take the device nodes below /dev from another folder of the host.

    The container sees them at their usual paths. A node that has a host path of its own elsewhere
    keeps it.
    """
    if folder.rstrip("/") == _DEV:
        return edits
    return msgspec.structs.replace(
        edits, device_nodes=tuple(_place_node(device_node, folder.rstrip("/")) for device_node in edits.device_nodes)
    )


def _place_node(node: DeviceNode, folder: str) -> DeviceNode:
    where = node.host_path or node.path
    if not where.startswith(f"{_DEV}/"):
        return node
    return msgspec.structs.replace(node, host_path=folder + where.removeprefix(_DEV))
