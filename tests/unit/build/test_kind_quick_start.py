"""`deploy/kind/quick-start`: its steps, by programs that only write down how they were called.

No cluster is made here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from support.kustomize import built, container_of, environment_of, pod_of
from topobus.formats.messages.messages import Prepared
from topobus.gateway.config import GatewaySettings
from topobus.gateway.containers.rules.edit_limits import refuse_forbidden, rights_of
from topobus.process.config import load_settings
from topobus.values.edits import ContainerEdits, DeviceNode

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "deploy" / "kind" / "quick-start"

_KUBECTL = """case "$*" in
  *version*) echo '{"clientVersion": {"minor": "32"}, "serverVersion": {"major": "1", "minor": "MINOR"}}' ;;
  *port-forward*) echo "Forwarding from 127.0.0.1:41234 -> 4222"; exec sleep 60 ;;
esac"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with kind, kubectl, docker and topobus, which write down how they were called."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("kind", "docker", "topobus"):
        write_program(folder, name)
    write_program(folder, "kubectl", _KUBECTL.replace("MINOR", "36"))
    return folder


def write_program(folder: Path, name: str, more: str = "") -> None:
    """Write a program that notes its call.

    Docker's notes what it is given, too, as far as it reads it.
    """
    if name == "kind":
        more = more or 'case "$*" in *"get nodes"*) echo topobus-control-plane; echo topobus-worker ;; esac'
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder.parent}/calls"\n{more}\n')
    (folder / name).chmod(0o755)


def quick_start(programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with nothing else on the PATH but the basics."""
    basics = programs.parent / "basics"
    if not basics.exists():
        basics.mkdir()
        for name in ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "sed", "seq", "sh", "sleep", "tr"):
            (basics / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": f"{programs}:{basics}", "HOME": str(programs.parent), "TMPDIR": str(programs.parent)}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def calls(programs: Path) -> list[str]:
    """Give the calls in their order."""
    file = programs.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_steps_come_in_their_order_when_all_programs_are_there(programs: Path) -> None:
    """A cluster, images, the machine in each node, the manifests, a pod, and the drawing at the
    forwarded port.

    All in kind's own context.
    """
    answer = quick_start(programs)
    made = calls(programs)

    assert answer.returncode == 0, answer.stderr
    wanted = [
        "kind create cluster --name topobus",
        "docker build",
        "kind load docker-image docker.io/topobus/gateway:latest --name topobus",
        "docker exec topobus-control-plane mkdir -p /topobus/machine",
        "docker exec topobus-worker mkdir -p /topobus/machine",
        "kubectl --context kind-topobus apply -f examples/claims/classes.yaml",
        "kubectl --context kind-topobus apply -k deploy/kind/manifests",
        "kubectl --context kind-topobus apply -f deploy/kind/pod.yaml",
        "kubectl topobus machine --nats nats://127.0.0.1:41234 --node topobus-control-plane",
    ]
    places = [next(place for place, call in enumerate(made) if call.startswith(start)) for start in wanted]
    assert places == sorted(places)
    assert all(
        "--context kind-topobus" in call
        for call in made
        if call.startswith("kubectl") and "topobus machine" not in call
    )
    assert "kind delete cluster --name topobus" in answer.stdout


def test_every_image_of_the_manifests_is_loaded(programs: Path) -> None:
    """What the manifests name, and the command line, by which the machine is written."""
    assert quick_start(programs, "--no-build").returncode == 0

    pods = [
        manifest["spec"]["template"]["spec"]
        for manifest in built("kind/manifests")
        if manifest["kind"] in ("DaemonSet", "Deployment")
    ]
    named = {
        container["image"]
        for pod in pods
        for container in pod["containers"]
        if container["image"].startswith("topobus/")
    }
    loaded = {call.split()[3].removeprefix("docker.io/") for call in calls(programs) if call.startswith("kind load")}
    assert loaded == named | {"topobus/cli:latest"}
    assert not any(call.startswith("docker build") for call in calls(programs))


def test_nothing_is_run_when_it_is_a_dry_run(programs: Path) -> None:
    """All steps are printed, with the chosen machine and cluster, also where programs are missing.

    Those are named.
    """
    (programs / "kind").unlink()

    answer = quick_start(programs, "--dry-run", "--profile", "epyc-8numa", "--name", "lab")

    assert (answer.returncode, calls(programs)) == (0, [])
    assert "+ kind create cluster --name lab" in answer.stdout
    assert "profile build epyc-8numa" in answer.stdout
    assert "kubectl --context kind-lab apply -k deploy/kind/manifests" in answer.stdout
    assert "kind is not on the PATH" in answer.stderr


def test_missing_programs_are_all_named_when_it_begins(programs: Path) -> None:
    """Each with where to have it, before anything is made."""
    for name in ("kind", "kubectl", "docker"):
        (programs / name).unlink()

    answer = quick_start(programs)

    assert (answer.returncode, calls(programs)) == (69, [])
    assert [
        re.search(r"quick-start: (.*?) (?:is|are) (?:not )?on the PATH", line)[1] for line in answer.stderr.splitlines()
    ] == [  # type: ignore[index]  # none is another failure
        "kind",
        "kubectl",
        "neither docker nor podman",
    ]


def test_engine_that_does_not_answer_is_told(programs: Path) -> None:
    """A daemon that is not there ends it before a cluster is made."""
    write_program(programs, "docker", "exit 1")

    answer = quick_start(programs)

    assert answer.returncode == 69
    assert "docker does not answer" in answer.stderr
    assert calls(programs) == ["docker info"]


def test_cluster_that_is_there_is_used(programs: Path) -> None:
    """A second run makes no second cluster."""
    write_program(
        programs,
        "kind",
        'case "$*" in "get clusters") echo other; echo topobus ;; *"get nodes"*) echo topobus-control-plane ;; esac',
    )

    assert quick_start(programs).returncode == 0

    assert not any("create cluster" in call for call in calls(programs))


def test_cluster_is_refused_when_its_kubernetes_is_too_old(programs: Path) -> None:
    """The server's version counts, not kubectl's, and the error says which node image would do."""
    write_program(programs, "kubectl", _KUBECTL.replace("MINOR", "33"))

    answer = quick_start(programs)

    assert answer.returncode == 69
    assert (
        "runs Kubernetes 1.33, wanted 1.34 or later: kind create cluster --image kindest/node:v1.34.0" in answer.stderr
    )
    assert not any(" apply " in call for call in calls(programs))


def test_images_go_by_archives_when_the_engine_is_podman(programs: Path) -> None:
    """Without docker an archive goes to kind; and is removed."""
    (programs / "docker").rename(programs / "podman")
    write_program(programs, "podman", 'if [ "$1" = save ]; then : > "$3"; fi')

    assert quick_start(programs, "--no-build").returncode == 0

    loads = [call for call in calls(programs) if call.startswith("kind load")]
    assert loads[0] == f"kind load image-archive {programs.parent}/topobus-topobus-discovery.tar --name topobus"
    assert list(programs.parent.glob("*.tar")) == []
    assert "podman save --output" in "\n".join(calls(programs))


@pytest.mark.parametrize("arguments", [["--push"], ["--name"], ["lab"]])
def test_usage_is_told_when_an_argument_is_unknown(programs: Path, arguments: list[str]) -> None:
    """A wrong word runs nothing."""
    answer = quick_start(programs, *arguments)

    assert (answer.returncode, "usage" in answer.stderr, calls(programs)) == (64, True, [])


def test_services_read_the_machine_where_the_script_puts_it() -> None:
    """One folder in script and manifests: the hardware tree, and the device nodes that containers
    get.
    """
    folder = re.search(r"^machine=(\S+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert folder is not None
    manifests = built("kind/manifests")
    pod = pod_of(manifests, "DaemonSet", "topobus-node")

    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert paths == {top: f"{folder[1]}/{top}" for top in ("sys", "proc", "dev")}
    assert (
        environment_of(manifests, container_of(pod, "gpu"))["TOPOBUS_ALL__HARDWARE__RUNTIME_DEV"] == f"{folder[1]}/dev"
    )


@pytest.mark.parametrize("device_class", ["gpu", "nic", "fpga"])
def test_gateway_allows_the_device_nodes_of_the_machine(device_class: str) -> None:
    """Without the operator's word it gives none outside of /dev, and no pod would get a device."""
    manifests = built("kind/manifests")
    environment = environment_of(manifests, container_of(pod_of(manifests, "DaemonSet", "topobus-gateway"), "gateway"))
    settings = load_settings(GatewaySettings, "gateway", file=None, environ=environment)
    path = f"{environment['TOPOBUS_ALL__HARDWARE__RUNTIME_DEV']}/any0"
    prepared = Prepared(edits={"any-0": ContainerEdits(device_nodes=(DeviceNode(path="/dev/any0", host_path=path),))})

    rights = rights_of(device_class, settings.edits[device_class], is_foreign=False)
    assert refuse_forbidden(device_class, prepared, rights) is None


def test_pod_asks_for_what_the_classes_offer() -> None:
    """One claim for a device of each of two classes of examples/claims/classes.yaml, below one root
    complex, and the pod uses it.
    """
    claim, pod = yaml.safe_load_all((ROOT / "deploy/kind/pod.yaml").read_text(encoding="utf-8"))
    classes = yaml.safe_load_all((ROOT / "examples/claims/classes.yaml").read_text(encoding="utf-8"))
    asked = {request["name"]: request["exactly"]["deviceClassName"] for request in claim["spec"]["devices"]["requests"]}

    assert asked == {"gpu": "gpu.topobus.dev", "nic": "nic.topobus.dev"}
    assert {*asked.values()} <= {each["metadata"]["name"] for each in classes}
    assert claim["spec"]["devices"]["constraints"] == [
        {"requests": ["gpu", "nic"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}
    ]
    assert pod["spec"]["resourceClaims"] == [{"name": "pair", "resourceClaimName": claim["metadata"]["name"]}]
    assert pod["spec"]["containers"][0]["resources"] == {"claims": [{"name": "pair"}]}


def test_script_has_no_finding_of_shellcheck() -> None:
    """Its quoting and its tests are what they look like."""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck is on the PATH (apt-get install shellcheck)")

    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout
