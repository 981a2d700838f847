"""The controller: claims become allocations at a node, or are told why not, and let go of them when
they end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from support.controller_home import NODE, Home, claim, condition
from support.controllers import controller
from support.reading import Reader
from support.real_topology import WatchedTopology, real_topology
from support.runtimes import runtime_of
from topobus.bus.bus import Bus, Start
from topobus.formats.kubernetes import (
    admit,
    parse_manifest,
)
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.topology.config import TopologySettings
from topobus.topology.service import serve as serve_topology
from topobus.values.device import Inventory
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

EXAMPLES = Path(__file__).parents[3] / "examples" / "claims"

PAIR = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: pair}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: gpu.topobus.dev
        selectors:
        - cel:
            expression: >-
              device.attributes["topobus.dev"].model.contains("H100") &&
              device.capacity["topobus.dev"].memory.compareTo(quantity("40Gi")) >= 0
    - name: nic
      exactly:
        deviceClassName: nic.topobus.dev
    constraints:
    - matchAttribute: resource.kubernetes.io/pcieRoot
"""


async def test_controller_allocates_gpu_and_nic_under_one_root_when_claim_asks_for_it(served: Home) -> None:
    """A claim with a CEL selector and matchAttribute pcieRoot gets a GPU and a NIC of one root,
    held at the node and announced.
    """
    (api_object,) = parse_manifest(PAIR, where="pair.yaml")

    async with Reader(served.bus.follow(catalogue.DECISION, start=Start.ALL)) as decisions:
        await served.put(admit(api_object, uid="uid-pair", now="2026-01-01T00:00:00Z"))
        results = await served.results("pair")
        events = await decisions.until(lambda items: bool(items))

    roots = {device.name: device.pcie_root for inventory in served.inventories for device in inventory.devices}
    assert [result["driver"] for result in results] == ["topobus.dev"] * 2
    assert len({roots[result["device"]] for result in results}) == 1
    assert {result["pool"] for result in results} == {NODE}
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="pair", uid="uid-pair")
    held = served.topology.ledger.allocations[owner.key].holdings[0].devices
    assert held == {"gpu": (results[0]["device"],), "nic": (results[1]["device"],)}
    assert [(received.value.verb, received.value.node, received.value.owner) for received in events] == [
        ("place", NODE, owner)
    ]


async def test_example_claim_is_allocated_on_the_demo_machine(served: Home) -> None:
    """The claim of the examples, with its classes, gets a GPU and an RDMA NIC below one root."""
    for file in ("classes.yaml", "gpu-nic-pair.yaml"):
        for api_object in parse_manifest((EXAMPLES / file).read_text(encoding="utf-8"), where=file):
            await served.put(admit(api_object, uid=f"uid-{api_object.metadata['name']}", now="2026-01-01T00:00:00Z"))

    results = await served.results("gpu-nic-pair")

    roots = {device.name: device.pcie_root for inventory in served.inventories for device in inventory.devices}
    assert [result["request"] for result in results] == ["gpu", "nic"]
    assert len({roots[result["device"]] for result in results}) == 1


async def test_controller_writes_kubernetes_status_when_allocated(served: Home) -> None:
    """The status has Kubernetes' shape: node selector, time, finalizer,
    and no attempt left behind.
    """
    await served.put(claim("one"))
    await served.results("one")

    api_object = await served.until_claim("one", lambda value: condition(value).get("status") == "True")

    assert api_object is not None
    field = api_object.status["allocation"]["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]
    assert field == {"key": "metadata.name", "operator": "In", "values": [NODE]}
    assert api_object.status["allocation"]["allocationTimestamp"]
    assert api_object.metadata["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert "topobus.dev/attempt" not in api_object.metadata["annotations"]


async def test_controller_says_why_when_claim_cannot_fit(served: Home) -> None:
    """A claim for more than there is gets the first failing check of the devices, grouped with
    numbers.
    """
    await served.put(claim("taker", count=2))
    await served.results("taker")
    await served.put(claim("greedy", count=7))

    message = await served.until_reason("greedy", "DoesNotFit")

    assert message == (
        "node demo-node: request r wants 7 devices of class gpu.topobus.dev, found 6 of 8 (2 devices: held "
        "by claim default/taker)"
    )


async def test_controller_allocates_waiting_claim_when_devices_become_free(served: Home) -> None:
    """A claim that did not fit is allocated as soon as another one is released."""
    await served.put(claim("first", count=8))
    await served.results("first")
    await served.put(claim("second", count=8))
    await served.until_reason("second", "DoesNotFit")

    await served.delete("resourceclaim", "first")

    assert len(await served.results("second")) == 8


@pytest.mark.parametrize(
    ("wrong_object", "reason", "wanted"),
    [
        pytest.param(
            claim("bad", expression="device.drivr == 1"),
            "Invalid",
            ("line 1, column 7", "undefined field 'drivr'"),
            id="cel-does-not-compile",
        ),
        pytest.param(
            claim("bad", expression='device.attributes["topobus.dev"].colour == "red"'),
            "Invalid",
            ("selector #0", "colour"),
            id="cel-missing-key",
        ),
        pytest.param(
            claim("bad", device_class="tpu"), "Invalid", ("no DeviceClass 'tpu'", "gpu.topobus.dev"), id="no-such-class"
        ),
        pytest.param(claim("bad", count=0), "Malformed", ("count", "at least 1"), id="breaks-a-limit"),
        pytest.param(
            ApiObject(
                api_version="resource.k8s.io/v1",
                kind="ResourceClaim",
                metadata={"name": "bad", "uid": "u"},
                spec={"devices": {"requests": 5}},
            ),
            "Malformed",
            ("requests", "array"),
            id="wrong-type",
        ),
    ],
)
async def test_controller_says_where_when_claim_is_wrong(
    served: Home, wrong_object: ApiObject, reason: str, wanted: tuple[str, ...]
) -> None:
    """A wrong claim is told the place; others are served as before."""
    await served.put(wrong_object)
    await served.put(claim("good"))

    message = await served.until_reason("bad", reason)

    assert [part for part in wanted if part not in message] == []
    assert len(await served.results("good")) == 1


async def test_controller_survives_stored_class_that_nobody_can_read(served: Home) -> None:
    """A malformed DeviceClass counts as absent and takes nobody down."""
    broken = ApiObject(
        api_version="resource.k8s.io/v1", kind="DeviceClass", metadata={"name": "odd"}, spec={"selectors": "x"}
    )
    await served.put(broken)
    await served.put(claim("user", device_class="odd"))

    assert "no DeviceClass 'odd'" in await served.until_reason("user", "Invalid")


async def test_controller_releases_devices_when_claim_is_deleted(served: Home) -> None:
    """A deleted claim lets go at its node first, and only then the object goes."""
    await served.put(claim("gone", count=3))
    await served.results("gone")

    await served.delete("resourceclaim", "gone")
    await served.until_claim("gone", lambda value: value is None)

    assert served.topology.ledger.allocations == {}


@pytest.mark.parametrize("is_forced", [False, True])
async def test_controller_waits_with_the_release_while_a_container_may_use_the_devices(
    served: Home, *, is_forced: bool
) -> None:
    """Devices that are prepared stay held, whoever deletes their claim.

    They go when the node has undone it.
    """
    await served.put(claim("used", count=8))
    await served.results("used")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="used", uid="uid-used")
    await served.topology.set_prepared(owner, is_prepared=True)
    async with Reader(served.bus.watch(catalogue.LEDGER)) as ledgers:
        await ledgers.until(
            lambda items: any(change.value is not None and owner.key in change.value.allocations for change in items)
        )
    if is_forced:
        await served.bus.delete(catalogue.OBJECT, kind="resourceclaim", namespace="default", name="used")
    else:
        await served.delete("resourceclaim", "used")
        waiting = await served.until_claim(
            "used", lambda value: value is not None and len(value.status.get("conditions") or []) == 2
        )
        assert waiting is not None
        assert "is prepared" in waiting.status["conditions"][1]["message"]
    await served.put(claim("next"))
    await served.until_reason("next", "DoesNotFit")

    assert owner.key in served.topology.ledger.allocations
    await served.topology.set_prepared(owner, is_prepared=False)
    assert len(await served.results("next")) == 1
    assert owner.key not in served.topology.ledger.allocations


async def test_controller_releases_devices_when_object_is_removed_by_force(served: Home) -> None:
    """An object deleted past its finalizer does not leak what it held."""
    await served.put(claim("forced", count=8))
    await served.results("forced")
    await served.bus.delete(catalogue.OBJECT, kind="resourceclaim", namespace="default", name="forced")

    await served.put(claim("next", count=8))

    assert len(await served.results("next")) == 8


async def test_controller_searches_anew_when_node_refuses(served: Home) -> None:
    """A node that refuses the attempt is asked again with another operation, never with the refused
    one.
    """
    served.topology.refuse_next = 1

    await served.put(claim("again"))
    await served.results("again")

    assert [request.op_id for request in served.topology.requests] == ["allocate-uid-again-1", "allocate-uid-again-2"]


async def test_controller_does_not_hammer_a_node_that_refuses_for_ever(served: Home) -> None:
    """A node that refuses every device is asked about each once, and then only after a while.

    The claim says why it waits.
    """
    served.topology.refuse_next = 1000

    await served.put(claim("unwanted"))
    message = await served.until_reason("unwanted", "DoesNotFit")

    assert "8 devices: refused by the node: refused by the test" in message
    assert len(served.topology.requests) == 8


TEMPLATED = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec:
  metadata: {labels: {team: a}}
  spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: job}
spec:
  containers: [{name: main}]
  resourceClaims: [{name: card, resourceClaimTemplateName: one-gpu}]
"""


async def test_controller_makes_and_ends_claims_when_a_pod_names_a_template(served: Home) -> None:
    """A pod's template becomes one claim with the pod as owner.

    It is allocated, and released when the pod is gone.
    """
    for api_object in parse_manifest(TEMPLATED, where="pod.yaml"):
        await served.put(admit(api_object, uid=f"uid-{api_object.metadata['name']}", now="2026-01-01T00:00:00Z"))
    items = await served.objects.until(lambda changes: any(_claim_names(change.value) for change in changes))
    (name,) = next(names for change in items if (names := _claim_names(change.value)))
    await served.results(name)
    claim_object = await served.until_claim(name, lambda value: value is not None)

    await served.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="job")
    await served.until_claim(name, lambda value: value is None)

    assert claim_object is not None
    assert claim_object.metadata["labels"] == {"team": "a"}
    assert claim_object.metadata["ownerReferences"][0]["uid"] == "uid-job"
    assert served.topology.ledger.allocations == {}


PAIR_POD = """
apiVersion: v1
kind: Pod
metadata: {name: both}
spec:
  containers: [{name: main}]
  resourceClaims:
  - {name: a, resourceClaimName: six}
  - {name: b, resourceClaimName: two}
"""


async def test_controller_puts_all_claims_of_a_pod_on_one_node(
    served: Home, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """Two claims of a pod are served where both fit, not each where it fits first."""
    (pod,) = parse_manifest(PAIR_POD, where="pod.yaml")
    await served.put(claim("early", count=1, annotations={"topobus.dev/node": NODE}))
    await served.results("early")
    other = msgspec.structs.replace(recorded[0], node="other-node")
    inventories = [msgspec.structs.replace(inventory, node="other-node") for inventory in recorded[1]]
    await topologies.enter_async_context(real_topology(served.bus, other, []))
    await served.put(admit(pod, uid="uid-both", now="2026-01-01T00:00:00Z"))
    # Both at once, before the other node's inventory: whichever comes first must wait for its mate.
    await served.put(claim("six", count=6))
    await served.put(claim("two", count=2))
    for inventory in inventories:
        await served.bus.put(catalogue.INVENTORY, inventory, node="other-node", device_class=inventory.device_class)

    pools = {result["pool"] for name in ("six", "two") for result in await served.results(name)}

    assert len(pools) == 1


def _claim_names(api_object: ApiObject | None) -> list[str]:
    statuses = (
        api_object.status.get("resourceClaimStatuses") if api_object is not None and api_object.kind == "Pod" else None
    )
    return [status["resourceClaimName"] for status in statuses or []]


async def test_claim_is_held_and_let_go_by_the_real_topology(
    bus: Bus, nats_server: NatsServer, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """With the real service at the node: allocated, held in its ledger, refused to others,
    released.
    """
    machine, inventories = recorded
    await bus.put(catalogue.MACHINE, machine, node=NODE)
    for inventory in inventories:
        await bus.put(catalogue.INVENTORY, inventory, node=NODE, device_class=inventory.device_class)
    async with (
        Bus.session(NatsSettings(url=nats_server.url), name="topology") as node_bus,
        Reader(bus.watch(catalogue.OBJECT)) as objects,
        Reader(bus.watch(catalogue.LEDGER)) as ledgers,
        controller(nats_server.url),
    ):
        runtime = runtime_of("topology", NODE, node_bus)
        topology = asyncio.create_task(serve_topology(TopologySettings(node=NODE), runtime))
        home = Home(bus, objects, WatchedTopology(bus, NODE), inventories)
        await home.put(claim("real", count=8))
        await home.results("real")
        await home.put(claim("late"))
        assert "8 devices: held by claim default/real" in await home.until_reason("late", "DoesNotFit")

        await home.delete("resourceclaim", "real")
        await home.results("late")

        held = [sorted(change.value.allocations) for change in ledgers.items if change.value is not None]
        topology.cancel()
        await asyncio.wait({topology})
    assert ["claim/default/real/uid-real"] in held
    assert held[-1] == ["claim/default/late/uid-late"]


@pytest.mark.real_server
async def test_controller_process_says_ready_and_stops_when_told(nats_server: NatsServer, tmp_path: Path) -> None:
    """The console entry starts, connects, and ends with status 0 on SIGTERM."""
    environment = {**os.environ, "TOPOBUS_ALL__NATS__URL": nats_server.url, "TOPOBUS_ALL__LOG__FORMAT": "json"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.controller.main",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        async for line in process.stdout:
            if b"controller.ready" in line:
                break
    process.send_signal(signal.SIGTERM)

    async with asyncio.timeout(60):
        assert await process.wait() == 0


async def test_claim_with_as_much_configuration_as_upstream_takes_is_allocated(served: Home) -> None:
    """32 opaque configurations of 10 kB are what an API server accepts: the claim is allocated,
    with each of them once in its status.
    """
    api_object = claim("large")
    config = [
        {"opaque": {"driver": "topobus.dev", "parameters": {"n": number, "text": "x" * 10_000}}} for number in range(32)
    ]
    await served.put(
        msgspec.structs.replace(api_object, spec={"devices": {**api_object.spec["devices"], "config": config}})
    )

    await served.results("large")

    done = await served.until_claim("large", lambda value: value is not None and bool(value.status.get("allocation")))
    assert done is not None
    assert [each["opaque"]["parameters"]["n"] for each in done.status["allocation"]["devices"]["config"]] == list(
        range(32)
    )
