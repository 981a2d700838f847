"""The file of users that `topobus keys` writes: a later call changes what it was told, and nothing
else.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from topobus.bus.server_config.nats_accounts import Shape
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.cli.application import run
from topobus.cli.exits import InputError
from topobus.cli.users_file import UsersForm, changed_form, user_names
from topobus.simulation.nats_server import find_nats_server

_NATS = Path(__file__).parents[3] / "deploy" / "nats"


def _make(folder: Path, *arguments: str) -> None:
    assert run(["keys", "make", str(folder / "keys"), "--server-file", str(folder / "users.conf"), *arguments]) == 0


def _has_user(folder: Path, name: str) -> bool:
    return f"{{ user: {name}, " in (folder / "users.conf").read_text(encoding="utf-8")


def test_node_is_added_and_left_out_when_a_hub_has_others(tmp_path: Path) -> None:
    """Those that were there stay with their passwords, also when somebody only makes a password
    anew.
    """
    _make(tmp_path, "--shape", "hub", "--node", "n1", "--node", "n2.example")
    before = (tmp_path / "keys" / "leaf-n1" / "password").read_text()
    _make(tmp_path, "--node", "n3", "--without-node", "n2.example")
    assert (
        run(["keys", "rotate", str(tmp_path / "keys"), "leaf-n3", "--server-file", str(tmp_path / "users.conf")]) == 0
    )

    assert changed_form(tmp_path / "users.conf") == UsersForm(shape=Shape.HUB, nodes=("n1", "n3"))
    assert [_has_user(tmp_path, f"leaf-{node}") for node in ("n1", "n2_example", "n3")] == [True, False, True]
    assert (tmp_path / "keys" / "leaf-n1" / "password").read_text() == before


@pytest.mark.parametrize("form", ["--accounts", "--one-account"])
def test_class_of_ones_own_keeps_its_user_when_a_later_call_names_none(tmp_path: Path, form: str) -> None:
    """With accounts and without; naming one of our own classes changes nothing."""
    _make(tmp_path, form, "--class", "npu", "--class", "gpu")
    _make(tmp_path, "--class", "dpu")

    assert changed_form(tmp_path / "users.conf").classes == ("dpu", "npu")
    assert [_has_user(tmp_path, name) for name in ("npu", "dpu", "gpu")] == [True, True, True]
    assert (tmp_path / "keys" / "npu" / "password").exists()


@pytest.mark.parametrize("name", ["smart-card", "gateway", "Npu", "", "a" * 21])
def test_class_is_refused_when_no_service_can_have_the_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is a user's and a subject's; nothing is written."""
    assert run(["keys", "make", str(tmp_path / "keys"), "--class", name]) == 2
    assert f"device class {name!r}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["--accounts", "--one-account"])
def test_form_of_the_users_stays_when_a_password_is_made_anew(tmp_path: Path, form: str) -> None:
    """A server with streams in one form would not see them in the other."""
    _make(tmp_path, form)
    before = (
        (tmp_path / "users.conf")
        .read_text(encoding="utf-8")
        .replace((tmp_path / "keys/gpu/password").read_text().strip(), "X")
    )
    assert run(["keys", "rotate", str(tmp_path / "keys"), "gpu", "--server-file", str(tmp_path / "users.conf")]) == 0
    after = (
        (tmp_path / "users.conf")
        .read_text(encoding="utf-8")
        .replace((tmp_path / "keys/gpu/password").read_text().strip(), "X")
    )

    assert after == before
    assert ("accounts {" in after) is (form == "--accounts")


def test_file_that_another_program_wrote_is_refused(tmp_path: Path) -> None:
    """Its form is not known, so it is not written over. A file that does not exist is a new one."""
    (tmp_path / "users.conf").write_text("authorization {\n}\n")

    with pytest.raises(InputError, match=r"users\.conf is for"):
        changed_form(tmp_path / "users.conf")
    assert changed_form(tmp_path / "none.conf") == changed_form(None) == UsersForm()
    assert user_names(UsersForm(has_accounts=False)) == user_names(UsersForm()) == tuple(sorted(PRINCIPALS))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "leaf", "--node", "n1", "--node", "n2"],
        ["--shape", "hub", "--one-account"],
        ["--shape", "hub", "--node", "n1.>"],
    ],
    ids=["two-nodes-of-a-leaf", "hub-without-accounts", "no-node"],
)
def test_form_is_refused_when_there_is_no_such(tmp_path: Path, arguments: list[str]) -> None:
    """Nothing is written then, not even passwords."""
    assert run(["keys", "make", str(tmp_path / "keys"), "--server-file", str(tmp_path / "users.conf"), *arguments]) != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "name"),
    [(Shape.LEAF, "leaf-accounts-2.10.conf"), (Shape.HUB, "hub-accounts-2.10.conf")],
    ids=["leaf", "hub"],
)
def test_rendered_file_is_whole_with_the_users_that_are_made(
    tmp_path: Path, shape: Shape, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the how-to says: the file of deploy/nats with `users.conf` beside it is a server's
    configuration.
    """
    _make(tmp_path, "--shape", shape.value, "--node", "n1")
    # The installed server may be older than the file is for.
    text = (
        (_NATS / name)
        .read_text(encoding="utf-8")
        .replace("  sync_interval: always\n", "")
        .replace("  compression: off\n", "")
    )
    (tmp_path / name).write_text(text.replace('reconnect: "1s"', "reconnect: 1"), encoding="utf-8")
    for variable, value in (
        ("HUB_NAME", "hub"),
        ("LEAF_DOMAIN", "node-n1"),
        ("LEAF_HUB_URL", "nats://leaf-n1:p@127.0.0.1:7422"),
    ):
        monkeypatch.setenv(f"TOPOBUS_{variable}", value)

    checked = subprocess.run(
        [find_nats_server(), "-t", "-c", tmp_path / name], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stderr
