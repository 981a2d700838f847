"""The state that both homes share, and the only place that builds a search's input: everything that
an allocation of claims on one node depends on.

The homes differ in where the objects come from: `StandaloneState` derives slices from inventories,
`ApiServerState` uses those that gateways publish. A dry run uses the former, filled from a
Situation. There is no I/O. The copy is the only mutable value, and belongs to the event loop that
runs the controller.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from topobus.controller.state.free_devices import FreeDevices
from topobus.controller.state.node_state import NodeState
from topobus.controller.state.slice_index import Origin
from topobus.controller.state.taint_index import TaintIndex
from topobus.engine.alignment.planning.node_view import cores_of
from topobus.engine.allocation.cpu_policy import reserved_cpus
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.tolerations import TaintRule
from topobus.engine.allocation.values import (
    ALL_GATES,
    AllocationInput,
    ClaimToAllocate,
    CpuPolicy,
    DeviceId,
    Gate,
    Mode,
    Node,
    node_of,
)
from topobus.engine.claims.claim_admission import Wanted
from topobus.engine.claims.gate import RESERVED_TAINT
from topobus.formats.kubernetes import limits
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.kubernetes.resource import DeviceClassSpec, SliceDevice, SliceSpec
from topobus.formats.kubernetes.shape import read_as, refuse_problems
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Inventory
from topobus.values.dra_names import node_of_pool
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.view import NodeAlignment

__all__ = ["ClusterState", "read_class", "read_slice"]


class ClusterState(NodeState):
    """The copies that both homes keep. The free devices are in its `stock`.

    `class_epoch` grows with every change of the classes.
    """

    def __init__(self, gates: frozenset[Gate] = ALL_GATES) -> None:
        super().__init__()
        self.gates = gates
        self.stock = FreeDevices(self.described_with_cpus, self.shared, gates)
        self.taints = TaintIndex()
        self.class_epoch = 0
        self._classes: dict[str, DeviceClassSpec] = {}
        self._cpu_policies: dict[str, CpuPolicy | None] = {}

    @property
    def supply(self) -> int:
        """A count that grows with every change that may let a waiting claim fit."""
        return self.stock.count

    @property
    def classes(self) -> Mapping[str, DeviceClassSpec]:
        """All classes."""
        return self._classes

    def describe(self, node: str) -> Node:
        """Return a node as node selectors see it."""
        return node_of(node)

    def described_with_cpus(self, node: str) -> Node:
        """Return a node as a search needs it: with how it takes exclusive CPUs, where it has
        published a machine.
        """
        if node not in self._cpu_policies:
            machine, alignment = self.machines.get(node), self.alignments.get(node, NodeAlignment(node=node))
            self._cpu_policies[node] = (
                CpuPolicy(cores_of(machine), alignment.options.cpu, alignment.reserved_cpus)
                if machine is not None
                else None
            )
        return replace(self.describe(node), cpus=self._cpu_policies[node])

    def input_for(
        self,
        node: str,
        wanted: Sequence[Wanted],
        *,
        mode: Mode = Mode.CORRECTED,
        excluded: Mapping[DeviceId, str] | None = None,
        ignoring: Collection[str] = (),
    ) -> AllocationInput:
        """Collect what an allocation of these claims on one node depends on.

        Shapes: wanted — one claim, or several of one pod; excluded — devices that they must not get
        now, and why; ignoring — uids of claims whose intents are ignored here.
        """
        owners = [claim.owner for claim, _ in wanted]
        described = self.described_with_cpus(node)
        return AllocationInput(
            node=described,
            claims=tuple(
                ClaimToAllocate(f"{owner.namespace}/{owner.name}", spec, len(owners) > 1)
                for owner, (_, spec) in zip(owners, wanted, strict=True)
            ),
            classes=self.classes,
            pools=self.stock.table_of(node).pools,
            usage=self.stock.usage_for(
                node, owners, {**reserved_cpus(described), **(excluded or {})}, ignoring=ignoring
            ),
            gates=self.gates,
            mode=mode,
        )

    def devices_of(self, node: str) -> tuple[DeviceId, ...]:
        """List the devices that a node publishes itself."""
        return tuple(
            candidate.id
            for pool in self.stock.table_of(node).pools
            if node_of_pool(pool.id.pool) == node
            for candidate in pool.candidates
        )

    def put_machine(self, machine: Machine) -> None:
        """Store a machine."""
        was_asked = machine.node in self._cpu_policies
        before = self._cpu_policies.pop(machine.node, None)
        is_new = machine.node not in self.machines
        super().put_machine(machine)
        if was_asked and self.described_with_cpus(machine.node).cpus != before:
            self.stock.outdate(machine.node)
        elif is_new:
            self.stock.free(machine.node)

    def drop_machine(self, node: str) -> None:
        """Remove a machine."""
        super().drop_machine(node)
        if self._cpu_policies.pop(node, None) is not None:
            self.stock.outdate(node)

    def put_inventory(self, inventory: Inventory) -> None:
        """Store an inventory."""
        super().put_inventory(inventory)
        if inventory.device_class == "cpu":
            self.stock.put_cpus(inventory.node, inventory.devices)

    def drop_inventory(self, node: str, device_class: str) -> None:
        """Remove an inventory."""
        super().drop_inventory(node, device_class)
        if device_class == "cpu":
            self.stock.put_cpus(node, ())

    def put_ledger(self, ledger: Ledger) -> None:
        """Store a ledger."""
        super().put_ledger(ledger)
        self.stock.put_ledger(ledger.node, ledger)

    def drop_ledger(self, node: str) -> None:
        """Remove a ledger."""
        super().drop_ledger(node)
        self.stock.put_ledger(node, None)

    def put_alignment(self, node: str, alignment: NodeAlignment | None) -> None:
        """Store a node's alignment options, or remove them with None."""
        if self.alignments.get(node) != alignment:
            super().put_alignment(node, alignment)
            self._cpu_policies.pop(node, None)
            self.stock.outdate(node)

    def _put_class(self, name: str, device_class: DeviceClassSpec | None) -> None:
        """Store a class, or remove it with None."""
        self._classes.pop(name, None)
        if device_class is not None:
            self._classes[name] = device_class
        self.class_epoch += 1
        self.stock.free(None)

    def _put_slices(self, origin: Origin, slices: tuple[Slice, ...]) -> None:
        """Replace all slices of an origin."""
        self.stock.put_slices(origin, _unreserved(self.taints.put(origin, slices)))

    def _put_rule(self, key: Hashable, rule: TaintRule | None) -> None:
        """Store a taint rule, or remove it with None."""
        for origin, slices in self.taints.put_rule(key, rule).items():
            self.stock.put_slices(origin, _unreserved(slices))


def read_class(api_object: ApiObject) -> DeviceClassSpec:
    """Read and check a stored class.

    Errors: raises ContractError.
    """
    spec = read_as(api_object.spec, DeviceClassSpec, where=name_of(api_object))
    refuse_problems(limits.check_class(spec), name_of(api_object))
    return spec


def read_slice(api_object: ApiObject) -> SliceSpec:
    """Read and check a stored slice: one wrong amount in it would make every search that reads it
    fail.

    Errors: raises ContractError.
    """
    spec = read_as(api_object.spec, SliceSpec, where=name_of(api_object))
    refuse_problems(limits.check_slice(spec), name_of(api_object))
    return spec


def _unreserved(slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Return slices without the taint that only keeps kube-scheduler from allocating our devices.

    Slices without that taint stay the same objects.
    """
    return tuple(map(_without_reserved_taint, slices))


def _without_reserved_taint(resource_slice: Slice) -> Slice:
    if not any(map(_is_reserved, resource_slice.spec.devices)):
        return resource_slice
    devices = tuple(
        structs.replace(
            device,
            taints=tuple(
                taint for taint in device.taints if taint.key != RESERVED_TAINT or taint.effect != "NoSchedule"
            ),
        )
        for device in resource_slice.spec.devices
    )
    return Slice(resource_slice.name, structs.replace(resource_slice.spec, devices=devices))


def _is_reserved(device: SliceDevice) -> bool:
    return any(taint.key == RESERVED_TAINT and taint.effect == "NoSchedule" for taint in device.taints)
