"""Intel GPUs with virtual functions: the card beside them, and cards that are cut when a claim gets
a virtual function.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sriov_bench import COUNT, SriovBench
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import PartitionSettings
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.plugins.intel import IntelDriver
from topobus.testing.drivers.deaths import deaths
from topobus.values.device import DeviceRole
from topobus.values.outcome import Refusal
from topobus.values.partitions import Partitions

CARD = "gpu-0000-3b-00-0"
PARTS = [f"gpu-0000-3b-02-{index}" for index in range(COUNT)]


def make_driver() -> IntelDriver:
    """Make a driver that looks at no leftovers: the processes of this
    machine are not the card's.
    """
    driver = IntelDriver()
    driver.configure(GpuServices(leftovers=LeftoverSettings(check=False)))
    return driver


def drm_files(folder: str, index: int) -> dict[str, object]:
    """Give what xe shows of a function; -1 is the physical one."""
    minors = {f"renderD{129 + index}": 129 + index, f"card{1 + index}": 1 + index}
    files: dict[str, object] = {f"{folder}/drm/{name}/dev": f"226:{minor}" for name, minor in minors.items()}
    return files | {f"{folder}/drm/{name}/uevent": f"DEVNAME=dri/{name}" for name in minors}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SriovBench]:
    """Give a machine with one Flex card that obeys."""
    with SriovBench(tmp_path, make_driver, device=0x56C0, class_code=0x038000, driver="xe", files=drm_files) as made:
        yield made


def nodes(answer: object, name: str) -> list[str]:
    """Give the device nodes of one device."""
    assert isinstance(answer, dict), answer
    return [node.path for node in answer[name].device_nodes]


@pytest.mark.parametrize("present", [0, COUNT])
def test_discover_offers_the_card_and_its_functions_when_they_are_on_or_off(bench: SriovBench, present: int) -> None:
    """The card and the functions that it can have, with a counter by which never both are held."""
    bench.kernel.set_number(present)

    devices = bench.look()

    assert list(devices) == [CARD, *PARTS]
    assert {device.role for device in devices.values()} == {DeviceRole.COMPUTE}
    partitions = Partitions(devices.values(), bench.counter_sets)
    assert partitions.shortage((), PARTS) is None
    assert [name for name in PARTS if partitions.shortage((CARD,), (name,)) is None] == []


def test_prepare_makes_the_functions_and_gives_the_node_of_one(bench: SriovBench) -> None:
    """Each function has its own render node; the card has its own again when it is whole."""
    part = bench.get("a", PARTS[1])
    bench.unprepare("a", PARTS[1])
    whole = bench.get("b", CARD)

    assert nodes(part, PARTS[1]) == ["/dev/dri/card2", "/dev/dri/renderD130"]
    assert nodes(whole, CARD) == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert bench.kernel.writes == [COUNT, 0]


def test_card_is_not_cut_when_a_process_has_it_open(bench: SriovBench) -> None:
    """A display server or a job outside of Kubernetes is named."""
    folder = bench.root / "proc/77"
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text("Xorg\n")
    (folder / "fd/4").symlink_to("/dev/dri/renderD128")

    refusal = bench.get("a", PARTS[0])

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["users"] == ("process 77 (Xorg) has /dev/dri/renderD128 open",)
    assert bench.kernel.writes == []


def test_card_can_be_had_when_the_service_was_killed_at_any_step_of_prepare(bench: SriovBench) -> None:
    """The next start finds the functions there or not, nobody's, and either way can be had."""
    died = 0
    for step in deaths(bench.journal.folder, lambda journal: bench.get("a", PARTS[0], journal=journal)):
        died = step
        bench.writes.settle()
        bench.restart()
        bench.undo_all()
        assert bench.journal.entries == {}
        bench.look()
        assert isinstance(bench.get("b", CARD), dict)
        bench.unprepare("b", CARD)
        bench.look()
        bench.journal.close()

    assert died >= 8


def test_card_is_offered_beside_its_functions_when_parents_are_counted(bench: SriovBench) -> None:
    """Without a rule a card with functions on is hidden behind them, or counted with them, as the
    setting says.

    Given as that alone.
    """
    assert isinstance(bench.driver, IntelDriver)
    bench.driver.on_demand_functions.rules = ()
    bench.kernel.set_number(COUNT)
    hidden = list(bench.look())
    bench.driver.configure(HostServices(partitions=PartitionSettings(parents="counted")))
    counted = bench.look()

    given = bench.get("a", CARD)
    bench.unprepare("a", CARD)
    bench.kernel.set_number(0)
    refused = bench.get("a", CARD)

    assert hidden == []
    assert (list(counted), counted[CARD].role) == ([CARD], DeviceRole.PARTITION_PARENT)
    assert nodes(given, CARD) == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "device-not-offered"
