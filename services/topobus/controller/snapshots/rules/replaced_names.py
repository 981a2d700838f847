"""A snapshot whose names were replaced, for people who may not pass theirs on.

Replaced are the names and uids of all objects but classes, those of owners, containers, volumes and
pools, and people's own values of labels and taints; the same name becomes the same one everywhere.
Their order stays, since it decides between equals. Annotations, messages, the server's address and
all fields that no answer reads are left out.

These stay: drivers, their devices with attributes and amounts, which the CEL expressions of classes
and claims read; names of device classes, of resources, and of requests within claims; keys of
labels and taints, whole numbers among their values, and what Kubernetes' own labels say of zones and
kinds of nodes; names of schedulers, of their gates, and of what provides volumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from topobus.controller.snapshots.rules.shapes import SHAPES, in_todays_version, without_nulls
from topobus.controller.snapshots.rules.snapshot import Server, Snapshot
from topobus.engine.scheduling.kube_rules.volumes import READ_ANNOTATIONS
from topobus.formats.kubernetes.shape import only_fields

__all__ = ["replace_names"]

# Fields whose text, or each text of the list in them, is a name.
_NAMES = frozenset(
    {
        "claimName",
        "name",
        "namespace",
        "namespaces",
        "nodeName",
        "nominatedNodeName",
        "pool",
        "resourceClaimName",
        "resourceClaimTemplateName",
        "storageClassName",
        "uid",
        "volumeAttributesClassName",
        "volumeHandle",
        "volumeName",
    }
)
# Within these, `name` is what a driver or the writer of a claim or a pod calls a part.
_PARTS = frozenset(
    {"claims", "devices", "drivers", "resourceClaimStatuses", "resourceClaims", "schedulingGates", "sharedCounters"}
)
# Their keys are names of resources, counters and attributes, and nothing in them is replaced.
_KEPT = frozenset({"allocatable", "attributes", "capacity", "counters", "hard", "limits", "overhead", "used"})
_LABELS = frozenset({"labels", "matchLabels", "nodeSelector"})
# The domains of labels that say what a node is: its zone, kind of machine.
_OF_NODES = ("kubernetes.io", "topology.kubernetes.io", "node.kubernetes.io", "beta.kubernetes.io")
# Among those, but a name of its own: it may differ from the Node's.
_HOST_NAME = "kubernetes.io/hostname"
_LEFT_OUT = "left out, for it may have names"


def replace_names(snapshot: Snapshot) -> tuple[Snapshot, dict[str, str]]:
    """Replace the names of a snapshot. Returns it, and what each new name stands for.

    Shapes: snapshot — without wrong types.
    Errors: raises ContractError for an object that cannot be read.
    """
    items = [_read_part(plain) for plain in snapshot.items if plain["kind"] in SHAPES]
    names: set[str] = set()
    values: set[str] = set()

    def note(name: str) -> str:
        names.add(name)
        return name

    def note_value(key: str, value: str) -> str:
        if not _is_of_nodes(key):
            values.add(value)
        return value

    for plain in items:
        _walked(plain, note, note_value, is_part=plain["kind"] == "DeviceClass")
    order = sorted(name for name in names | values if name and not _is_number(name))
    new = {name: f"name-{number:0{len(str(len(order)))}}" for number, name in enumerate(order, start=1)}

    def name_of(name: str) -> str:
        return new.get(name, name)

    new |= {f"{pod}-{volume}": f"{name_of(pod)}-{name_of(volume)}" for pod, volume in _made_volume_claims(items)}

    def value_of(key: str, value: str) -> str:
        return value if _is_of_nodes(key) and value not in names else name_of(value)

    replaced = tuple(_walked(plain, name_of, value_of, is_part=plain["kind"] == "DeviceClass") for plain in items)
    server = Server(version=snapshot.server.version, gates=snapshot.server.gates, gates_from=snapshot.server.gates_from)
    return msgspec.structs.replace(snapshot, server=server, items=replaced), {each: name for name, each in new.items()}


def _read_part(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Take what is read of an object."""
    whole = without_nulls(dict(in_todays_version(plain)))
    kept = only_fields(whole, SHAPES[plain["kind"]])
    annotations = kept["metadata"].get("annotations") or {}
    kept["metadata"]["annotations"] = {key: value for key, value in annotations.items() if key in READ_ANNOTATIONS}
    return {"apiVersion": whole.get("apiVersion", ""), "kind": whole["kind"], **kept}


def _made_volume_claims(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """List the pods and their volumes for which a cluster makes claims that are named after both."""
    return [
        (plain["metadata"]["name"], volume["name"])
        for plain in items
        if plain["kind"] == "Pod"
        for volume in plain.get("spec", {}).get("volumes", ())
        if "ephemeral" in volume
    ]


def _walked(
    value: Any, name_of: Callable[[str], str], value_of: Callable[[str, str], str], *, is_part: bool = False
) -> Any:
    """Replace the names and the values of labels in a value.

    Shapes: is_part — `name` is no name of an object here.
    """
    if isinstance(value, list):
        return [_walked(inner, name_of, value_of, is_part=is_part) for inner in value]
    if not isinstance(value, dict):
        return value
    walked = {}
    for key, inner in value.items():
        if key == "config":
            # Of a driver's own form, and no answer reads it.
            continue
        if key in _KEPT or (key == "requests" and isinstance(inner, dict)):
            walked[key] = inner
        elif key in _LABELS and all(isinstance(each, str) for each in inner.values()):
            walked[key] = {label: value_of(label, each) for label, each in inner.items()}
        elif key == "annotations":
            # A node, a class of volumes, or `yes`.
            walked[key] = {annotation: value_of(annotation, each) for annotation, each in inner.items()}
        elif key in ("value", "values") and isinstance(value.get("key"), str):
            label = value["key"]
            walked[key] = (
                value_of(label, inner) if isinstance(inner, str) else [value_of(label, each) for each in inner]
            )
        elif key == "message":
            walked[key] = _LEFT_OUT if inner else ""
        elif key in _NAMES and not (key == "name" and is_part):
            if isinstance(inner, str):
                walked[key] = name_of(inner)
            elif isinstance(inner, list):
                walked[key] = [name_of(each) for each in inner]
            else:
                walked[key] = _walked(inner, name_of, value_of)
        else:
            walked[key] = _walked(inner, name_of, value_of, is_part=is_part or key in _PARTS)
    return walked


def _is_of_nodes(label: str) -> bool:
    return (label.partition("/")[0] in _OF_NODES and label != _HOST_NAME) or label in READ_ANNOTATIONS


def _is_number(text: str) -> bool:
    """Say whether `Gt` and `Lt` compare a label's value as a number."""
    return text.removeprefix("-").isdecimal()
