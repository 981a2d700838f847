"""Consecutive processes of one service, each killed where a test wants (see `support.mortal_gateway`
and `support.mortal_hands`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from support.gateway_rig import Rig
from support.looks import next_look, until
from support.mortal_hands import READY
from support.whole_files import write_whole
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.values.errors import PeerUnavailable

__all__ = ["LIMIT_S", "GatewayLives", "Lives", "is_transport"]

LIMIT_S = 60.0
_TESTS = Path(__file__).resolve().parent.parent
_Answer = TypeVar("_Answer")


class Lives:
    """One process of a module `support.mortal_…` after the other, with the same settings."""

    def __init__(self, module: str, settings: msgspec.Struct, url: str, folder: Path) -> None:
        self._order, self._steps = folder / "order", folder / "steps"
        self._steps.touch()
        settings_file = folder / "settings.json"
        settings_file.write_bytes(msgspec.json.encode(settings))
        self._command = (
            sys.executable, "-m", f"support.{module}", str(settings_file), url, str(self._order), str(self._steps),
        )  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self._doomed_step = 0

    async def start(self, order: str = "nothing 0") -> bool:
        """Start one, and wait until it is ready. False when it died before, as ordered."""
        write_whole(self._order, order)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            async for line in self._process.stdout:
                if line.decode().strip() == READY:
                    return True
        await self._killed()
        assert order != "nothing 0", "it died before it was ready"
        return False

    def doom(self, verb: str, step: int) -> None:
        """Let the process die at a step of the next such verb."""
        self._doomed_step = step
        self._steps.write_text("", encoding="utf-8")
        write_whole(self._order, f"{verb} {step}")

    def doom_after(self, verb: str, name: str) -> None:
        """Let the process die at the step that follows the named one."""
        self._doomed_step = 1
        self._steps.write_text("", encoding="utf-8")
        write_whole(self._order, f"{verb} @{name}")

    async def start_doomed(self, step: int) -> bool:
        """Start one that dies at a step of its start; False when it died."""
        self.doom("start", step)
        return await self.start(f"start {step}")

    async def died(self) -> bool:
        """Say whether it died, now that the verb is over.

        False means that the verb had fewer steps.
        """
        if not self.is_dead:
            write_whole(self._order, "nothing 0")
            return False
        await self._killed()
        return True

    async def death(self) -> str:
        """Wait until it has died of what no verb's answer waits for.

        The step at which it did.
        """
        await self._killed()
        return self.where()

    async def until_dead(self, asking: Awaitable[_Answer]) -> _Answer:
        """Wait for an answer of the process, or for its end: PeerUnavailable."""
        assert self._process is not None
        answer, end = asyncio.ensure_future(asking), asyncio.ensure_future(self._process.wait())
        done, pending = await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if answer in done:
            return answer.result()
        raise PeerUnavailable("it died")

    async def answer_to(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Ask as the gateway does: again while there is no answer or the work continues."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(PeerUnavailable):
                    answer = await self.until_dead(ask())
                    if not isinstance(answer, Accepted):
                        return answer
                await next_look()

    async def try_once(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask a process that may die of it; again only while the work continues."""
        with contextlib.suppress(PeerUnavailable):
            while isinstance(await self.until_dead(ask()), Accepted):
                await next_look()

    async def until_step(self, step: str) -> None:
        """Wait until it has come to a step."""
        await until(lambda: step in self.log())

    @property
    def is_dead(self) -> bool:
        """Say whether it has come to its end."""
        return len(self.log()) >= self._doomed_step

    def log(self) -> list[str]:
        """Give the steps so far."""
        return self._steps.read_text(encoding="utf-8").splitlines()

    def where(self) -> str:
        """Name the step at which it died."""
        return (self.log() or ["before any step"])[-1]

    async def stop(self) -> None:
        """End the present one, however."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _killed(self) -> None:
        assert self._process is not None
        async with asyncio.timeout(LIMIT_S):
            assert await self._process.wait() == -signal.SIGKILL


class GatewayLives(Lives):
    """The gateways of a rig."""

    def __init__(self, rig: Rig) -> None:
        super().__init__("mortal_gateway", rig.settings, rig.url, rig.root)

    def taken(self) -> list[str]:
        """Name the steps of the call, without their numbers."""
        return [step.partition(" ")[2] for step in self.log()]


def is_transport(error: str) -> bool:
    """Say whether an error means that no gateway has answered."""
    return "is not registered" in error or "code = Unavailable" in error or "code = Canceled" in error or "EOF" in error
