"""Colours of the command line: the terminal's own sixteen, without those that vanish on a light,
dark or Solarized ground.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console, Group, RenderableType
from rich.text import Text

from topobus.cli.demo.kubelet import coloured
from topobus.cli.render.answers import hint_table
from topobus.cli.render.machine_drawing import draw_machine
from topobus.cli.render.output import THEME
from topobus.cli.render.program_status import ProgramState, ProgramStatus, status_table
from topobus.engine.drawing.letters import holders_of
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.outcome import HintList
from topobus.values.request import Owner, OwnerKind

_CODES = re.compile(r"\x1b\[([\d;]*)m")
# White and bright black carry nothing on one ground or the other, other bright colours are greys in
# Solarized; a ground of our own hides the user's.
_REFUSED = {"30", "37", *(str(code) for code in (*range(40, 49), *range(90, 98), *range(100, 108)))}


def _codes(what: RenderableType) -> set[str]:
    """All codes that are written on a terminal that could show every colour."""
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100, theme=THEME, highlight=False
    )
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    codes: set[str] = set()
    for sequence in _CODES.findall(console.file.getvalue()):
        # 38 and 48 take what follows as a colour of 256 or of all.
        codes |= {sequence} if "38;" in sequence or "48;" in sequence else set(sequence.split(";"))
    return codes


def _drawing() -> RenderableType:
    owners = [Owner(kind=OwnerKind.POD, name=f"p{number}", uid=str(number)) for number in range(8)]
    ledger = Ledger(
        node="n1",
        allocations={
            owner.key: Allocation(owner=owner, holdings=(Holding(cpus=CpuSet(number)),))
            for number, owner in enumerate(owners)
        },
    )
    assert len(holders_of(ledger).all) == 8
    cpus = tuple(Cpu(id=number, online=True, core=number, socket=0, numa_node=0) for number in range(8))
    return draw_machine(
        Machine(node="n1", numa_nodes=(NumaNode(id=0, cpus=CpuSet.of(range(8)), memory_bytes=1 << 30),), cpus=cpus),
        (),
        ledger,
    )


@pytest.mark.parametrize(
    "what",
    [
        _drawing(),
        coloured("# note\nkind: Pod\nspec: {count: 2, on: true, list: [gpu, 'nic']}\n", "yaml"),
        coloured('{"cdiVersion": "0.6.0", "devices": [1, null, true]}', "json"),
        hint_table([HintList(resource="gpu", hints=(Hint(NodeSet(0), preferred=True),))]),
        status_table([ProgramStatus(name="gpu", state=state) for state in ProgramState]),
        Group(*(Text(style, style) for style in ("ok", "warn", "fail", "faint", "title", "name"))),
    ],
    ids=["drawing", "yaml", "json", "hints", "up", "theme"],
)
def test_output_has_only_colours_that_every_theme_shows(what: RenderableType) -> None:
    """No truecolour, no colour of 256, no bright black, no white, no ground of our own."""
    codes = _codes(what)

    assert codes  # something is coloured at all
    assert not codes & _REFUSED
    assert not [code for code in codes if ";" in code]


def test_no_source_names_a_colour_that_a_theme_hides() -> None:
    """What no test above prints is held to the same by its text."""
    sources = (Path(__file__).parents[3] / "services/topobus/cli").rglob("*.py")

    wrong = [
        (path.name, line.strip())
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(
            r"\"[^\"]*\b(bright_\w+|white|black|grey\d+|on (red|green|blue|yellow|cyan|magenta))\b[^\"]*\"", line
        )
    ]

    assert not wrong
