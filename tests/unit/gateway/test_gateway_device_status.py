"""What stands in a claim's status of its devices: entries that the API takes, whatever a driver
said of an interface.
"""

from __future__ import annotations

import msgspec
import pytest

from topobus.formats.kubernetes.device_status_limits import check_device_statuses
from topobus.formats.kubernetes.resource import AllocationResult, ClaimStatus
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.device_status import (
    ClaimReport,
    camel_case,
    device_statuses,
    joint_report,
    network_data,
    replaced_statuses,
    text_of,
)
from topobus.gateway.cluster.rules.device_faults import HealthNote
from topobus.values.names import ClaimUid
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface

NIC = AllocatedDevice(request="nic", pool="n1", device="nic-0")
SHARE = AllocatedDevice(request="nic", pool="n1", device="nic-1", share_id="6f3b5a52-26b6-4c3f-9a51-0d9c7d1c5d0a")
REPORT = ClaimReport(
    namespace="default",
    name="c",
    uid=ClaimUid("u"),
    device_class="nic",
    devices=(NIC,),
    pod="default/p",
    since="2026-11-23T04:00:00Z",
)
NET1 = AttachedInterface(name="net1", mac="02:00:00:00:00:01", addresses=("10.1.2.3/24", "fd00::3/64"), mtu=9000)


def test_entry_has_interface_condition_and_what_the_api_has_no_field_for() -> None:
    """One entry a device: who has it, whether it is ready, the interface as the pod sees it."""
    (entry,) = device_statuses(msgspec.structs.replace(REPORT, interfaces={"nic-0": NET1}, generation=3))

    assert entry == {
        "driver": "topobus.dev",
        "pool": "n1",
        "device": "nic-0",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Attached",
                "message": "in the sandbox of pod default/p",
                "lastTransitionTime": "2026-11-23T04:00:00Z",
                "observedGeneration": 3,
            }
        ],
        "data": {"pod": "default/p", "mtu": 9000},
        "networkData": {
            "interfaceName": "net1",
            "hardwareAddress": "02:00:00:00:00:01",
            "ips": ["10.1.2.3/24", "fd00::3/64"],
        },
    }


def test_health_is_a_condition_of_its_own_when_a_device_was_ever_sick() -> None:
    """Ready says that it was prepared, Healthy what became of it.

    A device that was never hurt has none, and ours takes the place of ours alone.
    """
    sick = HealthNote(is_healthy=False, code="fell-off-bus", message="gone", since="2026-11-23T05:00:00Z")
    report = msgspec.structs.replace(REPORT, devices=(NIC, SHARE), health={"nic-0": sick}, generation=3)

    entries = device_statuses(report)
    well = msgspec.structs.replace(report, health={"nic-0": HealthNote(is_healthy=True, since="2026-11-23T06:00:00Z")})
    watched = {"type": "Watched", "status": "True"}
    present = [{**entries[0], "conditions": [*entries[0]["conditions"], watched]}]
    replaced = replaced_statuses(present, "nic", device_statuses(well))

    assert [condition["type"] for entry in entries for condition in entry["conditions"]] == [
        "Ready",
        "Healthy",
        "Ready",
    ]
    assert entries[0]["conditions"][1] == {
        "type": "Healthy",
        "status": "False",
        "reason": "FellOffBus",
        "message": "gone (fell-off-bus)",
        "lastTransitionTime": "2026-11-23T05:00:00Z",
        "observedGeneration": 3,
    }
    assert [(condition["type"], condition["status"]) for condition in replaced[0]["conditions"]] == [
        ("Ready", "True"),
        ("Healthy", "True"),
        ("Watched", "True"),
    ]


def test_device_stands_once_when_two_requests_look_at_it_and_shares_stand_apart() -> None:
    """The list is a map of driver, pool, device and share: the API refuses an entry that stands
    twice.
    """
    looker = msgspec.structs.replace(NIC, request="other", is_shared=True)
    other_share = msgspec.structs.replace(SHARE, share_id="7f3b5a52-26b6-4c3f-9a51-0d9c7d1c5d0a")

    entries = device_statuses(msgspec.structs.replace(REPORT, devices=(NIC, looker, SHARE, other_share)))

    assert [(entry["device"], entry.get("shareID", "")[:1]) for entry in entries] == [
        ("nic-0", ""),
        ("nic-1", "6"),
        ("nic-1", "7"),
    ]


def test_reports_of_two_classes_leave_each_others_entries_alone() -> None:
    """A claim has one report a class, and each replaces the entries of its own class alone.

    Another driver's device may have the same name.
    """
    gpu = msgspec.structs.replace(
        REPORT, device_class="gpu", devices=(AllocatedDevice(request="gpu", pool="n1", device="gpu-0"),), pod=""
    )
    foreign = {"driver": "nic.example.com", "pool": "n1", "device": "nic-0", "conditions": [{"type": "Ready"}]}

    nic_alone = replaced_statuses([foreign], "nic", device_statuses(REPORT))
    both = replaced_statuses(nic_alone, "gpu", device_statuses(gpu))
    gpu_alone = replaced_statuses(both, "nic", [])

    assert both == [foreign, *device_statuses(REPORT), *device_statuses(gpu)]
    assert gpu_alone == [foreign, *device_statuses(gpu)]
    assert replaced_statuses(both, "gpu", []) == nic_alone
    assert replaced_statuses(gpu_alone, "gpu", []) == [foreign]


def _part(name: str, shape: str = "shape-half-0") -> AllocatedDevice:
    return AllocatedDevice(request="half", pool="n1", device=name, shape=shape)


GPUS = msgspec.structs.replace(REPORT, device_class="gpu", devices=(_part("gpu-0"), _part("gpu-1")), pod="")
NICS = msgspec.structs.replace(REPORT, devices=(_part("nic-1"), _part("nic-2"), NIC), interfaces={"nic-1": NET1})


def test_shape_has_one_entry_and_its_parts_none() -> None:
    """The API server takes entries only of devices that the allocation names."""
    joint = joint_report([GPUS, NICS])

    (entry,) = device_statuses(joint)

    assert (entry["pool"], entry["device"]) == ("n1", "shape-half-0")
    assert (entry["conditions"][0]["status"], entry["conditions"][0]["reason"]) == ("True", "Attached")
    assert (entry["networkData"]["interfaceName"], entry["data"]) == ("net1", {"pod": "default/p", "mtu": 9000})
    assert (joint.key, [each["device"] for each in device_statuses(NICS)], device_statuses(GPUS)) == (
        "u/shape",
        ["nic-0"],
        [],
    )


def test_shape_shows_all_its_interfaces_when_it_has_several() -> None:
    """`networkData` is of one interface alone, the first."""
    second = AttachedInterface(name="net2", mac="02:00:00:00:00:02", addresses=("10.9.9.9/24", "bad"))
    joint = joint_report([GPUS, msgspec.structs.replace(NICS, interfaces={"nic-1": NET1, "nic-2": second})])

    (entry,) = device_statuses(joint)

    assert entry["networkData"]["interfaceName"] == "net1"
    assert entry["data"]["interfaces"] == [
        {
            "device": "nic-1",
            "interfaceName": "net1",
            "hardwareAddress": "02:00:00:00:00:01",
            "ips": ["10.1.2.3/24", "fd00::3/64"],
            "mtu": 9000,
        },
        {
            "device": "nic-2",
            "interfaceName": "net2",
            "hardwareAddress": "02:00:00:00:00:02",
            "ips": ["10.9.9.9/24"],
        },
    ]
    assert "nic-2: 'bad' is no address with its prefix" in entry["conditions"][0]["message"]


def test_shape_is_ready_only_when_every_part_is() -> None:
    """The reason is that of the part's class which was refused."""
    joint = joint_report([GPUS, msgspec.structs.replace(NICS, refused="net1 is taken", code="name-taken")])

    (condition,) = device_statuses(joint)[0]["conditions"]

    assert (condition["status"], condition["reason"], condition["message"]) == (
        "False",
        "NameTaken",
        "net1 is taken (name-taken)",
    )


def test_shape_is_as_healthy_as_its_worst_part() -> None:
    """Its message names the part, whichever part recovered before."""
    well = HealthNote(is_healthy=True, since="2026-11-23T06:00:00Z")
    sick = HealthNote(is_healthy=False, code="fell-off-bus", message="gone", since="2026-11-23T05:00:00Z")
    gpus = msgspec.structs.replace(GPUS, health={"gpu-0": well, "gpu-1": sick})

    conditions = [
        device_statuses(joint_report([each, NICS]))[0]["conditions"][1]
        for each in (gpus, msgspec.structs.replace(gpus, health={"gpu-0": well}))
    ]

    assert [(condition["status"], condition["reason"], condition["message"]) for condition in conditions] == [
        ("False", "FellOffBus", "gpu-1: gone (fell-off-bus)"),
        ("True", "Recovered", ""),
    ]


def test_shape_has_the_cpus_of_all_its_parts() -> None:
    """As the kernel writes them, each once."""
    joint = joint_report([msgspec.structs.replace(GPUS, cpus={"gpu-0": "4-7", "gpu-1": "8-9"})])

    assert device_statuses(joint)[0]["data"] == {"cpus": "4-9"}


def test_entry_of_a_shape_is_taken_by_the_api_when_it_has_many_interfaces() -> None:
    """Data that is too large for the API would hide the whole entry: the addresses are left out of it."""
    parts = tuple(_part(f"nic-{number}") for number in range(16))
    addresses = tuple(f"fd00:1234:5678:9abc:def0:1234:5678:{number:x}/64" for number in range(1, 17))
    interfaces = {part.device: msgspec.structs.replace(NET1, addresses=addresses) for part in parts}
    joint = joint_report([msgspec.structs.replace(NICS, devices=parts, interfaces=interfaces)])
    (entry,) = device_statuses(msgspec.structs.replace(joint, since=REPORT.since))
    granted = {"request": "r", "driver": "topobus.dev", "pool": "n1", "device": "shape-half-0"}
    allocation = msgspec.convert({"devices": {"results": [granted]}}, AllocationResult)

    problems = list(check_device_statuses(ClaimStatus(allocation=allocation, devices=(entry,))))

    assert problems == []
    assert [each["interfaceName"] for each in entry["data"]["interfaces"]] == ["net1"] * 16
    assert "left out: the addresses in data" in entry["conditions"][0]["message"]


def test_device_that_needs_no_sandbox_is_ready_when_prepared() -> None:
    """Without a pod it is prepared; a CPU says which ones containers have for themselves."""
    (entry,) = device_statuses(msgspec.structs.replace(REPORT, pod="", cpus={"nic-0": "4-7"}))

    assert (entry["conditions"][0]["reason"], entry["data"]) == ("Prepared", {"cpus": "4-7"})
    assert "networkData" not in entry


def test_refused_device_says_why_with_the_reasons_code() -> None:
    """Not ready, the code in the form that conditions want, and as it is in the message."""
    code, text = text_of(
        Refusal(reasons=(Reason(code="name-taken", message="net1 is taken"), Reason(code="x", message="and more")))
    )

    (entry,) = device_statuses(msgspec.structs.replace(REPORT, refused=text, code=code))

    condition = entry["conditions"][0]
    assert (condition["status"], condition["reason"]) == ("False", "NameTaken")
    assert condition["message"] == "net1 is taken; and more (name-taken)"


@pytest.mark.parametrize(
    ("interface", "kept", "left_out"),
    [
        pytest.param({"addresses": ("10.0.0.1",)}, {}, ["'10.0.0.1' is no address with its prefix"], id="no prefix"),
        pytest.param({"addresses": ("FD00:0:0::1/64",)}, {"ips": ["fd00::1/64"]}, [], id="not in the shortest form"),
        pytest.param({"addresses": ("10.0.0.1/24", "10.0.0.1/24")}, {"ips": ["10.0.0.1/24"]}, [], id="twice"),
        pytest.param(
            {"addresses": tuple(f"10.0.0.{index}/24" for index in range(18))},
            {"ips": [f"10.0.0.{index}/24" for index in range(16)]},
            ["2 addresses beyond 16"],
            id="too many",
        ),
        pytest.param(
            {"name": "n" * 257}, {"interfaceName": None}, ["interfaceName has more than 256 bytes"], id="long name"
        ),
        pytest.param({"mac": "m" * 129}, {}, ["hardwareAddress has more than 128 bytes"], id="long mac"),
    ],
)
def test_part_of_an_interface_is_left_out_and_named_when_the_api_would_refuse_it(
    interface: dict[str, object], kept: dict[str, object], left_out: list[str]
) -> None:
    """A wrong address hides neither the right ones nor the device's state."""
    attached = msgspec.structs.replace(AttachedInterface(name="net1"), **interface)

    data, missing = network_data(attached)

    wanted = {key: value for key, value in {"interfaceName": "net1", **kept}.items() if value is not None}
    assert (data, list(missing)) == (wanted, left_out)


def test_entries_keep_the_apis_limits_whatever_a_driver_said() -> None:
    """Long texts in every place: nothing that a server would refuse."""
    wild = AttachedInterface(
        name="ü" * 200, mac="x" * 500, addresses=tuple(f"{index}::/{index}" for index in range(200)), mtu=2**32 - 1
    )
    report = msgspec.structs.replace(REPORT, interfaces={"nic-0": wild}, refused="y" * 40000, code="--")
    result = {"request": "nic", "driver": "topobus.dev", "pool": "n1", "device": "nic-0"}

    status = ClaimStatus(
        allocation=msgspec.convert({"devices": {"results": [result]}}, AllocationResult),
        devices=tuple(device_statuses(report)),
    )

    assert list(check_device_statuses(status)) == []


@pytest.mark.parametrize(
    ("code", "reason"), [("name-taken", "NameTaken"), ("", "Refused"), ("3-x", "Refused3X"), ("ä", "Refused")]
)
def test_code_becomes_a_reason_that_conditions_take(code: str, reason: str) -> None:
    """Letters and digits, beginning with a letter."""
    assert camel_case(code) == reason
