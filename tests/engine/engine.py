"""A real container engine for the compose test: found, else installed and started; and the two local images that stand in for a registry's.

No image can be pulled on the machines this runs on, so the base image is a debootstrap tree of the machine's own release and the NATS image
is that plus the machine's own nats-server. Set BASE_IMAGE and NATS_IMAGE to use others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Compose", "EngineUnavailable", "apt_install", "base_image", "must", "nats_image", "provide_engine", "say"]

ROOT = Path(__file__).resolve().parents[2]
CERTIFICATES = ROOT / "deploy" / "images" / "certificates"
# Where Debian, Fedora and Alpine keep all trusted certificates; the one of these that pip here is told to use goes into the images.
_CA_FILES = (os.environ.get("PIP_CERT", ""), os.environ.get("SSL_CERT_FILE", ""))
_DAEMON_START_S = 60
_PID_FILES = (("/var/run/docker.pid", "dockerd"), ("/var/run/docker/containerd/containerd.pid", "containerd"))
# So many characters of a failed command's output: the error stands at the end.
_TAIL = 2000
# What the services (python3, venv), pip (ca-certificates) and the health check of NATS (wget) need.
_BASE_PACKAGES = "ca-certificates,python3,python3-venv,wget"


class EngineUnavailable(Exception):
    """Raised when no engine can be had; the message says what to do."""


def say(text: str) -> None:
    """Tell what is going on: this suite takes minutes."""
    print(f"engine: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress for the person who waits


def _run(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=ROOT, check=False, input=stdin or "")


def must(command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, what: str) -> str:
    """Run a command and give what it printed.

    Errors: raises EngineUnavailable with the end of its output.
    """
    try:
        done = _run(command, timeout_s=timeout_s, env=env)
    except subprocess.TimeoutExpired as err:
        raise EngineUnavailable(f"{what} took longer than {timeout_s:g} s ({' '.join(command)})") from err
    if done.returncode != 0:
        raise EngineUnavailable(
            f"{what} failed ({' '.join(command)}, exit {done.returncode}):\n{done.stdout[-_TAIL:]}\n{done.stderr[-_TAIL:]}"
        )
    return done.stdout


def apt_install(*packages: str) -> None:
    """Install Debian packages, or say who must.

    Errors: raises EngineUnavailable when they are not to be had.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineUnavailable(
            f"needs {', '.join(packages)}; install them (as root: apt-get install {' '.join(packages)}) and run this again"
        )
    say(f"installing {', '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A new machine's package lists may be empty or old; the second try has fresh ones.
    if _run(["apt-get", "install", "-y", "-q", *packages], timeout_s=600, env=env).returncode != 0:
        must(["apt-get", "update", "-q"], timeout_s=300, env=env, what="apt-get update")
        must(["apt-get", "install", "-y", "-q", *packages], timeout_s=600, env=env, what="apt-get install")


def provide_engine(log: Path) -> subprocess.Popen[bytes] | None:
    """See that a Docker daemon answers; the process when it was started here (the caller ends it), None when one ran already."""
    if shutil.which("docker") is None:
        apt_install("docker.io")
    if _run(["docker", "info"], timeout_s=30).returncode == 0:
        return None
    if shutil.which("dockerd") is None:
        apt_install("docker.io")
    if os.geteuid() != 0:
        raise EngineUnavailable("no Docker daemon answers and only root can start one; start Docker and run this again")
    if _run(["docker", "info"], timeout_s=30).returncode == 0:
        return None
    for pid_file, program in _PID_FILES:
        _forget_dead(Path(pid_file), program)
    say("starting dockerd")
    with log.open("wb") as sink:
        daemon = subprocess.Popen(["dockerd"], stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    give_up = time.monotonic() + _DAEMON_START_S
    while _run(["docker", "info"], timeout_s=30).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > give_up:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise EngineUnavailable(f"dockerd does not answer after {_DAEMON_START_S} s; its log ends with:\n{tail}")
    return daemon


def _forget_dead(pid_file: Path, program: str) -> None:
    """Remove the pid file of a daemon that was killed: its number may be another process's by now, and dockerd would take that for the daemon."""
    if not pid_file.is_file():
        return
    try:
        running = Path("/proc", pid_file.read_text(encoding="utf-8").strip(), "comm").read_text(encoding="utf-8").strip()
    except OSError:
        running = ""
    if running != program:
        pid_file.unlink()


def _has_image(name: str) -> bool:
    return _run(["docker", "image", "inspect", name], timeout_s=30).returncode == 0


def _release() -> str:
    for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise EngineUnavailable("this machine's release has no codename to debootstrap; set BASE_IMAGE and NATS_IMAGE")


def base_image(scratch: Path) -> str:
    """Name an image with Python 3.11 or newer: $BASE_IMAGE, else one made of this machine's own release."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    release = _release()
    # An image of an earlier list must not be taken for this one: the list is part of the name.
    name = f"topobus-ci/base:{release}-{hashlib.sha256(_BASE_PACKAGES.encode()).hexdigest()[:8]}"
    if _has_image(name):
        return name
    if shutil.which("debootstrap") is None:
        apt_install("debootstrap")
    say(f"making the base image {name} with debootstrap")
    tree = scratch / "base"
    must(["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", release, str(tree)], timeout_s=900, what="debootstrap")
    archive = scratch / "base.tar"
    must(["tar", "-C", str(tree), "-c", "-f", str(archive), "."], timeout_s=300, what="tar")
    must(["docker", "import", str(archive), name], timeout_s=300, what="docker import")
    archive.unlink()
    shutil.rmtree(tree)
    return name


def nats_image(base: str, scratch: Path) -> str:
    """Name an image that runs nats-server: $NATS_IMAGE, else the base image with this machine's binary."""
    if given := os.environ.get("NATS_IMAGE"):
        return given
    binary = os.environ.get("TOPOBUS_NATS_SERVER") or shutil.which("nats-server")
    if binary is None:
        apt_install("nats-server")
        binary = shutil.which("nats-server")
    if binary is None:
        raise EngineUnavailable("no nats-server to put into an image; set NATS_IMAGE")
    folder = scratch / "nats"
    folder.mkdir()
    shutil.copy(binary, folder / "nats-server")
    (folder / "Dockerfile").write_text(
        f'FROM {base}\nCOPY nats-server /usr/local/bin/nats-server\nENTRYPOINT ["nats-server"]\n', encoding="utf-8"
    )
    name = "topobus-ci/nats:local"
    must(["docker", "build", "-q", "-t", name, str(folder)], timeout_s=300, what="building the NATS image")
    return name


def _compose_command() -> list[str]:
    if _run(["docker", "compose", "version"], timeout_s=30).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        apt_install("docker-compose")
    return ["docker-compose"]


@dataclass
class Compose:
    """One project of compose.yaml on the engine."""

    project: str
    env: dict[str, str]
    command: list[str] = field(default_factory=_compose_command)

    def run(self, *arguments: str, timeout_s: float) -> str:
        """Run one compose command; EngineUnavailable with its output when it fails."""
        return must([*self.command, "-p", self.project, *arguments], timeout_s=timeout_s, env=self.env, what=f"compose {arguments[0]}")

    def health(self) -> dict[str, str]:
        """Say how each container is: service to `healthy`, `starting`, `unhealthy`, or its state when it has no health check."""
        ids = self.run("ps", "-q", timeout_s=60).split()
        if not ids:
            return {}
        containers = json.loads(must(["docker", "inspect", *ids], timeout_s=60, what="docker inspect"))
        return {
            container["Config"]["Labels"]["com.docker.compose.service"]: container["State"]
            .get("Health", {})
            .get("Status", container["State"]["Status"])
            for container in containers
        }

    def logs(self) -> str:
        """The newest lines of all services, for a failure's report."""
        return _run([*self.command, "-p", self.project, "logs", "--no-color", "--tail", "15"], timeout_s=60, env=self.env).stdout

    def down(self) -> None:
        """Remove containers, networks and volumes of the project."""
        _run([*self.command, "-p", self.project, "down", "-v", "--remove-orphans", "-t", "10"], timeout_s=180, env=self.env)


def lay_certificates() -> Path | None:
    """Put the certificates that pip trusts here where the image builds look; the file to remove afterwards, or None."""
    for ca_file in _CA_FILES:
        if ca_file and Path(ca_file).is_file():
            target = CERTIFICATES / "machine.crt"
            shutil.copy(ca_file, target)
            return target
    return None
