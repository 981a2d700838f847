"""As whom a connection comes: what stands in the files that the settings name, when it expires, and when they hold something else.

Flows in: the settings' files, as they are and as they change. Flows out: a login for each client, and word that another one is there. A folder is listened to (inotify), so that
nothing is read while nothing happens; what that does not see (a file mounted alone, a folder of another machine) is seen within half a minute. What is done with it is the
connection's (`topobus.runtime.connection`).
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from topobus.contracts.nats_keys import Credentials, parse_credentials
from topobus.domain.errors import ConfigError, ContractError
from topobus.runtime.clock import Clock
from topobus.runtime.config import NatsSettings
from topobus.runtime.endpoint import read_files, read_secret
from topobus.runtime.folder_events import FolderEvents
from topobus.runtime.logging import get_logger
from topobus.runtime.metrics import BusMetrics
from topobus.runtime.readiness import Readiness
from topobus.runtime.signing import need_signing
from topobus.runtime.user_keys import split_login

__all__ = ["Login", "LoginFiles", "expiry_text", "login_files", "read_login"]

_LOOK_EVERY_S = 30.0
# A part of what is left at the start, as each connection's name has it: many that were issued together do not look at one moment.
_DUE_AT, _DUE_SPREAD = 0.8, 0.1


class Login(Struct, frozen=True, kw_only=True):
    """What stood in the files at one moment."""

    user: str
    """Empty: none. The second name of the settings' user, where that stands before the password."""
    password: str | None
    credentials: Credentials | None
    tls: ssl.SSLContext | None
    digest: bytes
    """Of all files: another login has another one."""

    @property
    def expires_at(self) -> float | None:
        """Unix time from which on the server does not take it; None: never."""
        return self.credentials.expires_at if self.credentials is not None else None


def login_files(settings: NatsSettings) -> tuple[str, ...]:
    """List the files that the settings name, sorted; all of them are read anew for each client."""
    names = (name for name in settings.__struct_fields__ if name.endswith("_file"))
    return tuple(sorted({str(getattr(settings, name)) for name in names if getattr(settings, name)}))


def _digest_of(settings: NatsSettings) -> bytes:
    """Tell what stands in all files from anything else that may stand there."""
    digest = hashlib.sha256()
    for file in login_files(settings):
        try:
            content = Path(file).read_bytes()
        except OSError:
            # Who reads it says which setting names it.
            content = b""
        digest.update(hashlib.sha256(content).digest())
    return digest.digest()


def read_login(settings: NatsSettings) -> Login:
    """Read all files.

    Errors: raises ConfigError that names the key, and what is missing to use it.
    """
    digest = _digest_of(settings)
    password, tls = read_files(settings)
    credentials = _read_credentials(settings.credentials_file) if settings.credentials_file else None
    user, password = split_login(settings.user, password) if password is not None else (settings.user, None)
    return Login(user=user, password=password, credentials=credentials, tls=tls, digest=digest)


def _read_credentials(file: str) -> Credentials:
    key = "nats.credentials_file"
    text = read_secret(file, key)
    need_signing(key)
    try:
        return parse_credentials(text)
    except ContractError as err:
        raise ConfigError(f"{key}: {file} holds no credentials: {err.message}", next_step=err.next_step, key=key) from err


def expiry_text(settings: NatsSettings, expires_at: float, *, is_over: bool) -> str:
    """Say when credentials expire, and what to do."""
    moment = datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"the credentials in {settings.credentials_file} {'expired' if is_over else 'expire'} at {moment}; put newer ones there"


class LoginFiles:
    """The files of one connection, and the login in use."""

    def __init__(self, settings: NatsSettings, name: str, clock: Clock, metrics: BusMetrics, readiness: Readiness) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._readiness = readiness
        self._files = login_files(settings)
        self._folders = sorted({Path(file).absolute().parent for file in self._files})
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
        self._due_part = _DUE_AT - _DUE_SPREAD * share
        self._changed = asyncio.Event()
        self._refused: bytes = b""
        self.login: Login | None = None
        """The last one that was read for a client."""
        self._due_at = float("inf")
        self.is_due = False
        """Most of the credentials' life is over, and no newer ones are there."""

    async def read(self) -> Login:
        """Read the files for a new client.

        Errors: as `read_login`.
        """
        self._changed.clear()
        return await asyncio.to_thread(read_login, self._settings) if self._files else read_login(self._settings)

    def use(self, login: Login) -> None:
        """Take note that a client came with this."""
        now_s = self._clock.now().timestamp()
        self.login, self.is_due = login, False
        left_s = (login.expires_at or 0.0) - now_s
        self._due_at = now_s + self._due_part * left_s if login.expires_at is not None and left_s > 0 else float("inf")
        self._metrics.credentials_expire.set(login.expires_at or 0.0)

    @property
    def why_expired(self) -> str:
        """Say that the login in use has expired by our clock, and what to do; empty when it has not."""
        expires_at = self.login.expires_at if self.login is not None else None
        is_over = expires_at is not None and expires_at <= self._clock.now().timestamp()
        return expiry_text(self._settings, expires_at, is_over=True) if expires_at is not None and is_over else ""

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until something happened to the files."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def next(self) -> Login:
        """Wait until the files hold a login that is not the one in use, and has not expired; says when it is high time, and each reason once."""
        if not self._files:
            await asyncio.get_running_loop().create_future()
        while True:
            newest = await self._read_quietly() if await self._is_changed() else None
            if newest is not None and self._is_other(newest):
                return newest
            self._look_at_expiry()
            now_s = self._clock.now().timestamp()
            await self.pause(max(0.0, min(_LOOK_EVERY_S, self._due_at - now_s)) if not self.is_due else _LOOK_EVERY_S)

    async def _is_changed(self) -> bool:
        """Say whether the files hold something else than the login in use. Their bytes tell; to read them as a login means to load all authorities, 25 ms for a system's own bundle."""
        self._changed.clear()
        is_changed = self.login is None or await asyncio.to_thread(_digest_of, self._settings) != self.login.digest
        if not is_changed:
            self._refused = b""
        return is_changed

    def _is_other(self, newest: Login) -> bool:
        if self.login is None or newest.digest == self.login.digest:
            return False
        return newest.expires_at is None or newest.expires_at > self._clock.now().timestamp()

    async def _read_quietly(self) -> Login | None:
        try:
            newest = await self.read()
        except ConfigError as err:
            reason = str(err).encode()
            if reason != self._refused:
                self._refused = reason
                get_logger().warning("bus.login-unreadable", error=str(err), next_step=err.next_step)
            return None
        self._refused = b""
        return newest

    def _look_at_expiry(self) -> None:
        if self.is_due or self.login is None or self.login.expires_at is None or self._clock.now().timestamp() < self._due_at:
            return
        self.is_due = True
        why = expiry_text(self._settings, self.login.expires_at, is_over=False)
        get_logger().warning("bus.credentials-expire", why=why)
        self._readiness.set("bus", is_ready=True, why=why)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Listen to the folders of the files within the block."""
        with ExitStack() as stack:
            listening = []
            for folder in self._folders:
                try:
                    events = stack.enter_context(FolderEvents(folder))
                except OSError as err:
                    get_logger().debug("bus.login-not-watched", folder=str(folder), error=str(err))
                    continue
                listening.append(asyncio.create_task(self._listen(events), name="bus-login-files"))
            try:
                yield
            finally:
                for task in listening:
                    task.cancel()
                if listening:
                    await asyncio.wait(listening)

    async def _listen(self, events: FolderEvents) -> None:
        while await events.next():
            self._changed.set()
        # The folder is gone: one more look, and from now on every half minute.
        self._changed.set()
