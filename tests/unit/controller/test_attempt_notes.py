"""The notes of attempts as replicas write them: what one has noted in a
claim is read by any other.
"""

from __future__ import annotations

import msgspec
import pytest

from topobus.engine.claims.attempts import Attempt, attempt_of, with_attempt
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    DevicesAllocated,
    GrantedConfiguration,
    GrantedDevice,
    OpaqueConfiguration,
)
from topobus.formats.messages.messages import ApiObject
from topobus.values.request import Policy

_TUNE = {"driver": "gpu.example.com", "parameters": {"kind": "Tune", "ratio": 0.5, "steps": [1, 2]}}
CLAIM = ApiObject(
    api_version="resource.k8s.io/v1",
    kind="ResourceClaim",
    metadata={"name": "c", "namespace": "default", "uid": "uid-c", "resourceVersion": "7"},
    spec={
        "devices": {
            "requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}],
            "config": [{"requests": ["r"], "opaque": _TUNE}],
        }
    },
)
_OPAQUE = OpaqueConfiguration(driver="gpu.example.com", parameters=_TUNE["parameters"])
_DEVICES = DevicesAllocated(
    results=(
        GrantedDevice(request="r", driver="topobus.dev", pool="n1", device="gpu-0"),
        GrantedDevice(request="r", driver="topobus.dev", pool="n1", device="nic-0", share_id="5b6f"),
    ),
    config=(
        GrantedConfiguration(source="FromClass", requests=("r",), opaque=_OPAQUE),
        GrantedConfiguration(source="FromClaim", requests=("r",), opaque=_OPAQUE),
    ),
)
_HELD = Attempt(
    number=3,
    node="n1",
    allocation=AllocationResult(devices=_DEVICES),
    wishes=AlignmentRequest(policy=Policy.RESTRICTED),
)
_RESULTS = (
    '"results":[{"request":"r","driver":"topobus.dev","pool":"n1","device":"gpu-0"},'
    '{"request":"r","driver":"topobus.dev","pool":"n1","device":"nic-0","shareID":"5b6f"}]'
)
_OPAQUE_TEXT = '"opaque":{"driver":"gpu.example.com","parameters":{"kind":"Tune","ratio":0.5,"steps":[1,2]}}}'
_WISHES = '"wishes":{"policy":"restricted","scope":null,"locality":[]}'
STAND_ALONE = (
    f'{{"number":3,"node":"n1","allocation":{{"devices":{{{_RESULTS},'
    f'"config":[{{"source":"FromClass","requests":["r"],{_OPAQUE_TEXT}]}}}},{_WISHES},"copies":{{"1":0}}}}'
)
CLUSTER = (
    f'{{"number":3,"node":"n1","allocation":{{"devices":{{{_RESULTS},'
    f'"config":[{{"source":"FromClass","requests":["r"],{_OPAQUE_TEXT}]}}}},'
    f'{_WISHES},"copies":{{"1":0}},"pod":"uid-p","refused":["n2","n3"]}}'
)
CLUSTER_SHORT = f'{{"number":3,"node":"n1","allocation":{{"devices":{{{_RESULTS}}}}},{_WISHES},"is_short":true,"pod":"uid-p","refused":["n2","n3"]}}'  # noqa: E501
CLUSTER_WITHDRAWN = '{"number":4,"node":"","allocation":{},"pod":"uid-p","refused":["n2"]}'


def _noted(text: str) -> ApiObject:
    return msgspec.structs.replace(CLAIM, metadata={**CLAIM.metadata, "annotations": {"topobus.dev/attempt": text}})


@pytest.mark.parametrize(
    ("text", "attempt"),
    [
        (STAND_ALONE, _HELD),
        (CLUSTER, msgspec.structs.replace(_HELD, pod="uid-p", refused=("n2", "n3"))),
        (CLUSTER_WITHDRAWN, Attempt(number=4, node="", allocation=AllocationResult(), pod="uid-p", refused=("n2",))),
    ],
    ids=["stand-alone", "cluster", "withdrawn"],
)
def test_note_is_read_and_written_as_it_stands_in_a_claim(text: str, attempt: Attempt) -> None:
    """The text reads as the attempt, and the attempt is written as the very text: replicas work
    side by side.
    """
    assert attempt_of(_noted(text)) == attempt
    assert with_attempt(CLAIM, attempt).metadata["annotations"]["topobus.dev/attempt"] == text


def test_note_of_a_cluster_is_shortened_when_it_would_not_fit_into_the_annotations() -> None:
    """A configuration of 140 kB is left out, and the note says that it is."""
    long = OpaqueConfiguration(driver="gpu.example.com", parameters={"text": "y" * 140_000})
    devices = msgspec.structs.replace(
        _DEVICES, config=(GrantedConfiguration(source="FromClaim", requests=("r",), opaque=long),)
    )
    allocation = AllocationResult(devices=devices)
    attempt = msgspec.structs.replace(_HELD, allocation=allocation, pod="uid-p", refused=("n2", "n3"))

    noted = with_attempt(CLAIM, attempt)
    short = attempt_of(noted)

    assert noted.metadata["annotations"]["topobus.dev/attempt"] == CLUSTER_SHORT
    assert short is not None
    assert short.is_short
    assert short.lengthened(allocation) == allocation
