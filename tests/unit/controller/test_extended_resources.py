"""Extended resources as claims: which class serves a name, what the special claim asks, and who
uses it.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.engine.claims.extended_resources import (
    ClassName,
    claim_of_pod,
    class_for,
    extended_claim,
    with_extended_status,
)
from topobus.engine.claims.reservations import claim_uses
from topobus.engine.claims.templates import claim_names, owner_pod_uid
from topobus.formats.kubernetes.limits import check_claim
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

CLASSES = [
    ClassName("gpu", "example.com/gpu", "2026-01-01T00:00:00Z"),
    ClassName("nic", "example.com/nic", "2026-01-01T00:00:00Z"),
    ClassName("plain", "", "2026-01-01T00:00:00Z"),
]


def pod(
    *containers: dict[str, int | str], init: tuple[dict[str, int | str], ...] = (), sidecars: tuple[int, ...] = ()
) -> ApiObject:
    """Make a pod of containers with limits; init containers by index are sidecars."""
    first = [
        {
            "name": f"i{index}",
            "resources": {"limits": dict(limits)},
            **({"restartPolicy": "Always"} if index in sidecars else {}),
        }
        for index, limits in enumerate(init)
    ]
    rest = [{"name": f"c{index}", "resources": {"limits": dict(limits)}} for index, limits in enumerate(containers)]
    spec = {"initContainers": first, "containers": rest}
    return ApiObject(
        api_version="v1", kind="Pod", metadata={"name": "job", "namespace": "team", "uid": "uid-job"}, spec=spec
    )


def requests(verb: ApiObject) -> dict[str, tuple[str, int]]:
    """List the requests of the special claim; it keeps the API's limits."""
    claim = extended_claim(verb, CLASSES)
    assert claim is not None
    assert check_claim(read_as(claim.spec, ClaimSpec, where="claim")) == []
    entries: list[dict[str, Any]] = claim.spec["devices"]["requests"]
    return {entry["name"]: (entry["exactly"]["deviceClassName"], entry["exactly"]["count"]) for entry in entries}


GPU = "example.com/gpu"


@pytest.mark.parametrize(
    ("pod_object", "wanted"),
    [
        pytest.param(pod({GPU: 2}), {"container-0-request-0": ("gpu", 2)}, id="one"),
        pytest.param(
            pod({GPU: 1, "cpu": 4, "example.com/nic": 2}, {GPU: 3}),
            {
                "container-0-request-1": ("gpu", 1),
                "container-0-request-2": ("nic", 2),
                "container-1-request-0": ("gpu", 3),
            },
            id="several",
        ),
        pytest.param(
            pod({"deviceclass.resource.kubernetes.io/plain": 1}),
            {"container-0-request-0": ("plain", 1)},
            id="implicit-name",
        ),
        pytest.param(pod({GPU: 2}, init=({GPU: 2},)), {"container-1-request-0": ("gpu", 2)}, id="init-uses-the-same"),
        pytest.param(
            pod({GPU: 2}, init=({GPU: 5},)),
            {"container-0-request-0": ("gpu", 3), "container-1-request-0": ("gpu", 2)},
            id="init-wants-more",
        ),
        pytest.param(
            pod({GPU: 1}, init=({GPU: 2}, {GPU: 4}, {GPU: 3})),
            {"container-1-request-0": ("gpu", 3), "container-3-request-0": ("gpu", 1)},
            id="the-largest-init",
        ),
        pytest.param(
            pod({GPU: 1}, init=({GPU: 2}, {GPU: 1}), sidecars=(0,)),
            {"container-0-request-0": ("gpu", 2), "container-2-request-0": ("gpu", 1)},
            id="a-sidecar-lasts",
        ),
    ],
)
def test_pod_gets_one_claim_for_its_extended_resources(
    pod_object: ApiObject, wanted: dict[str, tuple[str, int]]
) -> None:
    """A request a lasting container and resource.

    Init containers use what later ones hold, and only the largest rest is asked for.
    """
    assert requests(pod_object) == wanted


@pytest.mark.parametrize(
    "pod_object",
    [
        pytest.param(pod({"cpu": 4, "memory": "1Gi"}), id="native"),
        pytest.param(pod({"other.com/gpu": 1}), id="nobody's"),
        pytest.param(pod({"topobus.dev/gpu": 1}), id="ours-by-ledger"),
        pytest.param(pod({GPU: 0}), id="none-of-it"),
    ],
)
def test_pod_gets_no_claim_when_no_class_serves_it(pod_object: ApiObject) -> None:
    """Resources of nobody's class are a device plugin's, or ours by the node's ledger."""
    assert extended_claim(pod_object, CLASSES) is None


def test_pod_is_refused_when_it_wants_a_part_of_a_device() -> None:
    """A part of a device is told, with container and amount."""
    with pytest.raises(ContractError, match=r"container c0: example.com/gpu is 1500m, wanted a whole number"):
        extended_claim(pod({GPU: "1500m"}), CLASSES)


def test_class_is_the_newest_then_the_first_by_name() -> None:
    """Of classes with one name the newest serves it; of equally old ones the first by name.

    An implicit name names its class.
    """
    same = [ClassName("b", GPU, "2026-01-01T00:00:00Z"), ClassName("a", GPU, "2026-01-01T00:00:00Z")]

    assert class_for(GPU, same) == "a"
    assert class_for(GPU, [*same, ClassName("c", GPU, "2026-03-01T00:00:00Z")]) == "c"
    assert class_for("deviceclass.resource.kubernetes.io/b", same) == "b"
    assert class_for("deviceclass.resource.kubernetes.io/z", same) is None


def test_claim_is_the_pods_and_is_used_by_it() -> None:
    """The claim is owned by the pod, made with one name whoever makes it, and stands in the pod's
    status with its mappings.
    """
    api_object = pod({GPU: 2}, init=({GPU: 1},))
    wanted = extended_claim(api_object, CLASSES)
    assert wanted is not None

    made = claim_of_pod(api_object, wanted, now="2026-01-01T00:00:00Z")
    named = with_extended_status(api_object, made.metadata["name"], wanted)

    assert made == claim_of_pod(api_object, wanted, now="2026-01-01T00:00:00Z")
    assert made.metadata["annotations"] == {"resource.kubernetes.io/extended-resource-claim": "true"}
    assert owner_pod_uid(made) == "uid-job"
    assert claim_names(named) == (made.metadata["name"],)
    assert [use.claim for use in claim_uses(named)] == [made.metadata["name"]]
    assert named.status["extendedResourceClaimStatus"]["requestMappings"] == [
        {"containerName": "c0", "resourceName": GPU, "requestName": "container-1-request-0"},
        {"containerName": "i0", "resourceName": GPU, "requestName": "container-1-request-0"},
    ]
