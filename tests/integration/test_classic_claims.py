"""Classic DRA on a real server: claims allocated at once or by negotiation, shared, taken back and let go; never twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.classic_home import ClassicPlace, classic_place, controller, devices_of, node_of
from topobus.cli.application import run
from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject
from topobus.controller.classic.core import classic_lifecycle
from topobus.domain.ledger import Ledger
from topobus.domain.request import Owner, OwnerKind
from topobus.kubernetes.api.classic_handles import as_structured
from topobus.runtime.bus import Bus
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

CLASSES = """
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: gpu}
driverName: gpu.topobus.dev
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: shared-gpu}
driverName: gpu.topobus.dev
parametersRef: {apiGroup: gpu.resource.topobus.dev, kind: DeviceClassParameters, name: shared}
---
apiVersion: gpu.resource.topobus.dev/v1alpha1
kind: DeviceClassParameters
metadata: {name: shared}
spec: {shareable: true, selector: {productName: "*h100*"}, sharing: {strategy: TimeSlicing}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: nic}
driverName: nic.topobus.dev
"""


def claim(name: str, *, mode: str = "WaitForFirstConsumer", of: str = "gpu", parameters: str = "") -> str:
    """Write a claim."""
    reference = f"parametersRef: {{apiGroup: gpu.resource.topobus.dev, kind: ClaimParameters, name: {parameters}}}" if parameters else ""
    return f"""
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
  resourceClassName: {of}
  allocationMode: {mode}
  {reference}
"""


def parameters(name: str, text: str) -> str:
    """Write claim parameters for GPUs."""
    return f"---\napiVersion: gpu.resource.topobus.dev/v1alpha1\nkind: ClaimParameters\nmetadata: {{name: {name}}}\nspec: {text}\n"


def pod(name: str, *claims: str, template: str = "", extra: str = "", gpus: int = 0) -> str:
    """Write a pod with claims in the form of Kubernetes 1.26 to 1.30."""
    entries = [f"{{name: c{index}, source: {{resourceClaimName: {each_claim}}}}}" for index, each_claim in enumerate(claims)]
    entries += [f"{{name: made, source: {{resourceClaimTemplateName: {template}}}}}"] if template else []
    limits = f"{{topobus.dev/gpu: {gpus}}}" if gpus else "{}"
    return f"""
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  containers: [{{name: main, resources: {{limits: {limits}}}}}]
  resourceClaims: [{", ".join(entries)}]
  {extra}
"""


TEMPLATE = """
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {resourceClassName: gpu}}
"""


@pytest_asyncio.fixture
async def place(bus: Bus, nats_server: NatsServer) -> AsyncIterator[ClassicPlace]:
    """Two nodes, classes, no controller."""
    async with classic_place(bus, nats_server.url) as made:
        await made.apply(CLASSES)
        yield made


@pytest_asyncio.fixture
async def served(place: ClassicPlace) -> AsyncIterator[ClassicPlace]:
    """The same with a controller."""
    async with controller(place.url):
        yield place


def _has_finalizer(api_object: ApiObject | None) -> bool:
    return api_object is not None and "gpu.topobus.dev/deletion-protection" in api_object.metadata.get("finalizers", [])


async def test_immediate_claim_is_allocated_without_a_pod_and_let_go_when_deleted(served: ClassicPlace) -> None:
    """Finalizer, ledger, status; and back. The result names driver, node and devices."""
    await served.apply(
        parameters("two", "{count: 2, selector: {productName: '*h100*'}}") + claim("now", mode="Immediate", parameters="two")
    )
    done = await served.allocated("now")

    assert (done.status["driverName"], node_of(done), devices_of(done)) == ("gpu.topobus.dev", "n1", ["gpu-2", "gpu-3"])
    assert served.held("n1") == {"claim/default/now": ["gpu-2", "gpu-3"]}
    written = [version for version in served.versions("resourceclaim", "now") if version is not None]
    assert [_has_finalizer(api_object) for api_object in written if not api_object.status.get("allocation")][-1]

    await served.delete("resourceclaim", "now")
    await served.gone("resourceclaim", "now")
    assert served.held("n1") == {}


async def test_delayed_claim_is_negotiated_reserved_and_bound_with_its_pod(served: ClassicPlace) -> None:
    """Potential nodes, selected node, allocation with the pod in reservedFor, the pod's node; without a pod nothing happens."""
    await served.apply(claim("later"))
    await served.told("later", "WaitForFirstConsumer")
    await served.apply(pod("first", "later"))
    node = await served.scheduled("first")

    done = await served.allocated("later")
    assert (node, node_of(done), served.held(node)) == ("n1", "n1", {"claim/default/later": ["gpu-0"]})
    assert [one["name"] for one in done.status["reservedFor"]] == ["first"]
    contexts = [version for version in served.versions("podschedulingcontext", "first") if version is not None]
    assert contexts[-1].spec == {"potentialNodes": ["n1", "n2"], "selectedNode": "n1"}
    assert contexts[-1].status == {"resourceClaims": [{"name": "c0"}]}
    await served.gone("podschedulingcontext", "first")


async def test_delayed_claim_is_taken_back_when_its_last_pod_is_gone(served: ClassicPlace) -> None:
    """The claim stays, its devices do not: the next pod may get others, on another node."""
    await served.apply(claim("later") + pod("first", "later"))
    await served.scheduled("first")
    await served.delete("pod", "first")

    freed = await served.until(
        "resourceclaim",
        "later",
        lambda api_object: (
            api_object is not None
            and "allocation" not in api_object.status
            and _has_finalizer(api_object)
            and "driverName" not in api_object.status
            and bool(served.held("n1") == {})
        ),
    )
    assert freed is not None

    await served.apply(pod("second", "later", extra="nodeSelector: {kubernetes.io/hostname: n2}"))
    assert await served.scheduled("second") == "n2"
    assert served.held("n2") == {"claim/default/later": ["gpu-0"]}


async def test_pod_goes_where_its_claims_can_be_had_when_its_first_node_is_full(served: ClassicPlace) -> None:
    """Devices that structured claims hold are taken for classic ones, and the context tells which nodes are unsuitable."""
    await served.apply(
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: new, annotations: {topobus.dev/node: n1}}, spec: {devices: {requests: "
        "[{name: r, exactly: {deviceClassName: gpu.topobus.dev, count: 3}}]}}}"
    )
    await served.allocated("new")
    await served.apply(parameters("two", "{count: 2}") + claim("later", parameters="two") + pod("first", "later"))

    assert await served.scheduled("first") == "n2"
    said = [version.status for version in served.versions("podschedulingcontext", "first") if version is not None and version.status]
    assert {"resourceClaims": [{"name": "c0", "unsuitableNodes": ["n1"]}]} in said
    await served.check()


async def test_claims_of_two_drivers_are_allocated_on_one_node_when_a_pod_uses_both(served: ClassicPlace) -> None:
    """The scheduler selects once every driver has reported, and both allocate there."""
    await served.apply(
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: new, annotations: {topobus.dev/node: n1}}, spec: {devices: {requests: "
        "[{name: r, exactly: {deviceClassName: nic.topobus.dev, count: 2}}]}}}"
    )
    await served.allocated("new")
    await served.apply(claim("a") + claim("b", of="nic") + pod("both", "a", "b"))

    assert await served.scheduled("both") == "n2"
    assert served.held("n2") == {"claim/default/a": ["gpu-0"], "claim/default/b": ["nic-0"]}


async def test_pod_waits_with_reasons_when_no_node_can_serve_it_and_runs_when_one_can(served: ClassicPlace) -> None:
    """The claim counts what stands in the way, node by node; freeing a device is enough."""
    await served.apply(parameters("three", "{count: 3, selector: {memory: {value: 80Gi, operator: GreaterThanOrEqualTo}}}"))
    await served.apply(claim("big", parameters="three") + pod("first", "big"))
    why = await served.told("big", "DoesNotFit")
    assert "node n1: default/big wants 3 of 4 devices, 2 can be had (2: not selected)" in why

    await served.apply(claim("hog", mode="Immediate", of="shared-gpu") + claim("hog2", mode="Immediate", of="shared-gpu"))
    for name in ("hog", "hog2"):
        await served.allocated(name)
    await served.apply(
        parameters("two", "{count: 2, selector: {productName: '*h100*'}}")
        + claim("fits", parameters="two")
        + pod("second", "fits", extra="nodeSelector: {kubernetes.io/hostname: n1}")
    )
    await served.told("fits", "DoesNotFit")
    await served.delete("resourceclaim", "hog")
    await served.told("fits", "DoesNotFit")
    await served.delete("resourceclaim", "hog2")
    assert await served.scheduled("second") == "n1"
    await served.check()


async def test_claim_is_used_by_one_pod_at_a_time_unless_its_class_is_shareable(served: ClassicPlace) -> None:
    """The second pod waits for the first to go; a shareable claim serves both at once, with the class's configuration for the node."""
    await served.apply(claim("alone") + claim("shared", of="shared-gpu") + pod("first", "alone") + pod("other", "shared"))
    await served.scheduled("first")
    node = await served.scheduled("other")
    await served.apply(pod("second", "alone") + pod("another", "shared"))

    assert await served.scheduled("another") == node
    both = (await served.claim("shared")).status
    assert [one["name"] for one in both["reservedFor"]] == ["other", "another"]
    assert both["allocation"]["shareable"] is True
    config = as_structured(await served.claim("shared")).status["allocation"]["devices"]["config"]
    assert [one["opaque"]["parameters"]["strategy"] for one in config] == ["TimeSlicing"]
    assert "reserved for others" in await served.told("second", "Unschedulable", "pod")
    await served.delete("pod", "first")
    assert await served.scheduled("second")


async def test_template_claim_is_made_allocated_and_ended_with_its_pod(served: ClassicPlace) -> None:
    """One claim a pod, gone with it, and its device with that."""
    await served.apply(TEMPLATE + pod("first", template="one-gpu"))
    node = await served.scheduled("first")
    (owner,) = served.held(node)
    await served.delete("pod", "first")

    await served.gone("resourceclaim", owner.rpartition("/")[2])
    assert served.held(node) == {}


async def test_claim_is_tried_elsewhere_when_the_node_refuses(served: ClassicPlace) -> None:
    """The ledger has the last word; what it refuses is not allocated, whatever was chosen."""
    served.nodes["n1"].refuse_next = 1
    await served.apply(claim("later") + pod("first", "later"))

    node = await served.scheduled("first")
    assert served.held(node)["claim/default/later"]
    await served.check()


async def test_claim_that_is_prepared_is_let_go_only_when_that_is_undone(served: ClassicPlace) -> None:
    """Containers may be using it: only the node can know."""
    await served.apply(claim("now", mode="Immediate"))
    done = await served.allocated("now")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="now", uid=done.metadata["uid"])
    await served.nodes["n1"].set_prepared(owner, is_prepared=True)
    await served.delete("resourceclaim", "now")
    assert "prepared" in await served.told("now", "Prepared")

    await served.nodes["n1"].set_prepared(owner, is_prepared=False)
    await served.gone("resourceclaim", "now")


async def test_claim_is_deallocated_when_somebody_asks(served: ClassicPlace) -> None:
    """A request in the status takes the allocation back and leaves the claim; an immediate one is allocated anew, by another operation."""
    await served.apply(claim("now", mode="Immediate"))
    await served.allocated("now")
    await served.change("now", classic_lifecycle.with_deallocation_request)

    again = await served.until(
        "resourceclaim",
        "now",
        lambda api_object: (
            api_object is not None and classic_lifecycle.attempt_of(api_object).number == 2 and bool(api_object.status.get("allocation"))
        ),
    )
    assert again is not None
    assert any(
        version is not None and "allocation" not in version.status and classic_lifecycle.attempt_of(version).is_over
        for version in served.versions("resourceclaim", "now")
    )
    assert served.held("n1") == {"claim/default/now": devices_of(again)}


@pytest.mark.parametrize(
    ("manifest", "reason", "message"),
    [
        (claim("c", of="nothing"), "NoClass", "there is no ResourceClass nothing"),
        (
            claim("c", mode="Immediate", parameters="nothing"),
            "Malformed",
            "there is no ClaimParameters default/nothing of gpu.resource.topobus.dev",
        ),
        (
            claim("c", of="nic", mode="Immediate", parameters="two") + parameters("two", "{count: 2}"),
            "Malformed",
            "driver nic.topobus.dev wants ClaimParameters of nic.resource.topobus.dev",
        ),
        (
            "{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClass, metadata: {name: foreign}, driverName: x.example.com}"
            + claim("c", of="foreign"),
            "NoDriver",
            "names driver x.example.com: installed are gpu.topobus.dev, nic.topobus.dev",
        ),
        (
            "{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClass, metadata: {name: f}, driverName: fpga.topobus.dev}"
            + claim("c", of="f"),
            "NoDriver",
            "no node offers devices of class fpga",
        ),
        (
            "{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClass, metadata: {name: s}, driverName: gpu.topobus.dev, structuredParameters: true}"
            + claim("c", of="s", mode="Immediate"),
            "Malformed",
            "structuredParameters is true",
        ),
        (
            claim("c", mode="Immediate", parameters="nine") + parameters("nine", "{count: 9}"),
            "DoesNotFit",
            "wants 9 of 4 devices, 4 can be had",
        ),
    ],
)
async def test_claim_is_told_why_it_waits(served: ClassicPlace, manifest: str, reason: str, message: str) -> None:
    """What is missing or wrong stands in the claim, with what was wanted."""
    await served.apply(manifest)

    assert message in await served.told("c", reason)


async def test_claim_that_nobody_can_read_is_deleted_with_what_it_holds(served: ClassicPlace) -> None:
    """The ledger says what it holds, whatever somebody wrote into its status."""
    await served.apply(claim("now", mode="Immediate"))
    await served.allocated("now")
    await served.change("now", lambda api_object: msgspec.structs.replace(api_object, status={"allocation": 5, "reservedFor": "x"}))
    await served.told("now", "Malformed")
    await served.delete("resourceclaim", "now")

    await served.gone("resourceclaim", "now")
    assert served.held("n1") == {}


async def test_claim_goes_elsewhere_when_its_node_does_not_answer(served: ClassicPlace) -> None:
    """Silence is neither yes nor no: the pod is not held up by it, and nothing is handed out twice."""
    machine = await served.bus.get(catalogue.MACHINE, node="n1")
    inventory = await served.bus.get(catalogue.INVENTORY, node="n1", device_class="gpu")
    assert machine is not None
    assert inventory is not None
    await served.bus.put(catalogue.MACHINE, msgspec.structs.replace(machine.value, node="a0"), node="a0")
    await served.bus.put(catalogue.INVENTORY, msgspec.structs.replace(inventory.value, node="a0"), node="a0", device_class="gpu")
    await served.apply(claim("first", mode="Immediate"))
    assert node_of(await served.allocated("first")) == "n1"  # a0 has no ledger: it is not ready

    await served.bus.put(catalogue.LEDGER, Ledger(node="a0"), node="a0")
    await served.apply(claim("second") + pod("silent", "second"))
    assert await served.scheduled("silent") == "n1"
    selected = [version.spec.get("selectedNode") for version in served.versions("podschedulingcontext", "silent") if version is not None]
    assert selected[0] == "a0"
    await served.check()


async def test_node_allocation_state_shows_what_is_allocated_and_prepared(served: ClassicPlace, capsys: pytest.CaptureFixture[str]) -> None:
    """One view of inventories and ledger, by the command line."""
    await served.apply(claim("now", mode="Immediate"))
    done = await served.allocated("now")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="now", uid=done.metadata["uid"])
    await served.nodes["n1"].set_prepared(owner, is_prepared=True)

    code = await asyncio.to_thread(run, ["nodeallocationstates", "n1", "--nats", served.url, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["kind"], found["metadata"]["name"], found["status"]) == ("NodeAllocationState", "n1", {"state": "Ready"})
    assert [allocatable_device["name"] for allocatable_device in found["spec"]["allocatableDevices"]][:4] == [
        "gpu-0",
        "gpu-1",
        "gpu-2",
        "gpu-3",
    ]
    held = {"namespace": "default", "name": "now", "devices": {"gpu": ["gpu-0"]}}
    assert found["spec"]["allocatedClaims"] == found["spec"]["preparedClaims"] == {owner.uid: held}

    assert await asyncio.to_thread(run, ["nodeallocationstates", "--nats", served.url]) == 0
    assert "default/now: gpu-0" in capsys.readouterr().out
    assert await asyncio.to_thread(run, ["get", "nodeallocationstate/n1", "--nats", served.url, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


STRUCTURED = """
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}{notes}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: {of}.topobus.dev, count: {count}}}}}]}}}}
"""


def structured(name: str, of: str, count: int, node: str = "") -> str:
    """Write a structured claim."""
    notes = f", annotations: {{topobus.dev/node: {node}}}" if node else ", annotations: {topobus.dev/allocation-mode: WaitForFirstConsumer}"
    return STRUCTURED.format(name=name, of=of, count=count, notes=notes)


async def test_pod_with_claims_of_both_generations_gets_both_on_one_node(served: ClassicPlace) -> None:
    """A node on which the structured claim cannot be had is not proposed to the classic driver."""
    await served.apply(structured("hog", "nic", 1, "n1"))
    await served.allocated("hog")
    await served.apply(structured("new", "nic", 2) + claim("old") + pod("mixed", "old", "new"))

    assert await served.scheduled("mixed") == "n2"
    assert served.held("n2") == {"claim/default/new": ["nic-0", "nic-1"], "claim/default/old": ["gpu-0"]}
    contexts = [version for version in served.versions("podschedulingcontext", "mixed") if version is not None]
    assert contexts[-1].spec["potentialNodes"] == ["n2"]
    await served.delete("pod", "mixed")
    await served.until("resourceclaim", "old", lambda api_object: api_object is not None and "allocation" not in api_object.status)


async def test_pods_own_devices_and_classic_claims_are_had_on_one_node(served: ClassicPlace) -> None:
    """What the pod asks by itself counts, too: a node that has only the claim's devices left is none."""
    await served.apply(structured("hog", "gpu", 2, "n1"))
    await served.allocated("hog")
    await served.apply(parameters("two", "{count: 2}") + claim("old", parameters="two") + pod("own", "old", gpus=2))

    assert await served.scheduled("own") == "n2"
    assert sorted(name for names in served.held("n2").values() for name in names) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    await served.check()


async def test_allocation_is_taken_back_when_the_pod_cannot_run_where_it_is(served: ClassicPlace) -> None:
    """A delayed claim that nobody uses stays where it was only as long as that helps."""
    await served.apply(claim("old") + pod("first", "old", extra="nodeSelector: {kubernetes.io/hostname: n1}"))
    await served.scheduled("first")
    kept = (await served.claim("old")).metadata["uid"]
    await served.change("old", lambda api_object: msgspec.structs.replace(api_object, status={**api_object.status, "reservedFor": []}))
    await served.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="first")
    await served.apply(pod("second", "old", extra="nodeSelector: {kubernetes.io/hostname: n2}"))

    assert await served.scheduled("second") == "n2"
    moved = await served.claim("old")
    assert (moved.metadata["uid"], node_of(moved), served.held("n1")) == (kept, "n2", {})


async def test_rule_evicts_a_classic_claim_with_its_pod(served: ClassicPlace) -> None:
    """A taint with NoExecute takes a classic claim's pod away and the claim back, as it does with structured ones; a claim on another device stays."""
    await served.apply(CLASSES + claim("hot") + claim("cool") + pod("user", "hot") + pod("other", "cool"))
    for name in ("user", "other"):
        await served.until("pod", name, lambda api_object: api_object is not None and bool(api_object.spec.get("nodeName")))
    hot, cool = await served.allocated("hot"), await served.allocated("cool")
    selector = f"{{driver: gpu.topobus.dev, pool: {node_of(hot)}, device: {devices_of(hot)[0]}}}"

    await served.apply(
        f"""
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {{name: hot}}
spec: {{deviceSelector: {selector}, taint: {{key: example.com/hot, value: "1", effect: NoExecute}}}}
"""
    )

    assert await served.until("pod", "user", lambda api_object: api_object is None) is None
    await served.until("resourceclaim", "hot", lambda api_object: api_object is not None and not api_object.status.get("allocation"))
    assert devices_of(await served.allocated("cool")) == devices_of(cool)
    assert served.versions("pod", "other")[-1] is not None
