"""What the API server simulator does by itself or on call: claims from templates, reservations
taken back, garbage collected, watches by name.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2

from topobus.testing.apiserver import ApiServerSimulator

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
REQUESTS = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}


def put_pod(server: ApiServerSimulator) -> dict[str, Any]:
    """A pod that wants a claim of template `t`."""
    claims = [{"name": "devices", "resourceClaimTemplateName": "t"}]
    return server.put({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [], "resourceClaims": claims}})


async def test_claim_is_made_of_a_template_when_a_pod_wants_it() -> None:
    """Made once, owned by the pod and named in its status; it goes with the pod."""
    async with ApiServerSimulator(collects_garbage=True) as server:
        pod = put_pod(server)
        before = server.generate_claims()
        server.put(
            {
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": "t"},
                "spec": {"metadata": {"labels": {"a": "b"}}, "spec": REQUESTS},
            }
        )
        (made,) = server.generate_claims()
        again = server.generate_claims()
        (claim,) = server.objects("ResourceClaim")
        (pod_now,) = server.objects("Pod")
        server.remove("Pod", "p")
        left = server.objects("ResourceClaim")

    assert (before, again, left) == ([], [], [])
    assert made.startswith("p-devices-")
    assert claim["metadata"]["labels"] == {"a": "b"}
    assert claim["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    assert claim["spec"] == REQUESTS
    assert pod_now["status"]["resourceClaimStatuses"] == [{"name": "devices", "resourceClaimName": made}]


async def test_reservation_is_taken_back_when_its_pod_is_gone() -> None:
    """The last reservation's end is the allocation's end; a living pod keeps both."""
    async with ApiServerSimulator() as server:
        pod = server.put({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}})
        reserved = [
            {"resource": "pods", "name": "p", "uid": pod["metadata"]["uid"]},
            {"resource": "pods", "name": "q", "uid": "gone"},
        ]
        status = {"allocation": {"devices": {}}, "reservedFor": reserved}
        server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": REQUESTS})
        server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": REQUESTS, "status": status})
        first = server.release_claims()
        (kept,) = server.objects("ResourceClaim")
        server.put(
            {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}, "status": {"phase": "Succeeded"}}
        )
        second = server.release_claims()
        (free,) = server.objects("ResourceClaim")

    assert (first, second) == (["c"], ["c"])
    assert [user["name"] for user in kept["status"]["reservedFor"]] == ["p"]
    assert "allocation" in kept["status"]
    assert not free.get("status")


async def test_watch_of_one_object_tells_of_no_other_when_named_in_the_path() -> None:
    """Clients that watch an object by its own path get its changes alone."""
    async with ApiServerSimulator() as server, httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        for name in ("a", "b"):
            server.put({"kind": "ResourceClaim", "metadata": {"name": name}, "spec": REQUESTS})
        async with client.stream("GET", f"{CLAIMS}/b", params={"watch": "true", "timeoutSeconds": "0.2"}) as answer:
            seen = [json.loads(line) async for line in answer.aiter_lines()]

    assert [(event["type"], event["object"]["metadata"]["name"]) for event in seen] == [("ADDED", "b")]


async def test_protobuf_is_refused_with_a_hint_when_sent() -> None:
    """A typed client that sends protobuf learns what to do instead."""
    async with ApiServerSimulator() as server, httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        answer = await client.post(
            CLAIMS, content=b"k8s\x00", headers={"Content-Type": "application/vnd.kubernetes.protobuf"}
        )

    assert answer.status_code == 415
    assert "JSON" in answer.json()["message"]


async def test_nothing_is_kept_when_a_request_is_a_dry_run() -> None:
    """The answer is what would have been stored.

    No object, no version and no watcher is any the wiser.
    """
    async with ApiServerSimulator() as server, httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        server.put({"kind": "ResourceClaim", "metadata": {"name": "kept"}, "spec": REQUESTS})
        body = {"metadata": {"name": "new"}, "spec": REQUESTS}
        made = await client.post(CLAIMS, params={"dryRun": "All"}, json=body)
        await client.delete(f"{CLAIMS}/kept", params={"dryRun": "All"})
        patch = {"metadata": {"labels": {"a": "b"}}}
        headers = {"Content-Type": "application/merge-patch+json"}
        patched = await client.patch(f"{CLAIMS}/kept", params={"dryRun": "All"}, json=patch, headers=headers)
        (left,) = server.objects("ResourceClaim")
        after = await client.post(CLAIMS, json=body)

    assert (made.status_code, patched.json()["metadata"]["labels"]) == (201, {"a": "b"})
    assert (left["metadata"]["name"], "labels" in left["metadata"]) == ("kept", False)
    assert after.json()["metadata"]["resourceVersion"] == "3"
