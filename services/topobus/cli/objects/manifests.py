"""Reads manifest files from disk or standard input, and converts them to requests to a node.

The parser, strict and with line numbers, is in `topobus.kubernetes.api`; this module handles the file, its errors and a pod's identity.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from topobus.cli.exits import InputError, UsageError
from topobus.cli.objects.input_files import MANIFEST_BYTES, read_text, shown_name
from topobus.contracts.messages import ApiObject
from topobus.domain.errors import ContractError
from topobus.domain.request import PodRequest
from topobus.kubernetes.api.manifest import parse_manifest
from topobus.kubernetes.api.objects import metadata_of
from topobus.kubernetes.api.pod import pod_request

__all__ = [
    "NamespacedName",
    "manifest_files",
    "parse_namespaced",
    "placed_uid",
    "read_folder",
    "read_objects",
    "read_pod",
    "read_stored_pod",
    "request_of",
]

NamespacedName = tuple[str, str]

_MANIFESTS = (".json", ".yaml", ".yml")

# What the parser says of a kind that there is not.
_KINDS_WANTED = re.compile(r"(kind: got '[^']*', wanted) one of (?:[A-Z]\w*, )*[A-Z]\w*")

# A pod of the stand-alone tool has no API server to give it a uid: the same name is the same pod, on every machine and at every run.
_POD_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "pods.topobus.dev")


def read_objects(path: Path, *, has_nodes: bool = False) -> tuple[ApiObject, ...]:
    """Read all objects of a manifest; `-` is standard input. Nodes are taken only where they are of use.

    Errors: raises InputError for a file that cannot be read, ContractError for one that is no manifest.
    """
    text = read_text(path, limit_bytes=MANIFEST_BYTES, next_step="examples/pods and examples/claims have manifests to start from")
    return parse_manifest(text, where=shown_name(path), has_nodes=has_nodes)


def read_pod(path: Path) -> PodRequest:
    """Read what the one pod of a manifest asks.

    Errors: raises ContractError when the file holds no pod or several.
    """
    return request_of(read_stored_pod(path))


def read_stored_pod(path: Path) -> ApiObject:
    """Read the one pod of a manifest.

    Errors: raises ContractError when the file holds no pod or several.
    """
    try:
        objects = read_objects(path)
    except ContractError as err:
        # Of the kinds that a manifest may have, this is the one of use here.
        raise ContractError(_KINDS_WANTED.sub(r"\1 a Pod", err.message), next_step=err.next_step) from err
    pods = [api_object for api_object in objects if api_object.kind == "Pod"]
    if len(pods) != 1:
        kinds = ", ".join(api_object.kind for api_object in objects)
        raise ContractError(f"{path}: wanted one Pod, got {len(pods)} (the file has: {kinds})", next_step="give a file with one pod")
    return pods[0]


def manifest_files(paths: Iterable[Path], *, is_recursive: bool = False) -> list[Path]:
    """List the files that are meant: those named, and of a folder every manifest in it, by name; those of folders within it only when it is said.

    Errors: raises InputError for a folder without a manifest.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = _manifests_in(path, is_recursive=is_recursive)
        if not inside:
            deeper = _manifests_in(path, is_recursive=True)
            next_step = "add -R for the folders within it" if deeper else "examples/pods and examples/claims have manifests to start from"
            raise InputError(f"{path} holds no manifest ({', '.join(_MANIFESTS)})", next_step=next_step)
        files += inside
    return files


def _manifests_in(folder: Path, *, is_recursive: bool = False) -> list[Path]:
    return sorted(
        path for path in (folder.rglob("*") if is_recursive else folder.iterdir()) if path.suffix in _MANIFESTS and path.is_file()
    )


def read_folder(path: Path) -> tuple[ApiObject, ...]:
    """Read all objects of a manifest, or of every manifest in a folder, in the order of file names and then as written.

    Errors: raises InputError when there is no such file or folder, or no pod and no claim in it.
    """
    objects = tuple(api_object for file in (_manifests_in(path) if path.is_dir() else [path]) for api_object in read_objects(file))
    if not any(api_object.kind in ("Pod", "ResourceClaim") for api_object in objects):
        raise InputError(
            f"{path} holds no pod", next_step=f"give a folder with manifests of pods ({', '.join(_MANIFESTS)}), such as examples/pods"
        )
    return objects


def request_of(pod: ApiObject) -> PodRequest:
    """Read what a pod asks; one without a uid gets the same one each time."""
    metadata = metadata_of(pod)
    return pod_request(pod, uid=metadata.uid or placed_uid(metadata.namespace or "default", metadata.name))


def placed_uid(namespace: str, name: str) -> str:
    """Give the uid under which `topobus place` holds for a pod that has none of its own."""
    return str(uuid.uuid5(_POD_SPACE, f"{namespace}/{name}"))


def parse_namespaced(text: str) -> NamespacedName:
    """Read `NAMESPACE/NAME`, or `NAME` in namespace default.

    >>> parse_namespaced("default/trainer"), parse_namespaced("trainer")
    (('default', 'trainer'), ('default', 'trainer'))
    """
    parts = text.split("/")
    if len(parts) > 2 or not all(parts):
        raise UsageError(f"cannot read {text!r} as a name", next_step="write NAMESPACE/NAME, such as default/trainer")
    return (parts[0], parts[1]) if len(parts) == 2 else ("default", parts[0])
