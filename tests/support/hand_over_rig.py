"""A host and a pod as two network namespaces with a veth between them and the world, for tests of
hand-overs; and a child process that dies at a chosen moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket as sockets
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import msgspec
from pyroute2 import IPRoute

from support.real_interfaces import ip, network_namespace
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig
from topobus.nic.interfaces.rules.interface_reading import read_interface_config
from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.nic.netlink.hand_over import read_interface
from topobus.nic.netlink.places import Places, open_namespace, with_netlink

__all__ = ["FULL", "TAG", "Rig", "configured", "dies_at", "read_record", "rig"]

TAG = "topobus eth1"
FULL: dict[str, Any] = {
    "interface": {
        "name": "net1",
        "mtu": 1300,
        "mac": "02:00:00:00:00:99",
        "addresses": ["10.0.0.9/24", "fd00::9/64"],
        "duplicateAddressDetection": "off",
    },
    "routes": [
        {"destination": "10.8.0.0/16", "gateway": "10.0.0.1"},
        {"destination": "fd08::/16", "gateway": "fd00::1", "table": 100},
    ],
    "rules": [{"from": "10.0.0.0/24", "table": 100, "priority": 77}, {"to": "fd08::/16", "table": 100, "priority": 78}],
    "neighbours": [{"address": "10.0.0.44", "mac": "02:00:00:00:00:44"}],
    "sysctls": {"net.ipv4.conf.IFNAME.rp_filter": 2, "net.ipv6.conf.IFNAME.accept_ra": 0},
}
"""A configuration with everything that a veth can have."""


def configured(**fields: Any) -> InterfaceConfig:
    """A configuration that is right by itself."""
    config = read_interface_config([{"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **fields}])
    assert isinstance(config, InterfaceConfig), config
    return config


class Rig:
    """Two namespaces; `eth1` on the host is to be handed over, and `far` (10.0.0.1, fd00::1) is its
    other end in a third one.
    """

    def __init__(self, host: str, pod: str, world: str, places: Places | None = None) -> None:
        self.host, self.pod, self.world = host, pod, world
        self.places = places or Places(host_namespace=f"/run/netns/{host}")
        self.namespace = f"/run/netns/{pod}"

    def state(self, name: str = "eth1", namespace: str = "") -> InterfaceState:
        """An interface of the host, or of a namespace."""
        state = read_interface(self.places, name, namespace)
        assert isinstance(state, InterfaceState), state
        return state

    def names(self, namespace: str) -> set[str]:
        """All interfaces of a namespace."""
        return {line.split(":")[1].split("@")[0].strip() for line in ip("-n", namespace, "-o", "link").splitlines()}

    def answers(self, address: str) -> bool:
        """Send an echo request from the pod; whether the answer came within a second."""
        descriptor = open_namespace(self.places, self.namespace)
        assert isinstance(descriptor, int)
        try:
            return with_netlink(self.places, descriptor, lambda _: _echo(address))
        finally:
            os.close(descriptor)


@contextmanager
def rig(*, is_inside: bool = True) -> Iterator[Rig]:
    """Make the namespaces.

    `eth1` has what a careful administrator gave it: four addresses, two routes, an MTU, a queue, an
    alias, a setting.

    Shapes: is_inside — this process enters the host's namespace, as the nic service is in the
    node's; else it stays out, and gets the path of the host's.
    """
    with network_namespace() as host, network_namespace() as pod, network_namespace() as world:
        ip(
            "-n",
            host,
            "link",
            "add",
            "eth1",
            "address",
            "02:00:00:00:00:07",
            "type",
            "veth",
            "peer",
            "name",
            "far",
            "netns",
            world,
        )
        ip("-n", host, "link", "set", "eth1", "up", "mtu", "1400", "txqueuelen", "77", "alias", "storage, rack 7")
        ip("-n", world, "link", "set", "far", "up")
        ip("-n", world, "addr", "add", "10.0.0.1/24", "dev", "far")
        ip("-n", world, "addr", "add", "fd00::1/64", "dev", "far", "nodad")
        ip("-n", host, "addr", "add", "10.0.0.7/24", "dev", "eth1", "brd", "+")
        # A lower one after it: the order is kept.
        ip("-n", host, "addr", "add", "10.0.0.6/24", "dev", "eth1")
        ip("-n", host, "addr", "add", "fd00::8/64", "dev", "eth1", "nodad")
        ip("-n", host, "addr", "add", "fd00::7/64", "dev", "eth1", "nodad")
        ip("-n", host, "route", "add", "10.9.0.0/16", "via", "10.0.0.1", "dev", "eth1", "metric", "7")
        ip("-n", host, "route", "add", "fd09::/16", "via", "fd00::1", "dev", "eth1")
        ip("netns", "exec", host, "sysctl", "-qw", "net.ipv4.conf.eth1.arp_ignore=2")
        if not is_inside:
            yield Rig(host, pod, world)
            return
        with _entered(f"/run/netns/{host}"):
            yield Rig(host, pod, world, Places())


@contextmanager
def _entered(path: str) -> Iterator[None]:
    """Have this process' first thread, whose namespace is the process'
    own, in a network namespace.
    """
    assert threading.current_thread() is threading.main_thread()
    before = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    inside = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(inside)
        yield
    finally:
        _set_namespace(before)
        os.close(inside)
        os.close(before)


def _set_namespace(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    assert library.setns(descriptor, 0x40000000) == 0, os.strerror(ctypes.get_errno())


def dies_at(moment: int, record_file: Path, act: Callable[[DeviceRecord], object]) -> bool:
    """Run `act` in a child process that is killed by SIGKILL at its n-th moment.

    Whether it was killed, or came to its end.

    Shapes: a moment is before and after each write of the record, and after each request that
    changes something. record_file — where the record is kept.
    """
    child = os.fork()
    if child == 0:
        passed = 0
        lock = threading.Lock()

        def pass_moment() -> None:
            nonlocal passed
            with lock:
                passed += 1
                if passed == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        def write(state: RecordState) -> None:
            pass_moment()
            temporary = record_file.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(state))
            temporary.replace(record_file)
            pass_moment()

        written = Path.write_text

        def write_text(path: Path, *arguments: Any, **keywords: Any) -> int:
            size = written(path, *arguments, **keywords)
            pass_moment()
            return size

        status = 1
        try:
            with (
                patch("pyroute2.IPRoute", partial(_CountingSocket, pass_moment)),
                patch.object(Path, "write_text", write_text),
            ):
                act(DeviceRecord(read_record(record_file), write))
            status = 0
        finally:
            # A failure of the test itself is raised in no parent: it is printed, and the status
            # shows it.
            if status:
                traceback.print_exc()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, "the child failed; its traceback is above"
    return os.WIFSIGNALED(status)


def read_record(file: Path) -> RecordState:
    """The content of a record's file, or an empty record without a file."""
    return msgspec.json.decode(file.read_bytes(), type=RecordState) if file.exists() else RecordState()


class _CountingSocket:
    """pyroute2's own socket, with a moment after each request that changes something."""

    def __init__(self, pass_moment: Callable[[], None], **arguments: Any) -> None:
        self._socket, self._pass_moment = IPRoute(**arguments), pass_moment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._socket, name)
        if name not in ("link", "addr", "route", "rule", "neigh", "nlm_request_batch"):
            return act

        def act_and_pass(*arguments: Any, **keywords: Any) -> Any:
            answer = list(act(*arguments, **keywords) or ())
            is_reading = arguments[:1] in (("get",), ("dump",)) or any(
                "RTA_OIF" in str(request) for request in arguments
            )
            if not is_reading:
                self._pass_moment()
            return answer

        return act_and_pass


def _echo(address: str) -> bool:
    """One ICMP echo, by hand: not every machine has ping."""
    body = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 1) + b"topobus!"
    total = sum(struct.unpack(f"!{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    with sockets.socket(sockets.AF_INET, sockets.SOCK_RAW, sockets.IPPROTO_ICMP) as sending:
        sending.settimeout(1)
        sending.sendto(body[:2] + struct.pack("!H", checksum) + body[4:], (address, 0))
        try:
            while True:
                answer, sender = sending.recvfrom(256)
                if sender[0] == address and answer[20] == 0:
                    return True
        except TimeoutError:
            return False
