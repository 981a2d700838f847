"""Passwords of NATS' users: made once, whole or not at all, and read by their owner alone."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from support.laws import steps
from topobus.bus.login.user_keys import (
    change_password,
    forget_previous,
    make_passwords,
    password_file,
    read_logins,
    split_login,
)
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.bus.server_config.server_users import accounts_configuration, server_configuration
from topobus.cli.application import run
from topobus.values.errors import ConfigError

_PRINCIPALS = ("gpu", "cli", "user")
_KILLED = 9


def _modes(folder: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize(
    ("is_for_group", "modes"),
    [(False, {(True, 0o700), (False, 0o600)}), (True, {(True, 0o750), (False, 0o640)})],
    ids=["owner", "group"],
)
@pytest.mark.parametrize("umask", [0o000, 0o077], ids=["umask-0", "umask-77"])
def test_passwords_are_made_once_when_they_are_wanted_again(
    tmp_path: Path, umask: int, is_for_group: bool, modes: set[tuple[bool, int]]
) -> None:
    """Each principal has another one, which the next start finds again.

    Whatever the umask, nobody else can read them.
    """
    before = os.umask(umask)
    try:
        passwords = make_passwords(tmp_path / "users", _PRINCIPALS, is_for_group=is_for_group)
    finally:
        os.umask(before)

    assert (
        make_passwords(tmp_path / "users", (*_PRINCIPALS, "nic"), is_for_group=is_for_group).items()
        >= passwords.items()
    )
    assert len(set(passwords.values())) == len(_PRINCIPALS)
    assert _modes(tmp_path / "users") == modes


@pytest.mark.law
def test_passwords_are_finished_when_a_start_was_killed_at_any_step(tmp_path: Path) -> None:
    """Killed before each of its system calls that Python tells of, a start leaves what the next one
    completes.

    No password that was there changes.
    """
    for step in steps(1000):
        folder = tmp_path / f"users-{step}"
        is_complete = _made_in_a_child(folder, killed_at=step)
        left = {path.parent.name: path.read_text().strip() for path in folder.glob("*/password")}

        passwords = make_passwords(folder, _PRINCIPALS)

        assert passwords.items() >= left.items()
        assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["password"] * len(_PRINCIPALS)
        if is_complete:
            break
    assert step > 20


def _made_in_a_child(folder: Path, *, killed_at: int) -> bool:
    """Make passwords in a process that ends without a word before its n-th step.

    Gives whether it came to its end before.
    """
    child = os.fork()
    if child == 0:
        steps = 0

        def count(event: str, _: object) -> None:
            nonlocal steps
            if event in ("open", "fcntl.flock") or event.startswith("os."):
                steps += 1
                if steps == killed_at:
                    os._exit(_KILLED)

        sys.addaudithook(count)
        make_passwords(folder, _PRINCIPALS)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_passwords_are_one_set_when_several_starts_make_them_at_once(tmp_path: Path) -> None:
    """Whoever comes second finds what the first has made."""
    sets: list[dict[str, str]] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        sets.append(make_passwords(tmp_path / "users", _PRINCIPALS))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sets == [sets[0]] * 8


@pytest.mark.parametrize(
    ("mode", "text", "says"),
    [
        (0o644, "p0123456789abcdef", "mode 644: others may read or change it, wanted 600"),
        (0o660, "p0123456789abcdef", "mode 660"),
        (0o600, "", "holds 0 characters"),
        (0o600, "0123456789abcdefp", "a letter first"),
        (0o600, 'p0123456789abcdef"', "letters and digits"),
    ],
)
def test_password_is_refused_when_others_may_read_it_or_it_is_none(
    tmp_path: Path, mode: int, text: str, says: str
) -> None:
    """The error names the file and what to do; nothing is made anew in silence."""
    make_passwords(tmp_path / "users", _PRINCIPALS)
    file = password_file(tmp_path / "users", "gpu")
    file.write_text(text)
    file.chmod(mode)

    with pytest.raises(ConfigError, match=says) as refused:
        make_passwords(tmp_path / "users", _PRINCIPALS)
    assert str(file) in refused.value.message
    assert refused.value.next_step
    assert file.read_text() == text


def test_password_is_refused_when_a_link_stands_in_its_place(tmp_path: Path) -> None:
    """A link that somebody laid leads nowhere, and what it points to keeps its bytes."""
    make_passwords(tmp_path / "users", ("cli",))
    (tmp_path / "other").write_text("p0123456789abcdef")
    file = password_file(tmp_path / "users", "cli")
    file.unlink()
    file.symlink_to(tmp_path / "other")

    with pytest.raises(ConfigError, match="cannot read"):
        make_passwords(tmp_path / "users", ("cli",))
    assert (tmp_path / "other").read_text() == "p0123456789abcdef"


def test_both_passwords_count_when_one_is_changed_with_an_overlap_until_the_older_is_forgotten(tmp_path: Path) -> None:
    """The newer one goes with the other name of its user, by turns.

    The server's users are those of both.
    """
    before = make_passwords(tmp_path, PRINCIPALS)
    change_password(tmp_path, "gpu", is_overlapping=True)
    both = make_passwords(tmp_path, PRINCIPALS)
    assert both.items() >= before.items()
    assert set(both) - set(before) == {"gpu__2"}
    assert server_configuration(both).count("{ user: gpu") == 2
    assert accounts_configuration(both).count("{ user: gpu") == 2

    assert forget_previous(tmp_path, "gpu")
    after = make_passwords(tmp_path, PRINCIPALS)
    assert "gpu" not in after
    assert "user: gpu," not in server_configuration(after)
    change_password(tmp_path, "gpu", is_overlapping=True)

    assert set(read_logins(tmp_path, "gpu")) == {"gpu", "gpu__2"}
    assert split_login("gpu", password_file(tmp_path, "gpu").read_text().strip())[0] == "gpu"


def test_older_password_counts_no_more_when_one_is_changed_at_once(tmp_path: Path) -> None:
    """Without an overlap nothing of before is left, also of one that had begun."""
    make_passwords(tmp_path, _PRINCIPALS)
    change_password(tmp_path, "gpu", is_overlapping=True)

    change_password(tmp_path, "gpu", is_overlapping=False)

    assert set(read_logins(tmp_path, "gpu")) == {"gpu"}
    assert not forget_previous(tmp_path, "gpu")


@pytest.mark.parametrize("user", ["user", "leaf-n1"])
def test_command_refuses_an_overlap_when_a_users_clients_are_not_ours(
    tmp_path: Path, user: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A subscriber, and a node's server, log in with what stands in the file as it is."""
    server_file = str(tmp_path / "users.conf")
    assert (
        run(["keys", "make", str(tmp_path / "users"), "--shape", "hub", "--node", "n1", "--server-file", server_file])
        == 0
    )

    assert run(["keys", "rotate", str(tmp_path / "users"), user, "--overlap", "--server-file", server_file]) == 2
    assert "without --overlap" in capsys.readouterr().err
