"""The limits of the device statuses that drivers write into `status.devices` of a claim.

The gateway checks them before it writes, and so does the API server simulator.
Source: k8s.io/kubernetes pkg/apis/resource/validation (validateDeviceStatus,
validateNetworkDeviceData), apimachinery meta/v1 validation (ValidateConditions), 1.36.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from topobus.formats.kubernetes import resource as r
from topobus.formats.kubernetes.limit_rules import (
    MAX_DEVICE_STATUS_CONDITIONS,
    MAX_HARDWARE_ADDRESS,
    MAX_INTERFACE_ADDRESSES,
    MAX_INTERFACE_NAME,
    at_most,
    check_parameters,
    is_label_name,
    unique,
)
from topobus.formats.kubernetes.shape import Problem

__all__ = ["MAX_CONDITION_MESSAGE", "check_device_statuses", "is_interface_address"]

MAX_CONDITION_MESSAGE = 32768
_MAX_CONDITION_REASON = 1024
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_STATUSES = ("True", "False", "Unknown")


def check_device_statuses(status: r.ClaimStatus) -> Iterator[Problem]:
    """Check the statuses that drivers report for the devices of a claim.

    Order: of the fields, one Problem for each limit that is broken.
    """
    results = status.allocation.devices.results if status.allocation is not None else ()
    granted = {
        (granted_device.driver, granted_device.pool, granted_device.device, granted_device.share_id)
        for granted_device in results
    }
    ids = [
        (device.get("driver"), device.get("pool"), device.get("device"), device.get("shareID"))
        for device in status.devices
    ]
    yield from unique([str(identifier) for identifier in ids], "status.devices", field="device")
    for index, device in enumerate(status.devices):
        path = f"status.devices[{index}]"
        if ids[index] not in granted:
            yield Problem(path, "wanted a device that the claim was allocated")
        conditions = device.get("conditions") or ()
        yield from at_most(conditions, MAX_DEVICE_STATUS_CONDITIONS, f"{path}.conditions")
        yield from unique([str(condition.get("type")) for condition in conditions], f"{path}.conditions", field="type")
        for number, condition in enumerate(conditions):
            yield from _check_condition(condition, f"{path}.conditions[{number}]")
        if device.get("data") is not None:
            yield from check_parameters(device["data"], f"{path}.data")
        network = device.get("networkData")
        if isinstance(network, Mapping):
            yield from _check_network(network, f"{path}.networkData")


def is_interface_address(address: str) -> bool:
    """Say whether an address is written as the API wants it: with its prefix, in the shortest form.

    >>> [is_interface_address(text) for text in ("192.0.2.5/24", "192.0.2.5", "2001:db8::5/64", "2001:db8:0::5/64")]
    [True, False, True, False]
    """
    try:
        return "/" in address and str(ipaddress.ip_interface(address)) == address
    except ValueError:
        return False


def _check_condition(condition: Mapping[str, Any], path: str) -> Iterator[Problem]:
    kind, reason = str(condition.get("type") or ""), str(condition.get("reason") or "")
    if not is_label_name(kind):
        yield Problem(f"{path}.type", f"got {kind!r}, wanted the name of a label")
    if condition.get("status") not in _STATUSES:
        yield Problem(f"{path}.status", f"got {condition.get('status')!r}, wanted one of {', '.join(_STATUSES)}")
    generation = condition.get("observedGeneration") or 0
    if not isinstance(generation, int) or generation < 0:
        yield Problem(f"{path}.observedGeneration", f"got {generation!r}, wanted a number of at least 0")
    try:
        datetime.fromisoformat(str(condition.get("lastTransitionTime")))
    except ValueError:
        yield Problem(f"{path}.lastTransitionTime", f"got {condition.get('lastTransitionTime')!r}, wanted a time")
    if not _REASON.fullmatch(reason) or len(reason) > _MAX_CONDITION_REASON:
        yield Problem(
            f"{path}.reason",
            f"got {reason[:80]!r}, wanted words such as MyName, at most {_MAX_CONDITION_REASON} characters",
        )
    if len(str(condition.get("message") or "").encode()) > MAX_CONDITION_MESSAGE:
        yield Problem(f"{path}.message", f"wanted at most {MAX_CONDITION_MESSAGE} bytes")


def _check_network(network: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, limit in (("interfaceName", MAX_INTERFACE_NAME), ("hardwareAddress", MAX_HARDWARE_ADDRESS)):
        if len(str(network.get(name) or "").encode()) > limit:
            yield Problem(f"{path}.{name}", f"wanted at most {limit} bytes")
    addresses = [str(ip) for ip in network.get("ips") or ()]
    yield from at_most(addresses, MAX_INTERFACE_ADDRESSES, f"{path}.ips")
    yield from unique(addresses, f"{path}.ips", field="")
    for index, address in enumerate(addresses):
        if not is_interface_address(address):
            yield Problem(
                f"{path}.ips[{index}]", f"got {address!r}, wanted an address with its prefix, such as 192.0.2.5/24"
            )
