"""One nats-server for many tests: each test borrows an account, which has its own subjects, streams
and connections.

Starting a server takes longer than most tests. Accounts are isolated from each other, so the shared
server is like a test's own as long as the test does not stop, freeze or configure it, which a
`BorrowedServer` refuses. An account is lent once, so a late message or a consumer of an earlier
test reaches no other test. When all accounts of a server have been lent, another server is started.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, Self

import msgspec
from nats.aio.client import Client

from lab.servers.shaped_servers import cheap_folder
from topobus.bus.streams.jetstream import API as JETSTREAM_API
from topobus.simulation.nats_server import NatsServer

__all__ = ["BorrowedServer", "NatsAccounts"]

_ACCOUNTS = 64
_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 5.0
# The streams of one account reserve some GiB. 64 accounts must not be refused for a disk that none
# of them fills.
_STORE_LIMIT = "64TB"


class BorrowedServer(NatsServer):
    """An account of a shared server, with the interface of a server of one's own where that makes
    sense.

    Errors: RuntimeError for all that would affect others: start, stop, kill, pause, resume, reload,
    and a look at process, store or port.
    """

    def __init__(self, shared: NatsServer, account: str) -> None:
        # Not the parent's: nothing is made here, neither folder nor port.
        self.binary = shared.binary
        self.log = shared.log
        self._address = f"127.0.0.1:{shared.port}"
        self._account = account
        self._log_begin = shared.log.stat().st_size if shared.log.exists() else 0

    @property
    def url(self) -> str:
        """Where clients connect, with the account's user."""
        return f"nats://{self._account}:{self._account}@{self._address}"

    def read_log(self) -> str:
        """Give what the server wrote since the account was borrowed.

        Lines of other accounts are among them.
        """
        with self.log.open("rb") as log:
            log.seek(self._log_begin)
            return log.read().decode("utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Refuse: the process is not ours alone."""
        self._refuse("pid")

    async def start(self) -> None:
        """Refuse."""
        self._refuse("start")

    async def stop(self) -> None:
        """Refuse."""
        self._refuse("stop")

    async def kill(self) -> None:
        """Refuse."""
        self._refuse("kill")

    def pause(self) -> None:
        """Refuse."""
        self._refuse("pause")

    def resume(self) -> None:
        """Refuse."""
        self._refuse("resume")

    def reload(self, config: str) -> None:
        """Refuse."""
        self._refuse(f"reload({config[:20]!r}…)")

    async def __aenter__(self) -> Self:
        self._refuse("async with")

    def __getattr__(self, name: str) -> NoReturn:
        # Attributes of a server of one's own that this one lacks: port, store, folder.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(name)

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what}: this nats-server is shared with other tests: take the fixture own_nats_server")


class _SharedServer:
    """A running server, with those of its accounts that were not lent yet."""

    def __init__(self, binary: Path | None, names: list[str], environment: Mapping[str, str]) -> None:
        self.files = NatsServer(
            binary=binary, config=_configuration(names), parent=cheap_folder(), store_limit=_STORE_LIMIT
        )
        with self.files.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.files.binary), "-c", str(self.files.write_config())], stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while not _is_listening(self.files.port):
            if not self.is_running() or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server did not start:\n{self.files.read_log()}")
            time.sleep(0.01)
        self.unused = list(reversed(names))
        self.lent = 0

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.files.folder, ignore_errors=True)


class NatsAccounts:
    """Lends accounts of one running server, and starts the next server when they are used up.

    Use as `with NatsAccounts() as accounts: …`. Its process belongs to no event loop, since
    each test has a loop of its own.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        size: int = _ACCOUNTS,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._binary = binary
        self._names = [f"test{number}" for number in range(size)]
        self._environment = {**os.environ, **environment}
        # The last one lends. Each earlier one ends when its last account is given back.
        self._servers: list[_SharedServer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.end()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[BorrowedServer]:
        """Lend an account that was never lent before. Its streams are deleted afterwards."""
        if not self._servers or not self._servers[-1].unused or not self._servers[-1].is_running():
            await asyncio.to_thread(self._begin)
        server = self._servers[-1]
        server.lent += 1
        lent = BorrowedServer(server.files, server.unused.pop())
        try:
            yield lent
        except BaseException:
            print(f"nats-server's log: {lent.log}\n{lent.read_log()[-2000:]}")
            raise
        finally:
            await _delete_streams(lent.url)
            server.lent -= 1

    def _begin(self) -> None:
        for server in [server for server in self._servers if not server.lent]:
            server.end()
            self._servers.remove(server)
        self._servers.append(_SharedServer(self._binary, self._names, self._environment))


def _configuration(names: list[str]) -> str:
    """Write the accounts. Each accepts only its own user, whose password is its name."""
    accounts = ",\n".join(
        f"{name}: {{ jetstream: enabled, users: [ {{ user: {name}, password: {name} }} ] }}" for name in names
    )
    return f"accounts {{ {accounts} }}"


def _is_listening(port: int) -> bool:
    """Say whether the server's greeting comes."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


async def _delete_streams(url: str) -> None:
    """Free an account's disk and memory.

    A server that does not answer has another fault, which a test has reported.
    """
    client = Client()
    await client.connect(url, allow_reconnect=False, connect_timeout=2)
    try:
        while True:
            answer = await client.request(f"{JETSTREAM_API}.STREAM.NAMES", b"{}", timeout=5.0)
            names = msgspec.json.decode(answer.data).get("streams") or []
            if not names:
                return
            await asyncio.gather(
                *(client.request(f"{JETSTREAM_API}.STREAM.DELETE.{name}", b"", timeout=5.0) for name in names)
            )
    finally:
        await client.close()
