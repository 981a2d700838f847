"""What the console shows, and whom it lets in: pure values."""

from __future__ import annotations

import msgspec
from msgspec import structs

from topobus.console.rules.access import Attempts, allowed_hosts, is_allowed_host, is_same_origin
from topobus.console.rules.board import Board
from topobus.console.rules.free_devices import free_rows, free_view, sum_rows
from topobus.console.rules.node_drawing import View, node_view
from topobus.console.rules.silence import silence_view, with_silence
from topobus.console.rules.views import decision_view, for_counting, node_row, sick_view
from topobus.console.rules.waiting import WaitingList
from topobus.engine.drawing.layout import layout_of
from topobus.engine.health.silence import TOPOLOGY
from topobus.formats.messages.messages import ApiObject, DecisionEvent
from topobus.values.device import Device, Inventory
from topobus.values.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.machine import Cpu, Machine, NumaNode, PciDevice
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.outcome import ContainerPlacement, Placement, Reason, Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeView

POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u-1")
SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="link-down"),),
)

_NO_CPUS = CpuSet()


def _gpu(name: str, health: DeviceHealth = HEALTHY, **fields: object) -> Device:
    return Device(name=name, device_class="gpu", health=health, **fields)  # type: ignore[arg-type]  # fields of a device


def _inventory(*devices: Device) -> Inventory:
    return Inventory(node="n1", device_class="gpu", generation=1, devices=devices)


def _held(*names: str, cpus: CpuSet = _NO_CPUS) -> Holders:
    return Holders(
        node="n1", allocations={POD.key: Allocation(owner=POD, holdings=(Holding(devices={"gpu": names}, cpus=cpus),))}
    )


def _node_row(inventory: Inventory, ledger: Holders) -> View:
    return node_row("n1", [inventory], free_rows([inventory], ledger))


def test_node_row_counts_a_device_once_when_it_is_held_and_sick() -> None:
    """Free is neither held nor unfit; what is held of a device that is gone counts for nothing."""
    row = _node_row(_inventory(_gpu("gpu-0", SICK), _gpu("gpu-1"), _gpu("gpu-2")), _held("gpu-0", "gpu-1", "gpu-9"))

    assert [(kind["total"], kind["held"], kind["free"], kind["sick"]) for kind in row["classes"]] == [(3, 2, 1, 1)]


def test_spare_is_neither_free_nor_sick() -> None:
    """It is counted as a spare, and no view of sick devices has it."""
    spare = _gpu("gpu-1", is_spare=True)
    row = _node_row(_inventory(_gpu("gpu-0"), spare), _held())

    assert [(kind["free"], kind["sick"], kind["others"]) for kind in row["classes"]] == [(1, 0, "1 spare")]
    assert sick_view(spare, "n1", _held()) is None


def test_free_devices_are_told_by_class_with_those_that_lie_together() -> None:
    """A device that is not well is tainted, one of an operator withheld; over all nodes the best of
    them counts. The words are those of `topobus free`.
    """
    kept = Maintenance(verb=DeviceVerb.MAINTAIN, why="fan", who="a@b", since="2026-11-24T00:00:00Z")
    near = [_gpu(f"gpu-{place}", numa_nodes=NodeSet(place // 2), pcie_root=f"r{place}") for place in range(4)]
    first = free_rows([_inventory(*near, _gpu("gpu-8", SICK), _gpu("gpu-9", maintenance=kept))], _held("gpu-0"))["gpu"]
    second = free_rows([_inventory(_gpu("gpu-0"), _gpu("gpu-1"))], _held("gpu-0", "gpu-1"))["gpu"]

    assert (first.others_text, first.together_text) == (
        "1 held, 1 tainted, 1 used up or withheld",
        "3 on a node, 2 on a NUMA node, no pair under a PCIe root",
    )
    assert free_view(sum_rows("gpu", [first, second])) == {
        "class": "gpu",
        "nodes": 2,
        "total": 8,
        "held": 3,
        "free": 3,
        "others": "3 held, 1 tainted, 1 used up or withheld",
        "together": first.together_text,
    }


def test_inventory_for_counting_counts_the_same_and_keeps_no_model_of_what_is_well() -> None:
    """Rows and sick devices are those of the whole inventory.

    Attributes of devices that are well are left out.
    """
    inventory = _inventory(_gpu("gpu-0", SICK, model="H100"), _gpu("gpu-1", model="H100", numa_nodes=NodeSet(0)))

    kept = for_counting(inventory)

    assert _node_row(kept, _held("gpu-1")) == _node_row(inventory, _held("gpu-1"))
    assert kept.devices == (inventory.devices[0], _gpu("gpu-1", numa_nodes=NodeSet(0)))


def test_sick_view_names_the_pod_when_the_ledger_has_it() -> None:
    """Without an event the ledger tells who is affected; a device that is well has no view."""
    view = sick_view(
        _gpu("gpu-0", SICK, model="H100", pci=PciAddress(0, 0x18, 0, 0), numa_nodes=NodeSet(0)), "n1", _held("gpu-0")
    )

    assert view is not None
    assert msgspec.json.decode(msgspec.json.encode(view)) == view
    assert (view["state"], view["reason"], view["users"]) == ("unhealthy", "link-down", ["pod default/trainer"])
    assert (view["model"], view["pci"], view["numa"]) == ("H100", "0000:18:00.0", "0")
    assert sick_view(_gpu("gpu-1"), "n1", _held("gpu-1")) is None


def test_node_view_is_the_drawing_of_the_command_line_when_a_machine_is_drawn() -> None:
    """Signs, texts and places are those of `layout_of`: each device in its NUMA node or said to be
    elsewhere, each core with its owner's letter, cores of a cache together.
    """
    cpus = tuple(
        Cpu(id=cpu, online=True, core=cpu, socket=0, numa_node=0 if cpu < 4 else None, l3=cpu // 2) for cpu in range(5)
    )
    machine = Machine(node="n1", numa_nodes=(NumaNode(id=0, cpus=CpuSet(0, 1, 2, 3), memory_bytes=2**30),), cpus=cpus)
    inventories = [_inventory(_gpu("gpu-0", numa_nodes=NodeSet(0), model="H100"), _gpu("gpu-1", SICK))]

    view = node_view(machine, inventories, _held("gpu-0", cpus=CpuSet(1)))

    layout = layout_of(machine, inventories, _held("gpu-0", cpus=CpuSet(1)))
    ((panel,),) = view["sockets"]
    assert (view["summary"], panel["cpus"], panel["memory"]) == (layout.summary, layout.panels[0].cpus_text, "1 GiB")
    assert [[core["sign"] for core in cache] for cache in panel["cores"]] == [["·", "T"], ["·", "·"]]
    assert panel["cores"][0][1]["text"] == "cpu 1: pod default/trainer"
    held = panel["roots"][0]["switches"][0]["devices"][0]
    assert (held["name"], held["sign"], held["text"], held["users"]) == ("gpu-0", "T", "H100", ["pod default/trainer"])
    assert (view["elsewhere"]["cpus"], view["elsewhere"]["memory"]) == ("1 (1 core), 1 free", "")
    lost = view["elsewhere"]["roots"][0]["switches"][0]["devices"][0]
    assert (lost["name"], lost["mark"], lost["text"], lost["is_well"]) == ("gpu-1", "!", "link-down", False)


def test_node_view_shows_parts_and_what_is_not_offered_when_a_card_has_them() -> None:
    """A card's parts stand with it, each with its owner.

    What no service offers is drawn and has no details; who shares a
    device is said; a sick core says so.
    """
    functions = tuple(
        PciDevice(address=PciAddress(0, bus, 0, 0), vendor=1, device=1, class_code=0x030200, numa_node=0)
        for bus in (7, 8)
    )
    cpus = tuple(Cpu(id=cpu, online=True, core=cpu, numa_node=0) for cpu in range(2))
    machine = Machine(
        node="n1", numa_nodes=(NumaNode(id=0, cpus=CpuSet(0, 1), memory_bytes=1),), cpus=cpus, pci_devices=functions
    )
    card = _gpu("gpu-0", numa_nodes=NodeSet(0), pci=functions[0].address)
    part = _gpu("gpu-0-p0", SICK, numa_nodes=NodeSet(0), parent="gpu-0")
    sick_cpu = Inventory(
        node="n1",
        device_class="cpu",
        generation=1,
        devices=(Device(name="cpu-0", device_class="cpu", cpu=0, health=SICK),),
    )

    view = node_view(machine, [_inventory(card, part), sick_cpu], _held("gpu-0-p0", cpus=CpuSet(0)))

    ((panel,),) = view["sockets"]
    first, second = panel["roots"][0]["switches"][0]["devices"]
    assert (second["name"], [part["name"] for part in second["parts"]]) == ("gpu-0", ["gpu-0-p0"])
    assert (second["parts"][0]["users"], second["parts"][0]["text"]) == (["pod default/trainer"], "link-down")
    assert (first["name"], first["is_offered"]) == ("display 08:00.0", False)
    assert panel["cores"][0][0]["text"] == "cpu 0: not well, pod default/trainer"


def test_devices_are_unknown_and_told_once_when_their_service_is_silent() -> None:
    """A silent service's devices are not free and not well, and the service is shown in their
    place.

    A fault that is known stays; other classes are as they were.
    """
    inventories = {
        "gpu": _inventory(_gpu("gpu-0"), _gpu("gpu-1", SICK)),
        "nic": Inventory(node="n1", device_class="nic", generation=1),
    }

    heard = with_silence(inventories, {"gpu": "09:00", TOPOLOGY: "09:00"})

    row = node_row("n1", heard.values(), free_rows(heard.values(), None), {"gpu": "09:00"})
    assert (row["silent"], row["classes"][0]["free"], row["classes"][0]["sick"]) == (["gpu"], 0, 2)
    sick = [sick_view(device, "n1", None) for device in heard["gpu"].devices]
    assert [view and view["reason"] for view in sick] == [None, "link-down"]
    assert heard["gpu"].warnings[0].startswith("service-silent: no answer since 09:00")
    assert heard["nic"] == inventories["nic"]
    assert "may be old" in silence_view("n1", TOPOLOGY, "09:00", ("gpu",))["message"]
    assert "stays held" in silence_view("n1", "gpu", "09:00", ("gpu",))["message"]


def _object(
    kind: str, name: str, *, spec: dict[str, object] | None = None, status: dict[str, object] | None = None
) -> ApiObject:
    return ApiObject(
        api_version="v1", kind=kind, metadata={"name": name, "namespace": "team"}, spec=spec or {}, status=status or {}
    )


def test_waiting_claim_says_why_when_it_has_no_devices() -> None:
    """A claim without an allocation waits, with the controller's reason.

    An allocated one does not, nor does a class; rubbish in a status breaks nothing.
    """
    condition = {"type": "Allocated", "status": "False", "reason": "NoDevices", "message": "2 of 4"}
    claim = _object("ResourceClaim", "fast", status={"conditions": [condition, 7]})
    allocated = _object("ResourceClaim", "fast", status={"allocation": {"devices": {}}})
    rubbish = _object("Pod", "odd", spec={"resourceClaims": 7}, status={"conditions": "no list"})
    waiting = WaitingList()

    view = waiting.take("ResourceClaim", "team", "fast", claim)["resourceclaim/team/fast"]
    strange = waiting.take("Pod", "team", "odd", rubbish)["pod/team/odd"]

    assert view is not None
    assert (view["kind"], view["name"], view["reason"], view["message"]) == ("claim", "fast", "NoDevices", "2 of 4")
    assert strange is not None
    assert strange["reason"] == "not looked at yet"
    assert waiting.take("ResourceClaim", "team", "fast", allocated) == {"resourceclaim/team/fast": None}
    assert waiting.take("DeviceClass", "", "gpu", _object("DeviceClass", "gpu")) == {}


def test_waiting_claim_of_a_cluster_says_what_its_pod_says() -> None:
    """At an API server a claim has no reason of its own: it is that of a pod that uses it, by name
    or by template, as long as that pod waits; without one nobody looks at it.
    """
    condition = {"type": "topobus.dev/Allocated", "status": "False", "reason": "NoDevices", "message": "n1: all in use"}
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    uses = {
        "resourceClaims": [{"name": "a", "resourceClaimName": "fast"}, {"name": "b", "resourceClaimTemplateName": "t"}]
    }
    made = {"resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x1"}]}
    pod = _object("Pod", "p", spec=uses, status={"conditions": [gated, condition], **made})
    bound = _object("Pod", "p", spec={**uses, "nodeName": "n1"}, status=made)
    waiting = WaitingList(is_of_cluster=True)

    alone = waiting.take("ResourceClaim", "team", "fast", _object("ResourceClaim", "fast"))
    after_pod = waiting.take("Pod", "team", "p", pod)
    late = waiting.take("ResourceClaim", "team", "p-b-x1", _object("ResourceClaim", "p-b-x1"))
    after_bind = waiting.take("Pod", "team", "p", bound)

    assert alone["resourceclaim/team/fast"]["reason"] == "no pod waits for it"  # type: ignore[index]  # a view
    waiting_views = [after_pod["pod/team/p"], after_pod["resourceclaim/team/fast"], late["resourceclaim/team/p-b-x1"]]
    assert [(view["reason"], view["message"]) for view in waiting_views if view] == [
        ("NoDevices", "n1: all in use")
    ] * 3
    assert after_pod["resourceclaim/team/fast"]["users"] == ["pod team/p"]  # type: ignore[index]  # a view
    assert after_bind["pod/team/p"] is None
    assert after_bind["resourceclaim/team/fast"]["reason"] == "no pod waits for it"  # type: ignore[index]  # a view


def test_waiting_pod_waits_no_more_when_it_is_placed_or_has_ended() -> None:
    """A pod that kube-scheduler has placed, or that is over, is not shown.

    What is forgotten is named.
    """
    waiting = WaitingList()
    placed = _object("Pod", "a", status={"conditions": [{"type": "PodScheduled", "status": "True", "reason": "Fine"}]})
    over = _object("Pod", "b", status={"phase": "Failed"})

    shown = [waiting.take("Pod", "team", pod.metadata["name"], pod) for pod in (placed, over)]
    waiting.take("Pod", "team", "c", _object("Pod", "c"))
    waiting.take("ResourceClaim", "team", "d", _object("ResourceClaim", "d"))

    assert shown == [{"pod/team/a": None}, {"pod/team/b": None}]
    assert waiting.clear() == ("resourceclaim/team/d", "pod/team/c")
    assert waiting.clear() == ()


def test_decision_view_has_the_reasons_when_it_was_refused() -> None:
    """Codes and sentences both, and advice is no reason of the summary."""
    reasons = (Reason(code="numa-capacity", message="too few"), Reason(code="would-fit", message="with one"))
    event = DecisionEvent(
        id="d-1", verb="place", node="n1", op_id="o", time="t", owner=POD, outcome=Refusal(reasons=reasons)
    )

    view = decision_view(event)

    assert (view["is_refused"], view["summary"]) == (True, "refused: numa-capacity")
    assert view["reasons"][0] == {"code": "numa-capacity", "message": "too few"}


def test_decision_view_says_nothing_of_alignment_when_a_claim_was_placed() -> None:
    """Its devices were chosen before its node was asked: neither a hint, nor a policy, nor that
    nothing is aligned stands beside how near they are.
    """
    reasons = (
        Reason(code="no-alignment", message="policy none: nothing is aligned"),
        Reason(code="locality-met", message="all within a switch"),
    )
    container = ContainerPlacement(
        name="", alignment=Hint(None, preferred=True), devices={"gpu": ("gpu-0",)}, reasons=reasons
    )
    aligned = ContainerPlacement(name="main", alignment=Hint(NodeSet(0), preferred=True), reasons=reasons)
    view = NodeView(node="n1", machine_generation=1, numa_nodes=NodeSet(0))
    event = DecisionEvent(id="d-1", verb="place", node="n1", op_id="o", time="t", owner=POD, view=view)

    claim = decision_view(structs.replace(event, outcome=Placement(containers=(container,))))
    pod = decision_view(structs.replace(event, outcome=Placement(containers=(aligned,))))

    (shown,) = claim["containers"]
    assert (claim["policy"], shown["merged"], shown["hints"]) == ("", "", [])
    assert [reason["code"] for reason in shown["reasons"]] == ["locality-met"]
    assert (pod["policy"] != "", pod["containers"][0]["merged"], len(pod["containers"][0]["reasons"])) == (
        True,
        "{0}*",
        2,
    )


def test_board_gives_the_newest_of_each_entry_when_a_reader_is_slow() -> None:
    """However often an entry changes, a reader that was away gets it once.

    Who missed forgotten deletions begins anew.
    """
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
    """An address waits for the rest of a minute.

    Many addresses together have twenty times as many tries, and no more.
    """
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
        is_allowed_host(host, names)
        for host in ("console.example", "CONSOLE.example.:8765", "[::1]:8765", "", "0.0.0.0", "x.example")
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
