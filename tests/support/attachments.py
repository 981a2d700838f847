"""Claims with a device that goes into its pod's sandbox, and what a test asks of the gateway and of
the device service about them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from support.gateway_rig import Rig
from support.looks import until
from topobus.formats.messages.messages import ApiObject
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER

NIC = ClaimReference(name="net", uid="u-net", drivers=(DRIVER,))
PLAIN = ClaimReference(name="plain", uid="u-plain", drivers=(DRIVER,))
CDI = ("topobus.dev/nic=claim-u-net-nic-0",)
# Long where a busy machine must not matter; a test that waits for its end sets a short one.
PATIENT, IMPATIENT = 1.9, 0.1


def reserved(value: ApiObject, *pods: str) -> ApiObject:
    """Reserve a claim for pods, as the scheduler does before it binds them."""
    consumers = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods]
    return msgspec.structs.replace(value, status={**value.status, "reservedFor": consumers})


def configured(value: ApiObject, parameters: dict[str, Any]) -> ApiObject:
    """Give a claim opaque parameters for its driver."""
    allocation = value.status["allocation"]
    config = [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}]
    devices = {**allocation["devices"], "config": config}
    return msgspec.structs.replace(value, status={**value.status, "allocation": {**allocation, "devices": devices}})


async def prepare(rig: Rig, reference: ClaimReference = NIC) -> str:
    """Prepare a claim as kubelet does; gives its error."""
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    return prepared.error


def verbs(rig: Rig) -> list[str]:
    """What the device service was asked, in order."""
    return [verb for verb, _ in rig.plane.asks.asked if verb in ("prepare", "attach", "detach", "unprepare")]


async def until_attached(rig: Rig, *, wanted: bool = True) -> None:
    """Wait until the device is in a sandbox, or in none."""
    await until(lambda: bool(rig.plane.attached) is wanted, limit_s=30)
