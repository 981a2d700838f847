"""The nats-server of the extra `nats`: which bytes are run, and which are not."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from topobus.simulation import nats_provider
from topobus.simulation.nats_provider import DISTRIBUTION, VERSION, find_packaged_server, provide_nats_server
from topobus.values.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
_KNOWN = b"#!/bin/sh\nexit 0\n"

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Give a function that installs a wheel's program as pip does, on a machine that has nothing
    else.
    """
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("TOPOBUS_NATS_SERVER", raising=False)
    monkeypatch.setattr(nats_provider, "_SYSTEM_PLACES", ())
    monkeypatch.setattr(nats_provider, "_DIGESTS", frozenset({hashlib.sha256(_KNOWN).hexdigest()}))

    def put(content: bytes = _KNOWN, version: str = VERSION) -> Path:
        packages, program = tmp_path / "lib", tmp_path / "bin" / "nats-server"
        record = packages / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: {version}\n")
        (record / "RECORD").write_text("../bin/nats-server,,\n")
        program.parent.mkdir()
        program.write_bytes(content)
        program.chmod(0o755)
        monkeypatch.syspath_prepend(str(packages))
        return program

    return put


def test_packaged_server_is_taken_when_the_extra_is_installed(install: Install) -> None:
    """Without root and without Docker the first try needs nothing else, and nothing is installed or
    said.
    """
    program = install()
    said: list[str] = []

    assert provide_nats_server(said.append).program == program
    assert said == []


def test_packaged_server_is_refused_when_its_bytes_are_not_known(install: Install) -> None:
    """A file that was added to the release later is named, with what it is and what to do, and not
    run.
    """
    program = install(b"#!/bin/sh\nexit 1\n")

    with pytest.raises(ConfigError) as caught:
        provide_nats_server()

    assert str(program) in caught.value.message
    assert hashlib.sha256(program.read_bytes()).hexdigest() in caught.value.message
    assert "TOPOBUS_NATS_SERVER" in caught.value.next_step


def test_packaged_server_is_refused_when_its_bytes_are_not_known_and_it_stands_on_path(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active virtual environment has the extra's program on PATH: that is no way around the look
    at it.
    """
    program = install(b"#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(program.parent))

    with pytest.raises(ConfigError):
        provide_nats_server()


def test_packaged_server_is_run_when_the_variable_names_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets TOPOBUS_NATS_SERVER has decided."""
    program = install(b"#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("TOPOBUS_NATS_SERVER", str(program))

    assert provide_nats_server().program == program


def test_packaged_server_gives_way_when_path_has_another(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the machine's own comes first."""
    install()
    own = tmp_path / "own" / "nats-server"
    own.parent.mkdir()
    own.write_bytes(b"#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(own.parent))

    assert provide_nats_server().program == own


def test_packaged_server_is_not_looked_at_when_the_version_is_another(install: Install) -> None:
    """A version that the extra does not name was somebody's own choice: it is neither run nor
    refused.
    """
    install(b"other", version="99.0.0")

    assert find_packaged_server() is None


def test_packaged_server_is_absent_when_the_extra_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found and nothing raised: there are other places to look."""
    monkeypatch.setattr(nats_provider, "DISTRIBUTION", "not-installed-anywhere")

    assert find_packaged_server() is None


def test_extra_pins_the_version_that_was_looked_at() -> None:
    """Extra, lock and digests are of one version, and `all` does not bring it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lock = (ROOT / "requirements" / "nats.txt").read_text(encoding="utf-8")

    assert extras["nats"][0].startswith(f"{DISTRIBUTION}=={VERSION};")
    assert lock.startswith(f"{DISTRIBUTION}=={VERSION} ")
    assert not any("nats]" in need or DISTRIBUTION in need for need in (*extras["all"], *extras["cli"], *extras["dev"]))
