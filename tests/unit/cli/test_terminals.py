"""Output where it is not expected to be difficult: terminals with only ASCII, readers that go,
packages that are not there.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.render.ascii_lines import AsciiLines, ascii_line
from topobus.simulation.machines import build


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded machine."""
    folder = tmp_path_factory.mktemp("machines") / "laptop"
    build("laptop", folder)
    return folder


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "topobus.cli.main", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False, timeout=60)


def test_no_line_ends_with_blanks_when_stdout_is_no_terminal(laptop: Path) -> None:
    """What goes into a file or a program has no padding: a diff of two
    outputs shows what changed.
    """
    outputs = [
        _run("machine", "--root", str(laptop)).stdout,
        _run("profile", "list").stdout,
        _run("machine", "--root", str(laptop), COLUMNS="200").stdout,
    ]

    assert all(outputs)
    assert [line for output in outputs for line in output.decode().splitlines() if line.endswith(" ")] == []


def test_drawing_is_in_ascii_when_the_terminal_has_nothing_else(laptop: Path) -> None:
    """Boxes become lines of ASCII and no command ends with a defect.

    JSON says the same as elsewhere, in escapes.
    """
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    drawn = _run("machine", "--root", str(laptop), **ascii_only)
    as_json = _run("machine", "--root", str(laptop), "--json", **ascii_only)

    assert (drawn.returncode, drawn.stderr) == (0, b"")
    assert drawn.stdout.isascii()
    assert b"NUMA node 0" in drawn.stdout
    assert b"?" not in drawn.stdout.split(b"unhealthy")[0]
    assert json.loads(as_json.stdout) == json.loads(
        _run("machine", "--root", str(laptop), "--json", PYTHONIOENCODING="utf-8").stdout
    )


@pytest.mark.parametrize("columns", ["60", "80", "100"])
@pytest.mark.parametrize(
    "command",
    [("machine", "--machine", "dgx"), ("simulate", "--machine", "dgx", "--pods", "examples/pods/trainer.yaml")],
)
def test_borders_stand_under_each_other_when_the_terminal_has_only_ascii(
    command: tuple[str, ...], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign that ASCII writes with three, as where a text is cut, moves no border and no column
    behind it.

    No line is wider than with other signs.
    """
    monkeypatch.setenv("COLUMNS", columns)
    written_lines: dict[str, list[str]] = {}
    for encoding in ("utf-8", "ascii"):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with redirect_stdout(stdout):
            assert run(command) == ExitCode.OK
        stdout.flush()
        stdout.seek(0)
        written_lines[encoding] = stdout.read().splitlines()

    signs, lines = written_lines["utf-8"], written_lines["ascii"]
    borders = [
        [place for place, sign in enumerate(line) if sign in "│╭╮╰╯"]
        for line in signs
        if line.startswith(("│", "╭", "╰"))
    ]
    framed = [line for line, written in zip(lines, signs, strict=True) if written.startswith(("│", "╭", "╰"))]
    assert len(borders) > 10
    assert [
        line for line, places in zip(framed, borders, strict=True) if {line[place] for place in places} - {"|", "+"}
    ] == []
    assert max(map(len, lines)) <= int(columns)
    assert all("..." in line for line, written in zip(lines, signs, strict=True) if "…" in written)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("│ gpu-0000-18… │", "| gpu-0000-... |"),
        ("│ gpu-0000-18…    │", "| gpu-0000-18...  |"),
        ("│ a…  │ b → c │", "| ... | b -> c|"),
        ("name…   next", "name... next"),
        ("name…  next", "nam... next"),
        ("╭─ pod default/… ─╮", "+- pod defaul... -+"),
        ("healthy → unhealthy   gpu-0", "healthy -> unhealthy  gpu-0"),
        ("reading …", "reading ..."),
        ("≥ 3 → ≤ 2", ">= 3 -> <= 2"),
    ],
)
def test_line_keeps_its_columns_when_it_is_written_in_ascii(line: str, wanted: str) -> None:
    """What a sign needs more is taken from blanks behind it, else from the text that it cuts.

    A sentence that has neither grows.
    """
    assert ascii_line(line) == wanted


def test_colours_stay_with_their_text_when_a_line_is_written_in_ascii() -> None:
    """Only signs change: a terminal with colours and without Unicode has both right."""
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="standard")
    console.push_render_hook(AsciiLines())

    console.print(Text.assemble(("was", "green"), " → ", ("is", "red")))

    assert console.file.getvalue() == "\x1b[32mwas\x1b[0m -> \x1b[31mis\x1b[0m\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("word", ["pöd.yaml", "\udcff.yaml"])
def test_error_is_in_ascii_when_the_terminal_has_nothing_else(word: str) -> None:
    """An error that names what the user wrote is printed, whatever it holds."""
    done = _run("place", f"/nowhere/{word}", LC_ALL="C", PYTHONIOENCODING="ascii")

    assert done.returncode == 66
    assert b"cannot read" in done.stderr
    assert b"defect" not in done.stderr


@pytest.mark.parametrize(("service", "missing"), [("gateway", "grpc"), ("controller", "re2")])
def test_service_names_its_extra_when_a_package_is_not_installed(service: str, missing: str) -> None:
    """All console scripts are there with every installation: the one without its packages says what
    to install.
    """
    script = f"import sys; sys.modules['{missing}'] = None; sys.argv = ['topobus-{service}', '--version']\n"
    script += f"from topobus.{service}.main import main; main()"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        f"error: topobus-{service} needs {missing}, which is not installed",
        f"  next: pip install '.[{service}]' from the checkout",
    ]
