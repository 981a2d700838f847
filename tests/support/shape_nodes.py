"""A node of a recorded machine in the stand-alone controller's state, with claims for its shapes."""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import structs

from topobus.cli.simulation.node import open_machine
from topobus.controller.state.standalone_state import StandaloneState
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.allocation.pools import Slice
from topobus.engine.claims import lifecycle
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult, SliceSpec
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Machine
from topobus.values.request import Owner

__all__ = ["RecordingState", "claim_for", "holding", "recorded", "sick", "state_of", "store", "structured", "timeless"]

NODE = "n1"


@cache
def recorded(name: str, cpus: CpuGroupSettings = CpuGroupSettings()) -> tuple[Machine, tuple[Inventory, ...]]:  # noqa: B008 - frozen
    """Read a recorded machine, as node n1, with its CPUs offered so."""
    with open_machine(name, cpus) as opened:
        snapshot = opened.snapshot
    return structs.replace(snapshot.machine, node=NODE), tuple(
        structs.replace(inventory, node=NODE) for inventory in snapshot.inventories
    )


def state_of(name: str, cpus: CpuGroupSettings = CpuGroupSettings()) -> StandaloneState:  # noqa: B008 - frozen
    """Put a recorded machine into a state, its CPUs last."""
    machine, inventories = recorded(name, cpus)
    state = StandaloneState()
    state.put_machine(machine)
    for inventory in sorted(inventories, key=lambda inventory: inventory.device_class == "cpu"):
        state.put_inventory(inventory)
    return state


def claim_for(level: str, name: str = "a", count: int = 1) -> Claim:
    """Ask for devices of the class of a level, or of a device class."""
    request = {"name": "r", "exactly": {"deviceClassName": f"{level}.topobus.dev", "count": count}}
    return structured(name, {"devices": {"requests": [request]}})


def structured(name: str, spec: dict[str, Any]) -> Claim:
    """Make a claim."""
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return Claim(ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, spec=spec))


def store(state: StandaloneState, claim: Claim, result: AllocationResult, revision: int = 1) -> ApiObject:
    """Store a claim with its allocation."""
    allocated = lifecycle.with_allocation(claim.object, result, now="2026-01-01T00:00:00Z")
    state.put_object(ObjectKey("resourceclaim", "default", claim.metadata.name), Stored(revision, allocated))
    return allocated


def holding(owner: Owner, *names: str, sequence: int = 1) -> Ledger:
    """Hold devices for an owner, by their classes."""
    devices: dict[str, tuple[str, ...]] = {}
    for name in names:
        device_class = name.partition("-")[0]
        devices[device_class] = (*devices.get(device_class, ()), name)
    allocation = Allocation(owner=owner, holdings=(Holding(devices=devices),), decision_id="d")
    return Ledger(node=NODE, epoch="e", sequence=sequence, allocations={owner.key: allocation})


def sick(inventory: Inventory, name: str) -> Inventory:
    """Let one device of an inventory be sick."""
    health = DeviceHealth(state=HealthState.UNHEALTHY)
    devices = tuple(
        structs.replace(device, health=health) if device.name == name else device for device in inventory.devices
    )
    return structs.replace(inventory, generation=inventory.generation + 1, devices=devices)


class RecordingState(StandaloneState):
    """A state that keeps the slices as they are put."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Slice, ...]] = {}

    def _put_slices(self, origin: Any, slices: tuple[Slice, ...]) -> None:
        self.seen[origin] = slices
        super()._put_slices(origin, slices)


def timeless(spec: SliceSpec) -> SliceSpec:
    """Leave out what belongs to the moment: the generation and the times of taints."""
    devices = tuple(
        structs.replace(device, taints=tuple(structs.replace(taint, time_added=None) for taint in device.taints))
        for device in spec.devices
    )
    return structs.replace(spec, devices=devices, pool=structs.replace(spec.pool, generation=1))
