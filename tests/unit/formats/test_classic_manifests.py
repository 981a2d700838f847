"""Classic DRA on the way in: what is read, what is refused and how a user is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.kubernetes.classic.classic import (
    AllocationResult,
    ClaimStatus,
    ConsumerReference,
    ResourceHandle,
    unfold_class,
)
from topobus.formats.kubernetes.classic.classic_limits import check_status
from topobus.values.errors import ContractError

CLASS = """\
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: gpu}
driverName: gpu.topobus.dev
parametersRef: {apiGroup: gpu.resource.topobus.dev, kind: DeviceClassParameters, name: shared}
suitableNodes:
  nodeSelectorTerms:
  - matchExpressions: [{key: zone, operator: In, values: [a]}]
"""
CLAIM = """\
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {name: fast}
spec:
  resourceClassName: gpu
  allocationMode: Immediate
  parametersRef: {apiGroup: gpu.resource.topobus.dev, kind: ClaimParameters, name: big}
"""
PARAMETERS = """\
apiVersion: gpu.resource.topobus.dev/v1alpha1
kind: ClaimParameters
metadata: {name: big}
spec:
  count: 2
  selector:
    andExpression:
    - productName: "*a100*"
    - orExpression:
      - memory: {value: 40Gi, operator: GreaterThanOrEqualTo}
      - index: 0
  sharing:
    strategy: TimeSlicing
    timeSlicingConfig: {interval: Long}
"""


def _refusal(text: str) -> str:
    with pytest.raises(ContractError) as refused:
        parse_manifest(text, where="f.yaml")
    return refused.value.message


def test_manifest_keeps_a_class_whole_when_its_fields_stand_at_the_top() -> None:
    """A ResourceClass has no spec on the wire.

    It is stored by ours and comes back as it was written.
    """
    (api_object,) = parse_manifest(CLASS, where="f.yaml")

    assert api_object.spec["driverName"] == "gpu.topobus.dev"
    assert unfold_class(api_object)["suitableNodes"] == api_object.spec["suitableNodes"]
    assert "spec" not in unfold_class(api_object)
    assert object_parts(api_object) == {"kind": "resourceclass", "namespace": "_", "name": "gpu"}


def test_manifest_reads_claims_and_parameters_when_they_are_whole() -> None:
    """Claims of both generations share a kind; the version says which one it is."""
    claim, parameters = parse_manifest(f"{CLAIM}---\n{PARAMETERS}", where="f.yaml")

    assert claim.api_version == "resource.k8s.io/v1alpha2"
    assert object_parts(claim) == {"kind": "resourceclaim", "namespace": "default", "name": "fast"}
    assert parameters.spec["selector"]["andExpression"][1]["orExpression"][1] == {"index": 0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (CLASS.replace("driverName:", "drivername:"), 'drivername: unknown field, did you mean "driverName"?'),
        (CLASS.replace("gpu.topobus.dev\n", "GPU\n"), "driverName: got 'GPU', wanted a DNS name"),
        (CLASS.replace("driverName: gpu.topobus.dev", "driverName: [1]"), "driverName: wanted str, got array"),
        (
            CLASS.replace("operator: In, ", "operator: Inn, "),
            "suitableNodes.nodeSelectorTerms[0].matchExpressions[0].operator: got 'Inn'",
        ),
        (CLASS.replace(", name: shared", ""), "parametersRef.name: is missing"),
        (CLASS + "spec: {}\n", "spec: unknown field"),
        (CLAIM.replace("Immediate", "Immediatly"), "spec.allocationMode: got 'Immediatly'"),
        (CLAIM.replace("resourceClassName: gpu", "resourceClassname: gpu"), "spec.resourceClassname: unknown field"),
        (
            CLAIM.replace("v1alpha2", "v1alpha3"),
            "apiVersion: got 'resource.k8s.io/v1alpha3', wanted resource.k8s.io/v1 or",
        ),
        (PARAMETERS.replace("count: 2", "count: 0"), "spec.count: got 0, wanted 1 to 32"),
        (
            PARAMETERS.replace("GreaterThanOrEqualTo", "AtLeast"),
            "spec.selector.andExpression[1].orExpression[0].memory.operator: got 'AtLeast'",
        ),
        (
            PARAMETERS.replace("40Gi", "40Gb"),
            "spec.selector.andExpression[1].orExpression[0].memory.value: not a quantity",
        ),
        (PARAMETERS.replace("productName", "productname"), "spec.selector.andExpression[0].productname: unknown field"),
        (PARAMETERS.replace("TimeSlicing\n", "MPS\n"), "spec.sharing.timeSlicingConfig: wanted none with strategy MPS"),
        (
            PARAMETERS.replace("strategy: TimeSlicing", "strategy: Timeslicing"),
            "spec.sharing.strategy: got 'Timeslicing'",
        ),
        (
            PARAMETERS.replace("interval: Long", "interval: Eternal"),
            "spec.sharing.timeSlicingConfig.interval: got 'Eternal'",
        ),
        (
            PARAMETERS.replace("/v1alpha1", "/v9"),
            "apiVersion: got 'gpu.resource.topobus.dev/v9', wanted <class>.resource.topobus.dev/v1alpha1",
        ),
    ],
)
def test_manifest_refuses_with_the_path_when_a_classic_object_is_wrong(text: str, wanted: str) -> None:
    """A typing error is told with line, path, what was found and what was wanted."""
    message = _refusal(text)

    assert wanted in message
    assert ", line " in message


def test_manifest_refuses_a_context_when_it_names_too_many_nodes() -> None:
    """v1alpha2 allows 128 potential nodes."""
    nodes = [f"n{index}" for index in range(129)]
    made = {"apiVersion": "resource.k8s.io/v1alpha2", "kind": "PodSchedulingContext", "metadata": {"name": "p"}}

    assert "got 129 nodes, wanted at most 128" in _refusal(
        msgspec.json.encode({**made, "spec": {"potentialNodes": nodes}}).decode()
    )
    assert parse_manifest(msgspec.json.encode({**made, "spec": {"potentialNodes": nodes[:128]}}).decode(), where="f")


def test_manifest_takes_another_drivers_parameters_as_they_are() -> None:
    """Only that driver can judge them.

    Parameters in a group of Kubernetes' or of ours are no such.
    """
    (api_object,) = parse_manifest(
        "{apiVersion: gpu.example.com/v1, kind: GpuClaimParameters, metadata: {name: a}, spec: {any: [1]}}", where="f"
    )

    assert api_object.spec == {"any": [1]}
    assert "wanted one of" in _refusal(
        "{apiVersion: resource.k8s.io/v1, kind: GpuParameters, metadata: {name: a}, spec: {}}"
    )
    assert "wanted one of" in _refusal(
        "{apiVersion: x.topobus.dev/v1, kind: GpuParameters, metadata: {name: a}, spec: {}}"
    )


def test_manifest_reads_a_pods_claims_when_they_are_written_in_the_old_form() -> None:
    """Pods of Kubernetes 1.26 to 1.30 name their claims below `source`."""
    pod = (
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c}], resourceClaims: "
        "[{name: g, source: {resourceClaimName: x}}]}}"
    )
    (api_object,) = parse_manifest(pod, where="f")

    assert api_object.spec["resourceClaims"] == [{"name": "g", "source": {"resourceClaimName": "x"}}]
    assert "did you mean" in _refusal(pod.replace("resourceClaimName", "resourceclaimName"))


def test_admit_refuses_another_version_of_a_stored_object() -> None:
    """A claim is classic or structured; what holds devices for one must not become the other."""
    (stored,) = parse_manifest(CLAIM, where="f")
    newer = msgspec.structs.replace(stored, api_version="resource.k8s.io/v1")

    with pytest.raises(ContractError, match=r"cannot replace resource\.k8s\.io/v1alpha2"):
        admit(newer, uid="u", now="now", previous=stored)


def _status(**fields: Any) -> ClaimStatus:
    return ClaimStatus(**{"driver_name": "d", "allocation": AllocationResult(), **fields})


def test_check_status_tells_what_the_api_would_refuse() -> None:
    """A claim that is not shareable has one user; a handle has 16 KiB.

    Nothing is reserved or asked back without an allocation.
    """
    users = tuple(ConsumerReference(resource="pods", name=f"p{index}", uid=f"{index}") for index in range(33))
    shared = AllocationResult(shareable=True)
    long = AllocationResult(resource_handles=(ResourceHandle(data="x" * 16385),))
    many = AllocationResult(resource_handles=(ResourceHandle(),) * 33)

    assert check_status(_status()) == []
    assert [problem.path for problem in check_status(_status(reserved_for=users[:2]))] == ["status.reservedFor"]
    assert check_status(_status(allocation=shared, reserved_for=users[:32])) == []
    assert [problem.path for problem in check_status(_status(allocation=shared, reserved_for=users))] == [
        "status.reservedFor"
    ]
    assert [problem.path for problem in check_status(_status(allocation=long))] == [
        "status.allocation.resourceHandles[0].data"
    ]
    assert [problem.path for problem in check_status(_status(allocation=many))] == ["status.allocation.resourceHandles"]
    assert [
        problem.path for problem in check_status(ClaimStatus(reserved_for=users[:1], deallocation_requested=True))
    ] == [
        "status.reservedFor",
        "status.deallocationRequested",
    ]
    assert [problem.path for problem in check_status(_status(driver_name=""))] == ["status.driverName"]
