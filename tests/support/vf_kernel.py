"""A physical function that reads and answers requests about its virtual ones in the kernel's own
bytes, and refuses single settings as drivers do.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from topobus.nic.interfaces.rules.interface_config import VfFields
from topobus.nic.netlink.requests import attribute, link_body

__all__ = ["VfKernel", "vf_info"]


def vf_info(index: int, state: VfFields) -> bytes:
    """One IFLA_VF_INFO as rtnl_fill_vfinfo writes it."""
    protocol = {"802.1Q": 0x8100, "802.1ad": 0x88A8}[state.vlan_protocol or "802.1Q"]
    mac = bytes.fromhex((state.mac or "").replace(":", ""))
    link_state = {"auto": 0, "enable": 1, "disable": 2}[state.link_state or "auto"]
    numbers = (state.vlan or 0, state.qos or 0)
    # The kernel writes all ones where a driver does not show the flag.
    flags = [0xFFFFFFFF if flag is None else int(flag) for flag in (state.spoof_check, state.trust)]
    parts = [
        attribute(1, struct.pack("=I32s", index, mac)),
        attribute(13, bytes(32)),
        attribute(2, struct.pack("=III", index, *numbers)),
        attribute(6, struct.pack("=III", index, state.min_tx_rate or 0, state.max_tx_rate or 0)),
        attribute(3, struct.pack("=II", index, state.max_tx_rate or 0)),
        attribute(4, struct.pack("=II", index, flags[0])),
        attribute(5, struct.pack("=II", index, link_state)),
        attribute(7, struct.pack("=II", index, 0)),
        attribute(9, struct.pack("=II", index, flags[1])),
        attribute(12, attribute(1, struct.pack("=III", index, *numbers) + struct.pack("!Hxx", protocol))),
    ]
    return attribute(1, b"".join(parts))


class VfKernel:
    """Takes the place of the socket: a physical function `ens1` with virtual ones.

    It reads and answers in the kernel's own bytes, and keeps what it is sent.
    """

    def __init__(self, states: dict[int, VfFields], refused: str = "", error: int = errno.EOPNOTSUPP) -> None:
        self.states, self.refused, self.error = states, refused, error
        """Which field the driver refuses (`trust`), and how."""
        self.index = 5
        self.requests: list[bytes] = []

    def link(self, verb: str, *, index: int = 0, ifname: str = "ens1", **_: object) -> list[Any]:
        """The answer to RTM_GETLINK, decoded by pyroute2."""
        assert verb == "get"
        if (index or self.index, ifname) != (self.index, "ens1"):
            raise NetlinkError(19, "No such device")
        functions = b"".join(vf_info(index, state) for index, state in sorted(self.states.items()))
        body = link_body(self.index, attribute(3, b"ens1\0") + attribute(22, functions))
        message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body)
        message.decode()
        return [message]

    def nlm_request_batch(self, messages: list[Any]) -> None:
        """Take RTM_SETLINK requests as do_setvfinfo does."""
        for message in messages:
            message.encode()
            self.requests.append(bytes(message.data))
            assert message.data[4:6] == struct.pack("=H", 19)
            assert struct.unpack_from("=i", message.data, 20) == (self.index,)
            # Header, ifinfomsg, IFLA_VFINFO_LIST, IFLA_VF_INFO; then the one setting.
            size, kind = struct.unpack_from("=HH", message.data, 40)
            payload = bytes(message.data[44 : 40 + size])
            if kind == 12:
                # A list with one entry, and the kernel wants its whole struct.
                assert struct.unpack_from("=HH", payload) == (4 + 16, 1)
                payload = payload[4:]
            self._set(kind, struct.unpack_from("=I", payload)[0], payload[4:])

    def _set(self, kind: int, index: int, payload: bytes) -> None:
        numbers = struct.unpack(f"={len(payload) // 4}I", payload[: len(payload) // 4 * 4])
        fields: dict[int, Callable[[], dict[str, Any]]] = {
            1: lambda: {"mac": payload[:6].hex(":")},
            2: lambda: {"vlan": numbers[0], "qos": numbers[1], "vlan_protocol": "802.1Q"},
            4: lambda: {"spoof_check": bool(numbers[0])},
            5: lambda: {"link_state": ("auto", "enable", "disable")[numbers[0]]},
            6: lambda: {"min_tx_rate": numbers[0], "max_tx_rate": numbers[1]},
            9: lambda: {"trust": bool(numbers[0])},
            12: lambda: {
                "vlan": numbers[0],
                "qos": numbers[1],
                "vlan_protocol": {0x8100: "802.1Q", 0x88A8: "802.1ad"}[struct.unpack_from("!H", payload, 8)[0]],
            },
        }
        changed = fields[kind]()
        if self.refused in changed:
            raise NetlinkError(self.error, os.strerror(self.error))
        self.states[index] = VfFields(
            **{**{name: getattr(self.states[index], name) for name in VfFields.__struct_fields__}, **changed}
        )
