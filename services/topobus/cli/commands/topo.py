"""`topobus topo`: how the devices of a node reach each other, as a matrix, from the bus or straight
from a hardware tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.commands.machine import names_in, node_state
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of_classes, open_bus, the_node
from topobus.cli.render.output import Output
from topobus.cli.render.path_matrix import matrix_lines
from topobus.cli.simulation.node import open_machine
from topobus.engine.drawing.leaves import short_address
from topobus.engine.drawing.path_matrix import PathMatrix, path_matrix
from topobus.values.device import Inventory
from topobus.values.machine import Machine

__all__ = ["topo"]


async def topo(
    *,
    device_class: Annotated[
        tuple[str, ...],
        Parameter(
            name="--class", help="Only devices of this class: gpu, nic, fpga, or a plugin's. Default: all but CPUs."
        ),
    ] = (),
    machine: Annotated[
        str | None,
        Parameter(
            name=("--machine", "--root"),
            help="Read this hardware tree (a folder with sys and proc; / is this machine) instead of the bus; or a "
            "profile (dgx, gb200 …), an archive of a tree, or JSON saved by `simulate --save`.",
        ),
    ] = None,
    node: Annotated[str | None, Parameter(help="The node; needed only where several report.")] = None,
    output: Annotated[Literal["table", "json"], Parameter(name=("--output", "-o"), help="How to print.")] = "table",
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show how devices reach each other, as `nvidia-smi topo -m` does for GPUs and NICs: NV#, PIX,
    PXB, PHB, NODE, SYS, with CPU and NUMA affinity.
    """
    out = Output(is_json=options.json or output == "json")
    if machine is None:
        description, inventories = await _ask(options, node)
    else:
        if node is not None:
            raise UsageError(
                "--node names a node of a running system, and --root or --machine a machine",
                next_step="leave one of them out",
            )
        with open_machine(machine) as opened:
            description, inventories = opened.snapshot.machine, opened.snapshot.inventories
            for warning in (*opened.warnings, *description.warnings):
                out.note(f"warning: {warning}")
    device_classes = [inventory.device_class for inventory in inventories]
    for name in device_class:
        one_of_classes(name, device_classes)
    matrix = path_matrix(description, inventories, device_class)
    out.document(_document(matrix))
    if matrix.devices:
        out.show(*matrix_lines(matrix, out.console.width))
    else:
        what = " or ".join(device_class) or "device other than CPUs"
        out.show(Text(f"{description.node} has no {what}", "faint"))
        names = names_in(Path(machine), description) if machine is not None else {}
        for inventory in inventories:
            for kept in inventory.kept if inventory.device_class in (device_class or device_classes) else ():
                address = " ".join((short_address(str(kept.pci)), *names.get(kept.pci, ())))
                out.show(Text(f"{inventory.device_class} {address} is not offered: {kept.why or kept.role}", "faint"))
    return ExitCode.OK


async def _ask(options: BusOptions, node: str | None) -> tuple[Machine, Sequence[Inventory]]:
    async with open_bus(options) as bus:
        description, inventories, _ = await node_state(bus, await the_node(bus, node))
        return description, inventories


def _document(matrix: PathMatrix) -> dict[str, object]:
    return {
        "node": matrix.node,
        "devices": [
            {
                "id": device.id,
                "class": device.device_class,
                "name": device.name,
                "model": device.model,
                "interface": device.interface,
                "pci": device.pci,
                "cpuAffinity": str(device.cpu_affinity),
                "numaAffinity": str(device.numa_affinity),
                "gpuNumaId": device.gpu_numa_id,
            }
            for device in matrix.devices
        ],
        "matrix": {
            device.id: {other.id: word for other, word in zip(matrix.devices, row, strict=True)}
            for device, row in zip(matrix.devices, matrix.words, strict=True)
        },
        "legend": matrix.legend,
    }
