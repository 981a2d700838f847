"""The claim of the how-to page, allocated: a card that has the function comes before one that only
fits, and a card that does not fit is never taken.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from support.bitstream_files import FUNCTION, gbs
from support.fpga_cards import FileDflProgrammer, add, dfl_machine
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, ClaimToAllocate, Node
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.resource import ClaimSpec, DeviceClassSpec, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.kubernetes.slices import slice_device
from topobus.fpga.config import FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER, group_of_class

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/fpga-functions.md"
CLASS = group_of_class("fpga")


def claim_of_the_page() -> dict[str, Any]:
    """Read the example."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    claim: dict[str, Any] = yaml.safe_load(text)
    return claim


def taken(*devices: Device) -> list[str]:
    """Allocate the page's claim on a node with these cards, in this order; gives what it takes."""
    spec = {
        "driver": DRIVER,
        "nodeName": "n",
        "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
        "devices": [msgspec.to_builtins(slice_device(device)) for device in devices],
    }
    outcome = allocate(
        AllocationInput(
            node=Node("n"),
            claims=(
                ClaimToAllocate("team-a/multiply", read_as(claim_of_the_page()["spec"], ClaimSpec, where="claim")),
            ),
            classes={CLASS: DeviceClassSpec()},
            slices=(Slice("s", read_as(spec, SliceSpec, where="slice")),),
        ),
        CelCompiler(),
    )
    return [result.device for result in outcome.results[0].devices.results] if isinstance(outcome, Allocated) else []


@pytest.fixture
def cards(tmp_path: Path) -> dict[str, Device]:
    """One card as the driver describes it in three conditions: with the function, fit for it, and
    of another maker's shell.
    """
    root = tmp_path / "machine"
    dfl_machine(root)
    tree = Tree(HardwareSettings(root=str(root)))
    driver = IntelDflDriver(FileDflProgrammer(root))
    machine = read_machine(tree, "n")
    (other,) = driver.discover(tree, machine).devices
    add(tmp_path / "store", gbs(), "matrix")
    driver.configure(FpgaServices(functions=FunctionSettings(store=str(tmp_path / "store")), can_program=True))
    (fitting,) = driver.discover(tree, machine).devices
    FileDflProgrammer(root).program(str(root / "dev/dfl-fme.0"), str(root / "dev/dfl-port.0"), 0, FUNCTION.encode())
    (loaded,) = driver.discover(tree, machine).devices
    return {
        name: msgspec.structs.replace(device, name=f"fpga-{name}")
        for name, device in (("other", other), ("fitting", fitting), ("loaded", loaded))
    }


def test_card_with_the_function_is_taken_before_one_that_fits(cards: dict[str, Device]) -> None:
    """Whatever the order of the slice is."""
    other, fitting, loaded = cards["other"], cards["fitting"], cards["loaded"]

    assert taken(other, fitting, loaded) == taken(loaded, fitting, other) == ["fpga-loaded"]


def test_card_that_fits_is_taken_when_none_has_the_function(cards: dict[str, Device]) -> None:
    """And one that does not fit is left alone, also when it is the only one."""
    assert taken(cards["other"], cards["fitting"]) == ["fpga-fitting"]
    assert taken(cards["other"]) == []
