"""Random allocations and releases of CPU claims through the controller, each compared with what
kubelet's static policy would take from the same free CPUs.

`python -m support.cpu_parity 10000` (in `tests/`) runs so many sequences and prints what was
compared; the suite runs a few hundred.
"""

from __future__ import annotations

import asyncio
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

from msgspec import convert, structs, to_builtins
from prometheus_client import CollectorRegistry

from topobus.controller.classic.rules.device_choice import choose, structured_claim, structured_class
from topobus.controller.commit.allocator import Allocator, member
from topobus.controller.commit.node_search import NodeSearch
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster_state import ClusterState
from topobus.controller.state.result_cache import ResultCache
from topobus.controller.state.standalone_state import StandaloneState
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.alignment.cpus.cpu_assignment import assign_cpus, contradiction
from topobus.engine.alignment.cpus.cpu_topology import CpuPlace, CpuTopology
from topobus.engine.allocation.values import Allocated, NoFit, Outcome
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.lifecycle import with_allocation
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.classic.classic_parameters import DeviceSelector
from topobus.formats.kubernetes.resource import GrantedDevice
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.slices import SlicePool, pool_devices, slice_plan
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER, group_of_class, pool_of_class
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.view import AlignmentOptions, CpuOptions, NodeAlignment

__all__ = [
    "DOORS",
    "MACHINES",
    "OPTIONS",
    "Compared",
    "compare",
    "grouped_inventory_of",
    "inventory_of",
    "machine_named",
]

NODE = "n1"
POOL = pool_of_class(NODE, "cpu")
CLASS = group_of_class("cpu")
_RECORDINGS = Path(__file__).parents[1] / "data" / "machines"

MACHINES = ("64amd64-4s2n4ca2co", "epyc-8numa", "gb200", "dgx", "256ia64-64n2s2c")
"""64, 128, 144, 224 and 256 CPUs; with and without SMT, with one and with several NUMA nodes a
socket."""

# Distribution tries combinations of NUMA nodes, up to 200,000 of them: seconds a claim on 64 nodes,
# where kubelet itself would not end.
_MANY_NODES = "256ia64-64n2s2c"

_NAMES = (
    "full_pcpus_only",
    "distribute_cpus_across_numa",
    "align_by_socket",
    "distribute_cpus_across_cores",
    "prefer_align_cpus_by_uncorecache",
    "strict_cpu_reservation",
)
OPTIONS = tuple(
    made
    for bits in range(1 << len(_NAMES))
    if not contradiction(made := CpuOptions(**{name: bool(bits >> place & 1) for place, name in enumerate(_NAMES)}))
)
"""All sets of options that kubelet takes."""


@cache
def machine_named(name: str) -> Machine:
    """Read a recorded machine, or one built from a profile."""
    with tempfile.TemporaryDirectory() as folder:
        recording = _RECORDINGS / f"{name}.tar.bz2"
        if recording.exists():
            with tarfile.open(recording) as archive:
                archive.extractall(folder, filter="tar", numeric_owner=True)
            (root,) = Path(folder).iterdir()
        else:
            root = build(name, Path(folder) / "machine").root
        return read_machine(Tree(HardwareSettings(root=str(root))), NODE)


@cache
def inventory_of(name: str) -> Inventory:
    """The machine's CPUs as the cpu service shows them."""
    with tempfile.TemporaryDirectory() as folder:
        cpus = LinuxCpuDriver().discover(Tree(HardwareSettings(root=folder)), machine_named(name)).devices
    return Inventory(
        node=NODE, device_class="cpu", generation=1, devices=tuple(sorted(cpus, key=lambda device: device.name))
    )


def grouped_inventory_of(name: str, groups: str) -> Inventory:
    """The machine's CPUs as the cpu service shows them in groups."""
    driver = LinuxCpuDriver()
    driver.configure(HostServices(cpus=convert({"groups": groups}, CpuGroupSettings)))
    devices = driver.discover(Tree(HardwareSettings(root="/nowhere")), machine_named(name)).devices
    return Inventory(node=NODE, device_class="cpu", generation=1, devices=tuple(devices))


class Door(Protocol):
    """One way of allocating claims."""

    async def ask(self, name: str, count: int) -> CpuSet | None:
        """Allocate a claim for so many CPUs; None is a refusal."""
        ...

    def release(self, name: str) -> None:
        """Let a claim go."""
        ...


class _StandAlone:
    """The stand-alone home: devices of inventories, claims of the store."""

    def __init__(self, machine: str, alignment: NodeAlignment) -> None:
        self.state = StandaloneState()
        _describe(self.state, machine, alignment)
        self.state.put_inventory(inventory_of(machine))
        no_bus: Any = None
        registry = CollectorRegistry()
        runtime = Runtime(
            name="controller", node="central", bus=no_bus, clock=ManualClock(), readiness=Readiness(), registry=registry
        )
        self.allocator = Allocator(
            ControllerSettings(), runtime, self.state, CelCompiler(), ControllerMetrics(registry)
        )

    async def ask(self, name: str, count: int) -> CpuSet | None:
        key, claim = ObjectKey("resourceclaim", "default", name), _claim(name, count)
        outcome = await self.allocator.search_on(NODE, [member(key, Stored(1, claim))])
        if isinstance(outcome, Allocated):
            self.state.put_object(key, Stored(2, with_allocation(claim, outcome.results[0], now="t")))
        return _cpus(outcome)

    def release(self, name: str) -> None:
        self.state.drop_object(ObjectKey("resourceclaim", "default", name))


class _Cluster:
    """The cluster's home: slices as gateways publish them, claims of the API server."""

    def __init__(self, machine: str, alignment: NodeAlignment) -> None:
        self.state = ApiServerState()
        _describe(self.state, machine, alignment)
        self.state.put_inventory(inventory_of(machine))
        self.state.put("Node", "v1", {"metadata": {"name": NODE, "resourceVersion": "1", "uid": "u-node"}})
        selector = {"selectors": [{"cel": {"expression": class_selector("cpu")}}]}
        self.state.put("DeviceClass", "v1", {"metadata": {"name": CLASS, "resourceVersion": "2"}, "spec": selector})
        for index, made in enumerate(
            slice_plan(SlicePool(POOL, "u-node"), pool_devices(inventory_of(machine), {}), ()).creates
        ):
            name = f"{made.metadata['generateName']}x"
            metadata = {**made.metadata, "name": name, "uid": f"u-{index}", "resourceVersion": str(3 + index)}
            self.state.put("ResourceSlice", "v1", {"metadata": metadata, "spec": to_builtins(made.spec)})
        self.version = 100
        settings, compiler = ControllerSettings(), CelCompiler()
        self.results = ResultCache(
            self.state.stock, lambda: self.state.node_names, lambda: self.state.classes, compiler, settings.mode
        )
        self.search = NodeSearch(
            settings, ManualClock(), self.state, self.results, compiler, ControllerMetrics(CollectorRegistry())
        )

    async def ask(self, name: str, count: int) -> CpuSet | None:
        claim = _claim(name, count)
        wanted = member(ObjectKey("resourceclaim", "default", name), Stored(1, claim))
        outcome, _ = await self.search.search_cached(
            NODE, [wanted], self.results.shape([wanted.spec]), {}, is_cheap=False
        )
        if isinstance(outcome, Allocated):
            done = with_allocation(claim, outcome.results[0], now="2026-01-01T00:00:00Z")
            self.version += 1
            metadata = {**done.metadata, "resourceVersion": str(self.version)}
            self.state.put("ResourceClaim", "v1", {"metadata": metadata, "spec": done.spec, "status": done.status})
        return _cpus(outcome)

    def release(self, name: str) -> None:
        self.state.drop("ResourceClaim", ("default", name))


class _Classic:
    """Classic DRA's way of choosing, on the stand-alone home's devices."""

    def __init__(self, machine: str, alignment: NodeAlignment) -> None:
        self.home = _StandAlone(machine, alignment)
        self.compiler = CelCompiler()

    async def ask(self, name: str, count: int) -> CpuSet | None:
        claim, state = _claim(name, count), self.home.state
        given = state.input_for(NODE, [(Claim(claim), structured_claim("cpus", count, DeviceSelector()))])
        chosen = choose(given, "cpu", {"cpus": structured_class("cpu", DeviceSelector())}, self.compiler)
        if isinstance(chosen, Refusal):
            return None
        granted = tuple(GrantedDevice(request="r", driver=DRIVER, pool=POOL, device=device) for device in chosen[0])
        results = {"devices": {"results": to_builtins(granted)}}
        done = structs.replace(claim, status={"allocation": results})
        state.put_object(ObjectKey("resourceclaim", "default", name), Stored(2, done))
        return CpuSet.of(int(device.removeprefix("cpu-")) for device in chosen[0])

    def release(self, name: str) -> None:
        self.home.release(name)


DOORS = {"stand-alone": _StandAlone, "cluster": _Cluster, "classic": _Classic}


def _describe(state: ClusterState, machine: str, alignment: NodeAlignment) -> None:
    state.put_machine(machine_named(machine))
    state.put_alignment(NODE, alignment)


def _claim(name: str, count: int) -> ApiObject:
    request = {"name": "r", "exactly": {"deviceClassName": CLASS, "allocationMode": "ExactCount", "count": count}}
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": f"uid-{name}"},
        spec={"devices": {"requests": [request]}},
    )


def _cpus(outcome: Outcome) -> CpuSet | None:
    if isinstance(outcome, NoFit):
        return None
    assert isinstance(outcome, Allocated), outcome
    return CpuSet.of(int(granted.device.removeprefix("cpu-")) for granted in outcome.results[0].devices.results)


def _policy(machine: Machine, options: CpuOptions, free: CpuSet, reserved: CpuSet, count: int) -> CpuSet | None:
    """Say what kubelet does: `validateSMTAlignment`, then the assignment without an affinity."""
    # Where the machine shows no L3 cache, kubelet takes the socket for one.
    topology = CpuTopology(
        CpuPlace(
            cpu.id, cpu.core or 0, cpu.socket or 0, cpu.numa_node, -1 - (cpu.socket or 0) if cpu.l3 is None else cpu.l3
        )
        for cpu in machine.cpus
        if cpu.online
    )
    if options.full_pcpus_only and (
        count % topology.threads_per_core or count > len(free - topology.siblings_of(reserved))
    ):
        return None
    return assign_cpus(topology, free - reserved, count, None, options)


@dataclass
class Compared:
    """What was compared."""

    sequences: int = 0
    picks: int = 0
    refusals: int = 0
    by_machine: Counter[str] = field(default_factory=Counter)
    by_door: Counter[str] = field(default_factory=Counter)


async def compare(sequences: int, *, seed: int = 0, steps: int = 12) -> Compared:
    """Run sequences of allocations and releases; each pick must be the policy's.

    Errors: raises AssertionError that names the sequence, the free CPUs and both answers.
    """
    compared = Compared()
    for number in range(sequences):
        random = Random(f"{seed}/{number}")
        name, door_name, options = random.choice(MACHINES), random.choice(list(DOORS)), random.choice(OPTIONS)
        if name == _MANY_NODES:
            options = structs.replace(options, distribute_cpus_across_numa=False)
        machine = machine_named(name)
        online = machine.online_cpus
        reserved = CpuSet.of(random.sample(list(online), random.choice([0, 0, 1, 2, 4])))
        alignment = NodeAlignment(node=NODE, options=AlignmentOptions(cpu=options), reserved_cpus=reserved)
        door: Door = DOORS[door_name](name, alignment)
        held: dict[str, CpuSet] = {}
        for step in range(steps):
            if held and random.random() < 0.4:
                gone = random.choice(sorted(held))
                del held[gone]
                door.release(gone)
                continue
            # A claim has 32 devices at most.
            count = random.choice([1, 2, 3, 4, random.randint(1, 32), 32])
            free = online - _union(held)
            wanted = _policy(machine, options, free, reserved, count)
            got = await door.ask(f"c{step}", count)
            assert got == wanted, (
                f"sequence {number} (seed {seed}), step {step}: {door_name} on {name}, {options}, reserved "
                f"{reserved}: {count} of {free}: got {got}, wanted {wanted}"
            )
            compared.picks += got is not None
            compared.refusals += got is None
            compared.by_door[door_name] += 1
            compared.by_machine[name] += 1
            if got is not None:
                held[f"c{step}"] = got
        compared.sequences += 1
    return compared


def _union(held: Mapping[str, CpuSet]) -> CpuSet:
    union = CpuSet()
    for cpus in held.values():
        union |= cpus
    return union


if __name__ == "__main__":
    began = time.monotonic()
    outcome_of_all = asyncio.run(compare(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    sys.stdout.write(f"{outcome_of_all} in {time.monotonic() - began:.0f} s\n")
