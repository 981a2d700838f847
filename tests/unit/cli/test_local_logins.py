"""Commands find the login of a `topobus up` of the same user, and of no other server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from topobus.local_system import local_logins
from topobus.local_system.local_logins import LocalLogin, announced_login, find_login

_LOGIN = LocalLogin(user="cli", password_file="/state/nats-users/cli/password")


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of /tmp."""
    monkeypatch.setattr(local_logins, "_PARENT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "url",
    ["nats://127.0.0.1:4222", "127.0.0.1:4222", "nats://localhost", "nats://[::1]:4222"],
    ids=["url", "bare", "default-port", "ipv6"],
)
def test_login_is_found_when_the_server_runs_here(url: str) -> None:
    """By the port, for as long as the block lasts."""
    with announced_login(4222, _LOGIN) as is_announced:
        assert is_announced
        assert find_login(url) == _LOGIN

    assert find_login(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:4223",
        "nats://me:secret@127.0.0.1:4222",
        "nats://10.0.0.1:4222",
        "nats://127.0.0.1:4222,nats://127.0.0.1:4223",
    ],
    ids=["port", "user", "host", "several"],
)
def test_login_is_not_found_when_another_server_is_meant(url: str) -> None:
    """No password goes where it does not belong, and a user in the URL stays who it is."""
    with announced_login(4222, _LOGIN):
        assert find_login(url) is None


@pytest.mark.parametrize(
    ("url", "is_found"),
    [
        ("tls://10.0.0.1:4222", True),
        ("tls://gpu1.example.org:4222", True),
        ("tls://[fd00::1]:4222", True),
        ("nats://127.0.0.1:4222", True),
        ("tls://10.0.0.2:4222", False),
        ("tls://gpu1.example.org:4223", False),
    ],
    ids=["address", "name", "ipv6", "loopback", "another-address", "another-port"],
)
def test_login_is_found_by_a_name_when_the_server_is_reached_by_it(url: str, is_found: bool) -> None:
    """A server that other machines reach, too, is the same by each name of its certificate, and no
    other one is.
    """
    login = LocalLogin(
        user="cli", password_file="/p", tls_ca_file="/ca.crt", hosts=("10.0.0.1", "gpu1.example.org", "fd00::1")
    )
    with announced_login(4222, login):
        assert find_login(url) == (login if is_found else None)


def test_login_is_not_found_when_its_process_was_killed(parent: Path) -> None:
    """What a killed run left is not believed: somebody else may have the port now.

    The next run on that port is.
    """
    code = (
        "import os, pathlib; from topobus.local_system import local_logins as logins; "
        f"logins._PARENT = pathlib.Path({str(parent)!r}); "
        "running = logins.announced_login(4222, logins.LocalLogin(user='cli', password_file='/old')); "
        "running.__enter__(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

    assert [path.name.endswith("-4222") for path in parent.glob("topobus-logins-*/*")] == [True]
    assert find_login("nats://127.0.0.1:4222") is None
    with announced_login(4222, _LOGIN):
        assert find_login("nats://127.0.0.1:4222") == _LOGIN


def test_login_is_neither_left_nor_read_when_others_may_write_the_folder(parent: Path) -> None:
    """A folder that somebody else opened, or a link in its place, is not used."""
    folder = parent / f"topobus-logins-{os.geteuid()}"
    with announced_login(4222, _LOGIN):
        folder.chmod(0o777)
        assert find_login("nats://127.0.0.1:4222") is None
        with announced_login(4224, _LOGIN) as is_announced:
            assert not is_announced
    (parent / "elsewhere").mkdir()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.symlink_to(parent / "elsewhere")

    with announced_login(4222, _LOGIN) as is_announced:
        assert not is_announced
    assert list((parent / "elsewhere").iterdir()) == []
