"""`python -m topobus.testing.apiserver`: the API server simulator as a program.

Prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from topobus.testing.apiserver.simulator import ApiServerSimulator


async def _serve_until_told(arguments: argparse.Namespace) -> None:
    event = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, event.set)
    async with ApiServerSimulator(port=arguments.port, token=arguments.token) as server:
        for node in arguments.node:
            server.put({"kind": "Node", "metadata": {"name": node}})
        if arguments.kubeconfig is not None:
            server.write_kubeconfig(arguments.kubeconfig)
        for user, path in arguments.user:
            server.write_kubeconfig(path, user=user, is_master=True)
        print(server.url, flush=True)  # noqa: T201  (the answer of a program)
        await event.wait()


def main() -> None:
    """Serve as a process of its own, and print the address."""
    parser = argparse.ArgumentParser(
        prog="python -m topobus.testing.apiserver", description="A Kubernetes API server without a cluster."
    )
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1; 0: any that is free")
    parser.add_argument("--token", default="", help="the bearer token that requests must carry; empty: none")
    parser.add_argument("--kubeconfig", type=Path, help="write a kubeconfig that leads here")
    parser.add_argument(
        "--user",
        action="append",
        default=[],
        type=_user,
        metavar="NAME=FILE",
        help="write a kubeconfig of a user of this name that may do everything; /metrics counts requests by user; "
        "may be repeated",
    )
    parser.add_argument("--node", action="append", default=[], help="make a node of this name; may be repeated")
    asyncio.run(_serve_until_told(parser.parse_args()))


def _user(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted NAME=FILE")
    return name, Path(path)


if __name__ == "__main__":
    main()
