"""Commands that write whole trees: only into folders that nobody else may write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.simulation.machines import build
from topobus.values.errors import ConfigError


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """An empty folder that anybody may write to, as one that somebody made in /tmp under the name
    that a page shows.
    """
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_record_refuses_a_folder_when_others_may_write_to_it(
    open_to_all: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links that others lay there while it records would lead its writes elsewhere."""
    tree = tmp_path / "tree"
    build("laptop", tree)

    code = run(["record", str(open_to_all), "--root", str(tree)])

    assert code == ExitCode.NO_INPUT
    assert "may be written by others (mode 777)" in " ".join(capsys.readouterr().err.split())
    assert list(open_to_all.iterdir()) == []


def test_machine_is_not_built_when_others_may_write_to_its_folder(open_to_all: Path) -> None:
    """A recorded machine is thousands of files; none is written where others lay links."""
    with pytest.raises(ConfigError, match="may be written by others"):
        build("laptop", open_to_all)

    assert list(open_to_all.iterdir()) == []
