"""Handles `prepare` and `unprepare`: chooses the driver, joins the edits, and gives the same answer to the same operation.

Drivers must be idempotent; the newest answers are cached besides, so that a repeated request costs nothing. A refusal changes nothing and is not cached: the same
operation may succeed later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from topobus.contracts.messages import Prepared, PrepareReply, PrepareRequest, UnprepareReply, UnprepareRequest
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.isolation import DriverFailed, DriverHung, IsolatedDriver
from topobus.devicekit.sharing import refuse_sharing
from topobus.domain.device import Device
from topobus.domain.edits import ContainerEdits, DeviceNode
from topobus.domain.health import HealthState
from topobus.domain.outcome import Reason, Refusal
from topobus.runtime.logging import get_logger
from topobus.sysfs.tree import Tree

__all__ = ["Preparer", "merge_edits", "place_nodes"]

# Answers kept for repeated questions; a caller repeats within seconds, and a node starts far fewer containers in that time.
_KEPT_ANSWERS = 256
# Drivers name nodes as a container sees them.
_DEV = "/dev"


class Preparer:
    """Prepares and unprepares devices of one class through their drivers."""

    def __init__(
        self, device_class: str, drivers: Mapping[str, IsolatedDriver], tree: Tree, find_device: Callable[[str], Device | None]
    ) -> None:
        self._class = device_class
        self._drivers = drivers
        self._tree = tree
        self._find = find_device
        self._answers: OrderedDict[str, tuple[PrepareRequest, PrepareReply]] = OrderedDict()

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Make devices ready, or say why not; nothing is half answered: every device asked for has its edits."""
        kept = self._answers.get(request.op_id)
        if kept is not None:
            if kept[0] == request:
                return kept[1]
            return _refuse("operation-reused", f"operation {request.op_id} was another request before", op_id=request.op_id)
        devices = [self._find(name) for name in request.devices]
        refusal = self._check(request.devices, devices, {*request.looked_at, *request.tolerated})
        if refusal is not None:
            return refusal
        result = await self._prepare_all([device for device in devices if device is not None], request)
        reply = PrepareReply(result=result)
        if isinstance(result, Prepared):
            self._keep(request, reply)
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
        """Undo `prepare`; a device that is unknown or was never prepared is no error."""
        context = PrepareContext(owner=request.owner)
        # A later prepare must run again, whatever its operation id: the device is not ready any more.
        for op_id in [key for key, (kept, _) in self._answers.items() if set(kept.devices) & set(request.devices)]:
            del self._answers[op_id]
        reasons: list[Reason] = []
        for name, devices in self._by_driver([device for device in map(self._find, request.devices) if device is not None]).items():
            isolated = self._drivers.get(name)
            if isolated is None:
                continue
            driver = isolated.driver
            try:
                await isolated.call("unprepare", partial(driver.unprepare, self._tree, devices, context))
            except (DriverFailed, DriverHung) as err:
                reasons.append(_driver_reason(name, err))
        get_logger().info(
            "devices.unprepared" if not reasons else "unprepare.refused",
            device_class=self._class,
            devices=list(request.devices),
            owner=request.owner.key,
            op_id=request.op_id,
            reasons=[reason.message for reason in reasons],
        )
        return UnprepareReply(refusal=Refusal(reasons=tuple(reasons)) if reasons else None)

    def _check(self, names: Sequence[str], devices: Sequence[Device | None], may_be_sick: Collection[str]) -> PrepareReply | None:
        if not names:
            return _refuse("no-devices", "the request names no device")
        for name, device in zip(names, devices, strict=True):
            if device is None:
                return _refuse("device-unknown", f"class {self._class} has no device {name!r} on this node", device=name)
            if device.health.state is HealthState.UNHEALTHY and name not in may_be_sick:
                worst = device.health.worst
                why = f"{worst.reason} ({worst.message})" if worst else "unhealthy"
                return _refuse("device-unhealthy", f"device {name} is unhealthy: {why}", device=name, reason=worst.reason if worst else "")
            if device.driver not in self._drivers:
                return _refuse("driver-not-loaded", f"device {name} belongs to driver {device.driver!r}, which is not loaded", device=name)
        return None

    async def _prepare_all(self, devices: Sequence[Device], request: PrepareRequest) -> Prepared | Refusal:
        names = sorted(device.name for device in devices)
        # One variable a class that every container with these devices can rely on, whoever made them.
        common = ContainerEdits(env={f"TOPOBUS_{self._class.upper().replace('-', '_')}_DEVICES": ",".join(names)})
        edits: dict[str, ContainerEdits] = {}
        context = PrepareContext(owner=request.owner, config=request.config, device_config=request.device_config)
        for name, own_devices in self._by_driver(devices).items():
            isolated = self._drivers[name]
            driver = isolated.driver
            unshared = refuse_sharing(driver, own_devices, context)
            if unshared is not None:
                return unshared
            try:
                answer = await isolated.call("prepare", partial(driver.prepare, self._tree, own_devices, context))
            except (DriverFailed, DriverHung) as err:
                return Refusal(reasons=(_driver_reason(name, err),))
            if isinstance(answer, Refusal):
                return answer
            missing = sorted(device.name for device in own_devices if device.name not in answer)
            if missing:
                text = f"driver {name} prepared no edits for {', '.join(missing)}"
                return Refusal(reasons=(Reason(code="driver-incomplete", message=text, facts={"driver": name, "devices": tuple(missing)}),))
            edits.update({device.name: answer[device.name] for device in own_devices})
            merged = merge_edits(common, answer.get("", ContainerEdits()))
            if isinstance(merged, str):
                text = f"two drivers of class {self._class} set {merged} to different values"
                return Refusal(reasons=(Reason(code="edits-conflict", message=text, facts={"variable": merged}),))
            common = merged
        seen = self._tree.settings.runtime_dev
        return Prepared(edits={name: place_nodes(edit, seen) for name, edit in edits.items()}, common=place_nodes(common, seen))

    def _by_driver(self, devices: Sequence[Device]) -> dict[str, tuple[Device, ...]]:
        names = sorted({device.driver for device in devices})
        return {
            name: tuple(sorted((device for device in devices if device.driver == name), key=lambda device: device.name)) for name in names
        }

    def _keep(self, request: PrepareRequest, reply: PrepareReply) -> None:
        if not request.op_id:
            return
        self._answers[request.op_id] = (request, reply)
        while len(self._answers) > _KEPT_ANSWERS:
            self._answers.popitem(last=False)


def merge_edits(first: ContainerEdits, second: ContainerEdits) -> ContainerEdits | str:
    """Join two edits of one container; the name of the first variable that both set differently when they conflict.

    Device nodes and mounts keep their order; what stands in both comes once.
    """
    for key in sorted(first.env.keys() & second.env.keys()):
        if first.env[key] != second.env[key]:
            return key
    return msgspec.structs.replace(
        first,
        env={**first.env, **second.env},
        device_nodes=tuple(dict.fromkeys((*first.device_nodes, *second.device_nodes))),
        mounts=tuple(dict.fromkeys((*first.mounts, *second.mounts))),
        annotations={**first.annotations, **second.annotations},
    )


def place_nodes(edits: ContainerEdits, folder: str) -> ContainerEdits:
    """Take the device nodes below /dev from another folder of the host; the container sees them where it expects them.

    A node that names a host path of its own elsewhere keeps it.
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


def _refuse(code: str, message: str, **facts: str) -> PrepareReply:
    return PrepareReply(result=Refusal(reasons=(Reason(code=code, message=message, facts=dict(facts)),)))


def _driver_reason(name: str, err: DriverFailed | DriverHung) -> Reason:
    code = "driver-hung" if isinstance(err, DriverHung) else "driver-failed"
    return Reason(code=code, message=err.message, facts={"driver": name})
