"""Awaits answers: one subscription for each client, one subject for each answer.

All waiters fail at once when the client is lost. The subject of an answer names its permitted
sender: `_INBOX.<we>.<answerer>.<random>.<random>` (`bus.server_config.inboxes`). All subjects of a
client differ only in the third and the last token, so one subscription with two wildcards receives
them all. A message at any other subject than the awaited one is ignored, whatever its tokens: it
may come from another principal's branch, or be a stored message that the server was made to deliver
here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from topobus.bus.failures import ConnectionLost
from topobus.bus.server_config.inboxes import inbox_branch

__all__ = ["Expectation", "ReplyInbox", "is_nobody", "new_token"]


def new_token() -> str:
    """Return a token that cannot be guessed: 88 random bits."""
    return secrets.token_hex(11)


class Expectation:
    """One answer that is awaited at `subject`."""

    def __init__(self, subject: str, answer: asyncio.Future[Msg]) -> None:
        self.subject = subject
        self.answer = answer
        self.accepts: Callable[[Msg], bool] = _any
        """Messages for which it returns False are dropped."""

    def take(self, message: Msg) -> None:
        """Check a message at our subject: the first that is accepted is the answer."""
        if not self.answer.done() and self.accepts(message):
            self.answer.set_result(message)


def is_nobody(message: Msg) -> bool:
    """Return whether this is the server's message that a subject has no listener."""
    return (message.headers or {}).get("Status") == "503" and not message.data


def _any(_: Msg) -> bool:
    return True


class ReplyInbox:
    """Matches answers with their waiters."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: dict[str, Expectation] = {}
        self._random = new_token()
        self._answered_at = -math.inf

    @property
    def silent_s(self) -> float:
        """Seconds since an awaited answer came."""
        return asyncio.get_running_loop().time() - self._answered_at

    @property
    def pattern(self) -> str:
        """The subject to subscribe to: it covers all subjects that `expect` gives until `renew`."""
        return f"{inbox_branch(self._name, '*')}.{self._random}.*"

    def renew(self) -> None:
        """Take another subject, so that messages to the lost client can no longer come in."""
        self._random = new_token()

    @contextmanager
    def expect(self, answerer: str) -> Iterator[Expectation]:
        """Await one answer of a peer (by connection name). Leaving the block gives up."""
        subject = f"{inbox_branch(self._name, answerer)}.{self._random}.{new_token()}"
        expected = Expectation(subject, asyncio.get_running_loop().create_future())
        self._waiting[subject] = expected
        try:
            yield expected
        finally:
            self._waiting.pop(subject, None)
            if expected.answer.done() and not expected.answer.cancelled():
                # Read even when no caller waits any more. Otherwise asyncio complains of an error
                # that was never retrieved.
                expected.answer.exception()

    def take(self, message: Msg) -> None:
        """Pass an answer to its waiter. An answer without a waiter is dropped."""
        expected = self._waiting.get(message.subject)
        if expected is not None:
            self._answered_at = asyncio.get_running_loop().time()
            expected.take(message)

    def fail_all(self) -> None:
        """Fail all waiters, because the connection is gone."""
        for expected in list(self._waiting.values()):
            if not expected.answer.done():
                expected.answer.set_exception(ConnectionLost("the connection to NATS went away before the answer came"))
