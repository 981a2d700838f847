"""What the console shows, and whom it lets in: pure values."""

from __future__ import annotations

from topobus.console.core.access import Attempts, allowed_hosts, is_allowed_host, is_same_origin
from topobus.console.core.board import Board
from topobus.console.core.views import decision_view, node_row, node_view, sick_view, waiting_view
from topobus.contracts.messages import ApiObject, DecisionEvent
from topobus.domain.device import Device, Inventory
from topobus.domain.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.ledger import Allocation, Holders, Holding
from topobus.domain.machine import Cpu, Machine, NumaNode
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.request import Owner, OwnerKind

POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u-1")
SICK = DeviceHealth(
    state=HealthState.UNHEALTHY, conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="link-down"),)
)

_NO_CPUS = CpuSet()


def _gpu(name: str, health: DeviceHealth = HEALTHY, **fields: object) -> Device:
    return Device(name=name, device_class="gpu", health=health, **fields)  # type: ignore[arg-type]  # fields of a device


def _inventory(*devices: Device) -> Inventory:
    return Inventory(node="n1", device_class="gpu", generation=1, devices=devices)


def _held(*names: str, cpus: CpuSet = _NO_CPUS) -> Holders:
    return Holders(node="n1", allocations={POD.key: Allocation(owner=POD, holdings=(Holding(devices={"gpu": names}, cpus=cpus),))})


def test_node_row_counts_a_device_once_when_it_is_held_and_sick() -> None:
    """Free is neither held nor unfit; what is held of a device that is gone counts for nothing."""
    row = node_row("n1", [_inventory(_gpu("gpu-0", SICK), _gpu("gpu-1"), _gpu("gpu-2"))], _held("gpu-0", "gpu-1", "gpu-9"))

    assert row["classes"] == [{"class": "gpu", "total": 3, "held": 2, "free": 1, "sick": 1}]


def test_sick_view_names_the_pod_when_the_ledger_has_it() -> None:
    """Without an event the ledger tells who is affected; a device that is well has no view."""
    view = sick_view(_gpu("gpu-0", SICK), "n1", _held("gpu-0"))

    assert view is not None
    assert (view["state"], view["reason"], view["users"]) == ("unhealthy", "link-down", ["pod default/trainer"])
    assert sick_view(_gpu("gpu-1"), "n1", _held("gpu-1")) is None


def test_node_view_puts_devices_and_cores_where_they_are_when_a_machine_is_drawn() -> None:
    """Each device is in its NUMA node or said to be elsewhere, each core has its holder."""
    cpus = tuple(Cpu(id=cpu, online=True, core=cpu, socket=0, numa_node=0) for cpu in range(2))
    machine = Machine(node="n1", numa_nodes=(NumaNode(id=0, cpus=CpuSet(0, 1), memory_bytes=1),), cpus=cpus)

    view = node_view(machine, [_inventory(_gpu("gpu-0", numa_nodes=NodeSet(0)), _gpu("gpu-1"))], _held("gpu-0", cpus=CpuSet(1)))

    (numa_node,) = view["numa_nodes"]
    assert [(core["cpus"], core["holder"]) for core in numa_node["cores"]] == [([0], -1), ([1], 0)]
    assert (numa_node["cpus"], numa_node["free_cpus"]) == (2, 1)
    assert [device["name"] for root in numa_node["roots"] for switch in root["switches"] for device in switch["devices"]] == ["gpu-0"]
    assert [device["name"] for root in view["elsewhere"] for switch in root["switches"] for device in switch["devices"]] == ["gpu-1"]


def test_waiting_view_says_why_when_a_claim_has_no_devices() -> None:
    """A claim without an allocation waits, with the controller's reason; an allocated one does not, nor does a class; rubbish in a status breaks nothing."""
    condition = {"type": "Allocated", "status": "False", "reason": "NoDevices", "message": "2 of 4"}
    claim = ApiObject(api_version="v1", kind="ResourceClaim", metadata={"name": "fast"}, status={"conditions": [condition, 7]})
    allocated = ApiObject(api_version="v1", kind="ResourceClaim", metadata={"name": "fast"}, status={"allocation": {"devices": {}}})
    rubbish = ApiObject(api_version="v1", kind="Pod", metadata={}, status={"conditions": "no list"})

    view, strange = waiting_view(claim), waiting_view(rubbish)

    assert view is not None
    assert (view["name"], view["reason"], view["message"]) == ("fast", "NoDevices", "2 of 4")
    assert waiting_view(allocated) is None
    assert strange is not None
    assert strange["reason"] == "not looked at yet"


def test_decision_view_has_the_reasons_when_it_was_refused() -> None:
    """Codes and sentences both, and advice is no reason of the summary."""
    reasons = (Reason(code="numa-capacity", message="too few"), Reason(code="would-fit", message="with one"))
    event = DecisionEvent(id="d-1", verb="place", node="n1", op_id="o", time="t", owner=POD, outcome=Refusal(reasons=reasons))

    view = decision_view(event)

    assert (view["is_refused"], view["summary"]) == (True, "refused: numa-capacity")
    assert view["reasons"][0] == {"code": "numa-capacity", "message": "too few"}


def test_board_gives_the_newest_of_each_entry_when_a_reader_is_slow() -> None:
    """However often an entry changes, a reader that was away gets it once; who missed forgotten deletions begins anew."""
    board = Board()
    for number in range(1000):
        board.post("nodes", "n1", b"%d" % number)
    slow = board.since(1)
    for number in range(5000):
        board.post("health", str(number), b"{}")
        board.drop("health", str(number))

    assert slow is not None
    assert [posted.data for posted in slow] == [b"999"]
    assert board.since(1) is None
    assert board.since(board.version) == []
    assert board.since(board.version + 1) is None
    assert [posted.key for posted in board.all()] == ["n1"]
    assert len(board) == 1


def test_attempts_hold_back_one_address_when_it_guesses_and_all_when_many_do() -> None:
    """An address waits for the rest of a minute; many addresses together have twenty times as many tries, and no more."""
    attempts = Attempts(2)
    for at in (0.0, 1.0):
        attempts.note_wrong("a", at)
    own, other = attempts.wait_s("a", 10.0), attempts.wait_s("b", 10.0)
    for number in range(40):
        attempts.note_wrong(f"c{number}", 10.0)

    assert (own, other) == (50.0, 0.0)
    assert attempts.wait_s("b", 11.0) > 0
    assert attempts.wait_s("b", 71.0) == 0.0


def test_names_of_others_are_refused_when_they_lead_here() -> None:
    """Neither a foreign Host nor a foreign or absent Origin passes."""
    names = allowed_hosts("0.0.0.0", ["console.example"])

    assert [
        is_allowed_host(host, names) for host in ("console.example", "CONSOLE.example.:8765", "[::1]:8765", "", "0.0.0.0", "x.example")
    ] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert not is_same_origin("", "console.example")
    assert not is_same_origin("https://console.example.evil", "console.example")
