"""Attacks on the store with the credential of one principal, on a real server under the shipped permissions: what they may not do, and whom they may harm."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.secured_nats import SecuredNats, secured_nats
from topobus.contracts.catalogue import INVENTORY, PROVISIONER
from topobus.contracts.render_nats import PRINCIPALS
from topobus.contracts.streams import stream_names, wanted_streams

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def secured(nats_binary: Path, tmp_path: Path) -> AsyncIterator[SecuredNats]:
    """The server of an installation with users."""
    async with secured_nats(tmp_path, binary=nats_binary) as server:
        yield server


@pytest.mark.parametrize("principal", sorted(set(PRINCIPALS) - {PROVISIONER}))
async def test_nobody_but_the_controller_makes_streams_when_permissions_are_on(secured: SecuredNats, principal: str) -> None:
    """Neither a missing stream nor a changed one is anybody's but the controller's: a stream made beforehand could copy the ledger anywhere."""
    async with secured.bus(PROVISIONER) as controller:
        await controller._states._jetstream.call(f"STREAM.UPDATE.KV_{INVENTORY.bucket}", wanted_streams(1)[1])
    async with secured.attacker(principal) as attacker:
        for name in stream_names():
            for verb in ("CREATE", "UPDATE", "DELETE", "PURGE"):
                await attacker.send(f"$JS.API.STREAM.{verb}.{name}", json.dumps({"name": name, "subjects": [f"x.{name}"]}).encode())

        assert len(attacker.denials) == 4 * len(stream_names())
