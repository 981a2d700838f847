"""Which drivers' classic parameters can be read, and how such a driver's devices look in structured
parameters.

Known are Topobus' own classic drivers and NVIDIA's of 2023 (`gpu.resource.nvidia.com`), on whose parameters
ours are modelled. Of any other driver only the name is used.
Source: kubernetes-sigs/dra-driver-nvidia-gpu, api of v0.1 (gpu.resource.nvidia.com/v1alpha1) and of
v25 (resource.nvidia.com/v1beta1, attributes of gpu.nvidia.com).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.classic.classic import ClassParametersReference, ParametersReference
from topobus.formats.kubernetes.classic.classic_cel import OUR_NAMES, selector_expression
from topobus.formats.kubernetes.classic.classic_parameters import (
    SHARING_KIND,
    SHARING_VERSION,
    AttributeCondition,
    DeviceSelector,
    device_class_of_group,
    group_of_class,
)
from topobus.formats.kubernetes.objects import CLAIM_PARAMETERS, CLASS_PARAMETERS
from topobus.formats.messages.messages import ApiObject
from topobus.values import dra_names
from topobus.values.dra_names import DRIVER

__all__ = ["Dialect", "dialect_of"]

_NVIDIA_CLASSIC = "gpu.resource.nvidia.com"
_NVIDIA = "gpu.nvidia.com"
_MIG_PARAMETERS = "MigDeviceClaimParameters"


@dataclass(frozen=True)
class Dialect:
    """How one driver writes classic parameters."""

    driver: str
    """The driver's name in structured parameters."""
    group: str = ""
    """API group of its parameters; empty when they cannot be read."""
    device_class: str = ""
    """The class of its devices, where the driver is ours, which has several."""
    class_kind: str = CLASS_PARAMETERS
    claim_kinds: tuple[str, ...] = (CLAIM_PARAMETERS,)
    names: Mapping[str, str] = field(default_factory=dict)
    """A selector's field to the attribute, where they are called differently."""
    sharing_version: str = SHARING_VERSION
    sharing_kind: str = SHARING_KIND
    sharing_below: str = ""
    """The key below which the strategy is; empty when it is at the top."""

    @property
    def is_known(self) -> bool:
        """Say whether the driver's parameters can be read."""
        return bool(self.group)

    @property
    def device_selector(self) -> str:
        """Write the CEL expression that selects the driver's devices."""
        return class_selector(self.device_class) if self.device_class else f'device.driver == "{self.driver}"'

    @staticmethod
    def of_group(group: str) -> Dialect | None:
        """Find a dialect by the group of parameters, for a claim whose class is not at hand."""
        if group == _NVIDIA_CLASSIC:
            return dialect_of(_NVIDIA_CLASSIC)
        device_class = device_class_of_group(group)
        return dialect_of(dra_names.group_of_class(device_class)) if device_class else None

    def reads_class(self, reference: ClassParametersReference) -> bool:
        """Say whether these class parameters can be read."""
        return self.is_known and (reference.api_group, reference.kind) == (self.group, self.class_kind)

    def reads_claim(self, reference: ParametersReference) -> bool:
        """Say whether these claim parameters can be read."""
        return self.is_known and reference.api_group == self.group and reference.kind in self.claim_kinds

    def as_claim_parameters(self, api_object: ApiObject) -> ApiObject:
        """Show claim parameters in our own format, without the fields that only this dialect
        has.
        """
        if api_object.kind != _MIG_PARAMETERS:
            return api_object
        return msgspec.structs.replace(
            api_object, spec={key: value for key, value in api_object.spec.items() if key == "sharing"}
        )

    def claim_expressions(self, api_object: ApiObject) -> tuple[str, ...]:
        """Write the selection that the kind of the parameters implies."""
        if self.driver != _NVIDIA:
            return ()
        is_part = api_object.kind == _MIG_PARAMETERS
        profile = api_object.spec.get("profile")
        selectors = [DeviceSelector(attribute=AttributeCondition(name="type", value="mig" if is_part else "gpu"))]
        if is_part and isinstance(profile, str) and profile:
            selectors.append(DeviceSelector(attribute=AttributeCondition(name="profile", value=profile)))
        return tuple(selector_expression(selector, self.driver, self.names) for selector in selectors)

    def losses(self, api_object: ApiObject) -> tuple[tuple[str, str], ...]:
        """List the fields of claim parameters that structured parameters cannot express: field and
        why.
        """
        if api_object.kind == _MIG_PARAMETERS and api_object.spec.get("gpuClaimName"):
            return (
                (
                    "gpuClaimName",
                    "a part of the GPU of another claim: put both requests into one claim with "
                    "matchAttribute parentUUID",
                ),
            )
        return ()

    def sharing_config(self, sharing: dict[str, Any], strategy: str) -> dict[str, Any]:
        """Write a sharing strategy as the driver's opaque parameters."""
        body = sharing | {"strategy": strategy}
        head = {"apiVersion": self.sharing_version, "kind": self.sharing_kind}
        return head | ({self.sharing_below: body} if self.sharing_below else body)


def dialect_of(driver: str) -> Dialect:
    """Find the dialect of a classic driver.

    >>> dialect_of("gpu.resource.nvidia.com").driver, dialect_of("x.example.com").is_known
    ('gpu.nvidia.com', False)
    """
    device_class = dra_names.class_of_group(driver)
    if device_class is not None:
        return Dialect(DRIVER, group_of_class(device_class), device_class, names=OUR_NAMES)
    if driver == _NVIDIA_CLASSIC:
        names = {"cuda_runtime_version": "cuda_driver_version"}
        return Dialect(
            _NVIDIA,
            _NVIDIA_CLASSIC,
            claim_kinds=("GpuClaimParameters", _MIG_PARAMETERS),
            names=names,
            sharing_version="resource.nvidia.com/v1beta1",
            sharing_kind="GpuConfig",
            sharing_below="sharing",
        )
    return Dialect(driver)
