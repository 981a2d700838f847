"""Functions of Xilinx cards: the shell decides what fits, XRT shows late what was loaded, and a
card of several user functions is not programmed for one of them.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.bitstream_files import INTERFACE, PLATFORM, XCLBIN_UUID, gbs, xclbin
from support.fpga_cards import FileXrtProgrammer, add, xilinx_machine
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs, JournaledWork
from topobus.fpga.config import FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.fpga.programmer import XrtProgrammer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

ONE = Owner(kind=OwnerKind.CLAIM, namespace="team-a", name="one", uid="u1")
TWO = Owner(kind=OwnerKind.CLAIM, namespace="team-a", name="two", uid="u2")


class Bench:
    """The card, a store and a journal."""

    def __init__(self, folder: Path) -> None:
        self.root, self.store = folder / "machine", folder / "store"
        self.recorded = xilinx_machine(self.root)
        self.programmer = FileXrtProgrammer(self.root)
        self.journal = Journal(folder / "journal")
        self.journal.load()
        self.tree = Tree(HardwareSettings(root=str(self.root)))
        self.restart()

    def restart(self) -> None:
        """Begin anew with what the journal knows."""
        programmer: XrtProgrammer = self.programmer
        self.driver = XilinxDriver(programmer)
        self.driver.configure(FpgaServices(functions=FunctionSettings(store=str(self.store)), can_program=True))

    def card(self) -> Device:
        """Find the card."""
        return self.driver.discover(self.tree, read_machine(self.tree, "n")).devices[0]

    def prepare(self, function: str, owner: Owner = ONE) -> object:
        """Prepare the card with a function, long work to its end."""
        config: tuple[dict[str, Any], ...] = (
            {"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": function},
        )
        card = self.card()
        answer = JournaledVerbs(self.journal, self.driver, self.tree).prepare(
            [card], PrepareContext(owner=owner, config=config), [card.name]
        )
        return answer.run(lambda: True) if isinstance(answer, JournaledWork) else answer

    def release(self, owner: Owner = ONE) -> None:
        """Let an owner go, and clean the card."""
        JournaledVerbs(self.journal, self.driver, self.tree).unprepare([self.card()], PrepareContext(owner=owner))
        assert JournaledVerbs(self.journal, self.driver, self.tree).clean(self.card()) is None

    def show(self, uuid: str) -> None:
        """Let the user function show an uuid, as XRT does once a user has opened the card."""
        path = self.tree.path(f"sys/bus/pci/devices/{self.card().pci}/xclbinuuid")
        path.write_text(f"{uuid}\n", encoding="ascii")


def code(answer: object) -> str:
    """Give a refusal's code."""
    assert isinstance(answer, Refusal), answer
    return answer.reasons[0].code


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A card with nothing loaded, and a store with a function for it."""
    made = Bench(tmp_path)
    add(made.store, xclbin(), "filter")
    return made


def test_card_is_programmed_once_when_two_claims_want_one_function(bench: Bench) -> None:
    """Sysfs shows nothing yet; what this process has loaded is known all the same."""
    first = bench.prepare("filter")
    seen = bench.card().attributes
    bench.release()
    second = bench.prepare("filter", TWO)

    assert not isinstance(first, Refusal), first
    assert (seen["xclbinUuid"], seen["function"]) == (XCLBIN_UUID, "filter")
    assert second == first
    assert bench.programmer.calls == ["program"]


def test_card_is_not_programmed_when_the_user_function_shows_the_wanted_uuid(bench: Bench) -> None:
    """Whoever loaded it: in the id's own spelling."""
    bench.show("5f1c9d4e-2b7a-43d8-8c90-aa17e2b35c11")

    assert not isinstance(bench.prepare("filter"), Refusal)
    assert bench.programmer.calls == []


def test_card_is_programmed_anew_when_its_user_has_loaded_something_else(bench: Bench) -> None:
    """A user may load an xclbin by the user function.

    What this process loaded before does not count then.
    """
    bench.prepare("filter")
    bench.show("ab" * 16)
    bench.release()

    assert not isinstance(bench.prepare("filter", TWO), Refusal)
    assert bench.programmer.calls == ["program", "program"]


def test_card_is_programmed_anew_when_it_was_passed_through_in_between(bench: Bench) -> None:
    """A virtual machine may have loaded anything, and sysfs shows nothing of it.

    While the card is away, what was loaded is forgotten.
    """
    bench.prepare("filter")
    bench.release()
    card = bench.card()
    driver_link = bench.tree.path(f"sys/bus/pci/devices/{card.pci}") / "driver"
    own = driver_link.readlink()
    driver_link.unlink()
    driver_link.symlink_to(own.parent / "vfio-pci")
    names = [device.name for device in bench.driver.discover(bench.tree, read_machine(bench.tree, "n")).devices]
    driver_link.unlink()
    driver_link.symlink_to(own)

    assert card.name not in names
    assert not isinstance(bench.prepare("filter", TWO), Refusal)
    assert bench.programmer.calls == ["program", "program"]


def test_card_is_not_sick_while_it_is_programmed(bench: Bench) -> None:
    """XRT takes a card offline for the time; afterwards that is a fault."""
    card = bench.card()
    offline = bench.tree.path(f"sys/bus/pci/devices/{card.pci}/dev_offline")
    seen: list[object] = []

    def look() -> None:
        offline.write_text("1", encoding="ascii")
        seen.append(bench.driver.observe(bench.tree, [card])[card.name])

    bench.programmer.halfway = look
    bench.prepare("filter")

    assert seen == [[]]
    assert [observation.reason for observation in bench.driver.observe(bench.tree, [card])[card.name]] == [
        "device-offline"
    ]


def test_claim_keeps_its_card_when_the_service_restarts(bench: Bench) -> None:
    """Its record says what was loaded for it, where sysfs does not."""
    bench.prepare("filter")
    bench.restart()

    assert not isinstance(bench.prepare("filter"), Refusal)
    assert bench.programmer.calls == ["program"]


@pytest.mark.parametrize(
    "content",
    [xclbin(platform="xilinx_u200_xdma_201830_2"), xclbin(interface=INTERFACE), gbs()],
    ids=["shell", "interface", "maker"],
)
def test_claim_is_refused_when_the_function_is_for_another_shell(bench: Bench, content: bytes) -> None:
    """By the interface's uuid where the file and the card tell one, else by the platform's name."""
    add(bench.store, content, "elsewhere")

    assert code(bench.prepare("elsewhere")) == "function-misfit"
    assert bench.programmer.calls == []
    assert "fits_elsewhere" not in bench.card().attributes


@pytest.mark.parametrize(("timestamp", "is_fit"), [(0, True), (0x5E9C1A1B, True), (0x11111111, False)])
def test_shell_is_compared_by_its_time_where_both_tell_one(bench: Bench, timestamp: int, is_fit: bool) -> None:
    """Two shells of one name are two shells.

    Colons and dots in the file's word for it are underscores on the card.
    """
    folder = bench.tree.path(f"sys/bus/pci/devices/{bench.card().pci}")
    (rom,) = folder.glob("rom.u.*")
    (rom / "timestamp").write_text("0x5e9c1a1b", encoding="ascii")
    add(bench.store, xclbin(platform=PLATFORM.replace("_gen3x16", ":gen3x16"), timestamp=timestamp), "timed")

    assert bench.card().attributes.get("fits_timed", False) is is_fit


def test_card_of_several_user_functions_is_not_programmed(bench: Bench) -> None:
    """They share one region; the other's user would lose his function."""
    card = bench.card()
    bench.driver.remember([msgspec.structs.replace(card, name=f"{card.name}-user-1", partition_of=card.name)])

    answer = bench.prepare("filter")

    assert code(answer) == "region-not-programmable"
    assert "several user functions" in str(answer)
    assert "fits_filter" not in bench.card().attributes


def test_card_is_not_programmed_when_its_management_function_is_elsewhere(bench: Bench) -> None:
    """In a virtual machine the host programs."""
    instance = bench.tree.path(f"sys/bus/pci/devices/{bench.card().attributes['managementPciBusID']}/instance")
    instance.unlink()

    assert code(bench.prepare("filter")) == "region-not-programmable"


def test_card_stays_in_doubt_until_it_is_programmed_when_a_death_cut_programming_off(bench: Bench) -> None:
    """What sysfs shows proves nothing here, for it may be from before.

    So the region is written anew.
    """
    bench.show("ab" * 16)
    bench.programmer.error = errno.EIO
    assert code(bench.prepare("filter")) == "programming-failed"
    name = bench.card().name
    with pytest.raises(HardwareError, match="what is in its region is not known"):
        JournaledVerbs(bench.journal, bench.driver, bench.tree).undo_prepare(bench.card(), ONE)
    assert bench.journal.entries[name].half_done

    bench.programmer.error = 0
    JournaledVerbs(bench.journal, bench.driver, bench.tree).undo_prepare(bench.card(), ONE)

    assert (name in bench.journal.entries, bench.programmer.calls) == (False, ["program"])
