"""Chains of Debian's own CNI plugins in real namespaces: what the pod has after ADD, and what is
left after DEL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.nic.conftest import Node
from topobus.nic.cni.rules.messages import CniResult
from topobus.values.outcome import Refusal

pytestmark = pytest.mark.integration

ALL_VERSIONS = pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0"])


def bridge(node: Node, **keys: Any) -> dict[str, Any]:
    """A bridge with addresses of host-local."""
    return {"type": "bridge", "bridge": "tb0", "isGateway": True, "ipMasq": False, "ipam": node.host_local(), **keys}


def veth(node: Node, name: str = "nic0") -> None:
    """A NIC of the host: one end of a pair, the other is its network."""
    node.host.ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-lan")
    node.host.ip("link", "set", name, "up")
    node.host.ip("link", "set", f"{name}-lan", "up")


def test_lo_is_up_when_the_loopback_plugin_ran(node: Node) -> None:
    """In a sandbox whose `lo` is down."""
    node.pod.ip("link", "set", "lo", "down")

    node.add(node.chain({"type": "loopback"}), node.target("lo"))

    lo = node.pod.link("lo")
    assert lo is not None
    assert "UP" in lo["flags"]


@ALL_VERSIONS
def test_pod_reaches_the_bridge_when_it_is_attached(node: Node, version: str) -> None:
    """ADD, packets, DEL twice.

    Nothing is left, in every version that the plugins speak.
    """
    result = node.add(node.chain(bridge(node), version=version))

    assert [address.address for address in result.addresses] == node.pod.addresses("net1") == ["10.99.0.2/24"]
    assert "1 received" in node.pod.run(node.bundle.busybox, "ping", "-c", "1", "-W", "5", "10.99.0.1").replace(
        "packets ", ""
    )
    assert [node.delete(), node.delete()] == [None, None]
    assert (node.pod.links, node.host.links, node.leased) == (["lo"], ["lo", "tb0"], [])


def test_addresses_are_released_when_the_sandbox_is_gone(node: Node) -> None:
    """DEL without a namespace, after the pod died with it."""
    lost = node.namespace("lost")
    node.add(node.chain(bridge(node)), node.target(network_namespace=lost.path))
    leased = node.leased
    # As the runtime does when the pod ends: the mount goes, and with it the
    # last that holds the namespace.
    subprocess.run(["umount", lost.path], check=True)

    outcome = node.delete()

    assert outcome is None
    assert (leased, node.leased) == (["10.99.0.2"], [])


def test_pod_has_the_addresses_of_the_list_when_ipam_is_static(node: Node) -> None:
    """Both families, and a route."""
    veth(node)
    addresses = [{"address": "10.98.0.7/24", "gateway": "10.98.0.1"}, {"address": "fd00:98::7/64"}]
    ipam = {"type": "static", "addresses": addresses, "routes": [{"dst": "10.200.0.0/16", "gw": "10.98.0.1"}]}

    node.add(node.chain({"type": "macvlan", "master": "nic0", "mode": "bridge", "ipam": ipam}))

    assert node.pod.addresses("net1") == ["10.98.0.7/24", "fd00:98::7/64"]
    assert [route["gateway"] for route in node.pod.json("route", "show", "10.200.0.0/16")] == ["10.98.0.1"]
    link = node.pod.link("net1")
    assert link is not None
    assert link["linkinfo"]["info_kind"] == "macvlan"
    assert (node.delete(), node.pod.links) == (None, ["lo"])


def test_host_device_moves_in_and_back_when_it_is_attached(node: Node) -> None:
    """The interface is renamed on its way in and has its name again on the host.

    DEL again, and DEL after the interface went, are well.
    """
    veth(node)
    ipam = {"type": "static", "addresses": [{"address": "10.98.0.7/24"}]}
    chain = node.chain({"type": "host-device", "device": "nic0", "ipam": ipam})

    result = node.add(chain)

    assert (node.pod.links, node.host.links) == (["lo", "net1"], ["lo", "nic0-lan"])
    assert [(interface.name, interface.sandbox) for interface in result.interfaces] == [("net1", node.pod.path)]
    assert (node.delete(), node.delete()) == (None, None)
    assert (node.pod.links, node.host.links) == (["lo"], ["lo", "nic0", "nic0-lan"])


def test_delete_is_well_when_somebody_moved_the_interface_back_before(node: Node) -> None:
    """The DEL of host-device itself fails then.

    Here it counts as done, for the interface is not in the sandbox.
    """
    veth(node)
    node.add(node.chain({"type": "host-device", "device": "nic0", "ipam": node.host_local("10.98.0.0/24")}))
    node.pod.ip("link", "set", "net1", "netns", node.host.name)

    outcome = node.delete()

    assert (outcome, node.leased) == (None, [])


def test_address_of_host_device_is_released_when_the_sandbox_is_gone(node: Node) -> None:
    """host-device itself does nothing then, and the address would stay taken for ever."""
    veth(node)
    lost = node.namespace("lost")
    chain = node.chain({"type": "host-device", "device": "nic0", "ipam": node.host_local("10.98.0.0/24")})
    node.add(chain, node.target(network_namespace=lost.path))
    leased = node.leased
    subprocess.run(["umount", lost.path], check=True)

    outcome = node.delete()

    assert (leased, outcome, node.leased) == (["10.98.0.2"], None, [])


def test_pod_has_sysctl_mac_and_mtu_when_tuning_is_chained(node: Node) -> None:
    """Values of the list, and a hardware address by capability."""
    tuning = {
        "type": "tuning",
        "capabilities": {"mac": True},
        "mtu": 1400,
        "sysctl": {"net.ipv4.conf.net1.rp_filter": "2"},
    }
    chain = node.chain(bridge(node), tuning)

    result = node.add(chain, node.target(runtime_values={"mac": "02:00:00:00:98:01"}))

    link = node.pod.link("net1")
    assert link is not None
    assert (link["address"], link["mtu"]) == ("02:00:00:00:98:01", 1400)
    assert result.interfaces[-1].mac == "02:00:00:00:98:01"
    assert node.pod.run("cat", "/proc/sys/net/ipv4/conf/net1/rp_filter").strip() == "2"
    assert (node.delete(), node.pod.links) == (None, ["lo"])


def test_pod_routes_by_source_when_sbr_is_chained(node: Node) -> None:
    """A rule and a table of its own for the interface's address."""
    veth(node)
    ipam = {
        "type": "static",
        "addresses": [{"address": "10.98.0.7/24", "gateway": "10.98.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    chain = node.chain({"type": "host-device", "device": "nic0", "ipam": ipam}, {"type": "sbr"})

    node.add(chain)

    rules = [rule for rule in node.pod.json("rule", "show") if rule["src"] == "10.98.0.7"]
    assert len(rules) == 1
    assert [route["gateway"] for route in node.pod.json("route", "show", "table", rules[0]["table"], "default")] == [
        "10.98.0.1"
    ]
    assert (node.delete(), node.pod.links) == (None, ["lo"])


def test_kernel_has_the_rates_when_bandwidth_is_chained(node: Node) -> None:
    """A token bucket for each direction: to the pod on the host's end, from it on an ifb.

    Both go with DEL.
    """
    chain = node.chain(bridge(node), {"type": "bandwidth", "capabilities": {"bandwidth": True}})
    rates = {"ingressRate": 10_000_000, "ingressBurst": 500_000, "egressRate": 20_000_000, "egressBurst": 1_000_000}

    node.add(chain, node.target(runtime_values={"bandwidth": rates}))

    listed: list[dict[str, Any]] = json.loads(node.host.run("tc", "-json", "qdisc", "show"))
    buckets = {entry["dev"]: entry["options"]["rate"] * 8 for entry in listed if entry["kind"] == "tbf"}
    assert {
        (
            "ifb" if node.host.json("-details", "link", "show", name)[0]["linkinfo"]["info_kind"] == "ifb" else "veth"
        ): rate
        for name, rate in buckets.items()
    } == {
        "veth": 10_000_000,
        "ifb": 20_000_000,
    }
    assert (node.delete(), node.host.links) == (None, ["lo", "tb0"])


def test_pod_has_an_address_when_a_dhcp_server_gives_one(node: Node) -> None:
    """By the bundle's own daemon from a real server.

    DEL gives the lease back, and without the daemon the plugin's error is told.
    """
    veth(node)
    lan = node.namespace("lan")
    node.host.ip("link", "set", "nic0-lan", "netns", lan.name)
    lan.ip("addr", "add", "10.97.0.1/24", "dev", "nic0-lan")
    lan.ip("link", "set", "nic0-lan", "up")
    leases = node.folder / "udhcpd.leases"
    leases.touch()
    configuration = (
        f"start 10.97.0.50\nend 10.97.0.50\ninterface nic0-lan\nlease_file {leases}\npidfile "
        f"{node.folder}/udhcpd.pid\nopt subnet 255.255.255.0\nopt router 10.97.0.1\nopt lease 600\n"
    )
    (node.folder / "udhcpd.conf").write_text(configuration)
    socket = node.folder / "dhcp.sock"
    chain = node.chain({"type": "macvlan", "master": "nic0", "ipam": {"type": "dhcp", "daemonSocketPath": str(socket)}})
    without_daemon = node.host.call(lambda: node.runner.add(chain, node.target()))
    server = lan.start(node.bundle.busybox, "udhcpd", "-f", "-I", "10.97.0.1", str(node.folder / "udhcpd.conf"))
    daemon = node.host.start(
        f"{node.bundle.bin_dir}/dhcp", "daemon", "-socketpath", str(socket), "-pidfile", str(node.folder / "dhcp.pid")
    )
    try:
        while not socket.exists():
            assert daemon.poll() is None
            os.sched_yield()
        result = node.add(chain)
        address = node.pod.addresses("net1")
        deleted = node.delete()
    finally:
        for process in (daemon, server):
            process.terminate()
            process.wait()

    assert isinstance(without_daemon, Refusal)
    assert without_daemon.reasons[0].code == "cni-plugin-failed"
    assert [entry.address for entry in result.addresses] == address == ["10.97.0.50/24"]
    assert (deleted, node.pod.links) == (None, ["lo"])


_CHILD = """
import json, sys
from pathlib import Path
from topobus.nic.cni.rules.chain import parse_chain
from topobus.nic.cni.rules.messages import Target
from topobus.nic.cni.records import AttachmentRecords
from topobus.nic.cni.runner import CniRunner, RunnerSettings
settings, records, document, target, verb = json.load(sys.stdin)
runner = CniRunner(RunnerSettings(**settings), AttachmentRecords(Path(records)))
chain = parse_chain(document, "data.conflist")
if verb == "add":
    runner.add(chain, Target(**target))
else:
    runner.delete(chain.name, target["container_id"], target["interface"])
"""
_KILLER = """#!/bin/sh
if [ "$CNI_COMMAND" = VERSION ]; then
  echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}'
elif [ "$CNI_COMMAND" = "$(cat %(folder)s/kill-at)" ]; then
  kill -9 $PPID
else
  %(pass)s
fi
"""


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_nothing_is_left_when_the_service_was_killed_at_any_plugin(node: Node, command: str, tmp_path: Path) -> None:
    """SIGKILL before, between and after the plugins of a chain, in ADD and in DEL: the next start's
    DEL takes all of it back.
    """
    plugins: list[dict[str, Any]] = [
        bridge(node),
        {"type": "tuning", "mtu": 1400},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    killers = tmp_path / "killers"
    killers.mkdir()
    # The killer hands the result before it on; it has no JSON reader, so python is its eyes.
    hand_on = f"""{sys.executable} -c 'import json, sys; print(json.dumps(json.load(sys.stdin).get("prevResult") or {{"cniVersion": "1.0.0"}}))'"""  # noqa: E501
    (killers / "killer").write_text(
        _KILLER % {"folder": killers, "pass": f"[ $CNI_COMMAND = ADD ] && {hand_on} || true"}
    )
    (killers / "killer").chmod(0o755)
    settings = {"bin_dirs": [node.bundle.bin_dir, str(killers)], "program_path": node.bundle.program_path}
    killed = 0

    for position in range(len(plugins) + 1):
        chain = [*plugins[:position], {"type": "killer"}, *plugins[position:]]
        document = {"cniVersion": "1.0.0", "name": "data", "plugins": chain}
        target = {
            "container_id": node.pod.name,
            "interface": "net1",
            "network_namespace": node.pod.path,
            "runtime_values": {"portMappings": [{"hostPort": 18080, "containerPort": 80, "protocol": "tcp"}]},
        }
        for verb in ("add", "delete") if command == "DEL" else ("add",):
            (killers / "kill-at").write_text(command)
            order = json.dumps([settings, str(node.folder / "records"), document, target, verb])
            child = node.host.call(
                lambda order=order: subprocess.run([sys.executable, "-c", _CHILD], input=order, text=True, check=False)
            )
            killed += child.returncode == -signal.SIGKILL
        (killers / "kill-at").write_text("nothing")

        runner = node.runner
        runner._settings = type(runner._settings)(
            bin_dirs=tuple(settings["bin_dirs"]), program_path=node.bundle.program_path
        )
        outcome = node.host.call(lambda runner=runner: runner.delete("data", node.pod.name, "net1"))

        rules = node.host.run("env", f"PATH={node.bundle.program_path}", "iptables-save", "-t", "nat")
        assert (outcome, node.pod.links, node.host.links, node.leased) == (
            None,
            ["lo"],
            [name for name in ("lo", "tb0") if name in node.host.links],
            [],
        )
        assert "18080" not in rules
        assert list((node.folder / "records").iterdir()) == []
    assert killed == len(plugins) + 1


def test_result_is_of_the_chain_when_a_second_network_is_attached(node: Node) -> None:
    """Two networks in one sandbox, each with its own interface and record.

    One goes, the other stays.
    """
    veth(node)
    node.add(node.chain(bridge(node)))
    second = node.add(
        node.chain(
            {
                "type": "macvlan",
                "master": "nic0",
                "ipam": {"type": "static", "addresses": [{"address": "10.98.0.7/24"}]},
            },
            name="other",
        ),
        node.target("net2"),
    )

    assert isinstance(second, CniResult)
    assert node.pod.links == ["lo", "net1", "net2"]
    assert node.delete("net1") is None
    assert node.pod.links == ["lo", "net2"]
