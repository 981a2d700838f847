"""The screen of `topobus top`: exactly as large as the terminal, scrolled within the drawing,
events whole where there is room.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from topobus.bus.bus import Change, ChangeKind
from topobus.cli.render.output import THEME
from topobus.cli.top.scene import Scene, ShownEvent
from topobus.cli.top.screen import Palette, node_screen, painted
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

_PALETTE = Palette(Console(file=io.StringIO(), theme=THEME))


@pytest.fixture(scope="module")
def recorded_scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A node of a recorded machine, with a long event."""
    root = tmp_path_factory.mktemp("laptop")
    build("laptop", root)
    scene = Scene(node="node-a")
    machine = read_machine(Tree(HardwareSettings(root=str(root))), "node-a")
    scene.take_machine(Change(kind=ChangeKind.PUT, parts={"node": "node-a"}, revision=1, value=machine))
    scene.add_event(ShownEvent(time="2", line=Text("later " + "word " * 30)))
    scene.add_event(ShownEvent(time="1", line=Text("sooner")))
    return scene


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (60, 20), (40, 10), (120, 50), (200, 60), (30, 5), (20, 3), (20, 1)]
)
def test_screen_is_as_large_as_the_terminal(recorded_scene: Scene, width: int, height: int, is_alone: bool) -> None:
    """As many lines as there are, none wider; wherever it is scrolled to."""
    for scroll in (0, 5, 90):
        lines = node_screen(
            recorded_scene, scroll, width, height, _PALETTE, place="1 of 1,000", is_alone=is_alone
        ).lines

        assert len(lines) == height
        assert max(map(len, lines)) <= width


def test_scrolling_ends_with_the_drawing(recorded_scene: Scene) -> None:
    """A key too many does nothing: the next one up scrolls up at once."""
    at_end = node_screen(recorded_scene, 500, 80, 12, _PALETTE)

    assert at_end.scroll < 500
    assert node_screen(recorded_scene, at_end.scroll - 1, 80, 12, _PALETTE).lines != at_end.lines
    assert "more lines below" not in at_end.lines[-1]


def test_event_is_whole_again_when_the_terminal_grows(recorded_scene: Scene) -> None:
    """Cutting is for one screen; events stand in the order of time."""
    node_screen(recorded_scene, 0, 40, 24, _PALETTE)

    wide = node_screen(recorded_scene, 0, 200, 40, _PALETTE).lines

    sooner, later = (
        next(number for number, line in enumerate(wide) if line.startswith(word)) for word in ("sooner", "later")
    )
    assert sooner < later
    assert wide[later].rstrip().endswith("word word")


def test_owner_keeps_its_letter_when_others_come_and_go(recorded_scene: Scene) -> None:
    """Two owners of one first letter: who had it has it still when the other one comes before it,
    and when that one goes.
    """
    late, early = (Owner(kind=OwnerKind.POD, name=name, uid="1") for name in ("tuner", "trainer"))

    def letter_line(*owners: Owner) -> str:
        ledger = Ledger(
            node="node-a", allocations={owner.key: Allocation(owner=owner, holdings=(Holding(),)) for owner in owners}
        )
        recorded_scene.take_ledger(Change(kind=ChangeKind.PUT, parts={"node": "node-a"}, revision=2, value=ledger))
        return next(
            line for line in node_screen(recorded_scene, 0, 100, 80, _PALETTE).lines if "pod default/tuner" in line
        )

    assert letter_line(late).startswith(" T ")
    assert letter_line(early, late).startswith(" T ")
    assert letter_line(late).startswith(" T ")


def test_nothing_is_said_to_be_there_when_watches_begin_anew(recorded_scene: Scene) -> None:
    """After a reset what is known is void; a machine that is gone is said to be."""
    scene = Scene(node="node-a")
    unread = node_screen(scene, 0, 80, 24, _PALETTE).lines
    scene.take_machine(Change(kind=ChangeKind.PUT, parts={"node": "node-a"}, revision=1, value=recorded_scene.machine))

    scene.take_machine(Change(kind=ChangeKind.RESET, parts={}, revision=0, value=None))

    assert "reading" in unread[1]
    assert "node-a reports no machine" in node_screen(scene, 0, 80, 24, _PALETTE).lines[1]


def test_painting_writes_only_what_changed() -> None:
    """A screen of equal lines writes nothing."""
    assert painted(["a", "b"], ["a", "b"]) == ""
    assert painted(["a", "b"], ["a", "c"]) == "\x1b[2;1H\x1b[Kc"
