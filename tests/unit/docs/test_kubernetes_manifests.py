"""The manifests in deploy/kubernetes agree with the services: images, ports, settings and mounts.

No cluster is asked.
"""

from __future__ import annotations

import importlib
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest
import yaml
from lightkube import codecs

from support.kustomize import built, named, pod_of
from topobus.gateway.config import GatewaySettings, owned_cpus
from topobus.gateway.config import check as check_gateway
from topobus.process.config import ServiceSettings, load_settings

_FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
Manifest = dict[str, Any]


def _objects() -> list[Manifest]:
    return [
        manifest
        for path in sorted(_FOLDER.glob("*.yaml"))
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


OBJECTS = _objects()


def _named(kind: str, name: str) -> Manifest:
    (manifest,) = [
        manifest for manifest in OBJECTS if manifest["kind"] == kind and manifest["metadata"]["name"] == name
    ]
    return manifest


def _pods() -> dict[str, Manifest]:
    """Give the pod specs of the workloads that hold services, by workload."""
    pod_specs = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]
        for manifest in OBJECTS
        if manifest["kind"] in ("DaemonSet", "Deployment")
    }
    assert pod_specs
    return pod_specs


def _container(service: str) -> tuple[Manifest, Manifest]:
    """Give a service's pod spec and its container in it."""
    ((pod, container),) = [
        (pod, each_container)
        for pod in _pods().values()
        for each_container in pod["containers"]
        if each_container["name"] == service
    ]
    return pod, container


def _environment(container: Manifest) -> dict[str, str]:
    given: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        given |= _named("ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", ()):
        # What the cluster fills in: the node's name and the pod's uid.
        filled = {"spec.nodeName": "worker-1", "metadata.uid": "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"}
        given[variable["name"]] = (
            variable["value"] if "value" in variable else filled[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        )
    return given


def _settings(service: str) -> ServiceSettings:
    name = f"topobus.{service}.config"
    kinds = [
        value
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and issubclass(value, ServiceSettings) and value.__module__ == name
    ]
    return load_settings(kinds[-1], service, file=None, environ=_environment(_container(service)[1]))


def _mounted(container: Manifest, path: str) -> Manifest | None:
    """Give the mount that `path` is in."""
    wanted = PurePosixPath(path)
    return next(
        (
            volume_mount
            for volume_mount in container.get("volumeMounts", ())
            if wanted.is_relative_to(volume_mount["mountPath"])
        ),
        None,
    )


def test_manifests_hold_each_service_once() -> None:
    """The eight services are all there, in the DaemonSet or the Deployment, each once; kustomize
    lists every file and image.
    """
    names = sorted(container["name"] for pod in _pods().values() for container in pod["containers"])
    listed = yaml.safe_load((_FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))

    assert names == sorted(SERVICES)
    assert sorted(listed["resources"]) == sorted(
        path.name for path in _FOLDER.glob("*.yaml") if path.name != "kustomization.yaml"
    )
    assert sorted(image["name"] for image in listed["images"]) == sorted(
        f"topobus/{service}" for service in (*SERVICES, "cli")
    )


@pytest.mark.parametrize(
    "manifest",
    [manifest for manifest in OBJECTS if "metadata" in manifest],
    ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}",
)
def test_manifest_has_only_fields_that_kubernetes_knows(manifest: Manifest) -> None:
    """Each object survives Kubernetes' own types: a field that these do not have would be dropped
    in silence, and so is a typo.
    """
    assert codecs.from_dict(manifest).to_dict() == manifest


@pytest.mark.parametrize("service", SERVICES)
def test_container_settings_are_taken_by_the_service(service: str) -> None:
    """What the manifest sets are keys that the service has, with values that it takes."""
    settings = _settings(service)

    assert settings.nats.url == "tls://nats.topobus.svc:4222"
    assert settings.node == "worker-1" or service == "controller"


@pytest.mark.parametrize("service", SERVICES)
def test_container_image_port_and_probes_agree_with_the_service(service: str) -> None:
    """The image is the service's own, and the probes ask where the service listens."""
    _, container = _container(service)
    settings = _settings(service)
    (port,) = container["ports"]

    assert container["image"].rpartition(":")[0] == f"topobus/{service}"
    assert (port["containerPort"], settings.http.host) == (settings.http.port, "0.0.0.0")
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"]


@pytest.mark.parametrize("service", SERVICES)
def test_container_is_not_ended_while_it_starts_on_a_busy_node(service: str) -> None:
    """A service of a node with a load of 50 took 50 s to its first answer. It may take two minutes."""
    probe = _container(service)[1]["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


def test_ports_differ_where_containers_share_a_pod() -> None:
    """Containers of a pod share one network: no two listen on one port, and no port's name is too
    long for Kubernetes.
    """
    for pod in _pods().values():
        ports = [port for container in pod["containers"] for port in container["ports"]]

        assert len({port["containerPort"] for port in ports}) == len(ports)
        assert all(len(port["name"]) <= 15 for port in ports)


@pytest.mark.parametrize("service", SERVICES)
def test_container_mounts_what_its_settings_name(service: str) -> None:
    """Hardware is mounted read-only below the root that the settings name.

    Every mount's volume exists. The gateway reads control groups alone, where it gives CPUs.
    """
    pod, container = _container(service)
    settings = _settings(service)
    hardware = msgspec.structs.asdict(settings).get("hardware")
    volumes = {volume["name"] for volume in pod.get("volumes", ())}

    assert {volume_mount["name"] for volume_mount in container.get("volumeMounts", ())} <= volumes
    for top in ("sys", "proc", "dev") if hardware is not None and service != "gateway" else ():
        mount = _mounted(container, f"{hardware.root}/{top}")

        assert mount is not None, top
        assert mount["readOnly"] is True


def test_gateway_may_write_where_its_settings_say() -> None:
    """Kubelet's folders, the CDI folder and the checkpoint's are the host's own and writable, at
    the path that kubelet and the runtime know.
    """
    pod, container = _container("gateway")
    settings = _settings("gateway")
    assert isinstance(settings, GatewaySettings)
    check_gateway(settings)
    kubelet = settings.kubelet
    folders = [
        kubelet.device_plugin_dir,
        kubelet.plugins_registry_dir,
        kubelet.plugins_dir,
        settings.cdi_dir,
        settings.checkpoint_path,
    ]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}

    for folder in folders:
        mount = _mounted(container, folder)

        assert mount is not None, folder
        assert not mount.get("readOnly", False), folder
        assert volumes[mount["name"]]["hostPath"]["path"] == mount["mountPath"]
    assert _mounted(container, settings.pod_resources_socket) is not None


def test_gateway_is_replaced_without_a_gap_when_it_is_updated() -> None:
    """The new pod first, on sockets of its own.

    What finds and places devices is never there twice.
    """
    gateway, node = _named("DaemonSet", "topobus-gateway")["spec"], _named("DaemonSet", "topobus-node")["spec"]
    settings = _settings("gateway")
    assert isinstance(settings, GatewaySettings)

    assert gateway["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert node["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    assert settings.instance
    for workload in (gateway, node):
        pod = workload["template"]["spec"]
        assert (pod["priorityClassName"], pod["tolerations"]) == ("system-node-critical", [{"operator": "Exists"}])


def test_slices_are_bound_to_the_tokens_node_by_a_policy() -> None:
    """The policy is about our gateway's account and is in force.

    Both expressions name the fields that they compare.
    """
    policy = _named("ValidatingAdmissionPolicy", "topobus-gateway")["spec"]
    binding = _named("ValidatingAdmissionPolicyBinding", "topobus-gateway")["spec"]
    account = _named("ServiceAccount", "topobus-gateway")["metadata"]
    (condition,) = policy["matchConditions"]

    assert (binding["policyName"], binding["validationActions"]) == ("topobus-gateway", ["Deny"])
    assert f"'system:serviceaccount:{account['namespace']}:{account['name']}'" in condition["expression"]
    assert policy["matchConstraints"]["resourceRules"][0]["operations"] == ["CREATE", "UPDATE", "DELETE"]
    assert {variable["name"] for variable in policy["variables"]} == {"tokenNode", "sliceNode"}


@pytest.mark.parametrize("service", SERVICES)
def test_container_has_no_right_that_it_does_not_need(service: str) -> None:
    """No capability, no escalation, a read-only root, nobody's user (root for the gateway alone),
    and a token for the gateway and the controller alone.
    """
    pod, container = _container(service)
    rights = {**pod["securityContext"], **container["securityContext"]}
    has_token = _mounted(container, "/var/run/secrets/kubernetes.io/serviceaccount/token") is not None

    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
    assert (rights["runAsUser"] == 0) is (service == "gateway")
    assert pod["automountServiceAccountToken"] is False
    assert has_token is (service in ("gateway", "controller"))


def test_nats_is_reached_by_our_own_pods_only() -> None:
    """The policy selects the server's pods, and lets in pods that all our workloads' labels match,
    at NATS' port alone.
    """
    policy = _named("NetworkPolicy", "nats")["spec"]
    (rule,) = policy["ingress"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"].items()
    workloads = [manifest for manifest in OBJECTS if manifest["kind"] in ("DaemonSet", "Deployment", "StatefulSet")]

    assert (
        policy["podSelector"]["matchLabels"].items()
        <= _named("StatefulSet", "nats")["spec"]["template"]["metadata"]["labels"].items()
    )
    assert all(wanted <= workload["spec"]["template"]["metadata"]["labels"].items() for workload in workloads)
    assert rule["ports"] == [{"protocol": "TCP", "port": 4222}]
    assert "network-policy.yaml" in _named_resources()


def _named_resources() -> list[str]:
    return list(yaml.safe_load((_FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"])


def test_exclusive_cpus_variant_gives_the_gateway_cpus_and_the_runtimes_socket() -> None:
    """Applied to the plain manifests its patches offer class cpu and name the CPUs that are owned.

    The folder of the default socket is mounted anyway.
    """
    manifests = built("kubernetes-exclusive-cpus")
    gateway = pod_of(manifests, "DaemonSet", "topobus-gateway")
    given = named(manifests, "ConfigMap", "topobus-node")["data"]
    settings = load_settings(GatewaySettings, "gateway", file=None, environ={**given, "TOPOBUS_ALL__NODE": "n"})
    folder = str(PurePosixPath(settings.runtime.socket).parent)

    check_gateway(settings)
    assert (settings.offers_dra("cpu"), settings.offers_plugin("cpu"), owned_cpus(settings.cpus)) == (True, False, None)
    assert {"name": "runtime", "mountPath": folder} in gateway["containers"][0]["volumeMounts"]
    assert [volume["hostPath"]["path"] for volume in gateway["volumes"] if volume["name"] == "runtime"] == [folder]


def test_startup_taint_variant_adds_two_settings_and_one_right() -> None:
    """The taint that the policy lets go is the one of the setting, and the classes are named."""
    plain, manifests = built("kubernetes"), built("kubernetes-startup-taint")
    given = named(manifests, "ConfigMap", "topobus-node")["data"]
    settings = load_settings(GatewaySettings, "gateway", file=None, environ={**given, "TOPOBUS_ALL__NODE": "n"})
    rules = named(plain, "ClusterRole", "topobus-gateway")["rules"]
    policy = named(manifests, "ValidatingAdmissionPolicy", "topobus-gateway-node")["spec"]

    check_gateway(settings)
    assert settings.cluster.startup_taint == "topobus.dev/starting:NoSchedule"
    assert "taint.key == 'topobus.dev/starting'" in policy["validations"][2]["expression"]
    assert named(manifests, "ClusterRole", "topobus-gateway")["rules"] == [
        *rules,
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]},
    ]


def test_node_labels_variant_gives_the_gateway_one_folder_and_no_right_at_the_api_server() -> None:
    """Node Feature Discovery has the right to label nodes.

    Who may patch a Node could taint each of the cluster.
    """
    plain, manifests = built("kubernetes"), built("kubernetes-node-labels")
    gateway = pod_of(manifests, "DaemonSet", "topobus-gateway")
    given = named(manifests, "ConfigMap", "topobus-node")["data"]
    settings = load_settings(GatewaySettings, "gateway", file=None, environ={**given, "TOPOBUS_ALL__NODE": "n"})

    check_gateway(settings)
    assert [volume["hostPath"]["path"] for volume in gateway["volumes"] if volume["name"] == "features"] == [
        settings.node_labels_dir
    ]
    assert {"name": "features", "mountPath": settings.node_labels_dir} in gateway["containers"][0]["volumeMounts"]
    assert named(manifests, "ClusterRole", "topobus-gateway") == named(plain, "ClusterRole", "topobus-gateway")
