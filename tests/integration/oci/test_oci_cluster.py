"""`topobus oci` for pods and claims that live in a cluster: found by kubelet's word, the ledger and
the gateway's CDI files, without a stand-alone store.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device
from support.oci_command import oci
from topobus.formats.messages.catalogue import MACHINE
from topobus.gateway.config import ClusterSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
)
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

GPU = "topobus.dev/gpu"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Rig]:
    """A node in a cluster, with a claim that the scheduler has allocated.

    One pod has a GPU, a NIC by that claim, and a CPU of its own.
    """
    async with (
        ApiServerSimulator() as server,
        make_rig(nats_server.url, cpus={0: CpuSet.parse("0-3")}) as made,
        made.kubelet,
    ):
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        requests = {"devices": {"requests": [{"name": "nic", "exactly": {"deviceClassName": "nic"}}]}}
        claim = server.put({"kind": "ResourceClaim", "metadata": {"name": "fast"}, "spec": requests})
        results = [{"request": "nic", "driver": "topobus.dev", "pool": NODE, "device": "nic-0"}]
        server.put(
            {
                "kind": "ResourceClaim",
                "metadata": {"name": "fast"},
                "spec": requests,
                "status": {"allocation": {"devices": {"results": results}}},
            }
        )
        cluster = ClusterSettings(mode="kubeconfig", kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        made.settings = structs.replace(made.settings, cluster=cluster)
        await made.plane.show("gpu", device("gpu-0", 0))
        await made.plane.show("nic", device("nic-0", 0))
        await made.bus.put(MACHINE, Machine(node=NODE, cpus=(), numa_nodes=()), node=NODE)
        reference = ClaimReference(name="fast", uid=claim["metadata"]["uid"], drivers=("topobus.dev",))
        containers = (Container(name="main", resources={GPU: 1}, cpus=1),)
        async with made.gateway():
            await made.kubelet.wait_for_resource(GPU, allocatable=1)
            await made.kubelet.wait_for_driver("topobus.dev")
            admitted = await made.kubelet.admit(Pod(name="both", uid="p-1", containers=containers, claims=(reference,)))
            assert isinstance(admitted, Admission), admitted
            yield made


async def test_spec_has_both_doors_when_the_pod_is_kubelets(rig: Rig) -> None:
    """The device plugin's devices, the claim's CDI file and the exclusive CPU stand in one spec.

    Nothing of it is in the stand-alone store.
    """
    code, document, notes = await oci(rig, "--pod", "default/both")

    assert document, notes
    environment = dict(variable.split("=", 1) for variable in document["spec"]["process"]["env"])
    # The test's nodes exist on no host, which the command says; the spec is whole all the same.
    assert code in (0, 1)
    assert {key for key, value in environment.items() if "gpu-0" in value}
    assert {key for key, value in environment.items() if "nic-0" in value}
    assert document["spec"]["linux"]["resources"]["cpu"] == {"cpus": "0"}


async def test_spec_comes_from_the_gateways_file_when_the_claim_is_a_clusters(rig: Rig) -> None:
    """The file that the gateway wrote for kubelet is what a runtime would inject.

    A claim that nobody prepared is not found, with the reason.
    """
    (written,) = [path.name for path in rig.cdi_dir.iterdir()]
    _, document, notes = await oci(rig, "--claim", "default/fast")
    absent, _, why = await oci(rig, "--claim", "default/other")

    assert document, notes
    assert any("nic-0" in variable for variable in document["spec"]["process"]["env"])
    assert written.startswith("topobus.dev-nic_")
    assert absent != 0
    assert "known here when kubelet has asked to prepare it" in why


async def test_conflicts_are_told_when_two_set_the_same_variable(rig: Rig) -> None:
    """What the container's own spec sets wins over a plugin and loses to CDI.

    Both are said, for kubelet and the runtime are silent.
    """
    _, plain, _ = await oci(rig, "--pod", "default/both")
    keys = [variable.partition("=")[0] for variable in plain["spec"]["process"]["env"]]
    base = rig.root / "config.json"
    base.write_text(
        json.dumps(
            {"ociVersion": "1.0.2", "process": {"env": [f"{key}=mine" for key in keys]}, "mounts": [], "linux": {}}
        )
    )
    _, document, notes = await oci(rig, "--pod", "default/both", "--spec", str(base))

    assert {conflict["what"] for conflict in document["conflicts"]} >= {f"variable {key}" for key in keys}
    assert "conflict: variable" in notes
