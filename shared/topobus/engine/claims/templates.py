"""Claims made from templates for pods, and claims of deleted pods.

Names and uids follow from the pod's, so two replicas make the same claim once. Source: Kubernetes'
resourceclaim controller (pkg/controller/resourceclaim), whose generated names are random.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from topobus.engine.claims.extended_resources import extended_claim_name
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.objects import admit, metadata_of, name_of, pod_as_owner
from topobus.formats.kubernetes.pod import PodSpec
from topobus.formats.kubernetes.resource import ClaimTemplateSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

__all__ = [
    "POD_CLAIM_NAME",
    "WantedClaim",
    "claim_from_template",
    "claim_names",
    "owner_pod_uid",
    "wanted_claims",
    "with_claim_names",
]

POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


class WantedClaim(NamedTuple):
    """A claim to be made for a pod from a template."""

    entry: str
    """The name under which the pod knows it."""
    template: str
    name: str


def wanted_claims(pod: ApiObject) -> tuple[WantedClaim, ...]:
    """List the claims to be made for a pod.

    Errors: raises ContractError for a pod that cannot be read.
    """
    metadata = metadata_of(pod)
    spec = read_as(pod.spec, PodSpec, where=f"{name_of(pod)}: spec")
    return tuple(
        WantedClaim(
            resource_claim.name,
            resource_claim.template_name,
            _claim_name(metadata.name, resource_claim.name, metadata.uid),
        )
        for resource_claim in spec.resource_claims
        if resource_claim.template_name
    )


def claim_names(pod: ApiObject) -> tuple[str, ...]:
    """List all claims of a pod: those that it names, and those made for it, the one for its
    extended resources last.

    Errors: raises ContractError for a pod that cannot be read.
    """
    spec = read_as(pod.spec, PodSpec, where=f"{name_of(pod)}: spec")
    made = {wanted_claim.entry: wanted_claim.name for wanted_claim in wanted_claims(pod)}
    names = (resource_claim.claim_name or made.get(resource_claim.name, "") for resource_claim in spec.resource_claims)
    return tuple(name for name in (*names, extended_claim_name(pod)) if name)


def claim_from_template(pod: ApiObject, wanted: WantedClaim, template: ApiObject, *, now: str) -> ApiObject:
    """Make the claim: the template's spec, labels and annotations, owned by the pod.

    Errors: raises ContractError for a template that cannot be read.
    """
    metadata = metadata_of(pod)
    where = f"{name_of(template)}: spec"
    wanted_metadata = (
        read_as(template.spec, classic.ClaimTemplateSpec, where=where).metadata
        if classic.is_classic(template)
        else read_as(template.spec, ClaimTemplateSpec, where=where).metadata
    )
    labels, annotations = (
        _texts(wanted_metadata.get(part), f"{where}.metadata.{part}") for part in ("labels", "annotations")
    )
    made = ApiObject(
        api_version=template.api_version,
        kind="ResourceClaim",
        metadata={
            "name": wanted.name,
            "namespace": metadata.namespace or "default",
            "ownerReferences": [pod_as_owner(metadata)],
            "annotations": {**annotations, POD_CLAIM_NAME: wanted.entry},
            **({"labels": labels} if labels else {}),
        },
        spec=template.spec.get("spec") or {},
    )
    return admit(made, uid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{metadata.uid}/{wanted.entry}")), now=now)


def with_claim_names(pod: ApiObject, wanted: tuple[WantedClaim, ...]) -> ApiObject:
    """Write the names of the pod's claims into its status."""
    statuses = [{"name": wanted_claim.entry, "resourceClaimName": wanted_claim.name} for wanted_claim in wanted]
    return msgspec.structs.replace(pod, status={**pod.status, "resourceClaimStatuses": statuses}) if statuses else pod


def owner_pod_uid(claim: ApiObject) -> str | None:
    """Return the uid of the pod that a claim was made for. None for a claim without such an
    owner.
    """
    for owner_reference in metadata_of(claim).owner_references:
        if (
            owner_reference.get("kind") == "Pod"
            and owner_reference.get("controller")
            and isinstance(owner_reference.get("uid"), str)
        ):
            return str(owner_reference["uid"])
    return None


def _claim_name(pod: str, entry: str, pod_uid: str) -> str:
    """Name a claim after its pod.

    The digest distinguishes pods of one name, and leaves room where names are long.
    """
    digest = hashlib.sha256(f"{pod_uid}/{entry}".encode()).hexdigest()[:8]
    return f"{f'{pod}-{entry}'[:54].rstrip('-.')}-{digest}"


def _texts(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise ContractError(f"{where}: wanted texts by name")
    return dict(value)
