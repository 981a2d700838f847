"""What kustomize makes of a folder below deploy, for tests that ask no cluster: resources, then
JSON patches (RFC 6902) and deletions, which are all that ours have.

`tests/unit/docs/test_kustomize.py` holds it against kubectl.
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DEPLOY", "Manifest", "built", "container_of", "environment_of", "load", "named", "pod_of", "read"]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
Manifest = dict[str, Any]


def load(path: Path) -> list[Manifest]:
    """Read the objects of a file."""
    return [manifest for manifest in read(path.read_text(encoding="utf-8")) if manifest]


def read(text: str) -> list[Any]:
    """Read the objects of a text."""
    documents: list[Any] = pickle.loads(_parsed(text))
    return documents


# What is made once is kept as bytes: to read them takes a tenth of what a copy of the objects
# takes, and each caller may change what it gets.
@cache
def _parsed(text: str) -> bytes:
    # The loader in C, where PyYAML has it, takes a tenth of the time.
    return pickle.dumps(list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))))


def built(folder: Path | str) -> list[Manifest]:
    """Give the objects of a kustomization; a folder's name is one below deploy.

    Each patch must find its object, each operation what it changes.
    """
    manifests: list[Manifest] = pickle.loads(_made(DEPLOY / folder))
    return manifests


@cache
def _made(here: Path) -> bytes:
    (kustomization,) = load(here / "kustomization.yaml")
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        manifests += built((here / resource).resolve()) if (here / resource).is_dir() else load(here / resource)
    for patch in kustomization.get("patches", ()):
        target = named(manifests, patch["target"]["kind"], patch["target"]["name"])
        (operations,) = read(patch["patch"])
        if isinstance(operations, dict):
            assert operations["$patch"] == "delete", "of strategic merge patches deletions alone are done here"
            assert (operations["kind"], operations["metadata"]["name"]) == (target["kind"], target["metadata"]["name"])
            manifests.remove(target)
        else:
            for operation in operations:
                _apply(target, operation)
    return pickle.dumps(manifests)


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Give the one object of a kind and name."""
    (manifest,) = [it for it in manifests if (it["kind"], it["metadata"]["name"]) == (kind, name)]
    return manifest


def pod_of(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Give the pod that a workload makes."""
    pod: Manifest = named(manifests, kind, name)["spec"]["template"]["spec"]
    return pod


def container_of(pod: Manifest, name: str) -> Manifest:
    """Give a pod's container; it is there once."""
    container: Manifest
    (container,) = [it for it in pod["containers"] if it["name"] == name]
    return container


def environment_of(manifests: list[Manifest], container: Manifest) -> dict[str, str]:
    """Give the settings of ours that a container gets; what the cluster fills in is `worker-1`."""
    given: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        given |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", ()):
        given[variable["name"]] = variable.get("value", "worker-1")
    return {name: value for name, value in given.items() if name.startswith("TOPOBUS_")}


def _apply(manifest: Manifest, operation: Manifest) -> None:
    *parents, last = operation["path"].strip("/").split("/")
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    key: Any = int(last) if isinstance(place, list) and last != "-" else last
    match operation["op"]:
        case "test":
            assert place[key] == operation["value"], operation
        case "remove":
            del place[key]
        case "add" if isinstance(place, list):
            place.insert(len(place) if key == "-" else key, operation["value"])
        case "add":
            # JSON patch would replace what is there in silence.
            assert key not in place, operation
            place[key] = operation["value"]
        case "replace":
            assert isinstance(place, list) or key in place, operation
            place[key] = operation["value"]
        case other:
            raise AssertionError(f"operation {other} is not done here")
