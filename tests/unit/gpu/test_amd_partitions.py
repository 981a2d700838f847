"""AMD GPUs that are cut into partitions, on topologies captured on real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kfd_machines import MI300X_BYTES, KfdMachine, folder
from topobus.devicekit.driver import PrepareContext
from topobus.gpu.plugins.amd import AmdDriver
from topobus.values.device import Device, LinkClass
from topobus.values.health import HealthState
from topobus.values.names import is_dns_label
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

_CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))
_SPELLINGS = ("amdgpu_xcp_{}", "amdgpu_xcp.{}")


def _discover(machine: KfdMachine, driver: AmdDriver | None = None) -> tuple[Device, ...]:
    return tuple((driver or AmdDriver()).discover(machine.tree, machine.machine).devices)


def _nodes(machine: KfdMachine, devices: tuple[Device, ...]) -> dict[str, list[str]]:
    edits = AmdDriver().prepare(machine.tree, devices, _CONTEXT)
    assert not isinstance(edits, Refusal)
    return {name: [node.path for node in edit.device_nodes] for name, edit in edits.items() if name}


@pytest.fixture
def cpx(tmp_path: Path) -> KfdMachine:
    """Eight MI300X in CPX and NPS1."""
    return KfdMachine(tmp_path, "mi300x-cpx", mode="CPX", memory_mode="NPS1")


@pytest.mark.parametrize("spelling", _SPELLINGS)
@pytest.mark.parametrize("has_number_in_location", [True, False], ids=["numbered", "one location"])
def test_discover_gives_each_partition_when_a_machine_is_in_cpx(
    tmp_path: Path, spelling: str, has_number_in_location: bool
) -> None:
    """Eight cards are 64 devices, each with an eighth of its card's memory and a render node of its
    own, however the kernel spells them.
    """
    machine = KfdMachine(
        tmp_path,
        "mi300x-cpx",
        mode="CPX",
        memory_mode="NPS1",
        spelling=spelling,
        has_number_in_location=has_number_in_location,
        is_completed=True,
    )

    devices = _discover(machine)
    nodes = _nodes(machine, devices)

    assert len({device.name for device in devices}) == 64
    assert {device.capacity["memory"] for device in devices} == {MI300X_BYTES // 8}
    # The partitions of the captured machine, in order, have render nodes 128 to 191.
    assert [nodes[device.name] for device in devices] == [
        [f"/dev/dri/card{index}", f"/dev/dri/renderD{128 + index}"] for index in range(64)
    ]
    assert all(is_dns_label(device.name) for device in devices)


def test_discover_gives_a_card_fewer_partitions_when_kfd_lists_fewer(cpx: KfdMachine) -> None:
    """The captured machine has 63 nodes: the last card has seven partitions of an eighth each,
    named as if the eighth were there; without the second it has six.
    """
    (cpx.root / "sys/class/kfd/kfd/topology/nodes/59/properties").unlink()

    parts = [device for device in _discover(cpx) if device.parent == "gpu-0000-e5-00-0"]

    assert [device.attributes["partitionIndex"] for device in parts] == [0, 2, 3, 4, 5, 6]
    assert {device.capacity["memory"] for device in parts} == {MI300X_BYTES // 8}


def test_discover_describes_a_partition_when_its_card_is_cut(cpx: KfdMachine) -> None:
    """A selector finds mode, number, card and target.

    The whole card is told in the warnings and not offered.
    """
    driver = AmdDriver()
    partition = _discover(cpx, driver)[11]

    assert (partition.name, partition.parent, partition.partition_of) == (
        "gpu-0000-27-00-0-cpx-3",
        "gpu-0000-27-00-0",
        "gpu-0000-27-00-0",
    )
    wanted = {
        "type": "partition",
        "partitionMode": "CPX",
        "memoryMode": "NPS1",
        "partitionIndex": 3,
        "gfxTarget": "gfx942",
        "computeUnits": 38,
        "parentUuid": f"GPU-{0x27:016x}",
    }
    assert {name: partition.attributes[name] for name in wanted} == wanted
    # The capture's partitions share one unique id, which names none of them.
    assert partition.uuid == ""
    assert len(driver.discover(cpx.tree, cpx.machine).warnings) == 8
    assert driver.discover(cpx.tree, cpx.machine).warnings[0] == (
        "0000:05:00.0 is not offered: it is in mode CPX, and its 8 partitions are offered instead"
    )


def test_discover_takes_memory_from_the_banks_when_kfd_has_them(tmp_path: Path) -> None:
    """Four partitions a card, of which the last has 16 MiB less: KFD's own numbers win over a
    division.

    Render nodes without a partition are nobody's.
    """
    machine = KfdMachine(tmp_path, "mi308x-cpx", mode="CPX", memory_mode="NPS4")

    devices = _discover(machine)

    assert [device.capacity["memory"] for device in devices[:4]] == [51_539_607_552] * 3 + [51_522_830_336]
    assert (len(devices), devices[0].name) == (32, "gpu-0000-0a-00-0-cpx-0")
    assert _nodes(machine, devices[4:6]) == {
        "gpu-0000-80-00-0-cpx-0": ["/dev/dri/card8", "/dev/dri/renderD136"],
        "gpu-0000-80-00-0-cpx-1": ["/dev/dri/card9", "/dev/dri/renderD137"],
    }


def test_partitions_of_one_card_are_fabric_peers_when_kfd_tells_their_links(tmp_path: Path) -> None:
    """A partition lists the seven of its own card, at their bandwidth.

    What every pair of cards has is not listed 3,500 times.
    """
    devices = _discover(KfdMachine(tmp_path, "mi300x-cpx", mode="CPX", memory_mode="NPS1", has_links=True))

    first = devices[0]
    assert [link.peer for link in first.links] == [f"gpu-0000-05-00-0-cpx-{index}" for index in range(1, 8)]
    assert {(link.kind, link.bandwidth_gbps) for link in first.links} == {(LinkClass.FABRIC, 6553.6)}
    assert sum(len(device.links) for device in devices) == 434


def test_discover_leaves_whole_cards_as_they_are_when_nothing_is_cut(tmp_path: Path) -> None:
    """Eight MI210 in two hives: a device each, named by its slot, with three XGMI peers."""
    devices = _discover(KfdMachine(tmp_path, "mi210-xgmi", has_links=True))

    assert [device.attributes["type"] for device in devices] == ["gpu"] * 8
    assert devices[0].name == "gpu-0000-03-00-0"
    assert {len(device.links) for device in devices} == {3}
    assert {device.partition_of for device in devices} == {""}


@pytest.mark.parametrize("mode", ["SPX", "CPX", "DPX", "QPX"])
@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4, 8])
def test_a_card_is_never_offered_whole_beside_its_parts_when_its_mode_changes(
    cpx: KfdMachine, mode: str, kept: int
) -> None:
    """Whatever KFD lists while a mode is changed, a card is whole, or in as many parts as the mode
    makes, or not offered with the reason.
    """
    first = cpx.addresses[0]
    for address in cpx.addresses:
        cpx.set_mode(address, mode)
    cpx.remove_nodes(kept)
    driver = AmdDriver()

    kinds = [device.attributes["type"] for device in _discover(cpx, driver) if device.pci == first]

    if mode == "SPX" and kept < 2:
        assert kinds == ["gpu"]
    elif (mode, kept) in {("CPX", 2), ("CPX", 3), ("CPX", 4), ("CPX", 8), ("DPX", 2), ("QPX", 4)}:
        assert kinds == ["partition"] * kept
    else:
        assert kinds == []
        assert (
            driver.discover(cpx.tree, cpx.machine).warnings[0]
            == f"{first} is not offered: it is in mode {mode}, and KFD lists {kept} of its parts"
        )


def test_prepare_refuses_a_partition_when_the_card_was_cut_otherwise(cpx: KfdMachine) -> None:
    """A claim for an eighth does not get a quarter: what was cut otherwise is another device, and
    the refusal names those asked for.
    """
    devices = _discover(cpx)[:2]
    cpx.set_mode(cpx.addresses[0], "QPX")
    cpx.remove_nodes(4)

    refusal = AmdDriver().prepare(cpx.write({}), devices, _CONTEXT)

    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts["devices"]) for reason in refusal.reasons] == [
        ("device-not-offered", (devices[0].name, devices[1].name))
    ]


def test_prepare_refuses_a_whole_card_when_it_was_cut_since_the_last_look(tmp_path: Path) -> None:
    """The whole card's own render node is the first partition's by now: a claim for the whole is
    refused.
    """
    machine = KfdMachine(tmp_path, "mi210-xgmi")
    devices = _discover(machine)[:1]
    machine.set_mode(machine.addresses[0], "CPX")

    refusal = AmdDriver().prepare(machine.write({}), devices, _CONTEXT)

    assert isinstance(refusal, Refusal)
    assert [reason.code for reason in refusal.reasons] == ["device-not-offered"]


def test_observe_tells_a_rise_of_errors_to_all_partitions_of_a_card(cpx: KfdMachine) -> None:
    """The card's error counter rises once: its eight partitions are sick, the others are not."""
    counter = f"{folder(cpx.addresses[0])}/aer_dev_fatal"
    driver, tree = AmdDriver(), cpx.write({counter: "TOTAL_ERR_FATAL 0"})
    devices = _discover(cpx, driver)
    driver.observe(tree, devices)

    seen = driver.observe(cpx.write({counter: "TOTAL_ERR_FATAL 2"}), devices)

    sick = [
        name for name, observations in seen.items() if any(part.state is HealthState.UNHEALTHY for part in observations)
    ]
    assert sick == [f"gpu-0000-05-00-0-cpx-{index}" for index in range(8)]


def test_functions_of_one_slot_keep_their_own_nodes_when_both_are_gpus(tmp_path: Path) -> None:
    """Virtual functions stand in one slot: the neighbour's KFD node is no partition of the one that
    is prepared.
    """
    machine = KfdMachine(tmp_path, "mi210-xgmi")
    first = machine.addresses[0]
    sibling = PciAddress(first.domain, first.bus, first.device, 1)
    node = {"properties": {}, "memory": [], "links": {}}
    facts = {
        "simd_count": 4,
        "vendor_id": 0x1002,
        "domain": 0,
        "location_id": first.bus << 8 | 1,
        "drm_render_minor": 200,
    }
    machine.write_node("20", facts, node)
    tree = machine.write({f"{folder(sibling)}/drm/renderD200/dev": "226:200"})

    edits = AmdDriver().prepare(tree, _discover(machine)[:1], _CONTEXT)

    assert not isinstance(edits, Refusal)
    assert [node.path for node in edits["gpu-0000-03-00-0"].device_nodes] == ["/dev/dri/card2", "/dev/dri/renderD130"]
