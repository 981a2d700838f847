"""The manifests of the two shapes with servers on nodes: what the plain ones become, as kustomize
would make them.

No cluster is asked.
"""

from __future__ import annotations

import importlib

import pytest
from lightkube import codecs

from docpages.nats_files import render_hub, render_leaf
from support.kustomize import built, container_of, environment_of, named, pod_of
from topobus.process.config import ServiceSettings, load_settings
from topobus.relay.config import RelaySettings

# Where the Secrets are mounted.
_IN_POD = {"tls": "/etc/nats-tls", "users": "../nats-users/users.conf"}
_OVERLAYS = ("kubernetes-leaf", "kubernetes-replicated-hub")


@pytest.mark.parametrize("overlay", _OVERLAYS)
def test_overlay_has_only_fields_that_kubernetes_knows(overlay: str) -> None:
    """Each object of the result survives Kubernetes' own types: a typo of a patch would be dropped
    in silence.
    """
    for manifest in built(overlay):
        assert codecs.from_dict(manifest).to_dict() == manifest, manifest["metadata"]["name"]


@pytest.mark.parametrize("overlay", _OVERLAYS)
def test_services_of_a_node_use_its_own_server_when_nodes_have_theirs(overlay: str) -> None:
    """In the server's pod by loopback, the gateway by the Service that stays on the node.

    None of a node's services knows the hub, and topology makes the streams.
    """
    manifests = built(overlay)
    node, gateway = pod_of(manifests, "DaemonSet", "topobus-node"), pod_of(manifests, "DaemonSet", "topobus-gateway")
    service = named(manifests, "Service", "nats-node")["spec"]
    urls = {}
    for pod in (node, gateway):
        for container in pod["containers"]:
            if container["name"] == "nats":
                continue
            kinds = vars(importlib.import_module(f"topobus.{container['name']}.config")).values()
            (kind,) = [
                it
                for it in kinds
                if isinstance(it, type)
                and issubclass(it, ServiceSettings)
                and it.__module__ == f"topobus.{container['name']}.config"
            ]
            given = environment_of(manifests, container)
            given = {name: value.replace("$(NATS_NODE_SERVICE_HOST)", "10.0.0.7") for name, value in given.items()}
            settings = load_settings(kind, container["name"], file=None, environ=given)
            urls[container["name"]] = settings.nats.url
            assert settings.nats.provisioner == "topology"

    assert urls.pop("gateway") == "nats://10.0.0.7:4222"
    assert set(urls.values()) == {"nats://127.0.0.1:4222"}
    assert "relay" in urls
    assert gateway["enableServiceLinks"], "or NATS_NODE_SERVICE_HOST is not there"
    assert service["internalTrafficPolicy"] == "Local"
    assert service["publishNotReadyAddresses"], (
        "or one service of the pod that is not ready cuts the gateway off from its ledger"
    )
    labels = named(manifests, "DaemonSet", "topobus-node")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    # Kubernetes sets NAME_SERVICE_HOST for each Service: of one called topobus-…, our settings
    # would refuse it as a key that nobody has.
    assert not [it for it in manifests if it["kind"] == "Service" and it["metadata"]["name"].startswith("topobus")]


def test_nodes_server_keeps_its_store_on_the_node() -> None:
    """The ledger's folder is the node's own and survives the pod.

    The server may write nowhere else, and has no capability.
    """
    pod = pod_of(built("kubernetes-leaf"), "DaemonSet", "topobus-node")
    nats = container_of(pod, "nats")
    mounts = {mount["mountPath"]: mount for mount in nats["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}

    assert volumes[mounts["/data"]["name"]]["hostPath"] == {
        "path": "/var/lib/topobus/nats",
        "type": "DirectoryOrCreate",
    }
    assert [path for path, mount in mounts.items() if not mount.get("readOnly", False)] == ["/data"]
    assert nats["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert nats["securityContext"]["readOnlyRootFilesystem"]


def test_servers_have_the_rendered_settings_when_nodes_have_servers() -> None:
    """Leaf and hub run with what the catalogue says, in the version that their image has.

    The variables are set that it names.
    """
    manifests = built("kubernetes-leaf")
    leaf = container_of(pod_of(manifests, "DaemonSet", "topobus-node"), "nats")
    hub_pod = pod_of(manifests, "StatefulSet", "nats")
    hub = container_of(hub_pod, "nats")
    set_here = {variable["name"] for variable in (*leaf["env"], *hub["env"])} | {"TOPOBUS_LEAF_DOMAIN"}

    assert named(manifests, "ConfigMap", "nats-leaf")["data"]["nats.conf"] == render_leaf(
        (2, 10), is_in_pod=True, **_IN_POD
    )
    assert named(manifests, "ConfigMap", "nats-hub")["data"]["nats.conf"] == render_hub(
        (2, 10), is_in_pod=True, **_IN_POD
    )
    assert {"name": "settings", "configMap": {"name": "nats-hub"}} in hub_pod["volumes"]
    assert leaf["image"].startswith("nats:2.10")
    assert hub["image"].startswith("nats:2.10")
    assert {"TOPOBUS_LEAF_DOMAIN", "TOPOBUS_LEAF_HUB_URL", "TOPOBUS_HUB_NAME"} <= set_here
    assert "TOPOBUS_LEAF_DOMAIN=" in leaf["command"][-1]


@pytest.mark.parametrize("overlay", _OVERLAYS)
def test_hub_is_reached_by_nodes_and_members_only(overlay: str) -> None:
    """The leafnode port is for the nodes' pods, the cluster's for the servers themselves.

    Each is one that the server listens at and the Service has.
    """
    manifests = built(overlay)
    rules = {
        rule["ports"][0]["port"]: rule["from"][0]["podSelector"]["matchLabels"]
        for rule in named(manifests, "NetworkPolicy", "nats")["spec"]["ingress"]
    }
    ports = {port["port"] for port in named(manifests, "Service", "nats")["spec"]["ports"]}

    assert rules[7422] == {"app.kubernetes.io/name": "topobus-node"}
    assert set(rules) == ports
    assert rules.get(6222) == ({"app.kubernetes.io/name": "nats"} if overlay == "kubernetes-replicated-hub" else None)


def test_replicated_hub_survives_a_server_when_it_has_three() -> None:
    """Three servers on three hosts that know each other by name, three copies, and never two away
    at once by a drain.
    """
    manifests = built("kubernetes-replicated-hub")
    hub = named(manifests, "StatefulSet", "nats")["spec"]
    text = named(manifests, "ConfigMap", "nats-replicated-hub")["data"]["nats.conf"]
    (rule,) = hub["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    controller = environment_of(
        manifests, container_of(pod_of(manifests, "Deployment", "topobus-controller"), "controller")
    )
    budget = named(manifests, "PodDisruptionBudget", "nats")["spec"]

    assert (hub["replicas"], hub["podManagementPolicy"]) == (3, "Parallel")
    assert rule["labelSelector"]["matchLabels"].items() <= hub["template"]["metadata"]["labels"].items()
    assert [f"nats://nats-{number}.{hub['serviceName']}.topobus.svc:6222" in text for number in range(3)] == [True] * 3
    assert controller["TOPOBUS_ALL__NATS__REPLICAS"] == "3"
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= hub["template"]["metadata"]["labels"].items()


def test_server_of_a_replicated_hub_is_ready_without_the_consumers_of_clients_that_are_gone() -> None:
    """After all three servers died at once one looked for such consumers without end: it was never ready
    again, and so no update and no drain went on.
    """
    hub = pod_of(built("kubernetes-replicated-hub"), "StatefulSet", "nats")

    assert container_of(hub, "nats")["readinessProbe"]["httpGet"]["path"] == "/healthz?js-server-only=true"


def test_relay_container_agrees_with_the_service() -> None:
    """Image, port and probes are the relay's own."""
    manifests = built("kubernetes-leaf")
    relay = container_of(pod_of(manifests, "DaemonSet", "topobus-node"), "relay")
    settings = load_settings(RelaySettings, "relay", file=None, environ=environment_of(manifests, relay))

    assert relay["image"] == "topobus/relay:latest"
    assert relay["ports"] == [{"name": "relay", "containerPort": settings.http.port}]
    assert relay["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "relay"}
