"""The gateway in a cluster: ResourceSlices kept through wipes, restarts and older servers, and claims read from the API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import SILENCE, Rig, make_rig
from support.node_plane import NODE, claim, device
from support.older_server import older_server
from topobus.contracts.catalogue import PREPARE
from topobus.contracts.messages import PrepareReply, PrepareRequest
from topobus.domain.errors import ConfigError
from topobus.domain.health import HealthState
from topobus.domain.idset import NodeSet
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.config import ClusterSettings
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.clock import ManualClock
from topobus.testing.kubelet import ClaimReference, KubeletTimings

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

SLICES = "resourceslices"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server that knows our node."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as running:
        running.put({"kind": "Node", "metadata": {"name": NODE}})
        yield running


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator, tmp_path: Path) -> AsyncIterator[Rig]:
    """Two GPUs and a NIC; a kubelet that wipes slices; a gateway that knows the cluster."""

    def wipe(driver: str) -> int:
        return server.wipe_slices(NODE, driver)

    async with make_rig(nats_server.url, wipe_slices=wipe, timings=KubeletTimings(wipe_s=0.1)) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0))
        cluster = ClusterSettings(
            mode="kubeconfig", kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")), retry_s=0.05, publish_delay_s=0.01
        )
        made.settings = msgspec.structs.replace(made.settings, cluster=cluster)
        yield made


def shown(server: ApiServerSimulator) -> dict[str, list[dict[str, Any]]]:
    """Devices by driver, as the API server has them."""
    return {
        resource_slice["spec"]["driver"]: resource_slice["spec"].get("devices", []) for resource_slice in server.objects("ResourceSlice")
    }


def taints(server: ApiServerSimulator, driver: str = "gpu.topobus.dev") -> dict[str, list[str]]:
    """Taints by device."""
    return {one["name"]: [f"{it['key']}:{it['effect']}" for it in one.get("taints", ())] for one in shown(server).get(driver, [])}


def writes(server: ApiServerSimulator) -> list[tuple[str, int]]:
    """Every write of a slice and how it ended."""
    return [(request.method, request.code) for request in server.requests if request.is_write and SLICES in request.path]


async def published(rig: Rig, server: ApiServerSimulator) -> None:
    """Wait until both classes are there and the gateway says that it is done."""
    await server.until(lambda: len(server.objects("ResourceSlice")) == 2, what="two slices")
    await rig.readiness.until(lambda report: report.get("slices", "").startswith("ready"))


async def test_slices_show_the_nodes_devices_when_a_cluster_is_configured(rig: Rig, server: ApiServerSimulator) -> None:
    """One pool a class, owned by the node, with standard attributes; a second gateway finds nothing to write."""
    node_uid = server.objects("Node")[0]["metadata"]["uid"]
    async with rig.gateway():
        await published(rig, server)
    first = writes(server)
    async with rig.gateway():
        await rig.readiness.until(lambda report: report.get("slices") == "ready")

    gpu = next(
        resource_slice for resource_slice in server.objects("ResourceSlice") if resource_slice["spec"]["driver"] == "gpu.topobus.dev"
    )
    assert gpu["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    assert [each_device["name"] for each_device in gpu["spec"]["devices"]] == ["gpu-0", "gpu-1"]
    assert gpu["spec"]["devices"][1]["attributes"]["resource.kubernetes.io/numaNode"] == {"int": 1}
    assert [
        (owner_reference["kind"], owner_reference["uid"], owner_reference["controller"])
        for owner_reference in gpu["metadata"]["ownerReferences"]
    ] == [("Node", node_uid, True)]
    assert first == writes(server) == [("POST", 201), ("POST", 201)]


async def test_slices_come_back_when_kubelet_wipes_them(rig: Rig, server: ApiServerSimulator) -> None:
    """At kubelet's start all slices of the node go, and when a driver stays away its own; they are back at once, with a higher generation."""
    async with rig.gateway():
        await published(rig, server)
        async with rig.kubelet:
            await rig.kubelet.wait_for_event("WipeSlices")
            await published(rig, server)
            await rig.kubelet.wait_for_driver("gpu.topobus.dev")

            server.wipe_slices(NODE, "gpu.topobus.dev")
            await published(rig, server)

            generations = {
                resource_slice["spec"]["driver"]: resource_slice["spec"]["pool"]["generation"]
                for resource_slice in server.objects("ResourceSlice")
            }
            assert generations == {"gpu.topobus.dev": 3, "nic.topobus.dev": 2}


async def test_kubelet_wipes_a_drivers_slices_when_it_stays_away(rig: Rig, server: ApiServerSimulator) -> None:
    """A gateway that has ended leaves its slices; kubelet deletes them after its time."""
    async with rig.kubelet:
        async with rig.gateway():
            for driver in ("gpu.topobus.dev", "nic.topobus.dev"):
                await rig.kubelet.wait_for_driver(driver)
            await published(rig, server)

        await rig.kubelet.wait_for_event("WipeSlices", subject="gpu.topobus.dev")
        await server.until(lambda: not server.objects("ResourceSlice"), what="no slices")


async def test_taints_follow_health_and_holders_when_they_change(rig: Rig, server: ApiServerSimulator) -> None:
    """A sick device evicts, one that a pod holds without a claim is closed, one write each; and both come back."""
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="u")
    async with rig.gateway():
        await published(rig, server)
        before = len(writes(server))

        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
        await server.until(lambda: taints(server)["gpu-0"] == ["topobus.dev/health:NoExecute"], what="a health taint")
        await rig.plane.hold(owner, gpu=("gpu-1",))
        await server.until(lambda: taints(server)["gpu-1"] == ["topobus.dev/occupied:NoSchedule"], what="an occupied taint")
        assert writes(server)[before:] == [("PUT", 200), ("PUT", 200)]

        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await rig.plane.let_go(owner)
        await server.until(lambda: taints(server) == {"gpu-0": [], "gpu-1": []}, what="no taints")


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
async def test_devices_are_tainted_as_long_as_their_service_is_silent(
    rig: Rig, server: ApiServerSimulator, effect: Literal["NoSchedule", "NoExecute"]
) -> None:
    """Nothing new is scheduled on devices of whom nobody tells; a gateway that restarts meanwhile opens nothing, and the first answer does."""
    clock = ManualClock()
    cluster = msgspec.structs.replace(rig.settings.cluster, silence_effect=effect)
    where = {"node": NODE, "device_class": "fpga"}
    driver = "fpga.topobus.dev"
    await rig.plane.show("fpga", device("fpga-0", 0))

    async def never(_request: PrepareRequest) -> PrepareReply:
        raise AssertionError("a sign of life prepares nothing")

    async with rig.gateway(silence=SILENCE, cluster=cluster, clock=clock), clock.ticking(SILENCE.every_s):
        await server.until(lambda: taints(server, driver) == {"fpga-0": [f"topobus.dev/health:{effect}"]}, what="a taint of silence")
        # The other classes are published beside it, maybe later; the second gateway must find nothing left to write.
        await server.until(lambda: len(server.objects("ResourceSlice")) == 3, what="the slices of the other classes")
        (first,) = shown(server)[driver][0]["taints"]
        await server.until(lambda: {"gpu.topobus.dev", "nic.topobus.dev", driver} <= set(shown(server)), what="slices of all classes")
    before = len(writes(server))
    async with rig.gateway(silence=SILENCE, cluster=cluster, clock=clock):
        await rig.readiness.until(lambda report: report.get("slices") == "ready")
        (second,) = shown(server)[driver][0]["taints"]
        unchanged = len(writes(server))
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            async with clock.ticking(SILENCE.every_s):
                await server.until(lambda: taints(server, driver) == {"fpga-0": []}, what="no taint")

    assert first["value"] == "service-silent"
    assert second == first
    assert unchanged == before
    assert taints(server) == {"gpu-0": [], "gpu-1": []}


async def test_dropped_fields_are_said_once_when_the_server_is_older(rig: Rig, server: ApiServerSimulator) -> None:
    """A server without taints gets the slice without a war of writes; readiness says what is missing."""
    server.set_drops({"ResourceSlice": ["spec.devices.*.taints"]})
    await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
    async with rig.gateway():
        report = await rig.readiness.until(lambda report: "does not keep" in report.get("slices", ""))
        settled = writes(server)
        await rig.plane.show("nic", device("nic-0", 0), device("nic-1", 1))
        await server.until(lambda: len(shown(server)["nic.topobus.dev"]) == 2, what="the second NIC")

    assert report["slices"] == "ready: the API server does not keep spec.devices.*.taints"
    assert settled == [("POST", 201), ("POST", 201)]
    assert writes(server) == [*settled, ("PUT", 200)]


async def test_slices_go_without_lists_when_the_server_refuses_them(rig: Rig, server: ApiServerSimulator) -> None:
    """A device on two NUMA nodes has a list attribute; a server that does not know lists gets the rest of the device."""
    server.set_drops({"ResourceSlice": ["spec.devices.*.attributes.*.ints"]})
    wide = msgspec.structs.replace(device("gpu-0", 0), numa_nodes=NodeSet(0, 1), model="T4")
    await rig.plane.show("gpu", wide)
    async with rig.gateway():
        await published(rig, server)

        (one,) = shown(server)["gpu.topobus.dev"]
        assert set(one["attributes"]) == {"model"}


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_gateway_serves_an_older_cluster_when_it_has_a_beta_version_only(
    rig: Rig, server: ApiServerSimulator, tmp_path: Path, version: str
) -> None:
    """Kubernetes 1.32 and 1.33: slices in their shape, nothing written twice, taints told as what is missing, claims read and prepared."""
    server.set_drops({"ResourceSlice": ["spec.devices.*.taints"]})
    training = allocated(server, "training", "gpu-1")
    async with older_server(server.url, version, token="secret") as older:
        path = tmp_path / "older"
        path.write_bytes(server.write_kubeconfig(tmp_path / "kubeconfig").read_bytes().replace(server.url.encode(), older.url.encode()))
        cluster = msgspec.structs.replace(rig.settings.cluster, kubeconfig=str(path))
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
        async with rig.gateway(cluster=cluster), rig.kubelet:
            report = await rig.readiness.until(lambda report: "does not keep" in report.get("slices", ""))
            await rig.kubelet.wait_for_driver("gpu.topobus.dev")
            (prepared,) = await rig.kubelet.prepare_claims([training])

    assert report["slices"] == "ready: the API server does not keep spec.devices.*.taints"
    assert [one["apiVersion"] for one in older.stored if one["kind"] == "ResourceSlice"] == [f"resource.k8s.io/{version}"] * 2
    assert [one["name"] for one in shown(server)["gpu.topobus.dev"]] == ["gpu-0", "gpu-1"]
    assert prepared.error == ""


async def test_publishing_goes_on_when_the_api_server_was_away(rig: Rig, server: ApiServerSimulator) -> None:
    """Errors, a cut watch, a forgotten history and a restart: what changed meanwhile is there afterwards, and nothing twice."""
    server.refuse("POST", SLICES, code=500, times=2)
    async with rig.gateway():
        await published(rig, server)
        await server.stop()
        await rig.plane.show("gpu", device("gpu-0", 0))
        await server.start()
        await server.until(lambda: len(shown(server)["gpu.topobus.dev"]) == 1, what="one GPU")

        server.put({"kind": "Node", "metadata": {"name": "other"}})
        server.compact()
        server.close_watches()
        server.wipe_slices(NODE)
        await published(rig, server)

    assert [code for _, code in writes(server)].count(500) == 2


async def test_slices_are_put_right_when_somebody_changes_them(rig: Rig, server: ApiServerSimulator) -> None:
    """A foreign edit is undone, a conflict on the way is no trouble, and a lasting refusal is said without ending the gateway."""
    async with rig.gateway():
        await published(rig, server)
        gpu = next(
            resource_slice for resource_slice in server.objects("ResourceSlice") if resource_slice["spec"]["driver"] == "gpu.topobus.dev"
        )
        server.refuse("PUT", SLICES, code=409, reason="Conflict", times=2)
        server.put({**gpu, "metadata": {"name": gpu["metadata"]["name"]}, "spec": {**gpu["spec"], "devices": []}})
        await server.until(lambda: len(shown(server)["gpu.topobus.dev"]) == 2, what="both GPUs again")

        server.refuse("PUT", SLICES, code=403, reason="Forbidden", times=3)
        await rig.plane.show("gpu", device("gpu-0", 0))
        await rig.readiness.until(lambda report: "gpu.topobus.dev: refused by the test" in report["slices"])
        await server.until(lambda: len(shown(server)["gpu.topobus.dev"]) == 1, what="one GPU")
        await rig.readiness.until(lambda report: report["slices"] == "ready")

    assert [code for _, code in writes(server)].count(409) == 2


async def test_leftovers_are_deleted_when_a_class_is_no_longer_offered(rig: Rig, server: ApiServerSimulator) -> None:
    """Slices of a class that is not offered through DRA go; another driver's are not touched; a strange slice of ours goes, too."""
    pool = {"name": NODE, "generation": 4, "resourceSliceCount": 1}
    for name, driver in (("foreign", "gpu.example.com"), ("old-nic", "nic.topobus.dev"), ("old-gpu", "gpu.topobus.dev")):
        server.put({"kind": "ResourceSlice", "metadata": {"name": name}, "spec": {"driver": driver, "nodeName": NODE, "pool": pool}})
    async with rig.gateway(exposure={"nic": "device-plugin"}):
        await rig.readiness.until(lambda report: report.get("slices") == "ready")

    found = {
        resource_slice["spec"]["driver"]: (resource_slice["metadata"]["name"], resource_slice["spec"]["pool"]["generation"])
        for resource_slice in server.objects("ResourceSlice")
    }
    assert found.keys() == {"gpu.example.com", "gpu.topobus.dev"}
    assert found["gpu.example.com"] == ("foreign", 4)
    assert found["gpu.topobus.dev"][0].startswith("000-gpu.topobus.dev-")
    assert found["gpu.topobus.dev"][1] == 5


@pytest.mark.parametrize("generation", [999_999, 2**62, 2**63 - 1])
async def test_foreign_slice_in_our_pool_is_deleted_whatever_its_generation(rig: Rig, server: ApiServerSimulator, generation: int) -> None:
    """Somebody publishes a newer generation of our pool: it goes, and the node's devices are the pool's newest again, now and after the next change."""
    pool = {"name": NODE, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": "gpu.topobus.dev", "nodeName": NODE, "pool": pool, "devices": [{"name": "gpu-fake"}]}
    async with rig.gateway():
        await published(rig, server)
        server.put({"kind": "ResourceSlice", "metadata": {"name": "evil"}, "spec": spec})
        await server.until(
            lambda: "evil" not in [resource_slice["metadata"]["name"] for resource_slice in server.objects("ResourceSlice")], what="it gone"
        )
        await server.until(lambda: len(shown(server).get("gpu.topobus.dev", [])) == 2, what="both GPUs")
        await rig.plane.show("gpu", device("gpu-0", 0))
        await server.until(lambda: len(shown(server).get("gpu.topobus.dev", [])) == 1, what="one GPU")
        await rig.readiness.until(lambda report: report["slices"] == "ready")

    (ours,) = [
        resource_slice for resource_slice in server.objects("ResourceSlice") if resource_slice["spec"]["driver"] == "gpu.topobus.dev"
    ]
    assert 0 < ours["spec"]["pool"]["generation"] < 2**63


async def test_gateway_waits_when_the_node_is_not_in_the_cluster(rig: Rig, server: ApiServerSimulator) -> None:
    """Without its node object nothing is published, and readiness says whose name is missing; it appears, and all is well."""
    server.remove("Node", NODE)
    async with rig.gateway():
        await rig.readiness.until(lambda report: f"there is no node {NODE}" in report.get("slices", ""))
        assert writes(server) == []

        server.put({"kind": "Node", "metadata": {"name": NODE}})
        await published(rig, server)


async def test_slices_belong_to_the_new_node_when_the_node_was_made_anew(rig: Rig, server: ApiServerSimulator) -> None:
    """A deleted node takes its slices with it; nothing is published for the old one, and all of it for the next of that name."""
    async with rig.gateway():
        await published(rig, server)
        server.remove("Node", NODE)
        server.collect_garbage()
        await rig.readiness.until(lambda report: f"there is no node {NODE}" in report["slices"])
        left = server.objects("ResourceSlice")
        node = server.put({"kind": "Node", "metadata": {"name": NODE}})
        await published(rig, server)

    owners = {resource_slice["metadata"]["ownerReferences"][0]["uid"] for resource_slice in server.objects("ResourceSlice")}
    assert left == []
    assert owners == {node["metadata"]["uid"]}


def allocated(server: ApiServerSimulator, name: str, *devices: str) -> ClaimReference:
    """Put an allocated claim into the cluster, as the scheduler does; its own uid is in the reference."""
    stand_alone = claim(name, "", *devices)
    request = {"name": "r", "exactly": {"deviceClassName": "gpu"}}
    spec = {"devices": {"requests": [request]}}
    stored = server.put({"kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec, "status": stand_alone.status})
    return ClaimReference(name=name, uid=stored["metadata"]["uid"], drivers=("gpu.topobus.dev",))


async def test_claim_is_read_from_the_api_server_when_kubelet_prepares_it(rig: Rig, server: ApiServerSimulator) -> None:
    """The allocation is the cluster's; a claim of the same name with another uid is refused, and so is one that is not there."""
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver("gpu.topobus.dev")
        (prepared,) = await rig.kubelet.prepare_claims([training])
        (replaced,) = await rig.kubelet.prepare_claims([msgspec.structs.replace(training, uid="another")])
        (missing,) = await rig.kubelet.prepare_claims([msgspec.structs.replace(training, name="none", uid="none")])

    assert ([claim_device.device for claim_device in prepared.devices], prepared.error) == (["gpu-0"], "")
    assert "has uid" in replaced.error
    assert "does not exist" in missing.error


async def test_claim_is_tried_again_when_the_api_server_is_troubled_for_a_moment(rig: Rig, server: ApiServerSimulator) -> None:
    """Errors, too many requests: kubelet gets its answer in one call, for its own next try comes after a minute; what lasts longer is told."""
    training = allocated(server, "training", "gpu-0")
    patient = msgspec.structs.replace(rig.settings.deadlines, claim_retry_s=30.0)
    async with rig.gateway(deadlines=patient), rig.kubelet:
        await rig.kubelet.wait_for_driver("gpu.topobus.dev")
        server.refuse("GET", "resourceclaims", code=500, times=2)
        server.refuse("GET", "resourceclaims", code=429, retry_after_s=1)
        (prepared,) = await rig.kubelet.prepare_claims([training])
    async with rig.gateway(deadlines=msgspec.structs.replace(patient, claim_retry_s=0.0)), rig.kubelet:
        await rig.kubelet.wait_for_driver("gpu.topobus.dev")
        server.refuse("GET", "resourceclaims", code=500)
        (failed,) = await rig.kubelet.prepare_claims([allocated(server, "other", "gpu-1")])

    assert prepared.error == ""
    assert [request.code for request in server.requests if request.path.endswith("/resourceclaims/training")] == [500, 500, 429, 200]
    assert "API server answered 500" in failed.error


async def test_device_is_free_for_the_next_claim_when_the_scheduler_took_the_first_one_back(rig: Rig, server: ApiServerSimulator) -> None:
    """Unprepared and deallocated, a claim no longer stands in the ledger's way, without waiting for a period."""
    first = allocated(server, "first", "gpu-0")
    async with rig.gateway(deadlines=msgspec.structs.replace(rig.settings.deadlines, reconcile_s=600.0)), rig.kubelet:
        await rig.kubelet.wait_for_driver("gpu.topobus.dev")
        await rig.kubelet.prepare_claims([first])
        await rig.kubelet.unprepare_claims([first])
        second = allocated(server, "second", "gpu-0")

        (early,) = await rig.kubelet.prepare_claims([second])
        server.put({**server.objects("ResourceClaim")[0], "status": {}})
        (late,) = await rig.kubelet.prepare_claims([second])

    assert "first" in early.error
    assert late.error == ""


async def test_claim_is_released_when_it_was_deallocated_elsewhere(rig: Rig, server: ApiServerSimulator) -> None:
    """A claim of the ledger that the cluster no longer knows is let go by the periodic look."""
    gone = Owner(kind=OwnerKind.CLAIM, name="gone", uid="u-gone")
    kept = allocated(server, "kept", "gpu-1")
    await rig.plane.hold(gone, gpu=("gpu-0",))
    await rig.plane.hold(Owner(kind=OwnerKind.CLAIM, name="kept", uid=kept.uid), gpu=("gpu-1",))
    async with rig.gateway():
        released = await rig.plane.wait_for("released")

    assert released.owner == gone
    assert [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()] == ["kept"]


async def test_unprepare_succeeds_when_the_api_server_is_away(rig: Rig, server: ApiServerSimulator) -> None:
    """A pod can end without the API server; its devices are let go when it is back and says so."""
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver("gpu.topobus.dev")
        await rig.kubelet.prepare_claims([training])
        await server.stop()

        errors = await rig.kubelet.unprepare_claims([training])
        held = len(rig.plane.ledger.allocations)
        server.remove("ResourceClaim", "training")
        await server.start()
        await rig.plane.wait_for("released")

    assert (errors, held) == ({}, 1)


@pytest.mark.parametrize("mode", ["kubeconfig", "in-cluster"])
async def test_gateway_ends_with_a_config_error_when_there_is_no_configuration(rig: Rig, mode: str) -> None:
    """A path that leads nowhere, or no service account around us, is the operator's mistake and names the setting."""
    path = "/nowhere/kubeconfig" if mode == "kubeconfig" else ""
    settings = ClusterSettings(mode=mode, kubeconfig=path)  # type: ignore[arg-type]  # parametrized
    with pytest.raises(ConfigError, match="gateway: cluster"):
        async with rig.gateway(cluster=settings) as task:
            await task
