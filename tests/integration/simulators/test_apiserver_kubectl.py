"""The API server simulator under kubectl, which was not made for it.

Skipped where there is no kubectl.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

KUBECTL = os.environ.get("TOPOBUS_KUBECTL") or shutil.which("kubectl")
ROOT = Path(__file__).resolve().parents[3]


async def kubectl(kubeconfig: Path, *arguments: str) -> str:
    """Run it; its output, which is the error's text when it fails."""
    if KUBECTL is None:
        pytest.skip("no kubectl here")
    environment = {"KUBECONFIG": str(kubeconfig), "HOME": str(kubeconfig.parent), "PATH": os.environ["PATH"]}
    process = await asyncio.create_subprocess_exec(
        KUBECTL, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=ROOT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode().strip()


async def test_kubectl_applies_patches_and_deletes_when_it_is_given_our_manifests(tmp_path: Path) -> None:
    """Both ways of apply, all three patches, a label, a new image and an end that it waits for."""
    image = "-ojsonpath={.spec.template.spec.containers[?(@.name=='gpu')].image}"
    node_plane = ("-n", "topobus", "daemonset/topobus-node")
    async with ApiServerSimulator(collects_garbage=True) as server:
        server.put({"kind": "Node", "metadata": {"name": "n1"}})
        config = server.write_kubeconfig(tmp_path / "kubeconfig")
        await kubectl(config, "apply", "-k", "deploy/kubernetes")
        again = await kubectl(config, "apply", "-k", "deploy/kubernetes")
        await kubectl(config, "apply", "--server-side", "-k", "deploy/kubernetes")
        strategic = '{"spec":{"template":{"spec":{"containers":[{"name":"gpu","image":"a:1"}]}}}}'
        await kubectl(config, "patch", *node_plane, "-p", strategic)
        patched = await kubectl(config, "get", *node_plane, image)
        await kubectl(
            config,
            "patch",
            "node",
            "n1",
            "--type=json",
            "-p",
            '[{"op":"add","path":"/metadata/labels","value":{"a":"b"}}]',
        )
        await kubectl(config, "patch", "node", "n1", "--type=merge", "-p", '{"metadata":{"labels":{"c":"d"}}}')
        labels = server.objects("Node")[0]["metadata"]["labels"]
        await kubectl(config, "set", "image", *node_plane, "gpu=b:2")
        changed = await kubectl(config, "get", *node_plane, image)
        await kubectl(config, "apply", "-f", "examples/claims/classes.yaml")
        classes = await kubectl(config, "get", "deviceclasses", "-oname")
        await kubectl(config, "delete", "-k", "deploy/kubernetes", "--timeout=30s")
        left = server.objects("DaemonSet")

    assert {line.rpartition(" ")[2] for line in again.splitlines()} == {"unchanged"}
    assert (patched, changed) == ("a:1", "b:2")
    assert labels == {"a": "b", "c": "d"}
    assert "deviceclass.resource.k8s.io/gpu.topobus.dev" in classes
    assert left == []
