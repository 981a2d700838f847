"""`topobus` against the whole system: `topobus up` runs it, other `topobus` processes ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.topobus_up import LIMIT_S, TOPOBUS, UpSystem, topobus_up
from topobus.nic.config import NicSettings
from topobus.process.config import load_settings

pytestmark = pytest.mark.integration

_EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def system() -> Iterator[UpSystem]:
    """Run the system on the recorded dgx."""
    with (
        tempfile.TemporaryDirectory(prefix="tb-", ignore_cleanup_errors=True) as state,
        topobus_up(Path(state)) as running,
    ):
        yield running


def pod(name: str, **limits: object) -> str:
    """Write a pod with one container."""
    wanted = ", ".join(
        f"{key.replace('__', '/').replace('topobus/', 'topobus.dev/')}: {value}" for key, value in limits.items()
    )
    return (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n    - name: main\n      "
        f"resources: {{limits: {{{wanted}}}}}\n"
    )


def test_machine_prints_the_report_and_the_drawing_when_the_system_runs(system: UpSystem) -> None:
    """JSON has the recorded machine's fields, and the drawing shows both sockets and a GPU within
    100 columns.
    """
    report = system.json("machine")
    drawing = system.run("machine").stdout

    assert [node["id"] for node in report["numa"]] == [0, 1]
    assert "socket 1 · NUMA node 1" in drawing
    assert "gpu-0000-18-00-0" in drawing
    assert max(map(len, drawing.splitlines())) <= 100
    assert "\x1b" not in drawing


def test_inventory_lists_every_class_when_asked_for_none(system: UpSystem) -> None:
    """The summary has all classes; one class has its devices.

    JSON has the inventories themselves.
    """
    counts = {
        inventory["device_class"]: len(inventory["devices"]) for inventory in system.json("inventory")["inventories"]
    }

    assert counts == {"cpu": 224, "fpga": 2, "gpu": 8, "nic": 8}
    assert "gpu-0000-18-00-0" in system.run("inventory", "gpu").stdout
    assert "0-55,112-167" in system.run("inventory", "cpu").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["inventory", "gpus"], 1, "did you mean gpu? known are cpu, fpga, gpu, nic"),
        (["device", "forgive", "gpu-0000-18-00-0", "--node", "elsewhere"], 1, "demo-node"),
        (["machine", "--node", "elsewhere"], 1, "demo-node"),
        (["place", _EXAMPLES / "pods/trainer.yaml", "--node", "elsewhere"], 1, "demo-node"),
        (["explain", "d-nowhere"], 1, "topobus decisions"),
        (["release", "pod", "nobody"], 1, "default/nobody"),
        (["health", "--class", "gpus"], 1, "gpu"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, list) else "",
)
def test_command_names_what_exists_when_it_is_asked_for_what_does_not(
    system: UpSystem, arguments: list[object], code: int, said: str
) -> None:
    """An unknown class, node, decision, pod or claim is named on stderr with a way on, and nothing
    is printed to stdout.
    """
    done = system.run(*arguments, code=code)

    assert said in done.stderr
    assert done.stdout == ""


def test_inventory_repeats_the_selector_when_it_matches_nothing(system: UpSystem) -> None:
    """Whoever mistyped a label sees what was looked for."""
    done = system.run("inventory", "gpu", "-l", "foo=bar")

    assert "no device matches foo=bar" in done.stdout + done.stderr


@pytest.mark.parametrize(("verb", "said"), [("forgive", "nothing to forgive"), ("return", "nothing to return")])
def test_device_verb_says_that_there_is_nothing_to_do_when_nothing_stands(
    system: UpSystem, verb: str, said: str
) -> None:
    """A device without sticky faults, or that nobody keeps back, is left as it is, in words that
    belong to the verb.
    """
    assert said in system.run("device", verb, "gpu-0000-18-00-0").stdout


def test_place_and_release_move_the_ledger_when_a_pod_fits(system: UpSystem, tmp_path: Path) -> None:
    """A dry run holds nothing; a placement does; the same pod again is refused.

    Release gives all back.
    """
    manifest = _EXAMPLES / "pods/trainer.yaml"

    assert system.json("place", manifest, "--dry-run")["chosen"]["result"]["outcome"] == "placement"
    assert "default/trainer" not in system.run("machine").stdout

    placed = system.json("place", manifest)["chosen"]
    assert placed["result"]["containers"][0]["cpus"] == "0-7,112-119"
    assert "T gpu-0000-18-00-0" in system.run("machine").stdout
    refused = system.json("place", manifest, "--node", "demo-node", code=1)
    assert [reason["code"] for reason in refused["result"]["reasons"]] == ["already-placed"]

    released = system.json("release", "pod", "default/trainer")["released"]
    assert {key: len(names) for key, names in released[0]["devices"].items()} == {"cpu": 16, "gpu": 2, "nic": 2}


def test_refusal_names_the_pod_and_its_decision_when_a_pod_does_not_fit(system: UpSystem, tmp_path: Path) -> None:
    """The frame says whom which node refused, and how to take the decision apart."""
    manifest = tmp_path / "greedy.yaml"
    manifest.write_text(pod("greedy", topobus__gpu=9))

    refused = system.run("place", manifest, code=1).stdout

    assert "pod default/greedy refused by demo-node" in refused
    (decision,) = re.findall(r"topobus explain (\S+)", refused)
    assert f"decision   {decision}" in system.run("explain", decision).stdout


def test_place_answers_the_same_when_an_operation_is_asked_again(system: UpSystem) -> None:
    """`--operation` of an earlier try gives that try's answer instead of a second placement."""
    manifest = _EXAMPLES / "pods/trainer.yaml"

    first = system.json("place", manifest, "--node", "demo-node", "--operation", "again-1")
    second = system.json("place", manifest, "--node", "demo-node", "--operation", "again-1")
    system.run("release", "pod", "trainer")

    assert first == second


def test_place_says_why_not_when_a_pod_asks_too_much(system: UpSystem, tmp_path: Path) -> None:
    """An impossible request is a refusal with reasons and exit code 1, not an error."""
    manifest = tmp_path / "greedy.yaml"
    manifest.write_text(pod("greedy", topobus__gpu=9))

    refused = system.json("place", manifest, code=1)
    shown = system.run("place", manifest, code=1).stdout

    assert refused["answers"][0]["result"]["outcome"] == "refusal"
    assert "why not" in shown


def test_place_takes_a_folder_when_it_has_pods(system: UpSystem, tmp_path: Path) -> None:
    """Each pod is placed; one that asks for its claims alone is not, and says what decides.

    A workload without pods is none.
    """
    (tmp_path / "a.yaml").write_text(pod("first", topobus__gpu=1))
    (tmp_path / "b.yaml").write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: claimed}\nspec:\n  resourceClaims: [{name: c, "
        "resourceClaimName: c}]\n"
        "  containers: [{name: a, image: x, resources: {claims: [{name: c}]}}]\n"
    )
    (tmp_path / "c.yaml").write_text(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  replicas: 0\n"
        "  template: {spec: {containers: [{name: a, image: x}]}}\n"
    )

    done = system.run("place", "-f", tmp_path, "--dry-run", code=1)
    nothing = system.run("place", tmp_path / "c.yaml")

    assert "pod default/first would go to demo-node" in done.stdout
    assert "Pod default/claimed is not placed: it requests nothing but its claims." in " ".join(done.stdout.split())
    assert "claimed would go" not in done.stdout
    assert nothing.stdout == "0 pods: nothing is placed\n"


def test_place_says_that_a_class_is_unknown_when_no_service_serves_it(system: UpSystem, tmp_path: Path) -> None:
    """A typo in a resource's name is a refusal that names the class."""
    manifest = tmp_path / "typo.yaml"
    manifest.write_text(pod("typo", topobus__gpux=1))

    assert "gpux" in system.run("place", manifest, code=1).stdout


def test_explain_replays_a_decision_when_given_its_id_or_its_file(system: UpSystem, tmp_path: Path) -> None:
    """The replay gives the same answer.

    A file that was tampered with gives another one and exit code 1.
    """
    chosen = system.json("place", _EXAMPLES / "pods/trainer.yaml", "--dry-run")["chosen"]

    explained = system.json("explain", chosen["decision_id"])
    assert explained["replay"] == {"is_replayable": True, "is_same": True, "outcome": chosen["result"]}
    assert "the same answer" in system.run("explain", chosen["decision_id"]).stdout
    assert chosen["decision_id"] in system.run("decisions").stdout

    event = explained["decision"]
    kept = tmp_path / "decision.json"
    kept.write_text(json.dumps(event))
    system.run("explain", "--file", kept)
    event["request"]["containers"][0]["cpus"] = 4
    kept.write_text(json.dumps(event))
    assert "another answer" in system.run("explain", "--file", kept, code=1).stdout


def test_claim_is_allocated_and_goes_when_applied_and_deleted(system: UpSystem) -> None:
    """`apply` makes class and claim, the controller allocates it, `delete` releases it."""
    system.run("apply", "-f", _EXAMPLES / "claims/classes.yaml")
    system.run("apply", "-f", _EXAMPLES / "claims/gpu-nic-pair.yaml")

    claim = wait_until(
        lambda: system.json("get", "claim", "gpu-nic-pair"), lambda shown: bool(shown["status"].get("allocation"))
    )
    assert [result["request"] for result in claim["status"]["allocation"]["devices"]["results"]] == ["gpu", "nic"]
    assert "allocated" in system.run("get", "claims").stdout
    assert "unchanged" in system.run("apply", "-f", _EXAMPLES / "claims/classes.yaml").stdout

    system.run("delete", "claim", "gpu-nic-pair")
    wait_until(lambda: system.json("get", "claims"), lambda listed: not listed["items"])


_WRONG_CLASS = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: wrong.example.com}
spec: {selectors: [{cel: {expression: 'device.driver ==== "x"'}}]}
"""
_WRONG_CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: wrong}
spec:
  devices:
    requests:
      - name: gpu
        exactly: {deviceClassName: gpu.topobus.dev, selectors: [{cel: {expression: 'device.driver.size('}}]}
"""


@pytest.mark.parametrize(
    ("manifest", "name"),
    [(_WRONG_CLASS, "DeviceClass wrong.example.com"), (_WRONG_CLAIM, "default/wrong")],
    ids=["class", "claim"],
)
def test_apply_answers_no_when_an_expression_does_not_compile(
    system: UpSystem, tmp_path: Path, manifest: str, name: str
) -> None:
    """The controller's word on a wrong expression comes at once, with the place in it; --no-wait
    only stores.

    Applied again, it is said again.
    """
    file = tmp_path / "wrong.yaml"
    file.write_text(manifest)
    try:
        first = system.run("apply", "-f", file, code=1)
        again = system.json("apply", "-f", file, code=1)["applied"]
        unwaited = system.run("apply", "-f", file, "--no-wait")
    finally:
        system.run("delete", "-f", file)

    assert f"{name} cannot be used" in first.stderr
    assert "column" in " ".join(first.stderr.split())
    assert "Invalid" in first.stdout
    assert [condition["reason"] for condition in again[0]["status"]["conditions"]] == ["Invalid"]
    # Which system was written to, and nothing else.
    assert [line.split(" ")[:2] for line in unwaited.stderr.splitlines()] == [["NATS", "at"]]
    assert "unchanged" in unwaited.stdout


def test_apply_says_why_a_claim_waits_when_it_does_not_fit_now(system: UpSystem, tmp_path: Path) -> None:
    """What may fit later is stored and waits: the reason is shown, and the answer is yes."""
    file = tmp_path / "large.yaml"
    file.write_text(_WRONG_CLAIM.replace("selectors: [{cel: {expression: 'device.driver.size('}}]", "count: 9"))
    try:
        done = system.run("apply", "-f", file)
    finally:
        system.run("delete", "-f", file)

    assert "DoesNotFit: " in done.stdout


def test_oci_merges_devices_into_the_spec_when_a_pod_is_placed(system: UpSystem, tmp_path: Path) -> None:
    """Variables and exclusive CPUs of one container; the base's own wins and is told.

    A recorded machine's nodes are missing here.
    """
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(pod("spec", cpu="2", memory="1Gi", **{"topobus.dev/gpu": "1"}))
    base = tmp_path / "config.json"
    base.write_text(json.dumps({"ociVersion": "1.0.2", "process": {"env": ["NVIDIA_VISIBLE_DEVICES=none"]}}))
    system.run("place", manifest)
    try:
        answer = system.run("oci", "--pod", "default/spec", "--spec", base, "--json", code=1)
    finally:
        system.run("release", "pod", "default/spec")

    merged = json.loads(answer.stdout)
    variables = dict(variable.split("=", 1) for variable in merged["spec"]["process"]["env"])
    assert variables["TOPOBUS_GPU_DEVICES"].startswith("gpu-0000-")
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "none"
    assert [conflict["what"] for conflict in merged["conflicts"]] == ["variable NVIDIA_VISIBLE_DEVICES"]
    assert merged["spec"]["linux"]["resources"]["cpu"]["cpus"]
    assert "/dev/nvidiactl" in merged["missing"]
    assert "conflict: variable NVIDIA_VISIBLE_DEVICES: the pod wins over topobus.dev/gpu" in " ".join(
        answer.stderr.split()
    )


def test_oci_says_what_to_name_when_nothing_is_held(system: UpSystem) -> None:
    """Neither or both of pod and claim is a usage error.

    What holds nothing is a no with a next step.
    """
    system.run("oci", code=2)
    system.run("oci", "--pod", "default/a", "--claim", "default/b", code=2)
    absent = system.run("oci", "--pod", "default/absent", code=1)

    assert "topobus place" in absent.stderr


def test_health_watch_tells_the_present_state_when_it_begins(system: UpSystem) -> None:
    """The first eight lines are the eight GPUs, and SIGTERM ends the watch with 0."""
    watch = subprocess.Popen(
        [*TOPOBUS, "health", "watch", "--class", "gpu", "--json"],
        env=system.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    lines = [json.loads(watch.stdout.readline()) for _ in range(8)]
    watch.send_signal(signal.SIGTERM)
    watch.stdout.close()

    assert watch.wait(LIMIT_S) == 0
    assert len({line["event"]["device"] for line in lines}) == 8
    assert all(line["is_present_state"] for line in lines)
    assert "8 devices are well" in system.run("health", "--class", "gpu").stdout


def test_nic_service_keeps_everything_in_the_system_s_own_folder(system: UpSystem) -> None:
    """Beside a service that this machine really runs, or after another `up`: records of one must
    never be undone by the other.
    """
    lines = Path(f"/proc/{system.pids['nic']}/environ").read_text(encoding="utf-8").split("\0")
    environment = dict(line.partition("=")[::2] for line in lines if line.startswith("TOPOBUS_"))
    settings = load_settings(NicSettings, "nic", file=None, environ=environment)

    folders = (settings.journal.dir, settings.interfaces.kept_namespaces_dir, settings.cni.state_dir)
    assert [folder for folder in folders if not Path(folder).is_relative_to(system.state)] == []


def test_doctor_asks_the_gateway_what_kubelet_knows(system: UpSystem) -> None:
    """Whatever kubelet lives on this machine, no socket here is looked at: no check fails, and the
    kubelet that the node lacks is a warning.
    """
    findings = system.json("doctor")["findings"]

    assert [finding for finding in findings if finding["level"] == "fail"] == []
    assert {"nats", "streams", "controller", "demo-node: ledger"} <= {finding["what"] for finding in findings}
    (kubelet,) = (finding for finding in findings if finding["what"] == "demo-node: kubelet")
    assert f"{system.state / 'kubelet' / 'device-plugins'} there has no kubelet.sock" in kubelet["found"]
    assert any(finding["what"] == "demo-node: gateway" and finding["found"] == "answers" for finding in findings)


def test_doctor_names_how_a_node_differs_from_a_recorded_machine(system: UpSystem) -> None:
    """The demo's machine is a DGX, and no GB200."""
    same = system.json("doctor", "--machine", "dgx")["findings"]
    other = system.json("doctor", "--machine", "gb200")["findings"]

    (well,) = (finding for finding in same if finding["what"] == "demo-node: template")
    (differs,) = (finding for finding in other if finding["what"] == "demo-node: template")
    assert (well["level"], differs["level"]) == ("ok", "warn")
    assert "cpu-0: resource.kubernetes.io/pcieRoot is pci0000:00, pci0000:15" in differs["found"]


def test_each_process_is_its_own_user_when_up_runs(system: UpSystem, tmp_path: Path) -> None:
    """Services have passwords of their own, commands find theirs without flags, and a wrong login
    is told with a next step.
    """
    (tmp_path / "password").write_text("p0123456789abcdef")
    logins = {}
    for service in ("nic", "gateway"):
        lines = Path(f"/proc/{system.pids[service]}/environ").read_text(encoding="utf-8").split("\0")
        environment = dict(
            line.partition("=")[::2] for line in lines if line.startswith(f"TOPOBUS_{service.upper()}__NATS__")
        )
        logins[environment[f"TOPOBUS_{service.upper()}__NATS__USER"]] = environment[
            f"TOPOBUS_{service.upper()}__NATS__PASSWORD_FILE"
        ]
    wrong = {"TOPOBUS_CLI__NATS__USER": "cli", "TOPOBUS_CLI__NATS__PASSWORD_FILE": str(tmp_path / "password")}
    refused = subprocess.run(
        [*TOPOBUS, "inventory"],
        env={**system.environment, **wrong},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    (users,) = (finding for finding in system.json("doctor")["findings"] if finding["what"] == "nats users")

    assert logins == {
        service: str(system.state / "nats-users" / service / "password") for service in ("nic", "gateway")
    }
    assert users["found"] == "the server has users; this is user cli"
    assert refused.returncode == 69
    assert "does not let us in as user 'cli'" in " ".join(refused.stderr.split())
    assert "TOPOBUS_CLI__NATS__PASSWORD_FILE" in refused.stderr


def test_up_restarts_a_service_when_it_is_killed(system: UpSystem) -> None:
    """A service that dies comes back under another pid, and the status says so."""
    pid = system.pids["nic"]

    os.kill(pid, signal.SIGKILL)
    while (line := system.next_line()).get("service") != "nic" or line["state"] != "ready":
        pass

    assert line["restarts"] == 1
    assert line["pid"] != pid


def wait_until(ask: Any, holds: Any) -> Any:
    """Ask again until the answer holds.

    Each ask is a process of its own and takes its time, so no pause is needed.
    """
    for _ in range(60):
        answer = ask()
        if holds(answer):
            return answer
    raise AssertionError(f"never came true; the last answer was {answer}")
