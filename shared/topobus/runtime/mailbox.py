"""Answers that are awaited: one subscription a client, one subject an answer, and everybody told at once when the client is lost.

The subject of an answer names who may give it: `_INBOX.<we>.<who answers>.<random>.<random>` (`contracts.inboxes`). All of one client's differ in the third
and the last token only, so one subscription with two wildcards hears them all. What arrives at another subject than the awaited one is no answer, whatever
its tokens: neither another's branch, nor a stored message that the server was made to deliver to us.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from topobus.contracts.inboxes import inbox_branch
from topobus.runtime.failures import ConnectionLost

__all__ = ["Expectation", "Mailbox", "new_token"]


def new_token() -> str:
    """Give a token that nobody can guess: 88 random bits."""
    return secrets.token_hex(11)


class Expectation:
    """One answer that is awaited at `subject`."""

    def __init__(self, subject: str, answer: asyncio.Future[Msg]) -> None:
        self.subject = subject
        self.answer = answer


class Mailbox:
    """Matches what arrives with who waits for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: dict[str, Expectation] = {}
        self._random = new_token()

    @property
    def pattern(self) -> str:
        """What to subscribe to: all subjects that `expect` gives until `renew`."""
        return f"{inbox_branch(self._name, '*')}.{self._random}.*"

    def renew(self) -> None:
        """Take another subject: what the lost client was to receive can no longer come in."""
        self._random = new_token()

    @contextmanager
    def expect(self, answerer: str) -> Iterator[Expectation]:
        """Await one answer of somebody (by connection name); giving up is leaving the block."""
        subject = f"{inbox_branch(self._name, answerer)}.{self._random}.{new_token()}"
        expected = Expectation(subject, asyncio.get_running_loop().create_future())
        self._waiting[subject] = expected
        try:
            yield expected
        finally:
            self._waiting.pop(subject, None)
            if expected.answer.done() and not expected.answer.cancelled():
                # Looked at, even when nobody waits any more: otherwise asyncio complains of an error that nobody took.
                expected.answer.exception()

    async def on_message(self, message: Msg) -> None:
        """Hand an answer to who waits for it; a late one is dropped."""
        expected = self._waiting.get(message.subject)
        if expected is not None and not expected.answer.done():
            expected.answer.set_result(message)

    def fail_all(self) -> None:
        """Tell everybody that the connection is gone."""
        for expected in list(self._waiting.values()):
            if not expected.answer.done():
                expected.answer.set_exception(ConnectionLost("the connection to NATS went away before the answer came"))
