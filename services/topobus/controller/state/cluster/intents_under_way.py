"""The allocation intents of this replica that are being written: their devices count as taken from
the decision on.

Each intent also has its pod. A newer version of a claim replaces the intent that was being written
into it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from topobus.controller.state.free_devices import FreeDevices
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.stored import ObjectKey, Stored

__all__ = ["IntentsUnderWay"]

Key = tuple[str, str]


class _Intended(NamedTuple):
    """An intent that is being written."""

    claim_uid: str
    pod_uid: str
    pod: Key
    node: str


class IntentsUnderWay:
    """Intents of ours between the decision and the answer to the write."""

    def __init__(self, stock: FreeDevices) -> None:
        self._stock = stock
        self._intents: dict[Key, _Intended] = {}

    def put(self, claim: Key, intended: Stored, pod: Key, note: Attempt) -> None:
        """Store an intent.

        Shapes: intended — the claim's next version, with the intent; pod — the intent's.
        """
        self._intents[claim] = _Intended(intended.uid, note.pod, pod, note.node)
        self._stock.put_claim(ObjectKey("resourceclaim", *claim), intended)

    def drop(self, claim: Key) -> bool:
        """Remove an intent. False when there is none."""
        return self._intents.pop(claim, None) is not None

    def claims(self) -> frozenset[str]:
        """Name the claims, by uid. Their intents come after all that are written."""
        return frozenset(intent.claim_uid for intent in self._intents.values())

    def intended_on(self, node: str, *, without: str, ignoring: Collection[str]) -> frozenset[Key]:
        """Name the pods for which a node is intended, without one pod (by uid) and some claims (by
        uid).
        """
        return frozenset(
            intent.pod
            for intent in self._intents.values()
            if intent.node == node and intent.pod_uid != without and intent.claim_uid not in ignoring
        )
