"""`topobus inventory`: the devices of one or all classes, with their place, health and holder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from msgspec import structs
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.fleet_inventories import list_inventories, unread_text
from topobus.cli.listing.list_options import LIST_DEFAULTS, Lister, ListOptions
from topobus.cli.listing.responding_services import as_of_now
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NodeFilter, one_of, one_of_classes, open_bus
from topobus.cli.render.device_listings import device_labels, device_listing, holder_of, summary_listing
from topobus.cli.render.listing import Listing, Row
from topobus.cli.render.output import Output
from topobus.engine.drawing.letters import holders_of
from topobus.formats.messages.catalogue import INVENTORY, LEDGER
from topobus.values.device import Device, Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger

__all__ = ["inventory", "no_device", "read_inventories", "read_ledgers", "selected"]


async def inventory(
    device_class: Annotated[
        str | None, Parameter(name="CLASS", help="gpu, nic, fpga, cpu or a plugin's class. Without it: a summary.")
    ] = None,
    /,
    *,
    of_class: Annotated[
        str | None, Parameter(name="--class", help="The same as CLASS, as `topobus health` has it.")
    ] = None,
    node: NodeFilter = None,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List devices: their place, health and holders."""
    if device_class is not None and of_class not in (None, device_class):
        raise UsageError(f"two classes are named: {device_class} and {of_class}", next_step="name one of them")
    device_class = device_class or of_class
    lister = listing.lister(is_json=options.json)
    read: list[Inventory] = []
    chosen: list[Inventory] = []
    ledgers: dict[str, Ledger] = {}
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            ledgers.update(await read_ledgers(bus))
            read[:] = await read_inventories(bus, node, device_class)
            chosen[:] = [selected(lister, each_inventory, ledgers.get(each_inventory.node)) for each_inventory in read]
            is_summary = device_class is None and lister.form in ("table", "wide", "name")
            if is_summary:
                with_devices = [each for each in chosen if each.devices or not lister.selector.requirements]
                return [summary_listing(with_devices, ledgers)]
            return [device_listing(each, holders_of(ledgers.get(each.node)), sums_up=lister.is_text) for each in chosen]

        rest = lister.without_selector()
        if lister.options.watch:
            return await rest.follow(bus, [(INVENTORY, {}), (LEDGER, {})], collect)
        listings = await collect()

    def document(rows: Sequence[Row]) -> Any:
        left: dict[tuple[str, str], list[Device]] = {}
        for row in rows:
            left.setdefault((row.document["node"], row.document["device_class"]), []).append(row.document["device"])
        return {
            "inventories": [
                structs.replace(each, devices=tuple(left.get((each.node, each.device_class), ())))
                for each in chosen
                if each.devices or not lister.selector.requirements
            ]
        }

    rest.show(
        listings,
        document,
        thing="device",
        empty=no_device(lister, read, ledgers) if lister.selector.requirements else "there are no devices",
    )
    if lister.is_text:
        for each_inventory in chosen:
            for warning in each_inventory.warnings:
                lister.output().show(Text(f"{each_inventory.node}: {each_inventory.device_class}: {warning}", "warn"))
    return ExitCode.OK


async def read_inventories(bus: Bus, node: str | None, device_class: str | None) -> list[Inventory]:
    """Read the inventories of a node and class as of now.

    Errors: raises UsageError that lists what exists, PeerUnavailable when none is published.
    """
    entries, unread = await list_inventories(bus)
    if node is not None and node in unread:
        entries, unread = await bus.list(INVENTORY, node=node), ()
    if unread:
        Output().note(f"{unread_text(unread)}; `--node` shows one")
    inventories = [entry.value for entry in entries]
    if not inventories:
        raise PeerUnavailable(
            "no device service has published an inventory", next_step="`topobus doctor` reports what is missing"
        )
    if node is not None:
        one_of("node", node, (each_inventory.node for each_inventory in inventories))
    if device_class is not None:
        one_of_classes(device_class, (each_inventory.device_class for each_inventory in inventories))
    return await as_of_now(
        bus,
        (
            each_inventory
            for each_inventory in inventories
            if node in (None, each_inventory.node) and device_class in (None, each_inventory.device_class)
        ),
    )


async def read_ledgers(bus: Bus) -> dict[str, Ledger]:
    """Read who holds what, by node."""
    return {entry.parts["node"]: entry.value for entry in await bus.list(LEDGER)}


def selected(lister: Lister, inventory: Inventory, ledger: Ledger | None) -> Inventory:
    """Keep the devices that the selector selects."""
    if not lister.selector.requirements:
        return inventory
    meant = (device for device, labels in _labelled(inventory, ledger) if lister.selector.selects(labels))
    return structs.replace(inventory, devices=tuple(meant))


def no_device(lister: Lister, inventories: Sequence[Inventory], ledgers: Mapping[str, Ledger]) -> str:
    """Return that the selector selects no device of all these."""
    return lister.no_match(
        "device", (labels for each in inventories for _, labels in _labelled(each, ledgers.get(each.node)))
    )


def _labelled(inventory: Inventory, ledger: Ledger | None) -> Iterable[tuple[Device, dict[str, str]]]:
    holders = holders_of(ledger)
    for device in inventory.devices:
        yield device, device_labels(inventory, device, holder_of(device, holders))
