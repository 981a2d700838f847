"""Reads from a claim which pods it is reserved for. Pure. An unreadable entry names no pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.formats.messages.messages import ApiObject
from topobus.values.names import is_dns_label, is_dns_subdomain
from topobus.values.request import Owner, OwnerKind

__all__ = ["pod_claim_name", "pods_of", "users_of"]

# Written by kube-controller-manager (k8s.io/api/resource/v1, PodResourceClaimAnnotation).
_POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
# The API's limit on reservations of a claim (resource.k8s.io/v1, ResourceClaimReservedForMaxSize).
_MOST_USERS = 256


def pods_of(claim: ApiObject) -> tuple[str, ...]:
    """List the uids of the pods that a claim is reserved for, sorted.

    An entry that cannot be read names no pod.

    >>> pods_of(ApiObject(api_version="v1", kind="ResourceClaim", metadata={}, status={"reservedFor": [{"resource": "pods", "name": "a", "uid": "u"}]}))
    ('u',)
    """  # noqa: E501
    uids = [consumer.get("uid") for consumer in _consuming_pods(claim)]
    return tuple(sorted({uid for uid in uids if isinstance(uid, str) and uid}))


def users_of(claim: ApiObject, namespace: str) -> tuple[Owner, ...]:
    """List the pods that a claim is reserved for, sorted by name.

    An entry whose name cannot be read is skipped.

    >>> users_of(ApiObject(api_version="v1", kind="ResourceClaim", metadata={}, status={"reservedFor": [{"resource": "pods", "name": "a", "uid": "u"}]}), "n")[0].key
    'pod/n/a/u'
    """  # noqa: E501
    users: dict[str, Owner] = {}
    for consumer in _consuming_pods(claim):
        name, uid = consumer.get("name"), consumer.get("uid")
        if isinstance(name, str) and is_dns_subdomain(name):
            users[name] = Owner(
                kind=OwnerKind.POD, namespace=namespace, name=name, uid=uid if isinstance(uid, str) else ""
            )
    return tuple(users[name] for name in sorted(users))[:_MOST_USERS]


def _consuming_pods(claim: ApiObject) -> list[Mapping[str, Any]]:
    reserved_for = claim.status.get("reservedFor")
    consumers = (
        [consumer for consumer in reserved_for if isinstance(consumer, Mapping)]
        if isinstance(reserved_for, list)
        else []
    )
    return [consumer for consumer in consumers if consumer.get("resource") == "pods" and not consumer.get("apiGroup")]


def pod_claim_name(claim: ApiObject) -> str:
    """Read the name by which a pod's spec refers to a claim made from a template.

    Empty when the annotation holds no valid name, because any user may write it.
    """
    annotations = claim.metadata.get("annotations")
    name = annotations.get(_POD_CLAIM_ANNOTATION) if isinstance(annotations, Mapping) else None
    return name if isinstance(name, str) and is_dns_label(name) else ""
