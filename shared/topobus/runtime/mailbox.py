"""Answers that are awaited: one inbox a client, one token an answer, and everybody told at once when the client is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from topobus.runtime.failures import ConnectionLost

__all__ = ["Mailbox", "new_inbox"]


def new_inbox(prefix: str) -> str:
    """Give a fresh subject below the prefix; 88 random bits, so that nobody can guess it and answer in another's place."""
    return f"{prefix}.{secrets.token_hex(11)}"


class Mailbox:
    """Matches what arrives at `subject` and below with who waits for it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self.subject = new_inbox(prefix)

    def renew(self) -> None:
        """Take another subject: what the lost client was to receive can no longer come in."""
        self.subject = new_inbox(self._prefix)

    @contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[Msg]]]:
        """Give a subject to answer at, and the answer to come; giving up is leaving the block."""
        token = secrets.token_hex(11)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            yield f"{self.subject}.{token}", future
        finally:
            self._waiting.pop(token, None)
            if future.done() and not future.cancelled():
                # Looked at, even when nobody waits any more: otherwise asyncio complains of an error that nobody took.
                future.exception()

    async def on_message(self, message: Msg) -> None:
        """Hand an answer to who waits for it; a late one is dropped."""
        future = self._waiting.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    def fail_all(self) -> None:
        """Tell everybody that the connection is gone."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ConnectionLost("the connection to NATS went away before the answer came"))
