"""A dry run answers what the controller would, and both homes ask the same: the recorded cases of
Kubernetes' own allocator, and generated ones with what a dry run once forgot.

The other side is the controller's own: a `StandaloneState` filled here object
by object, and its `Allocator`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from support.alignment_nodes import dgx_facts
from support.laws import share
from topobus.controller.commit.allocator import Allocator, Member, member
from topobus.controller.config import ControllerSettings
from topobus.controller.dry_run.rules.run import DryRun
from topobus.controller.dry_run.rules.situation import DryAnswer, Situation
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster_state import ClusterState
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.values import Allocated, Outcome
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.gate import RESERVED_TAINT
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import NODE_ANNOTATION, object_parts
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.clock import ManualClock
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind, Policy
from topobus.values.view import AlignmentOptions, NodeAlignment

DATA = Path(__file__).parent.parent / "data" / "allocation" / "structured-allocation.jsonl.gz"
CHUNKS = 10
API = "resource.k8s.io/v1"
SHARE = re.compile(r'"shareID":"[^"]*"')


def dry_run(situation: Situation, compiler: CelCompiler) -> tuple[DryAnswer, ...]:
    """Answer all that is wanted."""
    return DryRun(situation, compiler).answer_all(situation.wanted)


def _cases(chunk: int) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % CHUNKS == chunk:
                yield json.loads(line)


def _object(kind: str, plain: dict[str, Any]) -> ApiObject:
    metadata = {key: value for key, value in plain["metadata"].items() if value is not None}
    version = "v1" if kind in ("Node", "Namespace") else API
    return ApiObject(
        api_version=version,
        kind=kind,
        metadata=metadata,
        spec=plain.get("spec") or {},
        status=plain.get("status") or {},
    )


def _taker(case: dict[str, Any]) -> ApiObject:
    """The claim that holds what the case says is allocated."""
    allocated = case.get("allocated") or {}
    results: list[dict[str, Any]] = []
    for text in allocated.get("devices") or ():
        driver, _, rest = text.partition("/")
        pool, _, device = rest.rpartition("/")
        results.append({"request": "r", "driver": driver, "pool": pool, "device": device})
    for text, used in (allocated.get("consumedCapacity") or {}).items():
        driver, _, rest = text.partition("/")
        pool, _, device = rest.rpartition("/")
        results.append(
            {
                "request": "r",
                "driver": driver,
                "pool": pool,
                "device": device,
                "shareID": "s",
                "consumedCapacity": used or {},
            }
        )
    status = {"allocation": {"devices": {"results": results}}}
    return _object(
        "ResourceClaim", {"metadata": {"name": "taker", "namespace": "elsewhere", "uid": "taker"}, "status": status}
    )


def _rule(case: dict[str, Any], random: Random) -> ApiObject:
    """A rule that taints all devices of a driver, of a pool, or one device."""
    specs = [resource_slice["spec"] for resource_slice in case.get("slices") or ()]
    chosen = random.choice(specs) if specs else {"driver": "gpu.example.com", "pool": {"name": "p"}}
    selector: dict[str, str] = {"driver": chosen["driver"]}
    if random.random() < 0.5:
        selector["pool"] = chosen["pool"]["name"]
        names = [device["name"] for device in chosen.get("devices") or ()]
        if names and random.random() < 0.5:
            selector["device"] = random.choice(names)
    taint = {
        "key": "example.com/broken",
        "effect": random.choice(["NoSchedule", "NoExecute", "None"]),
        "timeAdded": "2026-01-01T00:00:00Z",
    }
    return _object(
        "DeviceTaintRule", {"metadata": {"name": "rule"}, "spec": {"deviceSelector": selector, "taint": taint}}
    )


def _situation(case: dict[str, Any], random: Random | None) -> tuple[Situation, str, list[ApiObject]]:
    """Read a case as objects; with `random` also with a taint rule, and admin access with or
    without the namespace's label.
    """
    node = ((case.get("node") or {}).get("metadata") or {}).get("name") or "node"
    labels = ((case.get("node") or {}).get("metadata") or {}).get("labels") or {}
    claims = [_object("ResourceClaim", claim) for claim in case.get("claims") or ()]
    objects = [_object("Node", {"metadata": {"name": node, "labels": labels}}), _taker(case)]
    objects += [_object("DeviceClass", device_class) for device_class in case.get("classes") or ()]
    objects += [_object("ResourceSlice", resource_slice) for resource_slice in case.get("slices") or ()]
    claims = [
        msgspec.structs.replace(
            claim, metadata={"namespace": "default", **claim.metadata, "uid": f"uid-{number}"}, status={}
        )
        for number, claim in enumerate(claims)
    ]
    if random is not None:
        if random.random() < 0.6:
            objects.append(_rule(case, random))
        if random.random() < 0.5:
            labels = {"resource.kubernetes.io/admin-access": "true"}
            objects.append(
                _object(
                    "Namespace",
                    {"metadata": {"name": claims[0].metadata["namespace"] if claims else "default", "labels": labels}},
                )
            )
        if claims and random.random() < 0.4:
            claims[0] = _with_admin_access(claims[0])
    # A case is about one node, though its slices may name more.
    claims = [
        msgspec.structs.replace(claim, metadata={**claim.metadata, "annotations": {NODE_ANNOTATION: node}})
        for claim in claims
    ]
    names = [claim.metadata["name"] for claim in claims]
    namespace = claims[0].metadata["namespace"] if claims else "default"
    uses = [{"name": f"e{number}", "resourceClaimName": name} for number, name in enumerate(names)]
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p", "namespace": namespace},
        spec={"containers": [{"name": "c"}], "resourceClaims": uses, "nodeName": node},
    )
    wanted = (pod, *claims) if len(claims) > 1 else tuple(claims)
    return Situation(wanted=wanted, objects=tuple(objects)), node, claims


def _with_admin_access(claim: ApiObject) -> ApiObject:
    spec = json.loads(json.dumps(claim.spec))
    for request in spec.get("devices", {}).get("requests") or ():
        if "exactly" in request:
            request["exactly"]["adminAccess"] = True
    return msgspec.structs.replace(claim, spec=spec)


def _allocator(state: StandaloneState, compiler: CelCompiler) -> Allocator:
    no_bus: Any = None
    registry, settings = CollectorRegistry(), ControllerSettings()
    runtime = Runtime(
        name="controller", node="central", bus=no_bus, clock=ManualClock(), readiness=Readiness(), registry=registry
    )
    return Allocator(settings, runtime, state, compiler, ControllerMetrics(registry))


async def _search(allocator: Allocator, node: str, members: list[Member]) -> Outcome:
    """Find devices as the controller does for a claim: first fit, then equal ones that lie closer
    together.
    """
    outcome = await allocator.search_members(node, members)
    return (
        await allocator.brought_closer(node, members, outcome, pod=None) if isinstance(outcome, Allocated) else outcome
    )


def _controller(situation: Situation, node: str, claims: list[ApiObject], compiler: CelCompiler) -> Outcome | str:
    """What the controller's own search says of the claims on a node, or how the claims cannot be
    read.
    """
    state = StandaloneState()
    for machine in situation.machines:
        state.put_machine(machine)
    for inventory in situation.inventories:
        state.put_inventory(inventory)
    for ledger in situation.ledgers:
        state.put_ledger(ledger)
    for alignment in situation.alignments:
        state.put_alignment(alignment.node, alignment)
        state.note_silence({(alignment.node, name): since for name, since in alignment.unheard_classes.items()})
    for api_object in (*situation.objects, *claims):
        try:
            state.put_object(ObjectKey(**object_parts(api_object)), Stored(1, api_object))
        except ContractError:
            continue
    try:
        members = [
            member(ObjectKey(**object_parts(claim)), state.objects[ObjectKey(**object_parts(claim))], state.classes)
            for claim in claims
        ]
        return asyncio.run(_search(_allocator(state, compiler), node, members))
    except ContractError as err:
        return err.message


def _differs(situation: Situation, node: str, claims: list[ApiObject], compiler: CelCompiler) -> object:
    """Compare both; empty when they say the same."""
    controller_outcome = _controller(situation, node, claims, compiler)
    try:
        (own_dry_answer,) = dry_run(situation, compiler)
    except ContractError as err:
        return None if isinstance(controller_outcome, str) else (str(err), controller_outcome)
    return (
        None
        if _said(own_dry_answer) == _expected(node, controller_outcome)
        else (_said(own_dry_answer), _expected(node, controller_outcome))
    )


def _said(answer: DryAnswer) -> tuple[str, object]:
    if answer.condition == "Allocated":
        return answer.condition, SHARE.sub("", encode(list(answer.allocations.values())).decode())
    return answer.condition, tuple(
        reason.message for reason in answer.reasons if reason.code not in ("nearest-miss", "would-fit")
    )


def _expected(node: str, outcome: Outcome | str) -> tuple[str, object]:
    if isinstance(outcome, str):
        return "Unreadable", outcome
    if isinstance(outcome, Allocated):
        return "Allocated", SHARE.sub("", encode(list(outcome.results)).decode())
    condition, reasons = explain_nodes([node], [outcome])
    return condition, tuple(reason.message for reason in reasons)


@pytest.mark.law
@pytest.mark.parametrize("chunk", share(range(CHUNKS)))
def test_dry_run_equals_the_controller_in_recorded_cases(chunk: int) -> None:
    """Where a claim goes, or why not, is what the controller's own search finds, as recorded and
    with rules and admission added.
    """
    compiler = CelCompiler()
    different: list[tuple[str, object]] = []
    compared = 0
    for case in _cases(chunk):
        for random in (None, Random(case["id"])):
            situation, node, claims = _situation(case, random)
            if not claims:
                continue
            compared += 1
            difference = _differs(situation, node, claims, compiler)
            if difference is not None:
                different.append((case["id"], difference))

    assert different == []
    assert compared >= 400


def _with_reserved_taint(api_object: ApiObject) -> ApiObject:
    """Taint a slice's devices as a gateway does, to keep kube-scheduler away from them."""
    if api_object.kind != "ResourceSlice":
        return api_object
    mark = {"key": RESERVED_TAINT, "effect": "NoSchedule"}
    devices = [
        {**device, "taints": [*(device.get("taints") or ()), mark]} for device in api_object.spec.get("devices") or ()
    ]
    return msgspec.structs.replace(api_object, spec={**api_object.spec, "devices": devices})


def _input(state: ClusterState, node: str, claim: Claim) -> object:
    """Show what a search of a node would begin with.

    The node's own name as a label is the stand-alone home's.
    """
    given = state.input_for(node, [(claim, claim.spec)])
    pools = [
        (
            pool.id,
            pool.state,
            pool.why,
            pool.counters,
            [(candidate.id, candidate.device) for candidate in (*pool.candidates, *pool.elsewhere)],
        )
        for pool in given.pools
    ]
    labels = {name: value for name, value in given.node.labels.items() if name != "kubernetes.io/hostname"}
    return given.claims, given.classes, pools, given.usage, labels


@pytest.mark.law
@pytest.mark.parametrize("chunk", share(range(CHUNKS)))
def test_both_homes_make_the_same_input_when_the_objects_are_the_same(chunk: int) -> None:
    """Classes, devices with their taints, and who holds what are the same, whichever store the
    objects came from.
    """
    compared = 0
    for case in _cases(chunk):
        situation, node, claims = _situation(case, Random(case["id"]))
        alone, cluster = StandaloneState(), ApiServerState()
        for api_object in map(_with_reserved_taint, situation.objects):
            refused: list[str] = []
            try:
                alone.put_object(ObjectKey(**object_parts(api_object)), Stored(1, api_object))
            except ContractError as err:
                refused.append(err.message)
            try:
                cluster.put(
                    api_object.kind, "v1", {part: getattr(api_object, part) for part in ("metadata", "spec", "status")}
                )
            except ContractError as err:
                refused.append(err.message)
            assert len(refused) != 1, (case["id"], refused)
        for claim in map(Claim, claims):
            try:
                _ = claim.spec
            except ContractError:
                continue
            compared += 1
            assert _input(cluster, node, claim) == _input(alone, node, claim), case["id"]

    assert compared >= 200


def _gpu_claim(count: int, **parameters: Any) -> ApiObject:
    config = {
        "opaque": {
            "driver": "topobus.dev",
            "parameters": {"apiVersion": "topobus.dev/v1", "kind": "AlignmentParameters", **parameters},
        }
    }
    devices: dict[str, Any] = {
        "requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.topobus.dev", "count": count}}]
    }
    if parameters:
        devices["config"] = [config]
    return _object(
        "ResourceClaim", {"metadata": {"name": "c", "namespace": "default", "uid": "u"}, "spec": {"devices": devices}}
    )


@pytest.mark.law
@pytest.mark.parametrize("seed", share(range(60)))
def test_dry_run_equals_the_controller_on_a_running_system(seed: int) -> None:
    """Silent services, the node's own alignment options, ledgers and taint rules count in a dry run
    as they do in the controller.
    """
    random = Random(seed)
    machine, inventories = dgx_facts()
    holder = Owner(kind=OwnerKind.POD, name="busy", uid="busy")
    held = tuple(f"gpu-{number}" for number in range(8) if random.random() < 0.3)
    allocation = Allocation(owner=holder, holdings=(Holding(container="c", devices={"gpu": held}),), decision_id="d")
    options = AlignmentOptions(policy=random.choice(list(Policy)), allow_request_policy=random.random() < 0.7)
    wishes = random.choice(
        [
            {},
            {"policy": "single-numa-node"},
            {"locality": "hard:switch"},
            {"locality": "hard:numa", "policy": "restricted"},
        ]
    )
    rule = {"deviceSelector": {"driver": "topobus.dev", "device": f"gpu-{random.randrange(8)}"}}
    taint = {"taint": {"key": "k", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}}
    claim = _gpu_claim(random.randint(1, 5), **wishes)
    situation = Situation(
        wanted=(claim,),
        objects=(_object("DeviceTaintRule", {"metadata": {"name": "rule"}, "spec": {**rule, **taint}}),)
        if random.random() < 0.5
        else (),
        machines=(machine,),
        inventories=tuple(inventories.values()),
        ledgers=(Ledger(node=machine.node, allocations={holder.key: allocation} if held else {}),),
        alignments=(
            NodeAlignment(
                node=machine.node,
                options=options,
                reserved_cpus=CpuSet(0, 1),
                unheard_classes={"gpu": "2026-01-01T00:00:00Z"} if random.random() < 0.4 else {},
            ),
        )
        if random.random() < 0.7
        else (),
    )

    assert _differs(situation, machine.node, [claim], CelCompiler()) is None


def test_dry_run_waits_for_a_silent_service() -> None:
    """The case of the report: devices of a service that does not answer are given to nobody."""
    machine, inventories = dgx_facts()
    silent = NodeAlignment(node=machine.node, unheard_classes={"gpu": "2026-01-01T00:00:00Z"})
    parts: dict[str, Any] = {
        "wanted": (_gpu_claim(1),),
        "machines": (machine,),
        "inventories": tuple(inventories.values()),
    }

    (heard,) = dry_run(Situation(**parts), CelCompiler())
    (unheard,) = dry_run(Situation(**parts, alignments=(silent,)), CelCompiler())

    assert (heard.condition, unheard.condition) == ("Allocated", "DoesNotFit")
