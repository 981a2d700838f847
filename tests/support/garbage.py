"""Content of a bucket that no reader can decode: the server's own answer to a request that named
the key as its reply subject.
"""

from __future__ import annotations

import json
from typing import Any

from topobus.bus.bus import Bus
from topobus.formats.messages.nouns import State
from topobus.formats.messages.releases import RELEASE

__all__ = ["write_garbage"]

_ANSWER = b'{"type":"io.nats.jetstream.api.v1.stream_info_response","total":0,"config":{"name":"TOPOBUS_HEALTH"}}'


async def write_garbage(bus: Bus, state: State[Any], /, release: str = "", **parts: str) -> int:
    """Write such an answer at a key, as if a release had written it if one is given.

    Gives its revision.
    """
    home = state.home(**parts)
    headers = {RELEASE: release} if release else None
    answer = await bus._connection.request(
        f"$KV.{home.bucket}.{home.key(**parts)}", _ANSWER, headers=headers, timeout_s=30.0
    )
    return int(json.loads(answer.data)["seq"])
