"""The API server simulator over HTTP: objects, conflicts, patches, finalizers, selectors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from topobus.testing.apiserver import ApiServerSimulator

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


def a_slice(name: str = "s1", *, node: str = "n1", **spec: Any) -> dict[str, Any]:
    """One slice with one device."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    body = {"driver": "topobus.dev", "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}], **spec}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": body}


def a_claim(name: str = "c1", **metadata: Any) -> dict[str, Any]:
    """One claim for one GPU."""
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu"}}
    return {"metadata": {"name": name, **metadata}, "spec": {"devices": {"requests": [request]}}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """A server without objects."""
    async with ApiServerSimulator() as running:
        yield running


@pytest.fixture
async def client(server: ApiServerSimulator) -> AsyncIterator[httpx2.AsyncClient]:
    """An ordinary HTTP client of it."""
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as async_client:
        yield async_client


async def test_create_gives_what_is_the_servers_when_an_object_is_made(client: httpx2.AsyncClient) -> None:
    """uid, version, time and generation come from the server, and a generated name keeps its
    beginning.
    """
    answer = await client.post(SLICES, json={**a_slice(), "metadata": {"generateName": "x" * 70}})

    made = answer.json()
    assert (answer.status_code, made["kind"], made["metadata"]["generation"]) == (201, "ResourceSlice", 1)
    assert made["metadata"]["name"].startswith("x" * 58)
    assert len(made["metadata"]["name"]) == 63
    assert made["metadata"]["uid"]
    assert made["metadata"]["creationTimestamp"].endswith("Z")
    assert made["metadata"]["resourceVersion"] == "2"


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "reason", "words"),
    [
        pytest.param(
            "POST",
            SLICES,
            a_slice(),
            409,
            "AlreadyExists",
            'resourceslices.resource.k8s.io "s1" already exists',
            id="taken",
        ),
        pytest.param("GET", f"{SLICES}/none", None, 404, "NotFound", '"none" not found', id="absent"),
        pytest.param(
            "POST", SLICES, {**a_slice("s2"), "kind": "Pod"}, 400, "BadRequest", "does not match", id="wrong-kind"
        ),
        pytest.param("POST", SLICES, a_slice("s2", devices=[{"name": "A"}]), 422, "Invalid", "DNS label", id="limits"),
        pytest.param("PUT", f"{SLICES}/s1", a_slice(node="n2"), 422, "Invalid", "immutable", id="immutable"),
        pytest.param(
            "GET",
            f"{SLICES}?fieldSelector=spec.x=1",
            None,
            400,
            "BadRequest",
            "field label not supported: spec.x",
            id="field",
        ),
        pytest.param(
            "DELETE",
            f"{SLICES}/s1",
            {"preconditions": {"uid": "other"}},
            409,
            "Conflict",
            "UID in precondition",
            id="uid",
        ),
        pytest.param(
            "DELETE",
            f"{SLICES}/s1",
            {"preconditions": {"resourceVersion": "1"}},
            409,
            "Conflict",
            "in record (2)",
            id="version",
        ),
        pytest.param(
            "PUT",
            f"{SLICES}/s1",
            {**a_slice(), "metadata": {"resourceVersion": "1"}},
            409,
            "Conflict",
            "has been modified",
            id="stale",
        ),
        pytest.param("PATCH", f"{SLICES}/s1", {}, 415, "UnsupportedMediaType", "merge-patch", id="patch-kind"),
    ],
)
async def test_errors_come_as_status_when_a_request_cannot_be_done(
    client: httpx2.AsyncClient, method: str, path: str, body: Any, code: int, reason: str, words: str
) -> None:
    """Every refusal is a Status body with Kubernetes' code and reason, and nothing has changed."""
    first = (await client.post(SLICES, json=a_slice())).json()

    answer = await client.request(method, path, json=body)

    status = answer.json()
    assert (answer.status_code, status["kind"], status["code"], status["reason"]) == (code, "Status", code, reason)
    assert words in status["message"]
    assert (await client.get(f"{SLICES}/s1")).json() == first


@pytest.mark.parametrize(
    "path", ["/apis/resource.k8s.io/v0", "/apis/example.com/v1/things", "/apis/resource.k8s.io/v1/things/x"]
)
async def test_unserved_path_is_told_in_plain_text_when_it_is_asked_for(client: httpx2.AsyncClient, path: str) -> None:
    """As in a real server: only an object that is not there has a Status, so a client that looks
    for versions must not want JSON.
    """
    answer = await client.get(path)

    assert (answer.status_code, answer.headers["content-type"], answer.text) == (
        404,
        "text/plain; charset=utf-8",
        "404 page not found\n",
    )


async def test_update_takes_no_version_when_nothing_changes(client: httpx2.AsyncClient) -> None:
    """An update with the same content is answered with the present object, version included.

    A real change grows the generation.
    """
    first = (await client.post(SLICES, json=a_slice())).json()

    same = (await client.put(f"{SLICES}/s1", json=first)).json()
    changed = (await client.put(f"{SLICES}/s1", json={**first, "spec": {**first["spec"], "devices": []}})).json()

    assert same == first
    assert changed["metadata"]["generation"] == 2
    assert "devices" not in changed["spec"]
    assert changed["metadata"]["uid"] == first["metadata"]["uid"]


async def test_status_and_spec_are_changed_apart_when_a_kind_has_a_status(client: httpx2.AsyncClient) -> None:
    """The status door changes only status, the other one everything else."""
    claim = (await client.post(CLAIMS, json={**a_claim(), "status": {"reservedFor": [{"name": "p"}]}})).json()
    wanted = {
        **claim,
        "metadata": {**claim["metadata"], "labels": {"a": "b"}},
        "status": {"allocation": {"devices": {}}},
    }

    after_main = (
        await client.put(f"{CLAIMS}/c1", json={**wanted, "metadata": {"name": "c1", "labels": {"a": "b"}}})
    ).json()
    after_status = (
        await client.put(f"{CLAIMS}/c1/status", json={"metadata": {"name": "c1"}, "status": wanted["status"]})
    ).json()

    assert "status" not in claim
    assert after_main["metadata"]["labels"] == {"a": "b"}
    assert "status" not in after_main
    assert after_status["status"] == {"allocation": {"devices": {}}}
    assert after_status["metadata"]["labels"] == {"a": "b"}
    assert after_status["metadata"]["generation"] == 1


async def test_merge_patch_changes_what_it_names_when_sent(client: httpx2.AsyncClient) -> None:
    """Null removes, the rest is merged, and a version in the patch is a precondition."""
    await client.post(CLAIMS, json=a_claim(labels={"a": "1", "b": "2"}))
    headers = {"Content-Type": "application/merge-patch+json"}

    patched = await client.patch(f"{CLAIMS}/c1", json={"metadata": {"labels": {"a": None, "c": "3"}}}, headers=headers)
    stale = await client.patch(
        f"{CLAIMS}/c1", json={"metadata": {"resourceVersion": "2", "labels": {"d": "4"}}}, headers=headers
    )

    assert patched.json()["metadata"]["labels"] == {"b": "2", "c": "3"}
    assert stale.json()["reason"] == "Conflict"


async def test_apply_keeps_managers_apart_when_two_apply(client: httpx2.AsyncClient) -> None:
    """A manager's dropped field goes, another's value is a conflict unless forced."""

    async def apply(manager: str, labels: dict[str, str], **query: str) -> httpx2.Response:
        headers = {"Content-Type": "application/apply-patch+yaml"}
        return await client.patch(
            f"{CLAIMS}/c1", params={"fieldManager": manager, **query}, json=a_claim(labels=labels), headers=headers
        )

    created = await apply("one", {"a": "1", "b": "1"})
    dropped = await apply("one", {"a": "1"})
    contested = await apply("two", {"a": "2"})
    forced = await apply("two", {"a": "2"}, force="true")

    assert (created.status_code, dropped.json()["metadata"]["labels"]) == (201, {"a": "1"})
    assert (contested.status_code, contested.json()["details"]["causes"][0]["reason"]) == (409, "FieldManagerConflict")
    assert forced.json()["metadata"]["labels"] == {"a": "2"}


async def test_delete_waits_when_finalizers_hold_the_object(
    client: httpx2.AsyncClient, server: ApiServerSimulator
) -> None:
    """Deletion is marked first; the update that removes the last finalizer ends the object."""
    claim = (await client.post(CLAIMS, json=a_claim(finalizers=["resource.kubernetes.io/delete-protection"]))).json()

    marked = (await client.delete(f"{CLAIMS}/c1")).json()
    still_there = server.objects("ResourceClaim")
    await client.put(f"{CLAIMS}/c1", json={**claim, "metadata": {"name": "c1", "finalizers": []}})

    assert marked["metadata"]["deletionTimestamp"]
    assert len(still_there) == 1
    assert server.objects("ResourceClaim") == []


async def test_bound_pod_stays_when_deleted_with_grace(client: httpx2.AsyncClient, server: ApiServerSimulator) -> None:
    """A pod is bound once.

    Kubelet ends a bound pod with no grace left, the deletion itself only marks it.
    """
    pods = "/api/v1/namespaces/default/pods"
    await client.post(pods, json={"metadata": {"name": "p"}, "spec": {"containers": []}})
    binding = {"target": {"kind": "Node", "name": "n1"}}

    bound = [(await client.post(f"{pods}/p/binding", json=binding)).status_code for _ in range(2)]
    items = (await client.get("/api/v1/pods", params={"fieldSelector": "spec.nodeName=n1"})).json()["items"]
    await client.delete(f"{pods}/p")
    is_marked = bool(server.objects("Pod")[0]["metadata"]["deletionTimestamp"])
    await client.request("DELETE", f"{pods}/p", json={"gracePeriodSeconds": 0})

    assert bound == [201, 409]
    assert [item["metadata"]["name"] for item in items] == ["p"]
    assert is_marked
    assert server.objects("Pod") == []


async def test_pod_in_its_grace_period_stays_when_it_is_updated(
    client: httpx2.AsyncClient, server: ApiServerSimulator
) -> None:
    """An annotation or a status that comes while kubelet ends the pod is written, and does not
    remove the pod under kubelet's hands.
    """
    pods = "/api/v1/namespaces/default/pods"
    await client.post(pods, json={"metadata": {"name": "p"}, "spec": {"containers": []}})
    server.bind("p", "n1")
    await client.delete(f"{pods}/p")
    ending = server.objects("Pod")[0]

    answer = await client.put(
        f"{pods}/p", json={**ending, "metadata": {**ending["metadata"], "annotations": {"a": "1"}}}
    )
    server.put({**server.objects("Pod")[0], "status": {"phase": "Running"}})

    (left,) = server.objects("Pod")
    assert answer.status_code == 200
    assert left["metadata"]["annotations"] == {"a": "1"}
    assert left["status"]["phase"] == "Running"
    assert left["metadata"]["deletionTimestamp"]


async def test_selectors_choose_when_fields_and_labels_are_given(client: httpx2.AsyncClient) -> None:
    """Fields by equality, labels by equality and sets, in lists and in collections to delete."""
    for name, node, labels in (("a", "n1", {"x": "1"}), ("b", "n1", {"x": "2"}), ("c", "n2", {})):
        await client.post(SLICES, json={**a_slice(name, node=node), "metadata": {"name": name, "labels": labels}})

    async def names(**query: str) -> list[str]:
        return [item["metadata"]["name"] for item in (await client.get(SLICES, params=query)).json()["items"]]

    assert await names(fieldSelector="spec.nodeName=n1,spec.driver=topobus.dev") == ["a", "b"]
    assert await names(fieldSelector="spec.nodeName!=n1") == ["c"]
    assert await names(labelSelector="x in (1,2),x!=2") == ["a"]
    assert await names(labelSelector="!x") == ["c"]
    await client.delete(SLICES, params={"fieldSelector": "spec.nodeName=n1"})
    assert await names() == ["c"]


async def test_list_comes_in_pages_when_a_limit_is_given(
    client: httpx2.AsyncClient, server: ApiServerSimulator
) -> None:
    """`continue` leads through all objects; after a compaction it is 410."""
    for name in ("a", "b", "c"):
        await client.post(SLICES, json=a_slice(name))

    first = (await client.get(SLICES, params={"limit": "2"})).json()
    mark = first["metadata"]["continue"]
    second = (await client.get(SLICES, params={"limit": "2", "continue": mark})).json()
    server.remove("ResourceSlice", "a")
    server.compact()
    late = await client.get(SLICES, params={"limit": "2", "continue": mark})

    assert [item["metadata"]["name"] for page in (first, second) for item in page["items"]] == ["a", "b", "c"]
    assert first["metadata"]["remainingItemCount"] == 1
    assert "continue" not in second["metadata"]
    assert (late.status_code, late.json()["reason"]) == (410, "Expired")


async def test_older_server_drops_fields_when_it_does_not_know_them(
    client: httpx2.AsyncClient, server: ApiServerSimulator
) -> None:
    """The object is stored without them and nobody is told.

    An attribute whose only value is unknown is refused.
    """
    server.set_drops({"ResourceSlice": ["spec.devices.*.taints", "spec.devices.*.attributes.*.ints"]})
    taint = {"key": "topobus.dev/health", "effect": "NoExecute"}

    dropped = await client.post(SLICES, json=a_slice(devices=[{"name": "gpu-0", "taints": [taint]}]))
    refused = await client.post(
        SLICES, json=a_slice("s2", devices=[{"name": "gpu-0", "attributes": {"a": {"ints": [1]}}}])
    )

    assert dropped.json()["spec"]["devices"] == [{"name": "gpu-0"}]
    assert (refused.status_code, "exactly one of" in refused.json()["message"]) == (422, True)


async def test_slices_come_in_normal_form_when_stored(client: httpx2.AsyncClient) -> None:
    """Times have seconds, a taint without a time gets one, quantities are short: a driver that
    compares must know.
    """
    taints = [
        {"key": "a", "effect": "NoSchedule", "timeAdded": "2026-01-02T04:04:05.678+01:00"},
        {"key": "b", "effect": "None"},
    ]
    devices = [{"name": "gpu-0", "taints": taints, "capacity": {"memory": {"value": "81920Mi"}}}]

    stored = (await client.post(SLICES, json=a_slice(devices=devices))).json()["spec"]["devices"][0]

    assert stored["taints"][0]["timeAdded"] == "2026-01-02T03:04:05Z"
    assert stored["taints"][1]["timeAdded"].endswith("Z")
    assert stored["capacity"]["memory"]["value"] == "80Gi"


async def test_garbage_goes_when_its_owner_is_gone(server: ApiServerSimulator) -> None:
    """What a deleted node owned is collected, what a living one owns stays."""
    node = server.put({"kind": "Node", "metadata": {"name": "n1"}})
    server.put({"kind": "Node", "metadata": {"name": "n2"}})
    owners = [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node["metadata"]["uid"]}]
    server.put({**a_slice("a"), "metadata": {"name": "a", "ownerReferences": owners}})

    before = server.collect_garbage()
    server.remove("Node", "n1")

    assert (before, server.collect_garbage()) == ([], ["a"])


async def test_server_refuses_when_the_test_or_the_token_says_so(
    server: ApiServerSimulator, client: httpx2.AsyncClient
) -> None:
    """Injected errors come as often as asked, with Retry-After.

    Requests are kept with their outcome.
    """
    server.refuse("POST", "resourceslices", code=429, reason="TooManyRequests", retry_after_s=1)

    answers = [await client.post(SLICES, json=a_slice()) for _ in range(2)]
    async with (
        ApiServerSimulator(token="secret") as guarded,
        httpx2.AsyncClient(base_url=guarded.url, trust_env=False) as stranger,
    ):
        codes = [
            (await stranger.get(SLICES, headers=headers)).status_code
            for headers in ({}, {"Authorization": "Bearer secret"})
        ]

    assert [response.status_code for response in answers] == [429, 201]
    assert answers[0].headers["retry-after"] == "1"
    assert [(request.method, request.code, request.is_write) for request in server.requests] == [
        ("POST", 429, True),
        ("POST", 201, True),
    ]
    assert codes == [401, 200]


async def test_discovery_names_what_is_served_when_asked(client: httpx2.AsyncClient) -> None:
    """Groups, versions and resources can be found out."""
    groups = (await client.get("/apis")).json()["groups"]
    resources = (await client.get("/apis/resource.k8s.io/v1")).json()["resources"]

    assert {"apps", "rbac.authorization.k8s.io", "resource.k8s.io"} <= {group["name"] for group in groups}
    assert {"resourceslices", "resourceclaims", "resourceclaims/status", "deviceclasses"} <= {
        resource["name"] for resource in resources
    }
    assert (await client.get("/version")).json()["minor"] == "36"
