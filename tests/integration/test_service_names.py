"""The eight services of a node as real processes, as NATS' own tools see them: on an open server, and on one with accounts."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from integration.values import release
from support.account_nats import account_nats
from support.asking import ask_patiently
from support.nats_tools import OPEN_INBOX, Tool, open_tool
from support.running import LIMIT_S, NODE, SERVICES, all_services, system_settings, until_all_ready
from topobus.contracts.catalogue import RELEASE
from topobus.contracts.device_classes import DEVICE_SERVICES
from topobus.contracts.nats_accounts import Shape, accounts
from topobus.contracts.service_protocol import service_name
from topobus.runtime.asker_releases import OWN_RELEASE
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]

_ANSWERED = {
    "topobus-topology": {"place", "prefer", "adopt", "commit", "release", "operate"},
    "topobus-gpu": {"prepare", "unprepare", "hint", "attach", "detach", "adjust", "perform"},
    "topobus-controller": {"plan", "forget"},
    "topobus-discovery": set(),
}


async def _look(tool: Tool, gateway: Bus) -> None:
    """See who is there, what is answered, and that an ask is counted."""
    pings = await tool.ask("PING", wanted=len(SERVICES))
    infos = {info["name"]: info for info in await tool.ask("INFO", wanted=len(SERVICES))}
    await ask_patiently(gateway, RELEASE, release(), node=NODE)
    (stats,) = await tool.ask("STATS", "topobus-topology", wanted=1)

    assert [ping["name"] for ping in pings] == sorted(service_name(name) for name in SERVICES)
    assert {ping["metadata"]["release"] for ping in pings} == {OWN_RELEASE}
    assert {ping["name"] for ping in pings if ping["metadata"].get("node") == NODE} == set(infos) - {"topobus-controller"}
    assert {ping["metadata"]["class"] for ping in pings if "class" in ping["metadata"]} == set(DEVICE_SERVICES)
    for name, wanted in _ANSWERED.items():
        assert {endpoint["name"] for endpoint in infos[name]["endpoints"]} == wanted
    released = next(endpoint for endpoint in stats["endpoints"] if endpoint["name"] == "release")
    assert released["subject"] == RELEASE.subject(node=NODE)
    assert released["num_requests"] >= 1
    assert released["data"]["outcomes"]["answered"] >= 1


async def test_tool_sees_all_services_when_the_server_is_open(nats_binary: Path) -> None:
    """`nats micro ls` without any option shows the eight, and what they answer."""
    async with NatsServer(binary=nats_binary) as server, AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tb-")))
        running = await stack.enter_async_context(all_services(server.url, folder))
        await until_all_ready(running)
        tool = await stack.enter_async_context(open_tool(server.url, inbox_prefix=OPEN_INBOX))
        gateway = await stack.enter_async_context(Bus.session(NatsSettings(url=server.url), name="gateway"))

        await _look(tool, gateway)
        assert await _listed_by_the_example({"NATS_URL": server.url}) == sorted(service_name(name) for name in SERVICES)


async def test_tool_sees_all_services_when_vendors_have_accounts_of_their_own(nats_binary: Path) -> None:
    """With the CLI's login and the inbox for tools it shows the same."""
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as nats, AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tb-")))
        settings = dict(system_settings(folder))
        for name in SERVICES:
            own = nats.settings(name)
            prefix = f"TOPOBUS_{name.upper()}__NATS__"
            settings |= {f"{prefix}USER": name, f"{prefix}PASSWORD_FILE": own.password_file, f"{prefix}ZONE": own.zone}
        running = await stack.enter_async_context(all_services(nats.server.url, folder, settings=settings))
        await until_all_ready(running)
        cli = await stack.enter_async_context(nats.client("cli"))
        gateway = await stack.enter_async_context(nats.bus("gateway"))

        await _look(Tool(cli.client), gateway)
        login = {"NATS_URL": nats.server.url, "NATS_PASSWORD_FILE": nats.settings("cli").password_file}
        assert await _listed_by_the_example(login) == sorted(service_name(name) for name in SERVICES)


async def _listed_by_the_example(login: dict[str, str]) -> list[str]:
    """Run examples/service_list.py until it has listed as many services as there are."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples" / "service_list.py"),
        env={**os.environ, "NATS_WAIT_S": str(LIMIT_S), **login},
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            await program.stdout.readline()
            return sorted([(await program.stdout.readline()).decode().split()[0] for _ in SERVICES])
    finally:
        program.kill()
        await program.wait()
