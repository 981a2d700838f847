"""The API server simulator's users: what their roles grant, what is refused, and what they used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from topobus.testing.apiserver import ApiServerSimulator, Right

USER = "system:serviceaccount:topobus:node"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/{}/pods"


def a_role(kind: str, rules: list[dict[str, Any]], namespace: str = "") -> list[dict[str, Any]]:
    """A role of this kind and its binding to the user."""
    metadata = {"name": "r", **({"namespace": namespace} if namespace else {})}
    subject = {"kind": "ServiceAccount", "name": "node", "namespace": "topobus"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "r"}
    return [
        {"kind": kind, "metadata": metadata, "rules": rules},
        {"kind": f"{kind}Binding", "metadata": metadata, "roleRef": reference, "subjects": [subject]},
    ]


@pytest.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """A server with a claim."""
    async with ApiServerSimulator(token="admin") as running:
        request = {"name": "gpu", "exactly": {"deviceClassName": "gpu"}}
        running.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}})
        yield running


@pytest.fixture
async def client(server: ApiServerSimulator) -> AsyncIterator[httpx2.AsyncClient]:
    """A client with the user's token."""
    headers = {"Authorization": f"Bearer {server.add_user(USER)}"}
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, headers=headers) as async_client:
        yield async_client


def grant(server: ApiServerSimulator, kind: str, *rules: dict[str, Any], namespace: str = "") -> None:
    """Store a role and its binding."""
    for api_object in a_role(kind, list(rules), namespace):
        server.put(api_object)


async def test_user_is_refused_when_no_role_grants_it(client: httpx2.AsyncClient) -> None:
    """A 403 with Kubernetes' words; discovery is everybody's, and an unknown token nobody's."""
    refused = await client.get(SLICES)
    discovery = await client.get("/apis")
    stranger = await client.get(SLICES, headers={"Authorization": "Bearer other"})

    assert (refused.status_code, refused.json()["reason"]) == (403, "Forbidden")
    assert refused.json()["message"] == (
        f'resourceslices.resource.k8s.io is forbidden: User "{USER}" cannot list resource "resourceslices" in '
        'API group "resource.k8s.io" '
        "at the cluster scope"
    )
    assert (discovery.status_code, stranger.status_code) == (200, 401)


async def test_user_may_do_what_its_role_says_when_bound(
    server: ApiServerSimulator, client: httpx2.AsyncClient
) -> None:
    """Verb, group, name and part count one by one.

    What was granted and never asked for is known afterwards.
    """
    grant(
        server,
        "ClusterRole",
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list", "delete"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"], "resourceNames": ["c"]},
    )
    codes = [
        (await client.get(SLICES)).status_code,
        (await client.get(f"{SLICES}/s")).status_code,
        (await client.get(f"{CLAIMS}/c")).status_code,
        (await client.get(f"{CLAIMS}/other")).status_code,
        (await client.get(f"{CLAIMS}/c/status")).status_code,
    ]

    assert codes == [200, 403, 200, 403, 403]
    assert server.rights_unused(USER) == {Right(verb="delete", group="resource.k8s.io", resource="resourceslices")}
    assert Right(verb="list", group="resource.k8s.io", resource="resourceslices") in server.rights_used(USER)


async def test_role_binds_in_its_namespace_alone_when_it_has_one(
    server: ApiServerSimulator, client: httpx2.AsyncClient
) -> None:
    """A Role's rights end with its namespace."""
    grant(server, "Role", {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]}, namespace="inside")

    codes = [(await client.get(PODS.format(namespace))).status_code for namespace in ("inside", "outside")]
    everywhere = (await client.get("/api/v1/pods")).status_code

    assert (codes, everywhere) == ([200, 403], 403)


SPEC = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}
NODE = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]}
RESULT = {"request": "gpu", "driver": "topobus.dev", "pool": "n1", "device": "gpu-0"}
ALLOCATION = {"devices": {"results": [RESULT]}, "nodeSelector": NODE}
DEVICE = {"driver": "topobus.dev", "pool": "n1", "device": "gpu-0"}
STATUS = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/status"], "verbs": ["update", "patch"]}
BINDING = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/binding"], "verbs": ["update", "patch"]}


def driver_right(*verbs: str, driver: str = "topobus.dev") -> dict[str, Any]:
    """The right to say something of a driver's devices."""
    return {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceclaims/driver"],
        "verbs": list(verbs),
        "resourceNames": [driver],
    }


async def test_claim_status_needs_the_part_that_is_written_when_changed(
    server: ApiServerSimulator, client: httpx2.AsyncClient
) -> None:
    """The right on `resourceclaims/status` is not enough: an allocation needs `binding`, a device's
    state needs `driver`; a real server says so as it validates.
    """
    allocation = {"status": {"allocation": ALLOCATION}}
    devices = {"status": {"allocation": ALLOCATION, "devices": [DEVICE]}}
    server.add_user(USER, node="n1")

    codes = []
    for rules, body in (
        ([STATUS], allocation),
        ([STATUS, BINDING], allocation),
        ([STATUS, BINDING], devices),
        ([STATUS, driver_right("associated-node:update", driver="nic.example.com")], devices),
        ([STATUS, driver_right("associated-node:update")], devices),
    ):
        grant(server, "ClusterRole", *rules)
        answer = await client.put(f"{CLAIMS}/c/status", json={"metadata": {"name": "c"}, **body})
        codes.append((answer.status_code, answer.json().get("message", "").partition("Forbidden: ")[2][:34]))

    refused = "changing status.devices requires r"
    assert codes == [(422, "changing status.allocation or stat"), (200, ""), (422, refused), (422, refused), (200, "")]


@pytest.mark.parametrize(
    ("verb", "node", "code"),
    [("associated-node", "n1", 200), ("associated-node", "n2", 422), ("arbitrary-node", "n2", 200)],
)
async def test_device_status_is_written_from_the_allocations_node(
    server: ApiServerSimulator, client: httpx2.AsyncClient, verb: str, node: str, code: int
) -> None:
    """The right of the claim's own node is no right of another node's token.

    What is applied is judged by what would stand there.
    """
    server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": SPEC, "status": {"allocation": ALLOCATION}})
    server.add_user(USER, node=node)
    grant(server, "ClusterRole", STATUS, driver_right(f"{verb}:patch"))

    answer = await client.patch(
        f"{CLAIMS}/c/status?fieldManager=topobus.dev&force=true",
        json={
            "kind": "ResourceClaim",
            "apiVersion": "resource.k8s.io/v1",
            "metadata": {"name": "c"},
            "status": {"devices": [DEVICE]},
        },
        headers={"content-type": "application/apply-patch+yaml"},
    )

    assert answer.status_code == code
