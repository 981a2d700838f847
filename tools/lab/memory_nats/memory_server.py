"""A nats-server in memory, on which everything of the runtime above nats-py runs unchanged.

Deliveries come in the order of one connection, never within the sender's own step. The server's
JetStream answers at the subjects of its API, with the codes of the real one. It has one account, no
users and no TLS. Tests of those take a real server.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
from nats.aio.msg import Msg

from lab.memory_nats.memory_client import MemoryClient, Subscription
from lab.memory_nats.memory_streams import MemoryConsumer, MemoryStream, Refused, Stored, matches, overlap
from topobus.process.clock import SystemClock

__all__ = ["MemoryNats"]

_API = "$JS.API."
_NANO = 1_000_000_000
Headers = Mapping[str, str]


class _Pull:
    """One request for messages that waits: it serves messages, sends heartbeats, and ends."""

    def __init__(self, server: MemoryNats, consumer: MemoryConsumer, request: dict[str, Any], inbox: str) -> None:
        self.consumer = consumer
        self._server = server
        self._inbox = inbox
        self._left = int(request.get("batch", 1))
        self._expires_s = int(request.get("expires", 0)) / _NANO
        self._heartbeat_s = int(request.get("idle_heartbeat", 0)) / _NANO
        self._expiry: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._has_served = False
        self._waiting: list[_Pull] = []

    def begin(self, waiting: list[_Pull]) -> None:
        """Join the waiting requests."""
        self._waiting = waiting
        waiting.append(self)
        loop = asyncio.get_running_loop()
        if self._expires_s:
            self._expiry = loop.call_later(self._expires_s, self._expire)
        if self._heartbeat_s:
            self._heartbeat = loop.call_later(self._heartbeat_s, self._beat)

    def serve(self) -> None:
        """Deliver what there is. The last message of the batch ends the request without
        a status.
        """
        if not self._is_wanted():
            return
        while self._left and (delivery := self.consumer.next()) is not None:
            self._server.deliver(self.consumer, *delivery, self._inbox)
            self._left -= 1
            self._has_served = True
        if not self._left:
            self._end()

    def refuse(self, why: str) -> None:
        """End with the server's status that no message will come."""
        self._server.deliver_status(self._inbox, {"Status": "409", "Description": why})
        self._end()

    def _beat(self) -> None:
        if self not in self._waiting or not self._is_wanted():
            return
        if self._server.is_answering and not self._has_served:
            numbers = {
                "Nats-Last-Consumer": str(self.consumer.delivered),
                "Nats-Last-Stream": str(self.consumer.last_sequence),
            }
            self._server.deliver_status(self._inbox, {"Status": "100", "Description": "Idle Heartbeat", **numbers})
        self._has_served = False
        self._heartbeat = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    def _expire(self) -> None:
        if self in self._waiting:
            counts = {"Nats-Pending-Messages": str(self._left), "Nats-Pending-Bytes": "0"}
            self._server.deliver_status(self._inbox, {"Status": "408", "Description": "Request Timeout", **counts})
            self._end()

    def _is_wanted(self) -> bool:
        """Return whether consumer and asker still exist, and end the request if not."""
        stream = self.consumer.stream
        is_there = (
            self._server.streams.get(stream.name) is stream
            and stream.consumers.get(self.consumer.name) is self.consumer
        )
        if is_there and self._server.has_listener(self._inbox):
            return True
        self._end()
        return False

    def _end(self) -> None:
        if self in self._waiting:
            self._waiting.remove(self)
        for timer in (self._expiry, self._heartbeat):
            if timer is not None:
                timer.cancel()


class MemoryNats:
    """A server.

    A stopped one loses its connections and keeps its streams. A paused one receives what is sent
    and does nothing yet.
    """

    def __init__(self) -> None:
        """Make a running server."""
        self.url = "nats://memory:4222"
        """Where clients find it; there is no such host."""
        self.clients: set[MemoryClient] = set()
        self.streams: dict[str, MemoryStream] = {}
        self.is_running = True
        self._clock = SystemClock()
        self._random = random.Random(0)
        self._subscriptions: list[Subscription] = []
        self._is_paused = False
        self._held: list[Callable[[], None]] = []
        self._pulls: list[_Pull] = []
        self._last_ns = 0

    # life

    async def stop(self) -> None:
        """Lose all connections, and accept no new ones. Streams stay."""
        self.is_running = False
        self._held.clear()
        for client in list(self.clients):
            await client.lose()
        for stream in self.streams.values():
            stream.consumers.clear()

    kill = stop

    async def start(self) -> None:
        """Accept clients again."""
        self.is_running = True
        self._is_paused = False

    def pause(self) -> None:
        """Answer nothing. Connections stay open."""
        self._is_paused = True

    def resume(self) -> None:
        """Do what was requested meanwhile, and continue."""
        self._is_paused = False
        held, self._held = self._held, []
        for step in held:
            self.send(step)

    def new_client(self, _tls_because: str = "") -> MemoryClient:
        """Make a client of this server, which `topobus.bus.connection.connection` uses in place of
        nats-py's own.
        """
        return MemoryClient(self)

    # what clients send

    def send(self, step: Callable[[], None]) -> None:
        """Process a client's command in a later step of the loop, in the order of all commands."""
        asyncio.get_running_loop().call_soon(self._do, step)

    def listen(self, subscription: Subscription) -> None:
        """Deliver to a subscription from now on."""
        if subscription.client in self.clients:
            self._subscriptions.append(subscription)

    def remove_subscription(self, subscription: Subscription) -> None:
        """Deliver no more to a subscription."""
        with suppress(ValueError):
            self._subscriptions.remove(subscription)

    def disconnect(self, client: MemoryClient) -> None:
        """Forget a client and its subscriptions."""
        self.clients.discard(client)
        for subscription in [subscription for subscription in self._subscriptions if subscription.client is client]:
            subscription.stop()
            self._subscriptions.remove(subscription)

    def receive(self, subject: str, data: bytes, reply: str, headers: Headers) -> None:
        """Route a published message to JetStream's API, to a stream, and to the listeners.

        Notify the sender when there is no listener.
        """
        if subject.startswith(_API):
            is_taken = self._call(subject, data, reply)
        else:
            is_taken = self._route(subject, data, reply, headers)
            is_taken = self._store(subject, data, reply, headers) or is_taken
        if not is_taken and reply:
            self._route(reply, b"", "", {"Status": "503"})

    def _do(self, step: Callable[[], None]) -> None:
        if self._is_paused:
            self._held.append(step)
        elif self.is_running:
            step()

    def _route(self, subject: str, data: bytes, reply: str, headers: Headers, *, listened: str = "") -> bool:
        """Deliver to all that listen at `listened` (the subject itself, unless given), one of each
        queue group.

        Return whether there was one.
        """
        listeners = [
            subscription for subscription in self._subscriptions if matches(subscription.subject, listened or subject)
        ]
        groups = sorted({listener.queue for listener in listeners if listener.queue})
        chosen = [listener for listener in listeners if not listener.queue]
        chosen += [
            self._random.choice([listener for listener in listeners if listener.queue == group]) for group in groups
        ]
        for subscription in chosen:
            client: Any = subscription.client
            subscription.deliver(
                Msg(_client=client, subject=subject, reply=reply, data=data, headers=dict(headers) or None)
            )
        return bool(chosen)

    # JetStream

    def _store(self, subject: str, data: bytes, reply: str, headers: Headers) -> bool:
        stream = next((stream for stream in self.streams.values() if stream.takes(subject)), None)
        if stream is None:
            return False
        try:
            before = stream.last_of(subject)
            stored, acknowledgement = stream.store(subject, data, headers, now_ns=self._now_ns())
            if stored is not None:
                self._republish(stream, stored, before)
        except Refused as err:
            acknowledgement = {"error": err.answer, "stream": stream.name, "seq": 0}
        if reply:
            self._answer(reply, acknowledgement)
        self._serve(stream)
        return True

    def _republish(self, stream: MemoryStream, stored: Stored, before: Stored | None) -> None:
        """Publish at the stream's own subjects that a message was stored.

        It supports what the runtime uses: everything below one token, headers only.
        """
        republish = stream.config.get("republish")
        if not republish or not matches(republish["src"], stored.subject):
            return
        subject = republish["dest"].removesuffix(">") + stored.subject.removeprefix(republish["src"].removesuffix(">"))
        numbers = {"Nats-Stream": stream.name, "Nats-Subject": stored.subject, "Nats-Sequence": str(stored.sequence)}
        numbers |= {"Nats-Last-Sequence": str(before.sequence if before else 0), "Nats-Msg-Size": str(len(stored.data))}
        self._route(subject, b"", "", {**stored.headers, **numbers})

    def _call(self, subject: str, data: bytes, reply: str) -> bool:
        """Serve one request to the API. False when no part serves such a request."""
        verb = subject.removeprefix(_API)
        if verb.startswith("CONSUMER.MSG.NEXT."):
            return self._pull(verb, data, reply)
        try:
            request = msgspec.json.decode(data, type=dict[str, Any]) if data else {}
            answer = self._serve_call(verb, request)
        except Refused as err:
            answer = {"error": err.answer}
        if answer is None:
            return False
        if reply:
            self._answer(reply, answer)
        return True

    def _serve_call(self, verb: str, request: dict[str, Any]) -> dict[str, Any] | None:
        parts = verb.split(".")
        name = parts[-1]
        match parts[:2]:
            case ["INFO"]:
                return {
                    "memory": 0,
                    "storage": 0,
                    "streams": len(self.streams),
                    "consumers": 0,
                    "limits": {"max_storage": -1},
                }
            case ["STREAM", "NAMES"]:
                names = sorted(self.streams)[int(request.get("offset", 0)) :]
                return {
                    "total": len(self.streams),
                    "offset": int(request.get("offset", 0)),
                    "limit": 1024,
                    "streams": names or None,
                }
            case ["STREAM", "CREATE"]:
                return self._create(name, request)
            case ["STREAM", "UPDATE"]:
                self._stream(name).config = request
                return self._info(self._stream(name))
            case ["STREAM", "INFO"]:
                info = self._info(self._stream(name))
                if "subjects_filter" in request:
                    info["state"]["subjects"] = self._stream(name).subject_counts(str(request["subjects_filter"]))
                return info
            case ["STREAM", "DELETE"]:
                del self.streams[self._stream(name).name]
                return {"success": True}
            case ["STREAM", "PURGE"] if self._stream(name).config.get("deny_purge"):
                raise Refused(500, 10110, "stream purge not permitted")
            case ["STREAM", "MSG"] if parts[2] == "GET":
                return self._message(self._stream(name), request)
            case ["STREAM", "MSG"] if self._stream(name).config.get("deny_delete"):
                raise Refused(500, 10057, "message delete not permitted")
            case ["CONSUMER", "CREATE"]:
                return self._consume(parts, request)
            case ["CONSUMER", "DELETE"]:
                self._stream(parts[2]).consumers.pop(name, None)
                for pull in [pull for pull in self._pulls if pull.consumer.name == name]:
                    pull.refuse("Consumer Deleted")
                return {"success": True}
            case ["CONSUMER", "NAMES"]:
                consumers = sorted(self._stream(name).consumers)
                return {"total": len(consumers), "offset": 0, "limit": 1024, "consumers": consumers}
        return None

    def _create(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        stream = self.streams.get(name)
        if stream is not None:
            if stream.config != config:
                raise Refused(400, 10058, "stream name already in use with a different configuration")
            return self._info(stream)
        if int(config.get("num_replicas", 1)) > 1:
            raise Refused(500, 10074, "replicas > 1 not supported in non-clustered mode")
        taken = [subject for other in self.streams.values() for subject in other.config.get("subjects", ())]
        if any(overlap(subject, other) for subject in config.get("subjects", ()) for other in taken):
            raise Refused(400, 10065, "subjects overlap with an existing stream")
        self.streams[name] = made = MemoryStream(config, created_ns=self._now_ns())
        return self._info(made)

    def _stream(self, name: str) -> MemoryStream:
        if name not in self.streams:
            raise Refused(404, 10059, "stream not found")
        return self.streams[name]

    def _info(self, stream: MemoryStream) -> dict[str, Any]:
        return {
            "ts": _rfc3339(self._now_ns()),
            "config": stream.config,
            "created": _rfc3339(stream.created_ns),
            "state": {
                "messages": len(stream.messages),
                "bytes": stream.size_bytes,
                "first_seq": stream.first_sequence if stream.last_sequence else 0,
                "last_seq": stream.last_sequence,
                "consumer_count": len(stream.consumers),
            },
        }

    @staticmethod
    def _message(stream: MemoryStream, request: dict[str, Any]) -> dict[str, Any]:
        if (subject := request.get("last_by_subj")) is not None:
            message = stream.last_of(str(subject))
        elif (subject := request.get("next_by_subj")) is not None:
            message = stream.next_of(str(subject), int(request["seq"]))
        else:
            message = stream.messages.get(int(request["seq"]))
        if message is None:
            raise Refused(404, 10037, "no message found")
        return {
            "message": {
                "subject": message.subject,
                "seq": message.sequence,
                "data": base64.b64encode(message.data).decode(),
                "hdrs": base64.b64encode(_header_lines(message)).decode(),
                "time": _rfc3339(message.time_ns),
            }
        }

    def _consume(self, parts: list[str], request: dict[str, Any]) -> dict[str, Any]:
        config = request["config"]
        stream = self._stream(parts[2])
        limit = int(stream.config.get("max_consumers", -1))
        if 0 < limit <= len(stream.consumers):
            raise Refused(400, 10026, "maximum consumers limit reached")
        consumer = MemoryConsumer(
            stream=stream,
            name=str(config["name"]),
            filter_subject=str(config["filter_subject"]),
            has_data=not config.get("headers_only"),
        )
        consumer.begin(config)
        stream.consumers[consumer.name] = consumer
        return {"stream_name": stream.name, "name": consumer.name, "config": config}

    def _pull(self, verb: str, data: bytes, reply: str) -> bool:
        stream_name, name = verb.removeprefix("CONSUMER.MSG.NEXT.").split(".")
        stream = self.streams.get(stream_name)
        consumer = stream.consumers.get(name) if stream is not None else None
        if stream is None or consumer is None:
            return False
        _Pull(self, consumer, msgspec.json.decode(data, type=dict[str, Any]), reply).begin(self._pulls)
        self._serve(stream)
        return True

    def _serve(self, stream: MemoryStream) -> None:
        """Give waiting pulls what there is for them."""
        for pull in [pull for pull in self._pulls if pull.consumer.stream is stream]:
            pull.serve()

    def deliver(self, consumer: MemoryConsumer, message: Stored, pending: int, inbox: str) -> None:
        """Deliver a stored message to an inbox, at its own subject as a server does."""
        numbers = f"1.{message.sequence}.{consumer.delivered}.{message.time_ns}.{pending}"
        reply = f"$JS.ACK.{consumer.stream.name}.{consumer.name}.{numbers}"
        headers = message.headers if consumer.has_data else {**message.headers, "Nats-Msg-Size": str(len(message.data))}
        self._route(message.subject, message.data if consumer.has_data else b"", reply, headers, listened=inbox)

    def deliver_status(self, inbox: str, headers: Headers) -> None:
        """Deliver a status."""
        self._route(inbox, b"", "", headers)

    def has_listener(self, inbox: str) -> bool:
        """Return whether an inbox still has a listener."""
        return any(matches(subscription.subject, inbox) for subscription in self._subscriptions)

    @property
    def is_answering(self) -> bool:
        """Return whether the server sends what is due now."""
        return self.is_running and not self._is_paused

    def _answer(self, reply: str, answer: dict[str, Any]) -> None:
        self._route(reply, msgspec.json.encode(answer), "", {})

    def _now_ns(self) -> int:
        # No two moments are equal: a stream's creation and a message's time identify them.
        self._last_ns = max(int(self._clock.now().timestamp() * 1e6) * 1000, self._last_ns + 1)
        return self._last_ns


def _header_lines(message: Stored) -> bytes:
    lines = "".join(f"{key}: {value}\r\n" for key, value in message.headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode() if lines else b""


def _rfc3339(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, _NANO)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
