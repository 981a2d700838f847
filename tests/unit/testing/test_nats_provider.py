"""Finding a nats-server: on PATH, by the package manager, by Docker, or a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.simulation import nats_provider
from topobus.simulation.nats_provider import provide_nats_server
from topobus.values.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty folder as the whole PATH: what a test puts there is
    all that this machine has.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("TOPOBUS_NATS_SERVER", raising=False)
    monkeypatch.setattr(nats_provider, "_SYSTEM_PLACES", ())
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return folder


def program(path: Path, name: str, script: str) -> Path:
    """Put a program on PATH."""
    file = path / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_provide_takes_the_server_on_path_when_there_is_one(path: Path) -> None:
    """Nothing is installed and nothing said when PATH has a server."""
    server = program(path, "nats-server", "exit 0")
    said: list[str] = []

    nats_program = provide_nats_server(said.append)

    assert nats_program.program == server
    assert nats_program.command(port=4333, store=Path("/s"))[:5] == (str(server), "-a", "127.0.0.1", "-p", "4333")
    assert nats_program.cleanup(port=4333) == ()
    assert said == []


def test_provide_installs_the_package_when_root_has_apt(path: Path) -> None:
    """As root with apt-get the package is installed, after one refresh of the lists, and it is said
    before.
    """
    program(
        path,
        "apt-get",
        f'case "$1" in update) : > {path}/fresh;; install) test -e {path}/fresh || exit 100\n'
        f'printf "#!/bin/sh\\n" > {path}/nats-server; PATH=/bin:/usr/bin chmod 755 {path}/nats-server;; esac',
    )
    said: list[str] = []

    nats_program = provide_nats_server(said.append)

    assert nats_program.program == path / "nats-server"
    assert any("apt-get" in line for line in said)


def test_provide_runs_docker_when_nothing_can_be_installed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apt-get a Docker that answers runs the image named by the environment, published on
    loopback only, and is cleaned up by name.
    """
    docker = program(path, "docker", "exit 0")
    monkeypatch.setenv("TOPOBUS_NATS_IMAGE", "local/nats:1")

    nats_program = provide_nats_server()

    command = nats_program.command(port=4333, store=Path("/s"))
    assert command[:2] == (str(docker), "run")
    assert "127.0.0.1:4333:4222" in command
    assert "local/nats:1" in command
    assert nats_program.cleanup(port=4333) == (str(docker), "rm", "-f", "topobus-nats-4333")


def test_provide_does_not_install_when_not_root(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without root never runs the package manager."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    program(path, "apt-get", f": > {path}/called")

    with pytest.raises(ConfigError):
        provide_nats_server()

    assert not (path / "called").exists()


def test_provide_says_what_to_do_when_there_is_no_way(path: Path) -> None:
    """No server, no package manager, a Docker that does not answer: the
    message lists the ways out.
    """
    program(path, "docker", "exit 1")

    with pytest.raises(ConfigError) as caught:
        provide_nats_server()

    assert "apt-get install nats-server" in caught.value.next_step
    assert "TOPOBUS_NATS_SERVER" in caught.value.next_step


def test_provide_reports_the_variable_when_it_names_nothing_that_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong TOPOBUS_NATS_SERVER is an error, not a reason to take another server."""
    program(path, "nats-server", "exit 0")
    monkeypatch.setenv("TOPOBUS_NATS_SERVER", str(path / "absent"))

    with pytest.raises(ConfigError, match="absent"):
        provide_nats_server()
