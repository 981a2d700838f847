"""What the tokens of the manifests, and of a tenant, can do at an API server: the requests that they
should not make are refused, by RBAC or by the admission policies of deploy/kubernetes.

A control plane without nodes is enough (TOPOBUS_CLUSTER_INSTALLATION=none, KUBECONFIG). Nodes and
pods are plain objects. The simulator of the API server knows RBAC and no admission policy.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from support.cluster import until
from support.installation import setting
from support.kubeconfigs import kubeconfig
from support.kustomize import built
from topobus.controller.snapshots.listing import open_client
from topobus.kubernetes.answers import NOT_FOUND, Rejected
from topobus.kubernetes.client import KubernetesClient, object_path

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        setting("INSTALLATION") != "none",
        reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `none`",
    ),
]

Plain = dict[str, Any]
Attempt = tuple[str, str, Any]
"""Method, path and body of a request."""

_HOME, _TEAM, _OTHER_TEAM = "topobus", "topobus-e2e-team", "topobus-e2e-others"
_OURS, _THEIRS = "topobus-e2e-ours", "topobus-e2e-theirs"
_DRA = "resource.k8s.io/v1"
_KINDS = {
    "ServiceAccount": ("v1", "serviceaccounts"),
    "ClusterRole": ("rbac.authorization.k8s.io/v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    "ValidatingAdmissionPolicy": ("admissionregistration.k8s.io/v1", "validatingadmissionpolicies"),
    "ValidatingAdmissionPolicyBinding": ("admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings"),
}
_FOREIGN_DEVICE = "may write of devices of Topobus on its own node alone"
_OWN_PODS = "a gateway may change pods of its own node alone"
_ONE_ANNOTATION = "may change the annotation topobus.dev/prepare-again alone"
_CONDITIONS = "may change the conditions topobus.dev/CLASS-ready of a node's status alone"
_STATUS_DEVICES = "a gateway may change status.devices of a claim alone"
_FORBIDDEN = "is forbidden"


def pods(name: str = "", *, namespace: str = _TEAM) -> str:
    """The path of pods, or of one."""
    return object_path("v1", "pods", namespace=namespace, name=name)


def nodes(name: str = "", part: str = "") -> str:
    """The path of Nodes, of one, or of its status."""
    return object_path("v1", "nodes", name=name, part=part)


def claims(name: str = "", part: str = "", *, namespace: str = _TEAM) -> str:
    """The path of claims, of one, or of its status."""
    return object_path(_DRA, "resourceclaims", namespace=namespace, name=name, part=part)


def slices(name: str = "") -> str:
    """The path of slices, or of one."""
    return object_path(_DRA, "resourceslices", name=name)


def resource_slice(node: str) -> Plain:
    """A slice of ours, of a node, with the node's name."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "topobus.dev", "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]}
    return {"apiVersion": _DRA, "kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec}


def claim(name: str, *, is_admin: bool = False) -> Plain:
    """A claim for one device."""
    exactly: Plain = {"deviceClassName": "gpu.topobus.dev", "allocationMode": "ExactCount", "count": 1}
    if is_admin:
        exactly["adminAccess"] = True
    requests = [{"name": "gpu", "exactly": exactly}]
    return {
        "apiVersion": _DRA,
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": requests}},
    }


def pod(name: str, node: str, account: str = "") -> Plain:
    """A pod on a node."""
    spec: Plain = {
        "nodeName": node,
        "containers": [{"name": "main", "image": "none"}],
        "automountServiceAccountToken": False,
    }
    if account:
        spec["serviceAccountName"] = account
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Plane:
    """A control plane, asked by its administrator and by others."""

    def __init__(self, admin: KubernetesClient, folder: Path) -> None:
        self.admin = admin
        self._folder = folder
        self._made: list[str] = []

    async def make(self, collection: str, plain: Plain) -> Plain:
        """Make an object, which is removed at the end."""
        stored = await self.admin.ask("POST", collection, body=plain)
        assert not isinstance(stored, Rejected), stored
        self._made.append(f"{collection}/{plain['metadata']['name']}")
        return stored

    async def clean(self) -> None:
        """Remove what was made, the last first, and wait until it is gone."""
        for path in reversed(self._made):
            await self.admin.ask("DELETE", path, params={"gracePeriodSeconds": "0"})
            await until(f"{path} is gone", lambda path=path: self.admin.ask("GET", path), _is_gone)
        self._made.clear()

    @asynccontextmanager
    async def speaking_as(self, account: str, namespace: str, pod_name: str = "") -> AsyncIterator[KubernetesClient]:
        """Connect with a token of a service account, bound to a pod where one is named."""
        path = object_path("v1", "serviceaccounts", namespace=namespace, name=account, part="token")
        bound = {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod_name}} if pod_name else {}
        answer = await self.admin.ask("POST", path, body={"spec": {"audiences": [], **bound}})
        assert not isinstance(answer, Rejected), answer
        url, trust = _server()
        client = open_client(str(kubeconfig(self._folder, url, {"token": answer["status"]["token"]}, **trust)), "")
        try:
            yield client
        finally:
            await client.close()


def _server() -> tuple[str, Plain]:
    """Where the API server is, and whom to trust."""
    cluster = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text(encoding="utf-8"))["clusters"][0]["cluster"]
    return cluster["server"], {key: value for key, value in cluster.items() if key != "server"}


def _is_gone(answer: Plain | Rejected) -> bool:
    return isinstance(answer, Rejected) and answer.code == NOT_FOUND


async def refusals(client: KubernetesClient, attempts: dict[str, Attempt]) -> dict[str, str]:
    """What the server answers to each; empty where it does what it was asked."""
    answers = {name: await client.ask(method, path, body=body) for name, (method, path, body) in attempts.items()}
    return {name: answer.message if isinstance(answer, Rejected) else "" for name, answer in answers.items()}


def differing(answers: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    """The answers that are not what is wanted: empty for one that is served, else words of the refusal."""
    return {name: text for name, text in answers.items() if (wanted[name] not in text if wanted[name] else text)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plane]:
    """Two nodes with a slice, a pod and a claim each, a tenant, and the gateway's rights and policies.

    Errors: fails for a control plane that has nodes, or the namespace topobus: it is in use.
    """
    async with AsyncExitStack() as stack:
        admin = open_client(os.environ["KUBECONFIG"], "")
        stack.push_async_callback(admin.close)
        made = Plane(admin, tmp_path_factory.mktemp("tokens"))
        listed = await admin.ask("GET", nodes())
        assert not isinstance(listed, Rejected), listed
        assert listed["items"] == [], f"{admin.server} has nodes: name a control plane without any"
        stack.push_async_callback(made.clean)
        for namespace in (_HOME, _TEAM, _OTHER_TEAM):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
            await made.make(object_path("v1", "namespaces"), body)
        await _make_rights(made)
        for node in (_OURS, _THEIRS):
            await made.make(
                nodes(),
                {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "status": {"conditions": [_READY]}},
            )
            await made.make(pods(), pod(f"on-{node}", node))
        await made.make(slices(), resource_slice(_THEIRS))
        await made.make(claims(), claim("mine"))
        await made.make(claims(namespace=_OTHER_TEAM), claim("theirs"))
        await made.make(pods(namespace=_HOME), pod("gateway", _OURS, "topobus-gateway"))
        yield made


_READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


async def _make_rights(plane: Plane) -> None:
    """Make the gateway's objects of the manifests, and a tenant who may edit its own namespace."""
    for manifest in built("kubernetes"):
        if manifest["kind"] in _KINDS and "gateway" in manifest["metadata"]["name"]:
            version, plural = _KINDS[manifest["kind"]]
            await plane.make(
                object_path(version, plural, namespace=manifest["metadata"].get("namespace", "")), manifest
            )
    await plane.make(
        object_path("v1", "serviceaccounts", namespace=_TEAM),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "tenant"}},
    )
    rbac = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "edit"},
        "subjects": [{"kind": "ServiceAccount", "name": "tenant", "namespace": _TEAM}],
    }
    await plane.make(object_path(f"{rbac}/v1", "rolebindings", namespace=_TEAM), binding)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(plane: Plane) -> AsyncIterator[KubernetesClient]:
    """The gateway's token, of its pod on our node, once the policies bind it."""
    async with plane.speaking_as("topobus-gateway", _HOME, "gateway") as client:
        probe = {"bound": ("POST", f"{slices()}?dryRun=All", resource_slice("probe"))}
        await until(
            "the policies bind", lambda: refusals(client, probe), lambda answers: "may not write" in answers["bound"]
        )
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenant(plane: Plane) -> AsyncIterator[KubernetesClient]:
    """The tenant's token, once the API server has put the rights of `edit` together."""
    async with plane.speaking_as("tenant", _TEAM) as client:
        probe = {"claims": ("GET", claims(), None)}
        await until("the tenant has its rights", lambda: refusals(client, probe), lambda answers: not answers["claims"])
        yield client


async def test_gateways_token_changes_slices_and_conditions_of_its_own_node_alone(gateway: KubernetesClient) -> None:
    """Another node's slices and conditions, kubelet's condition, capacity and taints stay."""
    ready = {"type": "topobus.dev/gpu-ready", "status": "True", "reason": "Ready"}
    attempts: dict[str, Attempt] = {
        "its own slice": ("POST", slices(), resource_slice(_OURS)),
        "a slice of another node": ("POST", slices(), {**resource_slice(_THEIRS), "metadata": {"name": "forged"}}),
        "deletion of another node's slice": ("DELETE", slices(_THEIRS), None),
        "deletion of its own slice": ("DELETE", slices(_OURS), None),
        "its own condition": ("PATCH", nodes(_OURS, "status"), {"status": {"conditions": [_READY, ready]}}),
        "another node's condition": ("PATCH", nodes(_THEIRS, "status"), {"status": {"conditions": [_READY, ready]}}),
        "kubelet's condition": (
            "PATCH",
            nodes(_OURS, "status"),
            {"status": {"conditions": [{**_READY, "status": "False"}, ready]}},
        ),
        "capacity": ("PATCH", nodes(_OURS, "status"), {"status": {"capacity": {"example.com/gold": "1"}}}),
        "a taint": ("PATCH", nodes(_OURS), {"spec": {"taints": []}}),
    }
    wanted = {
        "its own slice": "",
        "a slice of another node": f"a gateway on {_OURS} may not write a slice of {_THEIRS}",
        "deletion of another node's slice": f"a gateway on {_OURS} may not write a slice of {_THEIRS}",
        "deletion of its own slice": "",
        "its own condition": "",
        "another node's condition": "a gateway may change its own node alone",
        "kubelet's condition": _CONDITIONS,
        "capacity": _CONDITIONS,
        "a taint": _FORBIDDEN,
    }

    assert differing(await refusals(gateway, attempts), wanted) == {}


async def test_gateways_token_changes_one_annotation_of_pods_of_its_own_node(gateway: KubernetesClient) -> None:
    """Not their labels or images, no pod of another node; it makes, deletes and enters none."""
    ours, elsewhere = pods(f"on-{_OURS}"), pods(f"on-{_THEIRS}")
    again = {"metadata": {"annotations": {"topobus.dev/prepare-again": "1"}}}
    image = [{"op": "replace", "path": "/spec/containers/0/image", "value": "other"}]
    attempts: dict[str, Attempt] = {
        "the annotation": ("PATCH", ours, again),
        "another annotation": ("PATCH", ours, {"metadata": {"annotations": {"a": "b"}}}),
        "a label": ("PATCH", ours, {"metadata": {"labels": {"a": "b"}}}),
        "an image": ("PATCH", ours, image),
        "the annotation on another node": ("PATCH", elsewhere, again),
        "a pod": ("POST", pods(), pod("more", _OURS)),
        "a deletion": ("DELETE", ours, None),
        "an eviction": (
            "POST",
            f"{ours}/eviction",
            {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": f"on-{_OURS}"}},
        ),
        "Secrets": ("GET", object_path("v1", "secrets", namespace=_HOME), None),
    }
    wanted = {
        "the annotation": "",
        "another annotation": _ONE_ANNOTATION,
        "a label": _ONE_ANNOTATION,
        "an image": _ONE_ANNOTATION,
        "the annotation on another node": _OWN_PODS,
        **dict.fromkeys(("a pod", "a deletion", "an eviction", "Secrets"), _FORBIDDEN),
    }

    assert differing(await refusals(gateway, attempts), wanted) == {}


async def test_gateways_token_changes_no_allocation(plane: Plane, gateway: KubernetesClient) -> None:
    """Of a claim it writes the state of devices of its own node, and neither who has them nor another's."""
    results = [
        {"request": "gpu", "driver": "topobus.dev", "pool": node, "device": "gpu-0"} for node in (_OURS, _THEIRS)
    ]
    # A token's node is compared with that of the allocation, by Kubernetes 1.36 itself.
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [_OURS]}]}
    allocation = {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
    status = {"allocation": allocation}
    allocated = await plane.admin.ask("PATCH", claims("mine", "status"), body={"status": status})
    assert not isinstance(allocated, Rejected), allocated

    def state(node: str) -> Plain:
        return {"status": {"devices": [{"driver": "topobus.dev", "pool": node, "device": "gpu-0"}]}}

    user = {"resource": "pods", "name": "p", "uid": "u"}
    attempts: dict[str, Attempt] = {
        "its own device": ("PATCH", claims("mine", "status"), state(_OURS)),
        "another node's device": ("PATCH", claims("mine", "status"), state(_THEIRS)),
        "another allocation": (
            "PATCH",
            claims("mine", "status"),
            {"status": {"allocation": {**allocation, "devices": {"results": results[:1]}}}},
        ),
        "a reservation": ("PATCH", claims("mine", "status"), {"status": {"reservedFor": [user]}}),
        "a spec": ("PATCH", claims("mine"), {"metadata": {"labels": {"a": "b"}}}),
        "a list of claims": ("GET", claims(), None),
    }
    answers = await refusals(gateway, attempts)

    # An API server of 1.36 asks by itself for the right over allocation and reservation, before any policy.
    refused = {"another node's device": _FOREIGN_DEVICE, "a spec": _FORBIDDEN, "a list of claims": _FORBIDDEN}
    assert (
        differing({name: answers[name] for name in ("its own device", *refused)}, {"its own device": "", **refused})
        == {}
    )
    assert [
        name
        for name in ("another allocation", "a reservation")
        if not any(words in answers[name] for words in (_STATUS_DEVICES, "binding"))
    ] == []


async def test_gateways_token_is_good_for_nothing_when_it_names_no_node(plane: Plane) -> None:
    """A token that was made for no pod writes no slice, whichever node it says."""
    async with plane.speaking_as("topobus-gateway", _HOME) as client:
        answers = await refusals(client, {"a slice": ("POST", slices(), resource_slice(_OURS))})

    assert "the token names no node" in answers["a slice"]


async def test_tenant_reads_its_own_claims_and_events_and_nothing_of_others(tenant: KubernetesClient) -> None:
    """By Kubernetes' own role `edit` in one namespace: no node, slice or class, nothing of another
    namespace or of Topobus'; it allocates nothing, and looks at no device of others.
    """
    events = {space: object_path("v1", "events", namespace=space) for space in (_TEAM, _OTHER_TEAM)}
    attempts: dict[str, Attempt] = {
        "its claims": ("GET", claims(), None),
        "its events": ("GET", events[_TEAM], None),
        "a claim": ("POST", f"{claims()}?dryRun=All", claim("one-more")),
        "claims of others": ("GET", claims(namespace=_OTHER_TEAM), None),
        "events of others": ("GET", events[_OTHER_TEAM], None),
        "pods of others": ("GET", pods(namespace=_OTHER_TEAM), None),
        "slices": ("GET", slices(), None),
        "classes": ("GET", object_path(_DRA, "deviceclasses"), None),
        "nodes": ("GET", nodes(), None),
        "passwords": ("GET", object_path("v1", "secrets", namespace=_HOME), None),
        "its claim's allocation": ("PATCH", claims("mine", "status"), {"status": {"allocation": None}}),
        "admin access": ("POST", f"{claims()}?dryRun=All", claim("look", is_admin=True)),
    }
    served = dict.fromkeys(("its claims", "its events", "a claim"), "")
    wanted = {
        **dict.fromkeys(attempts, _FORBIDDEN),
        **served,
        "admin access": "admin access to devices requires the `resource",
    }

    assert differing(await refusals(tenant, attempts), wanted) == {}
