"""Rights on the machine: what manifests give is what services declare, and what they declare is
what their code calls.

Both directions, for every overlay.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from lightkube import codecs

from docpages.rights import OVERLAYS, rights_of
from support.kustomize import Manifest, built, load
from topobus.devicekit.rights import DEVICE_RESET, PASSTHROUGH, RightKind
from topobus.formats.messages.messages import Prepared
from topobus.gateway.config import GatewaySettings
from topobus.gateway.containers.rules.edit_limits import SHIPPED_RIGHTS, EditRights, refuse_forbidden
from topobus.gateway.containers.rules.edit_limits import rights_of as rights_of_class
from topobus.gpu.config import GpuSettings
from topobus.nic.config import NicSettings
from topobus.process.config import load_settings
from topobus.values.edits import ContainerEdits, DeviceNode

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")

# What a call needs, by the name that is called or the module that is imported. A command that a
# person runs (topobus.cli) has what the person has.
CALLS = {
    "setns": "SYS_ADMIN",
    "unshare": "SYS_ADMIN",
    "mount": "SYS_ADMIN",
    "umount": "SYS_ADMIN",
    "umount2": "SYS_ADMIN",
    "mknod": "MKNOD",
}
CALLS |= {
    "pivot_root": "SYS_ADMIN",
    "chroot": "SYS_CHROOT",
    "setuid": "SETUID",
    "setgid": "SETGID",
    "ptrace": "SYS_PTRACE",
    "init_module": "SYS_MODULE",
}
IMPORTS = {"pyroute2": "NET_ADMIN"}
# Folders of the shared packages that services run; the kits for tests
# and simulations are in no image.
SHARED = ("devicekit", "domain", "contracts", "runtime", "sysfs", "kubernetes", "cel")


# Overlays that change where things run and give no service a right more: without users, for trying
# out, and the two shapes with servers on nodes.
_WITHOUT_FEATURES = (
    "kubernetes-leaf",
    "kubernetes-console",
    "kubernetes-open",
    "kubernetes-own-class",
    "kubernetes-replicated-hub",
    "kubernetes-startup-taint",
    "kubernetes-try-out",
)


class Given(NamedTuple):
    """One right, as a manifest gives it or a service declares it."""

    kind: str
    what: str
    is_writable: bool = False
    propagates: bool = False


def _files(folder: str) -> list[Path]:
    """List the files of an overlay and, but for the plain manifests, of those that it builds on."""
    here = ROOT / "deploy" / folder
    below = yaml.safe_load((here / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    folders = [(here / resource).resolve().name for resource in below if (here / resource).is_dir()]
    return [*sorted(here.glob("*.yaml")), *(file for name in folders if name != "kubernetes" for file in _files(name))]


def _container(manifests: list[Manifest], service: str) -> tuple[Manifest, Manifest]:
    """Give a service's pod and its container; it is there once."""
    pods = [it["spec"]["template"]["spec"] for it in manifests if it["kind"] in ("DaemonSet", "Deployment")]
    ((pod, container),) = [
        (pod, container) for pod in pods for container in pod["containers"] if container["name"] == service
    ]
    return pod, container


def _given(pod: Manifest, container: Manifest) -> set[Given]:
    """List what a manifest gives to a container beyond its own."""
    security = {**pod.get("securityContext", {}), **container["securityContext"]}
    given = {Given("capability", name) for name in security["capabilities"].get("add", ())}
    if security["runAsUser"] == 0:
        given.add(Given("user root", ""))
    given |= {
        Given(text, "")
        for field, text in (("hostNetwork", "host network"), ("hostPID", "host PIDs"), ("hostIPC", "host IPC"))
        if pod.get(field)
    }
    given |= {Given("privileged", "") for _ in range(1) if security.get("privileged")}
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in pod.get("volumes", ()) if "hostPath" in volume}
    for mount in container.get("volumeMounts", ()):
        if mount["name"] in folders:
            propagates = mount.get("mountPropagation", "None") != "None"
            given.add(Given("mount", folders[mount["name"]], not mount.get("readOnly", False), propagates))
    return given


def _declared(service: str, features: tuple[str, ...]) -> set[Given]:
    return {
        Given(str(right.kind), right.what, right.is_writable, right.propagates)
        for right in rights_of(service)
        if right.feature in ("", *features)
    }


def test_overlays_are_all_looked_at() -> None:
    """Each folder with a kustomization says which features it switches on.

    Those that switch on none are named here.
    """
    folders = {path.parent.name for path in (ROOT / "deploy").glob("*/kustomization.yaml")}

    assert folders == {*OVERLAYS, *_WITHOUT_FEATURES}
    declared = {(service, right.feature) for service in SERVICES for right in rights_of(service) if right.feature}
    assert declared == {
        (service, feature) for features in OVERLAYS.values() for service, names in features.items() for feature in names
    }


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("folder", [*OVERLAYS, *_WITHOUT_FEATURES])
def test_manifest_gives_what_is_declared_and_nothing_else(folder: str, service: str) -> None:
    """Every right in a manifest is declared by the service for a feature that the overlay switches
    on, and every such right is there.
    """
    pod, container = _container(built(folder), service)

    assert _given(pod, container) == _declared(service, OVERLAYS.get(folder, {}).get(service, ()))
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    # Kubernetes refuses the one without the other.
    assert container["securityContext"]["allowPrivilegeEscalation"] is container["securityContext"].get(
        "privileged", False
    )
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_reason_stands_in_the_manifest_as_a_comment() -> None:
    """Whoever reads an overlay reads why each right is there, in the words of the declaration."""
    lacking = []
    for folder, features in OVERLAYS.items():
        text = "\n".join(path.read_text(encoding="utf-8") for path in _files(folder))
        comments = " ".join(re.findall(r"#\s*(.*)", text))
        for service in SERVICES:
            wanted = [
                right
                for right in rights_of(service)
                if right.feature in (features.get(service, ()) if features else ("",))
            ]
            lacking += [(folder, service, right.why) for right in wanted if right.why not in comments]

    assert lacking == []


def _needs(package: Path) -> Iterator[tuple[str, str]]:
    """Give each capability that modules of a package need, with the module."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [IMPORTS.get(alias.name.partition(".")[0], "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [IMPORTS.get((node.module or "").partition(".")[0], "")]
            elif isinstance(node, ast.Call):
                called = (
                    node.func.attr
                    if isinstance(node.func, ast.Attribute)
                    else node.func.id
                    if isinstance(node.func, ast.Name)
                    else ""
                )
                names = [CALLS.get(called, "")]
            yield from ((name, str(path.relative_to(ROOT))) for name in names if name)


@pytest.mark.parametrize("service", SERVICES)
def test_code_calls_what_its_service_declares_and_nothing_else(service: str) -> None:
    """A module that calls netlink, setns, mount or mknod belongs to a service that declares the
    capability.

    What is declared is called.
    """
    needs = dict(_needs(ROOT / "services" / "topobus" / service))
    # What the kit does for a service stands in the kit.
    own = {
        right
        for right in rights_of(service)
        if right.kind is RightKind.CAPABILITY and right.feature not in (PASSTHROUGH, DEVICE_RESET)
    }

    assert needs.keys() == {right.what for right in own}, needs


def test_shared_code_needs_no_capability() -> None:
    """What all services run calls nothing that one of them would need a right for."""
    assert {package: list(_needs(ROOT / "shared" / "topobus" / package)) for package in SHARED} == {
        key: [] for key in SHARED
    }


def test_rights_are_told_in_one_sentence() -> None:
    """A reason is a sentence without an end, so that it reads as a comment and in a table.

    A capability has no prefix, a mount is a folder.
    """
    for service in SERVICES:
        for right in rights_of(service):
            assert right.why
            assert not right.why.endswith(".")
            assert right.what.isupper() or right.kind is not RightKind.CAPABILITY
            assert right.what.startswith("/") is (right.kind is RightKind.MOUNT)


def test_hand_over_gives_the_nic_service_a_pod_of_its_own() -> None:
    """What it needs concerns a whole pod, so nobody else is in it; otherwise it is what the plain
    manifest has, with settings that it takes.
    """
    plain = _container(built("kubernetes"), "nic")[1]
    manifests = built("kubernetes-nic-hand-over")
    pod, container = _container(manifests, "nic")
    (data,) = [it["data"] for it in manifests if it["kind"] == "ConfigMap" and it["metadata"]["name"] == "topobus-node"]
    variables = {it["name"]: it["value"] for it in container["env"] if "value" in it}
    settings = load_settings(NicSettings, "nic", file=None, environ={**data, **variables, "TOPOBUS_ALL__NODE": "n"})

    assert len(pod["containers"]) == 1
    assert (pod["hostNetwork"], pod["dnsPolicy"], settings.http.host) == (True, "ClusterFirstWithHostNet", "127.0.0.1")
    probes = {"startupProbe", "livenessProbe", "readinessProbe"}
    own = {"env", "securityContext", "volumeMounts", *probes}
    assert {key: value for key, value in container.items() if key not in own} == {
        key: value for key, value in plain.items() if key not in own
    }
    for probe in sorted(probes):
        assert container[probe]["httpGet"] == {**plain[probe]["httpGet"], "host": "127.0.0.1"}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {
        settings.cni.state_dir.rpartition("/")[0],
        f"{settings.cni.root}/opt/cni/bin",
        f"{settings.hardware.root}/run/netns",
    } <= mounts
    assert f"{settings.hardware.root}/var/run/netns" in mounts
    for manifest in load(ROOT / "deploy" / "kubernetes-nic-hand-over" / "nic.yaml"):
        assert codecs.from_dict(manifest).to_dict() == manifest


def test_gpu_overlay_has_nvml_loaded_and_gpus_looked_at_by_nobody() -> None:
    """The library is looked for where the host's folder is mounted; the service runs as nobody.

    What makes its folder has that folder and one capability.
    """
    manifests = built("kubernetes-gpu")
    pod, container = _container(manifests, "gpu")
    (data,) = [it["data"] for it in manifests if it["kind"] == "ConfigMap" and it["metadata"]["name"] == "topobus-node"]
    variables = {it["name"]: it["value"] for it in container["env"] if "value" in it}
    settings = load_settings(GpuSettings, "gpu", file=None, environ={**data, **variables, "TOPOBUS_ALL__NODE": "n"})
    plain_variables = {
        it["name"]: it["value"] for it in _container(built("kubernetes"), "gpu")[1]["env"] if "value" in it
    }
    plain = load_settings(GpuSettings, "gpu", file=None, environ={**data, **plain_variables, "TOPOBUS_ALL__NODE": "n"})
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    (maker,) = pod["initContainers"]

    assert (mounts[settings.hardware.library_path], mounts["/var/lib/topobus/gpu"], settings.journal.dir) == (
        True,
        False,
        "",
    )
    assert (settings.leftovers.check, plain.leftovers.check) == (True, False)
    assert len(pod["containers"]) == 1
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (65532, True)
    assert maker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert [mount["mountPath"] for mount in maker["volumeMounts"]] == ["/var/lib/topobus/gpu"]
    for manifest in load(ROOT / "deploy" / "kubernetes-gpu" / "gpu.yaml"):
        assert codecs.from_dict(manifest).to_dict() == manifest


def test_mps_overlay_mounts_what_its_settings_name() -> None:
    """Pipes have one path on both sides, the clients' shared memory is what the service has at
    /dev/shm, and the gateway allows both; the driver is looked for where it is mounted.
    """
    manifests = built("kubernetes-gpu-mps")
    pod, container = _container(manifests, "gpu")
    (data,) = [it["data"] for it in manifests if it["kind"] == "ConfigMap" and it["metadata"]["name"] == "topobus-node"]
    variables = {it["name"]: it["value"] for it in container["env"] if "value" in it}
    settings = load_settings(GpuSettings, "gpu", file=None, environ={**data, **variables, "TOPOBUS_ALL__NODE": "n"})
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    mounts = {
        mount["mountPath"]: (folders.get(mount["name"]), mount.get("readOnly", False))
        for mount in container["volumeMounts"]
    }

    assert settings.mps.owned
    assert mounts[settings.mps.state_dir] == (settings.mps.state_dir, False)
    assert mounts["/dev/shm"] == (settings.mps.shared_memory, False)
    assert mounts[f"{settings.hardware.driver_files.host_root}/usr"] == ("/usr", True)
    assert {settings.mps.state_dir, settings.mps.shared_memory} <= set(SHIPPED_RIGHTS["gpu"].writable_mounts)
    assert (pod["hostPID"], settings.hardware.driver_files.bring) == (True, "auto")


def test_number_of_virtual_functions_can_be_written_where_the_setting_asks_for_it() -> None:
    """The file that is written lies below a folder that this overlay mounts writable and no other
    does; /sys around it stays read-only.
    """
    written = Path("/host/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/sriov_numvfs")

    def is_writable(folder: str) -> bool:
        mounts = _container(built(folder), "nic")[1]["volumeMounts"]
        nearest = max(
            (it for it in mounts if written.is_relative_to(it["mountPath"])), key=lambda it: len(it["mountPath"])
        )
        return not nearest.get("readOnly", False)

    writable = {"kubernetes-nic-virtual-functions", "kubernetes-passthrough", "kubernetes-device-reset"}
    assert {folder for folder in (*OVERLAYS, "kubernetes-try-out") if is_writable(folder)} == writable


@pytest.mark.parametrize("service", ["gpu", "nic", "fpga"])
@pytest.mark.parametrize(
    ("folder", "files"),
    [
        (
            "kubernetes-passthrough",
            ("devices/pci0000:3a/0000:3b:00.0/driver_override", "bus/pci/drivers/vfio-pci/bind"),
        ),
        ("kubernetes-device-reset", ("devices/pci0000:3a/0000:3b:00.0/reset",)),
    ],
)
def test_kernels_files_can_be_written_where_the_overlay_is_for_it(
    folder: str, files: tuple[str, ...], service: str
) -> None:
    """The files that are written lie in folders that this overlay mounts writable for the three
    services, as root's.

    The journal has its own, and /sys around stays read-only.
    """
    _, container = _container(built(folder), service)

    def mount_of(path: str) -> Manifest:
        mounts: list[Manifest] = [it for it in container["volumeMounts"] if Path(path).is_relative_to(it["mountPath"])]
        return max(mounts, key=lambda it: len(it["mountPath"]))

    for file in files:
        assert not mount_of(f"/host/sys/{file}").get("readOnly", False)
    assert mount_of("/host/sys/bus/pci/rescan")["readOnly"]
    assert not mount_of(f"/var/lib/topobus/{service}/journal.json").get("readOnly", False)
    assert container["securityContext"]["runAsUser"] == 0


def test_passthrough_overlay_alone_lets_nodes_of_vfio_into_containers() -> None:
    """With it the gateway takes the edits of a switched function of each class.

    Without it, it forbids them (a NIC's group alone is allowed, for NICs
    that an operator gave to VFIO).
    """
    nodes = {"group": "/dev/vfio/41", "own": "/dev/vfio/devices/vfio0", "iommufd": "/dev/iommu"}
    allowed: dict[tuple[str, str], set[str]] = {}
    for folder in ("kubernetes", "kubernetes-passthrough"):
        (data,) = [
            it["data"] for it in built(folder) if it["kind"] == "ConfigMap" and it["metadata"]["name"] == "topobus-node"
        ]
        settings = load_settings(GatewaySettings, "gateway", file=None, environ={**data, "TOPOBUS_ALL__NODE": "n"})
        for device_class in ("gpu", "nic", "fpga"):
            rights = rights_of_class(device_class, settings.edits.get(device_class, EditRights()), is_foreign=False)
            allowed[folder, device_class] = {
                name
                for name, path in nodes.items()
                if refuse_forbidden(
                    device_class, Prepared(edits={"d": ContainerEdits(device_nodes=(DeviceNode(path=path),))}), rights
                )
                is None
            }

    assert {key: value for key, value in allowed.items() if key[0] == "kubernetes"} == {
        ("kubernetes", "gpu"): set(),
        ("kubernetes", "nic"): {"group", "own"},
        ("kubernetes", "fpga"): set(),
    }
    assert [allowed["kubernetes-passthrough", device_class] for device_class in ("gpu", "nic", "fpga")] == [
        set(nodes)
    ] * 3


def test_compose_gives_no_right_on_the_machine() -> None:
    """Every service drops all capabilities and adds none.

    What Compose runs needs no right of this kind.
    """
    services = yaml.safe_load(
        re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text(encoding="utf-8"))
    )["services"]

    assert {name: service.get("cap_drop") for name, service in services.items()} == {key: ["ALL"] for key in services}
    refused = {"cap_add", "privileged", "network_mode", "pid", "ipc", "devices"}
    assert {name: sorted(refused & service.keys()) for name, service in services.items()} == {
        name: [] for name in services
    }
