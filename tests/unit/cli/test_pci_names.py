"""Names of PCI functions from the list that a system keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.pci_names import copy_names, read_pci_names
from topobus.simulation.machines import build
from topobus.values.machine import PciDevice
from topobus.values.pci import PciAddress

LIST = """# a comment
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t740f  Aldebaran/MI200 [Instinct MI210]
\t\t1002 0c34  Instinct MI210 of a board
8086  Intel Corporation
\t1563  Ethernet Controller X550
C 03  Display controller
\t00  VGA compatible controller
"""


def function(vendor: int, device: int) -> PciDevice:
    """Build a function with these ids."""
    return PciDevice(address=PciAddress(0, 1, 0, 0), vendor=vendor, device=device)


@pytest.mark.parametrize("place", ["usr/share/misc", "usr/share/hwdata"])
def test_read_pci_names_finds_the_list_when_it_lies_where_distributions_put_it(tmp_path: Path, place: str) -> None:
    """Short names: the company as people say it, and what the card is sold as."""
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "pci.ids").write_text(LIST, encoding="utf-8")

    names = read_pci_names(
        [function(0x1002, 0x740F), function(0x8086, 0x1563), function(0x8086, 0xBCCE), function(0x03, 0x00)], tmp_path
    )

    assert names == {
        (0x1002, 0x740F): "AMD/ATI Instinct MI210",
        (0x8086, 0x1563): "Intel X550",
        (0x8086, 0xBCCE): "Intel [8086:bcce]",
    }


def test_read_pci_names_prefers_the_machines_own_list_when_both_have_one(tmp_path: Path) -> None:
    """The first root that has a list decides; a root without one is passed over."""
    for root, name in (("own", "Ours"), ("other", "Theirs")):
        (tmp_path / root / "usr/share/misc").mkdir(parents=True)
        (tmp_path / root / "usr/share/misc/pci.ids").write_text(f"1002  {name}\n", encoding="utf-8")

    names = read_pci_names([function(0x1002, 1)], tmp_path / "none", tmp_path / "own", tmp_path / "other")

    assert names == {(0x1002, 1): "Ours [1002:0001]"}


def test_read_pci_names_has_none_when_there_is_no_list_that_can_be_read(tmp_path: Path) -> None:
    """A folder in the place of the list, or no list at all, is no error: ids are drawn."""
    (tmp_path / "usr/share/misc/pci.ids").mkdir(parents=True)

    assert read_pci_names([function(0x1002, 0x740F)], tmp_path) == {}
    assert not copy_names([function(0x1002, 0x740F)], tmp_path, tmp_path / "copy")


def test_record_takes_the_names_along_when_the_system_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording is drawn with names on any system: it carries the part of the list that its
    machine needs, and no more.
    """
    # Wide enough for a name on one line, whatever terminal the tests run in.
    monkeypatch.setenv("COLUMNS", "200")
    build("epyc-8numa", tmp_path / "machine")
    (tmp_path / "machine/usr/share/misc").mkdir(parents=True)
    (tmp_path / "machine/usr/share/misc/pci.ids").write_text(LIST + "# more\n", encoding="utf-8")

    assert run(["record", str(tmp_path / "copy"), "--root", str(tmp_path / "machine")]) == 0
    capsys.readouterr()
    assert run(["machine", "--root", str(tmp_path / "copy")]) == 0

    assert "display 61:00.0 AMD/ATI Instinct MI210" in capsys.readouterr().out
    assert (tmp_path / "copy/usr/share/misc/pci.ids").read_text(encoding="utf-8").splitlines() == [
        "1002  Advanced Micro Devices, Inc. [AMD/ATI]",
        "\t740f  Aldebaran/MI200 [Instinct MI210]",
        "8086  Intel Corporation",
        "\t1563  Ethernet Controller X550",
    ]
