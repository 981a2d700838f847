"""A real nats-server with the shipped accounts: each user's bus or bare client by the user's name,
and what the streams hold.

The password of a user is its name. Two nodes have users of their own (`gpu-n1`, `gpu-n2`).
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import nats.errors
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from docpages.samples import sample
from support.secured_nats import Attacker
from topobus.bus.bus import Bus
from topobus.bus.server_config.inboxes import connection_name, inbox_branch
from topobus.bus.server_config.nats_accounts import Account, User
from topobus.bus.server_config.nats_accounts_config import render_accounts, render_passwords
from topobus.bus.server_config.streams import stream_names
from topobus.formats.messages.catalogue import EVENTS, STATES
from topobus.formats.messages.codec import encode
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.nouns import CLUSTER, Event, State
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import NatsServer

__all__ = ["ZONES", "AccountNats", "StreamImage", "account_nats", "parts_of", "subject_of"]

LIMIT_S = 60.0
ZONES: Mapping[str, str] = MappingProxyType({"": "core", **dict.fromkeys(DEVICE_SERVICES, "vendor")})
"""The setting nats.zone by principal, and "" for the others."""


class StreamImage(msgspec.Struct, frozen=True):
    """What a stream is and holds."""

    config: dict[str, Any]
    consumers: int
    messages: tuple[tuple[int, str, bytes, bytes], ...]
    """Sequence, subject, headers and data of each."""


def parts_of(noun: State[Any] | Event[Any], node: str, device_class: str) -> dict[str, str]:
    """Name one key of a state, or one subject of an event."""
    known_parts = {
        "node": node,
        "device_class": device_class,
        "device": "device-0",
        "fleet": CLUSTER,
        "kind": "Pod",
        "namespace": "default",
        "name": "trainer",
    }
    return {part: known_parts[part] for part in noun.parts}


def subject_of(noun: State[Any] | Event[Any], node: str, device_class: str) -> str:
    """Give the subject that a stream stores it under."""
    parts = parts_of(noun, node, device_class)
    return f"$KV.{noun.home(**parts).bucket}.{noun.key(**parts)}" if isinstance(noun, State) else noun.subject(**parts)


class AccountNats:
    """The server with its users."""

    def __init__(
        self,
        server: NatsServer,
        described: Sequence[Account],
        zones: Mapping[str, str],
        provisioner: Literal["controller", "topology"] = "controller",
    ) -> None:
        self.server = server
        self.users: dict[str, User] = {user.name: user for account in described for user in account.users}
        self._zones = zones
        self._provisioner = provisioner

    def settings(self, name: str) -> NatsSettings:
        """Give the settings of a user's connection."""
        user = self.users[name]
        zone: Any = self._zones.get(user.principal, self._zones.get("", ""))
        file = self.server.folder / f"{name}.password"
        if not file.exists():
            file.write_text(name)
            file.chmod(0o600)
        return NatsSettings(
            url=self.server.url,
            user=name,
            password_file=str(file),
            zone=zone,
            provisioner=self._provisioner,
            timeout_s=LIMIT_S,
        )

    @asynccontextmanager
    async def bus(
        self, name: str, *, registry: CollectorRegistry | None = None, readiness: Readiness | None = None
    ) -> AsyncIterator[Bus]:
        """Connect our own bus as a user, under the name that its process has."""
        principal = self.users[name].principal
        bus = await Bus.connect(
            self.settings(name), name=connection_name(principal), registry=registry, readiness=readiness
        )
        try:
            yield bus
        finally:
            await bus.close()

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[Attacker]:
        """Connect a bare nats-py client as a user; what it may not do ends up in `denials`."""
        principal = self.users[name].principal
        client = Client()
        attacker = Attacker(principal, client)

        async def note(err: Exception) -> None:
            if isinstance(err, nats.errors.Error) and "permissions violation" in str(err).lower():
                attacker.denials.append(str(err).lower())

        branch = inbox_branch(connection_name(principal), connection_name(principal))
        await client.connect(
            self.server.url,
            user=name,
            password=name,
            inbox_prefix=branch.encode(),
            error_cb=note,
            allow_reconnect=False,
            # The server sets an account's store up when its first user comes, which takes
            # seconds on a machine that is busy.
            connect_timeout=LIMIT_S,
        )
        try:
            yield attacker
        finally:
            async with asyncio.timeout(LIMIT_S):
                await client.close()

    async def fill(self, writer: str, node: str, device_class: str) -> None:
        """Store one value of each state and event of a node, each as its writer; `writer` gives a
        user's name from a principal's.
        """
        for noun in (*STATES, *EVENTS):
            principal = device_class if device_class in noun.writer else noun.writer[0]
            name = writer.format(principal) if principal not in ("controller", "cli") else principal
            if name not in self.users:
                # Who writes it runs where nodes have servers of their own.
                continue
            async with self.client(name) as client:
                answer = await client.ask(subject_of(noun, node, device_class), encode(sample(noun.message)))
                assert b'"seq"' in answer.data, (noun.name, answer.data)

    async def image(self) -> dict[str, StreamImage]:
        """Read all streams of the catalogue, as the CLI, which reads all of them."""
        images = {}
        async with self.client("cli") as reader:
            for stream in stream_names():
                info = json.loads((await reader.ask(f"$JS.API.STREAM.INFO.{stream}")).data)
                messages = []
                sequence = 0
                while sequence < info["state"]["last_seq"]:
                    query = json.dumps({"seq": sequence + 1, "next_by_subj": ">"}).encode()
                    message = json.loads((await reader.ask(f"$JS.API.STREAM.MSG.GET.{stream}", query)).data)["message"]
                    sequence = message["seq"]
                    headers, data = (base64.b64decode(message.get(field) or "") for field in ("hdrs", "data"))
                    messages.append((sequence, message["subject"], headers, data))
                images[stream] = StreamImage(info["config"], info["state"]["consumer_count"], tuple(messages))
        return images


@asynccontextmanager
async def account_nats(
    described: Sequence[Account],
    *,
    binary: Path,
    zones: Mapping[str, str] = ZONES,
    more: str = "",
) -> AsyncIterator[AccountNats]:
    """Run a server with these accounts until the block ends.

    `zones` gives the setting nats.zone by principal, and "" for the others;
    `more` is further configuration.
    """
    passwords = render_passwords({user.variable: user.name for account in described for user in account.users})
    async with NatsServer(binary=binary, config=f"{passwords}{render_accounts(described)}{more}") as server:
        yield AccountNats(server, described, zones)
