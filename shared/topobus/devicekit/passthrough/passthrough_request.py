"""The request of a claim that wants devices for a virtual machine: its opaque configuration, read
once for all drivers.

Pure. The claim, or a DeviceClass that claims name, has the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from topobus.formats.kubernetes.classic.classic_parameters import SHARING_KIND
from topobus.formats.kubernetes.resource import Wire
from topobus.formats.kubernetes.shape import check_names, read_as
from topobus.values.errors import ContractError
from topobus.values.outcome import Refusal, refuse

__all__ = ["PASSTHROUGH_KIND", "PASSTHROUGH_VERSION", "Passthrough", "asks_for_passthrough", "read_passthrough"]

PASSTHROUGH_VERSION = "topobus.dev/v1"
PASSTHROUGH_KIND = "PassthroughParameters"


class Passthrough(Wire, frozen=True, kw_only=True):
    """How a function is given to a virtual machine."""

    backend: Literal["vfio", "iommufd"] = "vfio"
    """`vfio`: the node of the IOMMU group and VFIO's container. `iommufd`: the node of the function
    and /dev/iommu."""


def asks_for_passthrough(config: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a device is requested for a virtual machine, even if the request is malformed.

    >>> asks_for_passthrough([{"apiVersion": "topobus.dev/v1", "kind": "PassthroughParameters"}])
    True
    """
    return any(entry.get("kind") == PASSTHROUGH_KIND for entry in config)


def read_passthrough(config: Sequence[Mapping[str, Any]]) -> Passthrough | Refusal:
    """Read the parameters. The last ones win, because claims come after classes.

    Shapes: config — of a device that is requested for a virtual machine.
    Errors: refuses a wrong version, unknown fields and wrong values by name, and configuration of
    another kind beside it: that would be for the device with its own driver.

    >>> read_passthrough([{"apiVersion": "topobus.dev/v1", "kind": "PassthroughParameters", "backend": "iommufd"}]).backend
    'iommufd'
    """  # noqa: E501
    foreign = sorted(
        {str(entry.get("kind")) for entry in config if entry.get("kind") not in (PASSTHROUGH_KIND, SHARING_KIND)}
    )
    if foreign:
        return _refuse(
            f"{PASSTHROUGH_KIND} is given with {', '.join(foreign)}, wanted it alone: no driver of this class "
            "has the device then"
        )
    parameters: dict[str, Any] = next(
        dict(entry) for entry in reversed(config) if entry.get("kind") == PASSTHROUGH_KIND
    )
    version = parameters.pop("apiVersion", None)
    del parameters["kind"]
    if version != PASSTHROUGH_VERSION:
        return _refuse(f"{PASSTHROUGH_KIND}.apiVersion is {version!r}, wanted {PASSTHROUGH_VERSION!r}")
    problems: list[Any] = []
    check_names(parameters, Passthrough, PASSTHROUGH_KIND, {}, problems)
    if problems:
        return _refuse("; ".join(str(problem) for problem in problems))
    try:
        return read_as(parameters, Passthrough, where=PASSTHROUGH_KIND)
    except ContractError as err:
        return _refuse(err.message)


def _refuse(message: str) -> Refusal:
    return refuse("passthrough-malformed", message)
