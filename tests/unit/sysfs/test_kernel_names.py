"""What the kernel calls the things behind PCI functions is read wherever it hangs below them, and
drawn and told for a tree.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.sysfs.kernel_names import read_kernel_names
from topobus.sysfs.recording import record
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.pci import PciAddress

_ROOT = "sys/devices/pci0000:00"
_VIRTIO_NIC, _VIRTIO_DISK, _NVME, _SATA, _RDMA, _BARE = (f"0000:00:0{number}.0" for number in range(3, 9))


def _link(root: Path, place: str, target: str) -> None:
    link = root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    # As the kernel writes them: inside /sys.
    link.symlink_to("../" * (place.count("/") - 1) + target.removeprefix("sys/"))


@pytest.fixture
def tree_folder(tmp_path: Path) -> Path:
    """A virtual machine's virtio functions beside NVMe, SATA and an RDMA card.

    Two of the disks have partitions.
    """
    root = tmp_path / "vm"
    classes = {
        _VIRTIO_NIC: 0x020000,
        _VIRTIO_DISK: 0x018000,
        _NVME: 0x010802,
        _SATA: 0x010601,
        _RDMA: 0x020700,
        _BARE: 0x028000,
    }
    for address, class_code in classes.items():
        folder = root / _ROOT / address
        folder.mkdir(parents=True)
        for file, text in {"vendor": "0x1af4", "device": "0x1041", "class": f"{class_code:#08x}"}.items():
            (folder / file).write_text(f"{text}\n")
        _link(root, f"sys/bus/pci/devices/{address}", f"{_ROOT}/{address}")
    for path in (f"{_VIRTIO_NIC}/virtio2/net/eth0", f"{_RDMA}/net/ibs1", f"{_RDMA}/infiniband/mlx5_0"):
        (root / _ROOT / path).mkdir(parents=True)
    disks = {
        "vda": f"{_VIRTIO_DISK}/virtio1/block/vda",
        "nvme0n1": f"{_NVME}/nvme/nvme0/nvme0n1",
        "nvme0c0n1": f"{_NVME}/nvme/nvme0/nvme0c0n1",
        "sda": f"{_SATA}/ata1/host0/target0:0:0/0:0:0:0/block/sda",
    }
    for name, path in disks.items():
        (root / _ROOT / path).mkdir(parents=True)
        _link(root, f"sys/class/block/{name}", f"{_ROOT}/{path}")
    (root / _ROOT / disks["vda"] / "vda1").mkdir()
    (root / _ROOT / disks["vda"] / "vda1" / "partition").write_text("1\n")
    _link(root, "sys/class/block/vda1", f"{_ROOT}/{disks['vda']}/vda1")
    (root / "sys/devices/virtual/block/loop0").mkdir(parents=True)
    _link(root, "sys/class/block/loop0", "sys/devices/virtual/block/loop0")
    (root / "sys/devices/system/cpu/cpu0").mkdir(parents=True)
    (root / "sys/devices/system/cpu/cpu0/topology").mkdir()
    (root / "sys/devices/system/cpu/online").write_text("0\n")
    (root / "sys/devices/system/cpu/present").write_text("0\n")
    return root


def test_kernel_names_are_those_of_lstopo_when_things_hang_at_any_depth(tree_folder: Path) -> None:
    """Interfaces, whole disks and RDMA devices by their function.

    Partitions, paths of multipath NVMe and what is no PCI function's are left out.
    """
    tree = Tree(HardwareSettings(root=str(tree_folder)))
    addresses = [PciAddress.parse(text) for text in (_VIRTIO_NIC, _VIRTIO_DISK, _NVME, _SATA, _RDMA, _BARE)]

    names = read_kernel_names(tree, addresses)

    assert {str(address): kernel for address, kernel in names.items()} == {
        _VIRTIO_NIC: ("eth0",),
        _VIRTIO_DISK: ("vda",),
        _NVME: ("nvme0n1",),
        _SATA: ("sda",),
        _RDMA: ("ibs1", "mlx5_0"),
    }


def test_recording_has_the_names_of_disks_and_nothing_more_of_them(tree_folder: Path, tmp_path: Path) -> None:
    """What `topobus record` writes names what the machine names, without what lies in a disk's
    folder.
    """
    addresses = [PciAddress.parse(text) for text in (_VIRTIO_NIC, _VIRTIO_DISK, _NVME, _SATA, _RDMA, _BARE)]
    machine, recorded = (
        Tree(HardwareSettings(root=str(tree_folder))),
        Tree(HardwareSettings(root=str(tmp_path / "recorded"))),
    )

    record(machine, tmp_path / "recorded")

    assert read_kernel_names(recorded, addresses) == read_kernel_names(machine, addresses)
    assert not recorded.exists("sys/class/block/loop0")
    assert not recorded.names("sys/class/block/vda")


def test_machine_names_interfaces_disks_and_models_when_a_tree_is_drawn(
    tree_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drawing and the JSON say what lstopo says: the kernel's name, and the model where pci.ids
    has it.
    """
    ids = tree_folder / "usr/share/misc/pci.ids"
    ids.parent.mkdir(parents=True)
    ids.write_text("1af4  Red Hat, Inc.\n\t1041  Virtio 1.0 network device\n")

    drawn_code = run(["machine", "--root", str(tree_folder)])
    drawn = capsys.readouterr().out
    code = run(["machine", "--root", str(tree_folder), "--json"])
    functions = {function["address"]: function for function in json.loads(capsys.readouterr().out)["pci"]}

    assert (drawn_code, code) == (0, 0)
    assert "nic 00:03.0 eth0  Red Hat Virtio 1.0 network device" in drawn
    assert "disk 00:05.0 nvme0n1" in drawn
    assert (functions[_VIRTIO_NIC]["names"], functions[_VIRTIO_NIC]["model"]) == (
        ["eth0"],
        "Red Hat Virtio 1.0 network device",
    )
    assert "names" not in functions[_BARE]
