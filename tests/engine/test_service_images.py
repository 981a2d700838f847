"""Each service's image alone, run as docs/how-to/deploy-one-service.md says: ready by HTTP, honest
without hardware and without NATS, gone at SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network
from testcontainers.core.wait_strategies import HttpWaitStrategy, LogMessageWaitStrategy
from testcontainers.core.waiting_utils import WaitStrategy

from engine.conftest import Images, failing_without_engine
from engine.engine import nats_program, program_image
from support.documented_images import SERVICES, SERVICES_PAGE, DocumentedRun, documented_runs
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RUNS = documented_runs(SERVICES_PAGE)
HTTP_PORT, NATS_PORT = 8080, 4222
# What `docker stop` gives a container before it kills it; a killed one ends with 137.
GRACE_S = 10
# What each tells of a machine without devices: how many of which class. There is none without CPUs.
INVENTORIES = {"gpu": {"gpu": 0}, "nic": {"nic": 0}, "fpga": {"fpga": 0}, "device": {"npu": 0}, "cpu": {"cpu": 8}}
NO_DEVICES = Path(__file__).parent / "no_devices.toml"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """What stands for the host's folders: `/` is a machine without devices, every other path an
    empty folder, the console's password a file.
    """
    build(NO_DEVICES, tmp_path / "machine")
    (tmp_path / "console-password").write_text("a long password\n")
    return tmp_path


@contextmanager
def _running(
    image: str, run: DocumentedRun, host: Path, wait: WaitStrategy, network: Network | None = None
) -> Iterator[DockerContainer]:
    """Run an image with the page's options, on folders of `host`, until the block ends."""
    container = DockerContainer(
        image, env=dict(run.environment), command=list(run.command) or None, ports=[HTTP_PORT], network=network
    )
    for source, place, mode in run.volumes:
        folder = host / (source.strip("./") or "machine")
        if not folder.exists():
            folder.mkdir(parents=True)
        container.with_volume_mapping(folder, place, mode)
    if run.user:
        container.with_kwargs(user=run.user)
    with container.waiting_for(wait.with_poll_interval(0.1)):
        yield container


@pytest.fixture(scope="module")
def nats_image(images: Images, tmp_path_factory: pytest.TempPathFactory) -> str:
    """NATS 2.10, as the page names it: the relay wants that."""
    with failing_without_engine():
        folder = tmp_path_factory.mktemp("nats") / "image"
        return program_image(images.base, nats_program("2.10.27"), folder, tag="topobus-ci/nats:2.10.27")
    raise AssertionError("unreachable")


@contextmanager
def _nats(image: str) -> Iterator[tuple[Network, str]]:
    """Run the NATS that the page's URL names; gives its network, and its URL for this host."""
    with Network() as network:
        command = list(RUNS["nats"].command)
        container = DockerContainer(
            image, command=command, ports=[NATS_PORT], network=network, network_aliases=["nats"]
        )
        with container.waiting_for(LogMessageWaitStrategy("Server is ready").with_poll_interval(0.1)):
            yield network, f"nats://127.0.0.1:{container.get_exposed_port(NATS_PORT)}"


def _run_of(service: str) -> DocumentedRun:
    if service not in RUNS:
        pytest.fail(f"{SERVICES_PAGE} has no `docker run` line for {service}", pytrace=False)
    return RUNS[service]


def _stop(container: DockerContainer) -> tuple[int, str]:
    """End it as `docker stop` does; gives its status and what it said."""
    container.get_wrapped_container().stop(timeout=GRACE_S)
    return container.wait(), "".join(stream.decode() for stream in container.get_logs())


@pytest.mark.parametrize("service", SERVICES)
async def test_service_is_ready_and_ends_when_its_image_runs_as_the_page_says(
    nats_image: str, service_images: Mapping[str, str], host: Path, service: str
) -> None:
    """With NATS, and discovery where it waits for the machine: /readyz says 200, no hardware is an
    empty inventory, and SIGTERM ends it with 0.
    """
    run = _run_of(service)
    with ExitStack() as undo:
        network, url = undo.enter_context(_nats(nats_image))
        # They start in any order; discovery alone needs no other.
        for beside in {"discovery", service} - {service}:
            undo.enter_context(
                _running(service_images[beside], RUNS[beside], host, LogMessageWaitStrategy("service.started"), network)
            )
        container = undo.enter_context(
            _running(service_images[service], run, host, HttpWaitStrategy(HTTP_PORT, "/readyz"), network)
        )
        async with asyncio.timeout(60), Bus.session(NatsSettings(url=url), name="topobus-cli") as bus:
            inventories = {
                entry.value.device_class: len(entry.value.devices) for entry in await bus.list(INVENTORY, node="n1")
            }
        status, said = _stop(container)

    assert inventories == INVENTORIES.get(service, {})
    assert status == 0
    assert "Traceback" not in said


@pytest.mark.parametrize("service", SERVICES)
def test_service_says_what_it_waits_for_when_nats_is_not_where_the_setting_says(
    service_images: Mapping[str, str], host: Path, service: str
) -> None:
    """Where, what and what to do stand in its log; /readyz says 503 with the same.

    SIGTERM ends it with 0 all the same.
    """
    url = "nats://127.0.0.1:4222"
    documented = _run_of(service)
    run = replace(documented, environment={**documented.environment, "TOPOBUS_ALL__NATS__URL": url})
    with _running(service_images[service], run, host, LogMessageWaitStrategy("bus.waiting")) as container:
        report = _unready(container)
        status, said = _stop(container)
    waiting = json.loads(next(line for line in said.splitlines() if "bus.waiting" in line))

    assert (waiting["url"], waiting["error"]) == (url, f"[Errno 111] Connect call failed ('127.0.0.1', {NATS_PORT})")
    assert "TOPOBUS_ALL__NATS__URL" in waiting["next_step"]
    assert report["parts"]["bus"].startswith(f"waiting for NATS at {url}: {waiting['error']}")
    assert status == 0
    assert "Traceback" not in said


def _unready(container: DockerContainer) -> dict[str, dict[str, str]]:
    with pytest.raises(HTTPError) as caught:
        urlopen(f"http://127.0.0.1:{container.get_exposed_port(HTTP_PORT)}/readyz", timeout=10)
    with caught.value as answer:
        assert answer.code == 503
        report: dict[str, dict[str, str]] = json.load(answer)
    return report
