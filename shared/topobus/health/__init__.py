"""Follow device health from a program of your own: `async for event in follow(url,
password_file=…)`.

It connects as NATS' user `user`, which may only follow events. It makes no consumer, because the
server's accounts allow none (docs/how-to/subscribe-to-health.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from topobus.bus.bus import Bus, Start
from topobus.formats.messages.catalogue import HEALTH
from topobus.formats.messages.messages import HealthEvent
from topobus.process.config import NatsSettings
from topobus.process.logging import get_logger

__all__ = ["HealthEvent", "follow"]

_USER = "user"


async def follow(
    url: str = "nats://127.0.0.1:4222",
    *,
    password_file: str = "",
    ca_file: str = "",
    node: str = "",
    device_class: str = "",
    changes_only: bool = False,
    has_accounts: bool = True,
) -> AsyncGenerator[HealthEvent, None]:
    """Yield the present health of each device, then every change, without end.

    Nothing twice and nothing lost, over restarts of the server.

    Shapes: password_file — of NATS' user `user`, read again when the server has taken another one;
    ca_file — with it, or with a tls:// URL, a server without TLS is sent nothing; node,
    device_class — only these; has_accounts — False for a server of your own that runs without our
    configuration.
    Errors: ConfigError for files that cannot be read or a URL that is none. While the server is
    away it waits, and logs that on standard error (`bus.waiting`): a refused login at once, as an
    error with user and server; a server that cannot be reached as a warning, from the third try on;
    a missing stream (`health.waiting`) as a warning.
    Cost: a request for each device at the start, and one for each change.
    """
    settings = NatsSettings(
        url=url,
        user=_USER if password_file else "",
        password_file=password_file,
        tls_ca_file=ca_file,
        zone="vendor" if has_accounts else "",
    )
    parts = {part: value for part, value in (("node", node), ("device_class", device_class)) if value}
    start = Start.NEW if changes_only else Start.PRESENT
    troubles: set[str] = set()

    def note_waiting(trouble: str) -> None:
        if trouble not in troubles:
            troubles.add(trouble)
            get_logger().warning("health.waiting", error=trouble)

    async with (
        Bus.session(settings, name=_USER) as bus,
        aclosing(bus.follow(HEALTH, start=start, on_waiting=note_waiting, on_replaced=None, **parts)) as events,
    ):
        async for received in events:
            yield received.value
