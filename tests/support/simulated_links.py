"""A host whose interfaces are cards, with pods' namespaces: netlink and sysfs as a real kernel
shows them for hardware, which no test machine has.

It does what was seen on Linux 6.12 with igb and igbvf. The permanent address of a virtual function
changes with each reset of it (its hardware address or MTU is changed, it is moved, the physical
function gives it an address), and after the latter it takes no address before it was up and down.
Hardware of a namespace that ends comes to the host under the pod's name. When a card leaves the bus
its interfaces end wherever they are, and a device that comes back has another folder in sysfs.
Addresses and routes are not simulated: those of real namespaces are tested in
tests/integration/nic.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from support.sysfs_trees import write
from support.vf_kernel import VfKernel
from topobus.nic.interfaces.rules.interface_config import VfFields
from topobus.nic.netlink.places import Places
from topobus.values.outcome import Reason, Refusal

__all__ = ["POD", "SimulatedHost", "add_card", "simulated_host"]

T = TypeVar("T")
POD = "/run/netns/pod"
_HOST = ""
_MODULES = ("hand_over", "take_back", "vf_settings", "shares")


class SimulatedHost:
    """One machine; `""` is the host's namespace."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = Places(proc=str(root / "proc"), sys=str(root / "sys"))
        self.namespaces: dict[str, dict[int, dict[str, Any]]] = {_HOST: {}, POD: {}}
        self.functions = VfKernel({})
        """The settings of virtual functions; they are those of `ens1`."""
        self._indices, self._addresses, self._boots = count(2), count(1), count(1)
        self._descriptors: dict[int, str] = {}
        write(root, {"sys/bus/pci/devices/.keep": ""})
        self.reboot()

    # What happens to a machine.

    def add(
        self,
        name: str,
        *,
        pci: str = "",
        physical: str = "",
        permanent: str = "",
        kind: str = "",
        link: int = 0,
        dev_port: int = 0,
        port: str | None = None,
        namespace: str = _HOST,
        **fields: Any,
    ) -> dict[str, Any]:
        """Add an interface, with its device's folder."""
        if pci:
            folder = self.root / "sys/bus/pci/devices" / pci
            (folder / "net" / name).mkdir(parents=True, exist_ok=True)
            if physical and not (folder / "physfn").is_symlink():
                (folder / "physfn").symlink_to(f"../{physical}")
            write(self.root, {f"sys/class/net/{name}/dev_port": dev_port})
        made = {
            "index": next(self._indices),
            "ifname": name,
            "address": permanent or f"02:00:00:00:00:{next(self._addresses):02x}",
            "perm_address": self._new_address() if physical else permanent or None,
            "mtu": 1500,
            "max_mtu": 9216,
            "flags": 0,
            "awaits_reset": False,
            "txqlen": 1000,
            "ifalias": "",
            "header": {"flags": 0},
            "linkinfo": {"attrs": [("IFLA_INFO_KIND", kind)]} if kind else None,
            "link": link or None,
            "parent_dev_bus_name": "pci" if pci else None,
            "parent_dev_name": pci or None,
            "phys_port_name": port,
            "alternative": set[str](),
            "is_function": bool(physical),
            **fields,
        }
        self.namespaces[namespace][made["index"]] = made
        return made

    def remove(self, pci: str) -> None:
        """Take a device off its bus."""
        for links in self.namespaces.values():
            for index in [index for index, link in links.items() if link["parent_dev_name"] == pci]:
                del links[index]
        # The folder is kept out of sight: a file system gives an inode that is free
        # to the next one, sysfs does not.
        folder = self.root / "sys/bus/pci/devices" / pci
        (self.root / "gone").mkdir(exist_ok=True)
        folder.rename(self.root / "gone" / f"{pci}-{next(self._addresses)}")

    def unbind(self, pci: str) -> None:
        """Take a device's driver away."""
        for links in self.namespaces.values():
            for index in [index for index, link in links.items() if link["parent_dev_name"] == pci]:
                del links[index]
        for name in (folder := self.root / "sys/bus/pci/devices" / pci / "net").iterdir():
            name.rmdir()
        folder.rmdir()

    def end_pod(self, *, is_finished: bool = True) -> None:
        """End the pod's namespace: hardware comes to the host under the pod's name, in a moment
        where it is not finished; virtual interfaces end.
        """
        links = self.namespaces.pop(POD)
        if is_finished:
            self.namespaces[_HOST] |= {index: link for index, link in links.items() if link["parent_dev_name"]}

    def reboot(self) -> None:
        """Start again: another boot id, no pods, and indices from the start.

        What is on the bus comes by `add`.
        """
        self.namespaces = {_HOST: {}, POD: {}}
        self._indices = count(2)
        (self.root / "sys/bus").rename(self.root / f"bus-{next(self._addresses)}")
        write(
            self.root,
            {"sys/bus/pci/devices/.keep": "", "proc/sys/kernel/random/boot_id": f"boot-{next(self._boots)}\n"},
        )

    def link(self, name: str, namespace: str = _HOST) -> dict[str, Any] | None:
        """An interface by its name."""
        return next((link for link in self.namespaces[namespace].values() if link["ifname"] == name), None)

    # What the code under test asks.

    def reset(self, link: dict[str, Any]) -> None:
        """Reset a virtual function, as its driver does for many changes."""
        if link["is_function"]:
            link["perm_address"] = self._new_address()

    def with_netlink(self, _places: Places, namespace: int | None, work: Callable[[Any], T]) -> T:
        """Stand for `places.with_netlink`."""
        return work(_Socket(self, _HOST if namespace is None else self._descriptors[namespace]))

    def open_namespace(self, _places: Places, path: str) -> int | Refusal:
        """Stand for `places.open_namespace`."""
        if path not in self.namespaces:
            return Refusal(reasons=(Reason(code="namespace-gone", message=path),))
        return self._open(path)

    def open_host(self, _places: Places) -> int:
        """Stand for `places.open_host`."""
        return self._open(_HOST)

    def of_descriptor(self, descriptor: int) -> str:
        """The namespace that a descriptor is of."""
        return self._descriptors[descriptor]

    def _open(self, namespace: str) -> int:
        # A real one, for the caller closes it.
        descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[descriptor] = namespace
        return descriptor

    def _new_address(self) -> str:
        return f"06:00:00:00:00:{next(self._addresses):02x}"


class _Link(dict[str, Any]):
    """A link as pyroute2 gives it."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "prop_list":
            return {"attrs": [("IFLA_ALT_IFNAME", name) for name in sorted(self["alternative"])]}
        return super().get(key, default)


class _Socket:
    """Netlink in one namespace."""

    def __init__(self, host: SimulatedHost, namespace: str) -> None:
        self._host, self._namespace = host, namespace
        self._links = host.namespaces[namespace]

    def get_links(self) -> list[Any]:
        return [_Link(link) for link in self._links.values()]

    def get_addr(self, **_: Any) -> list[Any]:
        return []

    def addr(self, *_: Any, **__: Any) -> None: ...

    def link(
        self, verb: str, *, index: int = 0, ifname: str = "", altname: Any = (), ext_mask: int = 0, **wanted: Any
    ) -> list[Any]:
        if verb == "get":
            links = [
                each
                for each in self._links.values()
                if (each["index"] == index if index else ifname in self._names(each))
            ]
            if not links:
                raise NetlinkError(errno.ENODEV, "No such device")
            if ext_mask and self._host.functions.states and links[0]["ifname"] == "ens1":
                return list(self._host.functions.link("get"))
            return [_Link(each) for each in links]
        link = self._links.get(index)
        if link is None:
            # Of `lo`, which is everywhere.
            return []
        if verb == "property_add":
            link["alternative"] |= set(altname)
        elif verb == "property_del":
            link["alternative"] -= set(altname)
        elif verb == "set":
            self._set(link, ifname=ifname, **wanted)
        return []

    def _set(
        self, link: dict[str, Any], *, ifname: str, net_ns_fd: int | None = None, state: str = "", **fields: Any
    ) -> None:
        if "address" in fields and link["awaits_reset"]:
            raise NetlinkError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        if state == "down" and link["flags"]:
            link["awaits_reset"] = False
        if {"mtu", "address"} & fields.keys() or net_ns_fd is not None:
            self._host.reset(link)
        link |= fields
        if state:
            link["flags"] = int(state == "up")
        if net_ns_fd is not None:
            target = self._host.namespaces[self._host.of_descriptor(net_ns_fd)]
            if any(({ifname} | link["alternative"]) & self._names(other) for other in target.values()):
                raise NetlinkError(errno.EEXIST, "File exists")
            del self._links[link["index"]]
            target[link["index"]] = link
            link["flags"] = 0
        if ifname:
            link["ifname"] = ifname

    def nlm_request_batch(self, messages: list[Any]) -> list[Any]:
        """Routes, of which there are none, and settings of virtual functions."""
        if isinstance(messages[0], rtmsg):
            return []
        before = {index: state.mac for index, state in self._host.functions.states.items()}
        self._host.functions.nlm_request_batch(messages)
        if before != {index: state.mac for index, state in self._host.functions.states.items()}:
            for links in self._host.namespaces.values():
                for link in links.values():
                    self._host.reset(link)
                    link["awaits_reset"] = link["is_function"]
        return []

    @staticmethod
    def _names(link: dict[str, Any]) -> set[str]:
        return {link["ifname"]} | link["alternative"]


@contextmanager
def simulated_host(root: Path) -> Iterator[SimulatedHost]:
    """Have hand-overs work on a simulated machine: `ens1` (0000:21:00.0) with a virtual function
    `ens1v0`, and `ens2` (0000:63:00.0).
    """
    host = SimulatedHost(root)
    add_card(host)
    with ExitStack() as stack:
        for module in _MODULES:
            for name in ("with_netlink", "open_namespace", "open_host"):
                target = f"topobus.nic.netlink.{module}"
                stack.enter_context(patch(f"{target}.{name}", getattr(host, name), create=True))
        yield host


def add_card(host: SimulatedHost, *, permanent: str = "52:54:00:00:01:00") -> None:
    """Put the card with the virtual function in, and the other one."""
    physical = host.add("ens1", pci="0000:21:00.0", permanent=permanent)
    host.add("ens1v0", pci="0000:21:10.0", physical="0000:21:00.0")
    host.add("ens2", pci="0000:63:00.0", permanent="52:54:00:00:03:00")
    host.functions.states = {
        0: VfFields(
            mac="00:00:00:00:00:00",
            vlan=0,
            qos=0,
            vlan_protocol="802.1Q",
            link_state="auto",
            spoof_check=True,
            trust=False,
            min_tx_rate=0,
            max_tx_rate=0,
        )
    }
    host.functions.index = physical["index"]
