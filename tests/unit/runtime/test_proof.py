"""Proof of answers: it covers every part of an answer, and keys that others can read are no keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.domain.errors import ConfigError
from topobus.runtime.proof import is_proven, main, make_keys, prove, read_keys

_KEY = b"k" * 64
_ANSWER: dict[str, object] = {
    "reply": "_INBOX.gateway.gpu.1.2",
    "ask": "prepare",
    "data": b"{}",
    "headers": {"Topobus-Error": "hardware", "Topobus-Error-Message": "off"},
}


@pytest.mark.parametrize(
    "change",
    [
        {"reply": "_INBOX.gateway.gpu.1.3"},
        {"ask": "unprepare"},
        {"data": b"{} "},
        {"headers": {}},
        {"headers": {"Topobus-Error": "hardware"}},
        {"headers": {"Topobus-Error": "hardwareTopobus-Error-Message", "": "off"}},
        {"headers": {"Topobus-Error": "hardware", "Topobus-Error-Message": "on"}},
    ],
    ids=["reply", "ask", "body", "no-error", "no-message", "bytes-moved-between-headers", "other-message"],
)
def test_proof_does_not_hold_when_a_part_of_the_answer_is_another(change: dict[str, object]) -> None:
    """The proof of an answer is that of no other answer, subject, ask or error."""
    proof = prove(_KEY, **_ANSWER)  # type: ignore[arg-type]  # a table of arguments

    assert is_proven(_KEY, proof, **_ANSWER)  # type: ignore[arg-type]  # a table of arguments
    assert not is_proven(_KEY, proof, **{**_ANSWER, **change})  # type: ignore[arg-type]  # a table of arguments
    assert not is_proven(b"j" * 64, proof, **_ANSWER)  # type: ignore[arg-type]  # a table of arguments


@pytest.mark.parametrize("proof", ["", "0" * 64, "é", "x" * 100_000])
def test_proof_does_not_hold_when_it_is_none(proof: str) -> None:
    """Whatever stands in the header instead is no proof and no error."""
    assert not is_proven(_KEY, proof, **_ANSWER)  # type: ignore[arg-type]  # a table of arguments


def test_keys_are_made_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    """Each class has a key of its own, in files of mode 600 below a folder of mode 700; a second start keeps them, and a service reads its own only."""
    folder = tmp_path / "keys"
    make_keys(folder, ["gpu", "nic"])
    first = read_keys(str(folder))
    make_keys(folder, ["gpu", "nic", "cpu"])

    assert read_keys(str(folder), ("gpu",)) == {"gpu": first["gpu"]}
    assert sorted(read_keys(str(folder))) == ["cpu", "gpu", "nic"]
    assert first["gpu"] != first["nic"]
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {"0o600"}


def test_keys_are_for_the_group_when_compose_makes_them(tmp_path: Path) -> None:
    """The folder appears with all its keys, the group may read them, and the services take them."""
    folder = tmp_path / "keys" / "answers"
    folder.parent.mkdir()

    assert main(["--for-group", str(folder), "gpu", "nic"]) == 0
    assert sorted(read_keys(str(folder))) == ["gpu", "nic"]
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {"0o640"}
    assert [file.name for file in folder.parent.iterdir()] == ["answers"]


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602])
def test_key_is_refused_when_others_can_read_or_change_it(tmp_path: Path, mode: int) -> None:
    """The error names the file, its mode, the wanted one and the setting."""
    make_keys(tmp_path, ["gpu"])
    (tmp_path / "gpu.key").chmod(mode)

    with pytest.raises(ConfigError, match=rf"gpu\.key has mode {mode:o}: others may read or change it, wanted 600"):
        read_keys(str(tmp_path))


def test_key_is_refused_when_it_is_too_short(tmp_path: Path) -> None:
    """A key that can be guessed is an error, an empty file too."""
    (tmp_path / "gpu.key").touch(mode=0o600)

    with pytest.raises(ConfigError, match="has 0 bytes, wanted at least 32"):
        read_keys(str(tmp_path))


def test_keys_are_none_when_no_folder_is_named_or_it_is_empty(tmp_path: Path) -> None:
    """No folder and an empty one (a Secret that nobody made) are no keys; a folder that is not there is an error."""
    assert read_keys("") == {}
    assert read_keys(str(tmp_path)) == {}
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(str(tmp_path / "none"))
