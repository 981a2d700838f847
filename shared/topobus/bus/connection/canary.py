"""Decides when a connection must check whether its client lives: only when other traffic does not
show it.

Every message or answer that arrives postpones the check, so a process that receives enough is never
woken for it. Any message shows that the client receives. Only an answer shows that it also sends.
`topobus.bus.connection.connection` makes the check and acts on silence.
"""

from __future__ import annotations

import asyncio
import math

from topobus.bus.connection.reply_inbox import ReplyInbox
from topobus.process.clock import until_tick

__all__ = ["CANARY_EVERY_S", "Canary"]

# Watchdog: a message to ourselves after 3 s of silence, given up after twice 1.5 s: 6 s in all.
# Where messages still come and only ours do not arrive, nothing is asked before two periods
# without an answer: up to 10 s.
CANARY_EVERY_S = 3.0
# Checks are made at whole seconds, when the process's other loops wake up as well. So the silence
# before a check is up to a second shorter than the period.
_TICK_S = 1.0
_ROUNDING_S = 1e-3
# What comes moves the check by whole ticks. Messages that follow another one so soon do not move it: a
# check that comes a tick early sees them.
_SETTLED_S = 0.25


class Canary:
    """Decides for one connection when silence must be checked."""

    def __init__(self, mailbox: ReplyInbox) -> None:
        self._mailbox = mailbox
        self.heard_at = -math.inf
        """When the newest message of a subscription came, by the loop's clock."""
        self._next_look: asyncio.Timeout | None = None
        self._settled_until_s = -math.inf

    async def wait_for_silence(self, lost: asyncio.Event) -> bool:
        """Wait for the next check, or until the client is lost.

        True when nothing shows that the client lives, and a message to ourselves must show it.
        """
        self._settled_until_s = -math.inf
        try:
            async with asyncio.timeout(self._pause_s()) as self._next_look:
                await lost.wait()
        except TimeoutError:
            return not self.is_talking
        finally:
            self._next_look = None
        return False

    def note_heard(self) -> None:
        """Note that a message of a subscription came."""
        self.heard_at = asyncio.get_running_loop().time()
        self.put_off()

    def put_off(self) -> None:
        """Postpone the check, because something came: a busy client is not checked, since each
        check wakes the process up.
        """
        now_s = asyncio.get_running_loop().time()
        look = self._next_look
        if look is None or now_s < self._settled_until_s or look.expired():
            return
        self._settled_until_s = now_s + _SETTLED_S
        due_s = now_s + self._pause_s()
        if due_s > (look.when() or 0.0) + _ROUNDING_S:
            look.reschedule(due_s)

    @property
    def silent_s(self) -> float:
        """Seconds since anything came, whatever it was."""
        return min(self._mailbox.silent_s, asyncio.get_running_loop().time() - self.heard_at)

    @property
    def is_talking(self) -> bool:
        """Return whether recent traffic shows that the client lives: a message that it receives, an
        answer that it also sends. No check is needed then.
        """
        return self.silent_s < CANARY_EVERY_S - _TICK_S and self._mailbox.silent_s < 2 * CANARY_EVERY_S

    def _pause_s(self) -> float:
        """Return the time until the next check: the first tick by which the client would be silent
        for too long if nothing came until then.
        """
        now_s = asyncio.get_running_loop().time()
        rest_s = max(0.0, min(CANARY_EVERY_S - _TICK_S - self.silent_s, 2 * CANARY_EVERY_S - self._mailbox.silent_s))
        return rest_s + until_tick(now_s + rest_s, _TICK_S)
