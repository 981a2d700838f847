"""Follow device health as a user that may make no consumers: what is stored is read by its place in the stream, and a plain subscription says when to look."""

import asyncio
import base64
import json
import os
import signal

import nats


async def main() -> None:
    url, health = os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), "topobus.v1.health.>"
    # In an account of its own the interface has this name; without accounts it is $JS.API.
    api = os.environ.get("NATS_API", "$JS.topobus.API")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough (`| head`)
    nc = await nats.connect(url, max_reconnect_attempts=-1, ping_interval=5, inbox_prefix="_INBOX.user")
    news, place = await nc.subscribe(health), 1
    while True:
        query = json.dumps({"seq": place, "next_by_subj": health}).encode()
        answer = json.loads((await nc.request(f"{api}.STREAM.MSG.GET.TOPOBUS_HEALTH", query, timeout=5)).data)
        if "message" in answer:
            place = answer["message"]["seq"] + 1
            print(base64.b64decode(answer["message"]["data"]).decode(), flush=True)
        else:
            try:
                await news.next_msg(timeout=10)  # somebody wrote; and a look every 10 s, for what a lost connection did not say
            except nats.errors.TimeoutError:
                pass


asyncio.run(main())
