"""What the API server simulator takes of a driver's words on a claim's devices, and what becomes of
them: as the real one, by its validation of 1.36.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from topobus.testing.apiserver import ApiServerSimulator

STATUS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/c/status"
RESULT = {"request": "nic", "driver": "topobus.dev", "pool": "n1", "device": "nic-0"}
DEVICE = {"driver": "topobus.dev", "pool": "n1", "device": "nic-0"}
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Attached",
    "message": "",
    "lastTransitionTime": "2026-11-23T04:00:00Z",
}


@pytest.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """A server with an allocated claim."""
    async with ApiServerSimulator() as running:
        requests = [{"name": "nic", "exactly": {"deviceClassName": "nic"}}]
        status = {"allocation": {"devices": {"results": [RESULT]}}}
        running.put(
            {
                "kind": "ResourceClaim",
                "metadata": {"name": "c"},
                "spec": {"devices": {"requests": requests}},
                "status": status,
            }
        )
        yield running


async def say(
    server: ApiServerSimulator, *devices: dict[str, Any], manager: str = "topobus.dev", uid: str = ""
) -> httpx2.Response:
    """Apply what a driver says of devices."""
    metadata = {"name": "c", **({"uid": uid} if uid else {})}
    body = {
        "kind": "ResourceClaim",
        "apiVersion": "resource.k8s.io/v1",
        "metadata": metadata,
        "status": {"devices": list(devices)},
    }
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        return await client.patch(
            f"{STATUS}?fieldManager={manager}&force=true",
            json=body,
            headers={"content-type": "application/apply-patch+yaml"},
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "nic-1"}, "status.devices[0]"),
        ({"shareID": "6f3b5a52-26b6-4c3f-9a51-0d9c7d1c5d0a"}, "status.devices[0]"),
        ({"conditions": [{**READY, "status": "yes"}]}, "status.devices[0].conditions[0].status"),
        ({"conditions": [{**READY, "reason": "not-attached"}]}, "status.devices[0].conditions[0].reason"),
        ({"conditions": [{**READY, "lastTransitionTime": None}]}, "status.devices[0].conditions[0].lastTransitionTime"),
        ({"networkData": {"interfaceName": "n" * 257}}, "status.devices[0].networkData.interfaceName"),
        ({"networkData": {"hardwareAddress": "0" * 129}}, "status.devices[0].networkData.hardwareAddress"),
        ({"networkData": {"ips": ["10.0.0.1"]}}, "status.devices[0].networkData.ips[0]"),
        (
            {"networkData": {"ips": [f"10.0.0.{number}/24" for number in range(17)]}},
            "status.devices[0].networkData.ips",
        ),
        ({"data": {"text": "x" * 10240}}, "status.devices[0].data"),
    ],
)
async def test_device_status_is_refused_when_it_breaks_a_limit(
    server: ApiServerSimulator, changes: dict[str, Any], field: str
) -> None:
    """Invalid, with the field that is wrong; nothing is stored."""
    answer = await say(server, {**DEVICE, **changes})

    assert (answer.status_code, answer.json()["details"]["causes"][0]["field"]) == (422, field)
    assert "devices" not in server.objects("ResourceClaim")[0]["status"]


async def test_device_status_of_one_manager_leaves_the_others_conditions(server: ApiServerSimulator) -> None:
    """Each manager has its own conditions of a device.

    One that says nothing more of it takes its own away, and the last one the entry.
    """
    await say(server, {**DEVICE, "conditions": [READY]})
    await say(server, {**DEVICE, "conditions": [{**READY, "type": "Watched"}]}, manager="other")
    both = server.objects("ResourceClaim")[0]["status"]["devices"]
    await say(server)
    rest = server.objects("ResourceClaim")[0]["status"]["devices"]
    await say(server, manager="other")

    assert [[condition["type"] for condition in device["conditions"]] for device in both] == [["Ready", "Watched"]]
    assert [[condition["type"] for condition in device["conditions"]] for device in rest] == [["Watched"]]
    assert not server.objects("ResourceClaim")[0]["status"].get("devices")


async def test_device_status_goes_when_the_claim_is_deallocated(server: ApiServerSimulator) -> None:
    """The server drops what was said of devices that the claim no longer has."""
    await say(server, {**DEVICE, "conditions": [READY]})
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        answer = await client.put(STATUS, json={"metadata": {"name": "c"}, "status": {"devices": [DEVICE]}})

    assert (answer.status_code, answer.json()["status"]) == (200, {})


async def test_apply_is_refused_when_the_claim_is_another_or_gone(server: ApiServerSimulator) -> None:
    """An uid in what is applied must be the object's; codes as of a real server of 1.36."""
    other = await say(server, DEVICE, uid="another")
    server.remove("ResourceClaim", "c")
    gone = await say(server, DEVICE, uid="another")
    without = await say(server, DEVICE)

    assert [answer.status_code for answer in (other, gone, without)] == [422, 404, 404]
