"""Recorded machines: what profiles promise, and that every change is whole and can be undone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.sysfs_trees import contents
from topobus.simulation.machines import (
    PROFILES,
    RecordedMachine,
    build,
    load_profile,
)
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine
from topobus.values.pci import PciAddress


def read(machine: RecordedMachine) -> Machine:
    """Read a recorded machine as discovery does."""
    return read_machine(Tree(HardwareSettings(root=str(machine.root))), "demo-node")


@pytest.fixture
def laptop(tmp_path: Path) -> RecordedMachine:
    """A small machine of one's own."""
    return build("laptop", tmp_path / "laptop")


@pytest.fixture(scope="module")
def dgx_recording(tmp_path_factory: pytest.TempPathFactory) -> RecordedMachine:
    """The demo machine; tests leave it as they found it."""
    return build("dgx", tmp_path_factory.mktemp("dgx"))


def test_profile_dgx_is_the_demo_machine_when_read(dgx_recording: RecordedMachine) -> None:
    """8 GPUs and 8 NICs in pairs on 2 nodes, both FPGAs on node 0, 224 CPUs on 112 cores."""
    machine = read(dgx_recording)

    by_node = {
        card: [at.numa_node for at in machine.pci_devices if str(at.address) in dgx_recording.pci(card)]
        for card in ("h100", "connectx-7", "alveo-u55c")
    }
    assert by_node == {"h100": [0] * 4 + [1] * 4, "connectx-7": [0] * 4 + [1] * 4, "alveo-u55c": [0] * 4}
    assert (len(machine.online_cpus), len({cpu.core for cpu in machine.cpus})) == (224, 112)
    assert machine.warnings == ()


def test_profile_gb200_shows_gpu_memory_as_nodes_when_read(tmp_path: Path) -> None:
    """34 NUMA nodes, 2 with CPUs; the others are near one processor each."""
    machine = read(build("gb200", tmp_path))

    assert machine.node_set == NodeSet.parse("0-33")
    assert [node.id for node in machine.numa_nodes if node.cpus] == [0, 1]
    assert {node.near_cpus for node in machine.numa_nodes[2:18]} == {CpuSet.parse("0-71")}
    assert machine.distances[0][1] == 40


def test_profile_epyc_has_a_cache_for_four_cores_when_read(tmp_path: Path) -> None:
    """8 NUMA nodes of two level-3 caches each."""
    machine = read(build("epyc-8numa", tmp_path))

    caches = {(cpu.numa_node, cpu.l3) for cpu in machine.cpus}
    assert (len(machine.numa_nodes), len(caches)) == (8, 16)
    assert [machine.distances[0][node] for node in (0, 3, 4, 7)] == [10, 12, 32, 32]


def test_profile_laptop_is_hybrid_when_read(laptop: RecordedMachine) -> None:
    """8 CPUs of performance cores, 8 efficiency ones, and devices that belong to no known node."""
    machine = read(laptop)

    assert [cpu.kind for cpu in machine.cpus] == ["performance"] * 8 + ["efficiency"] * 8
    assert {pci_device.numa_node for pci_device in machine.pci_devices} == {None}


@pytest.mark.parametrize("name", PROFILES)
def test_load_profile_reads_when_shipped(name: str) -> None:
    """Every shipped profile is valid and has a title."""
    assert load_profile(name).title


def test_load_profile_names_the_key_when_a_profile_has_a_typo(tmp_path: Path) -> None:
    """A misspelt key is refused with the file and the place."""
    file = tmp_path / "mine.toml"
    file.write_text('base = "laptop"\nboots = 1\n')

    with pytest.raises(ConfigError, match=r"mine\.toml.*boots"):
        load_profile(file)


def test_build_refuses_when_the_folder_holds_something_else(tmp_path: Path) -> None:
    """A folder with other files in it is not overwritten."""
    (tmp_path / "thesis.txt").write_text("precious")

    with pytest.raises(ConfigError, match="not empty"):
        build("laptop", tmp_path)

    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_set_cpu_online_changes_all_lists_when_a_cpu_goes(laptop: RecordedMachine) -> None:
    """The offline CPU leaves its core, node, cache and the near CPUs of devices, and the machine
    stays free of contradictions.
    """
    laptop.set_cpu_online(1, is_online=False)

    machine = read(laptop)
    assert machine.online_cpus == CpuSet.parse("0,2-15")
    assert machine.numa_nodes[0].cpus == CpuSet.parse("0,2-15")
    assert {pci_device.near_cpus for pci_device in machine.pci_devices} == {CpuSet.parse("0,2-15")}
    assert machine.warnings == ()


def test_set_cpu_online_leaves_no_trace_when_undone(laptop: RecordedMachine) -> None:
    """Offline and online again gives the same tree, file by file."""
    before = contents(laptop.root)

    laptop.set_cpu_online(5, is_online=False)
    changed = contents(laptop.root)
    laptop.set_cpu_online(5, is_online=True)

    assert changed != before
    assert contents(laptop.root) == before


@pytest.mark.parametrize("what", ["card", "bridge", "physical-function"])
def test_remove_pci_takes_all_below_away_and_restore_brings_it_back_when_undone(tmp_path: Path, what: str) -> None:
    """A card, a bridge with the card below it, or a NIC with its VFs: all go with every link to
    them, and all come back.
    """
    machine = build("epyc-8numa", tmp_path)
    address, gone = {
        "card": ("0000:41:00.0", 1),
        "bridge": ("0000:40:01.0", 2),
        "physical-function": ("0000:42:00.0", 5),
    }[what]
    before, known_machine = contents(tmp_path), read(machine)

    machine.remove_pci(address)
    without, changed = read(machine), contents(tmp_path)
    machine.restore_pci(address)

    assert len(known_machine.pci_devices) - len(without.pci_devices) == gone
    assert [path for path in changed if Path(path).is_symlink() and not Path(path).exists()] == []
    assert contents(tmp_path) == before


def test_remove_pci_can_be_undone_by_another_process_when_the_tree_is_opened(laptop: RecordedMachine) -> None:
    """What one process removed, another one restores: nothing is kept in memory."""
    before = contents(laptop.root)
    laptop.remove_pci("0000:00:02.0")

    RecordedMachine.open(laptop.root).restore_pci("0000:00:02.0")

    assert contents(laptop.root) == before


def test_restore_pci_refuses_when_the_bridge_above_is_away(dgx_recording: RecordedMachine) -> None:
    """A card cannot come back before the port that it sits in."""
    dgx_recording.remove_pci("0000:18:00.0")
    dgx_recording.remove_pci("0000:15:01.0")
    try:
        with pytest.raises(ConfigError, match="away"):
            dgx_recording.restore_pci("0000:18:00.0")
    finally:
        dgx_recording.restore_pci("0000:15:01.0")

    assert PciAddress.parse("0000:18:00.0") in {pci_device.address for pci_device in read(dgx_recording).pci_devices}


def test_set_carrier_tells_everywhere_when_the_cable_is_pulled(dgx_recording: RecordedMachine) -> None:
    """Interface and RDMA port both go down, and come back."""
    folder = dgx_recording.folder("0000:19:00.0")
    port, interface = f"{folder}/infiniband/mlx5_0/ports/1/state", f"{folder}/net/enp25s0/carrier"

    dgx_recording.set_carrier("0000:19:00.0", is_up=False)
    down = (dgx_recording.read(port), dgx_recording.read(interface))
    dgx_recording.set_carrier("0000:19:00.0", is_up=True)

    assert (down, dgx_recording.read(port), dgx_recording.read(interface)) == (("1: DOWN", "0"), "4: ACTIVE", "1")


SCRIPT = """
base = "laptop"
[[faults]]
at_s = 1.0
what = "cpu-offline"
target = "3"
for_s = 2.0
[[faults]]
at_s = 2.0
what = "remove-pci"
target = "0000:01:00.0"
[[faults]]
at_s = 2.5
what = "aer-fatal"
target = "0000:00:01.0"
[[faults]]
at_s = 2.6
what = "link-narrow"
target = "0000:00:01.0"
for_s = 1.0
[[faults]]
at_s = 2.7
what = "write"
target = "proc/meminfo"
text = "MemTotal: 1 kB"
for_s = 1.0
"""


async def test_play_follows_the_script_when_time_passes(tmp_path: Path) -> None:
    """Faults come and heal in their order at their times.

    The waits between them are what the script says.
    """
    file = tmp_path / "bad-day.toml"
    file.write_text(SCRIPT)
    machine = build(file, tmp_path / "tree")
    whole = contents(machine.root)
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(round(seconds, 3))

    done = await machine.play(speed=2.0, wait=wait)

    assert [line.split(" s: ")[1].rsplit(" ", 1)[0] for line in done] == [
        "cpu-offline",
        "remove-pci",
        "aer-fatal",
        "link-narrow",
        "write",
        "healed cpu-offline",
        "healed link-narrow",
        "healed write",
    ]
    assert waited == [0.5, 0.5, 0.25, 0.05, 0.05, 0.15, 0.3, 0.05]
    assert "TOTAL_ERR_FATAL 1" in machine.read(f"{machine.folder('0000:00:01.0')}/aer_dev_fatal")
    machine.restore_pci("0000:01:00.0")
    different = {path.rpartition("/")[2] for path, data in contents(machine.root).items() if whole.get(path) != data}
    assert different == {"aer_dev_fatal", "meminfo"}
    assert contents(machine.root / "proc").items() <= whole.items()  # the other meminfo is what was saved


def test_build_makes_device_nodes_that_come_back_with_their_card_when_they_are_wanted(tmp_path: Path) -> None:
    """What stands below dev can be handed to a container, before a card left the bus and after it
    came back.
    """
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can make device nodes")
    machine = build("dgx", tmp_path / "dgx", has_device_nodes=True)
    gpu = machine.pci("h100")[0]
    node = machine.root / "dev" / "nvidia0"
    before = node.is_char_device()
    machine.remove_pci(gpu)
    gone = not node.exists()
    machine.restore_pci(gpu)

    assert (before, gone, node.is_char_device()) == (True, True, True)
    assert [
        path.name for path in (machine.root / "dev").rglob("*") if not path.is_dir() and not path.is_char_device()
    ] == []
    assert read(machine) == read(build("dgx", tmp_path / "plain"))


def test_build_says_who_may_when_device_nodes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to make nodes the error says so, and what to do."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted", "dev/null.part")

    monkeypatch.setattr(os, "mknod", refuse)

    with pytest.raises(ConfigError, match=r"cannot write .*Operation not permitted.*made by root"):
        build("laptop", tmp_path / "laptop", has_device_nodes=True)
