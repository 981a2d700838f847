"""Request and answer on the bus, with a deadline. An error travels as a code and a sentence, never as a traceback."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote

import nats.errors
from nats.aio.msg import Msg

from topobus.contracts.catalogue import Ask
from topobus.contracts.codec import decode, encode
from topobus.contracts.inboxes import answerer_of, askers_of, is_inbox_of
from topobus.domain.errors import ConfigError, ContractError, HardwareError, InvariantError, PeerUnavailable, TopobusError
from topobus.domain.silence import Answered, Silent, SilentBecause
from topobus.domain.timestamps import rfc3339
from topobus.runtime.connection import Connection, Headers, Lasting
from topobus.runtime.failures import ConnectionLost, NobodyThere
from topobus.runtime.logging import get_logger
from topobus.runtime.numbers import read_count
from topobus.runtime.proof import PROOF, is_proven, prove
from topobus.runtime.reply_inbox import Expectation
from topobus.runtime.tracing import continued, injected

__all__ = ["Asks", "Held"]

Q = TypeVar("Q")
R = TypeVar("R")

ERROR = "Topobus-Error"
STALE = "stale"
"""The error code of a request that was too old to be served."""
MESSAGE = "Topobus-Error-Message"
RETRY_AFTER = "Topobus-Retry-After-Ms"
DEADLINE = "Topobus-Deadline-Ms"
"""How long the asker still waits, from the moment of sending."""
SENT = "Topobus-Sent-Ms"
"""When it was sent, by the asker's clock, in milliseconds since 1970."""
CLOCK = "Topobus-Clock-Ms"
"""The answerer's clock, in milliseconds since 1970: with a sign of life, and where a request was too old by it."""
PING = "Topobus-Ping"
"""Marks the question "does somebody answer here?"; the value is the asker, and the answer's value the instance."""
TWIN = "Topobus-Twin"
"""Marks the question "does somebody answer here already?" and its answer; the value is the instance."""

# Clocks of two nodes may differ by as much without a fresh request being taken for a stale one.
_SKEW_MS = 2000
# How long to wait for a twin's word; one that hangs is not worth more of a start.
_TWIN_LIMIT_S = 0.3
# Requests that wait for a free place behind those being handled; beyond that the asker is told at once.
_MAX_WAITING = 1024
_SAFE = " !#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_SAYING = (ERROR, MESSAGE, RETRY_AFTER, PING, TWIN, CLOCK)
_CODES: tuple[tuple[type[TopobusError], str], ...] = (
    (ContractError, "contract"),
    (PeerUnavailable, "unavailable"),
    (HardwareError, "hardware"),
    (ConfigError, "config"),
    (InvariantError, "internal"),
)


class Held(Generic[R]):
    """An answer whose asker goes on listening for another one that says something else."""

    def __init__(self, reply: R, expected: Expectation) -> None:
        self.reply = reply
        self._expected = expected

    @property
    def has_rival(self) -> bool:
        """Say whether another answer has come, and it is not the same: then nobody knows which is the peer's own."""
        return self._expected.has_rival


class Asks:
    """Asks peers, and answers them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Of a class that this process answers itself nobody else needs the key.
        self._process_key = secrets.token_bytes(32)
        self._own_classes: set[str] = set()
        self._proving: Mapping[str, bytes] = {}
        self._demanded: Mapping[str, bytes] = {}
        self._answerers: list[_Answerer] = []
        self._has_twin = False

    def use_keys(self, *, proving: Mapping[str, bytes], demanded: Mapping[str, bytes]) -> None:
        """Prove answers of these classes, and take answers of those classes with their proof only."""
        self._proving, self._demanded = dict(proving), dict(demanded)

    async def ask(self, ask: Ask[Q, R], request: Q, timeout_s: float | None, parts: dict[str, str]) -> R:
        """Ask, and wait for the one answer."""
        return (await self.ask_held(ask, request, timeout_s, 0.0, parts)).reply

    async def ask_held(self, ask: Ask[Q, R], request: Q, timeout_s: float | None, listen_s: float, parts: dict[str, str]) -> Held[R]:
        """Ask, and wait for the first answer; for `listen_s` more a second one is noticed that says something else."""
        self._check_asker(ask)
        subject = ask.subject(**parts)
        limit_s = ask.timeout_s if timeout_s is None else timeout_s
        headers = injected({DEADLINE: str(max(1, round(limit_s * 1000))), SENT: str(_now_ms(self._connection))})
        started = self._connection.clock.monotonic()
        outcome = "failed"
        expectations: list[Expectation] = []

        def expect(expected: Expectation) -> None:
            self._expect(ask, parts, expected)
            expectations.append(expected)

        try:
            answer = await self._connection.request(
                subject,
                encode(request),
                headers=headers,
                timeout_s=limit_s,
                answerer=_answerer(ask, parts),
                prepare=expect,
                linger_s=listen_s,
            )
            self._check_clocks(ask, parts, answer.headers or {}, started)
            _raise_error(ask, subject, answer.headers or {})
            reply = decode(answer.data, ask.reply, where=f"answer from {subject}")
            outcome = "answered"
            return Held(reply, expectations[0])
        except TimeoutError as err:
            outcome = "timeout"
            raise PeerUnavailable(f"no answer at {subject} within {limit_s:g} s", subject=subject, timeout_s=limit_s) from err
        except NobodyThere as err:
            outcome = "nobody"
            raise PeerUnavailable(f"nobody answers {ask.name} at {subject}", next_step=f"is {ask.writer[0]} running there?") from err
        except ConnectionLost:
            outcome = "lost"
            raise
        except ContractError:
            outcome = "contract"
            raise
        finally:
            self._connection.metrics.asks_s.labels(ask.name, outcome).observe(self._connection.clock.monotonic() - started)

    async def is_answered(self, ask: Ask[Any, Any], timeout_s: float, parts: dict[str, str]) -> Answered | Silent:
        """Ask for a sign of life, which the peer's loop over the subscription gives: no handler is run."""
        self._check_asker(ask)
        started = self._connection.clock.monotonic()
        try:
            answer = await self._connection.request(
                ask.subject(**parts),
                headers={PING: self._connection.instance},
                timeout_s=timeout_s,
                answerer=_answerer(ask, parts),
                prepare=lambda expected: self._expect(ask, parts, expected),
            )
        except NobodyThere:
            return Silent(because=SilentBecause.NOBODY)
        except TimeoutError:
            return Silent(because=SilentBecause.TIMEOUT)
        except PeerUnavailable:
            return Silent(because=SilentBecause.NO_BUS)
        # An error is a sign of life, too.
        headers = answer.headers or {}
        return Answered(instance=headers.get(PING, ""), clock_ahead_s=self._clock_ahead_s(headers, started) or 0.0)

    async def answer(self, ask: Ask[Q, R], handler: Callable[[Q], Awaitable[R]], concurrency: int, parts: dict[str, str]) -> None:
        """Answer from now on."""
        if not ask.queue_group:
            await self._look_for_twin(ask, parts)
        device_class = parts.get("device_class", "")
        answerer = _Answerer(self._connection, ask, parts, handler, concurrency)
        if device_class:
            answerer.key = self._proving.get(device_class)
            if answerer.key is None and device_class not in self._demanded:
                answerer.key = self._process_key
                self._own_classes.add(device_class)
        self._answerers.append(answerer)
        answerer.lasting = await self._connection.subscribe(answerer.subject, answerer.on_message, queue=ask.queue_group)
        if self._connection.is_connected:
            # Registered means that the server knows: the next asker on another connection is heard.
            try:
                await self._connection.barrier()
            except (PeerUnavailable, TimeoutError):
                # The connection is being replaced: the new client listens before it is called connected.
                pass

    def _expect(self, ask: Ask[Any, Any], parts: dict[str, str], expected: Expectation) -> None:
        """Say what an answer must prove, and what becomes of a second one."""
        device_class = parts.get("device_class", "")
        key = self._demanded.get(device_class) or (self._process_key if device_class in self._own_classes else None)
        subject = ask.subject(**parts)

        def is_genuine(message: Msg) -> bool:
            headers = message.headers or {}
            if key is None or is_proven(key, headers.get(PROOF, ""), message.subject, ask.name, message.data, _said(headers)):
                return True
            self._connection.metrics.unproven.labels(ask.name).inc()
            self._connection.quiet.warning(
                "answer.unproven",
                subject,
                noun=ask.name,
                subject=subject,
                has_proof=PROOF in headers,
                next_step=f"somebody answers in the place of the {device_class} service, or that one has another answers.key_dir than we",
            )
            return False

        def on_rival() -> None:
            self._connection.metrics.rivals.labels(ask.name).inc()
            get_logger().error(
                "answer.contradicted",
                noun=ask.name,
                subject=subject,
                next_step="two answer there and say different things: find who else is connected to NATS, and see docs/how-to/secure-nats.md",
            )

        if key is not None:
            expected.is_genuine = is_genuine
        expected.fingerprint = _fingerprint
        expected.on_rival = on_rival

    def _clock_ahead_s(self, headers: Headers, started: float) -> float | None:
        """Compare the answerer's clock with ours; None when it does not say its own. It read it halfway between question and answer."""
        clock_ms = _number(headers.get(CLOCK))
        if clock_ms is None:
            return None
        elapsed_s = self._connection.clock.monotonic() - started
        return round((clock_ms - _now_ms(self._connection)) / 1000 + elapsed_s / 2, 3)

    def _check_clocks(self, ask: Ask[Any, Any], parts: dict[str, str], headers: Headers, started: float) -> None:
        """Say whose clock is wrong when a request that we wait for still was too old for the peer."""
        if headers.get(ERROR) != STALE:
            return
        ahead_s = self._clock_ahead_s(headers, started) or 0.0
        where = parts.get("node", ask.writer[0])
        raise PeerUnavailable(
            f"{ask.name}: clock of {where} is {ahead_s:.1f} s ahead of that of {self._connection.name} here: it takes each request for one given up",
            next_step="set both clocks by the same time service (chrony, ntp); `topobus doctor` shows each node's",
            code=STALE,
            clock_ahead_s=ahead_s,
        )

    def _check_asker(self, ask: Ask[Any, Any]) -> None:
        """Refuse here what the peer would drop without a word: it serves only those that the catalogue names."""
        askers = askers_of(ask)
        if self._connection.name not in askers:
            raise ContractError(
                f"{self._connection.name} may not ask {ask.name}; who may: {', '.join(askers)}",
                next_step="connect under one of these names, or add the reader to the catalogue",
            )

    async def _look_for_twin(self, ask: Ask[Any, Any], parts: dict[str, str]) -> None:
        """Say when another instance answers where only one should: both stay safe, and the operator wants to know."""
        if self._has_twin or not self._connection.is_connected:
            return
        question = {TWIN: self._connection.instance}
        try:
            answer = await self._connection.request(
                ask.subject(**parts), headers=question, timeout_s=_TWIN_LIMIT_S, answerer=_answerer(ask, parts)
            )
        except (PeerUnavailable, TimeoutError):
            return
        self._has_twin = True
        _tell_twin(ask, (answer.headers or {}).get(TWIN, "unknown"))

    async def drain(self, *, timeout_s: float) -> None:
        """Stop listening, finish what has arrived."""
        if self._answerers:
            await asyncio.gather(*(answerer.drain(timeout_s) for answerer in self._answerers))
        self._answerers.clear()


class _Answerer:
    """Serves one subject with bounded concurrency."""

    def __init__(
        self, connection: Connection, ask: Ask[Any, Any], parts: dict[str, str], handler: Callable[[Any], Awaitable[Any]], concurrency: int
    ) -> None:
        self._connection = connection
        self._ask = ask
        self.subject = ask.subject(**parts)
        self._askers = askers_of(ask)
        # Who looks for a twin would answer here itself.
        self._twins = (_answerer(ask, parts),)
        self._handler = handler
        self._concurrency = concurrency
        self._running: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Msg, float]] = deque()
        self.lasting: Lasting | None = None
        self.key: bytes | None = None
        """Proves that the answers are ours."""

    async def on_message(self, message: Msg) -> None:
        """Take a message in at once: this runs in the client's own loop over the subscription and must not wait."""
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
                next_step="whoever asks must connect under its own name, and with a right to this subject; see docs/how-to/secure-nats.md",
            )
        elif PING in headers:
            await self._reply(message, b"", {PING: self._connection.instance, CLOCK: str(_now_ms(self._connection))})
        elif twin is not None:
            _tell_twin(self._ask, twin)
            await self._reply(message, b"", {TWIN: self._connection.instance})
        elif len(self._running) < self._concurrency:
            self._start(message, arrived)
        elif len(self._waiting) < _MAX_WAITING:
            self._waiting.append((message, arrived))
        else:
            busy = PeerUnavailable(f"{self._ask.name}: too many requests wait already ({_MAX_WAITING})", retry_after_s=1.0)
            await self._reply(message, b"", _error_headers("busy", busy))

    def _distrust(self, message: Msg, *, is_twin_question: bool) -> str | None:
        """Say what shows that a message is no request of somebody who may ask; None when nothing does.

        The server itself delivers to any subject, whoever told it so: a stored message keeps the subject at which it was stored, and what the server says
        of its own (an acknowledgement, an answer of JetStream, a heartbeat) has no inbox of an asker as its reply subject. So both are looked at, before
        the message has any effect.
        """
        if message.subject != self.subject:
            return "subject"
        if not is_inbox_of(self._twins if is_twin_question else self._askers, message.reply):
            return "reply"
        return None

    def _start(self, message: Msg, arrived: float) -> None:
        task = asyncio.create_task(self._serve(message, arrived), name=f"answer-{self._ask.name}")
        self._running.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._waiting and len(self._running) < self._concurrency:
            self._start(*self._waiting.popleft())

    async def _serve(self, message: Msg, arrived: float) -> None:
        started = self._connection.clock.monotonic()
        outcome = "answered"
        headers: Headers = {}
        data = b""
        too_late = self._too_late(message.headers or {}, arrived)
        if too_late is not None:
            # Whoever asked has given up, or its clock is behind ours: an effect now would surprise everybody.
            self._connection.metrics.answers_s.labels(self._ask.name, "expired").observe(started - arrived)
            asker = message.reply.split(".")[1]
            log_key = f"{self.subject} {asker}"
            self._connection.quiet.warning("ask.stale", log_key, noun=self._ask.name, asker=asker, subject=self.subject, why=too_late)
            stale = _error_headers(STALE, PeerUnavailable(too_late))
            await self._reply(message, b"", {**stale, CLOCK: str(_now_ms(self._connection))})
            return
        try:
            with continued(message.headers):
                request = decode(message.data, self._ask.request, where=message.subject)
                data = encode(await self._handler(request))
        except TopobusError as err:
            outcome = next(code for kind, code in _CODES if isinstance(err, kind))
            headers = _error_headers(outcome, err)
            log = get_logger()
            # Merged, not passed side by side: an error handed on from another peer has a fact `code` of its own.
            fields = {**err.facts, "noun": self._ask.name, "code": outcome, "error": str(err)}
            if outcome == "contract":
                # Anybody who may ask can send as much of it as the bus carries.
                self._connection.quiet.warning("ask.refused", self.subject, **fields)
            else:
                (log.error if outcome == "internal" else log.warning)("ask.refused", **fields)
            if outcome == "contract":
                self._connection.metrics.rejects.labels(self._ask.name).inc()
            if outcome == "internal" and not self._connection.crash.done():
                # Our own promise is broken: the asker learns it, and then this process ends rather than go on with a state that it cannot trust.
                self._connection.crash.set_exception(err)
                self._connection.crash.exception()
        except Exception:  # noqa: BLE001
            # boundary: the message loop. One bad request must not end the service; the asker learns that it failed, the log learns why.
            outcome = "internal"
            headers = _error_headers(outcome, InvariantError(f"{self._ask.name} failed inside the peer; its log says why"))
            get_logger().exception("ask.failed", noun=self._ask.name, subject=message.subject)
        self._connection.metrics.answers_s.labels(self._ask.name, outcome).observe(self._connection.clock.monotonic() - started)
        await self._reply(message, data, headers)

    def _too_late(self, headers: Headers, arrived: float) -> str | None:
        """Say why nobody waits for an answer any more; None: somebody does, as far as clocks tell."""
        deadline_ms = _number(headers.get(DEADLINE))
        if deadline_ms is None:
            return None
        waited_ms = (self._connection.clock.monotonic() - arrived) * 1000
        if waited_ms > deadline_ms:
            return f"it waited {waited_ms / 1000:.1f} s here for its turn, and its asker {deadline_ms / 1000:g} s"
        sent_ms = _number(headers.get(SENT))
        if sent_ms is None:
            return None
        now_ms = _now_ms(self._connection)
        if now_ms - sent_ms <= deadline_ms + _SKEW_MS:
            return None
        return (
            f"it was sent at {_moment(sent_ms)} by the asker's clock and ours says {_moment(now_ms)}, {(now_ms - sent_ms) / 1000:.1f} s later,"
            f" and it waits {deadline_ms / 1000:g} s: the request is that old, or one of the clocks is wrong by as much"
        )

    async def _reply(self, message: Msg, data: bytes, headers: Headers) -> None:
        if self.key is not None:
            headers = {**headers, PROOF: prove(self.key, message.reply, self._ask.name, data, headers)}
        try:
            # Our own headers only: nats-py's respond() would send the asker's back.
            await self._connection.publish(message.reply, data, headers=injected(headers) or None)
        except ContractError as err:
            get_logger().error("ask.answer-too-large", noun=self._ask.name, error=str(err))
            if data:
                await self._reply(message, b"", _error_headers("contract", err))
        except (PeerUnavailable, nats.errors.Error) as err:
            get_logger().warning("ask.reply-lost", noun=self._ask.name, error=str(err))

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


def _answerer(ask: Ask[Any, Any], parts: dict[str, str]) -> str:
    return answerer_of(ask, parts.get("device_class", ""))


def _tell_twin(ask: Ask[Any, Any], instance: str) -> None:
    get_logger().warning(
        "twin.found",
        noun=ask.name,
        twin=instance[:100],
        next_step=f"run one {'/'.join(ask.writer)} service a node; while two run, both answer and nothing is done twice",
    )


def _raise_error(ask: Ask[Any, Any], subject: str, headers: Headers) -> None:
    code = headers.get(ERROR)
    if code is None:
        return
    text = f"{ask.name} at {subject}: {unquote(headers.get(MESSAGE, '')) or code}"
    if code in ("contract", "config"):
        raise ContractError(text, code=code)
    if code == "hardware":
        raise HardwareError(text, code=code)
    raise PeerUnavailable(text, retry_after_s=(_number(headers.get(RETRY_AFTER)) or 1000) / 1000, code=code)


def _error_headers(code: str, err: TopobusError) -> Headers:
    headers = {ERROR: code, MESSAGE: quote(str(err)[:2000].strip(), safe=_SAFE)}
    if isinstance(err, PeerUnavailable):
        headers[RETRY_AFTER] = str(round(err.retry_after_s * 1000))
    return headers


def _said(headers: Headers) -> Headers:
    """The headers by which an answer says something: what a proof covers, besides the trace context and the proof itself."""
    return {name: headers[name] for name in _SAYING if name in headers}


def _fingerprint(message: Msg) -> bytes:
    """Give what must be the same in two answers: the body, and which error it is."""
    headers = message.headers or {}
    return hashlib.sha256(message.data + b"\0" + headers.get(ERROR, "").encode() + b"\0" + headers.get(MESSAGE, "").encode()).digest()


def _number(text: str | None) -> int | None:
    """Read a header's number; None when it is left out or is none: then it says nothing."""
    try:
        return read_count(text) if text is not None else None
    except ContractError:
        return None


def _moment(milliseconds: int) -> str:
    """Write a clock's reading; one that no calendar has stays a number."""
    try:
        return rfc3339(datetime.fromtimestamp(milliseconds / 1000, UTC))
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def _now_ms(connection: Connection) -> int:
    return round(connection.clock.now().timestamp() * 1000)
