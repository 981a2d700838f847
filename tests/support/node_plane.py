"""The node plane around a gateway, on a real bus: a topology service with the real ledger algebra, device services that prepare by rule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from msgspec import structs

from topobus.contracts.catalogue import ADOPT, INVENTORY, LEDGER, OBJECT, PREFER, PREPARE, RELEASE, UNPREPARE
from topobus.contracts.messages import (
    Adopted,
    AdoptReply,
    AdoptRequest,
    ApiObject,
    PreferReply,
    PreferRequest,
    Prepared,
    PrepareReply,
    PrepareRequest,
    ReleaseReply,
    ReleaseRequest,
    UnprepareReply,
    UnprepareRequest,
)
from topobus.domain import transitions
from topobus.domain.device import Device, Inventory
from topobus.domain.edits import ContainerEdits, DeviceNode
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.idset import NodeSet
from topobus.domain.ledger import Ledger
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.request import Owner
from topobus.runtime.bus import Bus

NODE = "demo-node"


def device(name: str, node: int | None = None, state: HealthState = HealthState.HEALTHY) -> Device:
    """A device of the class that its name begins with."""
    conditions = () if state is HealthState.HEALTHY else (Condition(dimension=Dimension.MEMORY, state=state, reason="ecc"),)
    return Device(
        name=name,
        device_class=name.partition("-")[0],
        numa_nodes=None if node is None else NodeSet(node),
        health=DeviceHealth(state=state, conditions=conditions),
    )


def no(code: str, message: str) -> Refusal:
    """A refusal with one reason."""
    return Refusal(reasons=(Reason(code=code, message=message),))


def claim(name: str, uid: str, *devices: str, node: str = NODE) -> ApiObject:
    """An allocated claim; a device's class is its name's first part."""
    results = [
        {
            "request": f"want-{each_device.partition('-')[0]}",
            "driver": f"{each_device.partition('-')[0]}.topobus.dev",
            "pool": node,
            "device": each_device,
        }
        for each_device in devices
    ]
    status: dict[str, Any] = {"allocation": {"devices": {"results": results}}} if devices else {}
    metadata = {"name": name, "namespace": "default", "uid": uid}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)


class NodePlane:
    """Answers what a gateway asks. Set the fields to make a peer refuse, hang or choose."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.ledger = Ledger(node=NODE)
        self.asked: list[tuple[str, Any]] = []
        self.prefers: tuple[str, ...] | None = None
        self.adopt_refusal: Refusal | None = None
        self.prepare_refusal: Refusal | None = None
        self.prepare_by: Callable[[PrepareRequest], Awaitable[PrepareReply]] | None = None
        """Prepares in place of the rule: a real device service's part."""
        self.hung: set[str] = set()
        self.go = asyncio.Event()
        self.go.set()
        self._held_verb = ""
        self.hung_devices: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}
        """Verb to what its answers wait for."""
        self.renumbered: dict[str, str] = {}
        """Device to its node's path, where that is not /dev/<name>."""
        self._generation = 0
        self._lock = asyncio.Lock()
        self._noted = asyncio.Condition()

    async def start(self, classes: Iterable[str] = ("gpu", "nic")) -> None:
        """Answer from now on."""
        await self.bus.put(LEDGER, self.ledger, node=NODE)
        await self.bus.answer(PREFER, self._prefer, node=NODE)
        await self.bus.answer(ADOPT, self._adopt, node=NODE)
        await self.bus.answer(RELEASE, self._release, node=NODE)
        for device_class in classes:
            await self.bus.answer(PREPARE, self._prepare, node=NODE, device_class=device_class)
            await self.bus.answer(UNPREPARE, self._unprepare, node=NODE, device_class=device_class)

    async def show(self, device_class: str, *devices: Device) -> None:
        """Publish an inventory."""
        self._generation += 1
        value = Inventory(node=NODE, device_class=device_class, generation=self._generation, devices=tuple(devices))
        await self.bus.put(INVENTORY, value, node=NODE, device_class=device_class)

    async def hold(self, owner: Owner, **devices: tuple[str, ...]) -> None:
        """Write a holding into the ledger, as another door would."""
        await self._adopt(AdoptRequest(op_id=f"hold-{owner.uid}", owner=owner, devices=devices))

    async def let_go(self, owner: Owner) -> None:
        """Take it out again."""
        await self._release(ReleaseRequest(op_id=f"let-go-{owner.uid}", owner=owner))

    async def lose(self) -> None:
        """Forget every holding, as a ledger does whose store was lost."""
        async with self._lock:
            self.ledger = structs.replace(self.ledger, sequence=self.ledger.sequence + 1, allocations={})
            await self.bus.put(LEDGER, self.ledger, node=NODE)

    async def store(self, value: ApiObject) -> None:
        """Write a claim as the controller would."""
        await self.bus.put(OBJECT, value, kind="resourceclaim", namespace="default", name=value.metadata["name"])

    async def drop(self, name: str) -> None:
        """Delete a claim."""
        await self.bus.delete(OBJECT, kind="resourceclaim", namespace="default", name=name)

    def requests(self, verb: str) -> list[Any]:
        """What was asked of one verb, in order."""
        return [request for name, request in self.asked if name == verb]

    def hold_answers(self, verb: str) -> None:
        """Answer a verb only when `go` is set."""
        self._held_verb = verb
        self.go.clear()

    async def wait_for(self, verb: str, count: int = 1, timeout_s: float = 10.0) -> Any:
        """Wait until a verb was asked so often; the last of these requests."""
        async with asyncio.timeout(timeout_s), self._noted:
            await self._noted.wait_for(lambda: len(self.requests(verb)) >= count)
        return self.requests(verb)[count - 1]

    async def _prefer(self, request: PreferRequest) -> PreferReply:
        await self._note("prefer", request)
        return PreferReply(devices=self.prefers if self.prefers is not None else request.available[-request.size :])

    async def _adopt(self, request: AdoptRequest) -> AdoptReply:
        await self._note("adopt", request)
        if self.adopt_refusal is not None:
            return AdoptReply(result=self.adopt_refusal)
        async with self._lock:
            named = request.user is not None and bool(request.decision_id)
            step: transitions.Step | Refusal
            if request.user is not None and named:
                step = transitions.name_user(
                    self.ledger, op_id=request.op_id, owner=request.owner, decision_id=request.decision_id, user=request.user
                )
            else:
                step = self._step(request)
            if isinstance(step, Refusal):
                return AdoptReply(result=step)
            self.ledger = step.ledger
            await self.bus.put(LEDGER, self.ledger, node=NODE)
        await self._note("named" if named else "adopted", request)
        return AdoptReply(result=Adopted(decision_id=f"d-{request.op_id}", ledger_sequence=self.ledger.sequence))

    def _step(self, request: AdoptRequest) -> transitions.Step | Refusal:
        return transitions.adopt(
            self.ledger,
            op_id=request.op_id,
            owner=request.owner,
            devices=request.devices,
            decision_id=f"d-{request.op_id}",
            shared=request.shared,
            is_shared=request.is_shared,
            is_prepared=request.is_prepared,
            memory=request.memory,
            container=request.container,
            user=request.user,
        )

    async def _release(self, request: ReleaseRequest) -> ReleaseReply:
        await self._note("release", request)
        async with self._lock:
            step = transitions.release(
                self.ledger,
                op_id=request.op_id,
                owner=request.owner,
                decision_id="d",
                is_undone=request.is_undone,
                keeps_devices=request.keeps_devices,
                only=request.decision_id,
            )
            if isinstance(step, Refusal):
                return ReleaseReply(refusal=step, ledger_sequence=self.ledger.sequence)
            self.ledger = step.ledger
            await self.bus.put(LEDGER, self.ledger, node=NODE)
        await self._note("released", request)
        return ReleaseReply(ledger_sequence=self.ledger.sequence)

    async def _prepare(self, request: PrepareRequest) -> PrepareReply:
        await self._note("prepare", request)
        if self.hung_devices & set(request.devices):
            await asyncio.Event().wait()
        if self.prepare_refusal is not None:
            return PrepareReply(result=self.prepare_refusal)
        if self.prepare_by is not None:
            return await self.prepare_by(request)
        device_class = request.devices[0].partition("-")[0].upper()
        edits = {
            name: ContainerEdits(
                env={f"{name.upper().replace('-', '_')}": "1"}, device_nodes=(DeviceNode(path=self.renumbered.get(name, f"/dev/{name}")),)
            )
            for name in request.devices
        }
        common = ContainerEdits(env={f"TOPOBUS_{device_class}_DEVICES": ",".join(request.devices)})
        return PrepareReply(result=Prepared(edits=edits, common=common))

    async def _unprepare(self, request: UnprepareRequest) -> UnprepareReply:
        await self._note("unprepare", request)
        return UnprepareReply()

    async def _note(self, verb: str, request: object) -> None:
        async with self._noted:
            self.asked.append((verb, request))
            self._noted.notify_all()
        if verb in self.gates:
            await self.gates[verb].wait()
        if verb in self.hung:
            await asyncio.Event().wait()
        if verb == self._held_verb:
            await self.go.wait()
