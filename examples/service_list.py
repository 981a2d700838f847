"""List the services of Topobus with nats-py alone, by the questions of `nats micro ls`: who is there, in which release, and what it has answered."""

import asyncio
import json
import os
import pathlib
import signal
import ssl
import sys

import nats


async def main() -> None:
    # Answers come within milliseconds of each other; a large fleet's within seconds.
    url, wait_s = os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), float(os.environ.get("NATS_WAIT_S", "2"))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough (`| head`)
    ca, password = os.environ.get("NATS_CA"), os.environ.get("NATS_PASSWORD_FILE")
    # Where a server with users lets services answer.
    options = {"inbox_prefix": "_INBOX.TOOLS", "allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
    options |= {"tls": ssl.create_default_context(cafile=ca)} if ca else {}
    user = {"user": "cli", "password": lambda: pathlib.Path(password).read_text().strip()}
    options |= user if password else {}

    async def tell(error: Exception) -> None:
        print(f"service_list.py: {str(error) or type(error).__name__}", file=sys.stderr)  # nats-py would add a traceback

    try:
        nc = await nats.connect(url, **options, error_cb=tell)
    except (OSError, TimeoutError, nats.errors.Error):
        sys.exit(1)  # it is told
    inbox = await nc.subscribe(nc.new_inbox())
    await nc.publish("$SRV.STATS", reply=inbox.subject)
    row = "{:<20} {:<9} {:<28} {:>9} {:>7}".format
    print(row("SERVICE", "VERSION", "ID", "REQUESTS", "ERRORS"), flush=True)
    try:
        while True:
            answer = (await inbox.next_msg(timeout=wait_s)).data
            if not answer:  # the server says that nobody listens
                break
            service = json.loads(answer)
            counted = (sum(endpoint[field] for endpoint in service["endpoints"]) for field in ("num_requests", "num_errors"))
            print(row(service["name"], service["version"], service["id"], *counted), flush=True)
    except TimeoutError:
        pass
    await nc.close()


asyncio.run(main())
