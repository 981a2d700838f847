"""Hand-overs of hardware on a simulated kernel: physical and virtual functions, several ports,
cards that leave the bus while a pod has them, and reboots.

Wherever an interface of before is not the one of now, the one of now must be left exactly as it is.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.hand_over_rig import configured
from support.simulated_links import POD, SimulatedHost, add_card, simulated_host
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.nic.netlink.hand_over import hand_over
from topobus.nic.netlink.take_back import TakenBack, take_back
from topobus.nic.netlink.vf_settings import VfPlace
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface

TAG = "topobus nic-0000-21-10-0 claim"
VF = VfPlace(physical="ens1", index=0)
# What identifies nothing and changes by itself.
_MOVING = ("perm_address", "index")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SimulatedHost]:
    """A machine with a card that has a virtual function, and a second card."""
    with simulated_host(tmp_path) as made:
        yield made


def give(host: SimulatedHost, name: str, record: DeviceRecord, **fields: Any) -> object:
    """Hand an interface over to the pod."""
    return hand_over(host.places, name, POD, configured(**fields), record, tag=TAG, vf=VF if "vf" in fields else None)


def shown(link: dict[str, Any] | None) -> dict[str, Any]:
    """What an interface is, to compare."""
    assert link is not None
    return copy.deepcopy({key: value for key, value in link.items() if key not in _MOVING})


def read_again(record: DeviceRecord) -> DeviceRecord:
    """The record as another process reads it."""
    state = RecordState(owner=record.owner, sandbox=record.sandbox, steps=record.steps)
    return DeviceRecord(msgspec.json.decode(msgspec.json.encode(state), type=RecordState))


FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a name": {"interface": {"name": "net1"}},
    "an MTU": {"interface": {"name": "net1", "mtu": 1400}},
    "a hardware address": {"interface": {"name": "net1", "mac": "52:54:00:77:00:02"}},
    "a hardware address by the physical function": {"interface": {"name": "net1"}, "vf": {"mac": "52:54:00:aa:bb:01"}},
    "that, and an MTU": {"interface": {"name": "net1", "mtu": 1400}, "vf": {"mac": "52:54:00:aa:bb:01"}},
    "a VLAN, trust and a rate": {
        "interface": {"name": "net1"},
        "vf": {"vlan": 100, "qos": 3, "trust": True, "maxTxRate": 500},
    },
}


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed between"])
def test_virtual_function_comes_and_goes_when_its_permanent_address_changes(
    host: SimulatedHost, fields: dict[str, Any], *, is_killed: bool
) -> None:
    """Whatever resets it on its way, it is the same function: in the pod as asked, and home as it
    was, with its settings.
    """
    before, settings, record = shown(host.link("ens1v0")), dict(host.functions.states), DeviceRecord()

    attached = give(host, "ens1v0", record, **fields)
    inside = host.link(str(fields.get("interface", {}).get("name", "ens1v0")), POD)
    taken = take_back(host.places, POD, read_again(record) if is_killed else record)

    assert isinstance(attached, AttachedInterface), attached
    assert inside is not None
    assert taken == TakenBack(outcome="restored", name="ens1v0")
    assert (shown(host.link("ens1v0")), host.functions.states, host.namespaces[POD]) == (before, settings, {})


@pytest.mark.parametrize("name", ["ens2", "ens1v0"])
def test_card_is_found_when_the_kernel_returned_it_under_the_pods_name(host: SimulatedHost, name: str) -> None:
    """The namespace ends first; until the kernel is done with it, the card is waited for."""
    before, record = shown(host.link(name)), DeviceRecord()
    give(host, name, record, interface={"name": "net1"})
    links = dict(host.namespaces[POD])
    host.end_pod(is_finished=False)

    with pytest.raises(HardwareError, match=f"{name} is neither in the pod's namespace nor on the host"):
        take_back(host.places, POD, record)
    host.namespaces[""] |= links
    taken = take_back(host.places, POD, record)

    assert taken == TakenBack(outcome="restored", name=name)
    assert shown(host.link(name)) == before


def test_settings_are_put_back_when_the_driver_knows_one_of_them_not(host: SimulatedHost) -> None:
    """The claim is refused with the field's name, and its undoing asks the driver for nothing that
    it does not know.
    """
    before, settings, record = shown(host.link("ens1v0")), dict(host.functions.states), DeviceRecord()
    host.functions.refused, host.functions.error = "link_state", errno.EOPNOTSUPP

    refusal = give(host, "ens1v0", record, vf={"trust": True, "linkState": "enable"})
    taken = take_back(host.places, POD, record)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["field"] == "vf.linkState"
    assert taken == TakenBack(outcome="nothing")
    assert (shown(host.link("ens1v0")), host.functions.states, record.steps) == (before, settings, ())


def unplugged(host: SimulatedHost) -> None:
    """The card leaves the bus, with its virtual functions."""
    host.remove("0000:21:10.0")
    host.remove("0000:21:00.0")
    host.remove("0000:63:00.0")


def functions_off(host: SimulatedHost) -> None:
    """Somebody sets sriov_numvfs to 0; the other card loses its driver."""
    host.remove("0000:21:10.0")
    host.unbind("0000:63:00.0")


def functions_made_anew(host: SimulatedHost) -> None:
    """Somebody sets sriov_numvfs to 0 and back; the other card is exchanged."""
    host.remove("0000:21:10.0")
    host.add("ens1v0", pci="0000:21:10.0", physical="0000:21:00.0")
    host.remove("0000:63:00.0")
    host.add("ens2", pci="0000:63:00.0", permanent="52:54:00:00:99:00")


def cards_exchanged(host: SimulatedHost) -> None:
    """Other cards are in the slots, with the same names."""
    unplugged(host)
    add_card(host, permanent="52:54:00:00:99:00")
    link = host.link("ens2")
    assert link is not None
    link |= {"perm_address": "52:54:00:00:99:01", "address": "52:54:00:00:99:01"}


@pytest.mark.parametrize("happened", [unplugged, functions_off, functions_made_anew, cards_exchanged])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ens1v0", {"interface": {"name": "net1", "mtu": 1400}, "vf": {"vlan": 100, "trust": True}}),
        ("ens2", {"interface": {"name": "net1", "mtu": 1400, "mac": "52:54:00:77:00:02"}}),
    ],
    ids=["a virtual function", "a card"],
)
def test_interface_is_given_up_when_its_device_is_not_there_any_more(
    host: SimulatedHost, name: str, fields: dict[str, Any], happened: Callable[[SimulatedHost], None]
) -> None:
    """The pod of a dead card ends: the interface is lost, nothing is asked for ever, and what is in
    its place by now stays as it is.
    """
    record = DeviceRecord()
    give(host, name, record, **fields)
    happened(host)
    others, settings = copy.deepcopy(host.namespaces), dict(host.functions.states)

    taken = take_back(host.places, POD, read_again(record))

    assert (taken.outcome, [reason.code for reason in taken.reasons]) == ("lost", ["interface-lost"])
    assert (host.namespaces, host.functions.states if host.link("ens1v0") else settings) == (others, settings)


def test_card_is_restored_when_the_same_one_is_plugged_in_again(host: SimulatedHost) -> None:
    """Its permanent address says so.

    It is in the slot anew, with another index and as its driver makes it.
    """
    record = DeviceRecord()
    give(host, "ens2", record, interface={"name": "net1", "mtu": 1400})
    host.remove("0000:63:00.0")
    host.add("eth0", pci="0000:63:00.0", permanent="52:54:00:00:03:00")

    taken = take_back(host.places, POD, record)

    assert taken == TakenBack(outcome="restored", name="ens2")


def test_interface_is_restored_when_its_driver_was_bound_again(host: SimulatedHost) -> None:
    """The function stayed: its new interface is the same one, also of a virtual function."""
    record = DeviceRecord()
    give(host, "ens1v0", record, interface={"name": "net1"})
    host.unbind("0000:21:10.0")
    host.add("eth0", pci="0000:21:10.0", physical="0000:21:00.0")

    taken = take_back(host.places, POD, record)

    assert taken == TakenBack(outcome="restored", name="ens1v0")


def test_settings_go_to_no_other_card_when_their_function_is_another_one(host: SimulatedHost) -> None:
    """The hand-over was refused after the settings were made, and the card was exchanged meanwhile:
    the other card's function keeps its own.
    """
    record = DeviceRecord()
    host.functions.refused = "link_state"
    give(host, "ens1v0", record, vf={"vlan": 100, "linkState": "enable"})
    cards_exchanged(host)
    host.functions.states[0] = msgspec.structs.replace(host.functions.states[0], vlan=7)

    take_back(host.places, POD, record)

    assert (host.functions.states[0].vlan, record.steps) == (7, ())


@pytest.mark.parametrize(
    ("own", "other"),
    [({"dev_port": 0}, {"dev_port": 1}), ({"port": "p0"}, {"port": "p1"}), ({"port": "p0"}, {"port": "pf0vf0"})],
    ids=["by dev_port", "by phys_port_name", "a representor"],
)
def test_port_is_not_taken_for_another_port_of_its_function(
    host: SimulatedHost, own: dict[str, Any], other: dict[str, Any]
) -> None:
    """A function with two interfaces: the one that stays on the host is not the one that a pod had,
    though bus and address are the same.
    """
    pci = "0000:81:00.0"
    host.add("ens5", pci=pci, permanent="52:54:00:00:05:00", **own)
    second = host.add("ens5d1", pci=pci, permanent="52:54:00:00:05:00", **other)
    before, record = shown(second), DeviceRecord()
    give(host, "ens5", record, interface={"name": "net1", "mtu": 1400})
    host.end_pod(is_finished=False)

    with pytest.raises(HardwareError, match="is neither in the pod's namespace nor on the host"):
        take_back(host.places, POD, record)

    assert shown(second) == before


def test_virtual_interface_of_another_boot_is_lost_and_no_other_one_is_touched(host: SimulatedHost) -> None:
    """Indices begin anew with each boot: what has the index, the kind and the other end of before
    by now is a stranger, also in a pod at the same path.
    """
    record = DeviceRecord()
    host.add("tba0", kind="veth", link=99)
    give(host, "tba0", record, interface={"name": "net1", "mtu": 1400})
    index = next(iter(host.namespaces[POD]))
    host.reboot()
    for namespace in ("", POD):
        stranger = host.add("tba1", kind="veth", link=99, namespace=namespace, ifalias=TAG, address="02:00:00:00:99:99")
        del host.namespaces[namespace][stranger["index"]]
        host.namespaces[namespace][index] = stranger | {"index": index}
    others = copy.deepcopy(host.namespaces)

    taken = take_back(host.places, POD, read_again(record))

    assert (taken.outcome, host.namespaces) == ("lost", others)
    assert "restarted" in taken.reasons[0].message


def test_child_of_another_boot_is_lost_and_no_other_one_is_deleted(host: SimulatedHost) -> None:
    """Its name and index may be another one's by now."""
    record = DeviceRecord()
    record.intend(
        "share", {"tag": TAG, "name": "tbc00000001", "parent": "ens2", "kind": "macvlan", "boot_id": "boot-1"}
    )
    host.reboot()
    host.add("tbc00000001", kind="macvlan")
    others = copy.deepcopy(host.namespaces)

    taken = take_back(host.places, POD, record)

    assert (taken.outcome, host.namespaces, record.steps) == ("lost", others, ())


@pytest.mark.parametrize(
    ("permanent", "outcome"),
    [("52:54:00:00:03:00", "restored"), ("52:54:00:00:99:00", "lost")],
    ids=["the same card", "another card"],
)
def test_card_is_known_after_a_reboot_by_its_permanent_address(
    host: SimulatedHost, permanent: str, outcome: str
) -> None:
    """The same card in the same slot is restored under whatever index and name it has.

    Another card is left alone.
    """
    record = DeviceRecord()
    give(host, "ens2", record, interface={"name": "net1", "mtu": 1400})
    host.reboot()
    card = host.add("eth0", pci="0000:63:00.0", permanent=permanent)
    before = shown(card)

    taken = take_back(host.places, POD, read_again(record))

    assert taken.outcome == outcome
    assert (shown(card) == before) is (outcome == "lost")
