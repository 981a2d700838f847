"""What a classic selector wants of a device, written a second time: an interpreter, with which laws
compare the CEL that the controller runs.

It reads the same facts as CEL. An attribute that the device does not publish, or publishes with
another type, makes its condition false, whatever the operator.
"""

from __future__ import annotations

import re

from topobus.engine.cel.seam import DeviceFacts, FactValue, Version
from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.formats.kubernetes.classic.classic_cel import attribute_name
from topobus.formats.kubernetes.classic.classic_parameters import VERSION_PATTERN, AttributeCondition, DeviceSelector
from topobus.formats.kubernetes.resource import QuantityText
from topobus.values.quantity import Quantity

__all__ = ["is_wanted"]

_TEXTS = ("product_name", "brand", "architecture", "uuid")
_VERSIONS = ("driver_version", "cuda_runtime_version", "cuda_compute_capability")


def is_wanted(device_selector: DeviceSelector, device: DeviceFacts) -> bool:
    """Say whether a device is wanted: all conditions of a level hold, all of `andExpression`, one
    of `orExpression`.

    Cost: one visit of each condition. A pattern costs at most length times length.
    """
    return (
        all(
            _has_text(device, _name(field), text)
            for field in _TEXTS
            if (text := getattr(device_selector, field)) is not None
        )
        and (device_selector.index is None or _equals(_attribute(device, "index"), device_selector.index))
        and (
            device_selector.mig_enabled is None
            or _equals(_attribute(device, _name("mig_enabled")), device_selector.mig_enabled)
        )
        and (
            device_selector.memory is None
            or _has_amount(device, "memory", device_selector.memory.value, device_selector.memory.operator)
        )
        and all(
            _has_version(device, _name(field), wanted.value, wanted.operator)
            for field in _VERSIONS
            if (wanted := getattr(device_selector, field)) is not None
        )
        and (device_selector.attribute is None or _has_attribute(device, device_selector.attribute))
        and (
            device_selector.capacity is None
            or _has_amount(
                device, device_selector.capacity.name, device_selector.capacity.value, device_selector.capacity.operator
            )
        )
        and all(is_wanted(part, device) for part in device_selector.and_expression)
        and (
            not device_selector.or_expression or any(is_wanted(part, device) for part in device_selector.or_expression)
        )
    )


def _name(field: str) -> str:
    return attribute_name(field)


def _attribute(device: DeviceFacts, name: str) -> FactValue | None:
    domain, slash, identifier = name.partition("/")
    return device.attributes.get(domain if slash else device.driver, {}).get(identifier if slash else name)


def _equals(got: FactValue | None, wanted: bool | int) -> bool:
    return type(got) is type(wanted) and got == wanted


def _has_text(device: DeviceFacts, name: str, pattern: str) -> bool:
    got = _attribute(device, name)
    return isinstance(got, str) and _fits(got, pattern)


def _has_attribute(device: DeviceFacts, wanted: AttributeCondition) -> bool:
    got = _attribute(device, wanted.name)
    if type(got) is not type(wanted.value):
        return False
    if isinstance(wanted.value, str):
        return isinstance(got, str) and _fits(got, wanted.value) is (wanted.operator == "Equals")
    if isinstance(wanted.value, bool):
        return (got == wanted.value) is (wanted.operator == "Equals")
    return isinstance(got, int) and _holds((got > wanted.value) - (got < wanted.value), wanted.operator)


def _has_amount(device: DeviceFacts, name: str, wanted: QuantityText, operator: str) -> bool:
    domain, slash, identifier = name.partition("/")
    got = device.capacity.get(domain if slash else device.driver, {}).get(identifier if slash else name)
    if got is None:
        return False
    limit = Quantity.parse(wanted)
    return _holds((got > limit) - (got < limit), operator)


def _has_version(device: DeviceFacts, name: str, wanted: str, operator: str) -> bool:
    got = _attribute(device, name)
    if isinstance(got, Version):
        version = SemanticVersion.parse(got.text)
    elif isinstance(got, str) and re.fullmatch(VERSION_PATTERN, got):
        version = SemanticVersion.parse(got, is_loose=True)
    else:
        return False
    limit = SemanticVersion.parse(wanted, is_loose=True)
    return _holds((version > limit) - (version < limit), operator)


def _holds(order: int, operator: str) -> bool:
    """Say whether a comparison that came out as -1, 0 or 1 is what the operator wants."""
    verdicts = {
        "Equals": order == 0,
        "NotEquals": order != 0,
        "LessThan": order < 0,
        "LessThanOrEqualTo": order <= 0,
        "GreaterThan": order > 0,
        "GreaterThanOrEqualTo": order >= 0,
    }
    return verdicts[operator]


def _fits(text: str, pattern: str) -> bool:
    """Match `*` and `?` without regard to the case of ASCII letters, in time proportional to both
    lengths.
    """
    got, wanted = _lower(text), _lower(pattern)
    here = at = 0
    star, resume = -1, 0
    while here < len(got):
        if at < len(wanted) and wanted[at] == "*":
            star, resume = at, here
            at += 1
        elif at < len(wanted) and wanted[at] in ("?", got[here]):
            here, at = here + 1, at + 1
        elif star >= 0:
            resume += 1
            here, at = resume, star + 1
        else:
            return False
    return all(letter == "*" for letter in wanted[at:])


def _lower(text: str) -> str:
    return "".join(chr(ord(letter) + 32) if "A" <= letter <= "Z" else letter for letter in text)
