"""Judging a deployment."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from topobus.cli.rules.checkup import (
    MISSING,
    Finding,
    Level,
    check_access,
    check_certificate,
    check_clock,
    check_holders,
    check_hub,
    check_node,
    check_plugin_failures,
    check_registrations,
    check_rejected,
    check_releases,
    check_rivals,
    check_runtime,
    check_server,
    check_slice_fields,
    check_stored_clock,
    check_streams,
    check_unread,
)
from topobus.formats.kubernetes.objects import placed_uid
from topobus.formats.messages.catalogue import INVENTORY as STORED_INVENTORY
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject, KubeletRegistrations, RuntimeConnection
from topobus.formats.messages.origin import Origin
from topobus.values.device import Device, Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Ledger
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

MACHINE = Machine(node="n1", generation=3, numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),), cpus=())
INVENTORIES = [
    Inventory(node="n1", device_class=device_class, generation=1, machine_generation=3)
    for device_class in ("cpu", "fpga", "gpu", "nic")
]
LEDGER = Ledger(node="n1", sequence=5)


def only(findings: list[Finding], what: str) -> Finding:
    """Find the one finding about something."""
    found_findings = [finding for finding in findings if finding.what == what]
    assert len(found_findings) == 1
    return found_findings[0]


def test_check_node_is_content_when_everything_is_there() -> None:
    """A complete node has no warning and no failure."""
    findings = list(check_node("n1", MACHINE, INVENTORIES, LEDGER, {}))

    assert {finding.level for finding in findings} == {Level.OK}


def test_check_node_fails_with_the_service_s_name_when_an_inventory_is_missing() -> None:
    """A class without inventory names the service to start."""
    finding = only(list(check_node("n1", MACHINE, INVENTORIES[1:], LEDGER, {})), "n1: inventory cpu")

    assert finding.level is Level.FAIL
    assert "topobus-cpu" in finding.next_step


@pytest.mark.parametrize(
    ("device_class", "vendor", "class_code", "level"),
    [
        pytest.param("fpga", 0x10DE, 0x030200, Level.OK, id="no-fpga"),
        pytest.param("fpga", 0x10EE, 0x120000, Level.WARN, id="fpga"),
        pytest.param("fpga", 0x1002, 0x120000, Level.OK, id="accelerator-that-is-a-gpu"),
        pytest.param("gpu", 0x1002, 0x120000, Level.WARN, id="gpu-that-is-an-accelerator"),
        pytest.param("gpu", 0x1A03, 0x030000, Level.OK, id="display-of-the-server"),
        pytest.param("nic", 0x10EE, 0x020000, Level.WARN, id="nic"),
        pytest.param("cpu", 0x10DE, 0x030200, Level.WARN, id="cpus-are-everywhere"),
    ],
)
def test_check_node_misses_a_service_where_the_machine_has_something_for_it(
    device_class: str, vendor: int, class_code: int, level: Level
) -> None:
    """A class that nobody has ever served is a warning on a machine with such a card, and a remark
    on one without.
    """
    card = PciDevice(address=PciAddress.parse("0000:17:00.0"), vendor=vendor, device=1, class_code=class_code)
    inventories = [inventory for inventory in INVENTORIES if inventory.device_class != device_class]

    findings = list(
        check_node(
            "n1", replace(MACHINE, pci_devices=(card,)), inventories, LEDGER, {device_class: "no service answers hints"}
        )
    )

    assert only(findings, f"n1: inventory {device_class}").level is level


def test_check_node_fails_when_a_service_with_an_inventory_keeps_silent() -> None:
    """A stored inventory does not hide that its service is gone."""
    finding = only(
        list(check_node("n1", MACHINE, INVENTORIES, LEDGER, {"gpu": "no service answers hints"})), "n1: inventory gpu"
    )

    assert finding.level is Level.FAIL
    assert "no service answers hints" in finding.found


def test_check_node_is_content_when_an_inventory_is_older_than_the_machine() -> None:
    """An inventory that a newer machine did not change is well (its service answers), and both
    generations can be read.
    """
    findings = list(check_node("n1", replace(MACHINE, generation=4), INVENTORIES, LEDGER, {}))

    assert only(findings, "n1: inventory gpu").level is Level.OK
    assert "machine generation 3" in only(findings, "n1: inventory gpu").found
    assert "generation 4" in only(findings, "n1: machine").found


def test_check_node_warns_when_a_device_is_sick() -> None:
    """A device that cannot be handed out is named."""
    sick = Device(name="gpu-0", device_class="gpu", health=DeviceHealth(state=HealthState.UNHEALTHY))
    inventories = [
        replace(inventory, devices=(sick,)) if inventory.device_class == "gpu" else inventory
        for inventory in INVENTORIES
    ]

    finding = only(list(check_node("n1", MACHINE, inventories, LEDGER, {})), "n1: inventory gpu")

    assert finding.level is Level.WARN
    assert "gpu-0" in finding.found


def test_check_node_names_spares_and_is_content() -> None:
    """The operator wanted them."""
    spare = Device(name="gpu-0", device_class="gpu", is_spare=True)
    inventories = [
        replace(inventory, devices=(spare,)) if inventory.device_class == "gpu" else inventory
        for inventory in INVENTORIES
    ]

    finding = only(list(check_node("n1", MACHINE, inventories, LEDGER, {})), "n1: inventory gpu")

    assert finding.level is Level.OK
    assert finding.found.endswith("1 device, spare: gpu-0")


def test_check_node_fails_when_machine_and_ledger_are_missing() -> None:
    """Discovery and topology are named when what they write is missing."""
    findings = list(check_node("n1", None, INVENTORIES, None, {"topology": "no answer"}))

    assert [finding.what for finding in findings if finding.level is Level.FAIL] == [
        "n1: machine",
        "n1: ledger",
        "n1: topology",
    ]


def test_check_streams_names_stream_and_difference_when_one_drifted() -> None:
    """Drift fails with the field; the good ones are counted."""
    findings = check_streams({"A": "", "B": "max_age is 5, wanted 0", "C": MISSING})

    assert only(findings, "streams").found.startswith("1 of 3")
    assert "max_age" in only(findings, "stream B").found
    assert "start topobus-controller" in only(findings, "stream C").next_step


def test_check_rejected_names_node_value_and_writer_when_nobody_can_read_it() -> None:
    """A node that writes garbage, or in a language of another release, is named.

    A flood of garbage is a bounded number of rows.
    """
    findings = check_rejected([(STORED_INVENTORY, "n_1.gpu", "expected `str`, got `int`")])
    many = check_rejected([(STORED_INVENTORY, f"n{number}.gpu", "garbage") for number in range(1000)])

    assert [(finding.level, finding.what) for finding in findings] == [(Level.FAIL, "n.1: inventory")]
    assert "topobus_inventories_gpu/n_1.gpu: expected `str`" in findings[0].found
    assert "gpu" in findings[0].next_step
    assert len(many) <= 20
    assert "984 more" in many[-1].found


def test_check_rejected_names_the_key_once_when_the_reason_begins_with_it() -> None:
    """The bus' own reason has the place in front."""
    why = "topobus_inventories_gpu/n_1.gpu: cannot read this as Inventory: expected `str`"

    (finding,) = check_rejected([(STORED_INVENTORY, "n_1.gpu", why)])

    assert finding.found == f"cannot read {why}"


def test_check_node_counts_a_single_thing_as_one() -> None:
    """One device, one NUMA node, one owner; nothing is 0 of something."""
    owner = Owner(kind=OwnerKind.CLAIM, name="a", uid="a")
    ledger = Ledger(node="n1", allocations={owner.key: Allocation(owner=owner)})
    inventories = [replace(inventory, devices=(Device(name="x", device_class="gpu"),)) for inventory in INVENTORIES]

    texts = " ".join(finding.found for finding in check_node("n1", MACHINE, inventories, ledger, {}))

    assert [word for word in ("1 owner", "1 device", "1 NUMA node,") if word not in texts] == []
    assert [word for word in ("1 owners", "1 devices", "1 NUMA nodes", "0 owners") if word in texts] == []


def test_check_unread_names_nodes_that_are_none() -> None:
    """A flood of made-up nodes is one finding, not one for each check of each of them."""
    (finding,) = check_unread([f"ghost{number}" for number in range(400)])

    assert (finding.level, finding.what) == (Level.WARN, "inventories")
    assert finding.found.startswith("400 nodes have inventories and no machine")
    assert check_unread([]) == []


def test_check_rejected_says_how_to_end_an_object_that_nobody_can_read() -> None:
    """It is of no node: whoever applies its manifest or deletes it mends it."""
    (claim,) = check_rejected([(OBJECT, "resourceclaim.team.fast", "garbage")])
    (device_class,) = check_rejected([(OBJECT, "deviceclass._.gpu_topobus_dev", "garbage")])

    assert (claim.what, "`topobus delete resourceclaim fast -n team`" in claim.next_step) == ("object", True)
    assert "`topobus delete deviceclass gpu.topobus.dev` removes" in device_class.next_step


def test_check_runtime_fails_with_the_next_step_when_the_gateway_has_no_connection() -> None:
    """A failure where claims get CPUs; elsewhere a warning that says what is not protected."""
    why_not = "no container runtime answers at /run/nri.sock"
    absent = check_runtime("n1", RuntimeConnection(socket="/run/nri.sock", why_not=why_not, pins_cpus=True))
    unprotected = check_runtime("n1", RuntimeConnection(socket="/run/nri.sock", why_not=why_not))
    present = check_runtime("n1", RuntimeConnection(socket="/run/nri.sock"))

    assert absent is not None
    assert (absent.level, absent.what) == (Level.FAIL, "n1: container runtime")
    assert "(NRI): no container runtime answers" in absent.found
    assert "switch NRI on" in absent.next_step
    assert unprotected is not None
    assert unprotected.level is Level.WARN
    assert (
        "a device is given to the next owner while a container of a pod that was deleted by force still has it"
        in unprotected.next_step
    )
    assert present is not None
    assert (present.level, present.found) == (Level.OK, "reports containers to the gateway by /run/nri.sock (NRI)")
    assert check_runtime("n1", None) is None


def test_check_runtime_warns_when_nobody_sees_what_the_kernel_does() -> None:
    """Claims get CPUs for themselves all the same.

    What is lacking is who would notice that they do not.
    """
    finding = check_runtime(
        "n1",
        RuntimeConnection(socket="/run/nri.sock", cpusets_unseen="none of 3 containers has its control group below /x"),
    )

    assert finding is not None
    assert finding.level is Level.WARN
    assert finding.found.endswith("none of 3 containers has its control group below /x")
    assert "/sys/fs/cgroup" in finding.next_step


def test_check_streams_sends_nobody_to_delete_streams_that_have_other_copies_than_the_command_knows() -> None:
    """A hub of three servers has three copies.

    A command without that setting says which one, and not to remove what is stored.
    """
    (finding,) = check_streams({"KV_topobus_ledgers": "num_replicas is 3, wanted 1"})

    assert finding.level is Level.FAIL
    assert "TOPOBUS_CLI__NATS__REPLICAS=3" in finding.next_step
    assert "remove" not in finding.next_step


def test_check_server_fails_when_it_is_too_old() -> None:
    """A server older than what watches need is refused."""
    assert check_server((2, 8, 4)).level is Level.FAIL
    assert check_server((2, 9, 10)).level is Level.OK


_HALF = KubeletRegistrations(
    folder="/var/lib/kubelet/device-plugins",
    has_kubelet=True,
    plugins={"topobus.dev/gpu": "registered", "topobus.dev/nic": "registration failed: no room"},
    drivers={"topobus.dev": "waiting for kubelet"},
)


def _judged(
    registrations: KubeletRegistrations, *, has_devices: bool = True, rivals: Mapping[str, str] | None = None
) -> list[str]:
    findings = check_registrations("n1", registrations, rivals or {}, has_devices=has_devices)
    return [f"{finding.level} {finding.what}: {finding.found}" for finding in findings if finding.found != "answers"]


def test_check_registrations_judges_what_the_gateway_says_and_no_folder_of_this_machine() -> None:
    """Each resource and driver that kubelet does not have is named with the reason.

    DRA fails only where it is the single way.
    """
    none = replace(_HALF, plugins={}, drivers={})

    assert _judged(_HALF) == [
        "ok n1: kubelet: has topobus.dev/gpu",
        "fail n1: topobus.dev/nic: kubelet does not have it: registration failed: no room",
        "warn n1: topobus.dev: kubelet does not have it: waiting for kubelet",
    ]
    assert _judged(replace(_HALF, plugins={})) == [
        "fail n1: topobus.dev: kubelet does not have it: waiting for kubelet"
    ]
    assert "fail n1: topobus.dev/nic" not in str(_judged(_HALF, rivals={"topobus.dev/nic": "another plugin"}))
    assert _judged(none) == ["fail n1: kubelet: nothing is registered, and this node has devices"]
    assert _judged(none, has_devices=False) == ["ok n1: kubelet: runs; this node has no devices to offer"]


def test_check_registrations_warns_when_there_is_no_kubelet() -> None:
    """It is no failure: a node plane may run without kubelet, and the folder is the gateway's own,
    in whatever container.
    """
    absent = replace(_HALF, has_kubelet=False)

    assert _judged(absent) == [
        "warn n1: kubelet: none where the gateway looks: /var/lib/kubelet/device-plugins there has no kubelet.sock"
    ]


@pytest.mark.parametrize(
    ("ahead_s", "here_s", "level", "text"),
    [
        (7.24, None, Level.FAIL, "clock of n1 is 7.2 s ahead of this machine's"),
        (-3600.0, 0.1, Level.WARN, "clock of n1 is 3599.9 s behind the NATS server's"),
        (0.0, 9.0, Level.FAIL, "clock of n1 is 9.0 s ahead of the NATS server's"),
    ],
    ids=["ahead", "behind", "as-wrong-as-ours"],
)
def test_clock_is_a_finding_when_it_differs(ahead_s: float, here_s: float | None, level: Level, text: str) -> None:
    """A node that is ahead refuses requests as stale, which fails; one behind is a warning.

    Half a second is nothing, and so is a node that only our own clock makes wrong.
    """
    (finding,) = check_clock("n1", ahead_s, here_s)

    assert (finding.level, finding.found) == (level, text)
    assert check_clock("n1", 0.5, None) == check_clock("n1", -60.0, 60.0) == []


def test_clock_of_a_silent_node_is_judged_by_what_it_wrote_last() -> None:
    """The newest write counts, so that a clock that was set since is none.

    What says no time says nothing.
    """
    wrong = Origin(ahead_s=-90.0, stored_at="2026-01-01T00:00:00Z", time_ns=2)
    right, unsaid = Origin(ahead_s=0.1, time_ns=3), Origin(time_ns=4)

    (finding,) = check_stored_clock("n1", [wrong, unsaid, Origin(ahead_s=0.0, time_ns=1)])

    assert (finding.level, finding.what) == (Level.WARN, "n1: clock")
    assert "90.0 s behind the NATS server's at 2026-01-01T00:00:00Z" in finding.found
    assert check_stored_clock("n1", [wrong, unsaid, right]) == check_stored_clock("n1", []) == []


def test_releases_are_findings_by_name_when_they_differ() -> None:
    """Older, newer, unsaid and unreadable releases are told apart, services of one release in one
    line.

    Our own is nothing.
    """
    said = {"gpu": "0.2.0", "nic": "0.2.7", "cpu": "0.1.0", "fpga": "1.0", "topology": "", "relay": "none\x07"}

    findings = check_releases("n1", said, "0.2.1")

    assert [finding.found.partition(":")[0].partition(",")[0] for finding in findings] == [
        "topology does not report a release",
        "cpu runs release 0.1.0",
        "fpga runs release 1.0",
        "relay reports release 'none?'",
    ]
    assert {(finding.what, finding.level) for finding in findings} == {("n1: releases", Level.WARN)}


def test_check_slice_fields_warns_with_the_feature_when_a_server_keeps_no_counters() -> None:
    """What is dropped, what users get instead, and which feature to switch on.

    Nothing is said of a server that keeps all.
    """
    finding = check_slice_fields("n1", ("spec.devices.*.allowMultipleAllocations", "spec.devices.*.consumesCounters"))

    assert finding is not None
    assert (finding.level, finding.what) == (Level.WARN, "n1: slices")
    assert finding.found.endswith(
        "spec.devices.*.consumesCounters: devices are held by one claim, not shared; cards are offered "
        "whole, their partitions are not"
    )
    assert (
        finding.next_step
        == "switch DRAConsumableCapacity and DRAPartitionableDevices on in kube-apiserver and kube-scheduler"
    )
    assert check_slice_fields("n1", ()) is None


def test_check_plugin_failures_names_resource_and_cause() -> None:
    """A plugin that registered and is not served is a failure of that resource, with what becomes
    of it.
    """
    (finding,) = check_plugin_failures("n1", {"acme.example/widget": "its device host ended: no room"})

    assert (finding.level, finding.what) == (Level.FAIL, "n1: acme.example/widget")
    assert finding.found == "its device plugin is not served: its device host ended: no room"
    assert "tries it again" in finding.next_step
    assert check_plugin_failures("n1", {}) == []


def test_check_rivals_fails_when_a_vendors_plugin_has_a_resource_of_a_profile() -> None:
    """Pods get that plugin's devices then, and ours are offered to nobody."""
    (finding,) = check_rivals(
        "n1", {"nvidia.com/gpu": "another device plugin serves nvidia.com/gpu at /x/nvidia-gpu.sock"}
    )

    assert (finding.level, finding.what) == (Level.FAIL, "n1: nvidia.com/gpu")
    assert "/x/nvidia-gpu.sock" in finding.found
    assert "profiles" in finding.next_step
    assert check_rivals("n1", {}) == []


@pytest.mark.parametrize(
    ("wants_login", "is_encrypted", "is_local", "level", "says"),
    [
        (True, False, True, Level.OK, "has users; this is user cli"),
        (True, True, False, Level.OK, "TLS"),
        (True, False, False, Level.WARN, "passwords cross the wire"),
        (False, False, True, Level.WARN, "open: everyone who reaches it may read"),
        (False, True, False, Level.WARN, "open: everyone who reaches it may read"),
    ],
)
def test_check_access_says_whether_the_bus_is_open(
    wants_login: bool, is_encrypted: bool, is_local: bool, level: Level, says: str
) -> None:
    """Users, or open.

    A warning for an open server, also on loopback, and where others can
    overhear a login, with a way on.
    """
    finding = check_access(user="cli", wants_login=wants_login, is_encrypted=is_encrypted, is_local=is_local)

    assert (finding.level, finding.what) == (level, "nats users")
    assert says in finding.found
    assert (level is Level.OK) or "docs/how-to/secure-nats.md" in finding.next_step


@pytest.mark.parametrize(("days", "level"), [(364, Level.OK), (30, Level.OK), (29, Level.WARN), (0, Level.WARN)])
def test_check_certificate_warns_a_month_before_its_end(days: int, level: Level) -> None:
    """Until when it is good is always said.

    From 30 days before with the command that makes it anew.
    """
    finding = check_certificate(issuer="Topobus authority 1a", until="2027-11-23 14:34 UTC", days=days)

    assert (finding.level, finding.what) == (level, "nats certificate")
    assert f"signed by Topobus authority 1a, good until 2027-11-23 14:34 UTC ({days} days)" in finding.found
    assert ("topobus keys certify" in finding.next_step) is (level is Level.WARN)


@pytest.mark.parametrize(
    ("wants_login", "version", "level", "says"),
    [
        pytest.param(
            True, (2, 10, 27), Level.OK, "hub of 2 nodes with servers of their own, which come as its users", id="users"
        ),
        pytest.param(
            False,
            (2, 15, 1),
            Level.WARN,
            "no users: each of them may write what is stored here for the others",
            id="open",
        ),
        pytest.param(
            False,
            (2, 10, 27),
            Level.WARN,
            "nats-server 2.10 also reveals to each of them what all others subscribe to",
            id="open-and-old",
        ),
    ],
)
def test_check_hub_says_what_nodes_can_do_to_each_other(
    wants_login: bool, version: tuple[int, int, int], level: Level, says: str
) -> None:
    """A hub without users is said to be one, on loopback, too: it is the nodes that reach it."""
    finding = check_hub(["n1", "n2"], wants_login=wants_login, version=version)

    assert finding is not None
    assert finding.level is level
    assert says in finding.found
    assert ("also reveals" in finding.found) is (version < (2, 12) and not wants_login)
    assert check_hub([], wants_login=False, version=version) is None


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ("pod.default.victim", "`topobus delete pod victim -n default` removes it"),
        ("Pod.default.victim", "`nats kv del topobus_objects Pod.default.victim`"),
        ("pods.default.victim", "`nats kv del topobus_objects pods.default.victim`"),
    ],
)
def test_check_rejected_names_what_removes_that_very_key(key: str, step: str) -> None:
    """`delete Pod victim` is understood as the pod's own key, which may be well: another spelling
    is no key of ours.
    """
    (finding,) = check_rejected([(OBJECT, key, "garbage")])

    assert step in finding.next_step


def test_check_holders_names_who_holds_without_an_object_and_the_commands_that_end_it() -> None:
    """What the store does not have is told.

    What is stored, placed by hand, given by kubelet, or unreadable is not, and
    without any object nothing is said.
    """

    def stored(kind: str, name: str) -> ApiObject:
        return ApiObject(
            api_version="v1", kind=kind, metadata={"namespace": "default", "name": name, "uid": f"u-{name}"}
        )

    owners = [
        Owner(kind=OwnerKind.CLAIM, name="there", uid="u-there"),
        Owner(kind=OwnerKind.CLAIM, name="lost", uid="u-lost"),
        Owner(kind=OwnerKind.POD, name="replaced", uid="u-before"),
        Owner(kind=OwnerKind.POD, name="placed", uid=placed_uid("default", "placed")),
        Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="x"),
        Owner(kind=OwnerKind.CLAIM, name="garbage", uid="u-garbage"),
    ]
    ledger = Ledger(node="n1", allocations={owner.key: Allocation(owner=owner) for owner in owners})
    objects = [stored("ResourceClaim", "there"), stored("Pod", "replaced")]

    (finding,) = check_holders([ledger], objects, {"resourceclaim.default.garbage"})

    assert finding.level is Level.WARN
    assert finding.found.startswith("2 holders have no object: claim default/lost on n1, pod default/replaced on n1;")
    assert "`topobus release claim default/lost` frees" in finding.next_step
    assert check_holders([ledger], []) == []
    assert check_holders([Ledger(node="n1")], objects) == []
