"""Collects from the device services the edits for a new container, while the container runtime
waits.

The claims are those whose guard the container has. The result is edits that the runtime can still
apply, or a refusal with the reason why the container cannot be created yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from topobus.gateway.asks import NodeAsks
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.rules.sandbox_rules import of_claim
from topobus.gateway.containers.values import RunningContainer
from topobus.process.clock import Clock
from topobus.values.edits import ContainerEdits, join_edits
from topobus.values.errors import TopobusError
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import ContainerName, Sandbox

__all__ = ["ContainerAdjustments"]

# Seconds that the runtime waits for one event (2 s), less the time to answer it.
_EVENT_S = 1.9


class ContainerAdjustments:
    """Returns the device services' edits for new containers."""

    def __init__(
        self, asks: NodeAsks, entry: Callable[[ClaimUid, str], ClaimEntry | None], clock: Clock, limit_s: float
    ) -> None:
        """`entry` finds claims by uid and class. `limit_s` bounds all requests for a container."""
        self._asks = asks
        self._entry = entry
        self._clock = clock
        self._limit_s = limit_s

    async def adjust(self, sandbox: Sandbox, container: RunningContainer, since_s: float) -> ContainerEdits | Refusal:
        """Join the edits of all services for a container.

        Shapes: since_s — when the runtime began to wait, by the clock.
        """
        name = ContainerName(namespace=sandbox.namespace, pod=sandbox.name, pod_uid=sandbox.uid, name=container.name)
        asked: list[tuple[ClaimEntry, tuple[str, ...]]] = []
        for uid, device_class in container.guards:
            entry = self._entry(uid, device_class)
            named = (
                [device for device in entry.to_adjust if cdi_device_name(uid, device) in container.cdi_devices]
                if entry is not None
                else []
            )
            if entry is not None and named:
                asked.append((entry, tuple(named)))
        left_s = min(self._limit_s, _EVENT_S - (self._clock.monotonic() - since_s))
        parts: list[ContainerEdits] = []
        for answer in await asyncio.gather(
            *(self._ask(entry, devices, name, container.id, left_s) for entry, devices in asked)
        ):
            if isinstance(answer, Refusal):
                return answer
            parts += answer
        return join_edits(parts)

    async def _ask(
        self, entry: ClaimEntry, devices: tuple[str, ...], name: ContainerName, container_id: str, left_s: float
    ) -> Refusal | Iterable[ContainerEdits]:
        if left_s <= 0:
            return _refuse(
                entry, devices, "adjust-unanswered", "the runtime had waited for the pod's devices; kubelet tries again"
            )
        owner = entry.claim.owner
        op_id = f"{entry.attempt}-adjust-{container_id}"
        try:
            async with self._clock.timeout(left_s):
                answer = await self._asks.adjust(op_id, owner, entry.device_class, devices, name, entry.config, left_s)
        except (TopobusError, TimeoutError) as err:
            why = f"no answer in {left_s:.1f} s" if isinstance(err, TimeoutError) else str(err)
            return _refuse(entry, devices, "adjust-unanswered", f"{why}; kubelet tries again")
        if isinstance(answer, Refusal):
            return of_claim(entry, answer)
        if set(answer.edits) != set(devices):
            return _refuse(
                entry,
                devices,
                "adjust-malformed",
                f"its service answers for {', '.join(sorted(answer.edits)) or 'none'}",
            )
        for device, edits in answer.edits.items():
            rest = msgspec.structs.replace(edits, env={}, mounts=(), annotations={})
            if rest != ContainerEdits() or any(mount.kind for mount in edits.mounts):
                text = (
                    f"its service wants to give {device} more than variables, bind mounts and annotations, which "
                    "is for `prepare` to do"
                )
                return _refuse(entry, devices, "adjust-unsupported", text)
        return [answer.edits[device] for device in devices]


def _refuse(entry: ClaimEntry, devices: tuple[str, ...], code: str, why: str) -> Refusal:
    where = f"{entry.namespace}/{entry.name}"
    text = f"claim {where}: what the container gets of {', '.join(devices)} is not known: {why}"
    return refuse(code, text, claim=where, devices=devices)
