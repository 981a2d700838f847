"""NICs whose virtual functions are made when a claim gets one: what is offered, when the card is
cut, and what a death leaves.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import structs

from support.sriov_bench import COUNT, SriovBench
from support.sriov_kernel import PHYSICAL
from support.sysfs_trees import write
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.verbs.journaled_verbs import JournaledWork
from topobus.nic.config import InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import Tree
from topobus.testing.drivers.deaths import deaths
from topobus.values.machine import PciDevice
from topobus.values.outcome import Refusal
from topobus.values.partitions import Partitions
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

CARD = "nic-0000-3b-00-0"
PARTS = [f"nic-0000-3b-02-{index}" for index in range(COUNT)]
FOLDER = f"sys/bus/pci/devices/{PHYSICAL}"
ROUTE = (
    "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\nens1 0000000A 00000000 0001 0 0 0 "
    "0000FFFF 0 0 0"
)
DEFAULT_ROUTE = (
    "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\nens1 00000000 0100000A 0003 0 0 0 "
    "00000000 0 0 0"
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SriovBench]:
    """Give a machine with one card that obeys, whose functions stay."""
    with SriovBench(tmp_path, PciNetdevDriver) as made:
        yield made


@pytest.fixture
def removing(tmp_path: Path) -> Iterator[SriovBench]:
    """Give one whose functions go with the last owner."""
    with SriovBench(tmp_path, PciNetdevDriver, when_idle="remove") as made:
        yield made


def code(answer: object) -> str:
    """Give the reason of a refusal."""
    assert isinstance(answer, Refusal), answer
    return answer.reasons[0].code


@pytest.mark.parametrize("present", [0, COUNT])
def test_discover_offers_the_card_and_its_functions_when_they_are_on_or_off(bench: SriovBench, present: int) -> None:
    """The card and the functions that it can have, with a counter by which never both are held."""
    bench.kernel.set_number(present)

    devices = bench.look()

    assert list(devices) == [CARD, *PARTS]
    assert [devices[name].partition_of for name in PARTS] == [CARD] * COUNT
    assert [devices[name].attributes.get("interface") for name in PARTS] == (
        [f"ens1v{index}" for index in range(COUNT)] if present else [None] * COUNT
    )
    assert bench.driver.observe(Tree(bench.tree.settings), list(devices.values())) == {
        CARD: [],
        **({name: [] for name in PARTS} if present else {}),
    }
    partitions = Partitions(devices.values(), bench.counter_sets)
    assert partitions.shortage((), PARTS) is None
    assert [name for name in PARTS if partitions.shortage((CARD,), (name,)) is None] == []


def test_card_is_as_before_when_no_rule_names_it(bench: SriovBench) -> None:
    """Without a rule the card is whole, and with functions on these alone are offered."""
    bench.driver.on_demand_functions.rules = ()

    devices = bench.look()

    assert list(devices) == [CARD]


def test_prepare_makes_the_functions_when_one_is_wanted(bench: SriovBench) -> None:
    """The first claim makes all of them, the next one finds them."""
    first = bench.get("a", PARTS[1])
    second = bench.prepare("b", PARTS[2])

    assert bench.variable(first, PARTS[1]) == "0000:3b:02.1"
    assert isinstance(second, dict)
    assert bench.kernel.writes == [COUNT]


def test_functions_go_when_the_card_is_wanted(bench: SriovBench) -> None:
    """Functions that nobody has are removed for who wants the physical one; and come again."""
    bench.get("a", PARTS[0])
    bench.unprepare("a", PARTS[0])

    whole = bench.get("b", CARD)
    refused = bench.get("c", PARTS[0])
    bench.unprepare("b", CARD)
    again = bench.get("c", PARTS[0])

    assert bench.variable(whole, CARD) == str(PHYSICAL)
    assert code(refused) == "card-in-use"
    assert bench.variable(again, PARTS[0]) == "0000:3b:02.0"
    assert bench.kernel.writes == [COUNT, 0, COUNT]


def test_card_is_not_given_when_somebody_has_a_function(bench: SriovBench) -> None:
    """Whatever a ledger may say: the journal knows who has one, and names it."""
    bench.get("a", PARTS[3])

    refusal = bench.get("b", CARD)

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["devices"]) == ("card-in-use", (PARTS[3],))
    assert bench.kernel.number == COUNT


def test_card_is_not_given_when_a_function_is_used_by_somebody_unknown(bench: SriovBench) -> None:
    """An interface that is on is somebody's."""
    bench.get("a", PARTS[0])
    bench.unprepare("a", PARTS[0])
    write(bench.root, {"sys/bus/pci/devices/0000:3b:02.2/net/ens1v2/flags": "0x1003"})

    refusal = bench.get("b", CARD)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["users"] == ("0000:3b:02.2 is ens1v2, which is on",)
    assert bench.kernel.number == COUNT


@pytest.mark.parametrize(
    ("files", "links", "why"),
    [
        ({"proc/net/route": ROUTE}, {}, "the node has an address or a route over ens1"),
        ({}, {"master": "../../../../../../class/net/br0"}, "ens1 is a port of br0"),
        ({}, {"upper_ens1.7": "../ens1.7"}, "ens1 carries ens1.7"),
    ],
    ids=["address", "bridge", "vlan"],
)
def test_card_is_not_cut_when_the_node_uses_it(
    bench: SriovBench, files: dict[str, object], links: dict[str, str], why: str
) -> None:
    """What the node uses itself is offered as it is; and when that came after the last look, the
    claim is refused with how the node uses it.
    """
    write(bench.root, files)
    for name, target in links.items():
        (bench.root / FOLDER / "net/ens1" / name).symlink_to(target)

    refusal = bench.get("a", PARTS[0])
    devices = bench.look()

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["users"] == (why,)
    assert list(devices) == [CARD]
    assert f"{PHYSICAL} is not cut on demand: {why}" in bench.discovery.warnings
    assert bench.driver.on_demand_functions.uncut == {CARD}
    assert bench.kernel.writes == []
    assert bench.journal.entries == {}


def test_card_is_not_cut_when_a_setting_keeps_its_number(bench: SriovBench) -> None:
    """One of two that change one number would undo the other's work: the inventory says which counts."""
    bench.driver.configure(
        structs.replace(NicServices(counted=frozenset({PHYSICAL})), partitions=bench.driver.host.partitions)
    )

    devices = bench.look()

    assert list(devices) == [CARD]
    assert bench.discovery.warnings == (
        f"{PHYSICAL} is not cut on demand: the setting virtual_functions keeps its number",
    )


def test_card_under_the_default_route_is_offered_in_no_form(bench: SriovBench) -> None:
    """The node would lose its network."""
    write(bench.root, {"proc/net/route": DEFAULT_ROUTE})

    assert list(bench.look()) == []


def test_a_number_that_somebody_else_has_set_is_offered_as_it_is(bench: SriovBench) -> None:
    """Two functions are two, until somebody has the card and it is cut anew."""
    bench.kernel.set_number(2)
    before = list(bench.look())

    bench.get("a", CARD)
    bench.unprepare("a", CARD)

    assert before == [CARD, *PARTS[:2]]
    assert list(bench.look()) == [CARD, *PARTS]


def test_prepare_refuses_a_function_when_the_number_is_another_by_now(bench: SriovBench) -> None:
    """Who has one of two may be known to nobody, so nothing is removed
    for a claim of one of four.
    """
    bench.kernel.set_number(2)

    refusal = bench.get("a", PARTS[0])

    assert code(refusal) == "device-not-offered"
    assert bench.kernel.number == 2


def test_prepare_says_what_the_kernel_says_when_it_refuses(bench: SriovBench) -> None:
    """The driver's error is in the refusal, and the claim can be asked for again."""

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory", str(path))

    bench.driver.on_demand_functions.cuts.write = refuse

    refusal = bench.get("a", PARTS[0])

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["error"]) == ("functions-refused", errno.ENOMEM)
    assert bench.journal.entries == {}


def test_prepare_is_refused_when_the_functions_do_not_come(bench: SriovBench) -> None:
    """What is not there in time is not given."""
    bench.kernel.is_stuck = True

    assert code(bench.get("a", PARTS[0])) == "functions-unsettled"
    assert bench.journal.entries == {}


def test_discover_lists_the_same_devices_when_the_card_is_being_cut(bench: SriovBench) -> None:
    """While the functions come one by one the last look stands."""
    seen: list[list[str]] = []

    def look(path: Path, text: str) -> None:
        bench.kernel.set_number(2)
        seen.append(
            [device.name for device in bench.driver.discover(Tree(bench.tree.settings), bench.kernel.machine).devices]
        )
        path.write_text(f"{text}\n", encoding="ascii")

    bench.driver.on_demand_functions.cuts.write = look

    bench.get("a", PARTS[0])

    assert seen == [[CARD, *PARTS]]


def test_functions_go_with_the_last_owner_when_the_rule_says_so(removing: SriovBench) -> None:
    """The last one takes them away, nobody before."""
    removing.get("a", PARTS[0])
    removing.get("b", PARTS[1])

    removing.unprepare("a", PARTS[0])
    between = removing.kernel.number
    removing.unprepare("b", PARTS[1])

    assert (between, removing.kernel.number) == (COUNT, 0)
    assert removing.journal.entries == {}


def test_functions_stay_when_the_last_owner_goes_and_one_is_used_by_somebody_unknown(removing: SriovBench) -> None:
    """Giving back is never refused for it."""
    removing.get("a", PARTS[0])
    write(removing.root, {"sys/bus/pci/devices/0000:3b:02.2/net/ens1v2/flags": "0x1003"})

    removing.unprepare("a", PARTS[0])

    assert removing.kernel.number == COUNT
    assert removing.journal.entries == {}


def test_function_is_given_when_the_inventory_tells_its_interface(bench: SriovBench) -> None:
    """Who hands interfaces over must know the name: the claim is asked for again after the next
    look, and the functions stay meanwhile.
    """
    assert isinstance(bench.driver, PciNetdevDriver)
    bench.driver.configure(
        NicServices(partitions=bench.driver.host.partitions, interfaces=InterfaceSettings(), hands=InterfaceHands())
    )

    refusal = bench.get("a", PARTS[0])
    bench.look()
    answer = bench.prepare("a", PARTS[0])

    assert code(refusal) == "interface-changed"
    assert isinstance(answer, dict)
    assert bench.kernel.writes == [COUNT]


def test_owners_get_their_functions_again_when_the_node_was_started_anew(bench: SriovBench) -> None:
    """A reboot leaves no virtual function.

    The journal knows two owners, and neither is in the other's way.
    """
    bench.get("a", PARTS[0])
    bench.get("b", PARTS[1])
    bench.kernel.set_number(0)
    bench.restart()

    answers = [bench.get("a", PARTS[0]), bench.get("b", PARTS[1])]

    assert [isinstance(answer, Refusal) for answer in answers] == [False, False]
    assert bench.kernel.number == COUNT


def test_card_is_cut_once_when_all_its_functions_are_wanted_at_once(bench: SriovBench) -> None:
    """Four claims at the same moment are one write."""
    with ThreadPoolExecutor(COUNT) as threads:
        answers = list(threads.map(lambda name: bench.get(name, name), PARTS))

    assert [bench.variable(answer, name) for answer, name in zip(answers, PARTS, strict=True)] == [
        f"0000:3b:02.{index}" for index in range(COUNT)
    ]
    assert bench.kernel.writes == [COUNT]


@pytest.mark.parametrize("kind", ["bench", "removing"])
def test_card_can_be_had_when_the_service_was_killed_at_any_step_of_prepare(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """The next start finds the functions there or not, nobody's, and either way can be had."""
    bench: SriovBench = request.getfixturevalue(kind)
    died = 0
    for step in deaths(bench.journal.folder, lambda journal: bench.get("a", PARTS[0], journal=journal)):
        died = step
        bench.writes.settle()
        bench.restart()
        bench.undo_all()
        assert bench.journal.entries == {}
        assert bench.kernel.number in (0, COUNT)
        bench.look()
        assert isinstance(bench.get("b", CARD), dict)
        bench.unprepare("b", CARD)
        bench.look()
        bench.journal.close()

    assert died >= 8


def test_functions_are_gone_when_the_service_was_killed_at_any_step_of_giving_them_back(removing: SriovBench) -> None:
    """The next start finishes what the last owner began."""
    died = 0
    removing.get("a", PARTS[0])
    removing.journal.close()
    for step in deaths(removing.journal.folder, lambda journal: removing.unprepare("a", PARTS[0], journal=journal)):
        died = step
        removing.writes.settle()
        removing.restart()
        removing.undo_all()
        assert removing.journal.entries == {}
        assert removing.kernel.number == 0
        removing.look()
        removing.get("a", PARTS[0])
        removing.look()
        removing.journal.close()

    assert died >= 4
    assert isinstance(removing, SriovBench)


def test_prepare_is_refused_before_the_first_look(bench: SriovBench) -> None:
    """A service that has just started does not know which cards are cut, so nobody gets one past
    the others.
    """
    driver = PciNetdevDriver()
    driver.on_demand_functions.rules = (bench.rule,)
    bench.driver = driver

    answer = bench.prepare("a", PARTS[0])

    assert not isinstance(answer, JournaledWork)
    assert code(answer) == "device-not-offered"


CONFIGURED = ({"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": {"name": "net1"}},)


def with_hands(bench: SriovBench) -> PciNetdevDriver:
    """Have the driver hand interfaces over."""
    assert isinstance(bench.driver, PciNetdevDriver)
    bench.driver.configure(
        NicServices(partitions=bench.driver.host.partitions, interfaces=InterfaceSettings(), hands=InterfaceHands())
    )
    return bench.driver


@pytest.mark.parametrize("config", [(), CONFIGURED], ids=["plain", "configured"])
def test_prepare_gives_nothing_without_its_interface_when_the_driver_comes_after_the_function(
    bench: SriovBench, config: tuple[dict[str, object], ...]
) -> None:
    """The kernel adds the function, binds its driver a moment later and names the interface after
    that: until the inventory tells it the claim is refused.
    """
    driver = with_hands(bench)
    context = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="a", uid="uid-a"), config=config)

    refusal = bench.get("a", PARTS[0], config=config)
    too_early = driver.to_attach([bench.devices[PARTS[0]]], context)
    bench.look()
    answer = bench.prepare("a", PARTS[0], config=config)

    assert code(refusal) == "interface-changed"
    assert too_early == ()
    assert isinstance(answer, dict)
    assert answer[""].env["TOPOBUS_NIC_INTERFACES"] == ("net1" if config else "ens1v0")
    assert driver.to_attach([bench.devices[PARTS[0]]], context) == (PARTS[0],)


def test_prepare_says_what_the_function_lacks_when_no_driver_comes(bench: SriovBench) -> None:
    """A module that cannot be loaded is no reason to start a pod without its interface."""

    def write_and_stop(path: Path, text: str) -> None:
        path.write_text(f"{text}\n", encoding="ascii")
        bench.writes.settle()
        bench.kernel.is_stuck = True

    with_hands(bench).on_demand_functions.cuts.write = write_and_stop

    refusal = bench.get("a", PARTS[1])

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, bench.kernel.number) == ("functions-unsettled", COUNT)
    assert "0000:3b:02.1: no kernel driver is bound to it yet" in refusal.reasons[0].message
    assert bench.journal.entries == {}


@pytest.mark.parametrize(
    ("config", "codes"), [((), []), (CONFIGURED, ["interface-missing"])], ids=["plain", "configured"]
)
def test_prepare_gives_a_function_without_a_driver_when_the_operator_has_them_not_probed(
    bench: SriovBench, config: tuple[dict[str, object], ...], codes: list[str]
) -> None:
    """With sriov_drivers_autoprobe off none ever comes: the function can be had as it is, and who
    wants its interface hears that there is none.
    """
    with_hands(bench)
    write(bench.root, {f"{FOLDER}/sriov_drivers_autoprobe": 0})

    answer = bench.get("a", PARTS[0], config=config)

    assert [reason.code for reason in (answer.reasons if isinstance(answer, Refusal) else ())] == codes


def test_prepare_gives_a_function_at_once_when_a_pod_has_the_interface_of_another(bench: SriovBench) -> None:
    """An interface that went into another namespace leaves its empty folder, and lacks nothing."""
    with_hands(bench)
    bench.kernel.set_number(COUNT)
    bench.look()
    interface = bench.root / "sys/bus/pci/devices/0000:3b:02.0/net/ens1v0"
    shutil.rmtree(interface)

    assert isinstance(bench.prepare("b", PARTS[1]), dict)


def test_prepare_gives_a_function_when_another_one_never_gets_ready(bench: SriovBench) -> None:
    """What a sibling lacks is waited for when all of them are made, and is no reason to refuse."""
    bench.kernel.set_number(COUNT)
    (bench.root / "sys/bus/pci/devices/0000:3b:02.0/driver").unlink()
    bench.look()

    assert isinstance(bench.prepare("b", PARTS[1]), dict)


def test_prepare_gives_an_infiniband_function_when_neither_it_nor_its_card_has_an_interface(tmp_path: Path) -> None:
    """Without IPoIB there is an RDMA device and no interface, now and later."""

    def files(folder: str, index: int) -> dict[str, object]:
        return {
            f"{folder}/infiniband/mlx5_{index + 1}/ports/1/link_layer": "InfiniBand",
            f"{folder}/infiniband_verbs/uverbs{index + 1}/dev": "231:1",
        }

    with SriovBench(tmp_path, PciNetdevDriver, class_code=0x020700, driver="mlx5_core", files=files) as bench:
        with_hands(bench)
        answer = bench.get("a", PARTS[0])

    assert isinstance(answer, dict), answer
    assert answer[""].env["TOPOBUS_NIC_RDMA_DEVICES"] == "mlx5_1"


def test_plan_stands_when_the_card_begins_to_change_while_a_look_goes_on(bench: SriovBench) -> None:
    """A look that saw half of the change neither forgets the functions
    nor lets them go uncounted.
    """
    on_demand = bench.driver.on_demand_functions
    assert on_demand is not None
    other = structs.replace(bench.kernel.physical, address=PciAddress.parse("0000:3b:01.0"))
    change = ExitStack()

    def begin(_: PciAddress) -> tuple[str, ...]:
        change.enter_context(on_demand.cuts.locks.changing(PHYSICAL))
        return ()

    def end(function: PciDevice) -> None:
        # Called between the card and its virtual functions.
        assert function == other
        change.close()

    devices = on_demand.look(
        bench.tree,
        bench.kernel.machine,
        [bench.kernel.physical, other],
        LeftOut(),
        uses=begin,
        describe=lambda function: structs.replace(bench.devices[CARD], pci=function.address),
        offer=end,
    )

    assert [device.name for device in devices] == [CARD, *PARTS]
    assert on_demand.has_any([bench.devices[PARTS[0]]])


def test_observe_says_nothing_of_functions_that_are_not_there_when_their_card_cannot_be_cut_any_more(
    bench: SriovBench,
) -> None:
    """Devices of the look before are observed once more after a look that found their card in use:
    they never were on the bus.
    """
    before = list(bench.devices.values())
    write(bench.root, {"proc/net/route": ROUTE})
    bench.look()

    seen = bench.driver.observe(Tree(bench.tree.settings), before)

    assert {name: list(signs) for name, signs in seen.items() if signs} == {}
    assert bench.driver.on_demand_functions.uncut == {CARD}
