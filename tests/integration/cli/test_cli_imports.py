"""What a command on the bus loads: only what it uses, for each module costs every call of it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import LEDGER
from topobus.simulation.nats_server import NatsServer
from topobus.values.ledger import Ledger

pytestmark = [pytest.mark.integration, pytest.mark.real_start]

# For metrics and their page, manifests and diffs of them, log lines, traces, words of other
# programs' command lines, and what only a failure or another command needs.
_UNUSED = (
    "argparse",
    "http.server",
    "opentelemetry",
    "prometheus_client",
    "structlog",
    "topobus.cli.engine_process",
    "topobus.formats.kubernetes.manifest",
    "wsgiref.simple_server",
    "yaml",
)
# `get` and `describe` know Kubernetes' shapes; others do not.
_SHAPES = "topobus.formats.kubernetes.resource"
_SCRIPT = f"""
import json, sys
from topobus.cli.application import run
run(sys.argv[1:])
sys.stderr.write("\\n" + json.dumps(["nats" in sys.modules, [name for name in {(*_UNUSED, _SHAPES)!r} if name in sys.modules]]))
"""  # noqa: E501


@pytest.mark.parametrize(
    "words", [("holders",), ("device", "list"), ("health",), ("inventory",), ("get", "claims")], ids=" ".join
)
async def test_bus_command_loads_only_what_it_uses(nats_server: NatsServer, bus: Bus, words: tuple[str, ...]) -> None:
    """A command that talks to the bus ends without what makes metrics, log lines, traces and
    manifests: each module costs every call.
    """
    await bus.put(LEDGER, Ledger(node="n1"), node="n1")

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SCRIPT, *words, "--nats", nats_server.url),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()

    has_client, loaded = json.loads(errors.decode().splitlines()[-1])
    assert has_client
    assert loaded == ([_SHAPES] if words[0] == "get" else [])
