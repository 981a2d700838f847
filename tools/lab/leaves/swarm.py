"""Many simulated nodes in one process, controlled by lines of JSON: `python -m lab.leaves.swarm
PORT CONTENT_FILE [CLUSTER]`.

Each line on standard input is an order, and each line on standard output its report, with times by
the monotonic clock, which all processes of a machine share. Orders: join (nodes from a number on,
all at once), change, compare, rejoin, counts.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

from lab.leaves.node_content import NodeContent, node_name
from lab.leaves.open_files import raise_open_files
from lab.leaves.simulated_node import SimulatedNode
from topobus.formats.messages.catalogue import LEDGER

__all__ = ["Order", "Report", "main"]


class Order(Struct, frozen=True, kw_only=True):
    """One order."""

    do: str
    first: int = 0
    count: int = 0
    seconds: float = 0.0


class Report(Struct, frozen=True, kw_only=True):
    """The result of an order. Times are in seconds by the monotonic clock."""

    done: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    acknowledged_ms: tuple[float, ...] = ()
    counts: dict[str, int] = {}
    losses: int = 0
    """How often a link ended while its node sent."""
    error: str = ""


class _Swarm:
    def __init__(self, port: int, content: NodeContent, cluster: str) -> None:
        self._port = port
        self._content = content
        self._cluster = cluster
        self._nodes: dict[int, SimulatedNode] = {}

    async def obey(self, order: Order) -> Report:
        began_at = time.monotonic()
        times_ms: list[float] = []
        match order.do:
            case "join":
                nodes = [self._make(number) for number in range(order.first, order.first + order.count)]
                began_at = time.monotonic()
                for times in await asyncio.gather(*(self._join(node) for node in nodes)):
                    times_ms += times
            case "change":
                until = began_at + order.seconds
                for times in await asyncio.gather(*(node.change(LEDGER.name, until) for node in self._nodes.values())):
                    times_ms += times
            case "compare":
                for times in await asyncio.gather(*(node.compare() for node in self._nodes.values())):
                    times_ms += times
            case "rejoin":
                times_ms = [
                    float(attempts)
                    for attempts in await asyncio.gather(*(node.rejoin() for node in self._nodes.values()))
                ]
            case "counts":
                pass
            case _:
                raise ValueError(f"no such order: {order.do}")
        return Report(
            done=len(self._nodes),
            began_at=began_at,
            ended_at=time.monotonic(),
            acknowledged_ms=tuple(round(each, 3) for each in times_ms),
            counts=dict(sum((node.connection.counts for node in self._nodes.values()), Counter())),
            losses=sum(node.losses for node in self._nodes.values()),
        )

    def _make(self, number: int) -> SimulatedNode:
        node = SimulatedNode(node_name(number), self._content, "127.0.0.1", self._port, cluster=self._cluster)
        self._nodes[number] = node
        return node

    async def _join(self, node: SimulatedNode) -> list[float]:
        await node.persist()
        return await node.say_all()


async def main(port: int, content_file: Path, cluster: str) -> None:
    """Execute orders until standard input ends."""
    raise_open_files()
    content = msgspec.json.decode(await asyncio.to_thread(content_file.read_bytes), type=NodeContent)
    swarm = _Swarm(port, content, cluster)
    orders = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        try:
            report = await swarm.obey(msgspec.json.decode(line, type=Order))
        except Exception as err:  # noqa: BLE001 - boundary: the order failed, and its report names the error
            report = Report(error=f"{type(err).__name__}: {err}")
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
