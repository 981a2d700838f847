"""Which devices a claim's next search leaves out after a node has refused it."""

from __future__ import annotations

import pytest

from topobus.controller.commit.commit_allocations import refused_devices
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims.attempts import Attempt
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.values.outcome import Reason, Refusal

OURS = tuple(DeviceId("topobus.dev", "n1", f"gpu-{number}") for number in range(3))
OF_OTHERS = DeviceId("gpu.example.com", "n1", "gpu-0")
ATTEMPT = Attempt(
    number=1,
    node="n1",
    allocation=AllocationResult(
        devices=DevicesAllocated(results=(GrantedDevice(request="r", driver="topobus.dev", pool="n1", device="gpu-1"),))
    ),
)


@pytest.mark.parametrize(
    ("code", "left_out"),
    [("device-held", OURS[1:2]), ("policy-forbidden", OURS), ("node-silent", OURS)],
)
def test_refused_devices_are_those_of_the_attempt_or_all_of_the_node(code: str, left_out: tuple[DeviceId, ...]) -> None:
    """A held device is one device. A node that forbids the request or does not answer has no device
    that helps, while devices of other drivers are not the node's to refuse.
    """
    refusal = Refusal(reasons=(Reason(code=code, message="m"),))

    assert tuple(refused_devices(ATTEMPT, refusal, (*OURS, OF_OTHERS))) == left_out
