"""The controller's rights in deploy/kubernetes are exactly what it calls: nothing is refused, and
no right stays unused.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from support.cluster_home import ClusterHome, claim, node, pod, slice_of, template
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

MANIFEST = Path(__file__).parents[3] / "deploy" / "kubernetes" / "controller.yaml"
USER = "system:serviceaccount:topobus:topobus-controller"
RULE = {
    "kind": "DeviceTaintRule",
    "metadata": {"name": "r"},
    "spec": {"deviceSelector": {"pool": "none"}, "taint": {"key": "k", "effect": "NoSchedule"}},
}


async def test_controller_needs_each_right_that_its_manifest_grants_and_no_other(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """A pod served, one told why not, one taken back, a write that lost: all with the manifest's
    rights, and all of these are used.
    """
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        for api_object in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")):
            server.put(api_object, namespace="topobus")
        home = ClusterHome(server, nats_server.url, tmp_path)
        server.write_kubeconfig(home.kubeconfig, user=USER)
        home.machine_room()
        home.put(RULE, template("one"), claim("big", count=9), pod("big", "big"), pod("p", templates=("one",)))
        server.generate_claims()
        # A conflict makes it read what is there now.
        server.refuse("PATCH", "pods", code=409, reason="Conflict")
        server.refuse("PATCH", "resourceclaims", code=409, reason="Conflict")
        async with home.controller():
            await home.until(lambda: not home.gates("p"), "an open gate")
            await home.until(lambda: home.events("big"), "an event")
            name = server.objects("ResourceClaim")[1]["metadata"]["name"]
            home.set_status(
                "Pod", "p", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
            )
            await home.until(lambda: home.node_of(name) == "n2" and home.users(name), "devices elsewhere")
            unused = server.rights_unused(USER)
        refused = [f"{request.method} {request.path}" for request in server.requests if request.code == 403]

    assert refused == []
    # The same event told again raises its count; that takes five minutes.
    assert sorted(map(str, unused)) == ["patch events"]


async def test_controller_says_which_right_is_missing(nats_server: NatsServer, tmp_path: Path) -> None:
    """Without the right to write a claim's status the pod is told so by an event, and the
    controller lives.
    """
    manifest = MANIFEST.read_text(encoding="utf-8").replace("resourceclaims/status", "resourceclaims/other")
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        for api_object in yaml.safe_load_all(manifest):
            server.put(api_object, namespace="topobus")
        home = ClusterHome(server, nats_server.url, tmp_path)
        server.write_kubeconfig(home.kubeconfig, user=USER)
        home.put(node("n1"), slice_of("n1", 1), claim("c"), pod("p", "c"))
        home.machine_room(nodes=1)
        async with home.controller():
            await home.until(lambda: home.events("p"), "an event")
            home.put(pod("other"))
            await home.until(lambda: not home.gates("other"), "another pod served")

    reason, message = home.events("p")[0]
    assert reason == "WriteRefused"
    assert 'cannot patch resource "resourceclaims/status"' in message


async def test_own_housekeeping_needs_two_rights_more(nats_server: NatsServer, tmp_path: Path) -> None:
    """With `housekeeping: own` the controller creates and deletes claims besides, as the manifest's
    comment says.
    """
    manifest = MANIFEST.read_text(encoding="utf-8").replace(
        "[get, list, patch, watch]", "[create, delete, get, list, patch, watch]", 1
    )
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        for api_object in yaml.safe_load_all(manifest):
            server.put(api_object, namespace="topobus")
        home = ClusterHome(server, nats_server.url, tmp_path)
        server.write_kubeconfig(home.kubeconfig, user=USER)
        home.machine_room()
        home.put(template("one"), pod("p", templates=("one",)))
        cluster = msgspec.structs.replace(home.settings.cluster, housekeeping="own")
        async with home.controller(settings=msgspec.structs.replace(home.settings, cluster=cluster)):
            await home.until(lambda: not home.gates("p"), "an open gate")
            await home.bind("p", "n1")
            home.set_status("Pod", "p", phase="Failed")
            await home.until(lambda: not server.objects("ResourceClaim"), "no claim")
        refused = [f"{request.method} {request.path}" for request in server.requests if request.code == 403]

    assert refused == []
