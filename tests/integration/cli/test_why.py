"""`topobus why` and `topobus snapshot` as a user runs them: against an API server with his own rights,
from a file without any server, with the packages of the extra `why` alone, and with bad input.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.looks import until
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
_TOPOBUS = (sys.executable, "-m", "topobus.cli.main")
_LIMIT_S = 60.0
_DRA = "resource.k8s.io/v1"
_WRONG_LABEL = (
    '{"items": [{"kind": "Pod", "metadata": {"name": "train", "namespace": "default", "labels": {"app": 7}}}]}'
)
_SELECTOR = {"cel": {"expression": 'device.driver == "gpu.example.com"'}}


def _claim(name: str, count: int, **status: Any) -> dict[str, Any]:
    request = {"name": "r", "exactly": {"deviceClassName": "gpu", "count": count}}
    metadata = {"name": name, "namespace": "default", "uid": f"uid-of-{name}"}
    spec = {"devices": {"requests": [request]}}
    return {"apiVersion": _DRA, "kind": "ResourceClaim", "metadata": metadata, "spec": spec, "status": status}


def _pod(name: str, claim: str, **more: Any) -> dict[str, Any]:
    secret = {"name": "TOKEN", "value": "secret-value"}
    spec = {
        "containers": [{"name": "main", "image": "registry.example/team/train", "env": [secret]}],
        "resourceClaims": [{"name": "gpus", "resourceClaimName": claim}],
        **more,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def _cluster() -> list[dict[str, Any]]:
    """One node of four GPUs, of which a pod has three; another pod wants two."""
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"gpu-{index}"} for index in range(4)]
    spec = {"driver": "gpu.example.com", "pool": pool, "nodeName": "n1", "devices": devices}
    results = [{"request": "r", "driver": "gpu.example.com", "pool": "n1", "device": f"gpu-{i}"} for i in range(3)]
    user = {"resource": "pods", "name": "taker", "uid": "1"}
    return [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
        {"apiVersion": _DRA, "kind": "DeviceClass", "metadata": {"name": "gpu"}, "spec": {"selectors": [_SELECTOR]}},
        {"apiVersion": _DRA, "kind": "ResourceSlice", "metadata": {"name": "n1-gpu"}, "spec": spec},
        _claim("taken", 3, allocation={"devices": {"results": results}}, reservedFor=[user]),
        _claim("wanted", 2),
        _pod("taker", "taken", nodeName="n1"),
        _pod("train", "wanted"),
    ]


async def _run(*arguments: str, kubeconfig: Path | None = None, **environment: str) -> tuple[int, str, str]:
    own = {key: value for key, value in os.environ.items() if key not in ("KUBECONFIG", "HOME")}
    process = await asyncio.create_subprocess_exec(
        *_TOPOBUS,
        *arguments,
        env=own | environment | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig is not None else {"HOME": "/nowhere"}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaint = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    assert process.returncode is not None
    return process.returncode, output.decode(), complaint.decode()


async def test_why_names_holder_and_smallest_change_and_writes_nothing(tmp_path: Path) -> None:
    """The pod lacks one GPU: one device less helps, and so does the end of the pod that has three."""
    async with ApiServerSimulator() as server:
        for each in _cluster():
            server.put(each)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        code, output, complaint = await _run("why", "pod/train", "-o", "json", kubeconfig=kubeconfig)
        _, text, _ = await _run("why", "claim/wanted", kubeconfig=kubeconfig)
        asked = {request.method for request in server.requests}
        lists = {request.path.rpartition("/")[2] for request in server.requests}
        before = len(server.requests)
        placed, placed_text, _ = await _run("why", "taker", kubeconfig=kubeconfig)
        of_placed = {request.path.rpartition("/")[2] for request in server.requests[before:]}

    verdict = json.loads(output)
    assert (code, complaint) == (1, "")
    assert verdict["code"] == "no-node-fits"
    assert [group["reasons"][0]["code"] for group in verdict["groups"]] == ["too-few-devices"]
    assert verdict["groups"][0]["holders"][0]["pods"] == ["default/taker"]
    assert [change["message"] for change in verdict["changes"]] == [
        "it fits on node n1 with 1 device instead of 2 for request r",
        "it fits on node n1 once pod default/taker is gone",
    ]
    assert "request r wants 2 devices of class gpu, found 1 of 4 (3 in use)" in " ".join(text.split())
    assert placed == 0
    assert "Pod default/taker is on node n1: its containers have not started" in placed_text
    assert asked == {"GET"}
    assert {"resourceslices", "nodes", "pods"} < lists
    assert of_placed == {"v1", "pods"}


async def test_snapshot_answers_as_the_cluster_does_and_keeps_no_secret(tmp_path: Path) -> None:
    """A file, compressed or not, gives the same verdict without a server; of containers it has
    neither images nor variables.
    """
    plain, packed = tmp_path / "cluster.json", tmp_path / "cluster.json.gz"
    async with ApiServerSimulator() as server:
        for each in _cluster():
            server.put(each)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        _, live, _ = await _run("why", "train", "-o", "json", kubeconfig=kubeconfig)
        saved = [await _run("snapshot", str(file), kubeconfig=kubeconfig) for file in (plain, packed)]

    answers = [await _run("why", "train", "-o", "json", "--snapshot", str(file)) for file in (plain, packed)]

    assert [code for code, _, _ in saved] == [0, 0]
    assert "7 objects" in saved[0][2]
    assert [output for _, output, _ in answers] == [live, live]
    assert "registry.example" not in plain.read_text(encoding="utf-8")
    assert "secret-value" not in plain.read_text(encoding="utf-8")
    assert packed.read_bytes().startswith(b"\x1f\x8b")


async def test_snapshot_with_replaced_names_answers_by_its_list_of_names(tmp_path: Path) -> None:
    """The file has none of the names, and the list beside it says which pod to ask about."""
    file = tmp_path / "cluster.json"
    async with ApiServerSimulator() as server:
        for each in _cluster():
            server.put(each)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        code, _, complaint = await _run("snapshot", str(file), "--replace-names", kubeconfig=kubeconfig)

    names = {old: new for new, old in json.loads((tmp_path / "cluster.json.names").read_text("utf-8")).items()}
    asked, output, _ = await _run("why", names["train"], "-n", names["default"], "-o", "json", "--snapshot", str(file))

    verdict = json.loads(output)
    assert (code, asked, verdict["code"]) == (0, 1, "no-node-fits"), complaint
    assert [group["holders"][0]["pods"] for group in verdict["groups"]] == [[f"{names['default']}/{names['taker']}"]]
    assert f"{file}.names: what each name stands for" in complaint
    assert "taker" not in file.read_text(encoding="utf-8")


async def test_why_says_what_it_could_not_see(tmp_path: Path) -> None:
    """With the rights of the example the answer is whole; without the right to list namespaces, it says
    so and goes on.
    """
    role = yaml.safe_load((ROOT / "examples" / "why" / "rights.yaml").read_text(encoding="utf-8"))
    rules = [
        {**rule, "resources": [each for each in rule["resources"] if each != "namespaces"]}
        for rule in role["rules"]
        if "resources" in rule
    ]
    fewer = {**role, "metadata": {"name": "fewer"}, "rules": rules}
    async with ApiServerSimulator() as server:
        for each in _cluster():
            server.put(each)
        remarks = []
        for user, granted in (("all", role), ("some", fewer)):
            server.put(granted)
            server.put(
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1",
                    "kind": "ClusterRoleBinding",
                    "metadata": {"name": user},
                    "roleRef": {"kind": "ClusterRole", "name": granted["metadata"]["name"]},
                    "subjects": [{"kind": "ServiceAccount", "namespace": "ops", "name": user}],
                }
            )
            name = f"system:serviceaccount:ops:{user}"
            kubeconfig = server.write_kubeconfig(tmp_path / user, user=name)
            _, output, complaint = await _run("why", "train", "-o", "json", kubeconfig=kubeconfig)
            assert complaint == ""
            verdict = json.loads(output)
            assert verdict["code"] == "no-node-fits"
            remarks.append([each["facts"]["kind"] for each in verdict["remarks"] if each["code"] == "unseen"])

    assert remarks == [[], ["Namespace"]]


async def test_watch_ends_when_the_pod_has_a_node(tmp_path: Path) -> None:
    """Each change of the verdict is one JSON line, and the last one ends the command with 0."""
    async with ApiServerSimulator() as server:
        for each in _cluster():
            server.put(each)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        process = await asyncio.create_subprocess_exec(
            *_TOPOBUS,
            *("why", "train", "--watch", "-o", "json"),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        first = json.loads(await asyncio.wait_for(process.stdout.readline(), _LIMIT_S))
        server.bind("train", "n1")
        last = json.loads(await asyncio.wait_for(process.stdout.readline(), _LIMIT_S))
        code = await asyncio.wait_for(process.wait(), _LIMIT_S)

    assert (first["code"], last["code"], last["node"], code) == ("no-node-fits", "scheduled", "n1", 0)


async def test_free_lists_devices_and_counts_pods_that_fit(tmp_path: Path) -> None:
    """Of four GPUs one is free: a claim of one fits once, one of two fits nowhere."""
    snapshot = tmp_path / "cluster.json"
    snapshot.write_text(json.dumps({"items": _cluster()}), encoding="utf-8")
    manifests = {name: tmp_path / f"{name}.yaml" for name in ("one", "two", "neither")}
    for count, name in enumerate(("one", "two"), start=1):
        manifests[name].write_text(yaml.safe_dump(_claim(name, count)), encoding="utf-8")
    manifests["neither"].write_text(yaml.safe_dump(_cluster()[1]), encoding="utf-8")
    read = ("free", "--snapshot", str(snapshot))

    code, output, _ = await _run(*read, "-o", "json", "--for", str(manifests["one"]))
    none, text, _ = await _run(*read, "--by", "node", "--for", str(manifests["two"]))
    refused, _, complaint = await _run(*read, "--for", str(manifests["neither"]))

    answer = json.loads(output)
    assert (code, none, refused) == (0, 1, 66)
    assert [(row["devices"], row["free"], row["held"]) for row in answer["rows"]] == [(4, 1, 3)]
    assert answer["fits"] == [{"count": 1, "nodes": 1, "such_as": ["n1"]}]
    assert "0 more fit" in text
    assert "request r wants 2 devices of class gpu, found 1 of 4 (3 in use)" in " ".join(text.split())
    assert "■■■□" in text
    assert "there is nothing to count: wanted a Pod" in complaint


def _crowded(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """Two nodes of two GPUs each; each has a pod of one GPU."""
    items: list[dict[str, Any]] = [
        {"apiVersion": _DRA, "kind": "DeviceClass", "metadata": {"name": "gpu"}, "spec": {"selectors": [_SELECTOR]}}
    ]
    for node in ("n1", "n2"):
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "gpu.example.com", "pool": pool, "nodeName": node, "devices": [{"name": "a"}, {"name": "b"}]}
        items += [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}},
            {"apiVersion": _DRA, "kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec},
            *_holder(f"pod-{node}", node),
        ]
    return [*items, *more]


def _holder(name: str, node: str) -> list[dict[str, Any]]:
    """A pod of a ReplicaSet with a GPU of a node."""
    result = {"request": "r", "driver": "gpu.example.com", "pool": node, "device": "a"}
    user = {"resource": "pods", "name": name, "uid": f"uid-{name}"}
    pod = _pod(name, f"claim-{name}", nodeName=node)
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "uid-web", "controller": True}
    pod["metadata"] |= {"uid": f"uid-{name}", "ownerReferences": [owner]}
    return [_claim(f"claim-{name}", 1, allocation={"devices": {"results": [result]}}, reservedFor=[user]), pod]


async def test_defrag_evicts_what_it_said(tmp_path: Path) -> None:
    """Without --evict it only reads. With it, the pod is evicted by its uid, the command waits until it
    is gone and its claim is released, and then the wanted one fits.
    """
    wanted = tmp_path / "two.yaml"
    wanted.write_text(yaml.safe_dump(_claim("two", 2)), encoding="utf-8")
    async with ApiServerSimulator() as server:
        for each in _crowded():
            server.put(each)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        code, text, _ = await _run("defrag", "--for", str(wanted), kubeconfig=kubeconfig)
        assert {request.method for request in server.requests} == {"GET"}
        evicting = asyncio.create_task(
            _run("defrag", "--for", str(wanted), "--evict", "-o", "json", kubeconfig=kubeconfig)
        )
        await _evicted(server, "pod-n1")
        server.remove("Pod", "pod-n1", grace_s=0)
        server.remove("ResourceClaim", "claim-pod-n1", grace_s=0)
        ended, output, complaint = await evicting
        eviction = next(request for request in server.requests if request.method == "POST")
        metrics = [request.path for request in server.requests].count("/metrics")

    answer = json.loads(output)
    assert code == 0
    assert "it fits on node n1 once 1 pod moves" in text
    assert (ended, answer["stopped"]) == (0, ""), complaint
    assert [move["name"] for move in answer["evicted"]] == ["pod-n1"]
    # Once for each command, not for each look at the cluster.
    assert metrics == 2
    assert eviction.path.endswith("/pods/pod-n1/eviction")
    assert eviction.body["deleteOptions"] == {"preconditions": {"uid": answer["evicted"][0]["uid"]}}


async def test_defrag_stops_when_the_cluster_has_changed(tmp_path: Path) -> None:
    """The pod that its owner made anew has taken the free place: evicting it as well was not agreed to."""
    wanted = tmp_path / "two.yaml"
    wanted.write_text(yaml.safe_dump(_claim("two", 2)), encoding="utf-8")
    async with ApiServerSimulator() as server:
        for each in _crowded():
            server.put(each)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        evicting = asyncio.create_task(_run("defrag", "--for", str(wanted), "--evict", kubeconfig=kubeconfig))
        await _evicted(server, "pod-n1")
        for each in _holder("again", "n1"):
            server.put(each)
        server.remove("ResourceClaim", "claim-pod-n1", grace_s=0)
        server.remove("Pod", "pod-n1", grace_s=0)
        code, text, _ = await evicting
        evictions = [request for request in server.requests if request.method == "POST"]

    assert code == 1
    assert "evicted pod default/pod-n1" in text
    assert "the cluster has changed: now pod default/again would have to move" in " ".join(text.split())
    assert len(evictions) == 1


async def _evicted(server: ApiServerSimulator, pod: str) -> None:
    await until(lambda: any(request.path.endswith(f"/{pod}/eviction") for request in server.requests))


@pytest.mark.parametrize(
    ("arguments", "content", "code", "message"),
    [
        (("pod/train",), None, 78, "cannot use"),
        (("pod/train", "--kubeconfig", "FILE"), "nonsense: [", 78, "cannot use"),
        (("pod/train", "--snapshot", "FILE"), '{"items": [', 65, "no snapshot of a cluster"),
        (("pod/train", "--snapshot", "absent"), None, 66, "there is no file absent"),
        (("pod/train", "--snapshot", "FILE", "--kubeconfig", "FILE"), "{}", 2, "got --snapshot and a kubeconfig"),
        (("pod/train", "--snapshot", "FILE"), '{"items": [' + "[" * 5000, 65, "no snapshot of a cluster"),
        (("pod/train", "--snapshot", "FILE", "--watch"), "{}", 2, "got --watch and --snapshot"),
        (
            ("pod/train", "--snapshot", "FILE"),
            _WRONG_LABEL,
            65,
            "Pod default/train: metadata.labels[...]: wanted str, got int",
        ),
        (("node/n1",), None, 2, "got 'node/n1', wanted pod/NAME or claim/NAME"),
        (("pod/",), None, 2, "got 'pod/', wanted pod/NAME or claim/NAME"),
        (("pod/train", "--snapshot", "FILE"), "{}", 1, ""),
    ],
)
async def test_bad_input_ends_with_what_where_and_the_next_step(
    tmp_path: Path, arguments: tuple[str, ...], content: str | None, code: int, message: str
) -> None:
    """Never a traceback."""
    file = tmp_path / "given"
    if content is not None:
        file.write_text(content, encoding="utf-8")

    ended, output, complaint = await _run("why", *(str(file) if each == "FILE" else each for each in arguments))

    assert ended == code, complaint
    assert message in complaint
    assert "Traceback" not in complaint
    assert ("next:" in complaint) is bool(message)
    assert message or output == "there is no Pod default/train\n"


async def test_packed_snapshot_that_is_damaged_is_refused(tmp_path: Path) -> None:
    """Bytes in the middle are others: it is named, with the next step."""
    file = tmp_path / "cluster.json.gz"
    packed = bytearray(gzip.compress(json.dumps({"items": _cluster()}).encode()))
    packed[60:80] = b"x" * 20
    file.write_bytes(bytes(packed))

    code, _, complaint = await _run("why", "pod/train", "--snapshot", str(file))

    assert (code, "Traceback" in complaint) == (65, False)
    assert "no snapshot of a cluster" in complaint


def test_command_without_a_standard_output_ends_as_with_one(tmp_path: Path) -> None:
    """A shell that closes it wants the exit code alone."""
    (tmp_path / "cluster.json").write_text(json.dumps({"items": _cluster()}), encoding="utf-8")
    command = f"{sys.executable} -m topobus.cli.main free --snapshot {tmp_path / 'cluster.json'} >&-"

    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, timeout=_LIMIT_S, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


async def test_what_if_wants_kind_and_name(tmp_path: Path) -> None:
    """A name alone could be anything's."""
    (tmp_path / "cluster.json").write_text(json.dumps({"items": _cluster()}), encoding="utf-8")
    read = ("what-if", "--snapshot", str(tmp_path / "cluster.json"))

    nameless = [await _run(*read, "--without", each) for each in ("n1", "", "node/", "pod/train")]
    code, text, _ = await _run(*read, "--without", "pod/default/taker")

    assert [code for code, _, _ in nameless] == [2, 2, 2, 2]
    assert all("wanted node/NAME" in complaint for _, _, complaint in nameless)
    assert code == 0
    assert "default/train" in text
    assert "placed, on n1 or another node" in text


@pytest.mark.parametrize(
    ("parts", "is_placed"),
    [
        ({}, True),
        ({"spec": {"unschedulable": True}}, False),
        ({"spec": {"taints": [{"key": "team", "effect": "NoSchedule"}]}}, False),
        ({"status": {"allocatable": {"pods": "0", "cpu": "1"}}}, False),
    ],
    ids=["plain", "cordoned", "tainted", "full"],
)
async def test_what_if_takes_a_node_with_its_taints_and_its_room(
    parts: dict[str, Any], is_placed: bool, tmp_path: Path
) -> None:
    """The pod has devices on the node once the other one is gone, if the node takes it."""
    (tmp_path / "cluster.json").write_text(json.dumps({"items": _cluster()}), encoding="utf-8")
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, **parts}
    (tmp_path / "node.json").write_text(json.dumps(node), encoding="utf-8")
    files = ("--snapshot", str(tmp_path / "cluster.json"), "-f", str(tmp_path / "node.json"))

    code, text, _ = await _run("what-if", *files, "--without", "pod/default/taker")

    assert code == 0
    assert ("placed, on n1 or another node" in text) is is_placed


@pytest.mark.parametrize(
    "parts",
    [{"spec": [1]}, {"spec": {"taints": "none"}}, {"status": {"allocatable": {"cpu": []}}}],
    ids=["spec", "taints", "room"],
)
async def test_what_if_refuses_a_node_that_cannot_be_read(parts: dict[str, Any], tmp_path: Path) -> None:
    """As an API server does; else the answer would be about another cluster."""
    (tmp_path / "cluster.json").write_text(json.dumps({"items": _cluster()}), encoding="utf-8")
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, **parts}
    (tmp_path / "node.json").write_text(json.dumps(node), encoding="utf-8")
    files = ("--snapshot", str(tmp_path / "cluster.json"), "-f", str(tmp_path / "node.json"))

    code, text, complaint = await _run("what-if", *files)

    assert (code, text) == (65, "")
    assert "got " in complaint
    assert "Traceback" not in complaint


async def test_server_that_is_not_there_or_refuses_is_named(tmp_path: Path) -> None:
    """A server without an answer, and one that knows the user no longer."""
    async with ApiServerSimulator(token="right") as server:
        refused = server.write_kubeconfig(tmp_path / "refused")
        refused.write_text(refused.read_text().replace("right", "expired"))
        code, _, complaint = await _run("why", "train", kubeconfig=refused)
        url = server.url
    absent, _, absent_complaint = await _run("why", "train", kubeconfig=refused)

    assert (code, absent) == (69, 69)
    assert "Unauthorized" in complaint
    assert url in absent_complaint
    assert absent_complaint.count("next: see whether `kubectl version` reaches it") == 1


def test_why_needs_only_the_packages_of_its_extra(tmp_path: Path) -> None:
    """With `topobus[why]` alone, so without grpcio and pyroute2, a verdict comes; the client of NATS
    is not loaded.
    """
    needs = subprocess.run(
        [sys.executable, ROOT / "tools" / "service-requirements", "why"], capture_output=True, text=True, check=True
    ).stdout.split()
    (tmp_path / "sitecustomize.py").write_text(_ONLY, encoding="utf-8")
    (tmp_path / "cluster.json").write_text(json.dumps({"items": _cluster()}), encoding="utf-8")
    locked = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    assert "grpcio==" in locked
    done = subprocess.run(
        [*_TOPOBUS, "why", "train", "--snapshot", str(tmp_path / "cluster.json")],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "REFUSED": "grpc,google.protobuf,pyroute2,starlette,nats"},
    )

    assert done.stderr == ""
    assert done.returncode == 1
    assert "fits on none of 1 node" in done.stdout
    assert not {"grpcio", "pyroute2", "protobuf"} & {need.partition(">")[0] for need in needs}


# The named packages cannot be imported, in this process and in those that it starts.
_ONLY = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == refused or name.startswith(refused + ".") for refused in os.environ["REFUSED"].split(",")):
            raise ModuleNotFoundError(f"{name} is not in the extra", name=name)
sys.meta_path.insert(0, Absent())
"""
