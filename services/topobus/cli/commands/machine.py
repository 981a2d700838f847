"""`topobus machine`: one machine as a drawing or as JSON, read from the bus or straight from a
hardware tree.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode, InputError
from topobus.cli.listing.responding_services import as_of_now
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus, the_node
from topobus.cli.pci_names import read_pci_names
from topobus.cli.render.machine_drawing import draw_machine
from topobus.cli.render.output import DRAWING_WIDTH
from topobus.cli.render.picture import recording_console, save_picture
from topobus.engine.drawing.leaves import PciIds
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE
from topobus.sysfs.kernel_names import read_kernel_names
from topobus.sysfs.machine import read_machine
from topobus.sysfs.report import machine_report
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.pci import PciAddress

__all__ = ["machine", "names_in", "node_state", "read_tree"]


async def machine(
    *,
    root: Annotated[
        Path | None,
        Parameter(
            name=("--root", "--machine"),
            help="Read this hardware tree (a folder with sys and proc; / is this machine) instead of the bus; or "
            "a profile, an archive, JSON, as for simulate.",
        ),
    ] = None,
    node: Annotated[str | None, Parameter(help="The node; needed only where several report.")] = None,
    svg: Annotated[Path | None, Parameter(help="Also save the drawing as a picture.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Draw a machine: sockets, NUMA nodes, CPUs, PCI switches and devices, and who holds what."""
    output = options.output()
    description, inventories, ledger = _read(root) if root is not None else await _ask(options, node)
    models = read_pci_names(description.pci_devices, *([root] if root is not None else []), Path("/"))
    kernel_names = names_in(root, description) if root is not None else {}
    if output.is_json:
        output.document(machine_report(description, kernel_names, models))
    names: dict[PciIds | PciAddress, str] = {address: ",".join(kernel) for address, kernel in kernel_names.items()}
    names.update(models.items())
    output.show(draw_machine(description, inventories, ledger, width=output.console.width, names=names))
    if svg is not None:
        picture = recording_console(
            max(output.console.width, DRAWING_WIDTH) if output.console.is_terminal else DRAWING_WIDTH
        )
        picture.print(draw_machine(description, inventories, ledger, width=picture.width, names=names))
        save_picture(picture, svg, title=f"topobus machine --node {description.node}")
    return ExitCode.OK


def names_in(root: Path, description: Machine) -> dict[PciAddress, tuple[str, ...]]:
    """Read the kernel's names of the devices behind a tree's functions.

    Empty if `root` is no folder.
    """
    if not (root / "sys").is_dir():
        return {}
    functions = [function.address for function in description.pci_devices if not function.is_bridge]
    return read_kernel_names(Tree(HardwareSettings(root=str(root))), functions)


def _read(root: Path) -> tuple[Machine, tuple[Inventory, ...], Ledger | None]:
    """Read a folder as it is.

    For a profile, an archive or a snapshot, the devices that the drivers find are included.
    """
    if root.is_dir():
        return read_tree(root), (), None
    from topobus.cli.simulation.node import open_machine  # imports all drivers, needless for a folder

    with open_machine(str(root)) as node:
        return node.snapshot.machine, node.snapshot.inventories, None


def read_tree(root: Path) -> Machine:
    """Read a machine from a folder that holds `sys` (and `proc`).

    Errors: raises InputError when there is no such folder.
    """
    if not (root / "sys").is_dir():
        raise InputError(
            f"{root} has no folder sys in it",
            next_step="give the folder that holds sys and proc, such as / for this machine",
        )
    return read_machine(
        Tree(HardwareSettings(root=str(root))),
        node=socket.gethostname().lower() if str(root) == "/" else root.absolute().name,
    )


async def node_state(bus: Bus, node: str) -> tuple[Machine, tuple[Inventory, ...], Ledger | None]:
    """Read all that a drawing needs of one node.

    Errors: raises PeerUnavailable when the node reports no machine.
    """
    entry = await bus.get(MACHINE, node=node)
    if entry is None:
        raise PeerUnavailable(f"node {node} reports no machine", next_step="is topobus-discovery running there?")
    inventories = await as_of_now(bus, [each_entry.value for each_entry in await bus.list(INVENTORY, node=node)])
    ledger = await bus.get(LEDGER, node=node)
    return entry.value, tuple(inventories), ledger.value if ledger else None


async def _ask(options: BusOptions, node: str | None) -> tuple[Machine, tuple[Inventory, ...], Ledger | None]:
    async with open_bus(options) as bus:
        return await node_state(bus, await the_node(bus, node))
