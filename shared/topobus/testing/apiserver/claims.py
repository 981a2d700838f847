"""kube-controller-manager's work for claims, in the API server simulator: creates a claim for each
template that a pod names, and deletes it with the pod.

New claims are owned by their pods, whose status names them. Deleted pods lose their reservations.
Source: k8s.io/kubernetes pkg/controller/resourceclaim, 1.36.
"""

from __future__ import annotations

import copy

from topobus.testing.apiserver.store import Store
from topobus.testing.apiserver.values import ApiError, Object, Resource

__all__ = ["release_claims", "serve_templates"]

_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
_FINISHED = ("Succeeded", "Failed")


def serve_templates(store: Store, pods: Resource, templates: Resource, claims: Resource) -> list[str]:
    """Make the claims that pods need of templates and do not have yet, and return their names.

    A missing template is waited for.
    """
    made: list[str] = []
    for pod in store.select(pods):
        metadata = pod["metadata"]
        namespace = metadata["namespace"]
        names = {
            resource_claim_status["name"]
            for resource_claim_status in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        }
        wanted = [
            (resource_claim["name"], resource_claim["resourceClaimTemplateName"])
            for resource_claim in (pod.get("spec") or {}).get("resourceClaims") or ()
            if resource_claim.get("resourceClaimTemplateName") and resource_claim["name"] not in names
        ]
        if metadata.get("deletionTimestamp") or not wanted:
            continue
        statuses: list[Object] = list((pod.get("status") or {}).get("resourceClaimStatuses") or ())
        for name, template_name in wanted:
            try:
                template = store.get(templates, namespace, template_name)
            except ApiError:
                continue
            claim = store.create(claims, namespace, _claim_of(pod, name, template))
            made.append(claim["metadata"]["name"])
            statuses.append({"name": name, "resourceClaimName": claim["metadata"]["name"]})
        status = {**(pod.get("status") or {}), "resourceClaimStatuses": statuses}
        store.update(pods, namespace, metadata["name"], {"status": status}, subresource="status")
    return made


def release_claims(store: Store, pods: Resource, claims: Resource) -> list[str]:
    """Remove the reservations of pods that have ended or are gone from their claims, and with the
    last one the allocation.

    Return the names of these claims.
    """
    living = {
        api_object["metadata"]["uid"]
        for api_object in store.select(pods)
        if (api_object.get("status") or {}).get("phase") not in _FINISHED
    }
    released: list[str] = []
    for claim in store.select(claims):
        status = claim.get("status") or {}
        reserved = status.get("reservedFor") or ()
        kept = [user for user in reserved if user.get("resource") != "pods" or user.get("uid") in living]
        if len(kept) == len(reserved):
            continue
        after = {key: value for key, value in status.items() if key != "reservedFor"}
        if kept:
            after["reservedFor"] = kept
        else:
            after.pop("allocation", None)
        name, namespace = claim["metadata"]["name"], claim["metadata"]["namespace"]
        store.update(claims, namespace, name, {"status": after}, subresource="status")
        released.append(name)
    return released


def _claim_of(pod: Object, name: str, template: Object) -> Object:
    metadata = pod["metadata"]
    spec = copy.deepcopy(template["spec"])
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
    given = spec.get("metadata") or {}
    return {
        "metadata": {
            **{key: given[key] for key in ("labels",) if key in given},
            "annotations": {**(given.get("annotations") or {}), _ANNOTATION: name},
            "generateName": f"{metadata['name']}-{name}-",
            "ownerReferences": [{**owner, "blockOwnerDeletion": True}],
        },
        "spec": spec.get("spec") or {},
    }
