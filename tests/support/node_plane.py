"""The node plane around a gateway: the real topology service in process, and in place of device
services peers that prepare by rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from support.ask_record import AskRecord
from support.real_topology import WatchedTopology
from topobus.bus.bus import Bus
from topobus.formats.messages.adjust_messages import Adjusted, AdjustReply, AdjustRequest
from topobus.formats.messages.catalogue import ADJUST, ATTACH, DETACH, INVENTORY, MACHINE, OBJECT, PREPARE, UNPREPARE
from topobus.formats.messages.messages import (
    AdoptRequest,
    ApiObject,
    Prepared,
    PrepareReply,
    PrepareRequest,
    ReleaseRequest,
    UnprepareReply,
    UnprepareRequest,
)
from topobus.formats.messages.sandbox_messages import Attached, AttachReply, AttachRequest, DetachReply, DetachRequest
from topobus.gateway.boot import boot_id
from topobus.values.counters import CounterSet
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner
from topobus.values.sandbox import AttachedInterface, Sandbox

NODE = "demo-node"


def device(name: str, node: int | None = None, state: HealthState = HealthState.HEALTHY) -> Device:
    """A device of the class that its name begins with."""
    conditions = (
        () if state is HealthState.HEALTHY else (Condition(dimension=Dimension.MEMORY, state=state, reason="ecc"),)
    )
    return Device(
        name=name,
        device_class=name.partition("-")[0],
        numa_nodes=None if node is None else NodeSet(node),
        health=DeviceHealth(state=state, conditions=conditions),
    )


def kept_back(shown: Device, verb: DeviceVerb, *, is_draining: bool = False) -> Device:
    """The same device as an operator keeps it back."""
    return msgspec.structs.replace(
        shown, maintenance=Maintenance(verb=verb, why="fan", who="ada", is_draining=is_draining)
    )


def no(code: str, message: str) -> Refusal:
    """A refusal with one reason."""
    return Refusal(reasons=(Reason(code=code, message=message),))


def claim(name: str, uid: str, *devices: str, node: str = NODE) -> ApiObject:
    """An allocated claim; a device's class is its name's first part."""
    results = [
        {
            "request": f"want-{each_device.partition('-')[0]}",
            "driver": DRIVER,
            "pool": pool_of_class(node, each_device.partition("-")[0]),
            "device": each_device,
        }
        for each_device in devices
    ]
    status: dict[str, Any] = {"allocation": {"devices": {"results": results}}} if devices else {}
    metadata = {"name": name, "namespace": "default", "uid": uid}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)


async def show_machine(bus: Bus) -> None:
    """Publish a machine of two NUMA nodes with four CPUs each."""
    cpus = tuple(
        Cpu(id=number, online=True, core=number, numa_node=number // 4, socket=number // 4) for number in range(8)
    )
    numa_nodes = (
        NumaNode(id=0, cpus=CpuSet.parse("0-3"), memory_bytes=1 << 34),
        NumaNode(id=1, cpus=CpuSet.parse("4-7"), memory_bytes=1 << 34),
    )
    await bus.put(MACHINE, Machine(node=NODE, numa_nodes=numa_nodes, cpus=cpus), node=NODE)


async def show(
    bus: Bus,
    device_class: str,
    *devices: Device,
    generation: int = 1,
    counter_sets: tuple[CounterSet, ...] = (),
    reading_drivers: tuple[str, ...] = (),
    boot: str | None = None,
) -> int:
    """Publish an inventory, of the present boot where none is given; gives its revision."""
    value = Inventory(
        node=NODE,
        device_class=device_class,
        generation=generation,
        boot_id=boot_id() if boot is None else boot,
        devices=tuple(devices),
        counter_sets=counter_sets,
        reading_drivers=reading_drivers,
    )
    return await bus.put(INVENTORY, value, node=NODE, device_class=device_class)


async def store(bus: Bus, value: ApiObject) -> None:
    """Write a claim as the controller would."""
    await bus.put(OBJECT, value, kind="resourceclaim", namespace="default", name=value.metadata["name"])


class NodePlane:
    """Runs what a gateway asks. Set the fields to make a peer refuse, hang or choose."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.asks = AskRecord()
        self.topology = WatchedTopology(bus, NODE, asks=self.asks)
        self.prepare_refusal: Refusal | None = None
        self.unprepare_refusal: Refusal | None = None
        self.prepare_by: Callable[[PrepareRequest], Awaitable[PrepareReply]] | None = None
        """Prepares in place of the rule: a real device service's part."""
        self.to_attach: frozenset[str] = frozenset()
        """Devices that go into the pod's sandbox."""
        self.to_adjust: frozenset[str] = frozenset()
        """Devices whose containers are adjusted: each gets its name in a variable."""
        self.adjust_by: Callable[[AdjustRequest], Awaitable[AdjustReply]] | None = None
        """Adjusts in place of the rule."""
        self.attached: dict[tuple[str, str], str] = {}
        """Owner's uid and device to the sandbox that has it."""
        self.attach_by: Callable[[AttachRequest], Awaitable[AttachReply | None]] | None = None
        """Looks first; None: the rule decides."""
        self.detach_refusal: Refusal | None = None
        self.detach_by: Callable[[Sandbox], Awaitable[None]] | None = None
        """Really takes a device out of its sandbox."""
        self.nodeless: set[str] = set()
        """Devices without a node of the host."""
        self.hung_devices: set[str] = set()
        self.renumbered: dict[str, str] = {}
        """Device to its node's path, where that is not /dev/<name>."""
        self._generation = 0

    @property
    def ledger(self) -> Ledger:
        """Give the ledger as the topology service has written it last."""
        return self.topology.ledger

    @asynccontextmanager
    async def running(self, classes: Iterable[str] = ("gpu", "nic")) -> AsyncIterator[None]:
        """Answer for the length of a block; somebody has published the machine."""
        await self.topology.start()
        try:
            for device_class in classes:
                await self.answer_for(device_class)
            yield
        finally:
            await self.topology.stop()

    async def answer_for(self, device_class: str) -> None:
        """Answer as the device service of a class from now on."""
        await self.bus.answer(PREPARE, self._prepare, node=NODE, device_class=device_class)
        await self.bus.answer(UNPREPARE, self._unprepare, node=NODE, device_class=device_class)
        if device_class in ATTACH.writer:
            await self.bus.answer(ATTACH, self._attach, node=NODE, device_class=device_class)
            await self.bus.answer(DETACH, self._detach, node=NODE, device_class=device_class)
            await self.bus.answer(ADJUST, self._adjust, node=NODE, device_class=device_class)

    async def show(
        self,
        device_class: str,
        *devices: Device,
        counter_sets: tuple[CounterSet, ...] = (),
        reading_drivers: tuple[str, ...] = (),
        boot: str | None = None,
    ) -> None:
        """Publish an inventory, and wait until topology has heard of it."""
        self._generation += 1
        revision = await show(
            self.bus,
            device_class,
            *devices,
            generation=self._generation,
            counter_sets=counter_sets,
            reading_drivers=reading_drivers,
            boot=boot,
        )
        await self.topology.wait_until_heard(INVENTORY, revision)

    async def hold(self, owner: Owner, **devices: tuple[str, ...]) -> None:
        """Have topology write a holding, as another interface would."""
        await self.topology.hold(AdoptRequest(op_id=f"hold-{owner.uid}", owner=owner, devices=devices))

    async def let_go(self, owner: Owner) -> None:
        """Take it out again."""
        await self.topology.let_go(ReleaseRequest(op_id=f"let-go-{owner.uid}", owner=owner))

    async def lose(self) -> None:
        """Forget every holding, as a node does whose store was lost while topology was down."""
        await self.topology.lose_ledger()

    async def begin_from(self, older: Ledger) -> None:
        """Have topology know only what an older ledger has."""
        await self.topology.begin_from(older)

    async def store(self, value: ApiObject) -> None:
        """Write a claim as the controller would."""
        await store(self.bus, value)

    async def drop(self, name: str) -> None:
        """Delete a claim."""
        await self.bus.delete(OBJECT, kind="resourceclaim", namespace="default", name=name)

    async def _prepare(self, request: PrepareRequest) -> PrepareReply:
        await self.asks.note("prepare", request)
        if self.hung_devices & set(request.devices):
            await asyncio.Event().wait()
        if self.prepare_refusal is not None:
            return PrepareReply(result=self.prepare_refusal)
        if self.prepare_by is not None:
            return await self.prepare_by(request)
        device_class = request.devices[0].partition("-")[0].upper()
        edits = {
            name: ContainerEdits(
                env={f"{name.upper().replace('-', '_')}": "1"},
                device_nodes=()
                if name in self.nodeless
                else (DeviceNode(path=self.renumbered.get(name, f"/dev/{name}")),),
            )
            for name in request.devices
        }
        common = ContainerEdits(env={f"TOPOBUS_{device_class}_DEVICES": ",".join(request.devices)})
        to_attach = tuple(name for name in request.devices if name in self.to_attach)
        to_adjust = tuple(name for name in request.devices if name in self.to_adjust)
        return PrepareReply(result=Prepared(edits=edits, common=common, to_attach=to_attach, to_adjust=to_adjust))

    async def _unprepare(self, request: UnprepareRequest) -> UnprepareReply:
        await self.asks.note("unprepare", request)
        kept = sorted(name for uid, name in self.attached if uid == request.owner.uid and name in request.devices)
        assert not kept, f"undone while in a sandbox: {kept}"
        return UnprepareReply(refusal=self.unprepare_refusal)

    async def _attach(self, request: AttachRequest) -> AttachReply:
        await self.asks.note("attach", request)
        reply = await self.attach_by(request) if self.attach_by is not None else None
        if reply is not None:
            return reply
        for name in request.devices:
            former = self.attached.setdefault((request.owner.uid, name), request.sandbox.id)
            assert former == request.sandbox.id, f"{name} is in {former}, and {request.sandbox.id} is to have it, too"
        return AttachReply(
            result=Attached(
                interfaces={name: AttachedInterface(name=name.replace("-", "")) for name in request.devices}
            )
        )

    async def _adjust(self, request: AdjustRequest) -> AdjustReply:
        await self.asks.note("adjust", request)
        if self.adjust_by is not None:
            return await self.adjust_by(request)
        return AdjustReply(
            result=Adjusted(
                edits={name: ContainerEdits(env={"CARD_OF": str(request.container)}) for name in request.devices}
            )
        )

    async def _detach(self, request: DetachRequest) -> DetachReply:
        await self.asks.note("detach", request)
        if self.detach_refusal is not None:
            return DetachReply(refusal=self.detach_refusal)
        for name in request.devices:
            if self.attached.get((request.owner.uid, name)) == request.sandbox.id:
                if self.detach_by is not None:
                    await self.detach_by(request.sandbox)
                del self.attached[request.owner.uid, name]
        return DetachReply()
