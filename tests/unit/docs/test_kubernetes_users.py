"""Users of NATS in the manifests: each process is the user that the server knows for it, and sees
its own password alone.
"""

from __future__ import annotations

import importlib
from urllib.parse import urlsplit

import pytest

from docpages.nats_files import render_server
from support.kustomize import DEPLOY, Manifest, built, container_of, environment_of, named, pod_of
from topobus.bus.server_config.nats_accounts import Shape, accounts, is_outside
from topobus.bus.server_config.nats_tls import server_tls
from topobus.keys.cluster_certificates import server_names
from topobus.keys.secret_objects import (
    AUTHORITY_MAP,
    AUTHORITY_SECRET,
    LEAVES_SECRET,
    SERVER_SECRET,
    TLS_SECRET,
    server_secret_names,
    user_secret,
    users_of,
)
from topobus.process.config import NatsSettings, ServiceSettings, load_settings
from topobus.values.dra_names import DRIVER

_WORKLOADS = ("DaemonSet", "Deployment")
_LEAVES = ("kubernetes-leaf", "kubernetes-replicated-hub")
_OVERLAYS = (
    "kubernetes-console",
    "kubernetes",
    "kubernetes-exclusive-cpus",
    "kubernetes-fpga-functions",
    "kubernetes-gpu",
    "kubernetes-gpu-partitions",
    "kubernetes-nic-hand-over",
    "kubernetes-nic-virtual-functions",
    "kubernetes-node-labels",
    "kubernetes-startup-taint",
    "kubernetes-device-reset",
    "kubernetes-passthrough",
    "kubernetes-own-class",
)
# Device classes besides ours, by the overlay that serves them.
_CLASSES = {"kubernetes-own-class": ("npu",)}


def _services(manifests: list[Manifest]) -> dict[str, tuple[Manifest, Manifest]]:
    """Give pod and container of each service."""
    pods = [manifest["spec"]["template"]["spec"] for manifest in manifests if manifest["kind"] in _WORKLOADS]
    return {
        container["name"]: (pod, container)
        for pod in pods
        for container in pod["containers"]
        if container["name"] != "nats"
    }


def _nats(manifests: list[Manifest], service: str, container: Manifest) -> NatsSettings:
    is_own = any(service in classes for classes in _CLASSES.values())
    module = importlib.import_module(f"topobus.{'device' if is_own else service}.config")
    kinds = [it for it in vars(module).values() if isinstance(it, type) and issubclass(it, ServiceSettings)]
    (kind,) = [it for it in kinds if it.__module__ == module.__name__]
    environment = environment_of(manifests, container)
    return load_settings(kind, service, file=None, environ=environment).nats


def _secrets(pod: Manifest, container: Manifest) -> dict[str, list[Manifest]]:
    """Give the sources of each projected volume that a container mounts, by where it does."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    return {path: volume["projected"]["sources"] for path, volume in mounted.items() if "projected" in volume}


@pytest.mark.parametrize("overlay", [*_OVERLAYS, *_LEAVES])
def test_each_service_is_its_own_user_in_its_own_account(overlay: str) -> None:
    """The user is one of its server's, whose account is where the service thinks that it is.

    All but subscribers, reporters of verdicts, the command line and the console are there.
    """
    manifests = built(overlay)
    has_leaves = overlay in _LEAVES
    services = _services(manifests)
    for service, (_, container) in services.items():
        shape = Shape.CENTRAL if not has_leaves else Shape.HUB if service == "controller" else Shape.LEAF
        (account,) = [
            account
            for account in accounts(shape, classes=_CLASSES.get(overlay, ()))
            if service in {user.name for user in account.users}
        ]
        settings = _nats(manifests, service, container)

        assert settings.user == service
        assert settings.zone
        assert (settings.zone == "vendor" or is_outside(service)) is not account.has_jetstream
        assert settings.provisioner == ("topology" if shape is Shape.LEAF else "controller")
        # Within a node nothing leaves the machine.
        assert settings.url.startswith("nats://" if shape is Shape.LEAF else "tls://nats.topobus.svc:")
        assert bool(settings.tls_ca_file) is (shape is not Shape.LEAF)
    assert {*services, "console", "cli", "user", "verdicts", *(("leaf",) if has_leaves else ())} == {
        *users_of(has_leaves=has_leaves, classes=_CLASSES.get(overlay, ()))
    }


@pytest.mark.parametrize("overlay", [*_OVERLAYS, *_LEAVES])
def test_each_service_mounts_its_own_password_alone(overlay: str) -> None:
    """Where its settings look, readable by its own user or group.

    No other volume of the container has a Secret of NATS, and no pod one that nobody mounts.
    """
    manifests = built(overlay)
    for service, (pod, container) in _services(manifests).items():
        settings = _nats(manifests, service, container)
        folder, _, file = settings.password_file.rpartition("/")
        sources = _secrets(pod, container)
        mounted = {mount["name"] for it in pod["containers"] for mount in it["volumeMounts"]}
        (volume,) = [it for it in pod["volumes"] if it["name"] == f"{service}-nats"]
        rights = {**pod["securityContext"], **container["securityContext"]}

        named_here = [source["secret"]["name"] for path in sources for source in sources[path] if "secret" in source]
        assert named_here == [user_secret(service)]
        assert sources[folder][0] == {
            "secret": {"name": user_secret(service), "items": [{"key": "password", "path": file}]}
        }
        trusted = {
            "name": AUTHORITY_MAP,
            "items": [{"key": "ca.crt", "path": settings.tls_ca_file.removeprefix(f"{folder}/")}],
        }
        assert not settings.tls_ca_file or sources[folder][1:] == [{"configMap": trusted}]
        assert {it["name"] for it in pod["volumes"] if it["name"].endswith("-nats")} <= mounted
        # Files of a Secret belong to root, and to the pod's group where it has one.
        assert volume["projected"]["defaultMode"] == (0o440 if "fsGroup" in pod["securityContext"] else 0o400)
        assert rights["runAsUser"] == 0 or pod["securityContext"]["fsGroup"] == rights["runAsGroup"]


def test_nobody_but_the_server_mounts_the_servers_secret() -> None:
    """It holds all passwords.

    The server includes it, and its neighbour tells the server when it changes.
    """
    manifests = built("kubernetes")
    pod = pod_of(manifests, "StatefulSet", "nats")
    (volume,) = [it for it in pod["volumes"] if it.get("secret", {}).get("secretName") == SERVER_SECRET]
    folders = {
        container["name"]: mount["mountPath"]
        for container in pod["containers"]
        for mount in container["volumeMounts"]
        if mount["name"] == volume["name"]
    }
    others = [it for it in manifests if it["kind"] in _WORKLOADS and SERVER_SECRET in str(it)]
    reload = container_of(pod, "reload")
    variables = {it["name"]: it["value"] for it in reload["env"]}
    settings = named(manifests, "ConfigMap", "nats")["data"]["nats.conf"]

    assert folders == {"nats": "/etc/nats-users", "reload": "/etc/nats-users"}
    assert "include ../nats-users/users.conf" in settings
    assert others == []
    assert variables["FILES"].split() == [
        "/etc/nats-users/users.conf",
        "/etc/nats-tls/tls.crt",
        "/etc/nats-tls/tls.key",
    ]
    assert {"name": "PID_FILE", "value": variables["PID_FILE"]} in container_of(pod, "nats")["env"]
    # A signal reaches a process of one's own user without any capability, where the
    # pod's processes see each other.
    assert pod["shareProcessNamespace"] is True
    assert {container["securityContext"].get("runAsUser") for container in pod["containers"]} == {None}


@pytest.mark.parametrize("overlay", _OVERLAYS)
def test_server_is_reached_by_a_name_of_its_certificate(overlay: str) -> None:
    """Each service goes by TLS to a name that the Job has certified.

    The server has certificate and key where its settings say, and no authority's
    key is in any pod but the Job's.
    """
    manifests = built(overlay)
    names = server_names("topobus")
    pod = pod_of(manifests, "StatefulSet", "nats")
    (volume,) = [it for it in pod["volumes"] if it["name"] == "tls"]
    nats = container_of(pod, "nats")
    settings = named(manifests, "ConfigMap", "nats")["data"]["nats.conf"]
    for service, (_, container) in _services(manifests).items():
        url = urlsplit(_nats(manifests, service, container).url)

        assert (url.scheme, url.hostname in names) == ("tls", True)
    assert volume["secret"]["secretName"] == TLS_SECRET
    assert [item["path"] for item in volume["secret"]["items"]] == ["tls.crt", "tls.key"]
    assert {"name": "tls", "mountPath": "/etc/nats-tls", "readOnly": True} in nats["volumeMounts"]
    assert server_tls("/etc/nats-tls") in settings.splitlines()
    assert not [it["kind"] for it in manifests if it["kind"] != "Role" and AUTHORITY_SECRET in str(it)]
    # For kubectl port-forward, and for each server of a hub by its own name.
    assert {"localhost", "127.0.0.1", "*.nats.topobus.svc"} <= {*names}


@pytest.mark.parametrize("overlay", ["kubernetes", "kubernetes-nic-hand-over", "kubernetes-own-class", *_LEAVES])
def test_rights_of_the_job_name_the_objects_that_it_makes(overlay: str) -> None:
    """It may read and write no other one of the namespace.

    What it may write anew is derived, or expires. It makes the users of the shape that it is in.
    """
    manifests = built(overlay)
    has_leaves = overlay in _LEAVES
    (role,) = [it for it in manifests if it["kind"] == "Role"]
    (job,) = [it["spec"]["template"]["spec"] for it in manifests if it["kind"] == "Job"]
    granted = {
        (verb, resource, name)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", ("*",))
    }
    servers = server_secret_names(has_leaves=has_leaves)
    secrets = {
        *servers,
        TLS_SECRET,
        AUTHORITY_SECRET,
        *map(user_secret, users_of(has_leaves=has_leaves, classes=_CLASSES.get(overlay, ()))),
    }

    assert granted == {
        *(("create", resource, "*") for resource in ("secrets", "configmaps")),
        *(("get", "secrets", name) for name in secrets),
        *(("patch", "secrets", name) for name in (*servers, TLS_SECRET)),
        *((verb, "configmaps", AUTHORITY_MAP) for verb in ("get", "patch")),
    }
    assert container_of(job, "keys")["args"] == [
        "keys",
        "secrets",
        "make",
        "topobus",
        *(("--leaves",) if has_leaves else ()),
        *(f"--class={name}" for name in _CLASSES.get(overlay, ())),
    ]


@pytest.mark.parametrize("overlay", ["kubernetes", "kubernetes-own-class", *_LEAVES])
def test_job_of_the_week_is_the_job_of_the_first_apply(overlay: str) -> None:
    """A certificate is made anew by the same pod, with the same rights, as it was made."""
    manifests = built(overlay)
    (job,), (weekly,) = ([it["spec"] for it in manifests if it["kind"] == kind] for kind in ("Job", "CronJob"))

    assert weekly["jobTemplate"]["spec"]["template"] == job["template"]
    assert weekly["jobTemplate"]["spec"]["backoffLimit"] == job["backoffLimit"]
    assert weekly["concurrencyPolicy"] == "Forbid"


@pytest.mark.parametrize(
    "overlay", ["kubernetes", "kubernetes-open", "kubernetes-try-out", "kubernetes-leaf", "kubernetes-replicated-hub"]
)
def test_server_is_started_by_the_script_that_finds_its_store(overlay: str) -> None:
    """What is stored goes with the server from one form to the other: the script is the one that
    compose runs, is mounted, and reads the settings that the server reads.
    """
    manifests = built(overlay)
    pod = pod_of(manifests, "StatefulSet", "nats")
    nats = container_of(pod, "nats")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes.get(mount["name"], {}).get("configMap") for mount in nats["volumeMounts"]}
    scripts = named(manifests, "ConfigMap", "nats-scripts")["data"]

    assert nats["command"] == [
        "sh",
        "/etc/nats-scripts/start.sh",
        "/etc/nats/nats.conf",
        "/data",
        *(("CORE",) if overlay in _LEAVES else ()),
    ]
    assert mounts["/etc/nats-scripts"] == {"name": "nats-scripts"}
    assert "nats.conf" in named(manifests, "ConfigMap", mounts["/etc/nats"]["name"])["data"]
    assert scripts["start.sh"] == (DEPLOY / "nats" / "start.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("overlay", ["kubernetes", "kubernetes-open", "kubernetes-try-out"])
def test_central_server_has_the_settings_that_are_shipped_for_its_version(overlay: str) -> None:
    """But for who connects it is deploy/nats/nats-server-2.10.conf: an acknowledged write is on the
    disk, a client that vanished is known as gone.
    """
    manifests = built(overlay)
    text = named(manifests, "ConfigMap", "nats")["data"]["nats.conf"]
    wanted = [
        line.strip()
        for line in render_server((2, 10)).splitlines()
        if not line.strip().startswith(("#", "listen:", "http:", "mappings"))
    ]

    assert {*wanted} <= {line.strip() for line in text.splitlines()}
    assert container_of(pod_of(manifests, "StatefulSet", "nats"), "nats")["image"].startswith("nats:2.10")


@pytest.mark.parametrize("overlay", _LEAVES)
def test_nodes_server_has_its_own_users_and_checks_the_hub(overlay: str) -> None:
    """Its users are those of a leaf, which no other container of the pod has.

    It comes to the hub as user `leaf`, by TLS, and trusts what the clients trust.
    """
    manifests = built(overlay)
    pod = pod_of(manifests, "DaemonSet", "topobus-node")
    nats = container_of(pod, "nats")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in nats["volumeMounts"]}
    variables = {it["name"]: it for it in nats["env"]}
    url = urlsplit(variables["TOPOBUS_LEAF_HUB_URL"]["value"])
    hub = pod_of(manifests, "StatefulSet", "nats")
    (certificate,) = [it["secret"] for it in hub["volumes"] if it["name"] == "tls"]
    settings = {
        name: named(manifests, "ConfigMap", name)["data"]["nats.conf"] for name in ("nats-leaf", _hub_settings(hub))
    }

    assert mounts["/etc/nats-users"]["secret"] == {"secretName": LEAVES_SECRET, "defaultMode": 0o400}
    assert [
        it["name"]
        for it in pod["containers"]
        if "nats-users" in {mount["name"] for mount in it.get("volumeMounts", ())}
    ] == ["nats"]
    assert mounts["/etc/nats-tls"]["configMap"] == {
        "name": AUTHORITY_MAP,
        "items": [{"key": "ca.crt", "path": "ca.crt"}],
    }
    assert (url.scheme, url.username, url.password, url.port) == ("tls", "leaf", "$(TOPOBUS_LEAF_PASSWORD)", 7422)
    assert url.hostname in server_names("topobus")
    assert variables["TOPOBUS_LEAF_PASSWORD"]["valueFrom"]["secretKeyRef"] == {
        "name": user_secret("leaf"),
        "key": "password",
    }
    # Kubernetes fills in a variable that stands before.
    assert list(variables).index("TOPOBUS_LEAF_PASSWORD") < list(variables).index("TOPOBUS_LEAF_HUB_URL")
    assert all("include ../nats-users/users.conf" in text.splitlines() for text in settings.values())
    assert [item["key"] for item in certificate["items"]] == [
        "tls.crt",
        "tls.key",
        *(("ca.crt",) if overlay == _LEAVES[1] else ()),
    ]
    assert ("ca_file" in settings[_hub_settings(hub)]) is (overlay == _LEAVES[1])


def _hub_settings(pod: Manifest) -> str:
    (name,) = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "settings"]
    return str(name)


@pytest.mark.parametrize("overlay", ["kubernetes", "kubernetes-own-class"])
def test_gateway_may_say_in_claims_what_became_of_each_classs_devices(overlay: str) -> None:
    """Since Kubernetes 1.36 the right to a claim's `status.devices` names drivers: the one of all
    classes, an overlay's own included.
    """
    role = named(built(overlay), "ClusterRole", "topobus-gateway")
    (rule,) = (rule for rule in role["rules"] if rule["resources"] == ["resourceclaims/driver"])

    assert rule["resourceNames"] == [DRIVER]
