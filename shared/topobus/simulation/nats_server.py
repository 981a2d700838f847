"""Runs a real nats-server with JetStream for a test, on a random port, with a store of its own that
is removed at the end.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from topobus.values.errors import ConfigError

__all__ = ["NatsServer", "find_nats_server", "free_port"]

_START_LIMIT_S = 20.0
# Above the ports of well-known servers, below those that Linux gives to clients
# (net.ipv4.ip_local_port_range: 32768 to 60999).
_PORTS = range(14_000, 32_768)
_PORT_TRIES = 1000


def find_nats_server() -> Path:
    """Find the server's binary: TOPOBUS_NATS_SERVER, else PATH.

    Errors: raises ConfigError with the ways to get one.
    """
    given = os.environ.get("TOPOBUS_NATS_SERVER", "")
    program = shutil.which(given or "nats-server")
    if program is None:
        where = f"TOPOBUS_NATS_SERVER names {given}, which cannot be run" if given else "no nats-server on PATH"
        raise ConfigError(where, next_step="install the package nats-server, or set TOPOBUS_NATS_SERVER to its path")
    return Path(program)


def free_port() -> int:
    """Return a free TCP port of the loopback interface.

    It is not one that the kernel gives to connecting clients: a server may be started at this port
    a while later, and again after it died, and a client's connection would block it for as long as
    it lasts.
    Errors: raises RuntimeError when no port is found among those tried.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port among {_PORT_TRIES} tried between {_PORTS.start} and {_PORTS.stop}")


class NatsServer:
    """One server process. The store outlives `stop` and `start`.

    The folder is removed at the end, unless the test failed inside. Use as `async with NatsServer()
    as server: …`.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        config: str = "",
        port: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
        parent: Path | None = None,
        store_limit: str = "",
        start_limit_s: float = _START_LIMIT_S,
    ) -> None:
        """Prepare a server. `environment` is added to our own: `config` may name its variables, as
        passwords do.

        Shapes: parent — where its folder is made; None: the system's temporary folder. store_limit
        — how much all streams together may reserve, as in `64GB`; empty: the server's own choice,
        three quarters of what the disk has left.
        Units: start_limit_s — seconds that a start may take.
        """
        self.binary = binary or find_nats_server()
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="topobus-nats-", dir=parent))
        self.store = self.folder / "store"
        self.log = self.folder / "nats.log"
        self._config = config
        self._start_limit_s = start_limit_s
        self._store_limit = f", max_file_store: {store_limit}" if store_limit else ""
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id.

        Errors: raises RuntimeError while it does not run.
        """
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether the process lives. One that ended by itself does not."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start on the same port and store. Returns when a client would be served.

        Errors: raises RuntimeError with the server's log when it ends, or does not answer in time.
        """
        file = self.write_config()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(self.binary), "-c", str(file), stdout=log, stderr=log, env=self._environment
            )
        try:
            async with asyncio.timeout(self._start_limit_s):
                while not await self._is_answering():
                    if self._process.returncode is not None:
                        raise RuntimeError(
                            f"nats-server ended with status {self._process.returncode}:\n{self.read_log()}"
                        )
                    await asyncio.sleep(0.01)
        except TimeoutError as err:
            raise RuntimeError(
                f"nats-server did not answer within {self._start_limit_s:g} s:\n{self.read_log()}"
            ) from err

    async def stop(self) -> None:
        """End the process in order. The store stays."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End the process as a crash would. The store stays."""
        await self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        # The signal is only on its way: return when every thread has stopped.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Continue a frozen process."""
        os.kill(self.pid, signal.SIGCONT)

    def reload(self, config: str) -> None:
        """Make a running server read other configuration (SIGHUP)."""
        self._config = config
        self.write_config()
        os.kill(self.pid, signal.SIGHUP)

    def read_log(self) -> str:
        """Return what the server wrote."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self._end(signal.SIGKILL)
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self._end(signal.SIGTERM)
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            # Kept to look into the failure.
            print(f"nats-server's log: {self.log}\n{self.read_log()[-2000:]}")  # noqa: T201 - pytest shows it with the failure

    def write_config(self) -> Path:
        """Write the server's configuration file."""
        file = self.folder / "nats.conf"
        jetstream = f'jetstream {{ store_dir: "{self.store}"{self._store_limit} }}'
        file.write_text(f'listen: "127.0.0.1:{self.port}"\n{jetstream}\n{self._config}\n', encoding="utf-8")
        return file

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        # A frozen process would never see the signal.
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _is_answering(self) -> bool:
        """Speak the protocol far enough to know: INFO comes, CONNECT and PING give PONG."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            if b'"tls_required":true' in await reader.readline():
                # It would accept TLS now, and nothing else.
                return True
            writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
            line = await reader.readline()
            # With authorization on, a refusal is an answer as well.
            return line.startswith((b"PONG", b"-ERR"))
        except OSError:
            return False
        finally:
            writer.close()
