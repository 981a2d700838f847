"""Follow device health with nats-py alone: each device's present state first, then every change.

Nothing twice, nothing lost. No consumer is made.
"""

import asyncio
import base64
import contextlib
import json
import os
import pathlib
import signal
import ssl
import sys

import nats


async def main() -> None:
    url, health = os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), "topobus.v1.health.>"
    where, api = (
        url.rpartition("//")[2].rpartition("@")[2],
        os.environ.get("NATS_API", "$JS.topobus.API"),
    )  # "$JS.API" without accounts
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough (`| head`)
    ca, password = os.environ.get("NATS_CA"), os.environ.get("NATS_PASSWORD_FILE")
    options = {"max_reconnect_attempts": -1, "ping_interval": 5, "inbox_prefix": "_INBOX.user"}
    options |= {"tls": ssl.create_default_context(cafile=ca)} if ca else {}
    options |= (
        {"user": "user", "password": lambda: pathlib.Path(password).read_text().strip()} if password else {}
    )  # read at each connect
    nc, troubles, news = (
        None,
        set(),
        asyncio.Event(),
    )  # the last event only wakes the loop: what is printed is read from the stream, by its place

    async def hear(_message) -> None:
        news.set()

    async def tell(err: Exception) -> None:  # each trouble once; nats-py by itself prints a traceback at each try
        if str(err) not in troubles:
            troubles.add(str(err))
            print(
                f"NATS at {where}: {str(err) or 'no answer'}; trying again: is it there, and the login that of `user`?",
                file=sys.stderr,
            )

    async def ask(verb: str, **query) -> dict:
        nonlocal nc
        while True:
            with contextlib.suppress(nats.errors.Error):  # the server is away
                if nc is None or nc.is_closed:  # nats-py ends for good when the server takes another password
                    nc = await nats.connect(url, error_cb=tell, **options)
                    await nc.subscribe(health, cb=hear)
                reply = await nc.request(f"{api}.STREAM.{verb}.TOPOBUS_HEALTH", json.dumps(query).encode(), timeout=5)
                if (
                    json.loads(reply.data).get("error", {}).get("err_code", 10037) == 10037
                ):  # all is well, or there is no such message
                    return json.loads(reply.data)
            await asyncio.sleep(1)

    place = (state := (await ask("INFO", subjects_filter=health))["state"])[
        "last_seq"
    ]  # what is stored later is a change, and comes below
    newest = [(await ask("MSG.GET", last_by_subj=subject)).get("message") for subject in state.get("subjects") or ()]
    for message in sorted(
        (message for message in newest if message and message["seq"] <= place), key=lambda message: message["seq"]
    ):
        print(base64.b64decode(message["data"]).decode(), flush=True)
    while True:
        news.clear()
        if message := (await ask("MSG.GET", seq=place + 1, next_by_subj=health)).get("message"):
            print(base64.b64decode(message["data"]).decode(), flush=True)
            place = message["seq"]
        else:
            with contextlib.suppress(TimeoutError):  # read every 5 s as well: a lost connection wakes nothing
                await asyncio.wait_for(news.wait(), timeout=5)


asyncio.run(main())
