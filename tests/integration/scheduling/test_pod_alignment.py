"""A pod that wishes for its alignment, through the whole controller and nodes with ledgers: claims,
CPUs and memory end up in one place.
"""

from __future__ import annotations

import pytest

from support.scheduling_home import Place, claim, pod
from topobus.values.idset import NodeSet

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NIC = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: nic, annotations: {"topobus.dev/allocation-mode": WaitForFirstConsumer}}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: nic.topobus.dev}}]}}
"""

TRAINER = """
apiVersion: v1
kind: Pod
metadata:
  name: trainer
  annotations: {"topobus.dev/policy": single-numa-node}
spec:
  containers:
    - name: main
      resources:
        limits: {cpu: "8", memory: 8Gi}
        claims: [{name: gpu}, {name: nic}]
  resourceClaims: [{name: gpu, resourceClaimName: gpu}, {name: nic, resourceClaimName: nic}]
"""


async def _scheduled_beside_others(served: Place, trainer: str) -> tuple[str, NodeSet, NodeSet]:
    """Fill one node, and the first half of the other's GPUs.

    Then schedule the trainer: gives node, and where its claims and its CPUs are.
    """
    await served.apply(pod("whole", gpus=8))
    full = await served.scheduled("whole")
    await served.apply(pod("half", gpus=4))
    node = await served.scheduled("half")
    assert node != full
    await served.apply(claim("gpu", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(NIC)
    await served.apply(trainer)
    assert await served.scheduled("trainer") == node
    view = served.nodes[node].view()
    homes = {core_cpu: core.numa_node for core in view.cores for core_cpu in core.cpus}
    devices = {
        (name, device.name): device.numa_nodes
        for name, found_devices in view.devices.items()
        for device in found_devices
    }
    claims, cpus = NodeSet(), NodeSet()
    for key, allocation in served.nodes[node].ledger.allocations.items():
        for holding in allocation.holdings:
            if key.startswith("claim/"):
                for name, names in holding.devices.items():
                    for device in names:
                        claims |= devices[name, device] or NodeSet()
            elif "/trainer/" in key:
                cpus |= NodeSet.of(home_ for cpu in holding.cpus if (home_ := homes[cpu]) is not None)
    return node, claims, cpus


async def test_pod_gets_cpus_where_its_claims_devices_are_when_it_wishes_that(served: Place) -> None:
    """GPUs are left on NUMA node 1 alone: the NIC of the other claim and the pod's own CPUs come
    from there, too.
    """
    node, claims, cpus = await _scheduled_beside_others(served, TRAINER)

    assert (claims, cpus) == (NodeSet(1), NodeSet(1))
    asked = [
        request.pod
        for request in served.nodes[node].requests
        if request.pod.owner.name == "trainer" and not request.is_dry_run
    ]
    assert [use.containers for use in asked[-1].claims] == [("main",), ("main",)]
    for name in ("gpu", "nic"):
        config = (await served.claim(name)).status["allocation"]["devices"]["config"]
        assert [
            (entry["opaque"]["parameters"]["kind"], entry["opaque"]["parameters"]["numaNodes"]) for entry in config
        ] == [("AlignmentResult", "1")]


async def test_claims_lie_together_and_cpus_where_they_come_first_when_the_pod_wishes_nothing(served: Place) -> None:
    """The same pod without its annotation: of equal devices its claims get close ones, its CPUs are
    the node's choice, and nothing is said of it anywhere.
    """
    plain = TRAINER.replace('  annotations: {"topobus.dev/policy": single-numa-node}\n', "")

    node, claims, cpus = await _scheduled_beside_others(served, plain)

    assert (claims, cpus) == (NodeSet(1), NodeSet(0))
    assert all(not request.pod.claims for request in served.nodes[node].requests)
    for name in ("gpu", "nic"):
        assert "config" not in (await served.claim(name)).status["allocation"]["devices"]
