"""What a claim asks for besides its GPUs: GPUDirect Storage, GDRCopy, IMEX channels.

It is read from the claim's opaque configuration, once for all GPUs of the claim:

    {"apiVersion": "gpu.topobus.dev/v1", "kind": "Access", "gpuDirectStorage": true,
     "gdrCopy": true, "imexChannels": [0]}

Source: names of the nodes: nvidia-fs (GPUDirect Storage), gdrdrv (GDRCopy), IMEX service guide
("channels").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from topobus.formats.first_read import ready
from topobus.sysfs.tree import Tree
from topobus.values.outcome import Refusal, refuse

__all__ = ["ACCESS_KIND", "ACCESS_VERSION", "Access", "access_nodes", "read_access"]

ACCESS_VERSION = "gpu.topobus.dev/v1"
ACCESS_KIND = "Access"

_CHANNELS = "nvidia-caps-imex-channels"
# A channel is the minor number of its node, which has 20 bits.
_LARGEST_CHANNEL = (1 << 20) - 1
_CHANNELS_LIMIT = 64


class Access(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a claim asks for."""

    gpu_direct_storage: bool = False
    gdr_copy: bool = False
    imex_channels: tuple[int, ...] = ()


def read_access(configurations: Sequence[Sequence[Mapping[str, Any]]]) -> Access | Refusal:
    """Join what the configurations of a claim's GPUs ask for.

    The last configuration of a GPU counts, because claims come after classes.

    Errors: raises nothing; returns Refusal code access-malformed with the field.
    >>> read_access([[{"apiVersion": "gpu.topobus.dev/v1", "kind": "Access", "imexChannels": [0]}]]).imex_channels
    (0,)
    """
    wanted = [
        entries[-1]
        for config in configurations
        if (entries := [entry for entry in config if entry.get("kind") == ACCESS_KIND])
    ]
    accesses: list[Access] = []
    for entry in wanted:
        if entry.get("apiVersion") != ACCESS_VERSION:
            return refuse(
                "access-malformed",
                f"{ACCESS_KIND}.apiVersion is {entry.get('apiVersion')!r}, wanted {ACCESS_VERSION!r}",
            )
        try:
            access = msgspec.convert(
                {key: value for key, value in entry.items() if key not in ("apiVersion", "kind")}, ready(Access)
            )
        except msgspec.ValidationError as err:
            return refuse("access-malformed", f"{ACCESS_KIND}: {err}")
        if len(access.imex_channels) > _CHANNELS_LIMIT or not all(
            0 <= channel <= _LARGEST_CHANNEL for channel in access.imex_channels
        ):
            text = (
                f"{ACCESS_KIND}.imexChannels is {list(access.imex_channels[:8])}, wanted at most "
                f"{_CHANNELS_LIMIT} numbers from 0 to {_LARGEST_CHANNEL}"
            )
            return refuse("access-malformed", text)
        accesses.append(access)
    return Access(
        gpu_direct_storage=any(access.gpu_direct_storage for access in accesses),
        gdr_copy=any(access.gdr_copy for access in accesses),
        imex_channels=tuple(sorted({channel for access in accesses for channel in access.imex_channels})),
    )


def access_nodes(tree: Tree, access: Access) -> tuple[str, ...] | Refusal:
    """Find the device nodes, relative to dev.

    A node that the host lacks is refused, because the container could not use what the claim
    promises.

    Errors: returns Refusal code access-unavailable with the missing node; raises HardwareError when
    dev cannot be listed.
    """
    names: list[str] = []
    if access.gpu_direct_storage:
        names += [name for name in tree.names("dev") if name.startswith("nvidia-fs")] or ["nvidia-fs0"]
    if access.gdr_copy:
        names.append("gdrdrv")
    names += [f"{_CHANNELS}/channel{channel}" for channel in access.imex_channels]
    missing = tuple(f"/dev/{name}" for name in names if not tree.exists(f"dev/{name}"))
    if missing:
        text = (
            f"the host has no {', '.join(missing)}: load nvidia-fs for GPUDirect Storage, gdrdrv for GDRCopy; "
            "IMEX channels are made by nvidia-modprobe"
        )
        return refuse("access-unavailable", text, missing=missing)
    return tuple(names)
