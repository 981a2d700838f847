"""`topobus topo`: the matrix of a machine, at any width, as JSON, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.render.path_matrix import matrix_lines
from topobus.cli.simulation.node import open_machine
from topobus.engine.drawing.path_matrix import PathMatrix, path_matrix
from topobus.simulation.machines import build
from topobus.values.idset import CpuSet


def matrix_of(profile: str) -> PathMatrix:
    """Make the matrix of a recorded machine."""
    with open_machine(profile) as node:
        return path_matrix(node.snapshot.machine, node.snapshot.inventories)


def words_of(lines: list[str], ids: list[str]) -> dict[str, list[str]]:
    """Read the words of all blocks back: id to words, in the order of the columns."""
    words: dict[str, list[str]] = {each: [] for each in ids}
    columns = 0
    for line in lines:
        parts = line.split()
        if line.startswith(" "):
            columns = sum(part in words for part in parts)
        elif parts and parts[0] in words:
            words[parts[0]] += parts[1 : 1 + columns]
        elif not parts and len(words[ids[0]]) == len(ids):
            break
    return words


@pytest.mark.parametrize("width", [60, 80, 100, 160, 250])
@pytest.mark.parametrize("profile", ["dgx", "gb200", "epyc-8numa", "laptop"])
def test_topo_shows_every_pair_when_the_terminal_is_narrow_or_wide(profile: str, width: int) -> None:
    """No line is wider than the terminal, and blocks of columns together have each word once."""
    matrix = matrix_of(profile)
    ids = [device.id for device in matrix.devices]

    lines = [line.plain for line in matrix_lines(matrix, width)]

    assert max(map(len, lines)) <= width
    assert words_of(lines, ids) == {
        device.id: list(row) for device, row in zip(matrix.devices, matrix.words, strict=True)
    }
    assert sum("CPU affinity" in line for line in lines) == 1


@pytest.mark.parametrize("width", [30, 40, 60, 80])
@pytest.mark.parametrize("profile", ["dgx", "gb200", "epyc-8numa", "laptop"])
def test_topo_leaves_out_nothing_when_the_terminal_is_narrow(profile: str, width: int) -> None:
    """Names, models, affinities and the legend are folded, not cut; no line is wider."""
    matrix = matrix_of(profile)

    lines = [line.plain for line in matrix_lines(matrix, width)]

    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert [meaning for meaning in matrix.legend.values() if meaning not in text] == []
    assert [device.name for device in matrix.devices if device.name not in text] == []


def test_topo_folds_affinities_when_a_list_of_cpus_is_longer_than_the_terminal() -> None:
    """A node whose CPUs are numbered in turns has a list of hundreds of numbers: it stands below
    itself, whole.
    """
    matrix = matrix_of("laptop")
    scattered = CpuSet(*range(0, 256, 2))
    device = structs.replace(matrix.devices[0], cpu_affinity=scattered)

    lines = [line.plain for line in matrix_lines(structs.replace(matrix, devices=(device, *matrix.devices[1:])), 60)]

    assert max(map(len, lines)) <= 60
    assert str(scattered) in "".join("".join(lines).split())


def test_topo_prints_gpus_and_nics_of_a_recorded_tree_with_their_names_and_legend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs of the recorded DGX: a GPU and its NICs below one switch, the next ones in another
    root complex, the rest across sockets.
    """
    monkeypatch.setenv("COLUMNS", "160")
    build("dgx", tmp_path / "dgx")

    code = run(["topo", "--root", str(tmp_path / "dgx"), "--class", "gpu", "--class", "nic"])

    lines = capsys.readouterr().out.splitlines()
    assert code == ExitCode.OK
    assert lines[1].split() == [
        *[
            "GPU0",
            "X",
            "PIX",
            "NODE",
            "NODE",
            "SYS",
            "SYS",
            "SYS",
            "SYS",
            "PIX",
            "PIX",
            "NODE",
            "NODE",
            "SYS",
            "SYS",
            "SYS",
            "SYS",
        ],
        "0-55,112-167",
        "0",
        "N/A",
    ]
    assert "GPU0  gpu-0000-18-00-0  NVIDIA H100 80GB HBM3" in lines
    assert "PIX  = through one PCIe switch at most" in lines
    assert not any(line.startswith(("FPGA", "PXB")) for line in lines)


def test_topo_prints_json_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Devices with their affinities, the matrix by ids, and the legend of its words."""
    code = run(["topo", "--machine", "dgx", "--class", "fpga", "-o", "json"])

    document = json.loads(capsys.readouterr().out)
    assert code == ExitCode.OK
    assert document["matrix"] == {"FPGA0": {"FPGA0": "X", "FPGA1": "PHB"}, "FPGA1": {"FPGA0": "PHB", "FPGA1": "X"}}
    assert sorted(document["legend"]) == ["PHB", "X"]
    assert document["devices"][0] == {
        "id": "FPGA0",
        "class": "fpga",
        "name": "fpga-0000-38-00-0",
        "model": "Alveo U55C",
        "pci": "0000:38:00.1",
        "interface": "",
        "cpuAffinity": "0-55,112-167",
        "numaAffinity": "0",
        "gpuNumaId": None,
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--machine", "dgx", "--class", "gpus"], "gpus"),
        (["--machine", "dgx", "--node", "n1"], "--node names a node of a running system"),
        (["--machine", "nothing-of-the-kind"], "is no folder, no file and no profile"),
    ],
)
def test_topo_says_what_is_wrong_when_a_word_is(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong class, two machines at once, a node of no system: each is a sentence, and nothing is
    printed.
    """
    code = run(["topo", *arguments])

    captured = capsys.readouterr()
    assert code != ExitCode.OK
    assert (text in " ".join(captured.err.split()), captured.out) == (True, "")


def test_topo_says_so_when_a_machine_has_no_such_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without FPGAs has an empty answer, not an empty table."""
    code = run(["topo", "--machine", "laptop", "--class", "fpga"])

    assert (code, capsys.readouterr().out) == (ExitCode.OK, "laptop has no fpga\n")
