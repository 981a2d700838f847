"""Resolves kinds of the stand-alone API as kubectl's users type them: singular, plural, short, with
or without the group.

Pure.
"""

from __future__ import annotations

from topobus.cli.exits import UsageError
from topobus.formats.kubernetes.objects import KINDS
from topobus.formats.kubernetes.shape import did_you_mean

__all__ = ["is_node_allocation_state", "kind_of", "plural_of", "read_target"]

# Short names of kubectl's users and our own.
_SHORT = {
    "po": "Pod",
    "claim": "ResourceClaim",
    "claims": "ResourceClaim",
    "class": "DeviceClass",
    "classes": "DeviceClass",
}
_SHORT |= {
    "template": "ResourceClaimTemplate",
    "templates": "ResourceClaimTemplate",
    "slice": "ResourceSlice",
    "slices": "ResourceSlice",
}
_SHORT |= {"taint": "DeviceTaintRule", "taints": "DeviceTaintRule"}


def plural_of(kind: str) -> str:
    """Write a kind as kubectl lists it.

    >>> plural_of("ResourceClaim"), plural_of("DeviceClass"), plural_of("DeviceClassParameters")
    ('resourceclaims', 'deviceclasses', 'deviceclassparameters')
    """
    name = kind.lower()
    if name.endswith("parameters"):
        return name
    return f"{name}es" if name.endswith("s") else f"{name}s"


def is_node_allocation_state(text: str) -> bool:
    """Say whether a kind is the view that classic drivers kept as objects, which only `get`
    supports.

    >>> is_node_allocation_state("nodeallocationstates"), is_node_allocation_state("NodeAllocationState.x.example"), is_node_allocation_state("nodes")
    (True, True, False)
    """  # noqa: E501
    return text.split(".")[0].lower() in ("nodeallocationstate", "nodeallocationstates")


def kind_of(text: str) -> str:
    """Resolve a typed kind.

    >>> kind_of("resourceclaims"), kind_of("claim"), kind_of("ResourceClaim"), kind_of("deviceclasses.resource.k8s.io")
    ('ResourceClaim', 'ResourceClaim', 'ResourceClaim', 'DeviceClass')

    Errors: raises UsageError that lists the kinds there are.
    """
    typed = text.split(".")[0].lower()
    kind_by_name = {name: kind for kind in KINDS for name in (kind.lower(), plural_of(kind))}
    kind_by_name |= {short: kind for short, kind in _SHORT.items() if kind in KINDS}
    known_kind = kind_by_name.get(typed)
    if known_kind is None and is_node_allocation_state(text):
        raise UsageError(
            "a node allocation state is no stored object but a view", next_step="see `topobus get nodeallocationstates`"
        )
    if known_kind is None:
        meant = did_you_mean(typed, sorted(kind_by_name))
        raise UsageError(
            f"there is no kind {text!r}{meant}",
            next_step=f"use one of {', '.join(sorted(plural_of(kind) for kind in KINDS))}",
        )
    return known_kind


def read_target(words: tuple[str, ...], *, verb: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read `KIND`, `KIND NAME…`, `KIND/NAME…` and `KIND,KIND` into kinds and names.

    Errors: raises UsageError.
    """
    if not words:
        plurals = ", ".join(sorted(plural_of(kind) for kind in KINDS))
        raise UsageError(f"wanted what to {verb}: KIND, KIND NAME or KIND/NAME", next_step=f"KIND is one of {plurals}")
    if all("/" in word for word in words):
        pairs = [word.split("/", 1) for word in words]
        kinds = tuple(dict.fromkeys(kind_of(kind) for kind, _ in pairs))
        if len(kinds) > 1 or not all(name for _, name in pairs):
            raise UsageError(
                f"cannot read {' '.join(words)!r}",
                next_step="write KIND/NAME with one kind, such as claim/fast claim/slow",
            )
        return kinds, tuple(name for _, name in pairs)
    kinds = tuple(dict.fromkeys(kind_of(part) for part in words[0].split(",") if part))
    if len(kinds) > 1 and len(words) > 1:
        raise UsageError(
            "a name needs one kind", next_step=f"write KIND NAME, such as {plural_of(kinds[0])} {words[1]}"
        )
    return kinds, words[1:]
