"""Builds a claim's `status.devices` entries for the gateway's devices: which entries, with which
condition, within the API's limits.

The entries have the wire shape of resource.k8s.io (the same in all its versions). A property of an
interface that the API would refuse is left out of the entry and named in the condition's message,
so that a wrong address does not hide the right ones.
Source: k8s.io/api/resource/v1 AllocatedDeviceStatus, NetworkDeviceData, 1.36.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from topobus.engine.shapes.shapes import SHAPE_CLASS
from topobus.formats.kubernetes.limit_rules import (
    MAX_HARDWARE_ADDRESS,
    MAX_INTERFACE_ADDRESSES,
    MAX_INTERFACE_NAME,
    MAX_PARAMETER_BYTES,
)
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.cluster.rules.device_faults import HealthNote
from topobus.gateway.cluster.rules.shortening import shortened
from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface

__all__ = [
    "ClaimReport",
    "camel_case",
    "device_statuses",
    "joint_report",
    "network_data",
    "replaced_statuses",
    "text_of",
]

_READY, _PREPARED, _ATTACHED = "Ready", "Prepared", "Attached"
_HEALTHY, _WELL_AGAIN = "Healthy", "Recovered"
_OWN = (_READY, _HEALTHY)
# Far below the API's 32 KiB, because people read it, once for each device.
_MESSAGE_LIMIT = 1024
_WORD = re.compile(r"[A-Za-z0-9]+")


class ClaimReport(Struct, frozen=True, kw_only=True):
    """What a claim's status should contain for its devices of one class, until the next report.

    The parts of shapes have no entries of their own, because the API server takes entries only of
    devices that the allocation names. The report of the class of shapes has the parts of all
    classes, and one entry for each shape.
    """

    namespace: str
    name: str
    uid: ClaimUid
    device_class: str
    devices: tuple[AllocatedDevice, ...] = ()
    """Empty: the status should contain no entry."""
    is_of_parts: bool = False
    """Whether all its devices are parts of shapes, so that the class has no entry at any time."""
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


def joint_report(reports: Sequence[ClaimReport]) -> ClaimReport:
    """Join what the classes of a claim report of the parts of its shapes.

    Shapes: reports — at least one; result — ready when all are, else with the reason of the first
            that is not.
    """
    first = next((report for report in reports if not report.is_ready), reports[0])
    return ClaimReport(
        namespace=first.namespace,
        name=first.name,
        uid=first.uid,
        device_class=SHAPE_CLASS,
        devices=tuple(device for report in reports for device in report.devices if device.shape),
        interfaces={name: interface for report in reports for name, interface in report.interfaces.items()},
        cpus={name: cpus for report in reports for name, cpus in report.cpus.items()},
        pod=next((report.pod for report in reports if report.pod), ""),
        refused=first.refused,
        code=first.code,
        health={name: note for report in reports for name, note in report.health.items()},
        generation=max(report.generation for report in reports),
    )


def device_statuses(report: ClaimReport) -> list[dict[str, Any]]:
    """Build the entries of a claim's devices, each device once, in the order of the allocation.

    Shapes: result — empty when the status should contain none.
    """
    parts: dict[tuple[str, str, str], list[AllocatedDevice]] = {}
    for device in report.devices:
        if bool(device.shape) == (report.device_class == SHAPE_CLASS):
            parts.setdefault((device.pool, device.allocated, device.share_id), []).append(device)
    return [_entry(report, of_entry) for of_entry in parts.values()]


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
    return (refusal.reasons[0].code if refusal.reasons else "refused"), refusal.why


def camel_case(code: str) -> str:
    """Convert a reason code to the form that conditions and events require for their reason.

    The message contains the code itself, for programs.

    >>> camel_case("name-taken"), camel_case("no-affinity:2"), camel_case("")
    ('NameTaken', 'NoAffinity2', 'Refused')
    """
    text = "".join(word[:1].upper() + word[1:] for word in _WORD.findall(code))
    return text if text[:1].isalpha() else f"Refused{text}"


def _entry(report: ClaimReport, parts: Sequence[AllocatedDevice]) -> dict[str, Any]:
    """Build the entry of a device that was allocated: of a shape from its parts."""
    device = parts[0]
    names = dict.fromkeys(part.device for part in parts)
    interfaces = {name: report.interfaces[name] for name in names if name in report.interfaces}
    networks = {name: network_data(interface) for name, interface in interfaces.items()}
    left_out = [
        f"{name}: {what}" if device.shape else what for name, (_, missing) in networks.items() for what in missing
    ]
    data = _data(report.pod, interfaces, [report.cpus[name] for name in names if name in report.cpus])
    if len(json.dumps(data)) > MAX_PARAMETER_BYTES:
        data["interfaces"] = [{**interface, "ips": []} for interface in data["interfaces"]]
        left_out.append("the addresses in data")
    entry: dict[str, Any] = {"driver": DRIVER, "pool": device.pool, "device": device.allocated}
    if device.share_id:
        entry["shareID"] = device.share_id
    entry["conditions"] = [_condition(report, left_out)]
    notes = {name: report.health[name] for name in names if name in report.health}
    if notes:
        worst = min(notes, key=lambda name: notes[name].is_healthy)
        entry["conditions"].append(_health_condition(report, notes[worst], worst if device.shape else ""))
    if data:
        entry["data"] = data
    network = next((network for network, _ in networks.values() if network), None)
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


def _health_condition(report: ClaimReport, note: HealthNote, part: str) -> dict[str, Any]:
    message = f"{part}: {note.message} ({note.code})" if part else f"{note.message} ({note.code})"
    condition: dict[str, Any] = {
        "type": _HEALTHY,
        "status": "True" if note.is_healthy else "False",
        "reason": _WELL_AGAIN if note.is_healthy else camel_case(note.code),
        "message": shortened("" if note.is_healthy else message, _MESSAGE_LIMIT),
        "lastTransitionTime": note.since,
    }
    if report.generation:
        condition["observedGeneration"] = report.generation
    return condition


def _data(pod: str, interfaces: Mapping[str, AttachedInterface], cpus: Sequence[str]) -> dict[str, Any]:
    """Build the data for which the API has no field, such as all interfaces where there are several."""
    data: dict[str, Any] = {}
    if pod:
        data["pod"] = pod
    shown = [
        {"device": name, **network_data(interface)[0], **({"mtu": interface.mtu} if interface.mtu else {})}
        for name, interface in interfaces.items()
    ]
    if len(shown) == 1 and "mtu" in shown[0]:
        data["mtu"] = shown[0]["mtu"]
    if cpus:
        data["cpus"] = str(CpuSet.parse(",".join(cpus)))
    if len(shown) > 1:
        data["interfaces"] = shown
    return data


def _canonical(address: str) -> str:
    """Convert an address to the API's form. Empty if it is invalid or has no prefix."""
    try:
        return str(ipaddress.ip_interface(address)) if "/" in address else ""
    except ValueError:
        return ""
