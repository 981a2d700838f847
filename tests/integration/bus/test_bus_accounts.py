"""The system on a NATS server with accounts: real services work together, and a subscriber hears
and replays what is stored without a consumer.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from support.account_nats import LIMIT_S, account_nats
from support.alignment_nodes import container, pod
from support.asking import ask_patiently
from support.looks import next_look
from support.running import NODE, service
from topobus.bus.bus import Bus
from topobus.bus.server_config.nats_accounts import IMPORTED_API, Shape, accounts
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, LEDGER, PLACE, PREPARE
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import HealthEvent, HintsEvent, PlaceRequest, Prepared, PrepareRequest
from topobus.simulation.machines import build
from topobus.values.outcome import Placement
from topobus.values.request import PodRequest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
_SERVICES = ("controller", "discovery", "gpu", "topology")


async def _placed(gateway: Bus, wanted: PodRequest) -> str:
    """Place a pod, as soon as topology has heard of the devices; gives the operation that did."""
    async with asyncio.timeout(LIMIT_S):
        for attempt in itertools.count():
            reply = await ask_patiently(gateway, PLACE, PlaceRequest(op_id=f"op-{attempt}", pod=wanted), node=NODE)
            if isinstance(reply.result, Placement):
                return f"op-{attempt}"
            await next_look()
    raise AssertionError("the loop above has no end")


async def test_system_works_when_vendors_and_subscribers_have_accounts_of_their_own(
    nats_binary: Path, tmp_path: Path
) -> None:
    """Machine, inventory and ledger are written, a pod is placed, its device prepared, and a
    subscriber hears the hints and of each device, and reads the latter again.
    """
    build("dgx", tmp_path / "machine")
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as nats, AsyncExitStack() as stack:
        heard: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        subscriber = await stack.enter_async_context(nats.client("user"))

        async def hear(event: Msg) -> None:
            assert event.headers is not None
            heard.put_nowait((event.subject, int(event.headers["Nats-Sequence"])))

        hints: list[HintsEvent] = []

        async def hear_hints(notice: Msg) -> None:
            hints.append(decode(notice.data, HintsEvent, where=notice.subject))

        await subscriber.client.subscribe(HEALTH.pattern(device_class="gpu"), cb=hear)
        await subscriber.client.subscribe("topobus.v1.hints.>", cb=hear_hints)
        await subscriber.barrier()
        for name in _SERVICES:
            settings = nats.settings(name)
            variables = {
                "TOPOBUS_ALL__HARDWARE__ROOT": str(tmp_path / "machine"),
                "TOPOBUS_ALL__NATS__USER": name,
                "TOPOBUS_ALL__NATS__PASSWORD_FILE": settings.password_file,
                "TOPOBUS_ALL__NATS__ZONE": settings.zone,
            }
            await stack.enter_async_context(service(name, nats.server.url, variables))
        gateway = await stack.enter_async_context(nats.bus("gateway"))
        trainer = pod("trainer", container(gpu=1))
        decision = await _placed(gateway, trainer)
        ledger = await gateway.get(LEDGER, node=NODE)
        inventory = await gateway.get(INVENTORY, node=NODE, device_class="gpu")
        assert ledger is not None
        assert inventory is not None
        assert list(ledger.value.allocations) == [trainer.owner.key]
        request = PrepareRequest(op_id="prepare-1", owner=trainer.owner, devices=(inventory.value.devices[0].name,))
        prepared = await ask_patiently(gateway, PREPARE, request, node=NODE, device_class="gpu")
        assert isinstance(prepared.result, Prepared), prepared.result
        async with asyncio.timeout(LIMIT_S):
            first, sequence = await heard.get()
        query = json.dumps({"next_by_subj": HEALTH.pattern(), "seq": sequence}).encode()
        answer = json.loads((await subscriber.ask(f"{IMPORTED_API}.STREAM.MSG.GET.{HEALTH.stream}", query)).data)[
            "message"
        ]

        async with asyncio.timeout(LIMIT_S):
            while not [given for given in hints if given.op_id == decision]:
                await subscriber.barrier()
        assert [(given.node, given.device_class, given.by) for given in hints if given.op_id == decision] == [
            (NODE, "gpu", "topology")
        ]
        assert (answer["subject"], answer["seq"]) == (first, sequence)
        assert decode(base64.b64decode(answer["data"]), HealthEvent, where="replay").node == NODE
        assert subscriber.denials == []
        await _follows_as_a_program(nats.server.url, first)


async def _follows_as_a_program(url: str, subject: str) -> None:
    """The example reads, as a subscriber, what is stored."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples" / "health_subscriber.py"),
        env={**os.environ, "NATS_URL": url.replace("//", "//user:user@")},
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = decode((await program.stdout.readline()).strip(), HealthEvent, where="the example's output")
                if HEALTH.subject(node=event.node, device_class=event.device_class, device=event.device) == subject:
                    return
    finally:
        program.kill()
        await program.wait()
