"""Serves the asks at one subject: checks who asks, runs a bounded number of handlers, and answers
each request once.

A message that no asker of the catalogue can have sent is dropped without an answer. A request whose
asker has given up has no effect. One bad request never ends the service. Requests wait in a bounded
queue and are served asker by asker, so an asker that sends many requests delays only its own. When
the queue is full, the asker with the most waiting requests gets the error that the peer is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from topobus.bus.asks.ask_headers import (
    ANSWER_AT,
    CLOCK,
    DEADLINE,
    PING,
    SENT,
    STALE,
    TWIN,
    code_of,
    error_headers,
    moment_text,
    now_ms,
    read_number,
)
from topobus.bus.asks.fair_queue import Asker, FairQueue
from topobus.bus.asks.heavy_lane import HeavyLane, RunTimes, Workload
from topobus.bus.connection.connection import Connection, Headers
from topobus.bus.connection.subscriptions import Lasting
from topobus.bus.server_config.inboxes import answerer_of, askers_of, is_imported_reply, is_inbox_of
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.nouns import Ask
from topobus.formats.messages.releases import RELEASE
from topobus.process.logging import get_logger
from topobus.process.tracing import continued, injected
from topobus.values.errors import ContractError, InvariantError, PeerUnavailable, TopobusError

__all__ = ["Answerer", "report_twin"]

# Clocks of two nodes may differ by as much without a fresh request being taken for a stale one.
_SKEW_MS = 2000
# Weight of the requests that wait for a free place behind those being handled. Beyond it, the asker
# with the most waiting requests is refused at once.
_MAX_WAITING = 1024
# A request weighs one, and one more for each so many bytes: as many as
# may wait take 32 MiB at most.
_WEIGHT_BYTES = 32 * 1024
# An asker from another account that does not name the inbox at which it awaits the answer.
_NAMELESS = ("", "")


class Answerer:
    """Serves one subject with bounded concurrency."""

    def __init__(
        self,
        connection: Connection,
        ask: Ask[Any, Any],
        parts: dict[str, str],
        handler: Callable[[Any], Awaitable[Any]],
        concurrency: int,
        workload: Workload[Any, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._ask = ask
        self._span = f"answer {ask.name}"
        self.subject = ask.subject(**parts)
        self._askers = askers_of(ask)
        # A process that looks for a twin would answer here itself.
        self._twins = (answerer_of(ask, parts.get("device_class", "")),)
        self._handler = handler
        self._concurrency = concurrency
        self._workload = workload
        self._running: set[asyncio.Task[None]] = set()
        self._places_taken = 0
        """Of `concurrency`; an expensive request that waits for its turn has none."""
        self._waiting: FairQueue[tuple[Msg, float]] = FairQueue(_MAX_WAITING)
        self._heavy = HeavyLane(workload.at_once, workload.most_waiting) if workload is not None else None
        self.device_class = parts.get("device_class", "")
        """The class that is answered for; empty where the ask is of none."""
        self._run_times = RunTimes()
        self._heavy_times = RunTimes()
        self.lasting: Lasting | None = None

    def _count(self, outcome: str, elapsed_s: float) -> None:
        """Count a request that has its answer."""
        self._connection.metrics.answers_s.labels(self._ask.name, outcome).observe(elapsed_s)

    async def on_message(self, message: Msg) -> None:
        """Take a request. This runs in the client's own loop over the subscription and must not
        wait.
        """
        arrived = self._connection.clock.monotonic()
        headers = message.headers or {}
        twin = headers.get(TWIN)
        if (why := self._distrust(message, is_twin_question=twin is not None)) is not None:
            self._connection.metrics.strays.labels(self._ask.name, why).inc()
            self._connection.quiet.warning(
                "ask.dropped",
                f"{self.subject} {why}",
                noun=self._ask.name,
                why=why,
                subject=message.subject[:200],
                reply=message.reply[:200],
                next_step="the asker must connect under its own name and have a right to this subject; see "
                "docs/how-to/secure-nats.md",
            )
            return
        if PING in headers:
            await self._reply(
                message, b"", {PING: self._connection.instance, CLOCK: str(now_ms(self._connection.clock))}
            )
        elif twin is not None:
            report_twin(self._ask, twin)
            await self._reply(message, b"", {TWIN: self._connection.instance})
        elif self._places_taken < self._concurrency:
            self._connection.retirement.owe(message)
            self._start(message, arrived)
        else:
            self._connection.retirement.owe(message)
            for refused, _ in self._waiting.put(self._asker_of(message), _weight_of(message), (message, arrived)):
                await self._reply_busy(refused, self._run_times.pause_s(len(self._waiting), self._concurrency))
                self._connection.retirement.settle(refused)

    def _distrust(self, message: Msg, *, is_twin_question: bool) -> str | None:
        """Name what shows that a message is not a request from a permitted asker.

        None when nothing does. The server itself can deliver a message to any subject: a stored
        message keeps the subject at which it was stored, and a message of the server's own (an
        acknowledgement, an answer of JetStream, a heartbeat) has no inbox of an asker as its reply
        subject. So both subjects are checked before the message has any effect. Behind an account
        (`nats.zone`), the reply subject of a request from another account is one that the server
        made.
        """
        if message.subject != self.subject:
            return "subject"
        if is_inbox_of(self._twins if is_twin_question else self._askers, message.reply):
            return None
        # From another account: the server decides who may ask there, and only the server can make
        # such a reply subject. A twin is in our own account.
        is_imported = bool(self._connection.settings.zone) and is_imported_reply(message.reply)
        return None if is_imported and not is_twin_question else "reply"

    def _asker_of(self, message: Msg) -> Asker:
        """Name the asker: its principal, which the server's permissions prove, and its connection,
        which it chooses itself.
        """
        tokens = self._awaited_at(message).split(".")
        return (tokens[1], tokens[3]) if tokens[0] == "_INBOX" and len(tokens) > 3 else _NAMELESS

    async def _reply_busy(self, message: Msg, pause_s: float) -> None:
        """Refuse an asker that has no place, with the time to come again: by the ask's own answer
        where it has one, else by an error.
        """
        name = self._ask.name
        self._count("busy", 0.0)
        self._connection.quiet.warning(
            "ask.busy",
            self.subject,
            noun=name,
            asker=".".join(self._asker_of(message)),
            waiting=len(self._waiting) + (self._heavy.waiting if self._heavy is not None else 0),
            retry_after_s=pause_s,
            next_step="nothing to do when it passes; else find out which program asks so often",
        )
        if self._workload is not None:
            await self._reply(message, encode(self._workload.busy(pause_s)), {})
            return
        busy = PeerUnavailable(
            f"{name}: busy, too many requests wait already; ask again in {pause_s:g} s", retry_after_s=pause_s
        )
        await self._reply(message, b"", error_headers("busy", busy))

    def _start(self, message: Msg, arrived: float) -> None:
        self._places_taken += 1
        task = asyncio.create_task(self._serve(message, arrived), name=f"answer-{self._ask.name}")
        self._running.add(task)
        task.add_done_callback(lambda task: self._finished(task, message))

    def _finished(self, task: asyncio.Task[None], message: Msg) -> None:
        self._running.discard(task)
        self._connection.retirement.settle(message)

    def _free_place(self) -> None:
        """Give a place to the next request that waits for one."""
        self._places_taken -= 1
        waiting = self._waiting.take()
        if waiting is not None:
            self._start(*waiting)

    async def _serve(self, message: Msg, arrived: float) -> None:
        """Answer one request in a place of its own. An expensive one gives up the place, and waits
        for its turn.
        """
        if await self._is_given_up(message, arrived):
            self._free_place()
            return
        if self._heavy is None or not self._is_heavy(message):
            try:
                await self._answer(message, self._run_times)
            finally:
                self._free_place()
            return
        self._free_place()
        if not await self._heavy.enter(self._asker_of(message), _weight_of(message)):
            await self._reply_busy(message, self._heavy_times.pause_s(self._heavy.waiting, self._heavy.at_once))
            return
        try:
            if not await self._is_given_up(message, arrived):
                await self._answer(message, self._heavy_times)
        finally:
            self._heavy.leave()

    def _is_heavy(self, message: Msg) -> bool:
        """Return whether a request is expensive. A request that cannot be decoded is not: it is
        refused soon.
        """
        if self._workload is None:
            return False
        try:
            return self._workload.is_heavy(decode(message.data, self._ask.request, where=message.subject))
        except ContractError:
            return False

    async def _is_given_up(self, message: Msg, arrived: float) -> bool:
        """Return whether the asker no longer waits for the answer.

        It then gets an error, and the handler is not called.
        """
        too_late = self._too_late(message.headers or {}, arrived)
        if too_late is None:
            return False
        # The asker has given up, or its clock is behind ours. It does not expect an effect any
        # more.
        self._count("expired", self._connection.clock.monotonic() - arrived)
        asker = message.reply.split(".")[1]
        log_key = f"{self.subject} {asker}"
        self._connection.quiet.warning(
            "ask.stale", log_key, noun=self._ask.name, asker=asker, subject=self.subject, why=too_late
        )
        stale = error_headers(STALE, PeerUnavailable(too_late))
        await self._reply(message, b"", {**stale, CLOCK: str(now_ms(self._connection.clock))})
        return True

    async def _answer(self, message: Msg, times: RunTimes) -> None:
        started = self._connection.clock.monotonic()
        outcome = "answered"
        headers: Headers = {}
        data = b""
        try:
            with continued(message.headers, self._span):
                request = decode(message.data, self._ask.request, where=message.subject)
                data = encode(await self._handler(request))
        except TopobusError as err:
            outcome = code_of(err)
            headers = error_headers(outcome, err)
            log = get_logger()
            # Merged, not passed side by side: an error passed on from another peer has a fact
            # `code` of its own.
            fields = {**err.facts, "noun": self._ask.name, "code": outcome, "error": str(err)}
            if outcome == "contract":
                # A permitted asker can send as much of it as the bus carries.
                self._connection.quiet.warning("ask.refused", self.subject, **fields)
            else:
                (log.error if outcome == "internal" else log.warning)("ask.refused", **fields)
            if outcome == "contract":
                self._connection.metrics.rejects.labels(self._ask.name).inc()
            if outcome == "internal" and not self._connection.crash.done():
                # Our own promise is broken. The asker gets the error first. Then this process ends,
                # because it cannot trust its state.
                self._connection.crash.set_exception(err)
                self._connection.crash.exception()
        except Exception:  # noqa: BLE001
            # boundary: the message loop. One bad request must not end the service. The asker gets
            # an error, the log the reason.
            outcome = "internal"
            headers = error_headers(
                outcome, InvariantError(f"{self._ask.name} failed inside the peer; its log has the reason")
            )
            get_logger().exception("ask.failed", noun=self._ask.name, subject=message.subject)
        elapsed_s = self._connection.clock.monotonic() - started
        times.note(elapsed_s)
        self._count(outcome, elapsed_s)
        await self._reply(message, data, headers)

    def _too_late(self, headers: Headers, arrived: float) -> str | None:
        """Name the reason why the asker no longer waits for an answer.

        None when it does, as far as the clocks show.
        """
        deadline_ms = read_number(headers.get(DEADLINE))
        if deadline_ms is None:
            return None
        waited_ms = (self._connection.clock.monotonic() - arrived) * 1000
        if waited_ms > deadline_ms:
            return f"it waited {waited_ms / 1000:.1f} s here for its turn, and its asker {deadline_ms / 1000:g} s"
        sent_ms = read_number(headers.get(SENT))
        if sent_ms is None:
            return None
        received_ms = now_ms(self._connection.clock)
        if received_ms - sent_ms <= deadline_ms + _SKEW_MS:
            return None
        return (
            f"it was sent at {moment_text(sent_ms)} by the asker's clock and arrived at "
            f"{moment_text(received_ms)} by ours, {(received_ms - sent_ms) / 1000:.1f} s later,"
            f" and it waits {deadline_ms / 1000:g} s: the request is that old, or one of the clocks is wrong by as much"
        )

    async def _reply(self, message: Msg, data: bytes, headers: Headers) -> None:
        headers = {**headers, RELEASE: self._connection.release}
        try:
            # Our own headers only: nats-py's respond() would send the asker's back.
            await self._connection.answer(message, data, headers=injected(headers) or None)
        except ContractError as err:
            get_logger().error("ask.answer-too-large", noun=self._ask.name, error=str(err))
            if data:
                await self._reply(message, b"", error_headers("contract", err))
        except (PeerUnavailable, nats.errors.Error) as err:
            get_logger().warning("ask.reply-lost", noun=self._ask.name, error=str(err))

    def _awaited_at(self, message: Msg) -> str:
        """Return the inbox at which the asker awaits the answer."""
        awaited_at = (message.headers or {}).get(ANSWER_AT, "")
        return (
            awaited_at if is_imported_reply(message.reply) and is_inbox_of(self._askers, awaited_at) else message.reply
        )

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, then finish what has arrived, within the time."""
        if self.lasting is not None:
            await self._connection.drain(self.lasting, timeout_s=timeout_s / 2)
        try:
            async with asyncio.timeout(timeout_s / 2):
                while self._running:
                    await asyncio.wait(set(self._running))
        except TimeoutError:
            for task in self._running:
                task.cancel()


def _weight_of(message: Msg) -> int:
    return 1 + len(message.data) // _WEIGHT_BYTES


def report_twin(ask: Ask[Any, Any], instance: str) -> None:
    """Log that another instance serves the same subject: both stay safe, and the operator should
    know.
    """
    get_logger().warning(
        "twin.found",
        noun=ask.name,
        twin=instance[:100],
        next_step=f"run one {'/'.join(ask.writer)} service a node; while two run, both answer and nothing is done twice",  # noqa: E501
    )
