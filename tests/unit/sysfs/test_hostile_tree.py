"""Trees that somebody else recorded: what is no regular file, or has no end, is told and passed
over.

Nothing is read outside the tree, and every read ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from support.sysfs_trees import CPU, NODE, cpu_files, node_files, write
from topobus.cli.pci_names import read_pci_names
from topobus.sysfs.machine import read_machine
from topobus.sysfs.recording import record
from topobus.sysfs.regular_file import inside_root, open_regular, read_all, read_regular
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.errors import HardwareError
from topobus.values.machine import PciDevice
from topobus.values.pci import PciAddress

_FUNCTION = "sys/bus/pci/devices/0000:41:00.0"
_20_GB = 20 << 30


def make_socket(path: Path) -> None:
    """Bind a socket to a path, however long that is."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def make_endless(path: Path) -> None:
    """Make a file of 20 GB that takes no room."""
    path.touch()
    os.truncate(path, _20_GB)


UNFIT: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "it is a FIFO, wanted a regular file"),
    "socket": (make_socket, "it is a socket, wanted a regular file"),
    "endless": (make_endless, "it has more than "),
}


def machine_files() -> dict[str, object]:
    """Describe a machine with one node and one function."""
    files = (
        cpu_files(2) | {f"{NODE}/online": "0", "proc/cpuinfo": "processor : 0\n"} | node_files(0, (0, 1), distance="10")
    )
    return files | {
        f"{_FUNCTION}/{name}": text
        for name, text in (("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2330"))
    }


@pytest.mark.parametrize("kind", ["fifo", "socket", "endless"])
@pytest.mark.parametrize(
    "path",
    [
        f"{_FUNCTION}/numa_node",
        f"{CPU}/cpu0/topology/core_cpus",
        f"{NODE}/node0/cpumap",
        f"{NODE}/node0/meminfo",
        f"{CPU}/online",
        f"{CPU}/cpu0/cpu_capacity",
    ],
)
def test_read_machine_tells_a_file_that_is_none_and_goes_on(tmp_path: Path, path: str, kind: str) -> None:
    """A FIFO, a socket or a file without an end in place of an attribute is one warning with its
    path, and the rest is read.
    """
    tree = write(tmp_path, machine_files())
    make, why = UNFIT[kind]
    (tmp_path / path).unlink(missing_ok=True)
    make(tmp_path / path)

    machine = read_machine(tree, "n")

    assert any(path in warning and why in warning for warning in machine.warnings), machine.warnings
    assert [str(device.address) for device in machine.pci_devices] == ["0000:41:00.0"]


@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_read_machine_refuses_when_what_it_cannot_do_without_is_no_file(tmp_path: Path, kind: str) -> None:
    """Where the whole machine hangs on one file (/proc/cpuinfo of a kernel that tells no more), the
    error names it.
    """
    tree = write(tmp_path, {"proc/meminfo": "MemTotal: 2 kB", "sys/devices/x": ""})
    make, why = UNFIT[kind]
    make(tmp_path / "proc/cpuinfo")

    with pytest.raises(HardwareError) as caught:
        read_machine(tree, "n")

    assert "proc/cpuinfo" in caught.value.message
    assert why in caught.value.message


@pytest.mark.parametrize("kind", ["fifo", "socket", "endless"])
def test_read_bytes_gives_nothing_endless_when_configuration_space_is_no_file(tmp_path: Path, kind: str) -> None:
    """A function's configuration space is read up to its limit, and not
    at all where it is no file.
    """
    tree = write(tmp_path, machine_files())
    make, _ = UNFIT[kind]
    make(tmp_path / f"{_FUNCTION}/config")

    data = tree.read_bytes(f"{_FUNCTION}/config", 256)

    assert data == (bytes(256) if kind == "endless" else None)


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_record_names_what_is_no_file_when_it_copies_a_tree(tmp_path: Path, kind: str) -> None:
    """A recording of a recording leaves out what is no file, named, wherever it lies."""
    source, target = tmp_path / "source", tmp_path / "target"
    tree = write(source, machine_files())
    make, _ = UNFIT[kind]
    (source / "proc/cpuinfo").unlink()
    for path in ("proc/cpuinfo", f"{_FUNCTION}/numa_node"):
        make(source / path)

    done = record(tree, target)

    assert sorted(
        line.partition(":")[0] if "cpuinfo" in line else line.rpartition(":")[0] for line in done.unreadable
    ) == [
        "proc/cpuinfo",
        f"{_FUNCTION}/numa_node",
    ]
    assert read_machine(Tree(HardwareSettings(root=str(target), honours_cpuset=False)), "n").numa_nodes


def test_record_ends_when_a_file_has_no_end(tmp_path: Path) -> None:
    """Of a file without an end the beginning is copied."""
    source, target = tmp_path / "source", tmp_path / "target"
    tree = write(source, machine_files())
    make_endless(source / f"{_FUNCTION}/numa_node")

    record(tree, target)

    assert (target / f"{_FUNCTION}/numa_node").stat().st_size == 64 * 1024


def test_read_regular_reads_all_of_a_file_or_refuses_it(tmp_path: Path) -> None:
    """A file of several parts is read whole, and one beyond the limit not at all, also when it told
    no size (as the kernel's files).
    """
    file = tmp_path / "large"
    file.write_bytes(bytes(range(256)) * 1024)

    whole = read_regular(file, 256 * 1024)

    assert whole == bytes(range(256)) * 1024
    for read in (
        lambda: read_regular(file, 256 * 1024 - 1),
        lambda: read_all(os.open(file, os.O_RDONLY), file, 256 * 1024 - 1),
    ):
        with pytest.raises(OSError, match="more than 262143 bytes"):
            read()


def test_open_regular_opens_no_device_and_no_folder(tmp_path: Path) -> None:
    """A device may act on being opened, so its kind is looked at before."""
    with pytest.raises(OSError, match="a character device, wanted a regular file"):
        open_regular("/dev/null")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


@pytest.mark.parametrize("link", ["{secret}", "../../../../../../../../../..{secret}", "within"])
def test_links_stay_inside_a_root_when_they_lead_out_of_it(tmp_path: Path, link: str) -> None:
    """An absolute link begins at the root, and one that climbs stays there, in whichever part of
    the path it is.

    One inside is followed.
    """
    root, secret = tmp_path / "a/root", tmp_path / "secret"
    (root / "cgroup").mkdir(parents=True)
    secret.write_text("0-7", encoding="utf-8")
    (root / "cgroup/within").write_text("0-1", encoding="utf-8")
    (root / "cgroup/file").symlink_to(link.format(secret=secret))
    (root / "folder").symlink_to(link.format(secret=tmp_path))
    tree = Tree(HardwareSettings(root=str(root)))

    texts = tree.read_mounted("/cgroup/file"), tree.read_mounted("/folder/secret")

    assert texts == ("0-1" if link == "within" else None, None)


def test_inside_root_gives_up_when_links_go_in_a_circle(tmp_path: Path) -> None:
    """A circle of links is an error as the kernel's."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(OSError, match="Too many levels"):
        inside_root(tmp_path, "a")


def test_read_pci_names_reads_no_list_outside_its_root(tmp_path: Path) -> None:
    """A list of a recorded tree that is a link to the reader's own files, or a FIFO, is none."""
    outside, root = tmp_path / "pci.ids", tmp_path / "root"
    outside.write_text("1002  Outside\n", encoding="utf-8")
    for folder in ("usr/share/misc", "usr/share/hwdata"):
        (root / folder).mkdir(parents=True)
    (root / "usr/share/misc/pci.ids").symlink_to(outside)
    os.mkfifo(root / "usr/share/hwdata/pci.ids")

    names = read_pci_names([PciDevice(address=PciAddress(0, 1, 0, 0), vendor=0x1002, device=1)], root)

    assert names == {}
