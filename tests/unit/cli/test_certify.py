"""`topobus keys certify` and `topobus keys show`: what they make, what they say of it, and what
they refuse.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topobus.bus.login.certificate_facts import read_certificates
from topobus.cli.application import run


def test_certify_tells_of_names_and_dates_when_it_made_a_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The authority is made beside the folder.

    A second call changes nothing and says the same; `show` does, too.
    """
    folder = tmp_path / "nats-tls"
    assert run(["keys", "certify", str(folder), "--name", "nats", "--name", "10.0.0.1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(["keys", "certify", str(folder), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert run(["keys", "show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    facts = read_certificates(folder / "tls.crt")[0]
    assert first["certificate"]["names"] == ["10.0.0.1", "nats"]
    assert first["certificate"]["not_after"] == facts.not_after.isoformat()
    assert (first["made"], first["why_made"]) == (True, "there was none")
    assert second == shown == {**first, "made": False, "why_made": ""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority", "nats-tls"]


def test_certify_changes_the_authority_in_three_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of the manual: trust both, sign by the newer, trust the newer alone."""
    folder = str(tmp_path / "nats-tls")
    assert run(["keys", "certify", folder, "--name", "nats", "--authority", str(tmp_path / "ca")]) == 0
    signing = []
    for step in ("--new-authority", "--renew", "--drop-old-authorities"):
        capsys.readouterr()
        assert run(["keys", "certify", folder, step, "--authority", str(tmp_path / "ca"), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        issuer = document["certificate"]["issuer"]
        signing.append([authority["subject"] == issuer for authority in document["authorities"]])

    assert signing == [[False, True], [True, False], [True]]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["certify", "FOLDER"], 78, "--name"),
        (["certify", "FOLDER", "--name", "nats://nats:4222"], 78, "wanted a host name or an address"),
        (["certify", "FOLDER", "--name", "nats", "--renew", "--new-authority"], 2, "exclude each other"),
        (["certify", "FOLDER", "--new-authority"], 78, "it cannot be renewed here"),
        (["show", "FOLDER"], 2, "has no tls.crt"),
    ],
    ids=["no-name", "a-url", "two-steps", "no-authority", "nothing-to-show"],
)
def test_certify_says_what_to_do_when_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    """One error with a next step, its own exit status, and nothing made."""
    given = ["keys", *(str(tmp_path / "tls") if argument == "FOLDER" else argument for argument in arguments)]

    assert run(given) == status
    printed = " ".join(capsys.readouterr().err.split())
    assert says in printed
    assert "next:" in printed
    assert list(tmp_path.iterdir()) == []
