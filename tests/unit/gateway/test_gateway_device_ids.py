"""How devices are named towards kubelet, and what is said of those that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from topobus.gateway.config import GatewaySettings, check
from topobus.gateway.device_plugins.rules.device_ids import kubelet_id, with_kubelet_ids
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.node_state import NodeState
from topobus.values.device import Device, Inventory
from topobus.values.errors import ConfigError
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind
from topobus.values.vendor_profiles import IdProfile

NIC = "topobus.dev/nic"


def nic(name: str, address: str | None = None, uuid: str = "") -> Device:
    """A NIC."""
    return Device(name=name, device_class="nic", pci=PciAddress.parse(address) if address else None, uuid=uuid)


def entries(*names: str, held: str = "") -> tuple[ListEntry, ...]:
    """A list of healthy devices."""
    return tuple(ListEntry(id=name, is_healthy=True, is_held=name == held) for name in names)


def named(
    listed: tuple[ListEntry, ...], *devices: Device, profile: IdProfile = "pci", previous: tuple[ListEntry, ...] = ()
) -> tuple[ListEntry, ...]:
    """Name a list by an inventory."""
    return with_kubelet_ids(listed, {device.name: device for device in devices}, profile, previous=previous)


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [("topobus", "nic-a"), ("pci", "0000:3b:00.1"), ("uuid", "GPU-5a1b")],
    ids=["topobus", "pci", "uuid"],
)
def test_device_has_the_id_of_the_profile_when_it_has_one(profile: IdProfile, wanted: str) -> None:
    """The name, the address or the UUID."""
    assert kubelet_id(nic("nic-a", "3b:00.1", "GPU-5a1b"), profile) == wanted


def test_list_is_as_it_was_when_names_are_to_be_kept() -> None:
    """Without the setting nothing changes."""
    listed = entries("nic-a")

    assert named(listed, nic("nic-a", "3b:00.1"), profile="topobus") == listed
    assert listed[0].wire_id == "nic-a"


def test_device_is_offered_to_nobody_when_it_has_no_such_id() -> None:
    """Listed by its name, not healthy, with the reason; its neighbour goes on."""
    veth, function = named(entries("nic-veth", "nic-0000-3b-00-1"), nic("nic-veth"), nic("nic-0000-3b-00-1", "3b:00.1"))

    assert (veth.wire_id, veth.is_healthy, veth.is_unnamed) == ("nic-veth", False, True)
    assert "a PCI address" in veth.reason
    assert (function.wire_id, function.is_healthy) == ("0000:3b:00.1", True)


def test_devices_are_offered_to_nobody_when_they_have_the_same_id() -> None:
    """Two ports of one function: kubelet could not tell them apart, and counts one."""
    first, second = named(entries("nic-p0", "nic-p1"), nic("nic-p0", "3b:00.0"), nic("nic-p1", "3b:00.0"))

    assert [(entry.wire_id, entry.is_healthy) for entry in (first, second)] == [("nic-p0", False), ("nic-p1", False)]
    assert "0000:3b:00.0" in first.reason
    assert "nic-p1" in first.reason


def test_device_keeps_its_id_when_another_with_the_same_comes() -> None:
    """Kubelet knows the first by it, and a pod may have it."""
    devices = (nic("nic-p0", "3b:00.0"), nic("nic-p1", "3b:00.0"))
    before = named(entries("nic-p0"), devices[0])

    after = named(entries("nic-p0", "nic-p1"), *devices, previous=before)
    after_restart = named(entries("nic-p0", "nic-p1", held="nic-p1"), *devices)

    assert [entry.wire_id for entry in after] == ["0000:3b:00.0", "nic-p1"]
    assert [entry.wire_id for entry in after_restart] == ["nic-p0", "0000:3b:00.0"]


def test_device_keeps_its_id_when_it_is_gone_and_held() -> None:
    """As it was listed before, or, after a restart, as its name tells."""
    before = named(entries("nic-a"), nic("nic-a", uuid="U-1"), profile="uuid")

    assert [entry.wire_id for entry in named(entries("nic-a"), profile="uuid", previous=before)] == ["U-1"]
    assert [entry.wire_id for entry in named(entries("nic-0000-3b-00-1"))] == ["0000:3b:00.1"]


def state_of(*devices: Device, profile: IdProfile = "pci", held: tuple[str, ...] = ()) -> NodeState:
    """A view of these devices."""
    nobody: Any = None
    state = NodeState(nobody, "n1", lambda device_class: f"topobus.dev/{device_class}", lambda _class, _pool: profile)
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=NIC, uid="u")
    allocations = {owner.key: Allocation(owner=owner, holdings=(Holding(devices={"nic": held}),))} if held else {}
    state.take_ledger(Ledger(node="n1", allocations=allocations))
    state.take_inventory("nic", Inventory(node="n1", device_class="nic", generation=1, devices=devices))
    return state


def test_ids_are_read_back_when_kubelet_names_a_device() -> None:
    """By address, by the name of before the setting, and by what is none of ours."""
    state = state_of(nic("nic-a", "3b:00.1"))

    assert [state.name_of(NIC, wire_id) for wire_id in ("0000:3b:00.1", "nic-a", "other")] == [
        "nic-a",
        "nic-a",
        "other",
    ]
    assert state.name_of("intel.com/sriov", "0000:3b:00.1") == "0000:3b:00.1"


def test_id_is_read_back_when_its_device_has_left_the_inventory() -> None:
    """A pod may have it still: it would be released otherwise."""
    state = state_of(nic("nic-a", "3b:00.1"), held=("nic-a",))

    state.take_inventory("nic", Inventory(node="n1", device_class="nic", generation=2, devices=()))

    assert [(entry.wire_id, entry.is_healthy) for entry in state.entries(NIC)] == [("0000:3b:00.1", False)]
    assert state.name_of(NIC, "0000:3b:00.1") == "nic-a"


def test_log_says_once_when_devices_cannot_be_named() -> None:
    """With what to do; not at each change of something else."""
    with capture_logs() as logs:
        state = state_of(nic("nic-p0", "3b:00.0"), nic("nic-p1", "3b:00.0"))
        state.take_inventory(
            "nic",
            Inventory(
                node="n1",
                device_class="nic",
                generation=2,
                devices=(*(nic(f"nic-p{port}", "3b:00.0") for port in (0, 1)), nic("nic-c", "5e:00.0")),
            ),
        )

    assert [(log["event"], log["devices"]) for log in logs] == [("ids.unusable", ["nic-p0", "nic-p1"])]


@pytest.mark.parametrize("ids", [{"cpu": "pci"}, {"nic/vf": "pci"}, {"": "uuid"}])
def test_settings_are_refused_when_they_name_what_cannot_be(ids: dict[str, IdProfile]) -> None:
    """At the start, with the key."""
    with pytest.raises(ConfigError, match="ids"):
        check(GatewaySettings(node="n1", ids=ids))


def test_pool_is_named_as_its_class_when_it_is_not_named_itself() -> None:
    """As with `exposure`."""
    settings = GatewaySettings(node="n1", ids={"nic": "pci", "nic-veth": "topobus"})

    assert [settings.ids_of("nic", f"topobus.dev/{pool}") for pool in ("nic", "nic-vf", "nic-veth")] == [
        "pci",
        "pci",
        "topobus",
    ]
    assert settings.ids_of("gpu", "topobus.dev/gpu") == "topobus"
