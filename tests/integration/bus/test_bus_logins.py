"""Logins that change while a service runs, on a real server: newer passwords are taken before the
older ones are left, and what is forgotten is out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client

from docpages.samples import sample
from support.account_nats import LIMIT_S
from topobus.bus.bus import Bus
from topobus.bus.login.user_keys import split_login
from topobus.cli.application import run
from topobus.formats.messages.catalogue import ADOPT, PREPARE
from topobus.formats.messages.nouns import Ask
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable

pytestmark = pytest.mark.integration

# How long a question waits for its answer: far longer than any took on a busy machine.
_ANSWER_S = 10.0


class Asking:
    """A gateway that asks another service all the time: a question that is refused ends the test, and
    so does one that stays without an answer, unless as many `may_be_lost`.
    """

    def __init__(self, gateway: Bus, answerer: Bus, ask: Ask[Any, Any], may_be_lost: int) -> None:
        self.lost = 0
        self._may_be_lost = may_be_lost
        self._gateway = gateway
        self._answerer = answerer
        self._ask = ask
        known_parts = {"node": "n1", "device_class": "gpu"}
        self._parts = {part: known_parts[part] for part in ask.parts}
        self.answered = 0
        self.handled: list[str] = []

    async def answer(self) -> None:
        """Answer; a device service by the right that comes with each request."""

        async def handle(request: object) -> object:
            self.handled.append(type(request).__name__)
            return sample(self._ask.reply)

        await self._answerer.answer(self._ask, handle, **self._parts)

    async def ask_until(self, is_enough: Callable[[], bool]) -> None:
        """Ask one after the other."""
        request = sample(self._ask.request)
        async with asyncio.timeout(LIMIT_S):
            while not is_enough():
                try:
                    await self._gateway.ask(self._ask, request, timeout_s=_ANSWER_S, **self._parts)
                    self.answered += 1
                except PeerUnavailable:
                    self.lost += 1
                    if self.lost > self._may_be_lost:
                        raise


def _generation(bus: Bus) -> int:
    return bus._connection.generation


async def _until_generation(bus: Bus, generation: int) -> None:
    """Wait until a bus has changed its client so often."""
    changed = asyncio.Event()
    forget = bus._connection.on_change(changed.set)
    try:
        async with asyncio.timeout(LIMIT_S):
            while _generation(bus) < generation:
                changed.clear()
                await changed.wait()
    finally:
        forget()


@pytest.mark.parametrize(
    ("form", "ask", "answerer"), [("--one-account", PREPARE, "gpu"), ("--accounts", ADOPT, "topology")]
)
async def test_no_ask_fails_when_passwords_are_changed_with_an_overlap(
    nats_binary: Path, tmp_path: Path, form: str, ask: Ask[Any, Any], answerer: str
) -> None:
    """Asker and answerer take new passwords twice, and those of before count no more, while
    questions go on: each one is answered, and handled once.

    Between accounts one that is on its way when the server reads its users again (four times) may
    stay without an answer: the server forgets then who may answer what.
    """
    folder, server_file = tmp_path / "users", tmp_path / "users.conf"

    async def keys(*words: str) -> None:
        assert (
            await asyncio.to_thread(run, ["keys", words[0], str(folder), *words[1:], "--server-file", str(server_file)])
            == 0
        )

    def settings(name: str) -> NatsSettings:
        return NatsSettings(url=server.url, user=name, password_file=str(folder / name / "password"))

    await keys("make", form)
    async with (
        NatsServer(binary=nats_binary, config=server_file.read_text()) as server,
        Bus.session(settings("gateway"), name="gateway") as gateway,
        Bus.session(settings(answerer), name=answerer) as other,
    ):
        asking = Asking(gateway, other, ask, may_be_lost=4 if form == "--accounts" else 0)
        is_over = asyncio.Event()
        await asking.answer()
        async with asyncio.TaskGroup() as group:
            group.create_task(asking.ask_until(is_over.is_set))
            for generation in (2, 3):
                before = split_login(answerer, (folder / answerer / "password").read_text().strip())
                await keys("rotate", "gateway", answerer, "--overlap")
                server.reload(server_file.read_text())
                await _until_generation(gateway, generation)
                await _until_generation(other, generation)
                await asyncio.wait_for(_settled(gateway, other), LIMIT_S)
                await keys("forget")
                server.reload(server_file.read_text())
                await _until_refused(server.url, *before)
            is_over.set()

        assert asking.answered > 0
        assert 0 <= len(asking.handled) - asking.answered <= asking.lost
        assert (_generation(gateway), _generation(other)) == (3, 3)


async def _settled(*buses: Bus) -> None:
    """Wait until no client of before lingers: whoever forgets a password sooner cuts it off."""
    for bus in buses:
        while retiring := set(bus._connection.retirement._retiring.values()):
            await asyncio.wait(retiring)


async def _until_refused(url: str, user: str, password: str) -> None:
    """Log in until the server, which was told to read its users again,
    does not take this any more.
    """

    async def ignore(_: Exception) -> None:
        return

    async with asyncio.timeout(LIMIT_S):
        while True:
            client = Client()
            try:
                await client.connect(url, user=user, password=password, allow_reconnect=False, error_cb=ignore)
            except (nats.errors.Error, OSError):
                # The server says why, and hangs up: which of both is seen first is chance.
                return
            await client.close()
