"""The floor of the leaf benchmark: the same messages put by one plain client of the hub, without
leaves and without a client library.

The time runs until all are acknowledged. At most `window` messages wait for their acknowledgement.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable

from topobus.values.errors import PeerUnavailable

__all__ = ["bare_puts"]

_LIMIT_S = 600.0


async def bare_puts(port: int, messages: Iterable[tuple[str, bytes, bytes]], *, window: int) -> tuple[int, float]:
    """Put messages (subject, headers, data) and wait for each acknowledgement.

    Returns how many there were, and the seconds.

    Errors: raises PeerUnavailable when the server refuses one.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    inbox = f"_INBOX.bench.nats.{secrets.token_hex(8)}"
    gate = asyncio.Semaphore(window)
    sent = 0
    is_all_sent = asyncio.Event()

    async def read_answers() -> int:
        answered = 0
        while not (is_all_sent.is_set() and answered == sent):
            line = await reader.readline()
            if line.startswith(b"MSG "):
                data = await reader.readexactly(int(line.split()[-1]) + 2)
                if b'"error"' in data:
                    raise PeerUnavailable(f"the server refused a put: {data[:300]!r}")
                answered += 1
                gate.release()
            elif line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith((b"-ERR", b"HMSG")) or not line:
                raise PeerUnavailable(f"the server refused a put: {line!r}")
        return answered

    try:
        async with asyncio.timeout(_LIMIT_S):
            await reader.readline()
            writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true,"lang":"python"}\r\n')
            writer.write(f"SUB {inbox} 1\r\n".encode())
            began = time.monotonic()
            answers = asyncio.create_task(read_answers())
            for subject, headers, data in messages:
                await gate.acquire()
                if answers.done():
                    break
                head = f"{'HPUB' if headers else 'PUB'} {subject} {inbox} "
                sizes = f"{len(headers)} {len(headers) + len(data)}" if headers else f"{len(data)}"
                writer.write(f"{head}{sizes}\r\n".encode() + headers + data + b"\r\n")
                sent += 1
                await writer.drain()
            is_all_sent.set()
            # The last answer may have been read before it was known that all was sent.
            writer.write(b"PING\r\n")
            return await answers, time.monotonic() - began
    finally:
        writer.close()
