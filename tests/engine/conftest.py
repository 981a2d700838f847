"""The engine and its images, once for all tests that need them.

A containerd of its own for each that runs containers without Docker.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

import pytest
from testcontainers.compose import DockerCompose

from engine.containerd import Containerd, provide_containerd
from engine.engine import (
    ROOT,
    EngineUnavailable,
    base_image,
    machine_certificates,
    must,
    program_image,
    provide_compose,
    provide_engine,
    say,
    service_image,
)
from support.documented_images import SERVICES
from topobus.simulation.nats_server import find_nats_server, free_port

# Of compose.yaml: the project's name here, and what runs when it is up.
PROJECT = "topobus-ci"
RUNNING = {"nats", "discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller"}


@dataclass(frozen=True)
class Images:
    """Names of the images that stand in for a registry's."""

    base: str
    nats: str


@contextmanager
def failing_without_engine() -> Iterator[None]:
    """Fail the tests of a fixture when the engine, or what it needs, is not to be had: with what
    the engine said, once and without our own frames.
    """
    trouble = ""
    try:
        yield
    except EngineUnavailable as err:
        trouble = str(err)
    if trouble:
        pytest.fail(trouble, pytrace=False)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A Docker daemon that answers, the base image, and one of this machine's own nats-server.

    A daemon that was started here is stopped at the end.
    """
    scratch = tmp_path_factory.mktemp("engine")
    with failing_without_engine(), provide_engine(scratch / "dockerd.log"):
        base = base_image(scratch)
        nats = os.environ.get("NATS_IMAGE") or program_image(
            base, find_nats_server(), scratch / "nats", tag="topobus-ci/nats:local"
        )
        yield Images(base=base, nats=nats)


@pytest.fixture(scope="session")
def service_images(images: Images) -> Mapping[str, str]:
    """The image of each service, and the CLI's, by its name."""
    with failing_without_engine(), machine_certificates(), ThreadPoolExecutor(2) as builders:
        # The first makes the wheel, which the others take from the engine's cache.
        say(f"building the images of the CLI and of {len(SERVICES)} services")
        built = {"cli": service_image(images.base, "cli")}
        for service, image in zip(
            SERVICES, builders.map(lambda service: service_image(images.base, service), SERVICES), strict=True
        ):
            say(f"built {image}")
            built[service] = image
        return built
    raise AssertionError("unreachable")


@pytest.fixture(scope="session")
def system(
    images: Images, service_images: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerCompose]:
    """The system of compose.yaml as it is shipped, up and healthy; `down` leaves nothing of it."""
    scratch = tmp_path_factory.mktemp("compose")
    settings = {
        "COMPOSE_PROJECT_NAME": PROJECT,
        "BASE_IMAGE": images.base,
        "NATS_IMAGE": images.nats,
        "TOPOBUS_IMAGE_PREFIX": service_images["cli"].partition("/")[0],
        "TOPOBUS_NATS_PORT": str(free_port()),
        "TOPOBUS_RESCAN_S": "1",
    }
    (scratch / "settings.env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    compose = DockerCompose(ROOT, env_file=str(scratch / "settings.env"))
    with failing_without_engine(), pytest.MonkeyPatch.context() as environment:
        for name, value in provide_compose(scratch / "docker").items():
            environment.setenv(name, value)
        # Of a run that was killed.
        compose.stop()
        say("compose up --wait")
        try:
            compose.start()
        except CalledProcessError as err:
            said, failure = compose.get_logs()[0], err.stderr.decode(errors="replace")
            compose.stop()
            raise EngineUnavailable(f"compose up failed:\n{failure[-2000:]}\n{said[-4000:]}") from err
        yield compose
        say("compose down --volumes")
        compose.stop()
        left = {what: docker_names(what) for what in ("container", "network", "volume")}
        assert left == {"container": [], "network": [], "volume": []}


def docker_names(what: str) -> list[str]:
    """List the containers, networks or volumes that are compose's."""
    command = ["docker", what, "ls", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}"]
    return must([*command, *(["--all"] if what == "container" else [])], timeout_s=60, what=f"docker {what} ls").split()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets lie in it."""
    made = Path(tempfile.mkdtemp(prefix="tc-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def containerd(folder: Path) -> Iterator[Containerd]:
    """A containerd that reads the gateway's CDI folder, and whose plugin the gateway may be."""
    if os.geteuid() != 0:
        pytest.fail("only root can run containers here", pytrace=False)
    with failing_without_engine(), provide_containerd(folder / "c", folder / "cdi") as made:
        yield made
