"""`topobus apply`, `get`, `describe`, `delete` and `allocate` against the whole system, and what a
forced deletion leaves behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.claim_manifests import claim
from support.topobus_up import LIMIT_S, UpSystem, topobus_up
from topobus.bus.bus import Bus
from topobus.cli.targets import choose_target
from topobus.formats.kubernetes.built_in_classes import BUILT_IN
from topobus.formats.messages.catalogue import ADOPT, LEDGER, RELEASE
from topobus.formats.messages.messages import AdoptRequest, ReleaseRequest
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_NODE = "demo-node"


@pytest.fixture(scope="module")
def system() -> Iterator[UpSystem]:
    """Run the system on the recorded dgx."""
    with (
        tempfile.TemporaryDirectory(prefix="tb-", ignore_cleanup_errors=True) as state,
        topobus_up(Path(state), columns="160") as running,
    ):
        yield running


@pytest.fixture
def clean(system: UpSystem) -> Iterator[UpSystem]:
    """The system with nothing stored, before and after."""
    yield system
    stored = _stored(system.json("get", "pods,claims,templates,classes"))
    for kind in ("Pod", "ResourceClaim", "ResourceClaimTemplate", "DeviceClass"):
        if names := [item["metadata"]["name"] for item in stored if item["kind"] == kind]:
            system.run("delete", kind, *names)
            _until(system, lambda listed: not _stored(listed), "get", kind)


def _until(system: UpSystem, is_enough: Callable[[Any], bool], *arguments: object) -> Any:
    """Ask again until the answer satisfies the test.

    The deadline is far beyond what it takes.
    """
    deadline = time.monotonic() + LIMIT_S
    while not is_enough(answer := system.json(*arguments)):
        assert time.monotonic() < deadline, answer
    return answer


def _with_bus(system: UpSystem, work: Callable[[Bus], Any]) -> Any:
    """Do something on the bus as a node's gateway would."""

    async def session() -> Any:
        target = choose_target(nats=None, context=None, config=None, environ=system.environment)
        async with Bus.session(target.settings.nats, name="topobus-cli") as bus:
            return await work(bus)

    return asyncio.run(session())


def _stored(listed: dict[str, Any]) -> list[dict[str, Any]]:
    """Give what somebody stored: the built-in classes stay."""
    return [
        item
        for item in listed["items"]
        if BUILT_IN not in [condition.get("reason") for condition in item.get("status", {}).get("conditions", ())]
    ]


POD = """
apiVersion: v1
kind: Pod
metadata: {name: trainer}
spec:
  containers: [{name: main, resources: {limits: {cpu: "2", topobus.dev/gpu: 1}, claims: [{name: cards}]}}]
  resourceClaims: [{name: cards, resourceClaimTemplateName: two-gpus}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two-gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev, count: 2}}]}}}
"""


def test_pod_is_applied_shown_described_and_deleted(clean: UpSystem) -> None:
    """A new user's first walk: apply a pod with a template, see where it went, and get everything
    back.
    """
    done = clean.run("apply", "-f", "-", stdin=POD)
    assert "Pod default/trainer created" in done.stdout
    assert "Scheduled: scheduled on node demo-node" in done.stdout

    (made,) = clean.json("get", "claims")["items"]
    assert made["metadata"]["ownerReferences"][0]["name"] == "trainer"
    assert made["status"]["reservedFor"][0]["name"] == "trainer"
    table = clean.run("get", "claims,pods").stdout
    assert "allocated,reserved" in table
    assert "scheduled" in table
    described = clean.json("describe", "claim", made["metadata"]["name"])
    assert {(device["numa_nodes"], device["health"]) for device in described["devices"]} <= {
        ("0", "healthy"),
        ("1", "healthy"),
    }
    assert described["held"][0]["node"] == _NODE
    assert described["decisions"]
    assert "reserved for: trainer" in clean.run("describe", "claim", made["metadata"]["name"]).stdout
    assert "container main: cpu: 2, topobus.dev/gpu: 1" in clean.run("describe", "pod/trainer").stdout

    clean.run("delete", "-f", "-", stdin=POD)
    _until(clean, lambda listed: not listed["items"], "get", "claims,pods")
    assert _with_bus(clean, lambda bus: bus.get(LEDGER, node=_NODE)).value.allocations == {}


def test_get_writes_manifests_that_apply_takes_again(clean: UpSystem) -> None:
    """`get -o yaml` is Kubernetes' own shape: applied again it changes nothing."""
    clean.run("apply", "-f", "-", stdin=claim("fast", 1))

    text = clean.run("get", "claim", "fast", "-o", "yaml").stdout
    document = yaml.safe_load(text)

    assert (document["apiVersion"], document["kind"]) == ("resource.k8s.io/v1", "ResourceClaim")
    assert "unchanged" in clean.run("apply", "-f", "-", stdin=text).stdout
    assert clean.run("get", "claims", "-o", "name").stdout == "resourceclaim/fast\n"


def test_apply_writes_nothing_when_one_document_is_wrong(clean: UpSystem) -> None:
    """Bad content names document, line and path, and the good documents before it are not stored
    either.
    """
    wrong = claim("good", 1) + "---\n" + claim("bad", 1).replace("deviceClassName", "deviceClasName")

    done = clean.run("apply", "-f", "-", stdin=wrong, code=65)

    assert "document 2" in done.stderr
    assert "spec.devices.requests[0].exactly.deviceClasName" in done.stderr
    assert 'did you mean "deviceClassName"' in done.stderr
    assert clean.json("get", "claims")["items"] == []


def test_apply_writes_nothing_when_a_stored_spec_would_change(clean: UpSystem) -> None:
    """A claim's spec is immutable: the manifest is refused as a whole, with what to do."""
    clean.run("apply", "-f", "-", stdin=claim("fast", 1))

    done = clean.run("apply", "-f", "-", stdin=claim("another", 1) + "---\n" + claim("fast", 2), code=65)

    assert "ResourceClaim default/fast: its spec cannot be changed" in done.stderr
    assert "nothing was applied" in done.stderr
    assert [item["metadata"]["name"] for item in clean.json("get", "claims")["items"]] == ["fast"]


def test_apply_writes_nothing_when_an_object_is_too_large_to_store(clean: UpSystem) -> None:
    """What the store would refuse is found before the first write."""
    large = claim("large", 1).replace("{name: large}", "{name: large, annotations: {note: " + "x" * 1_000_000 + "}}")

    done = clean.run("apply", "-f", "-", stdin=claim("small", 1) + "---\n" + large, code=65)

    assert "default/large" in done.stderr
    assert clean.json("get", "claims")["items"] == []


def test_describe_tells_nearest_miss_and_what_would_fit_when_a_claim_waits(clean: UpSystem) -> None:
    """Text and JSON have the grouped reasons, the nearest miss and what would fit.

    The wait itself is no error.
    """
    clean.run("apply", "-f", "-", stdin=claim("taker", 5))
    clean.run("apply", "-f", "-", stdin=claim("greedy", 6))

    reasons = {reason["code"]: reason for reason in clean.json("describe", "claim", "greedy")["reasons"]}
    shown = clean.run("describe", "claim", "greedy").stdout

    assert "5 devices: held by claim default/taker" in reasons["too-few-devices"]["message"]
    assert reasons["nearest-miss"]["facts"] == {"node": _NODE, "request": "r", "wanted": 6, "found": 3, "lacking": 3}
    assert "claim default/taker" in reasons["would-fit"]["message"] or reasons["would-fit"]["facts"]["count"] == 3
    assert "nearest miss" in shown
    assert "would fit on node demo-node" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["get"], 2, "KIND is one of"),
        (["get", "claimz"], 2, "did you mean"),
        (["get", "claim", "nothing"], 1, "default/nothing"),
        (["describe", "pod", "nothing"], 1, "topobus get pod"),
        (["describe", "claims"], 2, "describe resourceclaim NAME"),
        (["delete", "claim", "nothing"], 1, "default/nothing"),
        (["delete", "claims"], 2, "delete resourceclaim NAME"),
        (["delete"], 2, "KIND NAME, -f FILE or -k FOLDER"),
        (["apply"], 2, "-f FILE or -k FOLDER"),
        (["apply", "-f", "/nowhere.yaml"], 66, "/nowhere.yaml"),
        (["allocate", "-f", "/nowhere.yaml", "--dry-run"], 66, "/nowhere.yaml"),
        (["allocate"], 2, "-f FILE"),
    ],
)
def test_bad_words_end_with_a_next_step(system: UpSystem, arguments: list[str], code: int, said: str) -> None:
    """Whatever is mistyped is named on stderr with a way on, and nothing is printed to stdout."""
    done = system.run(*arguments, code=code)

    assert said in done.stderr
    assert "next:" in done.stderr
    assert done.stdout == ""


def test_a_pods_name_has_one_owner(clean: UpSystem, tmp_path: Path) -> None:
    """`place` refuses a pod that is stored, `apply` one that was placed.

    Each is let go by its own command, and then the other may have the name.
    """
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: n}, spec: {containers: [{name: c, resources: {limits: "
        "{topobus.dev/gpu: 1}}}]}}"
    )

    clean.run("apply", "-f", str(manifest))
    refused = clean.run("place", str(manifest), code=2).stderr
    clean.run("place", str(manifest), "--dry-run", code=1)
    clean.run("delete", "pod", "n")
    clean.run("place", str(manifest))
    also_refused = clean.run("apply", "-f", str(manifest), code=65).stderr
    clean.run("release", "pod", "n")
    clean.run("apply", "-f", str(manifest))
    owners = _with_bus(clean, lambda bus: bus.get(LEDGER, node=_NODE)).value.allocations
    clean.run("delete", "pod", "n")

    assert "pod default/n is stored, and the controller schedules it" in refused
    assert "`topobus place` placed a pod of that name on demo-node" in also_refused
    assert len([key for key in owners if key.startswith("pod/default/n/")]) == 1


def test_dry_run_asks_the_running_system_and_writes_nothing(clean: UpSystem) -> None:
    """What would fit is a yes with devices, what would not is a no with reasons.

    Nothing is stored or held by either.
    """
    clean.run("apply", "-f", "-", stdin=claim("taker", 6))

    yes = clean.json("allocate", "--dry-run", "-f", "-", stdin=claim("small", 2))["answers"][0]
    no = clean.run("allocate", "--dry-run", "-f", "-", stdin=claim("big", 3), code=1).stdout

    assert (yes["condition"], yes["node"]) == ("Allocated", _NODE)
    assert "ResourceClaim default/big would wait: DoesNotFit" in no
    assert "6 devices: held by claim default/taker" in no.replace("\n   ", " ")
    assert [item["metadata"]["name"] for item in clean.json("get", "claims")["items"]] == ["taker"]


def test_apply_says_whether_it_would_fit_when_it_is_a_dry_run(clean: UpSystem) -> None:
    """The same answer as `allocate` gives, beside what would be stored.

    What is stored already is not asked about again.
    """
    clean.run("apply", "-f", "-", stdin=claim("taker", 6))

    document = clean.json("apply", "--dry-run", "-f", "-", stdin=claim("small", 2) + "---\n" + claim("taker", 6))
    no = clean.run("apply", "--dry-run", "-f", "-", stdin=claim("big", 3)).stdout

    assert [(answer["name"], answer["condition"]) for answer in document["answers"]] == [
        ("ResourceClaim default/small", "Allocated")
    ]
    assert "ResourceClaim default/big would wait: DoesNotFit" in no


def test_explain_points_to_the_claim_when_its_name_is_given(clean: UpSystem) -> None:
    """Whoever types a claim's name wants to know why it waits."""
    clean.run("apply", "-f", "-", stdin=claim("greedy", 9))

    refused = clean.run("explain", "greedy", code=1).stderr

    assert "topobus describe claim greedy -n default" in " ".join(refused.split())


def test_apply_takes_a_vendors_file_when_it_has_kinds_of_others_and_old_versions(clean: UpSystem) -> None:
    """What is ours is stored as v1.

    A Deployment and a Service beside it are named in one note, and a
    file of these alone is refused.
    """
    others = "{apiVersion: apps/v1, kind: Deployment}\n---\n{apiVersion: v1, kind: Service}\n"
    old = claim("old", 1).replace("resource.k8s.io/v1", "resource.k8s.io/v1beta2")

    said = clean.run("apply", "-f", "-", stdin=f"{old}\n---\n{others}").stderr
    stored = clean.json("get", "claim", "old")
    alone = clean.run("apply", "-f", "-", stdin=others, code=66).stderr

    assert "left out, because Topobus does not use it: 1 Deployment, 1 Service" in " ".join(said.split())
    assert stored["apiVersion"] == "resource.k8s.io/v1"
    assert "plan the pods of workloads" in " ".join(alone.split())


def _tells_of_a_silent_node(answer: dict[str, Any]) -> bool:
    """Say whether a decision tells that devices are in quarantine because their node does not
    answer.
    """
    reasons = [decision["outcome"]["reasons"] for decision in answer["decisions"] if decision["verb"] == "quarantine"]
    return any(listed[0]["code"] == "node-silent" for listed in reasons)


def test_forced_deletion_keeps_devices_in_quarantine_while_the_node_is_silent(clean: UpSystem) -> None:
    """A node that does not answer frees nothing: not for a new claim, not after the controller was
    killed.

    Once it answers, all is free.
    """
    clean.run("apply", "-f", "-", stdin=claim("lost", 8))
    os.kill(clean.pids["topology"], signal.SIGSTOP)
    try:
        clean.run("delete", "claim", "lost", "--force")
        clean.run("apply", "-f", "-", "--no-wait", stdin=claim("next", 1))
        described = _until(clean, _is_quarantined, "describe", "claim", "next")
        assert (
            "quarantined: claim default/lost was deleted by force, and node demo-node has not released it"
            in json.dumps(described)
        )

        os.kill(clean.pids["controller"], signal.SIGKILL)
        clean.run("apply", "-f", "-", "--no-wait", stdin=claim("later", 1))
        _until(clean, _is_quarantined, "describe", "claim", "later")
        # The decision follows when the node's time to answer is over, which is after the
        # condition that `describe` shows.
        _until(clean, _tells_of_a_silent_node, "decisions", "--limit", 200)
    finally:
        os.kill(clean.pids["topology"], signal.SIGCONT)

    for name in ("next", "later"):
        _until(clean, lambda shown: bool(shown.get("status", {}).get("allocation")), "get", "claim", name)


def test_forced_deletion_keeps_devices_in_quarantine_while_they_are_prepared(clean: UpSystem) -> None:
    """The node's topology itself refuses while a container may use the devices.

    The gateway's word that it is undone frees them.
    """
    clean.run("apply", "-f", "-", stdin=claim("used", 8))
    stored = clean.json("get", "claim", "used")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="used", uid=stored["metadata"]["uid"])
    devices = {
        "gpu": tuple(sorted(result["device"] for result in stored["status"]["allocation"]["devices"]["results"]))
    }
    adopted = AdoptRequest(op_id="adopt-used", owner=owner, devices=devices, is_prepared=True)
    _with_bus(clean, lambda bus: bus.ask(ADOPT, adopted, node=_NODE))

    clean.run("delete", "claim", "used", "--force")
    clean.run("apply", "-f", "-", "--no-wait", stdin=claim("next", 1))
    _until(clean, _is_quarantined, "describe", "claim", "next")
    ledger = _with_bus(clean, lambda bus: bus.get(LEDGER, node=_NODE)).value
    assert owner.key in ledger.allocations

    _with_bus(
        clean, lambda bus: bus.ask(RELEASE, ReleaseRequest(op_id="undo-used", owner=owner, is_undone=True), node=_NODE)
    )

    _until(clean, lambda shown: bool(shown.get("status", {}).get("allocation")), "get", "claim", "next")


def _is_quarantined(described: Any) -> bool:
    return "quarantined" in json.dumps(described["reasons"])
