"""Laws of CPUs in shapes: what a scheduler gives by counters alone, the node's ledger always finds CPUs
for, and it gives none of them twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from support.shape_machines import NODE, device, inventories
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.alignment.planning.node_view import node_view
from topobus.engine.ledger import transitions
from topobus.engine.ledger.adoptions import Taken, read_adoption
from topobus.engine.ledger.transitions import Step
from topobus.engine.shapes.cpu_places import cpus_left, for_claims
from topobus.engine.shapes.in_slices import slice_shapes, with_shapes
from topobus.engine.shapes.shapes import Shapes, shapes_of
from topobus.formats.kubernetes.resource import SliceDevice
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.messages import AdoptRequest, ApiObject
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, allocation_of
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet
from topobus.values.ledger import Adoption, Ledger
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.names import ClaimUid
from topobus.values.own_shapes import OwnShape
from topobus.values.quantity import Quantity
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import AlignmentOptions, CpuOptions


class _Node:
    """A node with counted CPUs, its ledger, and a scheduler that knows the slices alone."""

    def __init__(self, nodes: int, cores: int, *, whole_cores: bool, reserved: Iterable[int], wanted: int) -> None:
        ids = range(nodes * cores)
        cpus = tuple(
            Cpu(id=cpu, online=True, core=core, numa_node=core // cores, socket=core // cores)
            for core in ids
            for cpu in (core, core + len(ids))
        )
        homes = {node: CpuSet.of(cpu.id for cpu in cpus if cpu.numa_node == node) for node in range(nodes)}
        self.machine = Machine(
            node=NODE,
            numa_nodes=tuple(NumaNode(id=node, cpus=home, memory_bytes=1 << 34) for node, home in homes.items()),
            cpus=cpus,
        )
        # A core of which one CPU is reserved is not given whole.
        self.reserved = CpuSet.of(cpu for core in reserved for cpu in (core % len(ids), core % len(ids) + len(ids)))
        self.options = AlignmentOptions(cpu=CpuOptions(full_pcpus_only=whole_cores))
        driver = LinuxCpuDriver()
        driver.configure(HostServices(cpus=CpuGroupSettings(groups="numa", whole_cores=whole_cores)))
        discovery = driver.discover(Tree(HardwareSettings(root="/nowhere")), self.machine)
        self.cpus = Inventory(node=NODE, device_class="cpu", generation=1, devices=tuple(discovery.devices))
        gpus = [device(f"gpu-{node}-{index}", node) for node in range(nodes) for index in range(3)]
        self.gpus = next(each for each in inventories(gpus) if each.device_class == "gpu")
        worker = OwnShape(name="worker", parts={"gpu": 1, "cpu": wanted}, within="numa")
        wide = OwnShape(name="wide", parts={"gpu": 2 * nodes, "cpu": wanted}, within="machine")
        self.shapes: Shapes = shapes_of([self.gpus, for_claims(self.cpus, None, self.reserved)], [worker, wide])
        self.ledger = Ledger(node=NODE)
        self.claims: dict[str, tuple[SliceDevice, ...]] = {}
        self.prepared: set[str] = set()
        self._number = 0

    def allocate(self, pick: int, count: int) -> None:
        """Give a claim a shape or single CPUs, when their counters allow it."""
        groups = [slice_device(each) for each in self.cpus.devices]
        parts = [slice_device(each) for each in self.gpus.devices]
        left = cpus_left(self.shapes.groups, self.ledger)
        listed, counters = with_shapes(slice_shapes(self.shapes), parts, cpus=groups, left=left)
        amounts = {
            (each.name, name): Quantity.parse(counter.value).nano
            for each in counters
            for name, counter in each.counters.items()
        }
        taken = [shown for claim in self.claims.values() for shown in claim]
        for shown in taken:
            _take(amounts, shown)
        assert min(amounts.values(), default=0) >= 0
        names = {shown.name for shown in taken}
        free = [shown for shown in listed if shown.name not in names and shown.consumes_counters]
        singles = [shown for shown in free if shown.name.startswith("shape-cpu-")]
        chosen = singles[:count] if pick % 2 else [free[pick % len(free)]] if free else []
        for shown in chosen:
            _take(amounts, shown)
        if chosen and min(amounts.values()) >= 0:
            self._number += 1
            self.claims[f"c{self._number}"] = tuple(chosen)

    def prepare(self) -> None:
        """Prepare all claims, as the gateway and topology do."""
        view = node_view(self.machine, {"gpu": self.gpus, "cpu": self.cpus}, None, self.options, self.reserved)
        for name, devices in self.claims.items():
            if name in self.prepared:
                continue
            allocation = allocation_of(
                _claim(name, devices),
                namespace="d",
                name=name,
                uid=ClaimUid(name),
                node=NODE,
                parts=self.shapes.parts,
                cpus=self.shapes.cpus,
            )
            assert isinstance(allocation, ClaimAllocation), allocation
            request = AdoptRequest(
                op_id=f"adopt-{name}",
                owner=_owner(name),
                devices=allocation.held,
                shared=allocation.by_share,
                is_prepared=True,
                group_cpus=allocation.group_cpus,
            )
            outcome = read_adoption(request, self.ledger, view, self.cpus.devices)
            assert isinstance(outcome, Taken), outcome
            assert {group: len(cpus) for group, cpus in outcome.groups.items()} == allocation.group_cpus
            step = transitions.adopt(
                self.ledger, outcome.adoption, op_id=request.op_id, decision_id=name, groups=outcome.groups
            )
            assert isinstance(step, Step), step
            self.ledger = step.ledger
            self.prepared.add(name)

    def place_pod(self, count: int) -> None:
        """Give a pod CPUs that the ledger has left, by whole cores."""
        held = CpuSet.of(cpu for each in self.ledger.allocations.values() for h in each.holdings for cpu in h.cpus)
        half = len(self.machine.cpus) // 2
        cores = [core for core in range(half) if not CpuSet(core, core + half) & (held | self.reserved)][:count]
        if cores:
            self._number += 1
            name = f"p{self._number}"
            cpus = tuple(f"cpu-{cpu}" for core in cores for cpu in (core, core + half))
            owner = Owner(kind=OwnerKind.POD, namespace="d", name=name, uid=name)
            step = transitions.adopt(
                self.ledger, Adoption(owner=owner, devices={"cpu": cpus}), op_id=name, decision_id=name
            )
            assert isinstance(step, Step), step
            self.ledger = step.ledger

    def end(self, pick: int) -> None:
        """End a claim or a pod."""
        keys = sorted(self.ledger.allocations)
        if keys:
            owner = self.ledger.allocations[keys[pick % len(keys)]].owner
            self._number += 1
            op_id = f"end-{self._number}"
            step = transitions.release(self.ledger, op_id=op_id, owner=owner, decision_id=op_id, is_undone=True)
            assert isinstance(step, Step), step
            self.ledger = step.ledger
            self.claims.pop(owner.name, None)


def _take(amounts: dict[tuple[str, str], int], shown: SliceDevice) -> None:
    for consumed in shown.consumes_counters:
        for name, counter in consumed.counters.items():
            amounts[consumed.counter_set, name] -= Quantity.parse(counter.value).nano


def _owner(name: str) -> Owner:
    return Owner(kind=OwnerKind.CLAIM, namespace="d", name=name, uid=name)


def _claim(name: str, devices: Iterable[SliceDevice]) -> ApiObject:
    results: list[dict[str, Any]] = [
        {"request": "r", "driver": DRIVER, "pool": NODE, "device": shown.name} for shown in devices
    ]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "d", "uid": name},
        status={"allocation": {"devices": {"results": results}}},
    )


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("allocate", "allocate", "prepare", "pod", "end")), st.integers(0, 60), st.integers(1, 5)
    ),
    max_size=25,
)


@settings(max_examples=examples(150))
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
    st.sets(st.integers(0, 20), max_size=3),
    st.integers(1, 6),
    _STEPS,
)
def test_ledger_finds_cpus_for_all_that_counters_allow(
    nodes: int, cores: int, whole_cores: bool, reserved: set[int], wanted: int, steps: list[tuple[str, int, int]]
) -> None:
    """Claims of shapes and of single CPUs, prepared sooner or later, and pods whose CPUs Topobus chooses
    while no claim waits for its own: each gets as many as it was given, of the right nodes, and no CPU is
    held twice.
    """
    node = _Node(nodes, cores, whole_cores=whole_cores, reserved=reserved, wanted=wanted)
    for what, pick, count in steps:
        if what == "allocate":
            node.allocate(pick, count)
        elif what == "prepare":
            node.prepare()
        elif what == "pod":
            node.prepare()
            node.place_pod(count)
        else:
            node.prepare()
            node.end(pick)
    node.prepare()

    held = [cpu for each in node.ledger.allocations.values() for h in each.holdings for cpu in h.cpus]
    assert len(held) == len(set(held))
    assert node.reserved.isdisjoint(CpuSet.of(held))
