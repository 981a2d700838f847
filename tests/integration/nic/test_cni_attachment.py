"""A claim's `cni` in a real sandbox: the chosen device, the pod's host ports and rates, the record,
and what is refused before anything is changed.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from integration.nic.conftest import Node
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.nic.cni.attachment import CniAttachment
from topobus.nic.cni.settings import CniSettings
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, HostPort, Sandbox

pytestmark = pytest.mark.integration

_NIC = Device(name="nic-nic0", device_class="nic", attributes={"interface": "nic0"})
_ANSWER_S = 30.0


def attachment(node: Node, **networks: Any) -> CniAttachment:
    """The operator's networks, each a list of plugins, as files."""
    paths = {}
    for name, plugins in networks.items():
        path = node.folder / f"{name}.conflist"
        path.write_text(json.dumps({"cniVersion": "1.0.0", "name": name, "plugins": plugins}))
        paths[name] = str(path)
    return CniAttachment(
        CniSettings(
            networks=paths,
            bin_dirs=(node.bundle.bin_dir,),
            program_path=node.bundle.program_path,
            state_dir=str(node.folder / "state"),
            timeout_s=30.0,
        )
    )


def sandbox(node: Node, **changes: Any) -> Sandbox:
    """The pod's sandbox as the runtime tells it."""
    fields: Mapping[str, Any] = {
        "id": "sandbox-1",
        "uid": "u1",
        "namespace": "default",
        "name": "web",
        "network_namespace": node.pod.path,
    }
    return Sandbox(**{**fields, **changes})


def routed_bridge(node: Node) -> dict[str, Any]:
    """A bridge over which the pod reaches everything."""
    return {
        "type": "bridge",
        "bridge": "tb0",
        "isGateway": True,
        "ipMasq": True,
        "ipam": node.host_local(routes=[{"dst": "0.0.0.0/0"}]),
    }


def veth(node: Node) -> None:
    """The chosen NIC, and another one of the host that a list may name."""
    for name in ("nic0", "other0"):
        node.host.ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-lan")


def answer_in(node: Node, port: int) -> threading.Thread:
    """Have the pod answer one connection."""
    listener = node.pod.call(lambda: socket.create_server(("", port)))
    listener.settimeout(_ANSWER_S)

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.sendall(b"from the pod")

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_host_port_answers_when_the_pod_has_one(node: Node) -> None:
    """A TCP connection from beyond the host to its port reaches the pod's.

    After detach nobody listens, and no rule is left.
    """
    outside = node.namespace("outside")
    node.host.ip("link", "add", "up0", "type", "veth", "peer", "name", "up0", "netns", outside.name)
    for namespace, address in ((node.host, "192.0.2.1/24"), (outside, "192.0.2.2/24")):
        namespace.ip("addr", "add", address, "dev", "up0")
        namespace.ip("link", "set", "up0", "up")
    cni = attachment(node, web=[routed_bridge(node), {"type": "portmap", "capabilities": {"portMappings": True}}])
    record = DeviceRecord()
    pod = sandbox(node, host_ports=(HostPort(host_port=18080, container_port=8080),))

    attached = node.host.call(lambda: cni.attach({"network": "web"}, pod, "net1", _NIC, record))
    assert isinstance(attached, AttachedInterface), attached
    server = answer_in(node, 8080)
    with outside.call(lambda: socket.create_connection(("192.0.2.1", 18080), timeout=_ANSWER_S)) as connection:
        said = connection.recv(100)
    server.join()
    refusal = node.host.call(lambda: cni.detach(record))

    assert said == b"from the pod"
    assert (refusal, record.steps) == (None, ())
    assert "18080" not in node.host.run("env", f"PATH={node.bundle.program_path}", "iptables-save")
    with pytest.raises(ConnectionRefusedError):
        outside.call(lambda: socket.create_connection(("192.0.2.1", 18080), timeout=_ANSWER_S))


def test_kernel_limits_the_pod_when_its_annotations_say_so(node: Node) -> None:
    """The rates of the two annotations are what the kernel's buckets have."""
    cni = attachment(node, web=[routed_bridge(node), {"type": "bandwidth", "capabilities": {"bandwidth": True}}])
    rates = {"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1500k"}

    attached = node.host.call(
        lambda: cni.attach({"network": "web"}, sandbox(node, annotations=rates), "net1", _NIC, DeviceRecord())
    )

    assert isinstance(attached, AttachedInterface), attached
    listed: list[dict[str, Any]] = json.loads(node.host.run("tc", "-json", "qdisc", "show"))
    assert sorted(entry["options"]["rate"] * 8 for entry in listed if entry["kind"] == "tbf") == [1_500_000, 10_000_000]


def test_chosen_device_moves_when_the_list_names_another(node: Node) -> None:
    """The allocator's choice is what is handed over, `lo` is up in the sandbox, and the interface
    is told as the pod sees it.
    """
    veth(node)
    node.pod.ip("link", "set", "lo", "down")
    cni = attachment(
        node,
        data=[
            {
                "type": "host-device",
                "device": "other0",
                "ipam": {"type": "static", "addresses": [{"address": "10.98.0.7/24"}]},
            }
        ],
    )
    mac = (node.host.link("nic0") or {})["address"]
    record = DeviceRecord()

    attached = node.host.call(lambda: cni.attach({"network": "data"}, sandbox(node), "net1", _NIC, record))

    assert attached == AttachedInterface(name="net1", mac=mac, addresses=("10.98.0.7/24",))
    assert ("nic0" in node.host.links, "other0" in node.host.links, node.pod.links) == (False, True, ["lo", "net1"])
    assert "UP" in (node.pod.link("lo") or {})["flags"]
    assert [(step.name, step.is_done) for step in record.steps] == [("cni", True)]
    assert node.host.call(lambda: cni.detach(record)) is None
    assert "nic0" in node.host.links
    assert "UP" in (node.pod.link("lo") or {})["flags"]


def test_attach_gives_the_same_answer_when_it_is_asked_again(node: Node) -> None:
    """Also by a service that was started since; and another sandbox of the pod gets it after a
    detach.
    """
    veth(node)
    plugins = [{"type": "host-device", "ipam": node.host_local("10.98.0.0/24")}]
    states: list[RecordState] = [RecordState()]
    record = DeviceRecord(write=states.append)
    first = node.host.call(
        lambda: attachment(node, data=plugins).attach({"network": "data"}, sandbox(node), "net1", _NIC, record)
    )

    again = node.host.call(
        lambda: attachment(node, data=plugins).attach(
            {"network": "data"}, sandbox(node), "net1", _NIC, DeviceRecord(states[-1])
        )
    )

    assert isinstance(first, AttachedInterface), first
    assert (again, node.leased) == (first, ["10.98.0.2"])


def test_detach_takes_all_back_when_the_service_died_in_the_middle(node: Node) -> None:
    """The record says "intended" and the sandbox is gone."""
    veth(node)
    lost = node.namespace("lost")
    plugins = [{"type": "host-device", "ipam": node.host_local("10.98.0.0/24")}]
    states: list[RecordState] = []
    node.host.call(
        lambda: attachment(node, data=plugins).attach(
            {"network": "data"},
            sandbox(node, network_namespace=lost.path),
            "net1",
            _NIC,
            DeviceRecord(write=states.append),
        )
    )
    record = DeviceRecord(states[0])
    lost.ip("link", "set", "net1", "netns", node.host.name)

    refusal = node.host.call(lambda: attachment(node, data=plugins).detach(record))

    assert (refusal, record.steps, node.leased) == (None, (), [])


class Killed(BaseException):
    """The service died here."""


def test_nothing_is_left_when_the_service_died_at_any_write(node: Node) -> None:
    """Before and after each write of the journal and of the runner's record, in attach and in
    detach: the next start takes all of it back.
    """
    veth(node)
    plugins = [{"type": "host-device", "ipam": node.host_local("10.98.0.0/24")}, {"type": "tuning", "mtu": 1400}]
    died = 0
    for is_detach in (False, True):
        for moment in range(100):
            journal, left = [RecordState()], [moment]

            def die(left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

            def write(state: RecordState, journal: list[RecordState] = journal, die: Callable[[], None] = die) -> None:
                die()
                journal.append(state)
                die()

            def live(
                journal: list[RecordState] = journal, write: Any = write, die: Any = die, is_detach: bool = is_detach
            ) -> bool:
                cni = attachment(node, data=plugins)
                if is_detach:
                    record = DeviceRecord(write=journal.append)
                    assert isinstance(
                        cni.attach({"network": "data"}, sandbox(node), "net1", _NIC, record), AttachedInterface
                    )
                dying_at_writes(cni, die)
                record = DeviceRecord(journal[-1], write)
                try:
                    if is_detach:
                        cni.detach(record)
                    else:
                        cni.attach({"network": "data"}, sandbox(node), "net1", _NIC, record)
                except Killed:
                    return True
                return False

            is_dead = node.host.call(live)
            died += is_dead
            record = DeviceRecord(journal[-1])
            refusal = node.host.call(lambda record=record: attachment(node, data=plugins).detach(record))

            assert (refusal, record.steps, node.leased, node.pod.links) == (None, (), [], ["lo"])
            assert "nic0" in node.host.links
            assert list(node.folder.glob("state/*")) == []
            if not is_dead:
                break
    # Attach: two writes of the journal and two of the runner's record; detach: one for the plugin
    # that is undone and one of the journal; before and after each, and the deletion of the record.
    assert died == 14


def dying_at_writes(cni: CniAttachment, die: Callable[[], None]) -> None:
    """Have a runner's records die before and after each write."""
    records: Any = cni.runner.records

    def dying(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def write(record: Any) -> Any:
            die()
            outcome = method(record)
            die()
            return outcome

        return write

    records.write, records.delete = dying(records.write), dying(records.delete)


@pytest.mark.parametrize(
    ("plugins", "cni", "code"),
    [
        ([{"type": "no-such"}], {"network": "data"}, "cni-plugin-forbidden"),
        ([{"type": "sriov"}], {"network": "data"}, "cni-config-invalid"),
        (
            [{"type": "ib-sriov", "ipam": {"type": "static"}}, {"type": "host-device"}],
            {"network": "data"},
            "cni-config-invalid",
        ),
        ([{"type": "bridge", "ipam": {"type": "dhcp"}}, {"type": "vrf"}], {"network": "other"}, "cni-network-unknown"),
        (
            [{"type": "bridge"}],
            {"conflist": {"cniVersion": "1.0.0", "name": "mine", "plugins": [{"type": "bridge"}]}},
            "cni-chain-forbidden",
        ),
        ([{"type": "bridge"}], {"network": "data", "runtimeConfig": {"portMappings": []}}, "cni-config-invalid"),
        ([{"type": ""}], {"network": "data"}, "cni-config-invalid"),
    ],
)
def test_check_refuses_by_name_when_a_claim_cannot_be_attached(
    node: Node, plugins: list[dict[str, Any]], cni: dict[str, Any], code: str
) -> None:
    """At prepare, before anything is changed."""
    refusal = attachment(node, data=plugins).check(cni, _NIC)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == code
    assert not (node.folder / "state").exists()


def test_check_names_the_binary_when_the_machine_has_it_not(node: Node) -> None:
    """A chain whose plugin is allowed and absent."""
    virtual_function = Device(name="nic-vf", device_class="nic", pci=None, attributes={"interface": "nic0"})

    refusal = attachment(node, data=[{"type": "macvlan", "ipam": {"type": "static"}}, {"type": "vrf"}]).check(
        {"network": "data"}, virtual_function
    )
    missing = CniAttachment(
        CniSettings(networks={"data": str(node.folder / "data.conflist")}, bin_dirs=("/nowhere",))
    ).check({"network": "data"}, virtual_function)

    assert refusal is None
    assert missing is not None
    assert (missing.reasons[0].code, missing.reasons[0].facts["plugin"], missing.reasons[0].facts["looked_in"]) == (
        "cni-plugin-missing",
        "macvlan",
        ("/nowhere",),
    )


def test_networks_that_cannot_be_used_are_named_when_the_service_starts(node: Node) -> None:
    """Each with its reason; a good one is not among them, and nothing is attached."""
    cni = attachment(node, good=[{"type": "macvlan"}], bad=[{"type": ""}], forbidden=[{"type": "firewall"}])
    (node.folder / "bad.conflist").write_text("{")

    faults = cni.check_networks()

    assert {name: refusal.reasons[0].code for name, refusal in faults.items()} == {
        "bad": "cni-config-invalid",
        "forbidden": "cni-plugin-forbidden",
    }


def test_attach_leaves_nothing_when_a_chain_makes_no_interface(node: Node) -> None:
    """A chain that only switches on `lo` hands over nothing: refused, undone, and the record is
    empty.
    """
    record = DeviceRecord()
    cni = attachment(node, data=[{"type": "loopback"}])

    outcome = node.host.call(lambda: cni.attach({"network": "data"}, sandbox(node), "net1", _NIC, record))

    assert isinstance(outcome, Refusal)
    assert (outcome.reasons[0].code, outcome.reasons[0].facts["got"]) == ("cni-interface-missing", ("lo",))
    assert (record.steps, node.pod.links, node.leased) == ((), ["lo"], [])


def test_attach_is_refused_when_the_pod_has_the_host_network(node: Node) -> None:
    """There is nothing to attach to."""
    outcome = attachment(node, data=[{"type": "bridge"}]).attach(
        {"network": "data"}, sandbox(node, network_namespace=""), "net1", _NIC, DeviceRecord()
    )

    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].facts["got"] == "'hostNetwork'"
