"""What stands in the files of a login, and when a connection says that it is time for newer ones."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from topobus.contracts.nats_accounts import Shape, accounts
from topobus.domain.errors import ConfigError
from topobus.runtime.clock import SystemClock
from topobus.runtime.config import NatsSettings
from topobus.runtime.login import LoginFiles, login_files, read_login
from topobus.runtime.metrics import BusMetrics
from topobus.runtime.operator_keys import OperatorFolder, credentials_file
from topobus.runtime.readiness import Readiness

NOW = 1_800_000_000
_LIFE_S = 1000


class _Stopped(SystemClock):
    """Says always the same moment."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(NOW, UTC)


def _credentials(folder: Path) -> NatsSettings:
    OperatorFolder(folder, accounts(Shape.CENTRAL), now=NOW).make(valid_s=_LIFE_S)
    return NatsSettings(credentials_file=str(credentials_file(folder, "gpu")))


def _due_s(settings: NatsSettings, name: str) -> float:
    """Say after how many seconds a connection of this name looks for newer credentials."""
    files = LoginFiles(settings, name, _Stopped(), BusMetrics(CollectorRegistry()), Readiness())
    files.use(read_login(settings))
    return files._due_at - NOW


def test_connections_look_at_moments_of_their_own_before_credentials_expire(tmp_path: Path) -> None:
    """Between 70 and 80 % of what is left, each by its name: the same at each start, and not all at once."""
    settings = _credentials(tmp_path)
    due = {name: _due_s(settings, name) for name in ("gpu", "nic", "topology", "gateway", "controller")}

    assert all(0.7 * _LIFE_S <= moment <= 0.8 * _LIFE_S for moment in due.values())
    assert len(set(due.values())) == len(due)
    assert due["gpu"] == _due_s(settings, "gpu")


async def test_expired_credentials_are_not_changed_for(tmp_path: Path) -> None:
    """Who lives with good ones does not leave them for what no server takes."""
    settings = _credentials(tmp_path)
    files = LoginFiles(settings, "gpu", _Stopped(), BusMetrics(CollectorRegistry()), Readiness())
    files.use(await files.read())
    OperatorFolder(tmp_path, accounts(Shape.CENTRAL), now=NOW - 2 * _LIFE_S).rotate(["gpu"], valid_s=_LIFE_S)
    expired = await files.read()
    OperatorFolder(tmp_path, accounts(Shape.CENTRAL), now=NOW).rotate(["gpu"], valid_s=_LIFE_S)

    assert not files._is_other(expired)
    async with asyncio.timeout(60):
        assert (await files.next()).expires_at == NOW + _LIFE_S


def test_login_names_the_extra_when_pynacl_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is given credentials, and cannot sign, says which extra it needs; ConfigError ends it with 78."""
    settings = _credentials(tmp_path)
    for module in ("nacl", "nacl.signing"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ConfigError, match="credentials_file needs PyNaCl") as raised:
        read_login(settings)
    assert raised.value.next_step == "pip install '.[creds]' from the checkout"


def test_login_refuses_a_file_that_holds_no_credentials(tmp_path: Path) -> None:
    """It names the key and the file."""
    (tmp_path / "user.creds").write_text("none")

    with pytest.raises(ConfigError, match=r"nats.credentials_file: .*user.creds holds no credentials"):
        read_login(NatsSettings(credentials_file=str(tmp_path / "user.creds")))


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
    settings = NatsSettings(password_file="/p", credentials_file="/c", tls_ca_file="/ca")

    assert login_files(settings) == ("/c", "/ca", "/p")
