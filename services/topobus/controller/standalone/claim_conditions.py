"""Writes into a claim's condition why it is not allocated, and what would fit instead.

Each new reason is also published as a decision event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.claims import lifecycle
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.outcome import Reason, Refusal
from topobus.values.timestamps import rfc3339

__all__ = ["ClaimConditions"]

# Claims advised in one round. Advice costs a dozen searches, and is of little use for each of a
# thousand claims that wait for one device.
_MOST_ADVICE = 16


class ClaimConditions:
    """Writes the conditions of claims."""

    def __init__(
        self, clock: Clock, store: ObjectStore, decisions: DecisionPublisher, metrics: ControllerMetrics
    ) -> None:
        self._clock = clock
        self._store = store
        self._decisions = decisions
        self._metrics = metrics
        self._advice_left = _MOST_ADVICE
        self._log = get_logger()

    def begin_round(self) -> None:
        """Allow as much advice as one round of claims may cost."""
        self._advice_left = _MOST_ADVICE

    async def write(
        self,
        key: ObjectKey,
        stored: Stored,
        reason: str,
        reasons: tuple[Reason, ...],
        advise: Callable[[], Awaitable[tuple[Reason, ...]]] | None = None,
    ) -> Stored:
        """Put the reasons into the claim's condition, once.

        Returns the claim with them, or as it was when another writer was first.

        Shapes: advise — finds the nearest miss and what would fit; called only for a new reason.
        """
        claim = stored.value
        message = "; ".join(each_reason.message for each_reason in reasons)
        now = rfc3339(self._clock.now())
        api_object = lifecycle.with_condition(claim, is_true=False, reason=reason, message=message, now=now)
        if api_object is claim:
            return stored
        self._advice_left -= advise is not None
        advice = await advise() if advise is not None and self._advice_left >= 0 else ()
        self._metrics.decisions.labels("refused").inc()
        if reason == "Malformed":
            self._metrics.malformed.inc()
        self._log.info("claim.waiting", claim=stored.shown, reason=reason, why=message)
        api_object = lifecycle.with_advice(
            api_object, message="; ".join(each_reason.message for each_reason in advice), now=now
        )
        written = await self._store.write(key, stored.revision, api_object)
        if written is None:
            return stored
        to_free = tuple(each_reason for each_reason in advice if each_reason.facts.get("change") == "free")
        refusal = Refusal(
            reasons=(*reasons, *(each_reason for each_reason in advice if each_reason not in to_free)), to_free=to_free
        )
        op_id = f"refuse-{stored.uid}-{written.revision}"
        await self._decisions.publish("allocate", stored.claim.owner, refusal, op_id=op_id)
        return written
