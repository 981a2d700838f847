"""The pages about turning Topobus off and about choosing its nodes, by their own commands: kubectl
at the API server simulator.

Skipped where there is no kubectl.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.dra_names import DRIVER

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH"),
]

ROOT = Path(__file__).resolve().parents[3]
_PAGES = ROOT / "docs" / "how-to"
_KUBELETS = {"type": "Ready", "status": "True"}
_LEFT = ("Namespace", "DaemonSet", "Deployment", "StatefulSet", "ClusterRole", "ClusterRoleBinding", "DeviceClass")


def commands(page: str) -> list[str]:
    """The commands of a page's console blocks, in their order."""
    text = (_PAGES / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```console\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]


async def run(command: str, kubeconfig: Path) -> str:
    """Run a line as its reader does; its output."""
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(kubeconfig.parent)}
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=ROOT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, f"{command}: {output.decode()}"
    return output.decode()


async def test_nothing_of_topobus_is_left_when_the_page_was_followed(tmp_path: Path) -> None:
    """Its objects, classes and conditions are gone; kubelet's condition is there, and the page's
    looks show the claim, the gate and the slice that were there before.
    """
    conditions = [_KUBELETS, *({"type": f"{DRIVER}/{name}-ready", "status": "True"} for name in ("gpu", "nic"))]
    async with ApiServerSimulator(collects_garbage=True) as server:
        config = server.write_kubeconfig(tmp_path / "kubeconfig")
        for name in ("n1", "n2"):
            server.put({"kind": "Node", "metadata": {"name": name}, "status": {"conditions": conditions}})
        server.put({"kind": "ResourceClaim", "metadata": {"name": "training"}, "spec": {"devices": {}}})
        gates = [{"name": "topobus.dev/allocation"}]
        containers = [{"name": "main", "image": "none"}]
        server.put(
            {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"schedulingGates": gates, "containers": containers}}
        )
        await run("kubectl apply -k deploy/kubernetes && kubectl apply -f examples/claims/classes.yaml", config)
        before = {kind for kind in _LEFT if server.objects(kind)}
        said = "".join([await run(command, config) for command in commands("turn-it-off.md")])

    assert before == set(_LEFT)
    assert {"training", "topobus.dev/allocation"} <= set(said.split())
    assert [kind for kind in _LEFT if server.objects(kind)] == []
    assert [node["status"]["conditions"] for node in server.objects("Node")] == [[_KUBELETS], [_KUBELETS]]


def test_labelled_nodes_alone_get_topobus_when_the_pages_kustomization_is_applied(tmp_path: Path) -> None:
    """Both DaemonSets select the label beside what they select anyway, and gateways have the profile."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (_PAGES / "migrate.md").read_text(encoding="utf-8"), re.DOTALL)
    # kustomize reads folders relative to the file alone.
    base = os.path.relpath(ROOT / "deploy" / "kubernetes", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(block.replace("../topobus/deploy/kubernetes", base), encoding="utf-8")
    made = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )

    manifests = list(yaml.safe_load_all(made.stdout))
    selectors = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["nodeSelector"]
        for each in manifests
        if each["kind"] == "DaemonSet"
    }
    (settings,) = [each["data"] for each in manifests if each["metadata"]["name"] == "topobus-node" and "data" in each]
    wanted = {"kubernetes.io/os": "linux", "topobus.dev/node": "true"}
    assert selectors == {"topobus-gateway": wanted, "topobus-node": wanted}
    assert settings["TOPOBUS_GATEWAY__PROFILES"] == '["nvidia"]'
