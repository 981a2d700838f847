"""Output where it is not expected to be difficult: terminals with only ASCII, readers that go, packages that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    """What goes into a file or a program has no padding: a diff of two outputs shows what changed."""
    outputs = [
        _run("machine", "--root", str(laptop)).stdout,
        _run("profile", "list").stdout,
        _run("machine", "--root", str(laptop), COLUMNS="200").stdout,
    ]

    assert all(outputs)
    assert [line for output in outputs for line in output.decode().splitlines() if line.endswith(" ")] == []


def test_drawing_is_in_ascii_when_the_terminal_has_nothing_else(laptop: Path) -> None:
    """Boxes become lines of ASCII and no command ends with a defect; JSON says the same as elsewhere, in escapes."""
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    drawn = _run("machine", "--root", str(laptop), **ascii_only)
    as_json = _run("machine", "--root", str(laptop), "--json", **ascii_only)

    assert (drawn.returncode, drawn.stderr) == (0, b"")
    assert drawn.stdout.isascii()
    assert b"NUMA node 0" in drawn.stdout
    assert b"?" not in drawn.stdout.split(b"unhealthy")[0]
    assert json.loads(as_json.stdout) == json.loads(_run("machine", "--root", str(laptop), "--json", PYTHONIOENCODING="utf-8").stdout)


@pytest.mark.parametrize("word", ["pöd.yaml", "\udcff.yaml"])
def test_error_is_in_ascii_when_the_terminal_has_nothing_else(word: str) -> None:
    """An error that names what the user wrote is printed, whatever it holds."""
    done = _run("place", f"/nowhere/{word}", LC_ALL="C", PYTHONIOENCODING="ascii")

    assert done.returncode == 66
    assert b"cannot read" in done.stderr
    assert b"defect" not in done.stderr


@pytest.mark.parametrize(("service", "missing"), [("gateway", "grpc"), ("controller", "re2")])
def test_service_names_its_extra_when_a_package_is_not_installed(service: str, missing: str) -> None:
    """All console scripts are there with every installation: the one without its packages says what to install."""
    script = f"import sys; sys.modules['{missing}'] = None; sys.argv = ['topobus-{service}', '--version']\n"
    script += f"from topobus.{service}.main import main; main()"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        f"error: topobus-{service} needs {missing}, which is not installed",
        f"  next: pip install '.[{service}]' from the checkout",
    ]
