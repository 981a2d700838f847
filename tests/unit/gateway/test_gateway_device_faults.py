"""What there is to tell of the health of devices that claims have."""

from __future__ import annotations

import pytest

from topobus.gateway.cluster.rules.device_faults import HealthNote, health_note, lost_claim
from topobus.gateway.cluster.rules.waiting import NodePod
from topobus.values.device import Device
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.names import PodUid

SICK = HealthNote(is_healthy=False, code="xid", message="XID 79", since="then")
WELL = HealthNote(is_healthy=True, since="then")


def gpu(state: HealthState, reason: str = "xid") -> Device:
    """A GPU of that health."""
    conditions = (
        ()
        if state is HealthState.HEALTHY
        else (Condition(dimension=Dimension.MEMORY, state=state, reason=reason, message="XID 79"),)
    )
    return Device(name="gpu-0", device_class="gpu", health=DeviceHealth(state=state, conditions=conditions))


@pytest.mark.parametrize(
    ("device", "earlier", "note"),
    [
        pytest.param(gpu(HealthState.HEALTHY), None, None, id="never-hurt"),
        pytest.param(
            gpu(HealthState.UNHEALTHY),
            None,
            HealthNote(is_healthy=False, code="xid", message="XID 79", since="now"),
            id="fails",
        ),
        pytest.param(gpu(HealthState.UNHEALTHY), SICK, SICK, id="fails-still"),
        pytest.param(
            gpu(HealthState.UNHEALTHY, "ecc"),
            SICK,
            HealthNote(is_healthy=False, code="ecc", message="XID 79", since="now"),
            id="fails-otherwise",
        ),
        pytest.param(gpu(HealthState.RECOVERING), SICK, SICK, id="on-its-way"),
        pytest.param(gpu(HealthState.UNKNOWN), SICK, SICK, id="unknown-after-sick"),
        pytest.param(gpu(HealthState.UNKNOWN), None, None, id="unknown-after-well"),
        pytest.param(gpu(HealthState.HEALTHY), SICK, HealthNote(is_healthy=True, since="now"), id="well-again"),
        pytest.param(gpu(HealthState.DEGRADED), SICK, HealthNote(is_healthy=True, since="now"), id="good-enough-again"),
        pytest.param(gpu(HealthState.HEALTHY), WELL, WELL, id="well-still"),
        pytest.param(
            gpu(HealthState.UNHEALTHY),
            WELL,
            HealthNote(is_healthy=False, code="xid", message="XID 79", since="now"),
            id="fails-again",
        ),
        pytest.param(None, SICK, SICK, id="not-listed"),
        pytest.param(
            Device(name="gpu-0", device_class="gpu", health=DeviceHealth(state=HealthState.UNHEALTHY)),
            None,
            HealthNote(is_healthy=False, code="unhealthy", message="its service gives no reason", since="now"),
            id="without-a-reason",
        ),
    ],
)
def test_health_note_changes_when_a_device_fails_or_is_well_again(
    device: Device | None, earlier: HealthNote | None, note: HealthNote | None
) -> None:
    """Each fault is news once, whatever comes between sick and well."""
    assert health_note(device, earlier, "now") == note


def test_lost_claim_names_devices_of_the_claim_of_a_pods_resources_alone() -> None:
    """Pods that name their claims are the cluster's to evict."""
    by_resource = NodePod(namespace="n", name="p", uid=PodUid("u"), claims=("made", "own"), resource_claim="made")
    by_claim = NodePod(namespace="n", name="q", uid=PodUid("v"), claims=("own",))
    sick = {"n/made": ("gpu-1", "gpu-0"), "n/own": ("nic-0",)}

    assert lost_claim(by_resource, sick) == "unhealthy: gpu-0, gpu-1 of claim n/made"
    assert lost_claim(by_resource, {"n/own": ("nic-0",), "other/made": ("gpu-0",)}) == ""
    assert lost_claim(by_claim, sick) == ""
