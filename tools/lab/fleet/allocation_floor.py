"""The floor of an allocation: the bare messages that the write protocol needs, without any
decision.

For each claim: two compare-and-sets of an object, one request that its node answers without work,
one event. As many run at a time as the controller has requests under way. It is measured on the
same server, beside the same nodes, in the same run.
"""

from __future__ import annotations

import asyncio
import time

from lab.fleet.fleet_claims import NAMESPACE, fleet_claim
from topobus.bus.bus import Bus, Written
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, DecisionEvent
from topobus.values.request import Owner, OwnerKind

__all__ = ["measure_floor"]

# ControllerSettings.parallel_asks.
_AT_ONCE = 32


async def measure_floor(bus: Bus, node: str, device_class: str, claims: int) -> float:
    """Return the claims per second of bare messages. What it stores is deleted again.

    Errors: raises PeerUnavailable.
    """
    slots = asyncio.Semaphore(_AT_ONCE)

    async def send(number: int) -> None:
        api_object = fleet_claim(number)
        parts = object_parts(api_object)
        async with slots:
            revision = await _written(bus, api_object, 0)
            await bus.is_answered(catalogue.HINT, node=node, device_class=device_class, timeout_s=10.0)
            await _written(bus, api_object, revision)
            owner = Owner(kind=OwnerKind.CLAIM, namespace=NAMESPACE, name=parts["name"], uid=f"floor-{number}")
            event = DecisionEvent(
                id=owner.uid,
                verb="allocate",
                node=node,
                op_id=owner.uid,
                time="2026-01-01T00:00:00Z",
                owner=owner,
                outcome=None,
                ledger_sequence=0,
            )
            await bus.publish(catalogue.DECISION, event, event_id=owner.uid, node=node)

    began = time.perf_counter()
    await asyncio.gather(*(send(number) for number in range(claims)))
    elapsed_s = time.perf_counter() - began
    await asyncio.gather(
        *(bus.delete(catalogue.OBJECT, **object_parts(fleet_claim(number))) for number in range(claims))
    )
    return claims / elapsed_s


async def _written(bus: Bus, api_object: ApiObject, revision: int) -> int:
    written = await bus.compare_and_set(catalogue.OBJECT, api_object, revision, **object_parts(api_object))
    if not isinstance(written, Written):
        raise RuntimeError(f"somebody else wrote {object_parts(api_object)}")
    return written.revision
