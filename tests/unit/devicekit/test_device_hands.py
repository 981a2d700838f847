"""Attach, detach and undoing through the host's hands, on cards that are folders.

Time is virtual.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.hands_bench import OTHER, OWNER, TIMEOUT_S, HandsBench, new_card
from support.looks import other_threads
from support.toy_driver import ToyDriver
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import LongWork, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs
from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.formats.messages.sandbox_messages import Attached, AttachReply
from topobus.sysfs.tree import Tree
from topobus.testing.drivers.folder_driver import CARDS, FolderDriver
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import HealthState
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox


@pytest.fixture
def bench(tmp_path: Path) -> HandsBench:
    """Two cards at home."""
    return HandsBench(tmp_path)


def codes(result: object) -> list[str]:
    """Give a refusal's codes."""
    assert isinstance(result, Refusal), result
    return [reason.code for reason in result.reasons]


async def test_card_is_in_the_sandbox_and_comes_home_when_it_is_attached_and_detached(bench: HandsBench) -> None:
    """What was changed on the way is as it was, and nothing is left in the journal."""
    sandbox = bench.sandbox("s1")
    async with bench.life():
        prepared = await bench.prepare("nic-card-0", mtu="9000")
        attached = await bench.attach("nic-card-0", sandbox=sandbox, mtu="9000", name="data")
        inside = bench.inside(sandbox)
        detached = await bench.detach("nic-card-0", sandbox=sandbox)
        unprepared = await bench.unprepare("nic-card-0")

    assert isinstance(prepared.result, Prepared)
    assert prepared.result.to_attach == ("nic-card-0",)
    assert attached.result == Attached(
        interfaces={"nic-card-0": AttachedInterface(name="data", mac="02:00:00:00:00:00", mtu=9000)}
    )
    assert inside == ["data"]
    assert (detached.refusal, unprepared.refusal) == (None, None)
    assert bench.card("nic-card-0") == new_card(0)
    assert bench.journal_of("nic-card-0") is None


async def test_attach_answers_the_same_when_asked_again_by_another_life_too(bench: HandsBench) -> None:
    """The answer stands in the journal, so a service that was restarted gives it again and changes
    nothing.
    """
    sandbox = bench.sandbox("s1")
    async with bench.life():
        first = await bench.attach("nic-card-0", sandbox=sandbox)
    bench.devices.clear()  # the card is out of the driver's sight

    async with bench.life():
        second = await bench.attach("nic-card-0", sandbox=sandbox)

    assert isinstance(first.result, Attached)
    assert second == first


class _AskedDriver(FolderDriver):
    """Keeps what `prepare` was told to be in a sandbox already."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[frozenset[str]] = []

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Prepare, and keep it."""
        self.attached.append(context.attached)
        return super().prepare(tree, devices, context)


async def test_prepare_tells_the_driver_which_devices_its_owner_s_pod_has_already(tmp_path: Path) -> None:
    """Kubelet asks again for pods that run: what left the host for this owner is not gone, and for
    another owner it is.
    """
    driver = _AskedDriver()
    bench = HandsBench(tmp_path, driver=driver)
    async with bench.life():
        await bench.prepare("nic-card-0", op_id="first")
        await bench.attach("nic-card-0", sandbox=bench.sandbox("s1"))
        await bench.prepare("nic-card-0", op_id="second")
        await bench.prepare("nic-card-0", op_id="third", owner=OTHER)

    assert driver.attached == [frozenset(), frozenset({"nic-card-0"}), frozenset()]


async def test_attach_takes_the_card_out_of_the_old_sandbox_when_the_pod_was_made_anew(bench: HandsBench) -> None:
    """A card is in one sandbox at a time.

    A late detach from the old one leaves the new one alone.
    """
    old, new = bench.sandbox("old"), bench.sandbox("new")
    async with bench.life():
        await bench.attach("nic-card-0", sandbox=old)
        await bench.attach("nic-card-0", sandbox=new)
        late = await bench.detach("nic-card-0", sandbox=old)

    assert (bench.inside(old), bench.inside(new)) == ([], ["net1"])
    assert late.refusal is None


async def test_detach_is_fine_when_the_card_was_never_attached(bench: HandsBench) -> None:
    """Also of a card that nobody knows."""
    async with bench.life():
        reply = await bench.detach("nic-card-0", "nic-card-9", sandbox=bench.sandbox("s1"))

    assert reply.refusal is None


async def test_unprepare_detaches_first_when_the_card_is_still_attached(bench: HandsBench) -> None:
    """A gateway that missed the sandbox's end still gets every card home, clean."""
    async with bench.life():
        await bench.prepare("nic-card-0")
        await bench.attach("nic-card-0", sandbox=bench.sandbox("s1"))
        reply = await bench.unprepare("nic-card-0")

    assert reply.refusal is None
    assert bench.card("nic-card-0") == new_card(0)


async def test_prepare_refuses_before_anything_changed_when_the_configuration_is_bad(bench: HandsBench) -> None:
    """The driver's check names the field; there is no entry, and no owner to clean after."""
    async with bench.life():
        reply = await bench.prepare("nic-card-0", mtu="70000", image="fast")

    assert codes(reply.result) == ["mtu"]
    assert (bench.card("nic-card-0"), bench.journal_of("nic-card-0")) == (new_card(0), None)


async def test_attach_is_undone_at_once_when_the_driver_refuses_half_way(bench: HandsBench) -> None:
    """The MTU is set before the name is seen to be taken: the refusal leaves the card as it was."""
    sandbox = bench.sandbox("s1")
    (Path(sandbox.network_namespace) / "net1").mkdir()
    async with bench.life():
        reply = await bench.attach("nic-card-0", sandbox=sandbox, mtu="9000")

    assert codes(reply.result) == ["name-taken"]
    assert (bench.card("nic-card-0"), bench.journal_of("nic-card-0")) == (new_card(0), None)


async def test_attach_is_refused_when_the_driver_attaches_nothing(tmp_path: Path) -> None:
    """Whoever asks for what cannot be is told so, and nothing is written."""
    bench = HandsBench(tmp_path, driver=ToyDriver("toy", device_class="nic"))
    bench.devices = {"nic-toy-0": Device(name="nic-toy-0", device_class="nic", driver="toy")}
    async with bench.life():
        reply = await bench.attach("nic-toy-0", sandbox=bench.sandbox("s1"))
        prepared = await bench.prepare("nic-toy-0")
        await bench.unprepare("nic-toy-0")

    assert codes(reply.result) == ["attach-unsupported"]
    assert isinstance(prepared.result, Prepared)
    assert not (tmp_path / "journal").exists()


async def test_looking_at_a_card_neither_attaches_nor_cleans_it_when_somebody_else_has_it(bench: HandsBench) -> None:
    """Admin access comes and goes while a pod uses the card."""
    sandbox = bench.sandbox("s1")
    async with bench.life():
        await bench.prepare("nic-card-0")
        looked = await bench.preparer.prepare(
            PrepareRequest(op_id="", owner=OTHER, devices=("nic-card-0",), looked_at=("nic-card-0",))
        )
        await bench.attach("nic-card-0", sandbox=sandbox)
        await bench.unprepare("nic-card-0", owner=OTHER)

    assert isinstance(looked.result, Prepared)
    assert looked.result.to_attach == ()
    assert bench.inside(sandbox) == ["net1"]


async def test_card_of_an_allocation_of_kubelets_is_cleaned_when_the_gateway_undoes_it(bench: HandsBench) -> None:
    """Allocate writes no journal, for kubelet waits for it.

    Whoever undoes it has the card cleaned all the same, unless a claim has it by then.
    """
    allocation = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/nic", uid="u3")
    async with bench.life():
        await bench.prepare("nic-card-0", owner=allocation)
        unwritten = bench.journal_of("nic-card-0")
        (bench.root / CARDS / "nic-card-0" / "dirt").write_text("left", encoding="utf-8")
        await bench.unprepare("nic-card-0", owner=allocation)
        cleaned = bench.card("nic-card-0")
        await bench.prepare("nic-card-0")
        (bench.root / CARDS / "nic-card-0" / "dirt").write_text("in use", encoding="utf-8")
        await bench.unprepare("nic-card-0", owner=allocation)

    assert unwritten is None
    assert "dirt" not in cleaned
    assert bench.card("nic-card-0")["dirt"] == "in use"


class _HangingDriver(FolderDriver):
    """Stops before it moves the card, until it is let go."""

    def __init__(self) -> None:
        self.go, self.held = threading.Event(), threading.Event()

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        self.held.set()
        self.go.wait()
        return super().attach(tree, device, context, sandbox, record)


async def _attach_too_slowly(bench: HandsBench, driver: _HangingDriver, sandbox: Sandbox) -> AttachReply:
    """Ask for an attach that does not come back in time."""
    asking = asyncio.create_task(bench.attach("nic-card-0", sandbox=sandbox))
    await asyncio.to_thread(driver.held.wait)
    bench.clock.advance(TIMEOUT_S)
    return await asking


async def test_attach_is_refused_by_name_and_ends_later_when_the_driver_hangs(tmp_path: Path) -> None:
    """The call that came back too late has written what is, so the next
    question gets its answer.
    """
    driver = _HangingDriver()
    bench = HandsBench(tmp_path, driver=driver)
    sandbox = bench.sandbox("s1")
    async with bench.life():
        hung = await _attach_too_slowly(bench, driver, sandbox)
        driver.go.set()
        while bench.hands.drivers["folder"].is_hung:
            await other_threads()
        again = await bench.attach("nic-card-0", sandbox=sandbox)

    assert codes(hung.result) == ["driver-hung"]
    assert isinstance(again.result, Attached)
    assert bench.inside(sandbox) == ["net1"]


async def test_device_is_out_of_use_but_not_sick_when_what_is_half_done_waits_for_a_driver_at_work(
    tmp_path: Path,
) -> None:
    """A driver that has not come back yet is no evidence of a fault: nobody gets the device, and a
    cluster evicts no pod for it (an Unhealthy one's taint would).
    """
    driver = _HangingDriver()
    bench = HandsBench(tmp_path, driver=driver)
    sandbox = bench.sandbox("s1")
    async with bench.life():
        await _attach_too_slowly(bench, driver, sandbox)
        refused = await bench.detach("nic-card-0", sandbox=sandbox)
        (observation,) = bench.hands.observations().values()
        driver.go.set()

    assert codes(refused.refusal) == ["undo-failed"]
    assert (observation.reason, observation.state) == ("cleaning", HealthState.UNKNOWN)
    assert "an earlier call has not come back yet" in observation.message


class _LeavingDriver(FolderDriver):
    """Says that it is done, and leaves its steps."""

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Do nothing."""


async def test_detach_is_refused_when_the_driver_leaves_steps(tmp_path: Path) -> None:
    """A record is empty when all is undone; who says so too early is named with the steps."""
    bench = HandsBench(tmp_path, driver=_LeavingDriver())
    sandbox = bench.sandbox("s1")
    async with bench.life():
        await bench.attach("nic-card-0", sandbox=sandbox)
        reply = await bench.detach("nic-card-0", sandbox=sandbox)

    assert codes(reply.refusal) == ["driver-failed"]
    assert reply.refusal is not None
    assert "nic-card-0: mtu, move" in reply.refusal.reasons[0].message


async def test_start_undoes_before_the_first_answer_when_an_attach_was_cut_off(bench: HandsBench) -> None:
    """A card that is half attached is home before anybody gets a word about it, and its neighbours
    need not wait.
    """
    _cut_off(bench, "nic-card-0")

    async with bench.life():
        reply = await bench.detach("nic-card-0", sandbox=bench.sandbox("another"))

        assert reply.refusal is None
        assert bench.card("nic-card-0") == new_card(0)
    assert bench.journal_of("nic-card-0") is None


def _cut_off(bench: HandsBench, name: str) -> None:
    """Leave what a process leaves that was killed between the MTU and the move."""
    journal = Journal(bench.root / "journal")
    device, sandbox = bench.devices[name], bench.sandbox("s1")

    class _Cut(FolderDriver):
        def attach(
            self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
        ) -> AttachedInterface | Refusal | None:
            record.intend("mtu", {"mtu": "1500"})
            (tree.path(CARDS) / device.name / "mtu").write_text("9000", encoding="utf-8")
            raise KeyboardInterrupt

        def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
            raise HardwareError("it is dead")

    with pytest.raises(KeyboardInterrupt):
        JournaledVerbs(journal, _Cut(), bench.tree).attach(device, PrepareContext(owner=OWNER), sandbox)
    journal.close()


class _StuckDriver(FolderDriver):
    """Cannot detach until somebody helps."""

    def __init__(self) -> None:
        self.is_stuck = True

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        if self.is_stuck:
            raise HardwareError("the card is stuck")
        super().detach(tree, device, sandbox, record)


async def test_device_is_dirty_and_tried_again_when_it_cannot_be_undone(tmp_path: Path) -> None:
    """Nobody gets it meanwhile; its neighbour goes on; when it works at last nothing is left."""
    driver = _StuckDriver()
    bench = HandsBench(tmp_path, driver=driver)
    _cut_off(bench, "nic-card-0")
    async with bench.life():
        refused = await bench.prepare("nic-card-0")
        neighbour = await bench.prepare("nic-card-1")
        seen = bench.hands.observations()["nic-card-0"]
        driver.is_stuck = False
        async with bench.clock.ticking(1.0):
            while bench.hands.observations():
                await other_threads()

    assert codes(refused.result) == ["undo-failed"]
    assert isinstance(neighbour.result, Prepared)
    assert (seen.reason, seen.state) == ("dirty", HealthState.UNHEALTHY)
    assert seen.evidence == {"owner": OWNER.key}
    assert bench.card("nic-card-0") == new_card(0)


async def test_device_is_out_of_use_and_others_go_on_when_its_journal_cannot_be_read(bench: HandsBench) -> None:
    """Mended or removed, the file is read again without a restart."""
    (bench.root / "journal").mkdir()
    file = bench.root / "journal" / "nic-card-0.json"
    file.write_text("{", encoding="utf-8")
    async with bench.life():
        seen = bench.hands.observations()["nic-card-0"]
        refused = await bench.prepare("nic-card-0")
        neighbour = await bench.prepare("nic-card-1")
        file.unlink()
        async with bench.clock.ticking(1.0):
            while bench.hands.observations():
                await other_threads()
        again = await bench.prepare("nic-card-0")

    assert (seen.reason, seen.state) == ("journal-unreadable", HealthState.UNHEALTHY)
    assert str(file) in seen.message
    assert codes(refused.result) == ["journal-unreadable"]
    assert isinstance(neighbour.result, Prepared)
    assert isinstance(again.result, Prepared)


async def test_prepare_is_refused_by_name_when_the_journal_cannot_be_written(bench: HandsBench) -> None:
    """A service without its folder changes nothing, and says which setting is meant."""
    (bench.root / "journal").write_text("a file, no folder", encoding="utf-8")
    async with bench.life():
        reply = await bench.prepare("nic-card-0", image="fast")

    assert codes(reply.result) == ["driver-failed"]
    assert isinstance(reply.result, Refusal)
    assert "journal.dir" in reply.result.reasons[0].message
    assert bench.card("nic-card-0") == new_card(0)
