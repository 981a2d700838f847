"""The simulator's kubelet_internal_checkpoint in kubelet's format: the holders of devices and the
plugins' Allocate answers.

Pure. A restarted kubelet continues from the file: a container that holds devices gets the stored
answer, and Allocate is not called again. The checksum is 0 here, unlike kubelet's.
Source: kubelet 1.36 cm/devicemanager/checkpoint.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from msgspec import Struct

__all__ = ["CHECKPOINT_FILE", "Holding", "Remembered", "read_checkpoint", "write_checkpoint"]

CHECKPOINT_FILE = "kubelet_internal_checkpoint"


class Holding(Struct, frozen=True, kw_only=True):
    """Devices of one resource that one container has."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    numa_node: int = -1
    """kubelet files the ids under a NUMA node; -1: none is known."""
    response: bytes = b""
    """The plugin's ContainerAllocateResponse; empty: not answered yet."""


class Remembered(Struct, frozen=True, kw_only=True):
    """The content of a checkpoint."""

    holdings: tuple[Holding, ...] = ()
    registered: dict[str, tuple[str, ...]] = {}
    """Resource to the healthy ids when it was written; after a start
    they have to be listed again."""


def write_checkpoint(holdings: tuple[Holding, ...], registered: Mapping[str, tuple[str, ...]]) -> bytes:
    """Render a checkpoint.

    >>> read_checkpoint(write_checkpoint((Holding(pod_uid="u", container="c", resource="r/x", ids=("a",)),), {})).holdings[0].ids
    ('a',)
    """  # noqa: E501
    entries = [
        {
            "PodUID": holding.pod_uid,
            "ContainerName": holding.container,
            "ResourceName": holding.resource,
            "DeviceIDs": {str(holding.numa_node): list(holding.ids)},
            "AllocResp": base64.b64encode(holding.response).decode(),
        }
        for holding in holdings
    ]
    data = {
        "PodDeviceEntries": entries,
        "RegisteredDevices": {name: list(ids) for name, ids in sorted(registered.items())},
    }
    return json.dumps({"Data": data, "Checksum": 0}).encode()


def read_checkpoint(data: bytes) -> Remembered:
    """Read a checkpoint, also one of a real kubelet.

    Errors: raises ValueError for a malformed one: kubelet does not start then either.
    """
    try:
        body = json.loads(data)["Data"]
        holdings = tuple(
            Holding(
                pod_uid=pod_device_entry["PodUID"],
                container=pod_device_entry["ContainerName"],
                resource=pod_device_entry["ResourceName"],
                ids=tuple(sorted(device for ids in pod_device_entry["DeviceIDs"].values() for device in ids)),
                numa_node=min((int(node) for node in pod_device_entry["DeviceIDs"]), default=-1),
                response=base64.b64decode(pod_device_entry.get("AllocResp") or ""),
            )
            for pod_device_entry in body.get("PodDeviceEntries") or ()
        )
        registered = {name: tuple(ids or ()) for name, ids in (body.get("RegisteredDevices") or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(
            f"{CHECKPOINT_FILE} cannot be read: {type(err).__name__}: {err}; remove it to start without it"
        ) from err
    return Remembered(holdings=holdings, registered=registered)
