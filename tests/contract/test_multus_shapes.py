"""What Multus, sriov-cni and programs of the SR-IOV device plugin read, in the shapes that their
documents give: variables, file names, documents.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from topobus.formats.kubernetes.slices import slice_device
from topobus.gateway.config import GatewaySettings
from topobus.gateway.device_plugins.rules.multus import PciUse, device_info, file_name, is_file_of, variables
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.pci import PciAddress

MULTUS = {"k8s.cni.cncf.io/deviceID": "0000:3b:00.1", "k8s.cni.cncf.io/resourceName": "topobus.dev/nic-vf"}
SHAPES = json.loads((Path(__file__).parents[1] / "data" / "multus" / "shapes.json").read_text())


def use_of(entry: dict[str, object]) -> PciUse:
    """A device as the recorded case has it."""
    nodes = tuple(DeviceNode(path=str(path)) for path in msgspec.convert(entry.get("nodes", []), list[str]))
    physical = entry.get("physical")
    return PciUse(
        address=PciAddress.parse(str(entry["address"])),
        edits=ContainerEdits(device_nodes=nodes),
        rdma_device=str(entry.get("rdma", "")),
        physical=PciAddress.parse(str(physical)) if physical else None,
    )


@pytest.mark.parametrize("case", SHAPES["variables"], ids=lambda case: case["name"])
def test_variables_have_the_recorded_shape(case: dict[str, object]) -> None:
    """PCIDEVICE_<RESOURCE> and …_INFO."""
    uses = {str(entry["address"]): use_of(entry) for entry in msgspec.convert(case["devices"], list[dict[str, object]])}

    made = variables(str(case["resource"]), uses)

    wanted = msgspec.convert(case["wanted"], dict[str, object])
    assert {key: json.loads(value) if key.endswith("_INFO") else value for key, value in made.items()} == wanted


@pytest.mark.parametrize("case", SHAPES["documents"], ids=lambda case: case["name"])
def test_documents_have_the_recorded_shape(case: dict[str, object]) -> None:
    """Device Information Specification 1.1.0, type pci."""
    document = json.loads(device_info(use_of(msgspec.convert(case["device"], dict[str, object]))))

    assert document == case["wanted"]


@pytest.mark.parametrize("case", SHAPES["files"], ids=lambda case: case["resource"])
def test_files_have_the_recorded_names(case: dict[str, str]) -> None:
    """Slashes of the resource's name become hyphens.

    Nothing else changes, and the name is known again.
    """
    assert file_name(case["resource"], case["id"]) == case["wanted"]
    assert is_file_of(case["resource"], case["wanted"])
    assert not is_file_of(f"{case['resource']}-other", case["wanted"])


def test_slices_have_the_attributes_of_multus_when_devices_are_named_by_address() -> None:
    """Under names with Multus' domain, beside the device's own.

    Without the setting, and for a device without an address, there are none.
    """
    function = Device(
        name="nic-0000-3b-00-1",
        device_class="nic",
        pool="nic-vf",
        pci=PciAddress.parse("3b:00.1"),
        attributes={"rdma": False},
    )
    veth = Device(name="nic-veth", device_class="nic", pool="nic-vf")
    named, plain = GatewaySettings(node="n1", ids={"nic-vf": "pci"}), GatewaySettings(node="n1")

    shown = [settings.shown(device) for settings in (named, plain) for device in (function, veth)]

    attributes = [
        set(slice_device(device).attributes) & set(MULTUS) if device is not None else None for device in shown
    ]
    assert attributes == [set(MULTUS), set(), set(), set()]
    assert shown[0] is not None
    assert {name: slice_device(shown[0]).attributes[name].string for name in MULTUS} == MULTUS
