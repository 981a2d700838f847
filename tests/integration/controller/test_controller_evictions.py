"""Evictions on a real server: a taint that a claim does not tolerate lets it go, tells its pods,
and nobody else's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.controller_home import NODE, Home, claim, conditions, pod
from support.reading import Reader
from topobus.bus.bus import Start
from topobus.engine.alignment.devices.spare_choice import SpareSettings, with_spares
from topobus.formats.kubernetes import admit
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, DecisionEvent
from topobus.values.device import Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.outcome import Refusal

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


def rule(device: str, effect: str = "NoExecute") -> ApiObject:
    """Taint one GPU of the node."""
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceTaintRule",
        metadata={"name": "maintenance"},
        spec={
            "deviceSelector": {"driver": "topobus.dev", "pool": NODE, "device": device},
            "taint": {"key": "example.com/maintenance", "effect": effect},
        },
    )
    return admit(api_object, uid="uid-maintenance", now="2026-01-01T00:00:00Z")


def tolerant(name: str, *tolerations: dict[str, Any]) -> ApiObject:
    """Make a claim for one GPU with tolerations."""
    api_object = claim(name)
    api_object.spec["devices"]["requests"][0]["exactly"]["tolerations"] = list(tolerations)
    return api_object


async def test_rule_evicts_the_claim_and_names_its_pod(served: Home) -> None:
    """The event names the pod; the pod is deleted; the claim gets another device.

    A claim on another device stays; the rule tells how far it is.
    """
    await served.put(claim("job"))
    await served.put(claim("other"))
    (device_of_job,), (others,) = await served.results("job"), await served.results("other")
    await served.put(pod("trainer", "job"))
    await served.until("pod", "trainer", lambda pod: conditions(pod, "PodScheduled").get("status") == "True")

    async with Reader(served.bus.follow(catalogue.DECISION, start=Start.ALL)) as decisions:
        await served.put(rule(device_of_job["device"]))
        events = await decisions.until(lambda items: any(event.value.verb == "evict" for event in items))
    gone = await served.until("pod", "trainer", lambda pod: pod is None)
    moved = await served.until_claim(
        "job", lambda job: job is not None and _devices(job) not in ([], [device_of_job["device"]])
    )
    taint_rule = await served.until(
        "devicetaintrule",
        "maintenance",
        lambda taint_rule: conditions(taint_rule, "EvictionInProgress").get("reason") == "Completed",
    )

    assert gone is None
    assert moved is not None
    event: DecisionEvent = next(event.value for event in events if event.value.verb == "evict")
    assert isinstance(event.outcome, Refusal)
    (reason,) = event.outcome.reasons
    assert (event.node, event.owner.name, reason.code) == (NODE, "job", "evicted")
    assert "pod default/trainer" in reason.message
    assert "DeviceTaintRule maintenance" in reason.message
    stays = await served.until_claim("other", lambda api_object: api_object is not None)
    assert _devices(stays) == [others["device"]]
    assert "1 published devices selected" in conditions(taint_rule, "EvictionInProgress")["message"]


async def test_claim_stays_when_it_tolerates_the_rule(served: Home) -> None:
    """A claim that tolerates the taint keeps its device, and says so by staying while its neighbour
    goes.
    """
    bears = {"key": "example.com/maintenance", "operator": "Exists"}
    await served.put(tolerant("bears", bears))
    (granted,) = await served.results("bears")
    await served.put(rule(granted["device"]))

    await served.until(
        "devicetaintrule",
        "maintenance",
        lambda taint_rule: conditions(taint_rule, "EvictionInProgress").get("reason") == "Completed",
    )

    stays = await served.until_claim("bears", lambda api_object: api_object is not None)
    assert _devices(stays) == [granted["device"]]


async def test_sick_device_evicts_its_claim(served: Home) -> None:
    """A device whose driver has evidence of a fault loses its claim, which gets a healthy one."""
    await served.put(claim("job"))
    (granted,) = await served.results("job")
    gpus = next(inventory for inventory in served.inventories if inventory.device_class == "gpu")
    sick = DeviceHealth(state=HealthState.UNHEALTHY, since="2026-01-01T00:00:00Z")
    devices = tuple(
        msgspec.structs.replace(device, health=sick) if device.name == granted["device"] else device
        for device in gpus.devices
    )

    await served.bus.put(
        catalogue.INVENTORY,
        Inventory(node=NODE, device_class="gpu", generation=2, devices=devices),
        node=NODE,
        device_class="gpu",
    )

    moved = await served.until_claim(
        "job", lambda job: job is not None and _devices(job) not in ([], [granted["device"]])
    )
    assert moved is not None


async def test_replacement_of_an_evicted_pod_gets_the_spare(served: Home) -> None:
    """All GPUs but one are spares. When that one gets sick its pod goes, the nearest spare is
    released, and the pod that the owner makes then runs with it.
    """
    gpus = next(inventory for inventory in served.inventories if inventory.device_class == "gpu")
    count = len(gpus.devices) - 1
    before = _with_spares(gpus, gpus, count)
    await _publish(served, before, generation=2)
    await served.put(claim("job"))
    (granted,) = await served.results("job")
    await served.put(pod("trainer", "job"))
    await served.until("pod", "trainer", lambda pod: conditions(pod, "PodScheduled").get("status") == "True")
    sick = DeviceHealth(state=HealthState.UNHEALTHY, since="2026-01-01T00:00:00Z")
    broken = msgspec.structs.replace(
        before,
        devices=tuple(
            msgspec.structs.replace(device, health=sick) if device.name == granted["device"] else device
            for device in before.devices
        ),
    )
    after = _with_spares(broken, before, count)

    await _publish(served, after, generation=3)

    gone = await served.until("pod", "trainer", lambda pod: pod is None)
    await served.put(pod("trainer-2", "job"))
    await served.until("pod", "trainer-2", lambda pod: conditions(pod, "PodScheduled").get("status") == "True")
    moved = await served.until_claim("job", lambda job: _devices(job) not in ([], [granted["device"]]))
    assert gone is None
    assert [device.is_spare for device in before.devices] == [False, *[True] * count]
    assert _devices(moved) == [device.name for device in after.devices if device.is_allocatable]


def _with_spares(gpus: Inventory, before: Inventory, count: int) -> Inventory:
    settings = SpareSettings(count=count)
    devices = with_spares(gpus.devices, before.devices, held=(), settings=settings, sockets={})
    return msgspec.structs.replace(gpus, devices=devices)


async def _publish(home: Home, gpus: Inventory, *, generation: int) -> None:
    inventory = msgspec.structs.replace(gpus, generation=generation)
    await home.bus.put(catalogue.INVENTORY, inventory, node=NODE, device_class="gpu")


def _condition(api_object: ApiObject) -> dict[str, Any]:
    return conditions(api_object, "Allocated")


def _devices(api_object: ApiObject | None) -> list[str]:
    allocation = (api_object.status.get("allocation") if api_object is not None else None) or {}
    return [result["device"] for result in allocation.get("devices", {}).get("results", [])]
