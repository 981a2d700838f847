"""Several real nats-servers that are one cluster: for what only replicas do (a leader dies, a follower lags, a majority is gone)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from topobus.simulation.nats_server import NatsServer, free_port

__all__ = ["NatsCluster"]


class NatsCluster:
    """`size` servers on loopback, each with its own store. Use as `async with NatsCluster(binary=…) as cluster: …`.

    JetStream elects its leader some seconds after the start; Topobus waits for that by itself, so nothing here does.
    """

    def __init__(self, *, binary: Path | None = None, size: int = 3) -> None:
        routes = [free_port() for _ in range(size)]
        others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = [
            NatsServer(
                binary=binary,
                config=(
                    f'server_name: "n{number}"\n'
                    f'cluster {{ name: "topobus-test", listen: "127.0.0.1:{port}", pool_size: -1, routes: [ {others} ] }}'
                ),
            )
            for number, port in enumerate(routes)
        ]
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """All servers, as a client's settings name them."""
        return ",".join(server.url for server in self.servers)

    def named(self, name: str) -> NatsServer:
        """Give the server that calls itself so (`n0`, `n1`, …), as stream information names leaders."""
        return self.servers[int(name.removeprefix("n"))]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(stack.enter_async_context(server) for server in self.servers))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.__aexit__(*error)  # type: ignore[arg-type]  # the three that were given to us
