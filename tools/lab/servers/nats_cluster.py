"""Several real nats-servers as one cluster, for tests of what only replicas do: a leader dies, a
follower lags, the quorum is lost.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from topobus.simulation.nats_server import NatsServer, free_port

__all__ = ["NatsCluster"]

# A group of JetStream's leaders is founded within a second or two.
_FOUNDING_S = 30.0
_LOOK_S = 0.05
_FOUNDINGS = 10


class NatsCluster:
    """`size` servers on loopback, each with its own store.

    Use as `async with NatsCluster(binary=…) as cluster: …`. The block begins when JetStream's
    leader knows all of them. A server that founds the leaders' group before it knows that all
    others have JetStream counts one too few (checkClusterSize in nats-server's
    jetstream_cluster.go). That happens in one of 30 to one of 5 simultaneous starts of 2.10.27,
    depending on the load of the machine. Then one server stays outside permanently, and no stream
    of three copies can be made. Such a group is thrown away and founded again, as its operator
    would have to.
    """

    def __init__(
        self, *, binary: Path | None = None, size: int = 3, make: Callable[[int, str], NatsServer] | None = None
    ) -> None:
        """Prepare the servers.

        `make` makes each, in place of a plain one, from its client port and from configuration of
        ours that it must have.
        """
        make = make or (lambda port, config: NatsServer(binary=binary, port=port, config=config))
        ports: list[int] = []
        while len(ports) < 3 * size:
            # None of them is in use yet, so the same one may come twice.
            ports = list(dict.fromkeys((*ports, free_port())))
        clients, routes, self._monitors = ports[:size], ports[size : 2 * size], ports[2 * size :]
        others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = [
            make(
                client,
                f'server_name: "n{number}"\nhttp: "127.0.0.1:{monitor}"\n'
                f'cluster {{ name: "topobus-test", listen: "127.0.0.1:{port}", pool_size: -1, routes: [ {others} ] }}',
            )
            for number, (client, port, monitor) in enumerate(zip(clients, routes, self._monitors, strict=True))
        ]
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """All servers, as a client's settings name them."""
        return ",".join(server.url for server in self.servers)

    def named(self, name: str) -> NatsServer:
        """Return the server with this name (`n0`, `n1`, …), as stream information names leaders."""
        return self.servers[int(name.removeprefix("n"))]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(stack.enter_async_context(server) for server in self.servers))
            if not await self._is_whole():
                await self.found_anew()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.__aexit__(*error)  # type: ignore[arg-type]  # the three that were given to us

    async def found_anew(self) -> None:
        """Kill all servers, and start them with empty stores, until they are one group of all.

        Errors: raises RuntimeError when they are not after several tries.
        """
        for _ in range(_FOUNDINGS):
            await asyncio.gather(*(server.kill() for server in self.servers))
            for server in self.servers:
                await asyncio.to_thread(shutil.rmtree, server.store, ignore_errors=True)
            await asyncio.gather(*(server.start() for server in self.servers))
            if await self._is_whole():
                return
        raise RuntimeError(
            f"{len(self.servers)} nats-servers founded no group of {len(self.servers)} in {_FOUNDINGS} tries"
        )

    async def _is_whole(self) -> bool:
        """Wait until JetStream has a leader. False when its group has another size than the
        cluster.

        Errors: raises RuntimeError when there is no leader in time.
        """
        try:
            async with asyncio.timeout(_FOUNDING_S):
                while True:
                    for monitor in self._monitors:
                        group = await asyncio.to_thread(_leaders_group, monitor)
                        # Only the leader lists the others, as it learns of them.
                        if group.get("leader") and group.get("cluster_size") != len(self.servers):
                            return False
                        if len(group.get("replicas") or ()) == len(self.servers) - 1:
                            return True
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as err:
            raise RuntimeError(
                f"JetStream has no leader after {_FOUNDING_S:g} s:\n{self.servers[0].read_log()[-2000:]}"
            ) from err


def _leaders_group(monitor: int) -> dict[str, Any]:
    """Ask a server's monitoring port for the group of JetStream's leaders.

    Empty while it is not there.
    """
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{monitor}/jsz", timeout=5
        ) as answer:
            group: dict[str, Any] = json.load(answer).get("meta_cluster") or {}
            return group
    except OSError:
        return {}
