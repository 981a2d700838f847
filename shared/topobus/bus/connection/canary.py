"""When a connection asks itself whether its client lives: only when what comes anyway does not show
it.

Flows in: the moments at which messages and answers come. Flows out: the moment to look, put
off by all that comes, so that a process that hears enough is never woken for it. Any message
shows that we hear; only an answer shows that we are heard. What is asked, and what follows
from silence, is the connection's.
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
# Looks come at whole seconds, when the process's other loops wake up, too; so the silence before a
# look is up to a second shorter than the period.
_TICK_S = 1.0
_ROUNDING_S = 1e-3


class Canary:
    """The looks at one connection's silence."""

    def __init__(self, mailbox: ReplyInbox) -> None:
        self._mailbox = mailbox
        self.heard_at = -math.inf
        """When the newest message of a subscription came, by the loop's clock."""
        self._next_look: asyncio.Timeout | None = None

    async def wait_for_silence(self, lost: asyncio.Event) -> bool:
        """Wait for the next look, or until the client is lost.

        True when nothing shows that it lives, and it should be asked.
        """
        try:
            async with asyncio.timeout(self._pause_s()) as self._next_look:
                await lost.wait()
        except TimeoutError:
            return not self.is_talking
        finally:
            self._next_look = None
        return False

    def note_heard(self) -> None:
        """Take in that a message of a subscription came."""
        self.heard_at = asyncio.get_running_loop().time()
        self.put_off()

    def put_off(self) -> None:
        """Look later, for something came: a client that talks all the time is not looked at, which
        would wake the process up.
        """
        now_s = asyncio.get_running_loop().time()
        look = self._next_look
        if look is None or look.expired():
            return
        due_s = now_s + self._pause_s()
        if due_s > (look.when() or 0.0) + _ROUNDING_S:
            look.reschedule(due_s)

    @property
    def silent_s(self) -> float:
        """Seconds since anything came, whatever it was."""
        return min(self._mailbox.silent_s, asyncio.get_running_loop().time() - self.heard_at)

    @property
    def is_talking(self) -> bool:
        """Say whether what came lately shows that the client lives: any message that we hear, an
        answer that we are heard. Then there is no need to ask ourselves.
        """
        return self.silent_s < CANARY_EVERY_S - _TICK_S and self._mailbox.silent_s < 2 * CANARY_EVERY_S

    def _pause_s(self) -> float:
        """Say when to look next: at the first tick by which the client would be silent for too long
        if nothing came until then.
        """
        now_s = asyncio.get_running_loop().time()
        rest_s = max(0.0, min(CANARY_EVERY_S - _TICK_S - self.silent_s, 2 * CANARY_EVERY_S - self._mailbox.silent_s))
        return rest_s + until_tick(now_s + rest_s, _TICK_S)
