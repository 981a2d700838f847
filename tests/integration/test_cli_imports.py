"""What a command on the bus loads: only what it uses, for each module costs every call of it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from topobus.contracts.catalogue import LEDGER
from topobus.domain.ledger import Ledger
from topobus.runtime.bus import Bus
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.real_start]

# For metrics and their page, manifests and diffs of them, and the search for tracing's propagators.
_UNUSED = (
    "prometheus_client",
    "http.server",
    "wsgiref.simple_server",
    "yaml",
    "opentelemetry.propagate",
    "topobus.kubernetes.api.resource",
)
_SCRIPT = f"""
import json, sys
from topobus.cli.application import run
run(sys.argv[1:])
sys.stderr.write("\\n" + json.dumps(["nats" in sys.modules, [name for name in {_UNUSED!r} if name in sys.modules]]))
"""


@pytest.mark.parametrize("words", [("holders",), ("device", "list"), ("health",)], ids=" ".join)
async def test_bus_command_loads_no_metrics_when_it_exports_none(nats_server: NatsServer, bus: Bus, words: tuple[str, ...]) -> None:
    """A command that talks to the bus ends without prometheus_client, and without what it prints no answer with."""
    await bus.put(LEDGER, Ledger(node="n1"), node="n1")

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SCRIPT, *words, "--nats", nats_server.url),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()

    has_client, loaded = json.loads(errors.decode().splitlines()[-1])
    assert has_client
    assert loaded == []
