"""A classic selector as a CEL expression of structured parameters that selects the same devices.

Every value is tested with `has` and for its type first. A value that a device does not publish is a
"no" in classic parameters, but in CEL an error that stops a pod everywhere.
Source: k8s.io/dynamic-resource-allocation/cel; CEL libraries of Kubernetes 1.34 (strings, quantity,
semver with normalization).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from topobus.formats.kubernetes.classic.classic_parameters import VERSION_PATTERN, DeviceSelector, VersionCondition
from topobus.formats.kubernetes.resource import QuantityText
from topobus.values.quantity import Quantity

__all__ = ["OUR_NAMES", "attribute_name", "selector_expression"]

OUR_NAMES: Mapping[str, str] = MappingProxyType(
    {"product_name": "model", "cuda_runtime_version": "cuda_driver_version"}
)
"""A selector's field to the attribute that our drivers publish for it, where the two are called
differently."""

_SIGNS = {
    "Equals": "==",
    "NotEquals": "!=",
    "LessThan": "<",
    "LessThanOrEqualTo": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqualTo": ">=",
}


def attribute_name(field: str, names: Mapping[str, str] = OUR_NAMES) -> str:
    """Name the attribute behind a selector's field.

    >>> attribute_name("driver_version"), attribute_name("product_name")
    ('driverVersion', 'model')
    """
    head, *rest = names.get(field, field).split("_")
    return head + "".join(part.capitalize() for part in rest)


def selector_expression(selector: DeviceSelector, driver: str, names: Mapping[str, str] = OUR_NAMES) -> str:
    """Write a selector as CEL. Empty for a selector that accepts every device.

    >>> selector_expression(DeviceSelector(index=0), "topobus.dev")
    'has(device.attributes["topobus.dev"].index) && type(device.attributes["topobus.dev"].index) in [int] && device.attributes["topobus.dev"].index == 0'
    """  # noqa: E501
    return " && ".join(_Writer(driver, names).terms(selector))


class _Writer:
    """Writes expressions over the devices of one driver."""

    def __init__(self, driver: str, names: Mapping[str, str]) -> None:
        self._driver = driver
        self._names = names

    def terms(self, device_selector: DeviceSelector) -> list[str]:
        """List the terms of one level that must all hold."""
        tests: list[str] = []
        for field in ("product_name", "brand", "architecture", "uuid"):
            text = getattr(device_selector, field)
            if text is not None:
                tests.append(self._text(self._of(field), text, "Equals"))
        if device_selector.index is not None:
            tests.append(self._plain(self._of("index"), "int", "==", str(device_selector.index)))
        if device_selector.mig_enabled is not None:
            tests.append(
                self._plain(self._of("mig_enabled"), "bool", "==", "true" if device_selector.mig_enabled else "false")
            )
        if device_selector.memory is not None:
            tests.append(self._amount("memory", device_selector.memory.value, device_selector.memory.operator))
        for field in ("driver_version", "cuda_runtime_version", "cuda_compute_capability"):
            version: VersionCondition | None = getattr(device_selector, field)
            if version is not None:
                tests.append(self._version(self._of(field), version))
        if device_selector.attribute is not None:
            value, path = device_selector.attribute.value, self._path("attributes", device_selector.attribute.name)
            if isinstance(value, str):
                tests.append(self._text(path, value, device_selector.attribute.operator))
            elif isinstance(value, bool):
                tests.append(
                    self._plain(path, "bool", _SIGNS[device_selector.attribute.operator], "true" if value else "false")
                )
            else:
                tests.append(self._plain(path, "int", _SIGNS[device_selector.attribute.operator], str(value)))
        if device_selector.capacity is not None:
            tests.append(
                self._amount(
                    device_selector.capacity.name, device_selector.capacity.value, device_selector.capacity.operator
                )
            )
        tests.extend(_bracketed(self.terms(part), " && ") for part in device_selector.and_expression)
        if device_selector.or_expression:
            tests.append(
                _bracketed([_bracketed(self.terms(part), " && ") for part in device_selector.or_expression], " || ")
            )
        return tests

    def _of(self, field: str) -> str:
        return self._path("attributes", attribute_name(field, self._names))

    def _path(self, part: str, name: str) -> str:
        domain, slash, identifier = name.partition("/")
        return f"device.{part}[{_literal(domain if slash else self._driver)}].{identifier if slash else name}"

    # `type(x) == string` means the same, but API servers refuse it: their estimate has no size for
    # a type.
    def _plain(self, path: str, kind: str, sign: str, value: str) -> str:
        return f"has({path}) && type({path}) in [{kind}] && {path} {sign} {value}"

    def _text(self, path: str, text: str, operator: str) -> str:
        """Compare without regard to case. A wildcard makes the text a pattern."""
        lowered = text.translate(_LOWER)
        test = f"{path}.lowerAscii()"
        if "*" in text or "?" in text:
            pattern = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in lowered)
            test = f"{test}.matches({_literal(f'(?s)^{pattern}$')})"
            test = f"!{test}" if operator == "NotEquals" else test
        else:
            test = f"{test} {_SIGNS[operator]} {_literal(lowered)}"
        return f"has({path}) && type({path}) in [string] && {test}"

    def _amount(self, name: str, value: QuantityText, operator: str) -> str:
        path = self._path("capacity", name)
        return f"has({path}) && {path}.compareTo(quantity({_literal(str(Quantity.parse(value)))})) {_SIGNS[operator]} 0"

    def _version(self, path: str, version_condition: VersionCondition) -> str:
        """Compare versions: published as a version, or as text such as `535.104.05`, which must be
        normalized to become one.
        """
        numbers = [str(int(part)) for part in version_condition.value.removeprefix("v").split(".")]
        wanted = f"semver({_literal('.'.join((*numbers, '0', '0')[:3]))})"
        sign = _SIGNS[version_condition.operator]
        as_text = (
            f"{path}.matches({_literal(f'^{VERSION_PATTERN}$')}) && semver({path}, true).compareTo({wanted}) {sign} 0"
        )
        return f"has({path}) && (type({path}) in [string] ? {as_text} : {path}.compareTo({wanted}) {sign} 0)"


# CEL's lowerAscii leaves all other letters unchanged, so the text compared with it must as well.
_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def _bracketed(terms: list[str], joint: str) -> str:
    return f"({joint.join(terms)})" if terms else "true"


def _literal(text: str) -> str:
    """Write a CEL string, whose escapes are JSON's for all printable text."""
    return json.dumps(text, ensure_ascii=False)
