"""A real container engine for the tests with containers: found, else installed and started; and the
images that stand in for a registry's.

No image can be pulled on the machines this runs on, so the base image is a debootstrap tree of the
machine's own release, and an image of a program of Debian's is that plus the program. Set
BASE_IMAGE to use another base. Containers, and what they wait for, are testcontainers' part.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import docker.errors

# The reaper that testcontainers starts beside a container is an image of its own, which cannot be
# pulled here; context managers clean up. Read at its import.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"

from testcontainers.core.image import DockerImage

__all__ = [
    "ROOT",
    "EngineUnavailable",
    "apt_install",
    "base_image",
    "debian_program",
    "machine_certificates",
    "must",
    "nats_program",
    "program_image",
    "provide_compose",
    "provide_engine",
    "say",
    "service_image",
]

ROOT = Path(__file__).resolve().parents[2]
_CERTIFICATES = ROOT / "deploy" / "images" / "certificates"
# Where Debian, Fedora and Alpine keep all trusted certificates; the one of these that pip here is
# told to use goes into the images.
_CA_FILES = (os.environ.get("PIP_CERT", ""), os.environ.get("SSL_CERT_FILE", ""))
_DAEMON_START_S = 60
_PID_FILES = (("/var/run/docker.pid", "dockerd"), ("/var/run/docker/containerd/containerd.pid", "containerd"))
# It changes nothing of this machine's network but for bridges, which are gone with it: what
# dockerd does to iptables (`-P FORWARD DROP`, chains of its own) it leaves behind, and then no
# pod of this machine reaches another. Published ports and names need none of that; only builds
# ask the outside, from this network.
_DAEMON = ("dockerd", "--iptables=false", "--ip6tables=false", "--ip-forward=false")
_BRIDGE = "docker0"
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
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=ROOT, check=False, input=""
    )


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
            f"{what} failed ({' '.join(command)}, exit "
            f"{done.returncode}):\n{done.stdout[-_TAIL:]}\n{done.stderr[-_TAIL:]}"
        )
    return done.stdout


def apt_install(*packages: str) -> None:
    """Install Debian packages, or say who must.

    Errors: raises EngineUnavailable when they are not to be had.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineUnavailable(
            f"needs {', '.join(packages)}; install them (as root: apt-get install {' '.join(packages)}) and "
            "run this again"
        )
    say(f"installing {', '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A new machine's package lists may be empty or old; the second try has fresh ones.
    if _run(["apt-get", "install", "-y", "-q", *packages], timeout_s=600, env=env).returncode != 0:
        must(["apt-get", "update", "-q"], timeout_s=300, env=env, what="apt-get update")
        must(["apt-get", "install", "-y", "-q", *packages], timeout_s=600, env=env, what="apt-get install")


@contextmanager
def provide_engine(log: Path) -> Iterator[None]:
    """See that a Docker daemon answers for the length of a block.

    One that was started here ends with it, and its bridge.
    """
    if shutil.which("docker") is None or (not _answers() and shutil.which("dockerd") is None):
        apt_install("docker.io", "iproute2")
    if _answers():
        yield
        return
    if os.geteuid() != 0:
        raise EngineUnavailable("no Docker daemon answers and only root can start one; start Docker and run this again")
    for pid_file, program in _PID_FILES:
        _forget_dead(Path(pid_file), program)
    say("starting dockerd")
    had_bridge = Path("/sys/class/net", _BRIDGE).exists()
    with log.open("wb") as sink:
        daemon = subprocess.Popen(_DAEMON, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        give_up = time.monotonic() + _DAEMON_START_S
        while not _answers():
            if daemon.poll() is not None or time.monotonic() > give_up:
                tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
                raise EngineUnavailable(
                    f"dockerd does not answer after {_DAEMON_START_S} s; its log ends with:\n{tail}"
                )
        yield
    finally:
        daemon.terminate()
        daemon.wait(60)
        if not had_bridge and Path("/sys/class/net", _BRIDGE).exists():
            must(["ip", "link", "delete", _BRIDGE], timeout_s=30, what=f"removing {_BRIDGE}")


def _answers() -> bool:
    return _run(["docker", "info"], timeout_s=30).returncode == 0


def _forget_dead(pid_file: Path, program: str) -> None:
    """Remove the pid file of a daemon that was killed: its number may be another process's by now,
    and dockerd would take that for the daemon.
    """
    if not pid_file.is_file():
        return
    try:
        running = (
            Path("/proc", pid_file.read_text(encoding="utf-8").strip(), "comm").read_text(encoding="utf-8").strip()
        )
    except OSError:
        running = ""
    if running != program:
        pid_file.unlink()


def provide_compose(folder: Path) -> Mapping[str, str]:
    """See that `docker compose` is there.

    Gives the variables that it needs: where it is not installed, version 2 comes from another
    Debian release, unpacked aside.
    """
    if _run(["docker", "compose", "version"], timeout_s=30).returncode == 0:
        return {}
    plugin = debian_program("docker-compose", "2", "usr/libexec/docker/cli-plugins/docker-compose")
    (folder / "cli-plugins").mkdir(parents=True)
    (folder / "cli-plugins" / "docker-compose").symlink_to(plugin)
    must(
        ["docker", "compose", "version"],
        timeout_s=30,
        env={**os.environ, "DOCKER_CONFIG": str(folder)},
        what="docker compose",
    )
    return {"DOCKER_CONFIG": str(folder)}


def debian_program(package: str, version: str, path: str) -> Path:
    """Give a program of a Debian package, unpacked aside; `version` as tools/fetch-debian-package
    takes it.

    Errors: raises EngineUnavailable when the archive does not have it.
    """
    fetch = [str(ROOT / "tools" / "fetch-debian-package"), package, version, str(ROOT / ".cache" / "debian")]
    say(f"fetching {package} ({version})")
    return Path(must(fetch, timeout_s=300, what=f"fetching {package}").strip()) / path


def nats_program(version: str) -> Path:
    """Give the nats-server of another Debian release, unpacked aside.

    Errors: raises EngineUnavailable when the archive has it no longer.
    """
    say(f"fetching nats-server {version}")
    fetch = [str(ROOT / "tools" / "fetch-nats-server"), version, str(ROOT / ".cache" / "nats")]
    return Path(must(fetch, timeout_s=300, what=f"fetching nats-server {version}").strip())


def _has_image(name: str) -> bool:
    return _run(["docker", "image", "inspect", name], timeout_s=30).returncode == 0


def _release() -> str:
    for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise EngineUnavailable("this machine's release has no codename to debootstrap; set BASE_IMAGE")


def base_image(scratch: Path) -> str:
    """Name an image with Python 3.11 or newer: $BASE_IMAGE, else one made of this machine's own
    release.
    """
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
    must(
        ["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", release, str(tree)],
        timeout_s=900,
        what="debootstrap",
    )
    archive = scratch / "base.tar"
    must(["tar", "-C", str(tree), "-c", "-f", str(archive), "."], timeout_s=300, what="tar")
    must(["docker", "import", str(archive), name], timeout_s=300, what="docker import")
    archive.unlink()
    shutil.rmtree(tree)
    return name


def program_image(base: str, program: Path, folder: Path, *, tag: str, command: Sequence[str] = ()) -> str:
    """Build the base image with one program of this machine as its entry point, under its own name
    on PATH.
    """
    folder.mkdir()
    shutil.copy(program, folder / program.name)
    arguments = ", ".join(f'"{word}"' for word in command)
    (folder / "Dockerfile").write_text(
        f'FROM {base}\nCOPY {program.name} /usr/local/bin/{program.name}\nENTRYPOINT ["{program.name}"]\nCMD '
        f"[{arguments}]\n",
        encoding="utf-8",
    )
    return _build(folder, tag)


def service_image(base: str, service: str) -> str:
    """Build a service's image as docs/how-to/deploy-one-service.md says, by the name that
    compose.yaml gives it.
    """
    return _build(
        ROOT,
        f"topobus-ci/{service}:latest",
        dockerfile_path="deploy/images/Dockerfile",
        buildargs={"BASE_IMAGE": base, "SERVICE": service},
        network_mode="host",
    )


def _build(context: Path, tag: str, **how: object) -> str:
    try:
        DockerImage(context, tag=tag, clean_up=False, **how).build()
    except docker.errors.BuildError as err:
        said = "".join(str(line.get("stream", "")) for line in err.build_log)
        raise EngineUnavailable(f"building {tag} failed: {err.msg}\n{said[-_TAIL:]}") from err
    return tag


@contextmanager
def machine_certificates() -> Iterator[None]:
    """Have the certificates that pip trusts here where builds of services' images look, for the
    length of a block.
    """
    given = next((Path(ca_file) for ca_file in _CA_FILES if ca_file and Path(ca_file).is_file()), None)
    target = _CERTIFICATES / "machine.crt"
    try:
        if given is not None:
            shutil.copy(given, target)
        yield
    finally:
        target.unlink(missing_ok=True)
