"""How a node differs from the slices that a recorded machine foretold of it."""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.rules.checkup import Level, check_template
from topobus.cli.rules.slice_templates import devices_of_type, template_differences
from topobus.cli.simulation.node import open_machine
from topobus.simulation.machines import PROFILES
from topobus.values.device import Device, Inventory
from topobus.values.idset import NodeSet


def inventory(*devices: Device) -> list[Inventory]:
    """The GPUs of a node."""
    return [Inventory(node="n", device_class="gpu", generation=1, devices=devices)]


GPU = Device(name="gpu-0", device_class="gpu", model="H100", numa_nodes=NodeSet(0), capacity={"memory": 80})


@pytest.mark.parametrize("profile", PROFILES)
def test_machine_is_as_it_foretells(profile: str) -> None:
    """Every device of every profile, CPUs too."""
    with open_machine(profile) as opened:
        devices = devices_of_type(opened.snapshot.inventories)

    finding = check_template("n", template_differences(devices, devices))

    assert devices
    assert (finding.level, finding.found) == (Level.OK, "its devices are those of the recorded machine")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"numa_nodes": NodeSet(1)}, "gpu-0: resource.kubernetes.io/numaNode is 1, foretold 0"),
        ({"numa_nodes": None}, "gpu-0: resource.kubernetes.io/numaNode is absent, foretold 0"),
        ({"capacity": {"memory": 40}}, "gpu-0: memory is 40, foretold 80"),
        ({"attributes": {"ecc": True}}, "gpu-0: ecc is True, foretold absent"),
        ({"allows_multiple": True}, "gpu-0: allowMultipleAllocations is True, foretold absent"),
        ({"name": "gpu-1"}, "gpu-0 is missing, gpu-1 was not foretold"),
    ],
)
def test_difference_is_named_with_both_values(change: dict[str, object], wanted: str) -> None:
    """What it is, what was foretold, and what to do."""
    foretold, present = inventory(GPU), inventory(structs.replace(GPU, **change))

    finding = check_template("n", template_differences(devices_of_type(foretold), devices_of_type(present)))

    assert (finding.level, finding.what) == (Level.WARN, "n: template")
    assert finding.found == f"differs from the recorded machine: {wanted}"
    assert "topobus record" in finding.next_step


def test_what_each_card_has_of_its_own_is_no_difference() -> None:
    """Two machines of a type have cards with other serial numbers."""
    present = inventory(structs.replace(GPU, uuid="GPU-2", attributes={"mac": "02:00:00:00:00:01"}))

    assert template_differences(devices_of_type(inventory(GPU)), devices_of_type(present)) == []


def test_doctor_refuses_cpus_of_no_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Before any server is asked."""
    assert run(["doctor", "--cpus", '{"groups": "numa"}']) == ExitCode.USAGE
    assert "--cpus is given without --machine" in capsys.readouterr().err
