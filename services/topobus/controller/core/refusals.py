"""Devices that nodes refused to claims, kept away from for a growing while.

A node's ledger does not explain every refusal (a reserved CPU, a device that went sick a moment ago), so the same search would choose the same devices again,
for ever. Flows in: refusals and the time by a monotonic clock. Flows out: what a claim must not get now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from topobus.controller.core.values import DeviceId

__all__ = ["Refusals"]

# A device that a node keeps refusing is tried at least so often: the refusal may have had a cause that went.
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class _Refused:
    devices: dict[DeviceId, str] = field(default_factory=dict)
    count: int = 0
    until_s: float = 0.0


class Refusals:
    """What nodes refused, by claim."""

    def __init__(self, first_wait_s: float) -> None:
        self._first_wait_s = first_wait_s
        self._known: dict[Hashable, _Refused] = {}

    def remember(self, claim: Hashable, devices: Iterable[DeviceId], why: str, *, now_s: float) -> None:
        """Keep a claim away from devices; each refusal of the claim doubles the time."""
        known = self._known.get(claim, _Refused())
        wait_s = min(self._first_wait_s * 2 ** min(known.count + 1, 16), _LONGEST_WAIT_S)
        refused = known.devices | dict.fromkeys(devices, f"refused by the node: {why}")
        self._known[claim] = _Refused(refused, known.count + 1, now_s + wait_s)

    def devices(self, claim: Hashable) -> dict[DeviceId, str]:
        """List what a claim must not get now, and why."""
        return self._known.get(claim, _Refused()).devices

    def forgive(self, *, now_s: float, is_done: Callable[[Hashable], bool]) -> list[Hashable]:
        """Let devices be tried again when their time has come; gives those claims, and forgets the ones that are done."""
        forgiven: list[Hashable] = []
        for claim, refused in tuple(self._known.items()):
            if is_done(claim):
                del self._known[claim]
            elif refused.devices and now_s >= refused.until_s:
                # The count stays: a node that refuses for ever is asked ever more seldom.
                self._known[claim] = _Refused({}, refused.count, refused.until_s)
                forgiven.append(claim)
        return forgiven

    @property
    def is_waiting(self) -> bool:
        """Say whether some device is to be tried again later."""
        return any(one.devices for one in self._known.values())
