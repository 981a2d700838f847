"""The objects of the demo's last step: a pair of virtual interfaces of this machine, and processes
in place of containers. All of them are removed at the end.

The addresses are of TEST-NET-2 (RFC 5737): no network of this machine has them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from msgspec import Struct

__all__ = [
    "POD_ADDRESS",
    "Interface",
    "echo_through",
    "make_pair",
    "pod_process",
    "read_interface",
    "remove_pair",
    "why_not",
]

_HOST_ADDRESS, POD_ADDRESS, _PREFIX = "198.51.100.1", "198.51.100.2", 30
_PEER = "tbpeer"
_PORT = 7007
# Returns what it receives, in a network namespace of its own, which cannot be reached before an
# interface is moved into it.
_ECHO = f"""
import socket
server = socket.create_server(("0.0.0.0", {_PORT}))
while True:
    client, _ = server.accept()
    client.sendall(client.recv(100))
    client.close()
"""
# The kernel's view, as JSON.
_READ = """
import json, sys
from pyroute2 import IPRoute
with IPRoute() as socket:
    for link in socket.get_links():
        if link.get_attr("IFLA_IFNAME") == sys.argv[1]:
            addresses = [f"{address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}" for address in socket.get_addr(index=link["index"], family=2)]
            print(json.dumps({"name": sys.argv[1], "mac": link.get_attr("IFLA_ADDRESS"), "mtu": link.get_attr("IFLA_MTU"), "addresses": addresses}))
            break
    else:
        print("null")
"""  # noqa: E501


class Interface(Struct, frozen=True, kw_only=True):
    """An interface in the kernel."""

    name: str
    mac: str
    mtu: int
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((self.name, f"MTU {self.mtu}", self.mac, *self.addresses))


def why_not() -> str:
    """Return why no interface can be moved and no process pinned here. Empty when both can."""
    if sys.platform != "linux":
        return f"it takes Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "moving an interface takes root; `sudo` shows it"
    if len(os.sched_getaffinity(0)) < 2:
        return "this machine has one CPU: none can be taken from others"
    for program in ("unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"the program `{program}` (util-linux) is not installed"
    try:
        import pyroute2  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        return "pyroute2 is not installed: pip install '.[nic]' from the checkout"
    try:
        remove_pair(make_pair())
    except OSError as err:
        return f"this kernel makes no pair of virtual interfaces: {err.strerror or err}"
    process = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return "this process may make no network namespace" if process.returncode else ""


def make_pair() -> Interface:
    """Make a pair of virtual interfaces, and return the end that may be offered.

    The other one stays on the host, with an address.

    Errors: raises OSError when the kernel has none.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    tag = secrets.token_hex(2)
    name, peer = f"tbdemo{tag}", f"{_PEER}{tag}"
    with IPRoute() as socket:
        try:
            socket.link("add", ifname=name, kind="veth", peer={"ifname": peer})
            socket.addr(
                "add", index=next(iter(socket.link_lookup(ifname=peer))), address=_HOST_ADDRESS, prefixlen=_PREFIX
            )
            for end in (peer, name):
                socket.link("set", index=next(iter(socket.link_lookup(ifname=end))), state="up")
        except NetlinkError as err:
            raise OSError(err.code, str(err.args[1])) from err
    interface = read_interface(name)
    if interface is None:
        raise OSError(f"{name} was made and is not there")
    return interface


def remove_pair(interface: Interface) -> None:
    """Remove both ends, wherever the other one is. An end that is gone is no error."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as socket, suppress(NetlinkError):
        for index in socket.link_lookup(ifname=interface.name.replace("tbdemo", _PEER)):
            socket.link("del", index=index)


def read_interface(name: str, pid: int | None = None) -> Interface | None:
    """Read an interface of the host, or of a process's network namespace.

    None when there is none of that name. It is read in a process of its own: a thread that enters a
    namespace stays in it, and pyroute2 runs an event loop, of which a thread has one.
    """
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid is not None else []
    done = subprocess.run([*inside, sys.executable, "-c", _READ, name], capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Interface | None)


@contextmanager
def pod_process() -> Iterator[int]:
    """Run a process in a network namespace of its own for a block, and yield its pid.

    It answers at its port.
    """
    process = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-c", _ECHO], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def echo_through(address: str, text: str) -> str:
    """Send a text to the process at an address, and return its answer.

    Errors: raises OSError when it cannot be reached.
    """
    import socket

    with socket.create_connection((address, _PORT), timeout=5) as client:
        client.sendall(text.encode())
        return client.recv(100).decode()
