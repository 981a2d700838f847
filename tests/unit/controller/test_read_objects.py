"""Claims and pods are read once a version, and a part that nobody can read is set aside alone."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.contracts.messages import ApiObject
from topobus.controller.claims.objects import Claim, Pod
from topobus.controller.claims.stored import Stored
from topobus.domain.errors import ContractError


def _claim(*, spec: Any = None, status: Any = None, annotations: dict[str, str] | None = None) -> ApiObject:
    devices = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.topobus.dev"}}]}}
    metadata = {"name": "c", "namespace": "ns", "uid": "u", "annotations": annotations or {}}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, spec=spec or devices, status=status or {})


def test_stored_claim_is_read_once_when_many_ask() -> None:
    """Whoever asks for a part of a stored claim gets the very value that the first one got."""
    stored = Stored(3, _claim())

    assert stored.claim.spec is stored.claim.spec
    assert stored.metadata is stored.claim.metadata
    assert (stored.uid, stored.shown, str(stored.claim.owner)) == ("u", "ResourceClaim ns/c", "claim ns/c")


def test_claim_names_itself_and_its_other_parts_go_on_when_one_part_is_unreadable() -> None:
    """A status that nobody can read raises an error with the claim's name each time; the spec is answered."""
    claim = Claim(_claim(status={"allocation": 5}))

    for _ in range(2):
        with pytest.raises(ContractError, match="ResourceClaim ns/c: status"):
            _ = claim.allocation

    assert claim.spec.devices.requests[0].name == "r"
    assert claim.attempt is None


def test_claim_refuses_an_attempt_when_somebody_wrote_something_else_there() -> None:
    """A note that is none is an error that names the annotation, not an absent note: an absent one would let the claim be allocated twice."""
    claim = Claim(_claim(annotations={"topobus.dev/attempt": "{"}))

    with pytest.raises(ContractError, match=r"annotation topobus\.dev/attempt"):
        _ = claim.attempt


def test_pod_tells_its_node_and_end_when_its_spec_is_unreadable() -> None:
    """What a pod's claims are cannot be told, where it is can: it is let go of like any other."""
    metadata = {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    pod = Pod(ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec={"nodeName": "n1", "resourceClaims": 5}))

    with pytest.raises(ContractError, match="Pod default/p: spec"):
        _ = pod.uses

    assert (pod.node, pod.is_deleting, pod.is_bound) == ("n1", True, False)
