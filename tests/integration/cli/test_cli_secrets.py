"""What the CLI prints holds no password, although its server's address may."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from topobus.simulation.nats_server import NatsServer, free_port

pytestmark = pytest.mark.integration

_PASSWORD = "topsecretpw"


async def _topobus(*arguments: str) -> str:
    """Run one command; all that it printed, on both streams."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.cli.main",
        *arguments,
        env={**os.environ, "TOPOBUS_CLI__CONNECT_TIMEOUT_S": "3"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode()


@pytest.mark.parametrize("command", ["inventory", "doctor"])
async def test_cli_prints_no_password_when_its_server_does_not_answer(command: str) -> None:
    """The error names the server without what stands before the @."""
    port = free_port()
    printed = await _topobus(command, "--nats", f"nats://u:{_PASSWORD}@127.0.0.1:{port}")

    assert f"nats://127.0.0.1:{port}" in printed
    assert _PASSWORD not in printed


async def test_cli_prints_no_password_when_it_checks_or_is_refused(nats_binary: Path) -> None:
    """Neither the check-up's first line nor the error of a wrong password has one, and the
    refusal's own words are there.
    """
    config = f"authorization {{ users: [ {{ user: u, password: {_PASSWORD} }} ] }}"
    async with NatsServer(binary=nats_binary, config=config) as server:
        good = await _topobus("doctor", "--nats", server.url.replace("://", f"://u:{_PASSWORD}@"))
        refused = await _topobus("doctor", "--nats", server.url.replace("://", f"://u:wrong{_PASSWORD}@"))

    assert f"nats://127.0.0.1:{server.port}" in good
    assert _PASSWORD not in good + refused
    assert "authorization violation" in refused.lower()
