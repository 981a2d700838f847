"""DFL FPGAs, read from small trees as the kernel lays them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topobus.sysfs.fpga import DflCard, dfl_regions, read_dfl_card
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.errors import HardwareError

CARD = "sys/devices/pci0000:5d/0000:5d:00.0/0000:5e:00.0"
REGION = f"{CARD}/fpga_region/region0"
ENGINE = f"{REGION}/dfl-fme.0"
PORT = f"{REGION}/dfl-port.0"
FILES = {
    f"{CARD}/numa_node": "1",
    f"{ENGINE}/bitstream_id": "0x23000410010310",
    f"{ENGINE}/errors/catfatal_errors": "0x0",
    f"{ENGINE}/errors/fme_errors": "0x2",
    f"{ENGINE}/errors/inject_errors": "0x1",
    f"{ENGINE}/dfl-fme-region.3/fpga_region/region1/compat_id": "9926ab6d6c925a68aabca7d84c545738",
    f"{ENGINE}/hwmon/hwmon4/temp1_crit_alarm": "0",
    f"{PORT}/afu_id": "9AEFFE5F84570612C000C9660D824272",
    f"{PORT}/errors/errors": "0x0",
    f"{PORT}/power_state": "0x0",
}


def make_tree(root: Path, files: dict[str, str], regions: tuple[str, ...] = (REGION,)) -> Tree:
    """Write files and the class links of the regions, and open the tree."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    folder = root / "sys/class/fpga_region"
    folder.mkdir(parents=True, exist_ok=True)
    for region in (*regions, f"{ENGINE}/dfl-fme-region.3/fpga_region/region1"):
        if (root / region).exists():
            (folder / Path(region).name).symlink_to(os.path.relpath(root / region, folder))
    return Tree(HardwareSettings(root=str(root)))


def read_card(root: Path, **changes: str) -> DflCard:
    """Read the card of a tree whose files differ from a healthy card's in `changes` (last part of
    the name).
    """
    files = {name: changes.get(name.rpartition("/")[2], text) for name, text in FILES.items()}
    return read_dfl_card(make_tree(root, files), "region0")


def test_dfl_regions_counts_one_card_when_it_has_an_inner_region(tmp_path: Path) -> None:
    """The reconfigurable region of a card stands in the same class and is no card of its own."""
    assert dfl_regions(make_tree(tmp_path, FILES)) == ("region0",)


def test_read_dfl_card_tells_where_it_is_and_what_is_loaded_when_healthy(tmp_path: Path) -> None:
    """Address, node, ids and ports come back as values; ids in lower case."""
    card = read_card(tmp_path)

    assert (str(card.pci), card.numa_node, card.engine) == ("0000:5e:00.0", 1, "dfl-fme.0")
    assert (card.bitstream_id, card.interface_ids) == ("0x23000410010310", ("9926ab6d6c925a68aabca7d84c545738",))
    assert [(port.name, port.afu_id, port.has_crashed) for port in card.ports] == [
        ("dfl-port.0", "9aeffe5f84570612c000c9660d824272", False)
    ]


def test_read_dfl_card_keeps_error_registers_apart_when_one_is_injected(tmp_path: Path) -> None:
    """Registers keep their names and values, and the injection aid is no register."""
    card = read_card(tmp_path)

    assert {error.name: error.value for error in card.errors} == {"catfatal_errors": 0, "fme_errors": 2}


def test_dfl_port_has_crashed_when_its_id_reads_all_ones(tmp_path: Path) -> None:
    """All ones is what a dead function answers."""
    assert read_card(tmp_path, afu_id="f" * 32).ports[0].has_crashed


def test_read_dfl_card_leaves_the_node_open_when_the_kernel_says_unknown(tmp_path: Path) -> None:
    """-1 is unknown, never node 0."""
    assert read_card(tmp_path, numa_node="-1").numa_node is None


def test_read_dfl_card_has_no_address_when_the_fpga_is_on_no_pci_bus(tmp_path: Path) -> None:
    """An FPGA of a system on chip has neither address nor node."""
    region = "sys/devices/platform/soc/fpga_region/region0"
    tree = make_tree(tmp_path, {f"{region}/dfl-port.0/afu_id": "0" * 32}, regions=(region,))

    card = read_dfl_card(tree, "region0")

    assert (card.pci, card.numa_node, card.engine) == (None, None, "")


def test_read_dfl_card_names_the_file_when_a_register_is_garbage(tmp_path: Path) -> None:
    """A register that is no number is an error with its path."""
    with pytest.raises(HardwareError, match="fme_errors"):
        read_card(tmp_path, fme_errors="oops")


def test_read_dfl_card_says_so_when_the_region_is_gone(tmp_path: Path) -> None:
    """A card that was removed between listing and reading is a hardware error, not a crash."""
    with pytest.raises(HardwareError, match="region7"):
        read_dfl_card(make_tree(tmp_path, FILES), "region7")
