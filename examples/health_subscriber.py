"""Follow device health with nats-py alone: each device's present state first, then every change; nothing twice, nothing lost."""

import asyncio
import os
import sys

import nats


async def main() -> None:
    url, health = os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), "topobus.v1.health.>"
    nc = await nats.connect(url, max_reconnect_attempts=-1, ping_interval=5, inbox_prefix="_INBOX.user")
    # An ordered consumer goes on behind the last event after any outage. Two habits of nats-py: by its own heartbeat of 5 s it is blind for 19 s
    # after a restart of the server (so 1 s); and when its queue overflows it skips events for good (so keep reading: hand slow work to others).
    events = await nc.jetstream().subscribe(health, ordered_consumer=True, idle_heartbeat=1, deliver_policy="last_per_subject")
    async for event in events.messages:
        print(event.data.decode(), flush=True)


try:
    asyncio.run(main())
except BrokenPipeError:
    # Whoever read has enough (`| head`): point stdout away, or the interpreter complains at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
