"""The gateway's way to an API server: TLS, identities that are replaced while it runs, versions
that differ, and answers that are none.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.kubeconfigs import kubeconfig, opened
from support.older_server import OlderServer, older_server
from support.tls_front import Authority, Certificate, tls_front
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.objects import (
    CLAIMS,
    NODES,
    SLICES,
    Rejected,
)
from topobus.gateway.config import ClusterSettings
from topobus.kubernetes import access as kubernetes_access
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.dra_names import DRIVER
from topobus.values.errors import ConfigError, PeerUnavailable

pytestmark = pytest.mark.integration

NODE = "n1"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server with one node, which wants a token."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.1) as running:
        running.put({"kind": "Node", "metadata": {"name": NODE}})
        yield running


def port_of(server: ApiServerSimulator) -> int:
    """Where it listens."""
    return int(server.url.rpartition(":")[2])


async def node_of(cluster: KubernetesCluster) -> str:
    """Read the node; its name, and close the cluster."""
    try:
        api_object = await cluster.get(NODES, NODE)
    finally:
        await cluster.close()
    return str(api_object.metadata["name"]) if api_object is not None else ""


def in_data(certificate: Certificate) -> dict[str, str]:
    """A client certificate within the kubeconfig."""
    return {
        "client-certificate-data": base64.b64encode(certificate.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(certificate.key.read_bytes()).decode(),
    }


@pytest.mark.parametrize("is_inline", [True, False], ids=["data", "files"])
async def test_server_is_reached_when_it_wants_a_client_certificate(
    server: ApiServerSimulator, tmp_path: Path, *, is_inline: bool
) -> None:
    """Authority and client certificate come from the kubeconfig, as data or as files beside it
    (relative paths are relative to it).
    """
    authority = Authority(tmp_path / "pki")
    client = authority.issue("client")
    async with tls_front(port_of(server), authority.issue("server"), clients=authority) as port:
        files = {"client-certificate": "pki/client.crt", "client-key": "pki/client.key"}
        authorities: dict[str, str] = {"certificate-authority": "pki/authority.crt"}
        if is_inline:
            authorities = {
                "certificate-authority-data": base64.b64encode(authority.own.certificate.read_bytes()).decode()
            }
        user = {"token": "secret", **(in_data(client) if is_inline else files)}

        node = await node_of(opened(kubeconfig(tmp_path, f"https://127.0.0.1:{port}", user, **authorities)))

    assert node == NODE


async def test_server_is_refused_when_another_authority_signed_it(server: ApiServerSimulator, tmp_path: Path) -> None:
    """Somebody who only sits at the address is not our API server: nothing is sent, and the reason
    is told.
    """
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    async with tls_front(port_of(server), other.issue("server")) as port:
        path = kubeconfig(
            tmp_path,
            f"https://127.0.0.1:{port}",
            {"token": "secret"},
            **{"certificate-authority": str(ours.own.certificate)},
        )
        with pytest.raises(PeerUnavailable, match=r"(?i)certificate"):
            await node_of(opened(path))

    assert server.requests == ()


async def test_calls_go_on_when_the_token_was_replaced(server: ApiServerSimulator, tmp_path: Path) -> None:
    """An expired token costs one 401 and no failed call, whether it stands in the kubeconfig or in
    a file of its own.
    """
    token = tmp_path / "token"
    token.write_text("old", encoding="utf-8")
    in_file, inline = tmp_path / "file", tmp_path / "inline"
    in_file.mkdir()
    inline.mkdir()
    by_file = opened(kubeconfig(in_file, server.url, {"tokenFile": str(token)}))
    by_text = opened(kubeconfig(inline, server.url, {"token": "old"}))
    for kubernetes_cluster in (by_file, by_text):
        with pytest.raises(PeerUnavailable, match="401"):
            await kubernetes_cluster.get(NODES, NODE)
    token.write_text("secret", encoding="utf-8")
    kubeconfig(inline, server.url, {"token": "secret"})

    nodes = [await node_of(kubernetes_cluster) for kubernetes_cluster in (by_file, by_text)]

    assert nodes == [NODE, NODE]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_pod_reaches_its_cluster_by_its_service_account(
    server: ApiServerSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Address and port from the environment (IPv6, too), authority and token from the mounted
    folder.

    A rotated token is read again.
    """
    authority = Authority(tmp_path / "pki")
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(authority.own.certificate.read_bytes())
    (account / "namespace").write_text("topobus", encoding="utf-8")
    (account / "token").write_text("old", encoding="utf-8")
    monkeypatch.setattr(kubernetes_access, "SERVICE_ACCOUNT", account)
    async with tls_front(port_of(server), authority.issue("server"), host=host) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        cluster = KubernetesCluster.open(ClusterSettings(mode="in-cluster", retry_s=0.01))
        with pytest.raises(PeerUnavailable, match="401"):
            await cluster.get(NODES, NODE)
        (account / "token").write_text("secret\n", encoding="utf-8")

        node = await node_of(cluster)

    assert node == NODE


@pytest.mark.parametrize(
    ("user", "cluster", "part"),
    [
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "aws"}}, {}, r"user 'u' runs a program for its credentials \(exec\)"),  # noqa: E501
        ({"auth-provider": {"name": "gcp"}}, {}, "user 'u' has an auth-provider"),
        ({"token": "t", "as-groups": ["system:masters"]}, {}, "user 'u' has as-groups and no `as`"),
        ({"token": "t", "as": "admin", "as-groups": "system:masters"}, {}, "as-groups: wanted a list of names"),
        ({"token": "t", "as": "admin\r\nImpersonate-Group: system:masters"}, {}, "without control characters"),
        ({"token": "t"}, {"tls-server-name": 7}, "tls-server-name: got 7, wanted a host name"),
        ({"token": "t"}, {"proxy-url": "http://proxy"}, "cluster 'c' has a proxy-url"),
        ({"token": "t"}, {"certificate-authority": "nowhere.crt"}, "No such file"),
    ],
    ids=["exec", "auth-provider", "groups-of-nobody", "groups-no-list", "header-in-a-name", "server-name", "proxy", "no-authority"],  # noqa: E501
)  # fmt: skip
async def test_kubeconfig_is_refused_by_name_when_it_asks_what_we_do_not_do(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], part: str
) -> None:
    """Left out in silence it would look like a server that is down.

    So the gateway ends, and says whose entry it is and what would do.
    """
    with pytest.raises(ConfigError, match=part):
        opened(kubeconfig(tmp_path, "https://127.0.0.1:1", user, **cluster))


async def test_pod_without_a_cluster_around_it_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In-cluster outside of a pod is the operator's mistake; both variables are named."""
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "KUBERNETES_SERVICE_HOST" not in os.environ

    with pytest.raises(
        ConfigError, match="KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT not set: this process runs in no pod"
    ):
        KubernetesCluster.open(ClusterSettings(mode="in-cluster"))


def a_slice(**device: Any) -> ApiObject:
    """A slice with one device."""
    spec = {
        "driver": DRIVER,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0", "attributes": {"model": {"string": "T4"}}, **device}],
    }
    return ApiObject(api_version="resource.k8s.io/v1", kind=SLICES.name, metadata={"name": "s"}, spec=spec)


@pytest.mark.parametrize(
    ("versions", "chosen"), [(("v1", "v1beta1"), "v1"), (("v1beta2", "v1beta1"), "v1beta2"), (("v1beta1",), "v1beta1")]
)
async def test_newest_version_that_the_server_has_is_spoken(
    server: ApiServerSimulator, tmp_path: Path, versions: tuple[str, ...], chosen: str
) -> None:
    """Kubernetes 1.32, 1.33 and 1.34 differ in version and shape: written, listed, watched and
    deleted in theirs, and always seen in the shape of v1.
    """
    async with older_server(server.url, *versions, token="secret") as older:
        cluster = opened(kubeconfig(tmp_path, older.url, {"token": "secret"}))
        sent = a_slice(capacity={"memory": {"value": "1Gi"}})
        created = await cluster.create(SLICES, sent)
        assert isinstance(created, ApiObject)
        async with aclosing(cluster.watch(SLICES, fields=f"spec.nodeName={NODE}")) as watch:
            snapshot = await anext(watch)
            updated = await cluster.update(
                SLICES, ApiObject(**{**_fields(created), "spec": a_slice(nodeName=None).spec})
            )
            change = await anext(watch)
        assert isinstance(updated, ApiObject)
        gone = await cluster.delete(
            SLICES, "s", uid=str(updated.metadata["uid"]), resource_version=str(updated.metadata["resourceVersion"])
        )
        await cluster.close()

    assert snapshot.objects[0].spec["devices"] == created.spec["devices"] == sent.spec["devices"]
    assert change.object.spec["devices"][0]["attributes"] == {"model": {"string": "T4"}}
    assert gone is None
    assert {slice_path.split("/")[3].partition("?")[0] for slice_path in slice_paths(older)} == {chosen}
    assert ("basic" in older.stored[0]["spec"]["devices"][0]) is (chosen == "v1beta1")
    assert server.objects("ResourceSlice") == []


def _fields(api_object: ApiObject) -> dict[str, Any]:
    return {
        "api_version": api_object.api_version,
        "kind": api_object.kind,
        "metadata": api_object.metadata,
        "spec": api_object.spec,
    }


def slice_paths(older: OlderServer) -> list[str]:
    """Every request about slices."""
    return [path for path in older.asked if "resourceslices" in path]


async def test_server_without_dra_is_named_with_what_would_do(server: ApiServerSimulator, tmp_path: Path) -> None:
    """An old server, or one whose API is switched off, is no crash and no silence: what was looked
    for is told, and which release has it.
    """
    async with older_server(server.url, "v1alpha3", token="secret") as older:
        cluster = opened(kubeconfig(tmp_path, older.url, {"token": "secret"}))
        with pytest.raises(
            PeerUnavailable, match=r"does not serve resourceclaims: wanted one of resource.k8s.io/v1, .*v1beta1 .*1\.32"
        ):
            await cluster.get(CLAIMS, "c", "default")
        await cluster.close()


async def test_version_is_asked_again_when_the_server_was_upgraded(server: ApiServerSimulator, tmp_path: Path) -> None:
    """A server that comes back newer, without the version of before, is spoken to in its own."""
    async with older_server(server.url, "v1beta1", token="secret") as older:
        cluster = opened(kubeconfig(tmp_path, older.url, {"token": "secret"}))
        async with aclosing(cluster.watch(SLICES, fields=f"spec.nodeName={NODE}")) as watch:
            await anext(watch)
            older.versions = ("v1",)
            server.compact()
            server.close_watches()
            server.put({"kind": "ResourceSlice", "metadata": {"name": "s"}, "spec": a_slice().spec})
            async with asyncio.timeout(60):
                while True:
                    change = await anext(watch)
                    if change.objects:
                        break
        await cluster.close()

    assert change.objects[0].spec["devices"][0]["name"] == "gpu-0"
    assert slice_paths(older)[-1].startswith("/apis/resource.k8s.io/v1/")


async def test_refusal_is_a_value_when_the_server_says_no(server: ApiServerSimulator, tmp_path: Path) -> None:
    """Forbidden, conflicting and invalid are answers with the server's own words.

    Too many requests and errors are trouble that passes.
    """
    cluster = opened(kubeconfig(tmp_path, server.url, {"token": "secret"}))
    refused: list[int] = []
    for code in (403, 409, 422):
        server.refuse("POST", "resourceslices", code=code, reason="X")
        answer = await cluster.create(SLICES, a_slice())
        assert isinstance(answer, Rejected)
        refused.append(answer.code)
    server.refuse("POST", "resourceslices", code=429, retry_after_s=7)
    with pytest.raises(PeerUnavailable) as busy:
        await cluster.create(SLICES, a_slice())
    await cluster.close()

    assert refused == [403, 409, 422]
    assert busy.value.retry_after_s == 7.0


async def test_claim_is_looked_for_again_when_the_server_no_longer_has_its_version(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """A version that an upgrade took away is no claim that does not exist: the first call says what
    is missing, the next speaks the new version.
    """
    server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {}})
    async with older_server(server.url, "v1beta1", token="secret") as older:
        cluster = opened(kubeconfig(tmp_path, older.url, {"token": "secret"}))
        assert await cluster.get(CLAIMS, "c", "default") is not None
        older.versions = ("v1",)

        with pytest.raises(
            PeerUnavailable, match=r"has no /apis/resource\.k8s\.io/v1beta1/namespaces/default/resourceclaims/c"
        ):
            await cluster.get(CLAIMS, "c", "default")
        api_object, missing = await cluster.get(CLAIMS, "c", "default"), await cluster.get(CLAIMS, "d", "default")
        await cluster.close()

    assert api_object is not None
    assert missing is None
