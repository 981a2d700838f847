"""Runs a command of `topobus` as a process of its own against a server."""

from __future__ import annotations

import asyncio
import sys

from topobus.simulation.nats_server import NatsServer

__all__ = ["run_cli"]


async def run_cli(nats_server: NatsServer, *arguments: str) -> tuple[int, str, str]:
    """Run one command.

    Returns its exit code, its standard output, and its standard error with each run of white space
    as one blank.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "topobus.cli.main", *arguments, "--nats", nats_server.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), " ".join(errors.decode().split())
