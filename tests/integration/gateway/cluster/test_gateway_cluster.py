"""The gateway's ResourceSlices in a cluster: kept through wipes, restarts, foreign edits and older
servers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from support.cluster_slices import SLICES, allocated, published, shown, taints, writes
from support.gateway_rig import SILENCE, Rig
from support.node_plane import NODE, device, kept_back
from support.older_server import older_server
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import PREPARE
from topobus.formats.messages.messages import PrepareReply, PrepareRequest
from topobus.gateway.cluster import slice_publisher
from topobus.gateway.config import ClusterSettings
from topobus.process.config import NatsSettings
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.clock import ManualClock
from topobus.values.dra_names import DRIVER
from topobus.values.errors import ConfigError
from topobus.values.health import HealthState
from topobus.values.idset import NodeSet
from topobus.values.maintenance import DeviceVerb
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_slices_show_the_nodes_devices_when_a_cluster_is_configured(rig: Rig, server: ApiServerSimulator) -> None:
    """A slice for each class in one pool, owned by the node, with standard attributes.

    A second gateway finds nothing to write.
    """
    node_uid = server.objects("Node")[0]["metadata"]["uid"]
    async with rig.gateway():
        await published(rig, server)
    first = writes(server)
    async with rig.gateway():
        await rig.readiness.until(lambda report: report.get("slices") == "ready")

    gpu = next(
        resource_slice
        for resource_slice in server.objects("ResourceSlice")
        if resource_slice["spec"]["devices"][0]["name"].startswith("gpu-")
    )
    assert {resource_slice["spec"]["driver"] for resource_slice in server.objects("ResourceSlice")} == {DRIVER}
    assert gpu["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 2}
    assert [each_device["name"] for each_device in gpu["spec"]["devices"]] == ["gpu-0", "gpu-1"]
    assert gpu["spec"]["devices"][1]["attributes"]["class"] == {"string": "gpu"}
    assert gpu["spec"]["devices"][1]["attributes"]["resource.kubernetes.io/numaNode"] == {"int": 1}
    assert [
        (owner_reference["kind"], owner_reference["uid"], owner_reference["controller"])
        for owner_reference in gpu["metadata"]["ownerReferences"]
    ] == [("Node", node_uid, True)]
    assert first == writes(server) == [("POST", 201), ("POST", 201)]


async def test_slices_come_back_when_kubelet_wipes_them(rig: Rig, server: ApiServerSimulator) -> None:
    """At kubelet's start all slices of the node go, and when a driver stays away its own.

    They are back at once, with a higher generation.
    """

    def generation() -> int:
        (of_pool,) = {each["spec"]["pool"]["generation"] for each in server.objects("ResourceSlice")}
        return int(of_pool)

    async with rig.gateway():
        await published(rig, server)
        generations = [generation()]
        async with rig.kubelet:
            await rig.kubelet.wait_for_event("WipeSlices")
            await published(rig, server)
            await rig.kubelet.wait_for_driver(DRIVER)
            generations.append(generation())

            server.wipe_slices(NODE, DRIVER)
            await published(rig, server)
            generations.append(generation())

    # A wipe whose events come in two parts costs more than one generation.
    assert generations[0] == 1
    assert generations == sorted(set(generations))


async def test_kubelet_wipes_a_drivers_slices_when_it_stays_away(rig: Rig, server: ApiServerSimulator) -> None:
    """A gateway that has ended leaves its slices; kubelet deletes them after its time."""
    async with rig.kubelet:
        async with rig.gateway():
            await rig.kubelet.wait_for_driver(DRIVER)
            await published(rig, server)

        await rig.kubelet.wait_for_event("WipeSlices", subject=DRIVER)
        await server.until(lambda: not server.objects("ResourceSlice"), what="no slices")


async def test_taints_follow_health_and_holders_when_they_change(rig: Rig, server: ApiServerSimulator) -> None:
    """A sick device evicts, one that a pod holds without a claim is closed, one write each; and
    both come back.
    """
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="u")
    async with rig.gateway():
        await published(rig, server)
        before = len(writes(server))

        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
        await server.until(lambda: taints(server)["gpu-0"] == ["topobus.dev/health:NoExecute"], what="a health taint")
        await rig.plane.hold(owner, gpu=("gpu-1",))
        await server.until(
            lambda: taints(server)["gpu-1"] == ["topobus.dev/occupied:NoSchedule"], what="an occupied taint"
        )
        assert writes(server)[before:] == [("PUT", 200), ("PUT", 200)]

        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await rig.plane.let_go(owner)
        await server.until(lambda: taints(server) == {"gpu-0": [], "gpu-1": []}, what="no taints")


async def test_taint_and_slice_follow_the_operators_word(rig: Rig, server: ApiServerSimulator) -> None:
    """Maintenance closes a device, draining evicts.

    One that is excluded is there as long as a claim has it, and comes back when it is returned.
    """
    claim = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u")
    neighbour = device("gpu-1", 1)
    async with rig.gateway():
        await published(rig, server)
        await rig.plane.show("gpu", kept_back(device("gpu-0", 0), DeviceVerb.MAINTAIN), neighbour)
        await server.until(
            lambda: taints(server) == {"gpu-0": ["topobus.dev/maintenance:NoSchedule"], "gpu-1": []}, what="a taint"
        )
        await rig.plane.show("gpu", kept_back(device("gpu-0", 0), DeviceVerb.MAINTAIN, is_draining=True), neighbour)
        await server.until(
            lambda: taints(server) == {"gpu-0": ["topobus.dev/maintenance:NoExecute"], "gpu-1": []},
            what="one that evicts",
        )
        await rig.plane.hold(claim, gpu=("gpu-0",))
        await rig.plane.show("gpu", kept_back(device("gpu-0", 0), DeviceVerb.EXCLUDE), neighbour)
        await server.until(
            lambda: taints(server) == {"gpu-0": ["topobus.dev/maintenance:NoSchedule"], "gpu-1": []}, what="it is held"
        )
        await rig.plane.let_go(claim)
        await server.until(lambda: taints(server) == {"gpu-1": []}, what="no excluded device")
        await rig.plane.show("gpu", device("gpu-0", 0), neighbour)
        await server.until(lambda: taints(server) == {"gpu-0": [], "gpu-1": []}, what="all devices")


async def test_log_counts_the_devices_of_the_slices(
    rig: Rig, server: ApiServerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an operator keeps out of the offer is not published, whatever the inventory has."""
    await rig.plane.show("gpu", kept_back(device("gpu-0", 0), DeviceVerb.EXCLUDE), device("gpu-1", 1))
    log = structlog.testing.CapturingLogger()
    monkeypatch.setattr(
        slice_publisher,
        "get_logger",
        lambda: structlog.wrap_logger(log, processors=[], wrapper_class=structlog.BoundLogger),
    )
    async with rig.gateway():
        await server.until(lambda: taints(server) == {"gpu-1": []}, what="no excluded device")
        await rig.readiness.until(lambda report: report.get("slices") == "ready")

    counts = {
        call.kwargs["pool"]: call.kwargs["devices"] for call in log.calls if call.kwargs["event"] == "slices.published"
    }
    assert counts == {NODE: 2}


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
async def test_devices_are_tainted_as_long_as_their_service_is_silent(
    rig: Rig, server: ApiServerSimulator, effect: Literal["NoSchedule", "NoExecute"]
) -> None:
    """Nothing new is scheduled on devices of whom nobody tells.

    A gateway that restarts meanwhile opens nothing, and the first answer does.
    """
    clock = ManualClock()
    cluster = msgspec.structs.replace(rig.settings.cluster, silence_effect=effect)
    where = {"node": NODE, "device_class": "fpga"}
    await rig.plane.show("fpga", device("fpga-0", 0))

    async def never(_request: PrepareRequest) -> PrepareReply:
        raise AssertionError("a sign of life prepares nothing")

    async with rig.gateway(silence=SILENCE, cluster=cluster, clock=clock), clock.ticking(SILENCE.every_s):
        await server.until(
            lambda: taints(server, "fpga") == {"fpga-0": [f"topobus.dev/health:{effect}"]}, what="a taint of silence"
        )
        # The other classes are published beside it, maybe later; the second gateway
        # must find nothing left to write.
        await server.until(lambda: len(server.objects("ResourceSlice")) == 3, what="the slices of the other classes")
        (first,) = shown(server)["fpga"][0]["taints"]
        await server.until(lambda: {"gpu", "nic", "fpga"} <= set(shown(server)), what="slices of all classes")
    before = len(writes(server))
    async with rig.gateway(silence=SILENCE, cluster=cluster, clock=clock):
        await rig.readiness.until(lambda report: report.get("slices") == "ready")
        (second,) = shown(server)["fpga"][0]["taints"]
        unchanged = len(writes(server))
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            async with clock.ticking(SILENCE.every_s):
                await server.until(lambda: taints(server, "fpga") == {"fpga-0": []}, what="no taint")

    assert first["value"] == "service-silent"
    assert second == first
    assert unchanged == before
    assert taints(server) == {"gpu-0": [], "gpu-1": []}


async def test_dropped_fields_are_said_once_when_the_server_is_older(rig: Rig, server: ApiServerSimulator) -> None:
    """A server without taints gets the slice without a war of writes.

    Readiness says what is missing.
    """
    server.set_drops({"ResourceSlice": ["spec.devices.*.taints"]})
    await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
    async with rig.gateway():
        report = await rig.readiness.until(lambda report: "does not keep" in report.get("slices", ""))
        settled = writes(server)
        await rig.plane.show("nic", device("nic-0", 0), device("nic-1", 1))
        await server.until(lambda: len(shown(server)["nic"]) == 2, what="the second NIC")

    assert report["slices"] == "ready: the API server does not keep spec.devices.*.taints"
    assert settled == [("POST", 201), ("POST", 201)]
    assert writes(server) == [*settled, ("PUT", 200)]


async def test_slices_go_without_lists_when_the_server_refuses_them(rig: Rig, server: ApiServerSimulator) -> None:
    """A device on two NUMA nodes has a list attribute.

    A server that does not know lists gets the rest of the device, and the
    operator no warning at each start.
    """
    server.set_drops({"ResourceSlice": ["spec.devices.*.attributes.*.ints"]})
    wide = msgspec.structs.replace(device("gpu-0", 0), numa_nodes=NodeSet(0, 1), model="T4")
    await rig.plane.show("gpu", wide)
    with capture_logs() as logs:
        async with rig.gateway():
            await published(rig, server)

            (shown_device,) = shown(server)["gpu"]

    assert set(shown_device["attributes"]) == {"class", "model"}
    assert [entry for entry in logs if entry["event"].startswith("slice") and entry["log_level"] != "info"] == []


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_gateway_serves_an_older_cluster_when_it_has_a_beta_version_only(
    rig: Rig, server: ApiServerSimulator, tmp_path: Path, version: str
) -> None:
    """Kubernetes 1.32 and 1.33: slices in their shape, nothing written twice, taints told as what
    is missing, claims read and prepared.
    """
    server.set_drops({"ResourceSlice": ["spec.devices.*.taints"]})
    training = allocated(server, "training", "gpu-1")
    async with older_server(server.url, version, token="secret") as older:
        path = tmp_path / "older"
        path.write_bytes(
            server.write_kubeconfig(tmp_path / "kubeconfig")
            .read_bytes()
            .replace(server.url.encode(), older.url.encode())
        )
        cluster = msgspec.structs.replace(rig.settings.cluster, kubeconfig=str(path))
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
        async with rig.gateway(cluster=cluster), rig.kubelet:
            report = await rig.readiness.until(lambda report: "does not keep" in report.get("slices", ""))
            await rig.kubelet.wait_for_driver(DRIVER)
            (prepared,) = await rig.kubelet.prepare_claims([training])

    assert report["slices"] == "ready: the API server does not keep spec.devices.*.taints"
    assert [
        resource_slice["apiVersion"] for resource_slice in older.stored if resource_slice["kind"] == "ResourceSlice"
    ] == [f"resource.k8s.io/{version}"] * 2
    assert [shown_device["name"] for shown_device in shown(server)["gpu"]] == ["gpu-0", "gpu-1"]
    assert prepared.error == ""


async def test_publishing_goes_on_when_the_api_server_was_away(rig: Rig, server: ApiServerSimulator) -> None:
    """Errors, a cut watch, a forgotten history and a restart: what changed meanwhile is there
    afterwards, and nothing twice.
    """
    server.refuse("POST", SLICES, code=500, times=2)
    async with rig.gateway():
        await published(rig, server)
        await server.stop()
        await rig.plane.show("gpu", device("gpu-0", 0))
        await server.start()
        await server.until(lambda: len(shown(server)["gpu"]) == 1, what="one GPU")

        server.put({"kind": "Node", "metadata": {"name": "other"}})
        server.compact()
        server.close_watches()
        server.wipe_slices(NODE)
        await published(rig, server)

    assert [code for _, code in writes(server)].count(500) == 2


async def test_slices_are_put_right_when_somebody_changes_them(rig: Rig, server: ApiServerSimulator) -> None:
    """A foreign edit is undone, a conflict on the way is no trouble, and a lasting refusal is said
    without ending the gateway.
    """
    async with rig.gateway():
        await published(rig, server)
        gpu = next(
            resource_slice
            for resource_slice in server.objects("ResourceSlice")
            if resource_slice["spec"]["devices"][0]["name"].startswith("gpu-")
        )
        server.refuse("PUT", SLICES, code=409, reason="Conflict", times=2)
        server.put({**gpu, "metadata": {"name": gpu["metadata"]["name"]}, "spec": {**gpu["spec"], "devices": []}})
        await server.until(lambda: len(shown(server)["gpu"]) == 2, what="both GPUs again")

        server.refuse("PUT", SLICES, code=403, reason="Forbidden", times=3)
        await rig.plane.show("gpu", device("gpu-0", 0))
        await rig.readiness.until(lambda report: f"pool {NODE}: refused by the test" in report["slices"])
        await server.until(lambda: len(shown(server)["gpu"]) == 1, what="one GPU")
        await rig.readiness.until(lambda report: report["slices"] == "ready")

    assert [code for _, code in writes(server)].count(409) == 2


async def test_leftovers_are_deleted_when_a_class_is_no_longer_offered(rig: Rig, server: ApiServerSimulator) -> None:
    """Slices of a class or pool that is not offered through DRA go; another driver's are not touched.

    A strange slice of ours goes, too.
    """
    async with rig.gateway():
        await published(rig, server)
    for name, driver, pool_name, device_name in (
        ("foreign", "gpu.example.com", NODE, "gpu-0"),
        ("old-cpus", DRIVER, f"{NODE}/cpu", "cpu-0"),
        ("old-gpu", DRIVER, NODE, "gpu-0"),
    ):
        pool = {"name": pool_name, "generation": 4, "resourceSliceCount": 1}
        server.put(
            {
                "kind": "ResourceSlice",
                "metadata": {"name": name},
                "spec": {"driver": driver, "nodeName": NODE, "pool": pool, "devices": [{"name": device_name}]},
            }
        )
    async with rig.gateway(exposure={"nic": "device-plugin", "cpu": "none"}):
        await rig.readiness.until(lambda report: report.get("slices") == "ready")

    ours, foreign = sorted(server.objects("ResourceSlice"), key=lambda each: str(each["metadata"]["name"]))
    assert (foreign["metadata"]["name"], foreign["spec"]["pool"]["generation"]) == ("foreign", 4)
    assert ours["metadata"]["name"].startswith(f"000-topobus.dev-{NODE}-")
    assert ours["spec"]["pool"] == {"name": NODE, "generation": 5, "resourceSliceCount": 1}
    assert [each_device["name"] for each_device in ours["spec"]["devices"]] == ["gpu-0", "gpu-1"]


@pytest.mark.parametrize("generation", [999_999, 2**62, 2**63 - 1])
async def test_foreign_slice_in_our_pool_is_deleted_whatever_its_generation(
    rig: Rig, server: ApiServerSimulator, generation: int
) -> None:
    """Somebody publishes a newer generation of our pool: it goes, and the node's devices are the
    pool's newest again, now and after the next change.
    """
    pool = {"name": NODE, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [{"name": "gpu-fake"}]}
    async with rig.gateway():
        await published(rig, server)
        server.put({"kind": "ResourceSlice", "metadata": {"name": "evil"}, "spec": spec})
        await server.until(
            lambda: (
                "evil" not in [resource_slice["metadata"]["name"] for resource_slice in server.objects("ResourceSlice")]
            ),
            what="it gone",
        )
        await server.until(lambda: len(shown(server)["gpu"]) == 2, what="both GPUs")
        await rig.plane.show("gpu", device("gpu-0", 0))
        await server.until(lambda: len(shown(server)["gpu"]) == 1, what="one GPU")
        await rig.readiness.until(lambda report: report["slices"] == "ready")

    (ours,) = {
        (resource_slice["spec"]["driver"], resource_slice["spec"]["pool"]["generation"])
        for resource_slice in server.objects("ResourceSlice")
    }
    assert ours[0] == DRIVER
    assert 0 < ours[1] < 2**63


async def test_gateway_waits_when_the_node_is_not_in_the_cluster(rig: Rig, server: ApiServerSimulator) -> None:
    """Without its node object nothing is published, and readiness says whose name is missing.

    It appears, and all is well.
    """
    server.remove("Node", NODE)
    async with rig.gateway():
        await rig.readiness.until(lambda report: f"there is no node {NODE}" in report.get("slices", ""))
        assert writes(server) == []

        server.put({"kind": "Node", "metadata": {"name": NODE}})
        await published(rig, server)


async def test_slices_belong_to_the_new_node_when_the_node_was_made_anew(rig: Rig, server: ApiServerSimulator) -> None:
    """A deleted node takes its slices with it.

    Nothing is published for the old one, and all of it for the next of that name.
    """
    async with rig.gateway():
        await published(rig, server)
        server.remove("Node", NODE)
        server.collect_garbage()
        await rig.readiness.until(lambda report: f"there is no node {NODE}" in report["slices"])
        left = server.objects("ResourceSlice")
        node = server.put({"kind": "Node", "metadata": {"name": NODE}})
        await published(rig, server)

    owners = {
        resource_slice["metadata"]["ownerReferences"][0]["uid"] for resource_slice in server.objects("ResourceSlice")
    }
    assert left == []
    assert owners == {node["metadata"]["uid"]}


@pytest.mark.parametrize("mode", ["kubeconfig", "in-cluster"])
async def test_gateway_ends_with_a_config_error_when_there_is_no_configuration(rig: Rig, mode: str) -> None:
    """A path that leads nowhere, or no service account around us, is the operator's mistake and
    names the setting.
    """
    path = "/nowhere/kubeconfig" if mode == "kubeconfig" else ""
    settings = ClusterSettings(mode=mode, kubeconfig=path)  # type: ignore[arg-type]  # parametrized
    with pytest.raises(ConfigError, match="gateway: cluster"):
        async with rig.gateway(cluster=settings) as task:
            await task
