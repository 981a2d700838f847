"""Listings on terminals of any width: nothing wider than the terminal, no word broken, ids whole,
an ellipsis wherever something was cut.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.printed import printed
from topobus.cli.commands.decisions import decision_listing
from topobus.cli.commands.device import withheld_listing
from topobus.cli.commands.nodeallocationstates import states_listing
from topobus.cli.commands.pods import pods_listing
from topobus.cli.render.device_listings import device_listing, health_listing, summary_listing
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.cli.render.tables import object_listing
from topobus.engine.drawing.letters import holders_of
from topobus.engine.ledger.classic_state import node_allocation_state
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import ApiObject, ContainerDevices, DecisionEvent, HeldDevice, PodsReply
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.values.device import Device, Inventory
from topobus.values.idset import NodeSet
from topobus.values.ledger import Ledger
from topobus.values.maintenance import DeviceVerb, Maintenance

WIDTHS = (60, 80, 100, 200)
T = TypeVar("T")

_RECORDED = Path(__file__).parents[2] / "data/listings/system.json"
_NOW = datetime(2026, 11, 24, 1, tzinfo=UTC)


@cache
def _recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return document


def _read(value: object, wanted: type[T]) -> T:
    return decode(json.dumps(value), wanted)


@cache
def _listings() -> dict[str, Listing]:
    """Every listing of the command line, of what a `topobus up` had stored."""
    recorded = _recorded()
    inventories = [_read(value, Inventory) for value in recorded["inventories"]]
    ledger = _read(recorded["ledgers"][0], Ledger)
    ledgers, holders = {ledger.node: ledger}, holders_of(ledger)
    objects = [_read(value, ApiObject) for value in recorded["objects"]]
    gpus = next(inventory for inventory in inventories if inventory.device_class == "gpu")
    container = ContainerDevices(
        namespace="machine-learning",
        pod="trainer-with-a-long-name-0",
        container="main",
        device_class="gpu",
        resource="topobus.dev/gpu",
        devices=tuple(HeldDevice(name=device.name) for device in gpus.devices),
    )
    maintenance = Maintenance(
        verb=DeviceVerb.MAINTAIN, why="the fan is loud, and it is hot", who="anna@host", since="2026-11-24T00:00:00Z"
    )
    withheld = ClassMaintenance(
        node=gpus.node, device_class="gpu", devices={device.name: maintenance for device in gpus.devices[:3]}
    )
    listings = {
        "inventory": summary_listing(inventories, ledgers),
        "health": health_listing(inventories, is_all=True, ledgers=ledgers)[0],
        "decisions": decision_listing([_read(value, DecisionEvent) for value in recorded["decisions"]], {}),
        "pods": pods_listing(gpus.node, PodsReply(containers=(container,))),
        "device list": withheld_listing([withheld], ledgers),
        "get nodeallocationstates": states_listing([node_allocation_state(ledger.node, inventories, ledger)]),
    }
    listings |= {f"inventory {inventory.device_class}": device_listing(inventory, holders) for inventory in inventories}
    for kind in sorted({api_object.kind for api_object in objects}):
        of_kind = [api_object for api_object in objects if api_object.kind == kind]
        listings[f"get {kind} -A"] = object_listing(kind, of_kind, now=_NOW, has_namespace=True)
    return listings


_NAMES = sorted(_listings())


def _pieces(text: str) -> set[str]:
    """What of a text may stand alone: what blanks and commas part."""
    return set(text.replace(",", " ").split())


def _check(listing: Listing, width: int) -> list[str]:
    """Hold a listing to the laws; gives its lines."""
    lines = [line.plain for line in listing.lines(width)]
    shown = [place for place, column in enumerate(listing.columns) if listing.is_wide or not column.is_wide]
    cells = {place: [part for row in listing.rows for part in str(row.cells[place]).split("\n")] for place in shown}
    ids = {part for place in shown if listing.columns[place].fit is Fit.ID for part in cells[place]}
    is_complete = not any("too narrow for" in line for line in lines)
    for line in lines:
        assert len(line) <= width or line in ids, line
        assert line == line.rstrip()
    for place in shown:
        if listing.columns[place].fit is Fit.ID or (listing.columns[place].fit is Fit.NAME and is_complete):
            for part in cells[place]:
                assert part == "-" or any(part in line for line in lines), part
    whole = _pieces(" ".join(part for parts in cells.values() for part in parts)) | _pieces(listing.title)
    titles = {word for place in shown for word in listing.columns[place].title.split()}
    for line in lines:
        if "too narrow for" not in line:
            assert _pieces(line) <= whole | titles | {f"{title}:" for title in titles}, line
    return lines


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", _NAMES)
def test_recorded_listing_keeps_the_laws_at_any_width(name: str, width: int) -> None:
    """No line is wider than the terminal, ids and names are whole, and the names of recorded data
    are never cut.
    """
    listing = _listings()[name]

    lines = _check(listing, width)

    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("name", _NAMES)
def test_wide_listing_has_more_than_the_table(name: str) -> None:
    """`-o wide` has columns of its own, in every listing."""
    listing = _listings()[name]

    assert any(column.is_wide for column in listing.columns)


@pytest.mark.parametrize("width", WIDTHS)
def test_printed_listing_is_what_was_laid_out(width: int) -> None:
    """Rich neither folds nor pads what the layout made."""
    listing = _listings()["get ResourceClaim -A"]

    assert printed(listing, width).splitlines() == [line.plain for line in listing.lines(width)]


_WORD = st.text("abc-0.", min_size=1, max_size=30)
_CELL = st.lists(_WORD, max_size=6).map(" ".join)


@st.composite
def _any_listing(draw: st.DrawFn) -> Listing:
    fits = draw(st.lists(st.sampled_from(list(Fit)), min_size=1, max_size=5))
    columns = tuple(Column(title=draw(_WORD), fit=fit, gives_way=draw(st.booleans())) for fit in fits)
    rows = draw(st.lists(st.tuples(*(_CELL if fit is Fit.TEXT else _WORD for fit in fits)), max_size=4))
    return Listing(columns=columns, rows=tuple(Row(cells=row) for row in rows))


@given(listing=_any_listing(), width=st.integers(20, 120))
def test_any_listing_stays_within_its_width(listing: Listing, width: int) -> None:
    """Whatever the columns: only an id may stand beyond the terminal's edge, alone on its line, and
    every id is there.
    """
    lines = [line.plain for line in listing.lines(width)]

    ids = {
        str(row.cells[place])
        for row in listing.rows
        for place, column in enumerate(listing.columns)
        if column.fit is Fit.ID
    }
    for line in lines:
        assert len(line) <= width or line in ids
    assert all(any(name in line for line in lines) for name in ids) or any("too narrow" in line for line in lines)


def test_cut_name_ends_with_an_ellipsis() -> None:
    """A name that is longer than the terminal is cut visibly."""
    listing = Listing(columns=(Column(title="name", fit=Fit.NAME),), rows=(Row(cells=("n" * 90,)),))

    assert [line.plain for line in listing.lines(60)] == ["n" * 59 + "…"]


def test_inventory_lists_cpus_by_numa_node_when_devices_come_in_another_order() -> None:
    """The rows of CPUs are in the order of NUMA nodes, whatever the order of the devices' names.

    CPUs of no known node come last.
    """
    homes = {0: NodeSet(10), 1: None, 10: NodeSet(2), 11: NodeSet(0)}
    cpus = tuple(Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, numa_nodes=home) for cpu, home in homes.items())

    listing = device_listing(Inventory(node="n", device_class="cpu", generation=1, devices=cpus), holders_of(None))

    assert [str(row.cells[0]) for row in listing.rows] == ["0", "2", "10", "?"]
