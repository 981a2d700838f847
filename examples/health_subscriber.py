"""Follow device health with nats-py alone: each device's present state first, then every change; nothing twice, nothing lost."""

import asyncio
import os
import signal

import nats


async def main() -> None:
    url, health = os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), "topobus.v1.health.>"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough (`| head`)
    nc = await nats.connect(url, max_reconnect_attempts=-1, ping_interval=5, inbox_prefix="_INBOX.user")
    # An ordered consumer goes on behind the last event after any outage, with a heartbeat of 1 s: by nats-py's own 5 s it is blind for 19 s. Keep reading.
    events = await nc.jetstream().subscribe(health, ordered_consumer=True, idle_heartbeat=1, deliver_policy="last_per_subject")
    async for event in events.messages:
        print(event.data.decode(), flush=True)


asyncio.run(main())
