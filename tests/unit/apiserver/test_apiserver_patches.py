"""The API server simulator's patches: JSON patch, strategic merge patch, server-side apply on lists
that are maps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.apiserver.lists import strategic_merge
from topobus.testing.apiserver.patches import json_patch
from topobus.testing.apiserver.values import ApiError

PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
JSON_PATCH = {"Content-Type": "application/json-patch+json"}
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
APPLY = {"Content-Type": "application/apply-patch+yaml"}


@pytest.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """A server with one gated pod."""
    async with ApiServerSimulator() as running:
        spec = {
            "schedulingGates": [{"name": "topobus.dev/placement"}, {"name": "other"}],
            "containers": [{"name": "a", "image": "x"}],
        }
        running.put({"kind": "Pod", "metadata": {"name": "p", "finalizers": ["f/a"]}, "spec": spec})
        yield running


@pytest.fixture
async def client(server: ApiServerSimulator) -> AsyncIterator[httpx2.AsyncClient]:
    """An ordinary HTTP client of it."""
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as async_client:
        yield async_client


@pytest.mark.parametrize(
    ("operations", "wanted"),
    [
        pytest.param([{"op": "add", "path": "/a/-", "value": 3}], {"a": [1, 2, 3], "b": {"c/d": 1}}, id="append"),
        pytest.param([{"op": "remove", "path": "/a/0"}], {"a": [2], "b": {"c/d": 1}}, id="remove-element"),
        pytest.param([{"op": "replace", "path": "/b/c~1d", "value": 2}], {"a": [1, 2], "b": {"c/d": 2}}, id="escaped"),
        pytest.param([{"op": "move", "from": "/b", "path": "/e"}], {"a": [1, 2], "e": {"c/d": 1}}, id="move"),
        pytest.param([{"op": "copy", "from": "/a/1", "path": "/e"}], {"a": [1, 2], "b": {"c/d": 1}, "e": 2}, id="copy"),
    ],
)
def test_json_patch_does_each_operation_when_it_fits(operations: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """RFC 6902's operations, and the object that was there stays as it was."""
    present = {"a": [1, 2], "b": {"c/d": 1}}

    assert json_patch(present, operations) == wanted
    assert present == {"a": [1, 2], "b": {"c/d": 1}}


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param({"op": "test", "path": "/a", "value": 2}, id="test-fails"),
        pytest.param({"op": "remove", "path": "/none"}, id="absent"),
        pytest.param({"op": "replace", "path": "/none", "value": 1}, id="replace-absent"),
        pytest.param({"op": "add", "path": "none", "value": 1}, id="no-slash"),
    ],
)
def test_json_patch_is_refused_when_it_does_not_fit(operation: dict[str, Any]) -> None:
    """An operation that cannot be done refuses the whole patch with 422."""
    with pytest.raises(ApiError) as refused:
        json_patch({"a": 1}, [{"op": "add", "path": "/b", "value": 1}, operation])

    assert refused.value.code == 422


async def test_gate_is_taken_by_json_patch_when_it_is_still_there(client: httpx2.AsyncClient) -> None:
    """The way a scheduler's helper takes its own gate: tested, then removed.

    The second time the test refuses.
    """
    gate = {"name": "topobus.dev/placement"}
    patch = [
        {"op": "test", "path": "/spec/schedulingGates/0", "value": gate},
        {"op": "remove", "path": "/spec/schedulingGates/0"},
    ]

    first = await client.patch(f"{PODS}/p", json=patch, headers=JSON_PATCH)
    second = await client.patch(f"{PODS}/p", json=patch, headers=JSON_PATCH)

    assert first.json()["spec"]["schedulingGates"] == [{"name": "other"}]
    assert (second.status_code, second.json()["reason"]) == (422, "Invalid")


@pytest.mark.parametrize(
    ("patch", "wanted"),
    [
        pytest.param(
            {"env": [{"name": "B", "value": "2"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            id="merged-by-key",
        ),
        pytest.param({"env": [{"name": "A", "value": "9"}]}, {"env": [{"name": "A", "value": "9"}]}, id="same-key"),
        pytest.param({"env": [{"$patch": "delete", "name": "A"}]}, {"env": []}, id="deleted"),
        pytest.param({"env": [{"$patch": "replace"}, {"name": "C"}]}, {"env": [{"name": "C"}]}, id="replaced"),
        pytest.param({"env": None}, {}, id="null"),
        pytest.param(
            {"env": [{"name": "B"}], "$setElementOrder/env": [{"name": "B"}, {"name": "A"}]},
            {"env": [{"name": "B"}, {"name": "A", "value": "1"}]},
            id="ordered",
        ),
        pytest.param({"args": ["z"]}, {"env": [{"name": "A", "value": "1"}], "args": ["z"]}, id="atomic-list"),
    ],
)
def test_strategic_merge_follows_the_lists_keys_when_patched(patch: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Lists that are maps are merged by their key, with kubectl's directives.

    Other lists are replaced.
    """
    assert strategic_merge({"env": [{"name": "A", "value": "1"}]}, patch) == wanted


async def test_strategic_patch_keeps_the_rest_when_sent(client: httpx2.AsyncClient) -> None:
    """A container is found by its name, finalizers are a set, and a condition by its type, at the
    status door too.
    """
    patch = {"metadata": {"finalizers": ["f/b"]}, "spec": {"containers": [{"name": "a", "image": "y"}]}}
    for kind in ("Ready", "PodScheduled"):
        body = {"status": {"conditions": [{"type": kind, "status": "True"}]}}
        status = await client.patch(f"{PODS}/p/status", json=body, headers=STRATEGIC)

    patched = (await client.patch(f"{PODS}/p", json=patch, headers=STRATEGIC)).json()

    assert patched["metadata"]["finalizers"] == ["f/a", "f/b"]
    assert patched["spec"]["containers"] == [{"name": "a", "image": "y"}]
    assert len(patched["spec"]["schedulingGates"]) == 2
    assert [condition["type"] for condition in status.json()["status"]["conditions"]] == ["Ready", "PodScheduled"]


async def test_apply_owns_single_elements_when_a_list_is_a_map(
    client: httpx2.AsyncClient, server: ApiServerSimulator
) -> None:
    """Two drivers apply the state of their devices in one claim.

    One's leaving takes its own element alone, and the last one the list.
    """
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu"}}
    results = [
        {"request": "gpu", "driver": f"{name}.example.com", "pool": "n", "device": f"{name}-0"}
        for name in ("gpu", "nic")
    ]
    status = {"allocation": {"devices": {"results": results}}}
    server.put(
        {
            "kind": "ResourceClaim",
            "metadata": {"name": "c"},
            "spec": {"devices": {"requests": [request]}},
            "status": status,
        }
    )

    async def apply(driver: str, devices: list[str]) -> dict[str, Any]:
        status = {
            "devices": [{"driver": driver, "pool": "n", "device": device, "data": {"x": 1}} for device in devices]
        }
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "c"},
            "status": status if devices else {},
        }
        answer = await client.patch(f"{CLAIMS}/c/status", params={"fieldManager": driver}, json=body, headers=APPLY)
        assert answer.status_code == 200, answer.text
        found_status: dict[str, Any] = answer.json()["status"]
        return found_status

    await apply("gpu.example.com", ["gpu-0"])
    both = await apply("nic.example.com", ["nic-0"])
    remaining = await apply("gpu.example.com", [])
    none = await apply("nic.example.com", [])

    assert [it["device"] for it in both["devices"]] == ["gpu-0", "nic-0"]
    assert [it["device"] for it in remaining["devices"]] == ["nic-0"]
    assert "devices" not in none
