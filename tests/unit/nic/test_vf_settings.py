"""Settings of virtual functions: the bytes that go to the kernel are those of iproute2, and after a
restore every setting is what it was.

No kernel here has SR-IOV. What is sent is compared with what `ip link set dev lo vf 3 …` of
iproute2 6.1.0 was seen to send (strace -e write=3, from struct ifinfomsg on; the kernel
answered EOPNOTSUPP). What is read is laid out as rtnl_fill_vfinfo of net/core/rtnetlink.c
does it, from the uapi headers.
"""

from __future__ import annotations

import errno
import struct

import msgspec
import pytest

from support.vf_kernel import VfKernel
from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, ShareFields, VfFields
from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.nic.netlink.hand_over_plan import plan_hand_over
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.shares import child_request
from topobus.nic.netlink.vf_settings import VfPlace, configure_vf, read_vf, restore_vf, vf_message, vf_requests
from topobus.values.errors import HardwareError

_HEAD = "00000000010000000000000000000000"
SEEN: dict[str, tuple[VfFields, str]] = {
    "mac 02:00:00:00:00:05": (
        VfFields(mac="02:00:00:00:00:05"),
        "300016002c00010028000100030000000200000000050000" + "00" * 24,
    ),
    "vlan 100 qos 3": (VfFields(vlan=100, qos=3), "180016001400010010000200030000006400000003000000"),
    "vlan 100 qos 3 proto 802.1ad": (
        VfFields(vlan=100, qos=3, vlan_protocol="802.1ad"),
        "200016001c00010018000c001400010003000000640000000300000088a80000",
    ),
    "vlan 0": (VfFields(vlan=0), "180016001400010010000200030000000000000000000000"),
    "trust on": (VfFields(trust=True), "14001600100001000c0009000300000001000000"),
    "trust off": (VfFields(trust=False), "14001600100001000c0009000300000000000000"),
    "spoofchk off": (VfFields(spoof_check=False), "14001600100001000c0004000300000000000000"),
    "spoofchk on": (VfFields(spoof_check=True), "14001600100001000c0004000300000001000000"),
    "state auto": (VfFields(link_state="auto"), "14001600100001000c0005000300000000000000"),
    "state enable": (VfFields(link_state="enable"), "14001600100001000c0005000300000001000000"),
    "state disable": (VfFields(link_state="disable"), "14001600100001000c0005000300000002000000"),
    "max_tx_rate 200 min_tx_rate 50": (
        VfFields(max_tx_rate=200, min_tx_rate=50),
        "1800160014000100100006000300000032000000c8000000",
    ),
}
CHILDREN = {
    "macvlan bridge": "1c0012000b0001006d6163766c616e000c0002000800010004000000",
    "macvlan private": "1c0012000b0001006d6163766c616e000c0002000800010001000000",
    "macvlan vepa": "1c0012000b0001006d6163766c616e000c0002000800010002000000",
    "macvlan passthru": "1c0012000b0001006d6163766c616e000c0002000800010008000000",
    "ipvlan l2": "240012000a0001006970766c616e00001400020006000100000000000600020000000000",
    "ipvlan l3": "240012000a0001006970766c616e00001400020006000100010000000600020000000000",
    "ipvlan l3s": "240012000a0001006970766c616e00001400020006000100020000000600020000000000",
}


@pytest.mark.parametrize(("fields", "seen"), SEEN.values(), ids=SEEN)
def test_request_has_the_bytes_of_iproute2_when_it_sets_the_same(fields: VfFields, seen: str) -> None:
    """Every setting, byte for byte, struct ifinfomsg and attributes."""
    ((_, setting),) = vf_requests(3, fields, VfFields())

    assert vf_message(1, setting).hex() == _HEAD + seen


@pytest.mark.parametrize("name", CHILDREN)
def test_child_has_the_bytes_of_iproute2_when_it_makes_the_same(name: str) -> None:
    """`ip link add link lo name tbc type … mode …`, every mode; ipvlan's too, which this machine's
    kernel does not have.
    """
    mode, submode = name.split()

    body = child_request(1, "tbc", ShareFields(mode=mode, submode=submode))

    assert body.hex() == "00" * 16 + "0800050001000000" + "0800030074626300" + CHILDREN[name]


BEFORE = VfFields(
    mac="02:00:00:00:00:03",
    vlan=7,
    qos=2,
    vlan_protocol="802.1Q",
    trust=True,
    spoof_check=False,
    link_state="enable",
    min_tx_rate=10,
    max_tx_rate=1000,
)
PLACE = VfPlace(physical="ens1", index=3)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> VfKernel:
    """A physical function with two virtual ones."""
    made = VfKernel(
        {0: VfFields(mac="00:00:00:00:00:00", vlan=0, qos=0, vlan_protocol="802.1Q", link_state="auto"), 3: BEFORE}
    )
    monkeypatch.setattr("topobus.nic.netlink.vf_settings.with_netlink", lambda _places, _namespace, work: work(made))
    return made


def test_reading_gives_each_setting_when_the_kernel_tells_them(kernel: VfKernel) -> None:
    """Also what a driver does not tell (all ones) is known as such."""
    kernel.states[4] = VfFields(mac="02:00:00:00:00:04", vlan=100, qos=3, vlan_protocol="802.1ad", link_state="disable")
    (link,) = kernel.link("get")

    assert read_vf(link, 3) == BEFORE
    assert read_vf(link, 4) == VfFields(
        mac="02:00:00:00:00:04",
        vlan=100,
        qos=3,
        vlan_protocol="802.1ad",
        link_state="disable",
        min_tx_rate=0,
        max_tx_rate=0,
    )
    assert read_vf(link, 1) is None


def test_settings_are_what_they_were_when_they_are_restored(kernel: VfKernel) -> None:
    """All of them set, all of them back; the other function is never touched."""
    other, record = kernel.states[0], DeviceRecord()
    wanted = VfFields(
        mac="02:00:00:00:00:99",
        vlan=100,
        qos=5,
        trust=False,
        spoof_check=True,
        link_state="disable",
        min_tx_rate=0,
        max_tx_rate=100,
    )

    refusal = configure_vf(Places(), PLACE, wanted, record)
    during = kernel.states[3]
    restore_vf(Places(), record)

    assert refusal is None
    assert during == VfFields(
        mac="02:00:00:00:00:99",
        vlan=100,
        qos=5,
        vlan_protocol="802.1Q",
        trust=False,
        spoof_check=True,
        link_state="disable",
        min_tx_rate=0,
        max_tx_rate=100,
    )
    assert (kernel.states, record.steps) == ({0: other, 3: BEFORE}, ())


@pytest.mark.parametrize(("present", "wanted"), [("802.1Q", "802.1ad"), ("802.1ad", "802.1Q")])
def test_protocol_of_the_tag_is_what_it_was_when_it_is_restored(kernel: VfKernel, present: str, wanted: str) -> None:
    """Each protocol goes by its own attribute, there and back."""
    before, record = msgspec.structs.replace(BEFORE, vlan_protocol=present), DeviceRecord()
    kernel.states[3] = before

    configure_vf(Places(), PLACE, VfFields(vlan=100, vlan_protocol=wanted), record)
    during = kernel.states[3].vlan_protocol
    restore_vf(Places(), record)

    assert (during, kernel.states[3]) == (wanted, before)


def test_restore_sets_nothing_else_when_a_claim_set_one_thing(kernel: VfKernel) -> None:
    """A driver may refuse to be told what nobody asked of it."""
    record = DeviceRecord()

    configure_vf(Places(), PLACE, VfFields(trust=False), record)
    restore_vf(Places(), record)

    assert [request[42:44] for request in kernel.requests] == [struct.pack("=H", 9)] * 2
    assert kernel.states[3] == BEFORE


def test_settings_are_restored_when_a_driver_refuses_one_of_them(kernel: VfKernel) -> None:
    """The refusal names the field; what was set before it is put back from the record alone."""
    record = DeviceRecord()
    kernel.refused = "trust"

    refusal = configure_vf(Places(), PLACE, VfFields(vlan=100, trust=False), record)
    during = kernel.states[3].vlan
    kernel.refused = ""
    restore_vf(Places(), record)

    assert refusal is not None
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["field"]) == ("vf-refused", "vf.trust")
    assert (during, kernel.states[3], record.steps) == (100, BEFORE, ())


def test_restore_is_asked_again_when_the_driver_refuses_for_now(kernel: VfKernel) -> None:
    """The step stays in the record, so the device is not given to anybody else."""
    record = DeviceRecord()
    configure_vf(Places(), PLACE, VfFields(vlan=100), record)
    kernel.refused, kernel.error = "vlan", errno.EBUSY

    with pytest.raises(HardwareError, match=r"vf\.vlan of function 3 of ens1"):
        restore_vf(Places(), record)

    assert [step.name for step in record.steps] == ["vf"]


def test_restore_tells_it_once_when_the_driver_refuses_for_good(kernel: VfKernel) -> None:
    """What was set cannot be taken back: the setting that stays is told with the command that takes
    it back, the others are as before, and nothing is tried again.
    """
    record = DeviceRecord()
    configure_vf(Places(), PLACE, VfFields(vlan=100, trust=False), record)
    kernel.refused = "vlan"

    reasons = restore_vf(Places(), record)

    assert [(reason.code, reason.facts["field"]) for reason in reasons] == [("vf-setting-kept", "vf.vlan")]
    assert "ip link set ens1 vf 3 vlan 7 qos 2 proto 802.1Q" in reasons[0].message
    assert (kernel.states[3].vlan, kernel.states[3].trust, record.steps) == (100, True, ())
    assert restore_vf(Places(), record) == ()


@pytest.mark.parametrize(
    ("refused", "error", "wanted", "field"),
    [
        ("link_state", errno.EOPNOTSUPP, VfFields(trust=False, link_state="disable"), "vf.linkState"),
        ("min_tx_rate", errno.EINVAL, VfFields(trust=False, min_tx_rate=20), "vf.minTxRate"),
        ("max_tx_rate", errno.EINVAL, VfFields(max_tx_rate=20), "vf.maxTxRate"),
        ("max_tx_rate", errno.EINVAL, VfFields(min_tx_rate=5, max_tx_rate=20), "vf.minTxRate, vf.maxTxRate"),
        ("vlan", errno.EPROTONOSUPPORT, VfFields(vlan=5, vlan_protocol="802.1ad"), "vf.vlanProtocol"),
        ("vlan", errno.EOPNOTSUPP, VfFields(qos=5), "vf.qos"),
        ("spoof_check", errno.EOPNOTSUPP, VfFields(mac="02:00:00:00:00:99", spoof_check=True), "vf.spoofCheck"),
        ("trust", errno.EOPNOTSUPP, VfFields(link_state="disable", trust=False), "vf.trust"),
        ("mac", errno.EADDRNOTAVAIL, VfFields(mac="02:00:00:00:00:99"), "vf.mac"),
    ],
)
def test_function_is_as_it_was_when_its_driver_knows_no_such_setting(
    kernel: VfKernel, refused: str, error: int, wanted: VfFields, field: str
) -> None:
    """The refusal names the claim's field.

    The driver goes on refusing, and all that was set is put back without
    asking for that setting again.
    """
    record = DeviceRecord()
    kernel.refused, kernel.error = refused, error

    refusal = configure_vf(Places(), PLACE, wanted, record)
    reasons = restore_vf(Places(), record)

    assert refusal is not None
    assert [(reason.code, reason.facts["field"]) for reason in refusal.reasons] == [("vf-refused", field)]
    assert (reasons, kernel.states[3], record.steps) == ((), BEFORE, ())


def test_configure_refuses_when_the_physical_function_has_no_such_one(kernel: VfKernel) -> None:
    """Nothing is written to the record for what is not there."""
    record = DeviceRecord()

    refusals = [
        configure_vf(Places(), place, VfFields(trust=True), record)
        for place in (VfPlace(physical="ens1", index=9), VfPlace(physical="ens9", index=3))
    ]

    assert [refusal.reasons[0].code for refusal in refusals if refusal is not None] == ["vf-gone", "vf-gone"]
    assert record.steps == ()


def test_restore_forgets_the_settings_when_the_function_is_gone(kernel: VfKernel) -> None:
    """The number of functions was set to 0 meanwhile: their settings went with them."""
    record = DeviceRecord()
    configure_vf(Places(), PLACE, VfFields(vlan=100), record)
    del kernel.states[3]

    restore_vf(Places(), record)

    assert record.steps == ()


def test_interface_gets_the_address_that_its_physical_function_lets_through() -> None:
    """A function with another address than `vf.mac` would send nothing that arrives."""
    state = InterfaceState(name="ens1v3", index=7, mac="02:00:00:00:00:07", mtu=1500, bus_device="pci/0000:3b:02.3")

    changes = plan_hand_over(state, InterfaceConfig(vf=VfFields(mac="02:00:00:00:00:99")), tag="topobus")

    assert [change.value for change in changes if change.name == "mac"] == ["02:00:00:00:00:99"]


def test_vlan_keeps_its_priority_when_only_the_other_is_written() -> None:
    """The kernel sets tag, priority and protocol at once.

    What is not written stays, but a new tag has no old priority.
    """
    before = VfFields(vlan=7, qos=2, vlan_protocol="802.1Q")
    requests = [
        vf_requests(3, fields, before)[0][1] for fields in (VfFields(qos=4), VfFields(vlan=9), VfFields(max_tx_rate=5))
    ]

    assert [struct.unpack("=III", request[4:]) for request in requests] == [(3, 7, 4), (3, 9, 0), (3, 0, 5)]
