"""Pods as requests: which amounts become exclusive CPUs, memory and devices."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.formats.kubernetes import pod_request
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.request import ContainerKind, DeviceRequest


def _pod(resources: dict[str, Any], **metadata: Any) -> ApiObject:
    return ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p", **metadata},
        spec={"containers": [{"name": "main", "resources": resources}]},
    )


@pytest.mark.parametrize(
    ("resources", "cpus"),
    [
        pytest.param({"limits": {"cpu": 4}}, 4, id="limit-alone-is-the-request-too"),
        pytest.param({"limits": {"cpu": "4"}, "requests": {"cpu": "4000m"}}, 4, id="same-amount-written-otherwise"),
        pytest.param({"limits": {"cpu": "4"}, "requests": {"cpu": "2"}}, 0, id="burstable-shares"),
        pytest.param({"limits": {"cpu": "1500m"}}, 0, id="fraction-shares"),
        pytest.param({"requests": {"cpu": "4"}}, 0, id="no-limit-shares"),
        pytest.param(
            {"limits": {"cpu": "4", "memory": "2Gi"}, "requests": {"cpu": "4", "memory": "1Gi"}},
            0,
            id="burstable-memory-shares",
        ),
        pytest.param({}, 0, id="nothing-asked"),
    ],
)
def test_pod_request_counts_exclusive_cpus_when_the_container_is_guaranteed(
    resources: dict[str, Any], cpus: int
) -> None:
    """Only a whole cpu limit that equals the request is exclusive, as
    with kubelet's static policy.
    """
    request = pod_request(_pod(resources), uid="u")

    assert request.containers[0].cpus == cpus


def test_pod_request_reads_devices_and_memory_when_they_have_limits() -> None:
    """Each `topobus.dev/<class>` limit is a device request, sorted by class.

    Other domains' go by their full names; memory is in bytes.
    """
    request = pod_request(
        _pod({"limits": {"topobus.dev/nic": "2", "topobus.dev/gpu": 2, "memory": "1.5Gi", "nvidia.com/gpu": 1}}),
        uid="u",
    )

    assert request.containers[0].devices == (
        DeviceRequest(device_class="gpu", count=2),
        DeviceRequest(device_class="nic", count=2),
        DeviceRequest(device_class="nvidia.com/gpu", count=1),
    )
    assert request.containers[0].memory_bytes == 3 * 2**29


@pytest.mark.parametrize(
    "limits",
    [
        {"cpu": 1, "memory": "1Gi", "ephemeral-storage": "1Gi", "hugepages-2Mi": "2Mi"},
        {"nvidia.com/gpu": 0},
    ],
)
def test_pod_request_asks_no_devices_when_a_resource_is_kubernetes_own_or_none_of_it_is_wanted(
    limits: dict[str, Any],
) -> None:
    """Standard resources keep their meaning, and an amount of 0 asks nothing."""
    assert pod_request(_pod({"limits": limits}), uid="u").containers[0].devices == ()


def test_pod_request_leaves_out_what_a_claim_serves_when_the_status_says_so() -> None:
    """What the pod's special claim serves in one container is not asked of the node again.

    Another container's is.
    """
    limits = {"limits": {"example.com/gpu": 1}}
    mapping = {"containerName": "a", "resourceName": "example.com/gpu", "requestName": "r"}
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p"},
        spec={"containers": [{"name": "a", "resources": limits}, {"name": "b", "resources": limits}]},
        status={"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": [mapping]}},
    )

    request = pod_request(pod, uid="u")

    assert [container.devices for container in request.containers] == [
        (),
        (DeviceRequest(device_class="example.com/gpu", count=1),),
    ]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"requests": {"nvidia.com/gpu": 1}}, "need a limit"),
        ({"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2}}, "a request equal to it"),
        ({"limits": {"nvidia.com/gpu": "500m"}}, "wanted a whole number"),
    ],
)
def test_pod_request_refuses_an_extended_resource_when_kubernetes_would(resources: dict[str, Any], said: str) -> None:
    """Extended resources are whole, and limited to what is requested, in any domain."""
    with pytest.raises(ContractError, match=said):
        pod_request(_pod(resources), uid="u")


@pytest.mark.parametrize(
    ("resources", "is_fixed"),
    [
        pytest.param({"limits": {"memory": "2Gi"}}, True, id="limit-alone"),
        pytest.param({"limits": {"memory": "2Gi"}, "requests": {"memory": "2048Mi"}}, True, id="same-amount"),
        pytest.param({"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}}, False, id="burstable"),
        pytest.param({"requests": {"memory": "1Gi"}}, False, id="no-limit"),
    ],
)
def test_pod_request_fixes_memory_when_the_limit_is_the_request(resources: dict[str, Any], is_fixed: bool) -> None:
    """Only guaranteed memory is aligned, as with kubelet's memory manager."""
    assert pod_request(_pod(resources), uid="u").containers[0].is_memory_fixed is is_fixed


def test_pod_request_reads_huge_pages_when_they_have_limits() -> None:
    """Huge pages go by their kind, in bytes."""
    request = pod_request(_pod({"limits": {"memory": "1Gi", "hugepages-2Mi": "64Mi", "hugepages-1Gi": 0}}), uid="u")

    assert request.containers[0].hugepages == {"hugepages-2Mi": 64 << 20}


@pytest.mark.parametrize("name", ["topobus/gpu", "topobus.de/gpu", "topobus.dev /gpu", "tpobus.dev/gpu"])
def test_pod_request_refuses_a_resource_when_its_domain_is_nearly_ours(name: str) -> None:
    """A typing error in the domain is not taken for somebody else's resource and ignored."""
    with pytest.raises(ContractError, match=r'did you mean "topobus\.dev"'):
        pod_request(_pod({"limits": {name: 1}}), uid="u")


def test_pod_request_knows_sidecars_and_init_containers_when_the_pod_has_them() -> None:
    """Init containers stand first; restartPolicy Always makes one a sidecar."""
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p"},
        spec={
            "initContainers": [{"name": "a"}, {"name": "b", "restartPolicy": "Always"}],
            "containers": [{"name": "c"}],
        },
    )

    request = pod_request(pod, uid="u")

    assert [(container.name, container.kind) for container in request.containers] == [
        ("a", ContainerKind.INIT),
        ("b", ContainerKind.SIDECAR),
        ("c", ContainerKind.APP),
    ]


@pytest.mark.parametrize(
    ("pod", "wanted"),
    [
        pytest.param(_pod({"requests": {"topobus.dev/gpu": 1}}), "devices need a limit", id="device-without-limit"),
        pytest.param(
            _pod({"limits": {"topobus.dev/gpu": 2}, "requests": {"topobus.dev/gpu": 1}}),
            "a request equal to it",
            id="device-request-differs",
        ),
        pytest.param(
            _pod({"limits": {"cpu": 1}, "requests": {"cpu": 2}}), "more than its limit", id="request-above-limit"
        ),
        pytest.param(_pod({"limits": {"cpu": "-1"}}), "wanted 0 or more", id="negative-cpu"),
        pytest.param(_pod({"limits": {"topobus.dev/gpu": "1e9"}}), "whole number from 1", id="absurd-count"),
        pytest.param(
            _pod({}, annotations={"topobus.dev/polcy": "none"}),
            'did you mean "topobus.dev/policy"',
            id="annotation-typo",
        ),
        pytest.param(
            ApiObject(api_version="v1", kind="Pod", metadata={"name": "p"}), "at least one container", id="no-container"
        ),
        pytest.param(
            ApiObject(
                api_version="v1",
                kind="Pod",
                metadata={"name": "p"},
                spec={"containers": [{"name": "a"}, {"name": "a"}]},
            ),
            "two containers are named a",
            id="name-twice",
        ),
    ],
)
def test_pod_request_refuses_with_the_place_when_amounts_make_no_sense(pod: ApiObject, wanted: str) -> None:
    """An amount that cannot be meant is answered with the container and the resource."""
    with pytest.raises(ContractError, match="Pod default/p") as caught:
        pod_request(pod, uid="u")

    assert wanted in str(caught.value)
