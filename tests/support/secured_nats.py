"""A real nats-server under the shipped permission file: honest services by our own bus, attackers
by a bare client, each as any principal.

The password of a principal is its name. An attacker's client is nats-py's own: it sends what the
test wants, and its rights are the only limit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from topobus.bus.bus import Bus
from topobus.bus.server_config.inboxes import SERVER, answerer_of, connection_name, inbox_branch
from topobus.bus.server_config.nats_permissions import PRINCIPALS, render_permissions
from topobus.formats.messages.catalogue import ASKS, PROVISIONER
from topobus.formats.messages.nouns import PREFIX
from topobus.process.clock import Clock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import NatsServer

__all__ = ["Attacker", "SecuredNats", "password_variable", "secured_nats"]

# Ends a test that waits for what never comes; nothing is measured with it.
_LIMIT_S = 30.0


class Attacker:
    """Somebody with the credential of one principal and a client that does whatever the server lets
    it.
    """

    def __init__(self, principal: str, client: Client) -> None:
        self.principal = principal
        self.client = client
        self.denials: list[str] = []
        """What the server said to what it did not let us do."""

    async def send(
        self, subject: str, data: bytes = b"", *, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send, and wait until the server has seen it; a denial is in `denials` then."""
        await self.client.publish(subject, data, headers=headers, reply=reply)
        await self.barrier()

    async def barrier(self) -> None:
        """Wait until the server has seen all that we sent, and we have read what it sent before.

        This needs a message to ourselves: the PING of nats-py's flush overtakes queued commands.
        """
        echo = await self.client.subscribe(self.client.new_inbox())
        await self.client.publish(echo.subject)
        await echo.next_msg(_LIMIT_S)
        await echo.unsubscribe()

    async def ask(self, subject: str, data: bytes = b"", *, headers: dict[str, str] | None = None) -> Msg:
        """Send a request and give its answer, which comes where its answerer may publish.

        TimeoutError when none comes, as after a denial.
        """
        answerer = next(
            (
                answerer_of(ask, subject.rpartition(".")[2])
                for ask in ASKS
                if subject.startswith(f"{PREFIX}.{ask.name}.")
            ),
            SERVER,
        )
        inbox = await self.client.subscribe(
            f"{inbox_branch(connection_name(self.principal), answerer)}.{self.client.new_inbox()[-22:]}"
        )
        await self.client.publish(subject, data, headers=headers, reply=inbox.subject)
        try:
            return await inbox.next_msg(_LIMIT_S)
        finally:
            await inbox.unsubscribe()

    async def deliver(
        self, stream: str, filter_subject: str, deliver_subject: str, *, deliver_group: str = ""
    ) -> bytes:
        """Make the server deliver all stored messages to a subject of our choice, by a push
        consumer.

        Gives the server's answer (JSON). `deliver_group` reaches those who listen in a queue group.
        """
        config = {
            "name": "attack",
            "deliver_subject": deliver_subject,
            "deliver_group": deliver_group,
            "ack_policy": "none",
            "deliver_policy": "all",
            "filter_subject": filter_subject,
            "replay_policy": "instant",
        }
        request = json.dumps({"stream_name": stream, "config": config}).encode()
        answer = await self.ask(f"$JS.API.CONSUMER.CREATE.{stream}.attack.{filter_subject}", request)
        return answer.data


class SecuredNats:
    """The server, and the credentials of all principals."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self.server = server
        self._folder = folder

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.server.url

    def password_file(self, principal: str) -> Path:
        """The file that holds a principal's password."""
        return self._folder / principal

    def settings(self, principal: str, *, timeout_s: float = 5.0) -> NatsSettings:
        """Give the settings of a principal's connection."""
        return NatsSettings(
            url=self.url, user=principal, password_file=str(self.password_file(principal)), timeout_s=timeout_s
        )

    def environment(self) -> dict[str, str]:
        """Give the variables by which each service's process comes as its own principal
        (`support.running.all_services(settings=…)`).
        """
        variables = {}
        for principal in (name for name in PRINCIPALS if name not in ("user", "verdicts")):
            variables[f"TOPOBUS_{principal.upper()}__NATS__USER"] = principal
            variables[f"TOPOBUS_{principal.upper()}__NATS__PASSWORD_FILE"] = str(self.password_file(principal))
        return variables

    @asynccontextmanager
    async def bus(
        self,
        principal: str,
        *,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
        readiness: Readiness | None = None,
        timeout_s: float = 5.0,
    ) -> AsyncIterator[Bus]:
        """Connect our own bus as a principal, under the name that its process has."""
        settings = self.settings(principal, timeout_s=timeout_s)
        bus = await Bus.connect(
            settings, name=connection_name(principal), clock=clock, registry=registry, readiness=readiness
        )
        try:
            yield bus
        finally:
            await bus.close()

    @asynccontextmanager
    async def attacker(self, principal: str) -> AsyncIterator[Attacker]:
        """Connect a bare nats-py client as a principal; what it may not do ends up in `denials`."""
        client = Client()
        name = connection_name(principal)
        attacker = Attacker(principal, client)

        async def note(err: Exception) -> None:
            if isinstance(err, nats.errors.Error) and "permissions violation" in str(err).lower():
                attacker.denials.append(str(err))

        await client.connect(
            self.url,
            user=principal,
            password=principal,
            inbox_prefix=inbox_branch(name, name).encode(),
            error_cb=note,
            allow_reconnect=False,
        )
        try:
            yield attacker
        finally:
            async with asyncio.timeout(_LIMIT_S):
                await client.close()


def password_variable(principal: str) -> str:
    """Name the variable of the server's environment from which the permission file takes a
    principal's password.
    """
    return f"TOPOBUS_{principal.upper()}_PASSWORD"


@asynccontextmanager
async def secured_nats(
    folder: Path, *, binary: Path | None = None, permissions: str = "", more: str = ""
) -> AsyncIterator[SecuredNats]:
    """Run a server with the shipped permissions until the block ends.

    Its streams are made, as the controller makes them in an installation. `folder` takes the
    password files. `permissions` replaces the shipped file (`render_permissions(may_create=False)`,
    rights of one node), and then nothing is made; `more` is further server configuration.
    """
    for principal in PRINCIPALS:
        (folder / principal).write_text(principal, encoding="utf-8")
        (folder / principal).chmod(0o600)
    environment = {password_variable(principal): principal for principal in PRINCIPALS}
    config = f"{permissions or render_permissions()}\n{more}"
    async with NatsServer(binary=binary, config=config, environment=environment) as server:
        secured = SecuredNats(server, folder)
        if not permissions:
            async with secured.bus(PROVISIONER) as bus:
                await bus.provision()
        yield secured
