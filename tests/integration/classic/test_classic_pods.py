"""Where pods with classic claims go: to a node that has all they ask, elsewhere when it refuses or
is silent, and away when a rule evicts them.
"""

from __future__ import annotations

import msgspec
import pytest

from support.classic_home import ClassicPlace, devices_of, node_of
from support.classic_manifests import CLASSES, claim, parameters, pod
from topobus.formats.messages import catalogue
from topobus.values.ledger import Ledger

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


async def test_pod_goes_where_its_claims_can_be_had_when_its_first_node_is_full(served: ClassicPlace) -> None:
    """Devices that structured claims hold are taken for classic ones, and the context tells which
    nodes are unsuitable.
    """
    await served.apply(
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: new, annotations: "
        "{topobus.dev/node: n1}}, spec: {devices: {requests: "
        "[{name: r, exactly: {deviceClassName: gpu.topobus.dev, count: 3}}]}}}"
    )
    await served.allocated("new")
    await served.apply(parameters("two", "{count: 2}") + claim("later", parameters="two") + pod("first", "later"))

    assert await served.scheduled("first") == "n2"
    said = [
        version.status
        for version in served.versions("podschedulingcontext", "first")
        if version is not None and version.status
    ]
    assert {"resourceClaims": [{"name": "c0", "unsuitableNodes": ["n1"]}]} in said
    await served.check()


async def test_claims_of_two_drivers_are_allocated_on_one_node_when_a_pod_uses_both(served: ClassicPlace) -> None:
    """The scheduler selects once every driver has reported, and both allocate there."""
    await served.apply(
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: new, annotations: "
        "{topobus.dev/node: n1}}, spec: {devices: {requests: "
        "[{name: r, exactly: {deviceClassName: nic.topobus.dev, count: 2}}]}}}"
    )
    await served.allocated("new")
    await served.apply(claim("a") + claim("b", of="nic") + pod("both", "a", "b"))

    assert await served.scheduled("both") == "n2"
    assert served.held("n2") == {"claim/default/a": ["gpu-0"], "claim/default/b": ["nic-0"]}


async def test_pod_waits_with_reasons_when_no_node_can_serve_it_and_runs_when_one_can(served: ClassicPlace) -> None:
    """The claim counts what stands in the way, node by node; freeing a device is enough."""
    await served.apply(
        parameters("three", "{count: 3, selector: {memory: {value: 80Gi, operator: GreaterThanOrEqualTo}}}")
    )
    await served.apply(claim("big", parameters="three") + pod("first", "big"))
    why = await served.until_reason("big", "DoesNotFit")
    assert "node n1: request devices wants 3 devices of class gpu, found 2 of 4 (2 not selected)" in why

    await served.apply(
        claim("hog", mode="Immediate", of="shared-gpu") + claim("hog2", mode="Immediate", of="shared-gpu")
    )
    for name in ("hog", "hog2"):
        await served.allocated(name)
    await served.apply(
        parameters("two", "{count: 2, selector: {productName: '*h100*'}}")
        + claim("fits", parameters="two")
        + pod("second", "fits", extra="nodeSelector: {kubernetes.io/hostname: n1}")
    )
    await served.until_reason("fits", "DoesNotFit")
    await served.delete("resourceclaim", "hog")
    await served.until_reason("fits", "DoesNotFit")
    await served.delete("resourceclaim", "hog2")
    assert await served.scheduled("second") == "n1"
    await served.check()


async def test_claim_is_tried_elsewhere_when_the_node_refuses(served: ClassicPlace) -> None:
    """The ledger has the last word; what it refuses is not allocated, whatever was chosen."""
    served.nodes["n1"].refuse_next = 1
    await served.apply(claim("later") + pod("first", "later"))

    node = await served.scheduled("first")
    assert served.held(node)["claim/default/later"]
    await served.check()


async def test_claim_goes_elsewhere_when_its_node_does_not_answer(served: ClassicPlace) -> None:
    """Silence is neither yes nor no: the pod is not held up by it, and
    nothing is handed out twice.
    """
    machine = await served.bus.get(catalogue.MACHINE, node="n1")
    inventory = await served.bus.get(catalogue.INVENTORY, node="n1", device_class="gpu")
    assert machine is not None
    assert inventory is not None
    await served.bus.put(catalogue.MACHINE, msgspec.structs.replace(machine.value, node="a0"), node="a0")
    await served.bus.put(
        catalogue.INVENTORY, msgspec.structs.replace(inventory.value, node="a0"), node="a0", device_class="gpu"
    )
    await served.apply(claim("first", mode="Immediate"))
    assert node_of(await served.allocated("first")) == "n1"  # a0 has no ledger: it is not ready

    await served.bus.put(catalogue.LEDGER, Ledger(node="a0"), node="a0")
    await served.apply(claim("second") + pod("silent", "second"))
    assert await served.scheduled("silent") == "n1"
    selected = [
        version.spec.get("selectedNode")
        for version in served.versions("podschedulingcontext", "silent")
        if version is not None
    ]
    assert selected[0] == "a0"
    await served.check()


STRUCTURED = """
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}{notes}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: {of}.topobus.dev, count: {count}}}}}]}}}}
"""


def structured(name: str, of: str, count: int, node: str = "") -> str:
    """Write a structured claim."""
    notes = (
        f", annotations: {{topobus.dev/node: {node}}}"
        if node
        else ", annotations: {topobus.dev/allocation-mode: WaitForFirstConsumer}"
    )
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
    await served.until(
        "resourceclaim", "old", lambda api_object: api_object is not None and "allocation" not in api_object.status
    )


async def test_pods_own_devices_and_classic_claims_are_had_on_one_node(served: ClassicPlace) -> None:
    """What the pod asks by itself counts, too: a node that has only the claim's devices left is
    none.
    """
    await served.apply(structured("hog", "gpu", 2, "n1"))
    await served.allocated("hog")
    await served.apply(parameters("two", "{count: 2}") + claim("old", parameters="two") + pod("own", "old", gpus=2))

    assert await served.scheduled("own") == "n2"
    assert sorted(name for names in served.held("n2").values() for name in names) == [
        "gpu-0",
        "gpu-1",
        "gpu-2",
        "gpu-3",
    ]
    await served.check()


async def test_allocation_is_taken_back_when_the_pod_cannot_run_where_it_is(served: ClassicPlace) -> None:
    """A delayed claim that nobody uses stays where it was only as long as that helps."""
    await served.apply(claim("old") + pod("first", "old", extra="nodeSelector: {kubernetes.io/hostname: n1}"))
    await served.scheduled("first")
    kept = (await served.claim("old")).metadata["uid"]
    await served.change(
        "old", lambda api_object: msgspec.structs.replace(api_object, status={**api_object.status, "reservedFor": []})
    )
    await served.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="first")
    await served.apply(pod("second", "old", extra="nodeSelector: {kubernetes.io/hostname: n2}"))

    assert await served.scheduled("second") == "n2"
    moved = await served.claim("old")
    assert (moved.metadata["uid"], node_of(moved), served.held("n1")) == (kept, "n2", {})


async def test_rule_evicts_a_classic_claim_with_its_pod(served: ClassicPlace) -> None:
    """A taint with NoExecute takes a classic claim's pod away and the claim back, as it does with
    structured ones.

    A claim on another device stays.
    """
    await served.apply(CLASSES + claim("hot") + claim("cool") + pod("user", "hot") + pod("other", "cool"))
    for name in ("user", "other"):
        await served.until(
            "pod", name, lambda api_object: api_object is not None and bool(api_object.spec.get("nodeName"))
        )
    hot, cool = await served.allocated("hot"), await served.allocated("cool")
    selector = f"{{driver: topobus.dev, pool: {node_of(hot)}, device: {devices_of(hot)[0]}}}"

    await served.apply(
        f"""
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {{name: hot}}
spec: {{deviceSelector: {selector}, taint: {{key: example.com/hot, value: "1", effect: NoExecute}}}}
"""
    )

    assert await served.until("pod", "user", lambda api_object: api_object is None) is None
    await served.until(
        "resourceclaim", "hot", lambda api_object: api_object is not None and not api_object.status.get("allocation")
    )
    assert devices_of(await served.allocated("cool")) == devices_of(cool)
    assert served.versions("pod", "other")[-1] is not None
