"""Promises of `topobus simulate`: pods planned on a machine without any server, and decisions that
replay to the same answer.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topobus.cli.application import run
from topobus.cli.exits import ExitCode

Simulate = Callable[..., tuple[int, dict[str, Any]]]

TRAINER = """
apiVersion: v1
kind: Pod
metadata: {name: %(name)s, annotations: {%(annotations)s}}
spec:
  containers:
%(containers)s
"""


def pod(name: str, *containers: dict[str, int], annotations: str = "") -> str:
    """A pod whose containers want so much of each resource."""
    listed = [
        f"    - name: c{place}\n      resources: {{limits: "
        f"{json.dumps({key if key == 'cpu' else f'topobus.dev/{key}': value for key, value in wants.items()})}}}"
        for place, wants in enumerate(containers)
    ]
    return TRAINER % {"name": name, "annotations": annotations, "containers": "\n".join(listed)}


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo machine, saved by simulate itself from its profile."""
    folder = tmp_path_factory.mktemp("simulate")
    (folder / "idle.yaml").write_text(pod("idle", {"cpu": 1}))
    saved = folder / "dgx.json"
    assert (
        run(["simulate", "--machine", "dgx", "--pods", str(folder / "idle.yaml"), "--save", str(saved), "--json"])
        == ExitCode.OK
    )
    return saved


@pytest.fixture
def simulate(dgx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Plan these manifests (file name to text) on the demo machine.

    The exit code and the JSON document.
    """

    def plan(manifests: dict[str, str], *options: str) -> tuple[int, dict[str, Any]]:
        pods = tmp_path / "pods"
        pods.mkdir(exist_ok=True)
        for name, text in manifests.items():
            (pods / name).write_text(text)
        capsys.readouterr()
        code = run(["simulate", "--machine", str(dgx), "--pods", str(pods), "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return plan


def test_simulate_plans_in_the_order_of_file_names(simulate: Simulate) -> None:
    """What comes first by name is placed first and holds what it got.

    A file that is no manifest is passed over.
    """
    code, answer = simulate(
        {
            "b.yaml": pod("second", {"gpu": 6}),
            "a.yaml": pod("first", {"gpu": 4, "fpga": 1}),
            "notes.txt": "no manifest",
        },
    )

    assert code == ExitCode.NO
    assert [(decision["owner"]["name"], decision["outcome"]["outcome"]) for decision in answer["decisions"]] == [
        ("first", "placement"),
        ("second", "refusal"),
    ]
    assert (answer["placed"], answer["refused"]) == (1, 1)
    assert list(answer["ledger"]["allocations"]) == [
        next(key for key in answer["ledger"]["allocations"] if "/first/" in key)
    ]


def test_simulate_gives_the_same_document_when_run_again(simulate: Simulate) -> None:
    """No clock and no chance is in it."""
    pods = {"a.yaml": pod("a", {"cpu": 8, "gpu": 2, "nic": 2}), "b.yaml": pod("b", {"gpu": 7})}

    assert simulate(pods) == simulate(pods)


def test_simulate_takes_kubelets_managers_as_they_are_set(simulate: Simulate) -> None:
    """An option of the CPU manager and reserved memory decide as in kubelet: half a core is refused
    by the one, and by the other a node gives no memory.
    """
    wants_memory = pod("memory", {"cpu": 1}).replace('"cpu": 1', '"cpu": 1, "memory": "1Gi"')
    nodes = []
    for amounts in ((), ("--reserved-memory", "0=1Ei")):
        _, planned = simulate({"a.yaml": wants_memory}, "--align-memory", *amounts)
        (container,) = planned["decisions"][0]["outcome"]["containers"]
        nodes.append(container["memory"][0]["nodes"])
    wants_cpus = {"a.yaml": pod("half", {"cpu": 1}), "b.yaml": pod("core", {"cpu": 2})}
    _, by_cores = simulate(wants_cpus, "--cpu-option", "full-pcpus-only")

    assert [decision["outcome"].get("reasons", [{}])[0].get("code") for decision in by_cores["decisions"]] == [
        "smt-alignment",
        None,
    ]
    assert nodes == ["0", "1"]


def test_simulate_draws_the_machine_and_the_reasons_when_people_read(
    dgx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People get what `place` prints, a pod after the other, and the machine in the end."""
    (tmp_path / "a.yaml").write_text(pod("small", {"gpu": 1}))
    capsys.readouterr()
    code = run(["simulate", "--machine", str(dgx), "--pods", str(tmp_path)])
    text = capsys.readouterr().out

    assert code == ExitCode.OK
    assert "pod default/small placed on dgx" in text
    assert "[devices-chosen]" in text
    assert "S gpu-0000-18-00-0" in text
    assert "1 placed, 0 refused" in text


def test_simulate_reads_a_folder_and_its_archive_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recorded tree is read as a folder and as an archive, and gives the same devices."""
    from topobus.simulation.machines import build

    root = tmp_path / "laptop"
    build("laptop", root)
    with tarfile.open(tmp_path / "laptop.tar.gz", "w:gz") as archive:
        archive.add(root, arcname="laptop")
    (tmp_path / "a.yaml").write_text(pod("small", {"cpu": 2}))
    answers = []
    for machine in (root, tmp_path / "laptop.tar.gz", "laptop"):
        capsys.readouterr()
        assert run(["simulate", "--machine", str(machine), "--pods", str(tmp_path / "a.yaml"), "--json"]) == ExitCode.OK
        answers.append(json.loads(capsys.readouterr().out)["decisions"][0]["outcome"])

    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        pytest.param(
            ["--machine", "vax", "--pods", "p.yaml"],
            ExitCode.NO_INPUT,
            "is no folder, no file and no profile",
            id="no-machine",
        ),
        pytest.param(["--machine", ".", "--pods", "."], ExitCode.NO_INPUT, "holds no manifest", id="no-pod"),
        pytest.param(["--machine", ".", "--pods", "p.yaml"], ExitCode.NO_INPUT, "has no folder sys", id="no-tree"),
        pytest.param(
            ["--machine", "p.yaml", "--pods", "p.yaml"], ExitCode.DATA, "cannot read this as Machine", id="no-json"
        ),
        pytest.param(["--machine", "dgx", "--pods", "missing"], ExitCode.NO_INPUT, "cannot read missing", id="no-pods"),
        pytest.param(
            ["--machine", "dgx", "--pods", "p.yaml", "--policy", "strict"], ExitCode.USAGE, "restricted", id="policy"
        ),
        pytest.param(
            ["--machine", "dgx", "--pods", "p.yaml", "--reserved-cpus", "x"],
            ExitCode.USAGE,
            "--reserved-cpus",
            id="cpulist",
        ),
        pytest.param(
            ["--machine", "dgx", "--pods", "p.yaml", "--reserved-memory", "0:1Gi"],
            ExitCode.USAGE,
            "such as 0=1Gi",
            id="reserved-memory",
        ),
        *(
            pytest.param(
                ["--machine", "dgx", "--pods", "p.yaml", *words],
                ExitCode.USAGE,
                text,
                id=f"reserved-memory-{name}",
            )
            for name, text, words in (
                ("negative", "'0=-1Gi'", ["--reserved-memory", "0=-1Gi"]),
                ("no-number", "'x=1Gi'", ["--reserved-memory", "x=1Gi"]),
                ("twice", "each node once", ["--reserved-memory", "0=1Gi", "--reserved-memory", "0=2Gi"]),
                ("unknown-node", "dgx has 0-1", ["--reserved-memory", "9=1Gi"]),
            )
        ),
        pytest.param(
            [
                *("--machine", "dgx", "--pods", "p.yaml"),
                *("--policy", "single-numa-node", "--cpu-option", "align-by-socket"),
            ],
            ExitCode.USAGE,
            "cannot go with policy single-numa-node",
            id="cpu-option",
        ),
        pytest.param(
            ["--machine", "dgx", "--pods", "p.yaml", "--search-steps", "-1"],
            ExitCode.USAGE,
            "Must be >= 0",
            id="steps",
        ),
    ],
)
def test_simulate_says_what_is_wrong_when_an_argument_cannot_be_used(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each wrong argument has its exit code and one sentence that names it."""
    monkeypatch.chdir(tmp_path)
    if "p.yaml" in arguments:
        (tmp_path / "p.yaml").write_text(pod("p", {"cpu": 1}))

    assert run(["simulate", *arguments]) == code
    assert says in capsys.readouterr().err


# What each decision is about, the pods (the last one is replayed), and how the node is set.
REPLAYED: dict[str, tuple[list[str], list[str]]] = {
    "placement": ([pod("p", {"cpu": 8, "gpu": 2, "nic": 2})], []),
    "refusal": (
        [pod("a", {"gpu": 3}), pod("p", {"gpu": 4, "fpga": 1}, annotations="topobus.dev/policy: single-numa-node")],
        [],
    ),
    "impossible": ([pod("p", {"gpu": 9})], []),
    "pod-scope": ([pod("p", {"gpu": 2}, {"gpu": 2, "nic": 1})], ["--scope", "pod", "--policy", "restricted"]),
    "corrected": (
        [pod("p", {"cpu": 80}, {"cpu": 60, "fpga": 1})],
        ["--mode", "corrected", "--policy", "single-numa-node"],
    ),
    "gave-up": (
        [pod("p", {"cpu": 80}, {"cpu": 60, "fpga": 1})],
        ["--mode", "corrected", "--policy", "single-numa-node", "--search-steps", "1"],
    ),
    "no-other-way": (
        [pod("p", {"cpu": 80}, {"cpu": 80}, {"cpu": 60, "fpga": 1})],
        ["--mode", "corrected", "--policy", "single-numa-node"],
    ),
    "locality": ([pod("p", {"gpu": 2, "nic": 1}, annotations='topobus.dev/locality: "hard:switch"')], []),
    "locality-not-met": ([pod("p", {"gpu": 3}, annotations='topobus.dev/locality: "hard:switch"')], []),
    "locality-missed": (
        [pod("p", {"gpu": 3}, annotations='topobus.dev/locality: "soft:switch"')],
        ["--mode", "corrected"],
    ),
}


@pytest.mark.parametrize("what", REPLAYED)
def test_explain_replays_to_the_same_answer_when_a_decision_was_recorded(
    what: str, dgx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any recorded decision holds all that it was made on: explained offline, the answer comes out
    again, to the last fact.
    """
    pods, options = REPLAYED[what]
    for number, text in enumerate(pods):
        (tmp_path / f"{number}.yaml").write_text(text)
    decisions = tmp_path / "decisions"
    run(["simulate", "--machine", str(dgx), "--pods", str(tmp_path), "--decisions", str(decisions), *options])
    capsys.readouterr()
    last = sorted(decisions.iterdir())[-1]

    code = run(["explain", "--file", str(last), "--json"])
    answer = json.loads(capsys.readouterr().out)

    assert code == ExitCode.OK
    assert answer["replay"]["is_same"]
    outcome = answer["decision"]["outcome"]
    codes = [reason["code"] for reason in outcome.get("reasons", [])] + [
        reason["code"] for container in outcome.get("containers", []) for reason in container["reasons"]
    ]
    wanted = {
        "placement": "same-switch",
        "refusal": "relax",
        "impossible": "not-enough-devices",
        "pod-scope": "aligned",
        "corrected": "searched",
        "locality": "locality-met",
    }
    assert wanted.get(what, what) in codes


CLAIMS = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two-gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev, count: 2}}], constraints: [{matchAttribute: resource.kubernetes.io/numaNode}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: uplink}
spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.topobus.dev, count: %(nics)d}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: %(name)s}
spec:
  resourceClaims: [{name: cards, resourceClaimTemplateName: two-gpus}, {name: uplink, resourceClaimName: uplink}]
  containers: [{name: main, resources: {limits: {cpu: 4, topobus.dev/gpu: 1}, claims: [{name: cards}, {name: uplink}]}}]
"""  # noqa: E501


def test_simulate_allocates_the_claims_of_pods(simulate: Simulate) -> None:
    """A pod gets its claims' devices and its own.

    What claims hold is held against the pods that come after.
    """
    code, answer = simulate({"a.yaml": CLAIMS % {"name": "claimed", "nics": 1}, "b.yaml": pod("late", {"gpu": 6})})

    assert code == ExitCode.NO
    assert [(decision["owner"]["name"], decision["outcome"]["outcome"]) for decision in answer["decisions"]] == [
        ("claimed", "placement"),
        ("late", "refusal"),
    ]
    (claims,) = answer["claims"]
    assert sorted(claims["allocations"]) == ["default/claimed-cards", "default/uplink"]
    held = {
        key.split("/")[2]: holder["holdings"][0]["devices"] for key, holder in answer["ledger"]["allocations"].items()
    }
    assert sorted(len(names) for holding in held.values() for names in holding.values()) == [1, 1, 2]
    assert held["uplink"].keys() == {"nic"}


def test_simulate_places_no_pod_when_its_claims_do_not_fit(simulate: Simulate) -> None:
    """A pod without the devices of its claims is refused, with the claim's reasons, and holds
    nothing.
    """
    code, answer = simulate({"a.yaml": CLAIMS % {"name": "claimed", "nics": 9}})

    assert code == ExitCode.NO
    assert answer["decisions"][0]["outcome"]["reasons"][0]["code"] == "too-few-devices"
    assert answer["ledger"]["allocations"] == {}


def test_simulate_takes_the_claims_back_when_the_pod_itself_does_not_fit(simulate: Simulate) -> None:
    """All of a pod or nothing: claims that fit hold nothing when the pod's own CPUs do not."""
    _, answer = simulate({"a.yaml": (CLAIMS % {"name": "claimed", "nics": 1}).replace("cpu: 4", "cpu: 500")})

    assert [reason["code"] for reason in answer["decisions"][0]["outcome"]["reasons"]] == ["not-enough-cpus"]
    assert answer["ledger"]["allocations"] == {}


def test_simulate_allocates_claims_that_no_pod_names(simulate: Simulate) -> None:
    """A claim alone is answered as the controller answers it.

    One that has to wait makes the answer a no.
    """
    alone = CLAIMS.split("---")[1]
    code, answer = simulate({"a.yaml": alone % {"nics": 3}, "b.yaml": (alone % {"nics": 6}).replace("uplink", "more")})

    assert code == ExitCode.NO
    assert [(claim["name"], claim["condition"]) for claim in answer["claims"]] == [
        ("ResourceClaim default/uplink", "Allocated"),
        ("ResourceClaim default/more", "DoesNotFit"),
    ]


def test_simulate_serves_extended_resources_by_claims(simulate: Simulate) -> None:
    """A class of the folder that serves a resource's name gets the pod its devices."""
    served = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: cards}
spec:
  extendedResourceName: nvidia.com/gpu
  selectors: [{cel: {expression: 'device.attributes["topobus.dev"].class == "gpu"'}}]
"""
    code, answer = simulate(
        {"a.yaml": served, "b.yaml": pod("p", {"gpu": 2}).replace("topobus.dev/gpu", "nvidia.com/gpu")}
    )

    assert code == ExitCode.OK
    assert [list(claim["allocations"]) for claim in answer["claims"]] == [["default/p-extended-resources"]]


CHART = """
{apiVersion: v1, kind: Service, metadata: {name: web}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: web}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  template: {spec: {containers: [{name: c, image: x, resources: {limits: {nvidia.com/gpu: 4}}}]}}
"""


def test_simulate_takes_charts_as_they_are_when_a_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pods of workloads, vendors' names, and one note for the rest.

    The options may be spelt as other commands have them.
    """
    (tmp_path / "chart.yaml").write_text(CHART)

    code = run(["simulate", "--root", "dgx", "-f", str(tmp_path), "--profiles", "nvidia", "--json"])

    printed = capsys.readouterr()
    plans = json.loads(printed.out)["decisions"]
    assert code == ExitCode.OK
    assert [plan["owner"]["name"] for plan in plans] == ["web-0", "web-1"]
    assert [len(plan["outcome"]["containers"][0]["devices"]["gpu"]) for plan in plans] == [4, 4]
    assert printed.err.count("left out") == 1
    assert "left out, because Topobus does not use it: 1 ConfigMap, 1 Service" in printed.err


def test_simulate_counts_what_it_leaves_out_when_that_is_of_many_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fifty kinds, and as many workloads, are one short note each: the frequent ones by name."""
    kinds = [f"apiVersion: example.com/v1\nkind: Widget{number}\nmetadata: {{name: w}}\n" for number in range(50)]
    workload = CHART.split("---")[-1]
    workloads = [
        workload.replace("name: web", f"name: web{number}").replace("replicas: 2", "replicas: 0")
        for number in range(50)
    ]
    (tmp_path / "chart.yaml").write_text("---\n".join([CHART, *kinds, kinds[7], *workloads]))

    run(["simulate", "--root", "dgx", "-f", str(tmp_path), "--profiles", "nvidia", "--json"])

    notes = {line.partition(":")[0]: line for line in capsys.readouterr().err.splitlines()}
    left_out, planned = (
        notes["left out, because Topobus does not use it"],
        notes["planned as pods, as many as run at once"],
    )
    assert "2 Widget7" in left_out
    assert left_out.endswith("objects of 46 other kinds")
    assert planned.endswith("and 44 more")
    assert max(len(left_out), len(planned)) < 260


def test_simulate_names_the_profile_when_a_vendors_name_is_asked_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused chart is told what would plan it."""
    (tmp_path / "chart.yaml").write_text(CHART)

    assert run(["simulate", "--machine", "dgx", "--pods", str(tmp_path / "chart.yaml")]) == ExitCode.NO
    assert "--profiles" in capsys.readouterr().err


def test_simulate_says_what_to_do_when_there_are_templates_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template is no wish: a pod makes claims of it."""
    template = (
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: t}, spec: {spec: "
        "{devices: {requests: [{name: g, exactly: {deviceClassName: gpu}}]}}}}"
    )
    (tmp_path / "t.yaml").write_text(template)

    assert run(["simulate", "--machine", "dgx", "--pods", str(tmp_path / "t.yaml")]) == ExitCode.NO_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "it has 1 ResourceClaimTemplate" in said
    assert "resourceClaimTemplateName: t" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("simulate --root dgx -g pods", "there is no option -g; missing: --pods"),
        ("simulate --polcy none", 'there is no option --polcy, did you mean "--policy"?; missing: --machine, --pods'),
        ("simulate", "missing: --machine, --pods"),
        ("simulate --machine dgx --pods", "requires an argument"),
    ],
)
def test_command_line_is_answered_with_all_that_is_wrong_with_its_options(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown options and missing ones in one answer."""
    assert run(line.split()) == ExitCode.USAGE
    assert said in " ".join(capsys.readouterr().err.split())
