"""The table of a fleet in `topobus top`: its rows, what keys do to it, and its screen."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from topobus.bus.bus import Change, ChangeKind
from topobus.cli.render.output import THEME
from topobus.cli.top.fleet import CountedDevice, CountedInventory, Fleet, Rank, is_shown
from topobus.cli.top.fleet_screen import fleet_lines, fleet_screen, page_of, shown_rows
from topobus.cli.top.keys import Key, Press
from topobus.cli.top.screen import Palette, help_screen
from topobus.cli.top.view import View, press, window
from topobus.formats.messages.messages import ApiObject
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

_PALETTE = Palette(Console(file=io.StringIO(), theme=THEME))
_KEPT = Maintenance(verb=DeviceVerb.MAINTAIN, who="ada", why="fans", since="2026-01-01T00:00:00Z")


def _put(value: Any, **parts: str) -> Change[Any]:
    return Change(kind=ChangeKind.PUT, parts=parts, revision=1, value=value)


def _gone(kind: ChangeKind, /, **parts: str) -> Change[Any]:
    return Change(kind=kind, parts=parts, revision=2, value=None)


def _sick(state: HealthState, reason: str) -> DeviceHealth:
    return DeviceHealth(state=state, conditions=(Condition(dimension=Dimension.PRESENCE, state=state, reason=reason),))


def _add(fleet: Fleet, node: str, count: int = 2, device_class: str = "gpu", **fields: Any) -> None:
    """Add an inventory whose first device is as the fields say."""
    devices = tuple(
        CountedDevice(name=f"{device_class}-{number}", **(fields if number == 0 else {})) for number in range(count)
    )
    inventory = CountedInventory(node=node, device_class=device_class, devices=devices)
    fleet.take_inventory(_put(inventory, node=node, device_class=device_class))


def _hold(fleet: Fleet, node: str, *names: str) -> None:
    owner = Owner(kind=OwnerKind.POD, name="trainer", uid="1")
    holding = Holding(container="main", devices={"gpu": names})
    fleet.take_ledger(
        _put(Holders(node=node, allocations={owner.key: Allocation(owner=owner, holdings=(holding,))}), node=node)
    )


def _fleet() -> Fleet:
    """Make one node of each kind, named against the order in which they are to stand."""
    fleet = Fleet()
    _add(fleet, "a10")
    _add(fleet, "a9")
    _add(fleet, "b-full")
    _hold(fleet, "b-full", "gpu-0", "gpu-1", "gpu-of-another-time")
    _add(fleet, "c-kept", maintenance=_KEPT)
    _add(fleet, "d-silent")
    fleet.take_alignment(_put(NodeAlignment(node="d-silent", unheard_classes={"gpu": "09:00"}), node="d-silent"))
    _add(fleet, "e-sick", health=_sick(HealthState.UNHEALTHY, "fell-off-bus"))
    _add(fleet, "e-sick", device_class="nic", health=_sick(HealthState.DEGRADED, "slow-link"))
    fleet.is_settled = True
    return fleet


def test_rows_stand_by_what_is_wrong_when_nodes_differ() -> None:
    """Unhealthy, unknown, not well, full, and the others by name with their numbers as numbers.

    Each says what is worst.
    """
    rows = _fleet().rows

    assert [(row.node, row.rank, row.sick, row.why) for row in rows] == [
        ("e-sick", Rank.UNHEALTHY, 2, "gpu-0 fell-off-bus and 1 more"),
        ("d-silent", Rank.UNKNOWN, 0, "gpu service silent"),
        ("c-kept", Rank.UNWELL, 1, "gpu-0 under maintenance"),
        ("b-full", Rank.FULL, 0, "no gpu free"),
        ("a9", Rank.WELL, 0, ""),
        ("a10", Rank.WELL, 0, ""),
    ]
    full = rows[3].uses[0]
    assert (full.used, full.total, full.free) == (2, 2, 0)


def test_spare_is_not_free_and_no_trouble() -> None:
    """With the other device held the node is full."""
    fleet = Fleet()
    _add(fleet, "n", is_spare=True)
    _hold(fleet, "n", "gpu-1")

    (row,) = fleet.rows
    assert (row.rank, row.sick, row.uses[0].free) == (Rank.FULL, 0, 0)


def test_rows_follow_changes_when_something_comes_or_goes() -> None:
    """What heals, is let go, is deleted or begins anew is so in the rows at once."""
    fleet = _fleet()
    _add(fleet, "e-sick")
    fleet.take_inventory(_gone(ChangeKind.DELETE, node="e-sick", device_class="nic"))
    fleet.take_ledger(_gone(ChangeKind.DELETE, node="b-full"))
    fleet.take_inventory(_gone(ChangeKind.DELETE, node="c-kept", device_class="gpu"))
    fleet.take_alignment(_gone(ChangeKind.DELETE, node="d-silent"))
    after = [(row.node, row.rank) for row in fleet.rows]
    fleet.take_inventory(_gone(ChangeKind.RESET))

    assert after == [(node, Rank.WELL) for node in ("a9", "a10", "b-full", "d-silent", "e-sick")]
    assert fleet.rows == ()


def test_topology_is_silent_when_it_has_said_nothing_for_long() -> None:
    """By its own word on how often it speaks; a bus that was away is no silence."""
    now = 0.0
    fleet = Fleet(lambda: now)
    _add(fleet, "n1")
    fleet.take_alignment(_put(NodeAlignment(node="n1"), node="n1"))
    at_first = fleet.listen()
    now = 200.0
    away = fleet.listen(is_connected=False)
    now = 400.0
    late = fleet.listen()

    assert (at_first, away, late) == (False, False, True)
    assert [(row.rank, row.why) for row in fleet.rows] == [(Rank.UNKNOWN, "topology silent")]


def test_nodes_without_a_machine_are_left_out_when_there_are_many() -> None:
    """A few are late; more than that are somebody's invention, and are counted.

    A node whose services have said nothing yet has a row.
    """
    fleet = Fleet()
    for number in range(20):
        _add(fleet, f"ghost-{number}")
    _add(fleet, "n1")
    before = len(fleet.rows)
    is_news = fleet.know_members(["n1", "n2"])

    assert before == 21
    assert is_news
    assert not fleet.know_members(["n1", "n2"])
    assert [row.node for row in fleet.rows] == ["n1", "n2"]
    assert len(fleet.strangers) == 20


def test_waiting_is_counted_by_reason_and_at_its_node_when_it_has_one() -> None:
    """Pods and claims that are served, over or being deleted do not wait."""
    fleet = Fleet()
    _add(fleet, "n1")

    def put(kind: str, name: str, spec: dict[str, Any], status: dict[str, Any], **metadata: str) -> None:
        value = ApiObject(
            api_version="v1", kind=kind, metadata={"name": name, "generation": 1, **metadata}, spec=spec, status=status
        )
        fleet.take_object(_put(value, kind=kind.lower(), namespace="default", name=name))

    refused = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "NoDevices", "observedGeneration": 1}]
    }
    put("Pod", "bound", {"nodeSelector": {"kubernetes.io/hostname": "n1"}}, refused)
    put("Pod", "free", {"nodeSelector": 7}, {})
    put("Pod", "over", {}, {"phase": "Succeeded"})
    put("ResourceClaim", "going", {}, {}, deletionTimestamp="2026-01-01T00:00:00Z")
    put("ResourceClaim", "served", {}, {"allocation": {"devices": {}}})
    put("ResourceClaim", "new", {}, {})
    put("DeviceClass", "gpu", {}, {})
    shown = {kind: dict(reasons) for kind, reasons in fleet.unplaced.items()}
    waits = fleet.rows[0].waits
    fleet.take_object(_gone(ChangeKind.DELETE, kind="pod", namespace="default", name="bound"))

    assert shown == {"pod": {"NoDevices": 1, "not looked at yet": 1}, "claim": {"not looked at yet": 1}}
    assert (waits, fleet.rows[0].waits) == (1, 0)


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ("", 6),
        ("sick", 2),
        ("unhealthy", 1),
        ("FELL-off", 1),
        ("gpu:sick", 2),
        ("nic", 1),
        ("nic:degraded !gpu:full", 1),
        ("kept-back", 1),
        ("silent", 1),
        ("full", 1),
        ("well", 3),
        ("!sick !silent", 3),
        ("a !a10", 2),
        ("nowhere", 0),
        ("!", 6),
    ],
)
def test_filter_finds_names_classes_and_states(wanted: str, nodes: int) -> None:
    """All words must fit, and `!` turns one round."""
    assert sum(is_shown(row, wanted) for row in _fleet().rows) == nodes


_NODES = [f"n{number}" for number in range(30)]


def _keys(view: View, *keys: Key | str, nodes: list[str] | None = None, has_fleet: bool = True) -> View:
    for key in keys:
        pressed = Press(key) if isinstance(key, Key) else Press(None, key)
        view = press(view, pressed, _NODES if nodes is None else nodes, page=10, has_fleet=has_fleet)
    return view


def test_keys_move_the_selection_and_stop_at_the_ends() -> None:
    """By row, by screen, to the first and the last; nothing goes beyond."""
    assert _keys(View(), Key.DOWN, Key.DOWN, Key.UP).selected == "n1"
    assert _keys(View(), Key.UP).selected == "n0"
    assert _keys(View(), Key.PAGE_DOWN).selected == "n9"
    assert _keys(View(), Key.LAST, Key.DOWN).selected == "n29"
    assert _keys(View(), Key.LAST, Key.PAGE_UP, Key.HOME).selected == "n0"
    assert _keys(View(), Key.DOWN, nodes=[]) == View()


def test_selection_stays_with_its_node_when_the_order_changes_or_it_goes() -> None:
    """The row that somebody looks at is theirs; when it is gone its neighbour is."""
    view = _keys(View(), Key.DOWN, Key.DOWN)

    assert _keys(view, Key.DOWN, nodes=["n9", "n2", "n5"]).selected == "n5"
    assert _keys(view, Key.ENTER, nodes=["n0", "n1", "n3", "n4"]).opened == "n3"


def test_enter_opens_a_node_and_escape_goes_back_to_its_row() -> None:
    """Arrows show the neighbours of the table.

    Who came from the table goes back to it, and a program of one node has none.
    """
    opened = _keys(View(), Key.DOWN, Key.ENTER, Key.DOWN)
    there = _keys(opened, Key.RIGHT)

    assert (opened.opened, opened.scroll) == ("n1", 1)
    assert (there.opened, there.scroll, _keys(there, Key.LEFT, Key.LEFT, Key.LEFT).opened) == ("n2", 0, "n29")
    assert (_keys(there, Key.BACK).opened, _keys(there, Key.BACK).selected) == ("", "n2")
    assert _keys(opened, Key.BACK, has_fleet=False).opened == "n1"
    assert _keys(opened, Key.HELP, Key.QUIT).is_ended is False
    assert _keys(opened, Key.QUIT).is_ended


def test_letters_are_a_filter_while_it_is_typed() -> None:
    """Nothing that is typed is a command.

    Enter keeps it, Esc leaves what was, and once more takes that away.
    """
    view = View()
    for pressed in (Press(Key.FILTER, "/"), Press(Key.QUIT, "q"), Press(Key.UP, "k"), Press(Key.ERASE)):
        view = press(view, pressed, _NODES, page=10, has_fleet=True)
    kept = _keys(view, Key.ENTER)

    assert (view.typed, view.wanted, view.is_ended) == ("q", "q", False)
    assert (kept.filter, kept.typed) == ("q", None)
    assert _keys(kept, Key.FILTER, "x", Key.BACK).filter == "q"
    assert _keys(kept, Key.FILTER, Key.ERASE, Key.ERASE).filter == ""
    assert _keys(kept, Key.BACK).filter == ""
    assert _keys(view, Key.END).is_ended


@pytest.mark.parametrize("has_many", [False, True])
@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (60, 20), (40, 10), (120, 50), (200, 60), (30, 5), (20, 3), (20, 1)]
)
def test_table_is_as_large_as_the_terminal(width: int, height: int, has_many: bool) -> None:
    """As many lines as there are, none wider, the selected row among them, wherever it is."""
    fleet = _fleet()
    for number in range(1000 if has_many else 0):
        _add(fleet, f"a-node-with-a-rather-long-name-{number:04}", count=8)
    nodes = [row.node for row in fleet.rows]
    for key in (Key.HOME, *[Key.PAGE_DOWN] * 4, Key.LAST, Key.PAGE_UP):
        view = press(View(), Press(key), nodes, page=page_of(height), has_fleet=True)

        screen, after = fleet_screen(fleet, shown_rows(fleet, view), view, width, height, _PALETTE)

        assert len(screen.lines) == height
        assert max(map(len, screen.lines)) <= width
        assert height < 8 or [line for line in screen.lines if line.startswith("> ")]
        assert after.selected == view.selected


def test_table_says_how_many_more_there_are_and_how_it_is_sorted() -> None:
    """A window of a thousand rows tells what is above and below it, and which columns it has no
    room for.
    """
    fleet = _fleet()
    for number in range(994):
        _add(fleet, f"node-{number}")
    _add(fleet, "node-0", device_class="a-class-of-a-long-name")
    last = press(View(), Press(Key.LAST), [row.node for row in fleet.rows], page=15, has_fleet=True)

    top = fleet_screen(fleet, fleet.rows, View(), 60, 24, _PALETTE)[0].lines
    bottom = fleet_screen(fleet, fleet.rows, last, 60, 24, _PALETTE)[0].lines

    assert top[0].startswith("topobus top  1,000 nodes, 3 not well, 1 full")
    assert any(line.startswith("used/total; not well first, then full, then by name") for line in top)
    assert "too narrow for: a-class-of-a-long-name, nic" in top
    assert (top[-2].split(), bottom[-2].split()) == (["…", "983", "more"], ["…", "983", "above"])


def test_window_shows_the_rest_when_the_list_is_short() -> None:
    """Nothing is scrolled away for which there is room."""
    assert window(10, 2, 5, 20) == 0


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 50)])
def test_help_fits_and_scrolls_when_the_terminal_is_small(width: int, height: int) -> None:
    """Every line of it can be reached, and none is wider."""
    seen: list[str] = []
    for scroll in range(0, 200, max(height - 1, 1)):
        screen = help_screen(scroll, width, height, _PALETTE)
        seen += screen.lines

        assert len(screen.lines) == height
        assert max(map(len, screen.lines)) <= width
    text = "".join("".join(seen).split())
    assert [word for word in ("Enterkeepsit", "Ctrl-L", "waits") if word not in text] == []


def test_table_is_whole_when_it_is_printed_once() -> None:
    """Every node has its row."""
    lines = [line.plain for line in fleet_lines(_fleet(), 100)]

    assert [line.split()[0] for line in lines[-6:]] == ["e-sick", "d-silent", "c-kept", "b-full", "a9", "a10"]
