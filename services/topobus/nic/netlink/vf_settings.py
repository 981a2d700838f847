"""Sets a virtual function's settings on its physical function by netlink, and restores them
exactly.

Each setting has its own request, so that a driver's refusal names it.
Source: include/uapi/linux/if_link.h (IFLA_VF_*), net/core/rtnetlink.c do_setvfinfo.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.formats.first_read import ready
from topobus.nic.interfaces.rules.interface_config import VfFields
from topobus.nic.interfaces.rules.interface_state import InterfaceState, state_from_journal, state_to_journal
from topobus.nic.netlink.identity import present_of
from topobus.nic.netlink.places import Places, missing_package, with_netlink
from topobus.nic.netlink.reading import bus_device_of, get_link, list_links, port_name
from topobus.nic.netlink.requests import attribute, link_body, set_link
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason, Refusal, refuse

__all__ = ["VfPlace", "configure_vf", "read_vf", "restore_vf", "vf_message", "vf_requests"]

# linux/if_link.h
_IFLA_VFINFO_LIST, _IFLA_VF_INFO = 22, 1
_IFLA_VF_MAC, _IFLA_VF_VLAN, _IFLA_VF_SPOOFCHK, _IFLA_VF_LINK_STATE, _IFLA_VF_RATE = 1, 2, 4, 5, 6
_IFLA_VF_TRUST, _IFLA_VF_VLAN_LIST, _IFLA_VF_VLAN_INFO = 9, 12, 1
# linux/if_ether.h
_PROTOCOLS = {"802.1Q": 0x8100, "802.1ad": 0x88A8}
_LINK_STATES = {"auto": 0, "enable": 1, "disable": 2}
# linux/rtnetlink.h: without it a link comes without its virtual functions.
_RTEXT_FILTER_VF = 1
# A driver's errors for what it can never do: not known, no such value, no such protocol. After
# others (busy, link down) it may succeed the next time.
_FINAL = frozenset(
    {errno.EOPNOTSUPP, errno.EINVAL, errno.EPROTONOSUPPORT, errno.ENOSYS, errno.ERANGE, errno.EADDRNOTAVAIL}
)
_FIELDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "vlan": (("vlan", "vlan"), ("qos", "qos"), ("vlan_protocol", "vlanProtocol")),
    "maxTxRate": (("min_tx_rate", "minTxRate"), ("max_tx_rate", "maxTxRate")),
}
"""Of the requests that set several things at once: our names and the claim's."""


class VfPlace(Struct, frozen=True, kw_only=True):
    """Which virtual function of which physical one."""

    physical: str
    """Name of the physical function's interface on the host."""
    index: int


def vf_requests(index: int, wanted: VfFields, before: VfFields) -> tuple[tuple[str, bytes], ...]:
    """Build each request that leads from `before` to `wanted`: its name, and an attribute of
    IFLA_VF_INFO.

    A field that is None in `wanted` is left as it is. A VLAN is set with its priority and protocol,
    and the least rate with the largest, because the kernel sets each group as a whole. The protocol
    802.1Q is sent as IFLA_VF_VLAN, the only form that some drivers know, and another one as
    IFLA_VF_VLAN_LIST.
    """
    requests: list[tuple[str, bytes]] = []
    if wanted.mac is not None:
        # The address takes 32 bytes (MAX_ADDR_LEN), whatever the network.
        requests.append(
            ("mac", attribute(_IFLA_VF_MAC, struct.pack("=I32s", index, bytes.fromhex(wanted.mac.replace(":", "")))))
        )
    if wanted.vlan is not None or wanted.qos is not None or wanted.vlan_protocol is not None:
        requests.append(("vlan", _vlan_request(index, wanted, before)))
    if wanted.min_tx_rate is not None or wanted.max_tx_rate is not None:
        least = wanted.min_tx_rate if wanted.min_tx_rate is not None else before.min_tx_rate or 0
        most = wanted.max_tx_rate if wanted.max_tx_rate is not None else before.max_tx_rate or 0
        requests.append(("maxTxRate", attribute(_IFLA_VF_RATE, struct.pack("=III", index, least, most))))
    if wanted.spoof_check is not None:
        requests.append(("spoofCheck", attribute(_IFLA_VF_SPOOFCHK, struct.pack("=II", index, wanted.spoof_check))))
    if wanted.link_state is not None:
        requests.append(
            ("linkState", attribute(_IFLA_VF_LINK_STATE, struct.pack("=II", index, _LINK_STATES[wanted.link_state])))
        )
    if wanted.trust is not None:
        requests.append(("trust", attribute(_IFLA_VF_TRUST, struct.pack("=II", index, wanted.trust))))
    return tuple(requests)


def vf_message(physical_index: int, setting: bytes) -> bytes:
    """Return the body of an RTM_SETLINK with one setting of a virtual function."""
    return link_body(physical_index, attribute(_IFLA_VFINFO_LIST, attribute(_IFLA_VF_INFO, setting)))


def _vlan_request(index: int, wanted: VfFields, before: VfFields) -> bytes:
    vlan = wanted.vlan if wanted.vlan is not None else before.vlan or 0
    # A priority belongs to a tag: with another tag, the old priority does not count.
    qos = wanted.qos if wanted.qos is not None else (before.qos or 0 if wanted.vlan is None else 0)
    protocol = wanted.vlan_protocol or (before.vlan_protocol if wanted.vlan is None else None) or "802.1Q"
    fields = struct.pack("=III", index, vlan, qos)
    if protocol == "802.1Q":
        return attribute(_IFLA_VF_VLAN, fields)
    # struct ifla_vf_vlan_info ends with two unused bytes. Without them it is refused as too short.
    return attribute(
        _IFLA_VF_VLAN_LIST, attribute(_IFLA_VF_VLAN_INFO, fields + struct.pack("!Hxx", _PROTOCOLS[protocol]))
    )


def read_vf(link: Any, index: int) -> VfFields | None:
    """Find a virtual function's settings in the kernel's answer about its physical one.

    None when it has none of that index.
    """
    functions = link.get("vfinfo_list") or {"attrs": []}
    for _, info in functions["attrs"]:
        values = dict(info["attrs"])
        if values.get("IFLA_VF_MAC", {}).get("vf") == index:
            return _state(values)
    return None


def _state(values: Mapping[str, Any]) -> VfFields:
    vlan, protocol = values.get("IFLA_VF_VLAN"), None
    entries = (values.get("IFLA_VF_VLAN_LIST") or {"attrs": []})["attrs"]
    if entries:
        vlan = entries[0][1]
        protocol = next((name for name, number in _PROTOCOLS.items() if number == vlan["proto"]), None)
    rate = values.get("IFLA_VF_RATE")
    link_state = values.get("IFLA_VF_LINK_STATE")
    return VfFields(
        mac=values["IFLA_VF_MAC"]["mac"],
        vlan=vlan["vlan"] if vlan is not None else None,
        qos=vlan["qos"] if vlan is not None else None,
        vlan_protocol=protocol,
        trust=_flag(values, "IFLA_VF_TRUST", "trust"),
        spoof_check=_flag(values, "IFLA_VF_SPOOFCHK", "spoofchk"),
        link_state=next((name for name, number in _LINK_STATES.items() if number == link_state["link_state"]), None)
        if link_state
        else None,
        min_tx_rate=rate["min_tx_rate"] if rate is not None else None,
        max_tx_rate=rate["max_tx_rate"] if rate is not None else None,
    )


def _flag(values: Mapping[str, Any], attribute: str, key: str) -> bool | None:
    number = values.get(attribute, {}).get(key)
    # All ones: the driver does not show it (rtnl_fill_vfinfo).
    return None if number is None or number == 0xFFFFFFFF else bool(number)


def configure_vf(
    places: Places, place: VfPlace, fields: VfFields, record: DeviceRecord, function: InterfaceState | None = None
) -> Refusal | None:
    """Set the fields that are written, after the record has the previous values.

    Shapes: function — the function's own interface as `identified` returned it: only that very
    function gets its settings back.
    Errors: refuses `vf-gone` when the physical function has no such function, `vf-refused` with the
    field that its driver does not take.
    """
    refusal = missing_package()
    if refusal is not None:
        return refusal

    def configure(socket: Any) -> Refusal | None:
        from pyroute2.netlink.exceptions import NetlinkError

        physical, before = _find(socket, place)
        if physical is None or before is None:
            return refuse(
                "vf-gone",
                f"{place.physical} has no virtual function {place.index}",
                physical=place.physical,
                index=place.index,
            )
        requests = vf_requests(place.index, fields, before)
        # Only what is changed is restored: a driver may refuse a setting that was never asked for.
        changed = [field for field, _ in requests]
        facts = {"place": msgspec.to_builtins(place), "state": msgspec.to_builtins(before), "fields": changed}
        if function is not None:
            link = get_link(socket, index=physical)
            port = {"bus_device": bus_device_of(link), "port_name": port_name(link)} if link is not None else {}
            facts |= {
                "function": state_to_journal(structs.replace(function, addresses=(), routes=(), sysctls={})),
                "physical": port,
            }
        record.intend("vf", facts)
        for name, setting in requests:
            try:
                set_link(socket, vf_message(physical, setting))
            except NetlinkError as err:
                field = _claim_fields(name, fields, int(err.code))
                return refuse(
                    "vf-refused",
                    f"{field} of function {place.index} of {place.physical} is refused by its driver: {err.args[1]}",
                    field=field,
                    physical=place.physical,
                    error=int(err.code),
                )
        record.done("vf")
        return None

    return with_netlink(places, None, configure)


def restore_vf(places: Places, record: DeviceRecord) -> tuple[Reason, ...]:
    """Restore what differs from the record, and mark the step undone.

    Nothing is done without such a step. A function that is gone, or was made again, has no settings
    of ours.

    Shapes: result — what the driver will never take back; it stays as it is, and is reported this
    once.
    Errors: raises HardwareError when the driver refuses for now, or the physical function is not
    found; the caller repeats the call.
    """
    step = record.step("vf")
    if step is None:
        return ()
    place, before = (
        msgspec.convert(step.before["place"], type=ready(VfPlace)),
        msgspec.convert(step.before["state"], type=ready(VfFields)),
    )
    function = state_from_journal(step.before["function"]) if "function" in step.before else None
    if function is not None and not present_of(function, places).is_same_device:
        record.undone("vf")
        return ()

    def restore(socket: Any) -> tuple[Reason, ...]:
        from pyroute2.netlink.exceptions import NetlinkError

        name, physical, now = _find_again(socket, place, step.before.get("physical") or {})
        if physical is None or now is None:
            if function is not None and function.is_virtual_function and physical is None:
                raise HardwareError(
                    f"the physical function of {function.name} is not on the host: it was {place.physical}",
                    interface=function.name,
                )
            return ()
        there = dict(vf_requests(place.index, now, now))
        kept: list[Reason] = []
        for request, setting in vf_requests(place.index, before, now):
            # A setting that the driver does not know is unchanged, but setting it would still be
            # refused.
            if request not in step.before["fields"] or there.get(request) == setting:
                continue
            try:
                set_link(socket, vf_message(physical, setting))
            except NetlinkError as err:
                text = f"vf.{request} of function {place.index} of {name} cannot be put back: {err.args[1]}"
                if err.code not in _FINAL:
                    raise HardwareError(text, field=request) from err
                kept.append(_kept(text, name, place.index, request, before))
        return tuple(kept)

    kept = with_netlink(places, None, restore)
    record.undone("vf")
    return kept


def _claim_fields(request: str, wanted: VfFields, error: int) -> str:
    """Name the claim's fields in a request, of those that are written."""
    if error == errno.EPROTONOSUPPORT and request == "vlan":
        return "vf.vlanProtocol"
    written = [field for own, field in _FIELDS.get(request, ()) if getattr(wanted, own) is not None]
    return ", ".join(f"vf.{field}" for field in written or [request])


def _kept(text: str, physical: str, index: int, request: str, before: VfFields) -> Reason:
    words = {
        "mac": f"mac {before.mac}",
        "vlan": f"vlan {before.vlan or 0} qos {before.qos or 0} proto {before.vlan_protocol or '802.1Q'}",
        "maxTxRate": f"max_tx_rate {before.max_tx_rate or 0} min_tx_rate {before.min_tx_rate or 0}",
        "spoofCheck": f"spoofchk {'on' if before.spoof_check else 'off'}",
        "linkState": f"state {before.link_state}",
        "trust": f"trust {'on' if before.trust else 'off'}",
    }[request]
    message = (
        f"{text}; it stays as the claim has set it and is not tried again: `ip link set {physical} vf {index} "
        f"{words}` is what it was"
    )
    return Reason(
        code="vf-setting-kept", message=message, facts={"field": f"vf.{request}", "physical": physical, "index": index}
    )


def _find_again(socket: Any, place: VfPlace, port: Mapping[str, str]) -> tuple[str, int | None, VfFields | None]:
    """Find the physical function's port by its facts, because its name may be another interface's
    by now.
    """
    wanted = (port.get("bus_device", ""), port.get("port_name", ""))
    if not wanted[0]:
        return place.physical, *_find(socket, place)
    # Its own name first: nothing else distinguishes several ports without port names.
    links = sorted(list_links(socket), key=lambda link: link.get("ifname") != place.physical)
    for link in links:
        if (bus_device_of(link), port_name(link)) == wanted:
            name = str(link.get("ifname"))
            return name, *_find(socket, VfPlace(physical=name, index=place.index))
    return place.physical, None, None


def _find(socket: Any, place: VfPlace) -> tuple[int | None, VfFields | None]:
    physical = get_link(socket, name=place.physical)
    if physical is None or physical.get("ifname") != place.physical:
        return None, None
    links = socket.link("get", index=physical["index"], ext_mask=_RTEXT_FILTER_VF)
    return int(physical["index"]), next(
        (state for link in links if (state := read_vf(link, place.index)) is not None), None
    )
