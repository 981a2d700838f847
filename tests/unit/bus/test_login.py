"""What stands in the files of a login, and when they hold another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from topobus.bus.login.login import LoginFiles, login_files, read_login
from topobus.process.config import NatsSettings


async def test_next_login_comes_when_the_file_holds_another_one(tmp_path: Path) -> None:
    """What is in use is no reason to change; the first other one is."""
    file, newer = tmp_path / "password", tmp_path / "newer"
    file.write_text("p1")
    files = LoginFiles(NatsSettings(user="gpu", password_file=str(file)))
    files.use(await files.read())
    async with asyncio.timeout(60), files.watched():
        waiting = asyncio.create_task(files.next())
        newer.write_text("p2")
        newer.replace(file)

        assert (await waiting).password == "p2"


def test_second_name_is_taken_from_the_file(tmp_path: Path) -> None:
    """A user's own second name alone counts; another text with a colon is a password."""
    file = tmp_path / "password"
    settings = NatsSettings(user="gpu", password_file=str(file))
    logins = []
    for text in ("p1", "gpu__2:p2", "nic__2:p3"):
        file.write_text(f"{text}\n")
        logins.append(read_login(settings))

    assert [(login.user, login.password) for login in logins] == [("gpu", "p1"), ("gpu__2", "p2"), ("gpu", "nic__2:p3")]
    assert len({login.digest for login in logins}) == len(logins)


def test_every_file_of_the_settings_is_watched() -> None:
    """Whatever setting names one: certificates are changed as passwords are."""
    settings = NatsSettings(password_file="/p", tls_ca_file="/ca")

    assert login_files(settings) == ("/ca", "/p")
