"""Consecutive gateway processes, each killed where a test wants (see `support.mortal_gateway`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from support.gateway_rig import Rig
from support.looks import until
from support.mortal_gateway import READY
from support.whole_files import write_whole

LIMIT_S = 60.0
_TESTS = Path(__file__).resolve().parent.parent


class Lives:
    """One gateway process after the other."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.order = rig.root / "order"
        self.steps = rig.root / "steps"
        self._settings = rig.root / "settings.json"
        self._settings.write_bytes(msgspec.json.encode(rig.settings))
        self._process: asyncio.subprocess.Process | None = None
        self._doomed_step = 0

    async def start(self) -> None:
        """Start one that does not die, and wait until it has looked around."""
        write_whole(self.order, "nothing 0")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "support.mortal_gateway", str(self._settings), self.rig.url, str(self.order), str(self.steps),  # noqa: E501
            env={**os.environ, "PYTHONPATH": str(_TESTS)}, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            async for line in self._process.stdout:
                if line.decode().strip() == READY:
                    return
        raise AssertionError(f"the gateway ended with {await self._process.wait()} before it was ready")

    def doom(self, call: str, step: int) -> None:
        """Let the process die at a step of the next such call (`Allocate/gpu`), or of its next
        writes of slices (`publish`).
        """
        self._doomed_step = step
        self.steps.write_text("", encoding="utf-8")
        write_whole(self.order, f"{call} {step}")

    async def died(self) -> bool:
        """Say whether it died, now that the call is over.

        False means that the call had fewer steps.
        """
        assert self._process is not None
        if len(self._log()) < self._doomed_step:
            write_whole(self.order, "nothing 0")
            return False
        async with asyncio.timeout(LIMIT_S):
            assert await self._process.wait() == -signal.SIGKILL
        return True

    async def death(self) -> str:
        """Wait until it has died of what no call of kubelet's waits for.

        The step at which it did.
        """
        assert self._process is not None
        async with asyncio.timeout(LIMIT_S):
            assert await self._process.wait() == -signal.SIGKILL
        return self.where()

    async def until_step(self, step: str) -> None:
        """Wait until it has come to a step."""
        await until(lambda: step in self._log())

    @property
    def is_dead(self) -> bool:
        """Say whether it has come to its end."""
        return len(self._log()) >= self._doomed_step

    def where(self) -> str:
        """Name the step at which it died."""
        return (self._log() or ["before any step"])[-1]

    def taken(self) -> list[str]:
        """Name the steps of the call, without their numbers."""
        return [step.partition(" ")[2] for step in self._log()]

    async def stop(self) -> None:
        """End the present one, however."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _log(self) -> list[str]:
        return self.steps.read_text(encoding="utf-8").splitlines()


def is_transport(error: str) -> bool:
    """Say whether an error means that no gateway has answered."""
    return "is not registered" in error or "code = Unavailable" in error or "code = Canceled" in error or "EOF" in error
