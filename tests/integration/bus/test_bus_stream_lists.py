"""NATS' own tools list streams and buckets with the CLI's login, and with no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.account_nats import account_nats
from topobus.bus.server_config.inboxes import SERVER, connection_name, inbox_branch
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.streams import STREAM_LISTS, stream_names

pytestmark = pytest.mark.integration


async def test_lists_of_streams_are_given_to_the_cli_when_there_are_accounts(nats_binary: Path) -> None:
    """`nats stream ls` and `nats kv ls`, told to await answers at the CLI's inboxes, show every
    stream with what it is for.
    """
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as nats:
        async with nats.bus("controller") as controller:
            await controller.provision()
        async with nats.client("cli") as cli, nats.client("gpu") as gpu, nats.client("user") as user:
            answers = await cli.client.subscribe(f"{inbox_branch(connection_name('cli'), SERVER)}.tool.*")
            listed = []
            for number, subject in enumerate(STREAM_LISTS):
                await cli.client.publish(subject, b"{}", reply=answers.subject.replace("*", str(number)))
                listed.append(json.loads((await answers.next_msg(timeout=60)).data)["streams"])
            for other in (gpu, user):
                await other.send(STREAM_LISTS[0], b"{}")

            assert [len(attacker.denials) for attacker in (cli, gpu, user)] == [0, 1, 1]
    described, names = listed
    assert sorted(names) == sorted(stream["config"]["name"] for stream in described) == sorted(stream_names())
    assert all(stream["config"]["description"] for stream in described)
