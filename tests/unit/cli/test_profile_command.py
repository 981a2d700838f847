"""`topobus profile`: recorded machines from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.simulation.machines import PROFILES, RecordedMachine, build


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A small machine on disk."""
    return build("laptop", tmp_path / "machine").root


def test_machines_are_listed_and_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each profile stands there with its title.

    What was built is a machine, and stays one when it is there already.
    """
    assert run(["profile", "list", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["profiles"]) == list(PROFILES)
    for more in ([], ["--if-absent"]):
        assert run(["profile", "build", "laptop", str(tmp_path / "m"), *more]) == 0
    assert RecordedMachine.open(tmp_path / "m").profile.name == "laptop"
    assert "there is a machine already" in " ".join(capsys.readouterr().out.split())


def test_function_goes_and_comes_back(machine: Path) -> None:
    """As a surprise removal does it; twice is no error."""
    (address,) = RecordedMachine.open(machine).pci("iris-xe")
    folder = machine / RecordedMachine.open(machine).folder(address)
    for verb, is_there in (("remove", False), ("remove", False), ("restore", True), ("restore", True)):
        assert run(["profile", verb, str(machine), address]) == 0
        assert folder.exists() is is_there


def test_cpu_goes_offline_and_comes_back(machine: Path) -> None:
    """The lists of the tree follow."""
    assert run(["profile", "offline", str(machine), "3"]) == 0
    assert 3 not in RecordedMachine.open(machine).online_cpus
    assert run(["profile", "online", str(machine), "3"]) == 0
    assert 3 in RecordedMachine.open(machine).online_cpus


def test_each_fault_is_told_when_it_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of the profile, in order; a machine without one says so."""
    flaky = build("dgx-flaky", tmp_path / "flaky").root
    steady = build("laptop", tmp_path / "steady").root
    assert run(["profile", "play", str(flaky), "--speed", "100000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RecordedMachine.open(flaky)._script())
    assert [float(line.partition(" ")[0]) for line in lines] == sorted(float(line.partition(" ")[0]) for line in lines)
    assert run(["profile", "play", str(steady)]) == 0
    assert "scripts no faults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["remove", "MACHINE", "0000:ff:00.0"], 1, "has no PCI function 0000:ff:00.0"),
        (["offline", "MACHINE", "4711"], 1, "has no CPU 4711"),
        (["play", "MACHINE", "--speed", "0"], 2, "wanted more than 0"),
        (["remove", "/nowhere", "0000:18:00.0"], 66, "/nowhere"),
        (["build", "no-such-machine", "NEW"], 66, "no-such-machine"),
    ],
    ids=["address", "cpu", "speed", "folder", "profile"],
)
def test_mistake_is_told_with_a_next_step(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    """Two lines: what is wrong, and what to do."""
    words = [{"MACHINE": str(machine), "NEW": str(tmp_path / "new")}.get(word, word) for word in arguments]
    assert run(["profile", *words]) == status
    error = capsys.readouterr().err
    assert says in error
    assert "next: " in error
