"""The claims of the fleet benchmark: typical requests of teams, in a fixed mixture, so that every
run has the same claims.

Of four claims two want a pair of GPUs under one PCIe root, one a GPU and a NIC under one PCIe root,
one a single GPU that a CEL selector names by its memory.
"""

from __future__ import annotations

from typing import Any

from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import group_of_class

__all__ = ["GPUS_OF_FOUR", "NAMESPACE", "claim_name", "fleet_claim"]

NAMESPACE = "fleet"
GPUS_OF_FOUR = 6
"""GPUs that four consecutive claims take together."""

_ROOT = "resource.kubernetes.io/pcieRoot"
_LARGE = "device.capacity['topobus.dev'].memory.compareTo(quantity('40Gi')) >= 0"


def claim_name(number: int) -> str:
    """Name the claim of a number. Names sort like numbers.

    >>> claim_name(12)
    'claim-000012'
    """
    return f"claim-{number:06d}"


def fleet_claim(number: int) -> ApiObject:
    """Make the claim of a number.

    >>> [request["name"] for request in fleet_claim(2).spec["devices"]["requests"]]
    ['gpu', 'nic']
    """
    name = claim_name(number)
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": f"uid-{number:06d}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    raw = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": _devices(number % 4)},
    }
    return decode(encode(raw), ApiObject, where=name)


def _devices(kind: int) -> dict[str, Any]:
    if kind == 2:
        requests = [_request("gpu", "gpu", 1), _request("nic", "nic", 1)]
    elif kind == 3:
        requests = [_request("gpu", "gpu", 1, _LARGE)]
    else:
        requests = [_request("gpus", "gpu", 2)]
    names = [request["name"] for request in requests]
    return {"requests": requests, "constraints": [{"requests": names, "matchAttribute": _ROOT}] if kind != 3 else []}


def _request(name: str, device_class: str, count: int, selector: str = "") -> dict[str, Any]:
    selectors = [{"cel": {"expression": selector}}] if selector else []
    return {
        "name": name,
        "exactly": {"deviceClassName": group_of_class(device_class), "count": count, "selectors": selectors},
    }
