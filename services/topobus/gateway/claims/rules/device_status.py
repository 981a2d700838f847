"""Builds a claim's `status.devices` entries for the gateway's devices: which entries, with which
condition, within the API's limits.

The entries have the wire shape of resource.k8s.io (the same in all its versions). A property of an
interface that the API would refuse is left out of the entry and named in the condition's message,
so that a wrong address does not hide the right ones.
Source: k8s.io/api/resource/v1 AllocatedDeviceStatus, NetworkDeviceData, 1.36.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from topobus.formats.kubernetes.limit_rules import MAX_HARDWARE_ADDRESS, MAX_INTERFACE_ADDRESSES, MAX_INTERFACE_NAME
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.cluster.rules.device_faults import HealthNote
from topobus.gateway.cluster.rules.shortening import shortened
from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface

__all__ = ["ClaimReport", "camel_case", "device_statuses", "network_data", "replaced_statuses", "text_of"]

_READY, _PREPARED, _ATTACHED = "Ready", "Prepared", "Attached"
_HEALTHY, _WELL_AGAIN = "Healthy", "Recovered"
_OWN = (_READY, _HEALTHY)
# Far below the API's 32 KiB, because people read it, once for each device.
_MESSAGE_LIMIT = 1024
_WORD = re.compile(r"[A-Za-z0-9]+")


class ClaimReport(Struct, frozen=True, kw_only=True):
    """What a claim's status should contain for its devices of one class, until the next report."""

    namespace: str
    name: str
    uid: ClaimUid
    device_class: str
    devices: tuple[AllocatedDevice, ...] = ()
    """Empty: the status should contain no entry."""
    interfaces: dict[str, AttachedInterface] = {}
    """By device."""
    cpus: dict[str, str] = {}
    """CPUs that containers have exclusively, by device, in the kernel's notation."""
    pod: str = ""
    """The pod in whose sandbox the devices are, `namespace/name`. Empty: they are in none, and
    need none."""
    refused: str = ""
    """Why they are in no sandbox although they should be. Empty: they are ready."""
    code: str = ""
    """The reason code of `refused`."""
    health: dict[str, HealthNote] = {}
    """By device, for those that have been unhealthy since the claim was prepared."""
    generation: int = 0
    """The claim's generation when it was prepared. 0: its API server counts none."""
    since: str = ""
    """When this state began, in whole seconds of UTC."""

    @property
    def key(self) -> str:
        """Claim and class."""
        return f"{self.uid}/{self.device_class}"

    @property
    def is_ready(self) -> bool:
        """Return whether containers can use the devices."""
        return not self.refused


def device_statuses(report: ClaimReport) -> list[dict[str, Any]]:
    """Build the entries of a claim's devices, each device once, in the order of the allocation.

    Shapes: result — empty when the status should contain none.
    """
    entries: dict[tuple[str, str, str], dict[str, Any]] = {}
    for device in report.devices:
        key = (device.pool, device.device, device.share_id)
        if key not in entries:
            entries[key] = _entry(report, device)
    return list(entries.values())


def replaced_statuses(
    present: Sequence[Mapping[str, Any]], device_class: str, devices: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return a claim's list with exactly these entries of our devices of a class.

    Conditions that other writers added stay, and keep their entry.

    >>> watched = {"driver": DRIVER, "pool": "p", "device": "nic-0", "data": {}, "conditions": [{"type": "Ready"}, {"type": "Watched"}]}
    >>> [condition["type"] for condition in replaced_statuses([watched], "nic", [])[0]["conditions"]]
    ['Watched']
    """  # noqa: E501

    def is_of_class(device: Mapping[str, Any]) -> bool:
        return class_of_device(str(device.get("driver")), str(device.get("device"))) == device_class

    def key(device: Mapping[str, Any]) -> tuple[object, ...]:
        return (device.get("pool"), device.get("device"), device.get("shareID"))

    foreign = {
        key(device): [condition for condition in device.get("conditions") or () if condition.get("type") not in _OWN]
        for device in present
        if is_of_class(device)
    }
    others = [device for device in present if not is_of_class(device)]
    own = [
        {**device, "conditions": [*device.get("conditions", ()), *foreign[key(device)]]}
        if foreign.get(key(device))
        else device
        for device in devices
    ]
    rest = [
        {
            **{name: device[name] for name in ("driver", "pool", "device", "shareID") if name in device},
            "conditions": foreign[key(device)],
        }
        for device in present
        if is_of_class(device) and foreign[key(device)] and key(device) not in {key(wanted) for wanted in devices}
    ]
    return [*others, *own, *rest]


def network_data(interface: AttachedInterface) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert an interface to `networkData`, and list what had to be left out.

    >>> network_data(AttachedInterface(name="net1", mac="02:00:00:00:00:01", addresses=("10.0.0.2/24", "FD00:0::2/64")))[0]["ips"]
    ['10.0.0.2/24', 'fd00::2/64']
    """  # noqa: E501
    data: dict[str, Any] = {}
    left_out: list[str] = []
    for field, text, limit in (
        ("interfaceName", interface.name, MAX_INTERFACE_NAME),
        ("hardwareAddress", interface.mac, MAX_HARDWARE_ADDRESS),
    ):
        if len(text.encode("utf-8", "replace")) > limit:
            left_out.append(f"{field} has more than {limit} bytes")
        elif text:
            data[field] = text
    canonical = {address: _canonical(address) for address in interface.addresses}
    left_out += [f"{address[:64]!r} is no address with its prefix" for address, good in canonical.items() if not good]
    addresses = list(dict.fromkeys(good for good in canonical.values() if good))
    if len(addresses) > MAX_INTERFACE_ADDRESSES:
        left_out.append(f"{len(addresses) - MAX_INTERFACE_ADDRESSES} addresses beyond {MAX_INTERFACE_ADDRESSES}")
    if addresses:
        data["ips"] = addresses[:MAX_INTERFACE_ADDRESSES]
    return data, tuple(left_out)


def text_of(refusal: Refusal) -> tuple[str, str]:
    """Return the code of a refusal's first reason, and all its reasons as one text."""
    reasons = refusal.reasons
    return (reasons[0].code if reasons else "refused"), "; ".join(reason.message for reason in reasons)


def camel_case(code: str) -> str:
    """Convert a reason code to the form that conditions and events require for their reason.

    The message contains the code itself, for programs.

    >>> camel_case("name-taken"), camel_case("no-affinity:2"), camel_case("")
    ('NameTaken', 'NoAffinity2', 'Refused')
    """
    text = "".join(word[:1].upper() + word[1:] for word in _WORD.findall(code))
    return text if text[:1].isalpha() else f"Refused{text}"


def _entry(report: ClaimReport, device: AllocatedDevice) -> dict[str, Any]:
    interface = report.interfaces.get(device.device)
    network, left_out = network_data(interface) if interface is not None else ({}, ())
    entry: dict[str, Any] = {"driver": DRIVER, "pool": device.pool, "device": device.device}
    if device.share_id:
        entry["shareID"] = device.share_id
    entry["conditions"] = [_condition(report, left_out)]
    if (note := report.health.get(device.device)) is not None:
        entry["conditions"].append(_health_condition(report, note))
    data = _data(report.pod, interface, report.cpus.get(device.device, ""))
    if data:
        entry["data"] = data
    if network:
        entry["networkData"] = network
    return entry


def _condition(report: ClaimReport, left_out: Iterable[str]) -> dict[str, Any]:
    if report.refused:
        reason, message = camel_case(report.code), f"{report.refused} ({report.code})"
    elif report.pod:
        reason, message = _ATTACHED, f"in the sandbox of pod {report.pod}"
    else:
        reason, message = _PREPARED, "containers get it at their start"
    message = "; ".join((message, *(f"left out: {what}" for what in left_out)))
    condition: dict[str, Any] = {
        "type": _READY,
        "status": "True" if report.is_ready else "False",
        "reason": reason,
        "message": shortened(message, _MESSAGE_LIMIT),
        "lastTransitionTime": report.since,
    }
    if report.generation:
        condition["observedGeneration"] = report.generation
    return condition


def _health_condition(report: ClaimReport, note: HealthNote) -> dict[str, Any]:
    condition: dict[str, Any] = {
        "type": _HEALTHY,
        "status": "True" if note.is_healthy else "False",
        "reason": _WELL_AGAIN if note.is_healthy else camel_case(note.code),
        "message": shortened("" if note.is_healthy else f"{note.message} ({note.code})", _MESSAGE_LIMIT),
        "lastTransitionTime": note.since,
    }
    if report.generation:
        condition["observedGeneration"] = report.generation
    return condition


def _data(pod: str, interface: AttachedInterface | None, cpus: str) -> Mapping[str, Any]:
    """Build the data for which the API has no field."""
    data: dict[str, Any] = {}
    if pod:
        data["pod"] = pod
    if interface is not None and interface.mtu:
        data["mtu"] = interface.mtu
    if cpus:
        data["cpus"] = cpus
    return data or MappingProxyType({})


def _canonical(address: str) -> str:
    """Convert an address to the API's form. Empty if it is invalid or has no prefix."""
    try:
        return str(ipaddress.ip_interface(address)) if "/" in address else ""
    except ValueError:
        return ""
