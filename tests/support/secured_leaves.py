"""A hub and the nats-servers of several nodes behind it, with the rendered configurations and their
users: the shape in which nodes need not trust each other.

The password of a user is its name, as in `support.account_nats`.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from docpages.nats_files import domain_of, render_hub, render_leaf
from lab.servers.shaped_servers import ShapedServer, cheap_folder, version_of
from support.account_nats import ZONES, AccountNats
from topobus.bus.server_config.nats_accounts import Account, Shape, accounts
from topobus.bus.server_config.nats_accounts_config import render_accounts, render_passwords
from topobus.formats.messages.nouns import to_token
from topobus.simulation.nats_server import NatsServer, free_port

__all__ = ["HubAndLeaves", "UsersServer", "foreign_leaf", "secured_leaves"]

_USERS = "users.conf"


class UsersServer(ShapedServer):
    """A server with a rendered configuration, and the file of users that it includes."""

    def __init__(self, *, binary: Path, text: str, environment: dict[str, str], described: Sequence[Account]) -> None:
        super().__init__(binary=binary, text=text, environment=environment)
        passwords = render_passwords({user.variable: user.name for account in described for user in account.users})
        self.users = f"{passwords}{render_accounts(described)}"
        """What the included file says at the next start."""

    def write_config(self) -> Path:
        """Write both files."""
        (self.folder / _USERS).write_text(self.users, encoding="utf-8")
        return super().write_config()


class HubAndLeaves:
    """The hub, each node's server, and where the hub takes leaves."""

    def __init__(self, hub: AccountNats, leaves: dict[str, AccountNats], link_port: int, monitor_port: int) -> None:
        self.hub = hub
        self.leaves = leaves
        self.link_port = link_port
        self._monitor_port = monitor_port

    def link_url(self, user: str) -> str:
        """Give the URL by which a leaf comes as a user of the hub."""
        return f"nats://{user}:{user}@127.0.0.1:{self.link_port}"

    def linked(self) -> list[dict[str, Any]]:
        """List the leaves that the hub has now, with their names and accounts."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{self._monitor_port}/leafz"
        ) as answer:
            leaves: list[dict[str, Any]] = json.load(answer).get("leafs") or []
            return leaves


def foreign_leaf(binary: Path, url: str) -> NatsServer:
    """Make a server that was set up elsewhere as a leaf: no users, nothing denied, and all messages
    of its clients go to the hub if that allows it.
    """
    return NatsServer(
        binary=binary,
        parent=cheap_folder(),
        config=f'server_name: foreign\nleafnodes {{ reconnect: 1, remotes: [ {{ urls: ["{url}"] }} ] }}',
    )


@asynccontextmanager
async def secured_leaves(
    binary: Path, *, nodes: Sequence[str], behind: Sequence[str] | None = None
) -> AsyncIterator[HubAndLeaves]:
    """Run a hub with a user for each node, and the servers of those `behind` it (default: of all
    nodes), until the block ends.
    """
    version = max(version_of(binary), (2, 10))
    ports: list[int] = []
    while len(ports) < 2:
        ports = list(dict.fromkeys((*ports, free_port())))
    link_port, monitor_port = ports
    described = accounts(Shape.HUB, nodes=nodes)
    hub_text = render_hub(version, users=_USERS).replace('"0.0.0.0:7422"', f'"127.0.0.1:{link_port}"')
    hub = UsersServer(
        binary=binary,
        text=f'{hub_text}  http: "127.0.0.1:{monitor_port}"\n',
        environment={"TOPOBUS_HUB_NAME": "hub"},
        described=described,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub)
        shape = HubAndLeaves(AccountNats(hub, described, {"": "core"}), {}, link_port, monitor_port)
        for node in nodes if behind is None else behind:
            own = accounts(Shape.LEAF, nodes=[node])
            environment = {
                "TOPOBUS_LEAF_DOMAIN": domain_of(node),
                "TOPOBUS_LEAF_HUB_URL": shape.link_url(f"leaf-{to_token(node)}"),
            }
            leaf = UsersServer(
                binary=binary, text=render_leaf(version, users=_USERS), environment=environment, described=own
            )
            await stack.enter_async_context(leaf)
            shape.leaves[node] = AccountNats(leaf, own, ZONES, provisioner="topology")
        yield shape
