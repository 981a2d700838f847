"""Answers NATS' services protocol for one process: that it is there, what it answers, and how it has answered so far.

Flows in: questions of tools at `$SRV.<verb>…`, on whatever client the connection has. Flows out: one answer each, and nothing at rest. nats-py's own `nats.micro` is tied to one client and to
queue groups, and would take our asks' subscriptions over; the protocol is three answers, which tests read by its types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import nats.errors
from nats.aio.msg import Msg

from topobus.contracts.service_protocol import (
    EndpointInfo,
    EndpointStats,
    ServiceInfo,
    ServicePing,
    ServiceStats,
    listened_subjects,
    may_be_answered,
    semantic_version,
    service_description,
    service_id,
    service_metadata,
    service_name,
    verb_of,
)
from topobus.domain.errors import ContractError, PeerUnavailable
from topobus.domain.timestamps import rfc3339
from topobus.runtime.connection import Connection
from topobus.runtime.logging import get_logger

__all__ = ["Endpoint", "ServiceAnswers"]


class Endpoint(Protocol):
    """An ask that is answered, as `topobus.runtime.answerer.Answerer` is one."""

    @property
    def info(self) -> EndpointInfo:
        """What it is."""
        ...

    @property
    def stats(self) -> EndpointStats:
        """How it was answered so far."""
        ...


class ServiceAnswers:
    """Speaks for one process; `endpoints` gives what it answers at the moment of a question."""

    def __init__(self, connection: Connection, node: str, endpoints: Callable[[], Iterable[Endpoint]]) -> None:
        self._connection = connection
        self._endpoints = endpoints
        self._started = rfc3339(connection.clock.now())
        self._id = service_id(connection.name, node, connection.instance)
        self._metadata = service_metadata(connection.name, node, connection.release)

    async def listen(self) -> None:
        """Answer from now on, on this client and each later one.

        Errors: raises nothing; waits while no client is up.
        Cost: three subscriptions, no round trip.
        """
        for subject in listened_subjects(self._connection.name, self._id):
            while True:
                await self._connection.wait_up()
                try:
                    await self._connection.subscribe(subject, self._on_question)
                except PeerUnavailable:
                    # This client was lost in the same moment.
                    continue
                break

    async def _on_question(self, question: Msg) -> None:
        answer = self._answer(verb_of(question.subject))
        if answer is None:
            return
        if not may_be_answered(question.reply, has_users=self._connection.wants_login):
            self._connection.quiet.warning(
                "service.question-dropped",
                question.subject[:200],
                subject=question.subject[:200],
                reply=question.reply[:200],
                next_step="on a server with users give tools the inbox _INBOX.TOOLS (nats --inbox-prefix); see docs/how-to/see-services-with-nats-tools.md",
            )
            return
        try:
            await self._connection.answer(question, msgspec.json.encode(answer))
        except (PeerUnavailable, ContractError, nats.errors.Error) as err:
            get_logger().debug("service.answer-lost", subject=question.subject[:200], error=str(err))

    def _answer(self, verb: str) -> ServicePing | ServiceInfo | ServiceStats | None:
        """Give the answer to a verb; None for one that this protocol does not have yet."""
        said = {
            "name": service_name(self._connection.name),
            "id": self._id,
            "version": semantic_version(self._connection.release),
        }
        match verb:
            case "PING":
                return ServicePing(**said, metadata=self._metadata)
            case "INFO":
                endpoints = tuple(endpoint.info for endpoint in self._endpoints())
                description = service_description(self._connection.name)
                return ServiceInfo(**said, metadata=self._metadata, description=description, endpoints=endpoints)
            case "STATS":
                answered = tuple(endpoint.stats for endpoint in self._endpoints())
                return ServiceStats(**said, metadata=self._metadata, started=self._started, endpoints=answered)
            case _:
                return None
