"""An operator's files: made once, kept, rotated and revoked; what is there always fits what the server is told."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from topobus.cli.application import run
from topobus.contracts.nats_accounts import Shape, accounts
from topobus.contracts.nats_keys import Credentials, parse_credentials, read_claims
from topobus.domain.errors import ConfigError
from topobus.runtime.operator_keys import SERVER_FILE, OperatorFolder, credentials_file

NOW = 1_800_000_000


def _files(folder: Path, *, now: int = NOW, shape: Shape = Shape.CENTRAL, nodes: tuple[str, ...] = ()) -> OperatorFolder:
    return OperatorFolder(folder, accounts(shape, nodes=nodes), now=now)


def _image(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _credentials(folder: Path, user: str) -> Credentials:
    return parse_credentials(credentials_file(folder, user).read_text())


def _public(folder: Path, user: str) -> str:
    return str(read_claims(_credentials(folder, user).token)["sub"])


def _revoked(folder: Path, account: str) -> dict[str, int]:
    """Read what the server is told, not what we noted."""
    token = (folder / "accounts" / account / "jwt").read_text().strip()
    assert token in (folder / SERVER_FILE).read_text()
    claims: dict[str, Any] = read_claims(token)["nats"]
    return dict(claims.get("revocations", {}))


def test_nothing_changes_when_all_is_made_again(tmp_path: Path) -> None:
    """A second call, later and with another validity, keeps every file as it is."""
    _files(tmp_path).make(valid_s=3600)
    before = _image(tmp_path)

    again = _files(tmp_path, now=NOW + 60).make(valid_s=7200)

    assert _image(tmp_path) == before
    assert {each.expires_at for each in again} == {NOW + 3600}


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    """Whatever is below the folder is read by one user of the machine."""
    _files(tmp_path / "operator").make()

    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "operator").rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_user_is_made_again_when_its_file_is_missing_or_has_expired(tmp_path: Path) -> None:
    """Others keep theirs, and the server's configuration stays as it is."""
    _files(tmp_path).make(valid_s=60)
    server, gpu = (tmp_path / SERVER_FILE).read_text(), credentials_file(tmp_path, "gpu").read_text()
    credentials_file(tmp_path, "nic").unlink()

    _files(tmp_path, now=NOW + 1).make(valid_s=600)
    assert credentials_file(tmp_path, "gpu").read_text() == gpu
    assert _credentials(tmp_path, "nic").expires_at == NOW + 601
    _files(tmp_path, now=NOW + 60).make(valid_s=600)

    assert _credentials(tmp_path, "gpu").expires_at == NOW + 660
    assert (tmp_path / SERVER_FILE).read_text() == server


def test_token_is_signed_anew_with_the_same_key_when_rights_changed(tmp_path: Path) -> None:
    """A release that allows a user something else: the next call says so, and the key stays, so that nothing has to be told to the server."""
    described = accounts(Shape.LEAF, nodes=["n1"])
    OperatorFolder(tmp_path, described, now=NOW).make(valid_s=3600)
    before = _credentials(tmp_path, "gpu")

    _files(tmp_path, now=NOW + 1, shape=Shape.LEAF).make()

    after = _credentials(tmp_path, "gpu")
    assert (after.seed, after.expires_at) == (before.seed, before.expires_at)
    assert "topobus.v1.prepare.*.gpu" in read_claims(after.token)["nats"]["sub"]["allow"]


def test_older_credentials_count_until_they_are_revoked_when_a_user_is_rotated(tmp_path: Path) -> None:
    """A rotation cuts nobody off; `is_older_only` ends what was before, and leaves what is there."""
    _files(tmp_path).make()
    old = _public(tmp_path, "gpu")
    _files(tmp_path, now=NOW + 1).rotate(["gpu"], valid_s=60)
    new = _public(tmp_path, "gpu")
    assert new != old
    assert _revoked(tmp_path, "V_GPU") == {}

    _files(tmp_path, now=NOW + 2).revoke(["gpu"], is_older_only=True)

    assert _revoked(tmp_path, "V_GPU") == {old: NOW + 2}
    assert _public(tmp_path, "gpu") == new


def test_user_stays_out_when_it_was_revoked_until_it_is_rotated(tmp_path: Path) -> None:
    """All that was issued counts for nothing, its file is gone, and `make` does not let it in again by itself."""
    _files(tmp_path).make()
    first = _public(tmp_path, "gpu")
    _files(tmp_path, now=NOW + 1).rotate(["gpu"])
    second = _public(tmp_path, "gpu")
    _files(tmp_path, now=NOW + 2).revoke(["gpu"])
    _files(tmp_path, now=NOW + 3).make()
    assert _revoked(tmp_path, "V_GPU") == {first: NOW + 2, second: NOW + 2}
    assert not credentials_file(tmp_path, "gpu").exists()

    _files(tmp_path, now=NOW + 4).rotate(["gpu"])

    assert _public(tmp_path, "gpu") not in _revoked(tmp_path, "V_GPU")


def test_node_is_revoked_when_it_is_described_no_more(tmp_path: Path) -> None:
    """A node that left the list cannot come back with what it has, and an account of its own is no account any more."""
    _files(tmp_path, nodes=("n1", "n2")).make()
    gone = _public(tmp_path, "topology-n2")

    _files(tmp_path, now=NOW + 1, nodes=("n1",)).make()

    assert _revoked(tmp_path, "NODE")[gone] == NOW + 1
    assert not credentials_file(tmp_path, "topology-n2").exists()
    server = (tmp_path / SERVER_FILE).read_text()
    assert [name for name in ("V_GPU-n2", "DISCOVERY-n2") if name in server] == []
    assert not credentials_file(tmp_path, "discovery-n2").exists()


@pytest.mark.parametrize("file", ["operator/seed", "accounts/NODE/seed", "users/gpu/user.creds"])
def test_make_says_which_file_when_one_holds_something_else(tmp_path: Path, file: str) -> None:
    """A damaged file is named and never written over: it may be the only copy of a key."""
    _files(tmp_path).make()
    (tmp_path / file).write_text("damaged")

    with pytest.raises(ConfigError, match=file):
        _files(tmp_path).make()
    assert (tmp_path / file).read_text() == "damaged"


def test_command_remembers_what_the_first_call_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shape and nodes are said once; later calls know them."""
    folder = str(tmp_path / "operator")

    assert run(["keys", "operator", "make", folder, "--shape", "hub", "--node", "n1", "--node", "n2", "--valid", "1h"]) == 0
    assert run(["keys", "operator", "rotate", folder, "leaf-n2", "--valid", "2h"]) == 0
    assert run(["keys", "operator", "revoke", folder, "leaf-n1"]) == 0
    capsys.readouterr()
    assert run(["keys", "operator", "make", folder, "--json"]) == 0

    users = {user["user"]: user["expires"] for user in json.loads(capsys.readouterr().out)["users"] if user["file"]}
    assert sorted(users) == ["cli", "console", "controller", "leaf-n2", "user"]
    assert users["leaf-n2"] > users["cli"]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["make", "FOLDER", "--valid", "soon"], 2),
        (["make", "FOLDER", "--shape", "leaf", "--node", "a", "--node", "b"], 2),
        (["rotate", "FOLDER"], 78),
        (["rotate", "MADE", "nobody"], 2),
    ],
    ids=["duration", "two-nodes", "not-made", "unknown-user"],
)
def test_command_says_what_is_wrong(tmp_path: Path, words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No key is made by a call that cannot be carried out."""
    folders = {"FOLDER": str(tmp_path / "new"), "MADE": str(tmp_path / "made")}
    assert run(["keys", "operator", "make", folders["MADE"]]) == 0

    assert run(["keys", "operator", *(folders.get(word, word) for word in words)]) == status
    assert "next:" in capsys.readouterr().err
    assert not (tmp_path / "new" / "operator").exists()


def test_program_names_the_extra_when_pynacl_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signing is in an extra of its own: without it the command ends with 78 and says which."""
    for module in ("nacl", "nacl.signing"):
        monkeypatch.setitem(sys.modules, module, None)

    assert run(["keys", "operator", "make", str(tmp_path / "new")]) == 78
    assert "pip install '.[creds]' from the checkout" in capsys.readouterr().err
