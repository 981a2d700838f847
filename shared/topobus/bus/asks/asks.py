"""Asks peers on the bus, with a deadline, and offers answers to them.

An ask returns one reply, or raises an error that shows whether the peer may have done something. An
answer counts only at the inbox of the answerer that the catalogue names, and the first one there
counts. `topobus.bus.asks.answerer` serves what is answered here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from topobus.bus.asks.answerer import Answerer, report_twin
from topobus.bus.asks.ask_headers import (
    ANSWER_AT,
    CLOCK,
    DEADLINE,
    ERROR,
    PING,
    SENT,
    STALE,
    TWIN,
    now_ms,
    raise_error,
    read_number,
)
from topobus.bus.asks.heavy_lane import Workload
from topobus.bus.connection.connection import Connection, Headers
from topobus.bus.connection.reply_inbox import Expectation
from topobus.bus.failures import ConnectionLost, NobodyThere
from topobus.bus.server_config.inboxes import answerer_of, askers_of
from topobus.engine.health.silence import Answered, Silent, SilentBecause
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.nouns import CLUSTER, Ask
from topobus.formats.messages.releases import RELEASE, shown_release
from topobus.process.tracing import called, injected
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["Asks"]

Q = TypeVar("Q")
R = TypeVar("R")

# How long to wait for a twin's answer. A twin that hangs is not worth a longer delay at start.
_TWIN_LIMIT_S = 0.3


class Asks:
    """Asks peers, and answers them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answerers: list[Answerer] = []
        self._has_twin = False

    async def ask(self, ask: Ask[Q, R], request: Q, *, timeout_s: float | None = None, **parts: str) -> R:
        """Ask a peer, and wait for the first answer.

        Errors: PeerUnavailable when there is no peer, none answers in time or the peer failed;
        ContractError when one cannot read the other; HardwareError when the peer's hardware failed.
        """
        with called(f"ask {ask.name}", **parts):
            return await self._ask(ask, request, timeout_s, parts)

    async def _ask(self, ask: Ask[Q, R], request: Q, timeout_s: float | None, parts: dict[str, str]) -> R:
        self._check_asker(ask)
        subject = ask.subject(**parts)
        limit_s = ask.timeout_s if timeout_s is None else timeout_s
        headers = injected(
            {
                DEADLINE: str(max(1, round(limit_s * 1000))),
                SENT: str(now_ms(self._connection.clock)),
                RELEASE: self._connection.release,
            }
        )
        started = self._connection.clock.monotonic()
        outcome = "failed"
        try:
            answer = await self._connection.request(
                subject,
                encode(request),
                headers=headers,
                timeout_s=limit_s,
                answerer=answerer_of(ask, parts.get("device_class", "")),
                prepare=lambda expected: headers.update(self._awaited_at(expected)),
            )
            self._check_clocks(ask, parts, answer.headers or {}, started)
            raise_error(ask, subject, answer.headers or {})
            reply = decode(answer.data, ask.reply, where=f"answer from {subject}")
            outcome = "answered"
            return reply
        except TimeoutError as err:
            outcome = "timeout"
            raise PeerUnavailable(
                f"no answer from {_peer_of(ask, parts)} within {limit_s:g} s ({ask.name} at {subject})",
                subject=subject,
                timeout_s=limit_s,
            ) from err
        except NobodyThere as err:
            outcome = "nobody"
            service = parts.get("device_class") or ask.writer[0]
            raise NobodyThere(
                f"no service answers {ask.name} at {subject}", next_step=f"is {service} running there?"
            ) from err
        except ConnectionLost:
            outcome = "lost"
            raise
        except ContractError:
            outcome = "contract"
            raise
        finally:
            self._connection.metrics.asks_s.labels(ask.name, outcome).observe(
                self._connection.clock.monotonic() - started
            )

    async def is_answered(self, ask: Ask[Any, Any], *, timeout_s: float, **parts: str) -> Answered | Silent:
        """Ask for a sign of life, which the peer's loop over the subscription gives: no handler is
        run. Every permitted asker may call this.

        Raises nothing for a peer or a server that is away.
        """
        self._check_asker(ask)
        started = self._connection.clock.monotonic()
        question = {PING: self._connection.instance, RELEASE: self._connection.release}
        subject = ask.subject(**parts)
        try:
            answer = await self._connection.request(
                subject,
                headers=question,
                timeout_s=timeout_s,
                answerer=answerer_of(ask, parts.get("device_class", "")),
                prepare=lambda expected: question.update(self._awaited_at(expected)),
            )
        except NobodyThere:
            return Silent(because=SilentBecause.NOBODY)
        except TimeoutError:
            return Silent(because=SilentBecause.TIMEOUT)
        except PeerUnavailable:
            return Silent(because=SilentBecause.NO_BUS)
        # An error is a sign of life as well.
        headers = answer.headers or {}
        return Answered(
            instance=headers.get(PING, ""),
            clock_ahead_s=self._clock_ahead_s(headers, started) or 0.0,
            release=shown_release(headers.get(RELEASE, "")),
        )

    async def answer(
        self,
        ask: Ask[Q, R],
        handler: Callable[[Q], Awaitable[R]],
        *,
        concurrency: int = 64,
        workload: Workload[Q, R] | None = None,
        **parts: str,
    ) -> None:
        """Answer an ask from now on, up to `concurrency` at a time.

        A TopobusError of the handler becomes an error answer. More requests wait in a bounded queue
        and are served asker by asker. `workload` decides which requests are expensive: these run
        after the others, few at a time.
        """
        if not ask.queue_group:
            await self._detect_twin(ask, parts)
        answerer = Answerer(self._connection, ask, parts, handler, concurrency, workload)
        self._answerers.append(answerer)
        answerer.lasting = await self._connection.subscribe(
            answerer.subject, answerer.on_message, queue=ask.queue_group
        )
        if self._connection.is_connected:
            # Registered means that the server knows the subscription: the next asker on another
            # connection reaches it.
            try:
                await self._connection.barrier()
            except (PeerUnavailable, TimeoutError):
                # The connection is being replaced. The new client subscribes before it counts as
                # connected.
                pass

    def _awaited_at(self, expected: Expectation) -> Headers:
        """Return the header that names the inbox of the answer, where the server may give the
        answerer another reply subject.
        """
        return {ANSWER_AT: expected.subject} if self._connection.settings.zone else {}

    def _clock_ahead_s(self, headers: Headers, started: float) -> float | None:
        """Compare the answerer's clock with ours. None when the answer does not carry its clock.

        The answerer is taken to have read its clock halfway between question and answer.
        """
        clock_ms = read_number(headers.get(CLOCK))
        if clock_ms is None:
            return None
        elapsed_s = self._connection.clock.monotonic() - started
        return round((clock_ms - now_ms(self._connection.clock)) / 1000 + elapsed_s / 2, 3)

    def _check_clocks(self, ask: Ask[Any, Any], parts: dict[str, str], headers: Headers, started: float) -> None:
        """Raise an error that names the wrong clock when the peer took a request that we still wait
        for as too old.
        """
        if headers.get(ERROR) != STALE:
            return
        ahead_s = self._clock_ahead_s(headers, started) or 0.0
        where = parts.get("node", ask.writer[0])
        raise PeerUnavailable(
            f"{ask.name}: clock of {where} is {ahead_s:.1f} s ahead of that of {self._connection.name} here: "
            "it takes each request for one given up",
            next_step="set both clocks by the same time service (chrony, ntp); `topobus doctor` shows each node's",
            code=STALE,
            clock_ahead_s=ahead_s,
        )

    def _check_asker(self, ask: Ask[Any, Any]) -> None:
        """Refuse here what the peer would drop silently: it serves only those that the catalogue
        names.
        """
        askers = askers_of(ask)
        if self._connection.name not in askers:
            raise ContractError(
                f"{self._connection.name} may not ask {ask.name}; allowed: {', '.join(askers)}",
                next_step="connect under one of these names, or add the reader to the catalogue",
            )

    async def _detect_twin(self, ask: Ask[Any, Any], parts: dict[str, str]) -> None:
        """Log when another instance answers where only one should: both stay safe, and the operator
        should know.
        """
        if self._has_twin or not self._connection.is_connected:
            return
        question = {TWIN: self._connection.instance}
        try:
            answer = await self._connection.request(
                ask.subject(**parts),
                headers=question,
                timeout_s=_TWIN_LIMIT_S,
                answerer=answerer_of(ask, parts.get("device_class", "")),
            )
        except (PeerUnavailable, TimeoutError):
            return
        self._has_twin = True
        report_twin(ask, (answer.headers or {}).get(TWIN, "unknown"))

    async def stop_answering(self, *, timeout_s: float = 1.0, device_class: str = "") -> None:
        """Answer nothing from now on (for one class alone, if it is given), and finish what has
        arrived.

        The next instance takes over the answers while this one continues its other work.
        """
        ending = [answerer for answerer in self._answerers if device_class in ("", answerer.device_class)]
        if ending:
            await asyncio.gather(*(answerer.drain(timeout_s) for answerer in ending))
        self._answerers = [answerer for answerer in self._answerers if answerer not in ending]


def _peer_of(ask: Ask[Any, Any], parts: Mapping[str, str]) -> str:
    """Name the peer of a request: `gpu on n1`, `topology on n1`, `controller`."""
    service, node = parts.get("device_class") or ask.writer[0], parts.get("node", CLUSTER)
    return service if node == CLUSTER else f"{service} on {node}"
