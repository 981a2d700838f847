"""Measures the alignment engine: `python -m lab.bench merge [--json] [--plot FILE.svg]`.

Each case builds its hints again in every round, so generation counts, and reports median, 99th
percentile and the budget, in milliseconds. No test depends on these times: they are printed, and a
person (or CI's log) compares. `--plot` draws how the worst merge grows with NUMA nodes and
resources.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lab.bench.figures import Figure, draw_figure, figure
from lab.line_charts import Line, Panel, draw_charts
from topobus.engine.alignment.cpus.cpu_hints import cpu_rule
from topobus.engine.alignment.devices.device_choice import choose_devices
from topobus.engine.alignment.devices.device_hints import device_rule
from topobus.engine.alignment.devices.proximity import site_of
from topobus.engine.alignment.memory.memory_rule import MemoryAmount, MemoryNode, memory_rule
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.engine.alignment.merge.hint_rule import HintRule
from topobus.engine.alignment.planning.placement import place
from topobus.values.device import Device, Link
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.pci import PciAddress
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy
from topobus.values.view import AlignmentOptions, CoreView, NodeView

__all__ = ["main"]

_ROUNDS = 200
_LIMIT_S = 2.0
"""A case stops after so long, however few rounds it made."""


class Case(NamedTuple):
    """One thing to measure."""

    name: str
    run: Callable[[], object]
    budget_ms: float | None = None


def main(argv: Sequence[str]) -> int:
    """Measure the cases and print them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench merge", description="Measure the alignment engine.")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth as SVG")
    arguments = parser.parse_args(argv)
    measured = [measure(case) for case in merge_cases()]
    if arguments.json:
        print(json.dumps({"group": "merge", "cases": [each.as_row() for each in measured]}, indent=2))
    else:
        print("\n".join(map(draw_figure, measured)))
    if arguments.plot:
        arguments.plot.write_text(_plot(), encoding="utf-8")
    return 0


def measure(case: Case) -> Figure:
    """Run a case until there are enough rounds or the time is up."""
    case.run()
    spent_s: list[float] = []
    began = time.perf_counter()
    while len(spent_s) < _ROUNDS and time.perf_counter() - began < _LIMIT_S:
        start = time.perf_counter()
        case.run()
        spent_s.append(time.perf_counter() - start)
    return figure(case.name, spent_s, budget=case.budget_ms)


def merge_cases() -> tuple[Case, ...]:
    """The cases with budgets, and how far beyond them the engine goes."""
    view, request = _dgx(), _request()
    gpus = [_gpu(place) for place in range(16)]
    sites = {gpu.name: site_of(gpu, {node: 1 << node // 4 for node in range(8)}) for gpu in gpus}
    return (
        Case("merge 8 nodes x 4 resources, no preferred hint", worst_merge(8, 4), budget_ms=2.0),
        Case("merge 16 nodes x 5 resources, no preferred hint", worst_merge(16, 5), budget_ms=20.0),
        Case(
            "merge 16 nodes x 5 resources, no preferred, closest",
            worst_merge(16, 5, is_closest=True),
            budget_ms=20.0,
        ),
        Case("merge 8 nodes x 4 resources, preferred hint", worst_merge(8, 4, is_busy=False)),
        Case("merge of listed hints, 8 nodes x 4 resources, no preferred", listed_merge(8, 4), budget_ms=2.0),
        Case("merge GB200-like, 36 nodes x 6 resources", gb200_merge(), budget_ms=5.0),
        Case("merge 8 nodes: CPUs, devices, memory, huge pages", memory_merge(8), budget_ms=2.0),
        Case("merge 16 nodes: CPUs, devices, memory, huge pages", memory_merge(16), budget_ms=20.0),
        Case("merge 64 nodes x 4 resources, no preferred hint", worst_merge(64, 4)),
        Case("place 16 CPUs, 2 GPUs, 2 NICs on the 8-GPU machine", lambda: place(view, request), budget_ms=1.0),
        *(
            Case(
                f"choose {count} of 16 linked devices",
                partial(choose_devices, gpus, sites, count),
                budget_ms=5.0,
            )
            for count in (1, 2, 4, 8, 9, 12)
        ),
    )


def worst_merge(nodes: int, resources: int, *, is_busy: bool = True, is_closest: bool = False) -> Callable[[], object]:
    """Hints for CPUs and device classes on a busy machine where every resource needs another width,
    so that nothing is preferred.
    """
    everything = NodeSet.of(range(nodes))
    cpus = {node: CpuSet.of(range(node * 28, node * 28 + 28)) for node in range(nodes)}
    free = CpuSet.of(
        cpu for node in range(nodes) for cpu in range(node * 28, node * 28 + (4 + node * 7 % 20 if is_busy else 28))
    )
    classes = []
    for kind in range(resources - 1):
        per_node = 4 + kind
        devices = [
            Device(name=f"d{kind}-{node}-{place}", device_class=f"class-{kind}", numa_nodes=NodeSet(node))
            for node in range(nodes)
            for place in range(per_node)
        ]
        names = {
            f"d{kind}-{node}-{place}"
            for node in range(nodes)
            for place in range(per_node)
            if not is_busy or place <= (node * 5 + kind) % per_node
        }
        classes.append((devices, names, 6 + 3 * kind if is_busy else 1))
    distances = [
        [10 if index == other else 20 + abs(index - other) for other in range(nodes)] for index in range(nodes)
    ]

    def run() -> object:
        opinions: list[HintRule | None] = [cpu_rule(cpus, free, 40 if is_busy else 16)]
        opinions += [device_rule(devices, names, count, everything) for devices, names, count in classes]
        return merge_hints(opinions, everything, Policy.BEST_EFFORT, distances=distances, prefer_closest=is_closest)

    return run


def listed_merge(nodes: int, resources: int) -> Callable[[], object]:
    """Every mask of every resource as an explicit hint, none preferred: kubelet's own worst case
    (lists made beforehand).
    """
    everything = NodeSet.of(range(nodes))
    hints = tuple(Hint(NodeSet.from_bits(mask), preferred=False) for mask in range(1, 1 << nodes))
    return lambda: merge_hints([hints] * resources, everything, Policy.BEST_EFFORT)


def gb200_merge() -> Callable[[], object]:
    """Two CPU nodes with four GPUs, and 34 memory-only nodes.

    CPUs, GPUs, NICs, memory and two sizes of huge pages.
    """
    everything = NodeSet.of(range(36))
    cpus = {node: CpuSet.of(range(node * 72, node * 72 + 72)) for node in range(2)}
    devices = {
        name: [Device(name=f"{name}-{index}", device_class=name, numa_nodes=NodeSet(index // 2)) for index in range(4)]
        for name in ("gpu", "nic")
    }

    kinds = (("memory", 480, 96), ("hugepages-2Mi", 64, 8), ("hugepages-1Gi", 32, 4))
    nodes = [
        MemoryNode(
            id=node,
            group=NodeSet(node),
            amounts={
                kind: MemoryAmount(allocatable=big if node < 2 else small, free=big // 2 if node < 2 else small)
                for kind, big, small in kinds
            },
        )
        for node in range(36)
    ]

    def run() -> object:
        opinions: list[HintRule | None] = [
            cpu_rule(cpus, CpuSet.parse("0-39,72-101"), 60),
            device_rule(devices["gpu"], {"gpu-0", "gpu-2", "gpu-3"}, 2, everything),
            device_rule(devices["nic"], {"nic-1", "nic-2", "nic-3"}, 3, everything),
        ]
        # kubelet lists the same hints once for each kind of memory.
        memory = memory_rule(nodes, {"memory": 700, "hugepages-2Mi": 90, "hugepages-1Gi": 40})
        return merge_hints([*opinions, memory, memory, memory], everything, Policy.BEST_EFFORT)

    return run


def memory_merge(nodes: int) -> Callable[[], object]:
    """CPUs, two device classes, memory and huge pages on a busy machine, some nodes of which are in
    use already, alone or in a group.
    """
    everything = NodeSet.of(range(nodes))
    cpus = {node: CpuSet.of(range(node * 28, node * 28 + 28)) for node in range(nodes)}
    free = CpuSet.of(cpu for node in range(nodes) for cpu in range(node * 28, node * 28 + 4 + node * 7 % 20))
    devices = [Device(name=f"d-{node}", device_class="gpu", numa_nodes=NodeSet(node)) for node in range(nodes)]
    memory_nodes = [
        MemoryNode(
            id=node,
            assignments=int(node < 3),
            group=NodeSet(0, 1) if node < 2 else NodeSet(node),
            amounts={
                kind: MemoryAmount(allocatable=size, free=size - node * step)
                for kind, size, step in (("memory", 256, 3), ("hugepages-2Mi", 64, 2))
            },
        )
        for node in range(nodes)
    ]

    def run() -> object:
        memory = memory_rule(memory_nodes, {"memory": 700, "hugepages-2Mi": 100})
        opinions = [
            cpu_rule(cpus, free, 40),
            device_rule(devices, {device.name for device in devices[1:]}, 2, everything),
            memory,
            memory,
        ]
        return merge_hints(opinions, everything, Policy.BEST_EFFORT)

    return run


def _dgx() -> NodeView:
    cores = tuple(
        CoreView(cpus=CpuSet(core, core + 112), numa_node=core // 56, socket=core // 56, l3=core // 56 * 56)
        for core in range(112)
    )
    devices = {
        name: tuple(
            Device(
                name=f"{name}-{index}",
                device_class=name,
                numa_nodes=NodeSet(index // 4),
                pcie_root=f"pci0000:{index // 2}0",
                pcie_switch=PciAddress(0, index // 2 * 16, 0, 0),
                links=tuple(Link(peer=f"gpu-{peer}", bandwidth_gbps=900.0) for peer in range(8) if peer != index)
                if name == "gpu"
                else (),
            )
            for index in range(8)
        )
        for name in ("gpu", "nic")
    }
    return NodeView(
        node="bench",
        options=AlignmentOptions(policy=Policy.RESTRICTED),
        numa_nodes=NodeSet(0, 1),
        distances=((10, 21), (21, 10)),
        cores=cores,
        devices=devices,
    )


def _request() -> PodRequest:
    devices = tuple(DeviceRequest(device_class=name, count=2) for name in ("gpu", "nic"))
    owner = Owner(kind=OwnerKind.POD, name="bench", uid="bench")
    return PodRequest(owner=owner, containers=(ContainerRequest(name="main", cpus=16, devices=devices),))


def _gpu(place: int) -> Device:
    switch = place // 2
    return Device(
        name=f"gpu-{place:02d}",
        device_class="gpu",
        numa_nodes=NodeSet(switch // 2),
        pcie_root=f"root-{switch}",
        pcie_switch=PciAddress(0, switch + 1, 0, 0),
        links=tuple(
            Link(peer=f"gpu-{peer:02d}", bandwidth_gbps=float(25 * (1 + (place * 7 + peer * 7 + place * peer) % 12)))
            for peer in range(16)
            if peer != place
        ),
    )


def _plot() -> str:
    """Draw median against nodes, one line per number of resources."""
    sizes = (2, 4, 8, 12, 16, 24, 32, 48, 64)
    lines = [
        Line(f"{many} resources", colour, [(size, measure(Case("", worst_merge(size, many))).value) for size in sizes])
        for many, colour in ((2, "#2a7"), (4, "#27c"), (6, "#c52"))
    ]
    title = "worst merge with its hints, median (ms)"
    return draw_charts([Panel(title=title, axis="NUMA nodes", lines=lines, is_logarithmic=True)])
