"""The login of a connection, from the files that the settings name, and its changes.

The files are read again for each client. Folders are watched (inotify), so that nothing is read
while nothing happens. A change that inotify does not see (a file mounted alone, a folder of another
machine) is seen within half a minute. `topobus.bus.connection.connection` acts on a change.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct

from topobus.bus.connection.endpoint import read_files
from topobus.bus.login.user_keys import split_login
from topobus.process.config import NatsSettings
from topobus.process.folder_events import FolderEvents
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError

__all__ = ["Login", "LoginFiles", "login_files", "read_login"]

_LOOK_EVERY_S = 30.0


class Login(Struct, frozen=True, kw_only=True):
    """The content of the files at one moment."""

    user: str
    """Empty: none. The second name of the settings' user, where the user has one before the
    password."""
    password: str | None
    tls: ssl.SSLContext | None
    digest: bytes
    """Of all files: another login has another one."""


def login_files(settings: NatsSettings) -> tuple[str, ...]:
    """List the files that the settings name, sorted. All of them are read again for each client."""
    names = (name for name in settings.__struct_fields__ if name.endswith("_file"))
    return tuple(sorted({str(getattr(settings, name)) for name in names if getattr(settings, name)}))


def _digest_of(settings: NatsSettings) -> bytes:
    """Return a digest that changes whenever the content of one of the files does."""
    digest = hashlib.sha256()
    for file in login_files(settings):
        try:
            content = Path(file).read_bytes()
        except OSError:
            # The reader of the file names the setting in its error.
            content = b""
        digest.update(hashlib.sha256(content).digest())
    return digest.digest()


def read_login(settings: NatsSettings) -> Login:
    """Read all files.

    Errors: raises ConfigError that names the key.
    """
    digest = _digest_of(settings)
    password, tls = read_files(settings)
    user, password = split_login(settings.user, password) if password is not None else (settings.user, None)
    return Login(user=user, password=password, tls=tls, digest=digest)


class LoginFiles:
    """The files of one connection, and the login in use."""

    def __init__(self, settings: NatsSettings) -> None:
        self._settings = settings
        self._files = login_files(settings)
        self._folders = sorted({Path(file).absolute().parent for file in self._files})
        self._changed = asyncio.Event()
        self._refused: bytes = b""
        self.login: Login | None = None
        """That of the last client that came up."""

    async def read(self) -> Login:
        """Read the files for a new client.

        Errors: as `read_login`.
        """
        self._changed.clear()
        return await asyncio.to_thread(read_login, self._settings) if self._files else read_login(self._settings)

    def use(self, login: Login) -> None:
        """Record the login with which a client connected."""
        self.login = login

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until the files change."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def next(self) -> Login:
        """Wait until the files hold a login that is not the one in use. Log once why they cannot be
        read.
        """
        if not self._files:
            await asyncio.get_running_loop().create_future()
        while True:
            newest = await self._read_quietly() if await self._is_changed() else None
            if newest is not None and self._is_other(newest):
                return newest
            await self.pause(_LOOK_EVERY_S)

    async def _is_changed(self) -> bool:
        """Return whether the files hold another content than the login in use, by their bytes.

        To read them as a login would load all authorities, 25 ms for a system's own bundle.
        """
        self._changed.clear()
        is_changed = self.login is None or await asyncio.to_thread(_digest_of, self._settings) != self.login.digest
        if not is_changed:
            self._refused = b""
        return is_changed

    def _is_other(self, newest: Login) -> bool:
        return self.login is not None and newest.digest != self.login.digest

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

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the folders of the files within the block."""
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
