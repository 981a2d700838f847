"""Asks the device services of a node periodically whether they run, and knows which have stopped
answering.

It gives the silent classes with the time since when, and calls back when that set changes. The
caller decides what follows from silence (a taint, a warning, no new pods).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from topobus.bus.bus import Bus
from topobus.engine.health.silence import Answered, Silence, SilenceSettings, Silent, next_silence
from topobus.formats.messages.nouns import Ask
from topobus.process.clock import Clock, until_tick
from topobus.process.logging import get_logger
from topobus.values.timestamps import rfc3339

__all__ = ["ServiceLiveness"]

# So many pauses pass between two checks while all services answer. Each check is two messages per
# class, and was most of the traffic of a node at rest.
_CALM_PAUSES = 3


class ServiceLiveness:
    """The silent device services of one node.

    Shapes: ask — any of theirs that the caller may ask, for its sign of life alone; classes — the
    classes that matter now; on_change — called after each check that changed which are silent.
    """

    def __init__(
        self,
        bus: Bus,
        ask: Ask[Any, Any],
        *,
        node: str,
        clock: Clock,
        settings: SilenceSettings,
        classes: Callable[[], Iterable[str]],
        on_change: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._ask = ask
        self._node = node
        self._clock = clock
        self._settings = settings
        self._classes = classes
        self._on_change = on_change
        self._known: dict[str, Silence] = {}
        self._silent: dict[str, str] = {}
        self._looked_at = -math.inf

    @property
    def silent(self) -> Mapping[str, str]:
        """The silent classes, each with the time since when (RFC 3339, UTC)."""
        return self._silent

    def is_judged(self, device_class: str) -> bool:
        """Return whether it is known that a class's service answers, or that it is silent.

        At first neither is known.
        """
        silence = self._known.get(device_class)
        return silence is not None and (silence.was_heard or silence.is_silent)

    @property
    def is_settled(self) -> bool:
        """Return whether each class that matters has answered, and all answered the last check.

        Then only a caller that is about to choose devices needs another check.
        """
        return set(self._classes()) == self._known.keys() and all(
            silence.was_heard and silence.since is None for silence in self._known.values()
        )

    async def run(self) -> None:
        """Check periodically, without end."""
        while True:
            if self.is_due():
                await self.check_all()
            await self._clock.sleep(until_tick(self._clock.monotonic(), self._settings.every_s))

    def is_due(self) -> bool:
        """Return, each `every_s`, whether a check is due: at once for a class that is new or did
        not answer, else when the last check is long ago.

        It is due at once also while NATS is away: a check must see that, because afterwards the
        services come back at different times.
        """
        is_calm = self._bus.is_connected and all(
            silence.was_heard and silence.since is None for silence in self._known.values()
        )
        # Half a pause of slack: sleeps end a little late, and may not add up to one more.
        is_recent = self._clock.monotonic() - self._looked_at < (_CALM_PAUSES - 0.5) * self._settings.every_s
        return not (is_calm and is_recent and set(self._classes()) == self._known.keys())

    async def check_all(self) -> None:
        """Check all classes once, at the same time: a service that hangs delays no other."""
        classes = sorted(set(self._classes()))
        answers = await asyncio.gather(*(self._call(device_class) for device_class in classes))
        at = self._looked_at = self._clock.monotonic()
        judged = {device_class for device_class in self._known if self.is_judged(device_class)}
        self._known = {
            device_class: next_silence(
                self._known.get(device_class, Silence(looked_at=at)), answer, at=at, settings=self._settings
            )
            for device_class, answer in zip(classes, answers, strict=True)
        }
        silent = {
            device_class: self._silent.get(device_class) or self._since(silence, at)
            for device_class, silence in self._known.items()
            if silence.is_silent
        }
        if silent != self._silent:
            self._log_changes(self._silent, silent)
            self._silent = silent
            self._on_change()
        elif not {device_class for device_class in self._known if self.is_judged(device_class)} <= judged:
            self._on_change()

    async def _call(self, device_class: str) -> Answered | Silent:
        return await self._bus.is_answered(
            self._ask, timeout_s=self._settings.timeout_s, node=self._node, device_class=device_class
        )

    def _since(self, silence: Silence, at: float) -> str:
        return rfc3339(self._clock.now() - timedelta(seconds=at - (silence.since if silence.since is not None else at)))

    def _log_changes(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        for device_class in sorted(now.keys() - before.keys()):
            step = (
                "see whether its service runs on this node: its devices are Unknown until it answers, and what "
                "is held stays held"
            )
            get_logger().warning("class.silent", device_class=device_class, since=now[device_class], next_step=step)
        for device_class in sorted(before.keys() - now.keys()):
            get_logger().info("class.heard", device_class=device_class, silent_since=before[device_class])
