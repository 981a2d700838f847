"""The processes that hold the simulated nodes of a benchmark, and the orders to them.

Each process holds every second node: one alone would be the bottleneck that is measured.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Self

import msgspec
from msgspec import structs

from lab.leaves.node_content import NodeContent
from lab.leaves.swarm import Order, Report

__all__ = ["Crowd"]

_PROCESSES = 2
_LIMIT_S = 900.0
# A report has a time for each message of each node.
_LONGEST_REPORT = 64 * 1024 * 1024


class Crowd:
    """Use as `async with Crowd(…) as crowd`."""

    def __init__(
        self, port: int, content: NodeContent, folder: Path, *, cluster: str = "", processes: int = _PROCESSES
    ) -> None:
        self._port = port
        self._content = content
        self._file = folder / "content.json"
        self._cluster = cluster
        self._count = processes
        self._processes: list[asyncio.subprocess.Process] = []

    async def order(self, order: Order) -> list[Report]:
        """Give an order to all, with the nodes divided among them. Returns the reports when all
        have done it.

        Errors: raises RuntimeError with the error of one of them.
        """
        shares = [
            structs.replace(
                order,
                first=order.first + order.count * place // self._count,
                count=_share(order.count, place, self._count),
            )
            for place in range(self._count)
        ]
        return list(await asyncio.gather(*map(self._send, self._processes, shares)))

    async def order_one(self, order: Order) -> Report:
        """Give an order to one of them."""
        return await self._send(self._processes[0], order)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._file.write_bytes, msgspec.json.encode(self._content))
        for _ in range(self._count):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "lab.leaves.swarm",
                    str(self._port),
                    str(self._file),
                    self._cluster,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LONGEST_REPORT,
                )
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                # Before the kill: our end of a pipe that is still open would be an error that is
                # never awaited.
                process.stdin.close()
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _send(self, process: asyncio.subprocess.Process, order: Order) -> Report:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(_LIMIT_S):
            line = await process.stdout.readline()
        report = (
            msgspec.json.decode(line, type=Report) if line else Report(error="the process that holds the nodes ended")
        )
        if report.error:
            raise RuntimeError(f"{order.do}: {report.error}")
        return report


def _share(count: int, place: int, of: int) -> int:
    return count * (place + 1) // of - count * place // of
