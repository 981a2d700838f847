"""Tells for which devices an opaque configuration of our driver is.

One driver serves all classes, so its name does not tell. The parameters' own API group does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from topobus.formats.kubernetes.alignment_request import PARAMETERS_KIND, RESULT_KIND
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.values.dra_names import class_of_group

__all__ = ["is_for_class"]


def is_for_class(parameters: Mapping[str, Any], device_class: str, classes: Collection[str]) -> bool:
    """Say whether the service of a class gets parameters with its devices.

    Parameters of the API group of a class are for its devices alone. The others, a misspelt group
    among them, go to each device, whose service refuses what it does not know: parameters that no
    service gets would be ignored without a word. What a claim wishes of the controller, and the
    controller's answer, is for no device.

    Shapes: classes — those of the claim, which may have others than those that Topobus ships.

    >>> [is_for_class({"apiVersion": "nic.topobus.dev/v1", "kind": "Interface"}, name, ()) for name in ("nic", "gpu")]
    [True, False]
    >>> is_for_class({"apiVersion": "nics.topobus.dev/v1", "kind": "Interface"}, "nic", ())
    True
    >>> [is_for_class({"kind": kind}, "gpu", ()) for kind in ("SharingParameters", "AlignmentParameters")]
    [True, False]
    """
    named = class_of_group(str(parameters.get("apiVersion", "")).partition("/")[0])
    is_anothers = named != device_class and (named in DEVICE_SERVICES or named in classes)
    return not is_anothers and parameters.get("kind") not in (PARAMETERS_KIND, RESULT_KIND)
