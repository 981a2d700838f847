"""The life of a classic claim: allocated at once or by negotiation, shared, told why it waits,
taken back and let go.
"""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from support.classic_home import ClassicPlace, devices_of, node_of
from support.classic_manifests import TEMPLATE, claim, parameters, pod
from topobus.cli.application import run
from topobus.controller.classic.rules import classic_lifecycle
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.messages.messages import ApiObject
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


def _has_finalizer(api_object: ApiObject | None) -> bool:
    return api_object is not None and "gpu.topobus.dev/deletion-protection" in api_object.metadata.get("finalizers", [])


async def test_immediate_claim_is_allocated_without_a_pod_and_let_go_when_deleted(served: ClassicPlace) -> None:
    """Finalizer, ledger, status; and back. The result names driver, node and devices."""
    await served.apply(
        parameters("two", "{count: 2, selector: {productName: '*h100*'}}")
        + claim("now", mode="Immediate", parameters="two")
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
    """Potential nodes, selected node, allocation with the pod in reservedFor, the pod's node.

    Without a pod nothing happens.
    """
    await served.apply(claim("later"))
    await served.until_reason("later", "WaitForFirstConsumer")
    await served.apply(pod("first", "later"))
    node = await served.scheduled("first")

    done = await served.allocated("later")
    assert (node, node_of(done), served.held(node)) == ("n1", "n1", {"claim/default/later": ["gpu-0"]})
    assert [user["name"] for user in done.status["reservedFor"]] == ["first"]
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


async def test_claim_is_used_by_one_pod_at_a_time_unless_its_class_is_shareable(served: ClassicPlace) -> None:
    """The second pod waits for the first to go.

    A shareable claim serves both at once, with the class's configuration for the node.
    """
    await served.apply(
        claim("alone") + claim("shared", of="shared-gpu") + pod("first", "alone") + pod("other", "shared")
    )
    await served.scheduled("first")
    node = await served.scheduled("other")
    await served.apply(pod("second", "alone") + pod("another", "shared"))

    assert await served.scheduled("another") == node
    both = (await served.claim("shared")).status
    assert [user["name"] for user in both["reservedFor"]] == ["other", "another"]
    assert both["allocation"]["shareable"] is True
    config = as_structured(await served.claim("shared")).status["allocation"]["devices"]["config"]
    assert [entry["opaque"]["parameters"]["strategy"] for entry in config] == ["TimeSlicing"]
    assert "reserved for others" in await served.until_reason("second", "Unschedulable", "pod")
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


async def test_claim_that_is_prepared_is_let_go_only_when_that_is_undone(served: ClassicPlace) -> None:
    """Containers may be using it: only the node can know."""
    await served.apply(claim("now", mode="Immediate"))
    done = await served.allocated("now")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="now", uid=done.metadata["uid"])
    await served.nodes["n1"].set_prepared(owner, is_prepared=True)
    await served.delete("resourceclaim", "now")
    assert "prepared" in await served.until_reason("now", "Prepared")

    await served.nodes["n1"].set_prepared(owner, is_prepared=False)
    await served.gone("resourceclaim", "now")


async def test_claim_is_deallocated_when_somebody_asks(served: ClassicPlace) -> None:
    """A request in the status takes the allocation back and leaves the claim.

    An immediate one is allocated anew, by another operation.
    """
    await served.apply(claim("now", mode="Immediate"))
    await served.allocated("now")
    await served.change("now", classic_lifecycle.with_deallocation_request)

    again = await served.until(
        "resourceclaim",
        "now",
        lambda api_object: (
            api_object is not None
            and classic_lifecycle.attempt_of(api_object).number == 2
            and bool(api_object.status.get("allocation"))
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
            "{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClass, metadata: {name: foreign}, "
            "driverName: x.example.com}" + claim("c", of="foreign"),
            "NoDriver",
            "names driver x.example.com: installed are gpu.topobus.dev, nic.topobus.dev",
        ),
        (
            "{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClass, metadata: {name: f}, driverName: "
            "fpga.topobus.dev}" + claim("c", of="f"),
            "NoDriver",
            "no node offers devices of class fpga",
        ),
        (
            "{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClass, metadata: {name: s}, driverName: "
            "gpu.topobus.dev, structuredParameters: true}" + claim("c", of="s", mode="Immediate"),
            "Malformed",
            "structuredParameters is true",
        ),
        (
            claim("c", mode="Immediate", parameters="nine") + parameters("nine", "{count: 9}"),
            "DoesNotFit",
            "request devices wants 9 devices of class gpu, found 4 of 4",
        ),
    ],
)
async def test_claim_is_told_why_it_waits(served: ClassicPlace, manifest: str, reason: str, message: str) -> None:
    """What is missing or wrong stands in the claim, with what was wanted."""
    await served.apply(manifest)

    assert message in await served.until_reason("c", reason)


async def test_claim_that_nobody_can_read_is_deleted_with_what_it_holds(served: ClassicPlace) -> None:
    """The ledger says what it holds, whatever somebody wrote into its status."""
    await served.apply(claim("now", mode="Immediate"))
    await served.allocated("now")
    await served.change(
        "now", lambda api_object: msgspec.structs.replace(api_object, status={"allocation": 5, "reservedFor": "x"})
    )
    await served.until_reason("now", "Malformed")
    await served.delete("resourceclaim", "now")

    await served.gone("resourceclaim", "now")
    assert served.held("n1") == {}


async def test_node_allocation_state_shows_what_is_allocated_and_prepared(
    served: ClassicPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    """One view of inventories and ledger, by the command line."""
    await served.apply(claim("now", mode="Immediate"))
    done = await served.allocated("now")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="now", uid=done.metadata["uid"])
    await served.nodes["n1"].set_prepared(owner, is_prepared=True)

    code = await asyncio.to_thread(run, ["get", "nodeallocationstates", "n1", "--nats", served.url, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (printed["kind"], printed["metadata"]["name"], printed["status"]) == (
        "NodeAllocationState",
        "n1",
        {"state": "Ready"},
    )
    assert [allocatable_device["name"] for allocatable_device in printed["spec"]["allocatableDevices"]][:4] == [
        "gpu-0",
        "gpu-1",
        "gpu-2",
        "gpu-3",
    ]
    held = {"namespace": "default", "name": "now", "devices": {"gpu": ["gpu-0"]}}
    assert printed["spec"]["allocatedClaims"] == printed["spec"]["preparedClaims"] == {owner.uid: held}

    assert await asyncio.to_thread(run, ["get", "nodeallocationstates", "--nats", served.url]) == 0
    assert "default/now: gpu-0" in capsys.readouterr().out
    assert await asyncio.to_thread(run, ["get", "nodeallocationstate/n1", "--nats", served.url, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed
