"""The API server simulator under an ordinary client library: what a controller's author would do
works without knowing of the simulator.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.models.resource_v1 import ResourcePool, ResourceSliceSpec
from lightkube.resources.core_v1 import Node, Pod
from lightkube.resources.resource_v1 import ResourceClaim, ResourceSlice
from lightkube.types import PatchType

from topobus.testing.apiserver import ApiServerSimulator


def a_slice(name: str, node: str) -> ResourceSlice:
    """A typed slice."""
    spec = ResourceSliceSpec(
        driver="gpu.example.com", nodeName=node, pool=ResourcePool(name=node, generation=1, resourceSliceCount=1)
    )
    return ResourceSlice(metadata=ObjectMeta(name=name), spec=spec)


def client_of(server: ApiServerSimulator, folder: Path) -> AsyncClient:
    """A client that found its way by a kubeconfig file."""
    return AsyncClient(
        KubeConfig.from_file(server.write_kubeconfig(folder / "kubeconfig")), trust_env=False, field_manager="test"
    )


async def test_library_does_its_work_when_it_knows_nothing_of_the_simulator(tmp_path: Path) -> None:
    """Typed create, get, list in pages with selectors, replace, patch, apply, delete.

    A conflict is the library's own error.
    """
    async with ApiServerSimulator(token="t") as server, client_of(server, tmp_path) as client:
        for index in range(3):
            await client.create(a_slice(f"s{index}", f"n{index % 2}"))
        first = await client.get(ResourceSlice, "s0")
        listed = [
            resource_slice.metadata.name
            async for resource_slice in client.list(ResourceSlice, fields={"spec.nodeName": "n0"}, chunk_size=1)
        ]
        await client.patch(ResourceSlice, "s0", {"metadata": {"labels": {"a": "b"}}}, patch_type=PatchType.MERGE)
        with pytest.raises(ApiError) as conflict:
            await client.replace(first)
        node = await client.apply(Node(metadata=ObjectMeta(name="n0", labels={"zone": "a"})), field_manager="test")
        await client.delete(ResourceSlice, "s1")
        with pytest.raises(ApiError) as gone:
            await client.get(ResourceSlice, "s1")

    assert listed == ["s0", "s2"]
    assert (conflict.value.status.code, conflict.value.status.reason) == (409, "Conflict")
    assert node.metadata.labels == {"zone": "a"}
    assert gone.value.status.reason == "NotFound"


async def test_librarys_watch_follows_when_changes_come(tmp_path: Path) -> None:
    """The library's own watch sees a claim appear, get a status, and go."""
    async with asyncio.timeout(60), ApiServerSimulator() as server, client_of(server, tmp_path) as client:
        events = client.watch(ResourceClaim, namespace="*", resource_version="1")
        request = {"name": "r", "exactly": {"deviceClassName": "gpu"}}
        claim = {"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}}
        server.put({**claim, "status": {"allocation": {"devices": {"results": []}}}})
        server.remove("ResourceClaim", "c")

        seen = [await anext(events) for _ in range(3)]
        pods = [pod async for pod in client.list(Pod, namespace="default")]

    assert [kind for kind, _ in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert seen[1][1].status.allocation is not None
    assert pods == []


async def test_process_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """As a program it prints its address, makes the nodes, writes the kubeconfig, and ends in
    order.
    """
    kubeconfig = tmp_path / "kubeconfig"
    command = (sys.executable, "-m", "topobus.testing.apiserver", "--node", "n1", "--kubeconfig", str(kubeconfig))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        async with AsyncClient(KubeConfig.from_file(kubeconfig), trust_env=False) as client:
            node = await client.get(Node, "n1")
    finally:
        process.terminate()
    ended = await asyncio.wait_for(process.wait(), 30)

    assert url.startswith("http://127.0.0.1:")
    assert node.metadata.name == "n1"
    assert ended == 0
