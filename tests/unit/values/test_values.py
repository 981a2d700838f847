"""PciAddress, names, links, machines and health: the small values that
everything else is made of.
"""

import pytest

from topobus.formats.messages.codec import decode, encode
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode, PciLink
from topobus.values.names import is_dns_label, is_dns_subdomain, next_generation, to_dns_label
from topobus.values.outcome import ContainerPlacement, Reason
from topobus.values.pci import PciAddress
from topobus.values.quantity import Quantity
from topobus.values.request import Owner, OwnerKind


@pytest.mark.parametrize(
    ("text", "written"),
    [("3B:00.0", "0000:3b:00.0"), ("0000:00:1f.7", "0000:00:1f.7"), ("10000:e1:00.0", "10000:e1:00.0")],
)
def test_pci_address_reads_every_form_of_the_kernel(text: str, written: str) -> None:
    """Short, full and extended-domain addresses read, and are written in the kernel's form."""
    assert str(PciAddress.parse(text)) == written


@pytest.mark.parametrize("text", ["", "00:00", "0000:00:20.0", "0000:00:00.8", "g000:00:00.0", "0000:00:00.0 x"])
def test_pci_address_names_the_text_when_it_is_none(text: str) -> None:
    """What is no address is refused with an example of one."""
    with pytest.raises(ValueError, match="wanted domain:bus:device"):
        PciAddress.parse(text)


def test_pci_address_sorts_by_numbers() -> None:
    """Bus 9 comes before bus 0x10, and domain 0x10000 after both."""
    texts = ["10000:00:00.0", "0000:10:00.0", "0000:09:00.0"]

    assert [str(pci_address) for pci_address in sorted(PciAddress.parse(text) for text in texts)] == [
        "0000:09:00.0",
        "0000:10:00.0",
        "10000:00:00.0",
    ]


@pytest.mark.parametrize(
    ("text", "is_legal"), [("a", True), ("a-b", True), ("-a", False), ("a-", False), ("A", False), ("a" * 64, False)]
)
def test_dns_label_follows_rfc_1123(text: str, is_legal: bool) -> None:
    """A name that Kubernetes would refuse is refused here first."""
    assert is_dns_label(text) is is_legal


def test_dns_subdomain_is_labels_joined_by_dots() -> None:
    """Node names have dots; an empty label or 254 characters are none."""
    assert [is_dns_subdomain(text) for text in ("n1.example.com", "n1..com", ".".join(["a" * 49] * 6))] == [
        True,
        False,
        False,
    ]


def test_dns_label_is_refused_when_nothing_is_left() -> None:
    """A name of punctuation alone gives an error, not an empty name."""
    with pytest.raises(ValueError, match="no letter or digit"):
        to_dns_label(":::")


@pytest.mark.parametrize(("speed", "width", "gbps"), [(2.5, 1, 2.0), (5.0, 4, 16.0), (16.0, 16, 252.06), (0.0, 0, 0.0)])
def test_link_bandwidth_counts_line_coding(speed: float, width: int, gbps: float) -> None:
    """Gen1 and Gen2 lose a fifth to 8b/10b, later generations 2 in 130."""
    assert PciLink(speed_gts=speed, width=width).bandwidth_gbps == pytest.approx(gbps, abs=0.01)


def _machine(*ids: int) -> Machine:
    return Machine(
        node="n1",
        numa_nodes=tuple(NumaNode(id=identifier, cpus=CpuSet(identifier), memory_bytes=1) for identifier in ids),
        cpus=(),
        distances=(),
    )


def test_machine_survives_the_wire() -> None:
    """Sets and addresses travel as the kernel's text and come back equal."""
    machine = _machine(0, 8)

    assert (decode(encode(machine), Machine), machine.node_set) == (machine, NodeSet(0, 8))


def test_health_is_decided_by_the_worst_condition() -> None:
    """Degraded does not hide Unhealthy, whatever the order."""
    conditions = tuple(
        Condition(dimension=dimension, state=state, reason="r")
        for dimension, state in ((Dimension.LINK, HealthState.DEGRADED), (Dimension.MEMORY, HealthState.UNHEALTHY))
    )
    worst = DeviceHealth(state=HealthState.UNHEALTHY, conditions=conditions).worst

    assert worst is not None
    assert worst.dimension is Dimension.MEMORY


@pytest.mark.parametrize(
    ("state", "is_allocatable"),
    [("healthy", True), ("degraded", True), ("unhealthy", False), ("recovering", False), ("unknown", False)],
)
def test_only_healthy_and_degraded_devices_are_handed_out(state: str, is_allocatable: bool) -> None:
    """A device that is recovering or silent is not given to anybody new."""
    assert DeviceHealth(state=HealthState(state)).is_allocatable is is_allocatable


def test_owner_key_tells_pod_from_claim() -> None:
    """A pod and a claim of one name and uid are two owners in the ledger."""
    keys = {Owner(kind=kind, namespace="a", name="b", uid="c").key for kind in OwnerKind}

    assert len(keys) == len(OwnerKind)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(PciAddress.parse("3b:00.0"), "PciAddress('0000:3b:00.0')"), (Quantity.parse("2048Mi"), "Quantity.parse('2Gi')")],
    ids=["address", "quantity"],
)
def test_value_is_shown_as_it_is_read_and_nobody_changes_it(value: PciAddress | Quantity, shown: str) -> None:
    """Values are shared: what one reader could change, all others would see."""
    assert repr(value) == shown
    with pytest.raises(AttributeError, match="is immutable"):
        value.nano = 1  # type: ignore[misc, union-attr]  # what is refused


@pytest.mark.parametrize(
    ("number", "name"), [((1 << 32, 0, 0, 0), "domain"), ((0, 256, 0, 0), "bus"), ((0, 0, 0, -1), "function")]
)
def test_pci_address_is_refused_when_a_number_is_out_of_range(number: tuple[int, int, int, int], name: str) -> None:
    """The part is named, and what it may be."""
    with pytest.raises(ValueError, match=f"PCI {name} -?[0-9]+ is out of range: wanted 0 to"):
        PciAddress(*number)


def test_bitset_is_refused_when_it_is_negative() -> None:
    """A negative integer has endless bits."""
    with pytest.raises(ValueError, match="cannot be negative: got -1"):
        CpuSet.from_bits(-1)


def test_generation_begins_anew_when_it_is_beyond_what_anybody_can_count() -> None:
    """A forged number must not end the counting of its successors."""
    assert (next_generation(7), next_generation(2**53)) == (8, 1)


def test_dns_label_is_made_of_any_text() -> None:
    """Lower case, one dash for what a label may not have, and no dash at an end."""
    assert to_dns_label("__0000:3B:00.0__") == "0000-3b-00-0"


def test_machine_knows_its_online_cpus() -> None:
    """An offline CPU is listed and not counted."""
    machine = Machine(
        node="n", numa_nodes=(), cpus=(Cpu(id=0, online=True), Cpu(id=1, online=False), Cpu(id=2, online=True))
    )

    assert machine.online_cpus == CpuSet(0, 2)


def test_inventory_finds_a_device_by_name() -> None:
    """What is not in the inventory is None."""
    inventory = Inventory(
        node="n",
        device_class="gpu",
        generation=1,
        devices=(Device(name="gpu-0", device_class="gpu", vendor="v", model="m"),),
    )

    assert [device.name if device is not None else None for device in map(inventory.device, ("gpu-0", "gpu-1"))] == [
        "gpu-0",
        None,
    ]


@pytest.mark.parametrize(
    ("kind", "uid", "text"),
    [
        (OwnerKind.CONTAINER, "main", "container main of pod default/trainer"),
        (OwnerKind.CONTAINER, "", "container (all) of pod default/trainer"),
        (OwnerKind.POD, "1f0c", "pod default/trainer"),
    ],
)
def test_owner_is_written_for_people(kind: OwnerKind, uid: str, text: str) -> None:
    """A container names its pod; a uid is for machines."""
    assert str(Owner(kind=kind, namespace="default", name="trainer", uid=uid)) == text


def test_placement_of_a_claim_tells_no_alignment_when_nothing_was_merged() -> None:
    """Of a pod's container it is told, whatever the policy.

    Of a claim only how near its devices are.
    """
    reasons = (
        Reason(code="no-alignment", message="policy none: nothing is aligned"),
        Reason(code="locality-met", message="in a switch"),
    )
    claim = ContainerPlacement(name="", alignment=Hint(None, preferred=True), reasons=reasons)
    container = ContainerPlacement(name="main", alignment=Hint(None, preferred=True), reasons=reasons)

    assert [reason.code for reason in claim.shown_reasons] == ["locality-met"]
    assert container.shown_reasons == reasons
    assert (claim.has_alignment, container.has_alignment) == (False, True)
