"""Follow device health with nats-py, the short way: what is heard, and what stood before. A change in the first moment may be shown twice; health_subscriber.py loses and repeats nothing."""

import asyncio
import base64
import json
import sys

import nats


async def main(url: str) -> None:
    nc = await nats.connect(url, inbox_prefix="_INBOX.user")

    async def show(message) -> None:
        print(message.data.decode(), flush=True)

    async def ask(verb: str, **query: str) -> dict:
        return json.loads((await nc.request(f"$JS.topobus.API.STREAM.{verb}.TOPOBUS_HEALTH", json.dumps(query).encode())).data)

    await nc.subscribe("topobus.v1.health.>", cb=show)
    for subject in (await ask("INFO", subjects_filter="topobus.v1.health.>"))["state"].get("subjects", {}):
        print(base64.b64decode((await ask("MSG.GET", last_by_subj=subject))["message"]["data"]).decode(), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1]))
