"""The services that an attack is aimed at: all asks of a node answered under their own principals,
what they heard, and what the streams hold of others.

Used with one server (`tests/integration/bus/test_bus_account_attacks.py`) and with a hub and leaves
(`tests/integration/leaf/test_leaf_attacks.py`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from docpages.samples import sample
from support.account_attacks import Victim, is_granted
from support.account_nats import LIMIT_S, AccountNats, StreamImage, parts_of
from support.secured_nats import Attacker
from topobus.bus.bus import Bus
from topobus.bus.connection.reply_inbox import new_token
from topobus.bus.server_config.inboxes import answerer_of
from topobus.bus.server_config.up_subjects import up_nouns, up_subject
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import ASKS
from topobus.formats.messages.codec import encode
from topobus.formats.messages.nouns import Ask
from topobus.process.readiness import Readiness

__all__ = ["Answering", "answering", "say_up", "until_answered", "without_granted"]


class Answering:
    """All asks of the victim's node, answered under their own principals: what was handled, and
    what was dropped.
    """

    def __init__(self) -> None:
        self.handled: list[str] = []
        self.registries: list[CollectorRegistry] = []
        self.readiness: list[Readiness] = []

    async def answer(self, bus: Bus, ask: Ask[object, object], parts: dict[str, str]) -> None:
        """Answer one ask with a sample, and note it."""

        async def handle(_request: object) -> object:
            self.handled.append(ask.name)
            return sample(ask.reply)

        await bus.answer(ask, handle, **parts)

    def dropped(self) -> float:
        """Count messages that came to an ask's subject and were no request."""
        return sum(
            registry.get_sample_value("topobus_bus_strays_total", {"noun": ask.name, "why": why}) or 0.0
            for registry in self.registries
            for ask in ASKS
            for why in ("subject", "reply")
        )

    def unready(self) -> list[str]:
        """Say what any of them misses."""
        return [
            f"{name}: {why}"
            for readiness in self.readiness
            if not readiness.is_ready
            for name, why in readiness.report().items()
        ]


@asynccontextmanager
async def answering(nats: AccountNats, name_of: str, victim: Victim) -> AsyncIterator[Answering]:
    """Answer all asks of the victim's node; `name_of` gives a user's name from a principal's."""
    answers = Answering()
    async with AsyncExitStack() as stack:
        buses: dict[str, Bus] = {}
        for ask in ASKS:
            for device_class in victim.classes if "device_class" in ask.parts else ("",):
                principal = answerer_of(ask, device_class)
                name = principal if principal == "controller" else name_of.format(principal)
                if name not in nats.users:
                    # It answers at another server.
                    continue
                if principal not in buses:
                    registry, readiness = CollectorRegistry(), Readiness()
                    buses[principal] = await stack.enter_async_context(
                        nats.bus(name, registry=registry, readiness=readiness)
                    )
                    answers.registries.append(registry)
                    answers.readiness.append(readiness)
                parts = {"node": victim.node, "device_class": device_class}
                await answers.answer(buses[principal], ask, {part: parts[part] for part in ask.parts})
        yield answers


def without_granted(images: dict[str, StreamImage], granted: Iterable[str]) -> dict[str, StreamImage]:
    """Leave out of streams what an attacker may write."""
    patterns = tuple(granted)
    return {
        stream: StreamImage(
            image.config,
            image.consumers,
            tuple(message[1:] for message in image.messages if not is_granted(patterns, message[1])),
        )
        for stream, image in images.items()
    }


async def until_answered(nats: AccountNats, name_of: str, victim: Victim) -> None:
    """Exchange a sign of life with each service of the victim's node: what came before has been
    looked at then.
    """
    async with AsyncExitStack() as stack:
        askers: dict[str, Bus] = {}
        for ask in ASKS:
            asker = "cli" if "cli" in ask.readers else name_of.format(ask.readers[0])
            # A relay is asked at its node's own server, or through a hub.
            has_relay = "relay" in nats.users or any(name.startswith("leaf") for name in nats.users)
            is_elsewhere = {"controller": "controller" not in nats.users, "relay": not has_relay}.get(
                answerer_of(ask), False
            )
            if asker not in nats.users or is_elsewhere:
                # No client here may ask it, or it is answered where questions of this server do not
                # go.
                continue
            if asker not in askers:
                askers[asker] = await stack.enter_async_context(nats.bus(asker))
            for device_class in victim.classes if "device_class" in ask.parts else ("",):
                parts = {"node": victim.node, "device_class": device_class}
                sign = await askers[asker].is_answered(
                    ask, timeout_s=LIMIT_S, **{part: parts[part] for part in ask.parts}
                )
                assert isinstance(sign, Answered), ask.name


async def say_up(client: Attacker, said: Victim) -> None:
    """Say each state and event of a node to the hub, as its relay does, with the store's
    acknowledgement.
    """
    for noun in up_nouns():
        parts = parts_of(noun, said.node, said.classes[-1])
        # As through the leaf's link: answers come to the relay's inboxes.
        inbox = await client.client.subscribe(f"_INBOX.relay.nats.{new_token()}")
        await client.client.publish(up_subject(noun, **parts), encode(sample(noun.message)), reply=inbox.subject)
        assert json.loads((await inbox.next_msg(LIMIT_S)).data)["stream"], noun.name
        await inbox.unsubscribe()
