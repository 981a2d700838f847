"""Keeps the users of the NATS server that `topobus up` runs in step with their password files, also
when these change while it runs (`topobus keys rotate`).

It writes the server's configuration, and calls for each change, so that the server reads it again.
When the files cannot be read, it reports that, and the server keeps its present users.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from topobus.bus.login.user_keys import make_passwords, read_logins
from topobus.bus.server_config.nats_permissions import PRINCIPALS, render_open_api
from topobus.bus.server_config.server_users import accounts_configuration, logins_of
from topobus.local_system.nats_store import StoreSize, write_config
from topobus.process.folder_events import FolderEvents
from topobus.values.errors import ConfigError

__all__ = ["NatsUsers"]


class NatsUsers:
    """The users of one server. It has none when `folder` is None."""

    def __init__(
        self,
        folder: Path | None,
        store: Path,
        size: StoreSize,
        seen_as: str,
        more: str = "",
        *,
        classes: Sequence[str] = (),
    ) -> None:
        """Make the passwords that are missing, and write the server's configuration.

        Shapes: seen_as — the store's path for the server. more — other lines. classes — device
        classes besides ours, each of which becomes a user.
        """
        self._folder = folder
        self._store = store
        self._size = size
        self._seen_as = seen_as
        self._more = more
        self._classes = tuple(classes)
        self._passwords = make_passwords(folder, (*PRINCIPALS, *classes)) if folder is not None else {}
        self.config = self._write()
        """Name of the configuration's file in the store."""

    @property
    def login(self) -> tuple[str, str]:
        """User and password with which the server is probed. Empty without users."""
        return next(
            ((login, self._passwords[login]) for login in logins_of("cli") if login in self._passwords), ("", "")
        )

    async def follow(self, reload: Callable[[], None], say: Callable[[str], None]) -> None:
        """Write the configuration again whenever passwords have changed, and call `reload`. Runs
        until cancelled.
        """
        if self._folder is None:
            return
        try:
            with FolderEvents(self._folder) as events:
                while await events.next():
                    try:
                        if await asyncio.to_thread(self._take_over, self._folder):
                            reload()
                    except ConfigError as err:
                        say(f"NATS keeps the users that it has: {err.message}")
        except OSError as err:
            say(f"changes in {self._folder} are not heard ({err.strerror}): new passwords count from the next start on")

    def _take_over(self, folder: Path) -> bool:
        """Read the passwords, and write the configuration when they have changed.

        It makes no missing password: that would itself be noticed as the next change.
        """
        passwords = {
            login: password
            for principal in (*PRINCIPALS, *self._classes)
            for login, password in read_logins(folder, principal).items()
        }
        if passwords == self._passwords:
            return False
        self._passwords = passwords
        self._write()
        return True

    def _write(self) -> str:
        users = accounts_configuration(self._passwords, classes=self._classes) if self._passwords else render_open_api()
        return write_config(self._store, self._size, self._more + users, seen_as=self._seen_as)
