"""Follow device health with nats-py, the short way: what is heard, and what stood before.

A change in the first moment may be shown twice; health_subscriber.py loses and repeats nothing.
"""

import asyncio
import base64
import json
import os
import sys

import nats


async def main(url: str) -> None:
    once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
    nc = await nats.connect(url, inbox_prefix="_INBOX.user", error_cb=quiet, **once)

    async def ask(verb: str, **query: str) -> dict:
        return json.loads(
            (await nc.request(f"$JS.topobus.API.STREAM.{verb}.TOPOBUS_HEALTH", json.dumps(query).encode())).data
        )

    changes = await nc.subscribe("topobus.v1.health.>")
    for subject in (await ask("INFO", subjects_filter="topobus.v1.health.>"))["state"].get("subjects", {}):
        print(base64.b64decode((await ask("MSG.GET", last_by_subj=subject))["message"]["data"]).decode(), flush=True)
    async for message in changes.messages:
        print(message.data.decode(), flush=True)
    raise ConnectionError("the connection has ended")


async def quiet(_: Exception) -> None:
    """Print nothing: the error that ends the program is reported below, and nats-py would print a
    traceback of it.
    """


if len(sys.argv) != 2:
    sys.exit("usage: health_short.py nats://user:PASSWORD@HOST:4222")
try:
    asyncio.run(main(sys.argv[1]))
except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has what it wanted
except KeyboardInterrupt:
    pass
except (OSError, ValueError, KeyError, TimeoutError, nats.errors.Error) as err:
    where = sys.argv[1].rpartition("//")[2].rpartition("@")[2]
    sys.exit(
        f"health_short.py: {where}: {str(err) or type(err).__name__}; is NATS there, and the login that of "
        "its user `user`?"
    )
