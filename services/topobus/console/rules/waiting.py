"""Which claims and pods wait, and why: of the stand-alone API and of a cluster's API server.

Each object changes some entries. A cluster's claims have no reason of their own for waiting, so
they show that of the pod that waits for them. Pure. Only what waits is remembered, and malformed
parts of an object are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from topobus.console.rules.node_drawing import View
from topobus.formats.messages.messages import ApiObject, entries_of

__all__ = ["WaitingList"]

CLAIM, POD = "ResourceClaim", "Pod"
_CONDITIONS = {CLAIM: ("Allocated",), POD: ("topobus.dev/Allocated", "PodScheduled")}
# Characters of a condition that are shown. A status may hold much more, and all pages hold it in
# memory.
_MOST_TEXT = 4000
_UNSEEN, _UNUSED = "not looked at yet", "no pod waits for it"


class _WaitingPod(Struct, frozen=True):
    view: View
    claims: frozenset[str]


class WaitingList:
    """The waiting objects. Keys are kind, namespace and name."""

    def __init__(self, *, is_of_cluster: bool = False) -> None:
        """Begin with an empty list.

        At a cluster's API server no component reconciles a claim that no pod uses. In the
        stand-alone API the controller does.
        """
        self._is_of_cluster = is_of_cluster
        self._claims: dict[tuple[str, str], View] = {}
        self._pods: dict[tuple[str, str], _WaitingPod] = {}

    def take(self, kind: str, namespace: str, name: str, api_object: ApiObject | None) -> dict[str, View | None]:
        """Store an object, or remove it with None.

        Returns the changed entries, None for one that no longer waits.

        >>> waiting = WaitingList()
        >>> claim = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "c"})
        >>> entry = waiting.take("ResourceClaim", "default", "c", claim)["resourceclaim/default/c"]
        >>> entry["reason"], waiting.take("ResourceClaim", "default", "c", None)
        ('not looked at yet', {'resourceclaim/default/c': None})
        """
        place = (namespace, name)
        if kind == CLAIM:
            view = (
                None
                if api_object is None or api_object.status.get("allocation")
                else _view(api_object, namespace, name)
            )
            if view is None:
                self._claims.pop(place, None)
            else:
                self._claims[place] = view
            return {_key(CLAIM, place): self._claim(place)}
        if kind != POD:
            return {}
        before = self._pods.pop(place, None)
        after = _waiting_pod(api_object, namespace, name) if api_object is not None else None
        if after is not None:
            self._pods[place] = after
        touched = (before.claims if before is not None else frozenset()) | (
            after.claims if after is not None else frozenset()
        )
        claims = {_key(CLAIM, (namespace, claim)): self._claim((namespace, claim)) for claim in sorted(touched)}
        return {_key(POD, place): after.view if after is not None else None, **claims}

    def clear(self) -> tuple[str, ...]:
        """Remove everything, because the store was lost. Returns the keys."""
        keys = (*(_key(CLAIM, place) for place in self._claims), *(_key(POD, place) for place in self._pods))
        self._claims.clear()
        self._pods.clear()
        return keys

    def _claim(self, place: tuple[str, str]) -> View | None:
        view = self._claims.get(place)
        if view is None or view["is_told"]:
            return view
        namespace, name = place
        users = [pod.view for (of, _), pod in sorted(self._pods.items()) if of == namespace and name in pod.claims]
        if not users:
            return {**view, "reason": _UNUSED} if self._is_of_cluster else view
        return {
            **view,
            "reason": users[0]["reason"],
            "message": users[0]["message"],
            "users": [f"pod {user['namespace']}/{user['name']}" for user in users],
        }


def _key(kind: str, place: tuple[str, str]) -> str:
    return f"{kind.lower()}/{place[0]}/{place[1]}"


def _waiting_pod(pod: ApiObject, namespace: str, name: str) -> _WaitingPod | None:
    if (
        pod.spec.get("nodeName")
        or pod.status.get("phase") in ("Succeeded", "Failed")
        or _condition(pod, "PodScheduled").get("status") == "True"
    ):
        return None
    return _WaitingPod(_view(pod, namespace, name), frozenset(_claims_of(pod)))


def _claims_of(pod: ApiObject) -> Iterable[str]:
    """Name the claims that a pod uses, including those made from templates."""
    for entry in (*entries_of(pod.spec.get("resourceClaims")), *entries_of(pod.status.get("resourceClaimStatuses"))):
        if isinstance(claim := entry.get("resourceClaimName"), str):
            yield claim


def _view(api_object: ApiObject, namespace: str, name: str) -> View:
    conditions = (_condition(api_object, kind) for kind in _CONDITIONS[api_object.kind])
    condition = next(
        (condition for condition in conditions if condition.get("reason") and condition.get("status") != "True"), None
    )
    fields = condition or {}
    return {
        "kind": "claim" if api_object.kind == CLAIM else "pod",
        "namespace": namespace or "default",
        "name": name,
        "reason": str(fields.get("reason") or _UNSEEN),
        "message": str(fields.get("message") or "")[:_MOST_TEXT],
        "since": str(api_object.metadata.get("creationTimestamp") or ""),
        "is_told": condition is not None,
        "users": [],
    }


def _condition(api_object: ApiObject, kind: str) -> Mapping[str, Any]:
    return next((entry for entry in entries_of(api_object.status.get("conditions")) if entry.get("type") == kind), {})
