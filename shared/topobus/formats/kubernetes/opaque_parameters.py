"""Tells for which devices an opaque configuration of our driver is.

One driver serves all classes, so its name does not tell. The parameters' own API group does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.formats.kubernetes.alignment_request import PARAMETERS_KIND, RESULT_KIND
from topobus.values.dra_names import class_of_group

__all__ = ["is_for_class"]


def is_for_class(parameters: Mapping[str, Any], device_class: str) -> bool:
    """Say whether the service of a class gets parameters with its devices.

    Parameters of the API group of a class are for its devices alone. The others go to each device,
    whose service refuses what it does not know. What a claim wishes of the controller, and the
    controller's answer, is for no device.

    >>> [is_for_class({"apiVersion": "nic.topobus.dev/v1", "kind": "Interface"}, name) for name in ("nic", "gpu")]
    [True, False]
    >>> [is_for_class({"kind": kind}, "gpu") for kind in ("SharingParameters", "AlignmentParameters")]
    [True, False]
    """
    group = str(parameters.get("apiVersion", "")).partition("/")[0]
    return parameters.get("kind") not in (PARAMETERS_KIND, RESULT_KIND) and class_of_group(group) in (
        device_class,
        None,
    )
