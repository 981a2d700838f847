"""Kubernetes' own wire shapes: manifests read strictly, resource.k8s.io/v1 as structs, pods as
requests.

`parse_manifest` is defined in `topobus.formats.kubernetes.manifest` and also found here. It alone
needs pyyaml, which node services do not carry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topobus.formats.kubernetes.objects import (
    admit,
    ask_deletion,
    metadata_of,
    name_of,
    object_parts,
)
from topobus.formats.kubernetes.pod import pod_request
from topobus.formats.kubernetes.shape import Problem, read_as

if TYPE_CHECKING:
    from topobus.formats.kubernetes.manifest import parse_manifest

__all__ = [
    "Problem",
    "admit",
    "ask_deletion",
    "metadata_of",
    "name_of",
    "object_parts",
    "parse_manifest",
    "pod_request",
    "read_as",
]


def __getattr__(name: str) -> Any:
    """Import `parse_manifest` at its first use."""
    if name == "parse_manifest":
        from topobus.formats.kubernetes.manifest import parse_manifest

        return parse_manifest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
