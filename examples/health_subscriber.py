"""Follow device health with nats-py alone: each device's present state first, then every change; nothing twice, nothing lost. No consumer is made."""

import asyncio
import base64
import contextlib
import json
import os
import pathlib
import signal
import ssl

import nats


async def main() -> None:
    url, health = os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), "topobus.v1.health.>"
    api = os.environ.get("NATS_API", "$JS.topobus.API")  # "$JS.API" at a server of your own that has no accounts
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough (`| head`)
    ca, password, creds = (os.environ.get(name) for name in ("NATS_CA", "NATS_PASSWORD_FILE", "NATS_CREDS"))
    options = {"max_reconnect_attempts": -1, "ping_interval": 5, "inbox_prefix": "_INBOX.user", "user_credentials": creds}
    options |= {"tls": ssl.create_default_context(cafile=ca)} if ca else {}
    user = {"user": "user", "password": lambda: pathlib.Path(password).read_text().strip()}  # read at each connect
    options |= user if password else {}
    nc, news = None, asyncio.Event()  # the latter says when to look; what is printed is read from the stream, by its place in it

    async def hear(_message) -> None:
        news.set()

    async def ask(verb: str, **query) -> dict:
        nonlocal nc
        while True:
            with contextlib.suppress(nats.errors.Error):  # the server is away
                if nc is None or nc.is_closed:  # nats-py ends for good when the server takes another password
                    nc = await nats.connect(url, **options)
                    await nc.subscribe(health, cb=hear)
                reply = await nc.request(f"{api}.STREAM.{verb}.TOPOBUS_HEALTH", json.dumps(query).encode(), timeout=5)
                if json.loads(reply.data).get("error", {}).get("err_code", 10037) == 10037:  # all is well, or there is no such message
                    return json.loads(reply.data)
            await asyncio.sleep(1)

    def show(message: dict) -> int:
        print(base64.b64decode(message["data"]).decode(), flush=True)
        return message["seq"]

    state = (await ask("INFO", subjects_filter=health))["state"]
    place = state["last_seq"]
    newest = [(await ask("MSG.GET", last_by_subj=subject)).get("message") for subject in state.get("subjects") or ()]
    # What was stored since this look is a change, and comes below.
    for message in sorted((message for message in newest if message and message["seq"] <= place), key=lambda message: message["seq"]):
        show(message)
    while True:
        news.clear()
        if message := (await ask("MSG.GET", seq=place + 1, next_by_subj=health)).get("message"):
            place = show(message)
        else:
            with contextlib.suppress(TimeoutError):  # a look each 5 s all the same: a lost connection tells nothing
                await asyncio.wait_for(news.wait(), timeout=5)


asyncio.run(main())
