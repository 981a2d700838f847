"""Partitions and shares in a cluster: what the gateway publishes of them, and what it does on a
server without the features.
"""

from __future__ import annotations

import pytest

from support.cluster_slices import shown, taints
from support.gateway_rig import Rig
from support.node_plane import NODE
from support.partitioned_cards import SHARED_NIC, card, counters_of
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

COUNTERS = ["spec.sharedCounters", "spec.devices.*.consumesCounters"]


async def test_slices_show_partitions_and_shares(rig: Rig, server: ApiServerSimulator) -> None:
    """Counters stand in a slice of their own and belong to the same pool.

    A shared device says which amounts may be asked for.
    """
    await rig.plane.show("gpu", *card(), counter_sets=counters_of("gpu-0"))
    await rig.plane.show("nic", SHARED_NIC)
    async with rig.gateway():
        await rig.readiness.until(lambda report: report.get("slices") == "ready")

    gpu, of_nic, counters = sorted(server.objects("ResourceSlice"), key=lambda each: str(each["metadata"]["name"]))
    assert [sorted(each["spec"].keys() & {"devices", "sharedCounters"}) for each in (gpu, of_nic, counters)] == [
        ["devices"],
        ["devices"],
        ["sharedCounters"],
    ]
    assert [each["spec"]["pool"] for each in (gpu, of_nic, counters)] == [
        {"name": NODE, "generation": 1, "resourceSliceCount": 3}
    ] * 3
    assert counters["metadata"]["name"].startswith("f00-")
    assert counters["spec"]["sharedCounters"] == [{"name": "gpu-0", "counters": {"slices": {"value": "7"}}}]
    assert [device["consumesCounters"] for device in gpu["spec"]["devices"]] == [
        [{"counterSet": "gpu-0", "counters": {"slices": {"value": amount}}}] for amount in ("7", "4", "3", "3")
    ]
    (nic,) = shown(server)["nic"]
    assert nic["allowMultipleAllocations"] is True
    assert nic["capacity"]["bandwidth"]["requestPolicy"] == {"default": "1k", "validRange": {"min": "1k", "step": "1k"}}


@pytest.mark.parametrize("dropped", [COUNTERS, COUNTERS[:1], COUNTERS[1:]], ids=["both", "counter sets", "consumption"])
async def test_cards_are_offered_whole_when_the_server_keeps_no_counters(
    rig: Rig, server: ApiServerSimulator, dropped: list[str]
) -> None:
    """A partition beside its card would be handed out twice: it is withheld and named, and a card
    without partitions stays.
    """
    server.set_drops({"ResourceSlice": dropped})
    await rig.plane.show("gpu", *card(), *card("gpu-1", ()), counter_sets=counters_of("gpu-0", "gpu-1"))
    async with rig.gateway():
        report = await rig.readiness.until(lambda report: report.get("slices", "").startswith("ready: "))
        pods = await rig.pods()

    devices = [device for each in server.objects("ResourceSlice") for device in each["spec"].get("devices", ())]
    assert [device["name"] for device in devices if device["name"].startswith("gpu-")] == ["gpu-0", "gpu-1"]
    assert not any("consumesCounters" in device for device in devices)
    assert (
        "gpu-0-part-a is left out: the API server stores no counters (feature DRAPartitionableDevices)"
        in report["slices"]
    )
    assert set(dropped) >= set(pods.dropped_slice_fields) > set()


async def test_partitions_come_when_the_server_learns_counters(rig: Rig, server: ApiServerSimulator) -> None:
    """An upgraded API server begins its history anew, so the gateway's watch does, too, and the
    partitions are offered without a restart of the gateway.
    """
    server.set_drops({"ResourceSlice": COUNTERS})
    await rig.plane.show("gpu", *card(), counter_sets=counters_of("gpu-0"))
    async with rig.gateway():
        await rig.readiness.until(lambda report: "stores no counters" in report.get("slices", ""))
        server.set_drops({})
        server.put({"kind": "Node", "metadata": {"name": "other"}})
        server.compact()
        server.close_watches()
        await server.until(lambda: len(shown(server)["gpu"]) == 4, what="the partitions")
        await rig.readiness.until(lambda report: report.get("slices") == "ready")


@pytest.mark.parametrize("has_history", [False, True], ids=["history-lost", "history-kept"])
async def test_slices_are_written_again_when_features_are_switched_off_under_stored_ones(
    rig: Rig, server: ApiServerSimulator, has_history: bool
) -> None:
    """The server keeps the fields of slices that it has stored, and its scheduler does not use
    them: the next server is asked, so the card is offered without counters, and what is dropped is
    told.

    Also where the gateway's watch can continue, because no slice has changed since.
    """
    shares = ["spec.devices.*.allowMultipleAllocations", "spec.devices.*.capacity.*.requestPolicy"]
    await rig.plane.show("gpu", *card(), counter_sets=counters_of("gpu-0"))
    await rig.plane.show("nic", SHARED_NIC)
    async with rig.gateway():
        await rig.readiness.until(lambda report: report.get("slices") == "ready")
        server.set_drops({"ResourceSlice": [*COUNTERS, *shares]})
        if not has_history:
            server.put({"kind": "Node", "metadata": {"name": "other"}})
            server.compact()
        server.close_watches()
        await server.until(lambda: len(shown(server).get("gpu", [])) == 1, what="the card alone")
        await rig.readiness.until(lambda report: "stores no counters" in report.get("slices", ""))
        await server.until(lambda: "allowMultipleAllocations" not in shown(server)["nic"][0], what="no share")
        pods = await rig.pods()

    gpu = [
        each["spec"]
        for each in server.objects("ResourceSlice")
        if any(device["name"].startswith("gpu-") for device in each["spec"].get("devices", ()))
    ]
    assert [[device["name"] for device in spec["devices"]] for spec in gpu] == [["gpu-0"]]
    assert "consumesCounters" not in gpu[0]["devices"][0]
    assert {*shares} < {*pods.dropped_slice_fields}


async def test_partitions_are_closed_when_a_pod_holds_the_card_without_a_claim(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The scheduler knows what claims hold.

    Of the others it is told by a taint on all that does not fit beside it.
    """
    owner = Owner(kind=OwnerKind.POD, namespace="default", name="p", uid="u")
    await rig.plane.show("gpu", *card(), counter_sets=counters_of("gpu-0"))
    async with rig.gateway():
        await rig.readiness.until(lambda report: report.get("slices") == "ready")
        await rig.plane.hold(owner, gpu=("gpu-0-part-a",))
        await server.until(lambda: taints(server)["gpu-0"] == ["topobus.dev/occupied:NoSchedule"], what="a taint")

    assert {name: closed for name, closed in taints(server).items() if closed} == {
        "gpu-0": ["topobus.dev/occupied:NoSchedule"],
        "gpu-0-part-a": ["topobus.dev/occupied:NoSchedule"],
    }
