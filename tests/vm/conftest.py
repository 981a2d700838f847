"""What the tests inside a guest share: one bus and one set of services.

Elsewhere nothing of this folder is collected.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.forked_starts import close, forked_starts, prepare
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from vm.kernel import sh
from vm.monitor import Monitor
from vm.node import JOB, URL, Node

_IS_GUEST = Path("/vm/init").exists()
collect_ignore_glob = [] if _IS_GUEST else ["*"]


@pytest.fixture(scope="session")
def nats() -> Iterator[None]:
    """Start a nats-server, and from now on programs of ours as copies of one process: an emulated
    interpreter takes ten seconds to begin.
    """
    Path("/tmp/nats").mkdir()
    Path("/tmp/nats.conf").write_text(
        "port: 4222\njetstream { store_dir: /tmp/nats, max_file_store: 4GB, max_memory_store: 256MB }\n"
    )
    prepare()
    with (JOB / "nats.log").open("ab") as out, forked_starts():
        # Nothing runs where the host has one for us.
        command = ["/opt/topobus/bin/nats-server", "-c", "/tmp/nats.conf"] if "127.0.0.1" in URL else ["true"]
        server = subprocess.Popen(command, stdout=out, stderr=out)
        yield
    close()
    server.kill()
    server.wait()


@pytest_asyncio.fixture(scope="session")
async def node(nats: None) -> AsyncIterator[Node]:
    """Connect, and start discovery; device services are started by whom needs them."""
    async with Bus.session(NatsSettings(url=URL), name="gateway") as bus:
        made = Node(bus)
        await made.start("discovery")
        yield made
        made.end()


@pytest.fixture(scope="session")
def monitor() -> Monitor:
    """Begin to talk with QEMU."""
    return Monitor()


@pytest.fixture
def pod() -> Iterator[str]:
    """Make a network namespace as a pod's."""
    sh("ip netns add pod")
    yield "pod"
    sh("ip netns del pod")
