"""Without the extra's package the service runs, and whoever asks for an interface is told what to
install.
"""

from __future__ import annotations

import sys

import pytest

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, VfFields
from topobus.nic.netlink.hand_over import check_hand_over, hand_over, read_interface
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.take_back import take_back
from topobus.nic.netlink.vf_settings import VfPlace, configure_vf
from topobus.values.outcome import Refusal


def test_refusal_names_the_extra_when_pyroute2_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in says the same, changes nothing, and needs nothing but what every process has to
    say it.
    """
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    record, places = DeviceRecord(), Places()

    answers = [
        read_interface(places, "eth1"),
        check_hand_over(places, "eth1", InterfaceConfig()),
        hand_over(places, "eth1", "/run/netns/x", InterfaceConfig(), record, tag="topobus eth1"),
        configure_vf(places, VfPlace(physical="eth1", index=0), VfFields(trust=True), record),
    ]

    assert [answer.reasons[0].code if isinstance(answer, Refusal) else answer for answer in answers] == [
        "package-missing"
    ] * 4
    assert isinstance(answers[0], Refusal)
    assert "pip install '.[nic]' from the checkout" in answers[0].reasons[0].message
    assert record.steps == ()
    assert take_back(places, "", record).outcome == "nothing"
