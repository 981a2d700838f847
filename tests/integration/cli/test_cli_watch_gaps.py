"""Commands that follow what happens say, in their lines, when NATS goes away and is back: what
follows after a gap is not what came next.
"""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from integration.values import OWNER, health
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import DECISION, HEALTH, HINTS
from topobus.formats.messages.messages import DecisionEvent, HintsEvent
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0


async def _say(bus: Bus, words: tuple[str, ...]) -> None:
    """Have something happen that the command shows."""
    if words[0] == "hints":
        given = HintsEvent(node="n1", device_class="gpu", op_id="o-1", by="test", lists=(), time="2026-11-28T00:00:00Z")
        await bus.notify(HINTS, {"h": given})
    elif words[0] == "health":
        await bus.publish(HEALTH, health(1), event_id="e", node="n1", device_class="gpu", device="gpu-0")
    else:
        decided = DecisionEvent(
            id="d-1", verb="release", node="n1", op_id="o-1", time="2026-11-28T00:00:00Z", owner=OWNER
        )
        await bus.publish(DECISION, decided, event_id="d", node="n1")


@pytest.mark.parametrize(
    ("words", "is_lossy"),
    [(("hints", "watch"), True), (("health", "watch"), False), (("decisions", "--follow"), False)],
    ids=["hints", "health", "decisions"],
)
@pytest.mark.parametrize("is_json", [True, False], ids=["json", "text"])
async def test_followers_tell_a_gap_in_their_lines_when_the_server_restarts(
    own_nats_server: NatsServer, own_bus: Bus, words: tuple[str, ...], is_lossy: bool, is_json: bool
) -> None:
    """Two lines: that nothing comes, and that it goes on.

    Of hints, which nobody stores, that those of meanwhile are lost.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "topobus.cli.main",
            *words,
            "--nats",
            own_nats_server.url,
            *(["--json"] if is_json else []),
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_LIMIT_S):
            first = asyncio.ensure_future(process.stdout.readline())
            while not first.done():
                # What is said before the command listens is heard by nobody.
                await _say(own_bus, words)
                await asyncio.wait([first], timeout=0.05)
            await own_nats_server.stop()
            await own_nats_server.start()
            lines: list[str] = []
            while len(lines) < 2:
                line = (await process.stdout.readline()).decode()
                lines += [line] if '"gap"' in line or "NATS" in line else []
    finally:
        process.terminate()
        await process.communicate()

    if is_json:
        gaps = [json.loads(line) for line in lines]
        assert [gap["gap"] for gap in gaps] == ["disconnected", "connected"]
        assert gaps[1]["missed"] == (None if is_lossy else 0)
    else:
        assert "NATS went away" in lines[0]
        assert "NATS is back" in lines[1]
        assert ("are lost" in lines[1]) == is_lossy
