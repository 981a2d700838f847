"""The kernel that obeys writes: files of a tree do what sysfs' do, and a PCI function changes its
driver by them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kernel_writes import KernelWrites
from support.pci_drivers import PciDrivers
from support.sysfs_trees import write

GPU = "0000:0a:00.0"
SOUND = "0000:0a:00.1"
BUS = "sys/bus/pci"
LIMIT_S = 60.0


def echo(root: Path, text: str, file: str) -> None:
    """Write into a file as a shell does."""
    (root / file).write_text(f"{text}\n")


def test_writes_are_obeyed_in_their_order_and_all_before_the_end(tmp_path: Path) -> None:
    """Two files in two folders: each text reaches its own reaction, the first one first, and none
    is lost when the kernel ends.
    """
    seen: list[str] = []
    write(tmp_path, {"sys/a/numbers": "", "sys/b/mode": ""})

    with KernelWrites(tmp_path) as kernel:
        kernel.obey("sys/a/numbers", lambda text: seen.append(f"numbers {text.strip()}"))
        kernel.obey("sys/b/mode", lambda text: seen.append(f"mode {text.strip()}"))
        echo(tmp_path, "2", "sys/a/numbers")
        echo(tmp_path, "CPX", "sys/b/mode")
        (tmp_path / "sys/b/other").write_text("nobody listens")

    assert seen == ["numbers 2", "mode CPX"]


def test_write_fails_where_the_kernel_refuses(tmp_path: Path) -> None:
    """A driver that says no is seen by whoever writes, and the file obeys again afterwards."""
    seen = threading.Event()
    write(tmp_path, {"sys/a/bind": ""})

    with KernelWrites(tmp_path) as kernel:
        kernel.obey("sys/a/bind", lambda _: seen.set())
        kernel.refuse("sys/a/bind")
        with pytest.raises(OSError, match="Is a directory"):
            echo(tmp_path, GPU, "sys/a/bind")
        is_refused = not seen.is_set()
        kernel.accept("sys/a/bind")
        echo(tmp_path, GPU, "sys/a/bind")
        is_obeyed = seen.wait(LIMIT_S)

    assert (is_refused, is_obeyed) == (True, True)


def test_error_of_a_reaction_ends_the_kernel_and_is_told(tmp_path: Path) -> None:
    """A test whose kernel broke does not pass."""

    def fail(_: str) -> None:
        raise RuntimeError("panic")

    def break_it() -> None:
        with KernelWrites(tmp_path) as kernel:
            kernel.obey("sys/a/bind", fail)
            echo(tmp_path, GPU, "sys/a/bind")

    write(tmp_path, {"sys/a/bind": ""})
    with pytest.raises(RuntimeError, match="panic"):
        break_it()


class Machine:
    """A GPU and its sound function in one group, each with its own driver."""

    def __init__(self, root: Path, kernel: KernelWrites) -> None:
        self.root = root
        self.kernel = kernel
        write(root, {f"{BUS}/devices/{GPU}/drm/renderD128/dev": "226:128", f"{BUS}/devices/{SOUND}/class": "0x040300"})
        self.drivers = PciDrivers(kernel)
        self.drivers.add_driver("vfio-pci")
        self.drivers.add_function(GPU, "nvidia", group=41, shown=(f"{BUS}/devices/{GPU}/drm",))
        self.drivers.add_function(SOUND, "snd_hda_intel", group=41)

    def write(self, text: str, file: str) -> None:
        """Write as root does, and wait until the kernel has done it."""
        echo(self.root, text, f"{BUS}/{file}")
        self.kernel.settle()

    @property
    def has_drm(self) -> bool:
        """Say whether the GPU shows what its own driver makes."""
        return (self.root / f"{BUS}/devices/{GPU}/drm/renderD128/dev").is_file()

    def nodes(self) -> list[str]:
        """Name the nodes of VFIO."""
        folder = self.root / "dev/vfio"
        return (
            sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            if folder.is_dir()
            else []
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Give the machine while its kernel runs."""
    with KernelWrites(tmp_path) as kernel:
        yield Machine(tmp_path, kernel)


def test_function_goes_to_vfio_and_back_by_the_kernels_files(machine: Machine) -> None:
    """Override, unbind, bind: VFIO has it with the nodes of group and function, and what its driver
    showed is gone.

    The way back leaves it as it was.
    """
    machine.write("vfio-pci", f"devices/{GPU}/driver_override")
    machine.write(GPU, "drivers/nvidia/unbind")
    machine.write(GPU, "drivers/vfio-pci/bind")
    there = (machine.drivers.driver_of(GPU), machine.nodes(), machine.has_drm)
    for text, file in (
        ("", f"devices/{GPU}/driver_override"),
        (GPU, "drivers/vfio-pci/unbind"),
        (GPU, "drivers_probe"),
    ):
        machine.write(text, file)

    assert there == ("vfio-pci", ["41", "devices/vfio0", "vfio"], False)
    assert (machine.drivers.driver_of(GPU), machine.nodes(), machine.has_drm) == ("nvidia", ["vfio"], True)
    assert machine.drivers.override_of(GPU) == ""
    assert machine.drivers.log[2:] == [
        f"nvidia leaves {GPU}",
        f"vfio-pci takes {GPU}",
        f"vfio-pci leaves {GPU}",
        f"nvidia takes {GPU}",
    ]


@pytest.mark.parametrize(
    ("override", "driver"),
    [("", "vfio-pci"), ("vfio-pci", "nvidia"), ("vfio-pci", "snd_hda_intel")],
    ids=["no-id-in-its-table", "override-of-another", "neither"],
)
def test_driver_takes_no_function_that_it_does_not_match(machine: Machine, override: str, driver: str) -> None:
    """As in the kernel: the override alone counts where there is one,
    else the driver's own table.
    """
    if override:
        machine.write(override, f"devices/{GPU}/driver_override")
    machine.write(GPU, "drivers/nvidia/unbind")
    machine.write(GPU, f"drivers/{driver}/bind")

    assert machine.drivers.driver_of(GPU) == ""


def test_last_override_counts_when_two_are_written_before_the_first_is_obeyed(machine: Machine) -> None:
    """A kernel that is late sees the second text at the first write already, and nothing that it
    makes of it stands in the second one's place.
    """
    is_let_go = threading.Event()

    def hold(_: str) -> None:
        is_let_go.wait(LIMIT_S)

    write(machine.root, {"sys/a/slow": ""})
    machine.kernel.obey("sys/a/slow", hold)
    machine.write(GPU, "drivers/nvidia/unbind")

    # The write between the two keeps inotify from making one event of both.
    override = f"{BUS}/devices/{GPU}/driver_override"
    for text, file in (("", "sys/a/slow"), ("vfio-pci", override), ("", "sys/a/slow"), ("", override)):
        echo(machine.root, text, file)
    is_let_go.set()
    machine.kernel.settle()
    machine.write(GPU, "drivers/nvidia/bind")

    assert (machine.drivers.override_of(GPU), machine.drivers.driver_of(GPU)) == ("", "nvidia")


def test_group_has_its_node_as_long_as_a_function_of_it_is_with_vfio(machine: Machine) -> None:
    """Two functions of one group share its node; it goes with the last."""
    for address in (GPU, SOUND):
        machine.write("vfio-pci", f"devices/{address}/driver_override")
        machine.write(address, f"drivers/{machine.drivers.driver_of(address)}/unbind")
        machine.write(address, "drivers_probe")
    both = machine.nodes()
    machine.write(GPU, "drivers/vfio-pci/unbind")

    assert both == ["41", "devices/vfio0", "devices/vfio1", "vfio"]
    assert machine.nodes() == ["41", "devices/vfio1", "vfio"]
