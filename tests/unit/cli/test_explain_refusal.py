"""`topobus explain` of a refusal shows the hints that could not be merged, where they are the
cause.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.simulation.node import Simulation, open_machine
from topobus.formats.messages.codec import encode
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy
from topobus.values.view import AlignmentOptions


def _decided(folder: Path, gpus: int, fpgas: int) -> Path:
    """Store the decision about a pod on the recorded DGX, whose FPGAs are
    all on node 0, as a file.
    """
    owner = Owner(kind=OwnerKind.POD, namespace="default", name="wide", uid="u-1")
    devices = (DeviceRequest(device_class="gpu", count=gpus), DeviceRequest(device_class="fpga", count=fpgas))
    request = PodRequest(
        owner=owner,
        containers=(ContainerRequest(name="main", cpus=2, devices=devices),),
        policy=Policy.SINGLE_NUMA_NODE,
    )
    with open_machine("dgx") as node:
        simulation = Simulation(node, AlignmentOptions(), CpuSet())
        assert isinstance(simulation.place(request), Refusal)
    file = folder / "decision.json"
    file.write_bytes(encode(simulation.decisions[0]))
    return file


def test_hints_are_shown_when_no_node_is_preferred_by_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six GPUs need both nodes: the policy admits no merge, and the table says what each resource
    had to offer.
    """
    assert run(["explain", "--file", str(_decided(tmp_path, gpus=6, fpgas=1))]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]

    start = next(number for number, line in enumerate(lines) if line.startswith("hints of container main"))
    table = lines[start + 1 : start + 10]
    assert any(line.startswith("gpu ") and "{0-1}*" in line for line in table)
    assert any(line.startswith("fpga ") and "{0}*" in line for line in table)
    assert "no merge of these is one that policy single-numa-node admits" in table
    assert "replayed offline from the event's inputs: the same answer" in lines


def test_no_hints_are_shown_when_there_are_too_few_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing was merged."""
    file = _decided(tmp_path, gpus=9, fpgas=1)
    assert run(["explain", "--file", str(file)]) == 0
    assert "hints of" not in capsys.readouterr().out
    assert run(["explain", "--file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replay"]["is_same"] is True
