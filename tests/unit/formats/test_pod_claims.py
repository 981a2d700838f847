"""A pod's claims in a manifest: what the API server would refuse is refused with its path."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.formats.kubernetes.pod import PodSpec
from topobus.formats.kubernetes.pod_claims import check_pod_claims
from topobus.formats.kubernetes.shape import read_as


def _spec(entries: list[dict[str, Any]], *uses: dict[str, Any]) -> PodSpec:
    container = {"name": "c", "resources": {"claims": list(uses)}}
    return read_as({"containers": [container], "resourceClaims": entries}, PodSpec, where="spec")


ONE = {"name": "a", "resourceClaimName": "fast"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (_spec([{"name": "a"}]), "spec.resourceClaims[0]: got 0 of resourceClaimName and resourceClaimTemplateName"),
        (_spec([ONE | {"resourceClaimTemplateName": "t"}]), "spec.resourceClaims[0]: got 2 of"),
        (_spec([ONE, ONE]), "spec.resourceClaims[1].name: 'a' is here twice"),
        (_spec([{"name": "A", "resourceClaimName": "fast"}]), "spec.resourceClaims[0].name: got 'A'"),
        (_spec([{"name": "a", "resourceClaimName": "Fast"}]), "spec.resourceClaims[0]: got 'Fast', wanted a DNS name"),
        (
            _spec([ONE], {"name": "b"}),
            "spec.containers[0].resources.claims[0].name: there is no claim 'b': the pod's are a",
        ),
        (_spec([], {"name": "b"}), "the pod has none in spec.resourceClaims"),
        (
            _spec([ONE], {"name": "a"}, {"name": "a"}),
            "spec.containers[0].resources.claims[1]: 'a' is used here already",
        ),
        (_spec([ONE], {"name": "a"}, {"name": "a", "request": "r"}), "'a' is used here already"),
    ],
)
def test_pod_claims_are_refused_with_their_path_when_they_are_wrong(spec: PodSpec, said: str) -> None:
    """Each mistake is one problem that names where it stands and what was wanted."""
    (problem,) = check_pod_claims(spec)

    assert said in str(problem)


def test_pod_claims_are_fine_when_containers_share_them_and_use_single_requests() -> None:
    """One entry may serve several containers, whole or request by request, and a group's entry
    names nothing itself.
    """
    assert check_pod_claims(_spec([ONE], {"name": "a", "request": "x"}, {"name": "a", "request": "y"})) == []
    assert check_pod_claims(_spec([{"name": "a"}]), is_grouped=True) == []
