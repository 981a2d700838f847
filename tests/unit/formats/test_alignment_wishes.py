"""Promises of what a pod or a claim may ask of its own alignment: the grammar, and errors that say
what was meant.
"""

from __future__ import annotations

import pytest

from topobus.formats.kubernetes import pod_request
from topobus.formats.kubernetes.alignment_request import (
    AlignmentRequest,
    read_annotations,
    read_locality,
    read_parameters,
)
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.request import Locality, LocalityLevel, Policy, Scope

OWN = {"apiVersion": "topobus.dev/v1", "kind": "AlignmentParameters"}


def test_wishes_reach_the_request_when_a_pod_is_annotated() -> None:
    """Policy, scope and locality of the annotations are the request's.

    Other annotations are nobody's business here.
    """
    annotations = {
        "topobus.dev/policy": "single-numa-node",
        "topobus.dev/scope": "pod",
        "topobus.dev/locality": "hard:switch, soft:l3",
        "example.com/locality": "x",
    }
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p", "annotations": annotations},
        spec={"containers": [{"name": "main"}]},
    )

    request = pod_request(pod, uid="u")

    assert (request.policy, request.scope) == (Policy.SINGLE_NUMA_NODE, Scope.POD)
    assert request.locality == (Locality(level=LocalityLevel.SWITCH), Locality(level=LocalityLevel.L3, is_hard=False))


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        pytest.param(
            {"topobus.dev/policy": "restrict"},
            "topobus.dev/policy is 'restrict', did you mean \"restricted\"",
            id="policy",
        ),
        pytest.param({"topobus.dev/scope": "node"}, "topobus.dev/scope is 'node'", id="scope"),
        pytest.param({"topobus.dev/localty": "hard:numa"}, 'did you mean "topobus.dev/locality"', id="misspelt"),
        pytest.param(
            {"topobus.dev/locality": "hard:swich"}, "'swich' is no level, wanted one of link, switch", id="level"
        ),
        pytest.param({"topobus.dev/locality": "hard:swich"}, 'did you mean "switch"', id="level-meant"),
        pytest.param({"topobus.dev/locality": "numa"}, 'did you mean "hard:numa"', id="no-strength"),
        pytest.param(
            {"topobus.dev/locality": "hart:numa"}, 'wanted hard: or soft:, did you mean "hard"', id="strength"
        ),
        pytest.param({"topobus.dev/locality": "hard:numa,soft:numa"}, "'numa' is there twice", id="twice"),
        pytest.param({"topobus.dev/locality": ""}, "wanted hard: or soft:", id="empty"),
        pytest.param({"topobus.dev/locality": "hard:"}, "'' is no level", id="no-level"),
        pytest.param({"topobus.dev/locality": 1}, "is 1, wanted text", id="no-text"),
    ],
)
def test_wishes_are_refused_by_name_when_they_cannot_be_read(annotations: dict[str, object], says: str) -> None:
    """The error names the object, the annotation, what it says, what it
    could say, and a near miss.
    """
    with pytest.raises(ContractError, match="Pod default/p") as caught:
        read_annotations(annotations, "Pod default/p")

    assert says in str(caught.value)


def test_wishes_are_the_same_when_a_claim_carries_them() -> None:
    """A claim's opaque parameters say the same in the same words; an empty one asks for nothing."""
    alignment_request = read_parameters({**OWN, "policy": "restricted", "locality": "hard:link"}, "claim c")

    assert alignment_request == AlignmentRequest(policy=Policy.RESTRICTED, locality=read_locality("hard:link", "x"))
    assert read_parameters(OWN, "claim c") == AlignmentRequest()


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        pytest.param(
            {"kind": "AlignmentParameters"}, "parameters.apiVersion is None, wanted 'topobus.dev/v1'", id="no-version"
        ),
        pytest.param(
            {**OWN, "kind": "GpuConfig"}, "parameters.kind is 'GpuConfig', wanted 'AlignmentParameters'", id="kind"
        ),
        pytest.param({**OWN, "localty": "hard:numa"}, 'did you mean "locality"', id="misspelt"),
        pytest.param({**OWN, "scope": "pods"}, "parameters.scope is 'pods', did you mean \"pod\"", id="value"),
        pytest.param({**OWN, "policy": 3}, "parameters.policy is 3, wanted text", id="no-text"),
    ],
)
def test_wishes_of_a_claim_are_refused_by_name_when_they_cannot_be_read(
    parameters: dict[str, object], says: str
) -> None:
    """The error names the claim, the field, what it says and what it could say."""
    with pytest.raises(ContractError, match="claim c") as caught:
        read_parameters(parameters, "claim c")

    assert says in str(caught.value)
