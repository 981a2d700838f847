"""Provisioning on a real server: idempotent, safe in a race, refusing drift in words."""

from __future__ import annotations

import asyncio
import re

import pytest

from topobus.contracts.catalogue import EVENTS, LEDGER, STATES
from topobus.domain.errors import ConfigError
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.runtime.failures import JetStreamError
from topobus.testing.nats import NatsServer

pytestmark = pytest.mark.integration


async def test_provision_makes_every_stream_and_bucket_when_the_server_is_empty(bus: Bus) -> None:
    """All of the catalogue exists afterwards, and doing it again changes nothing."""
    await bus.provision()
    names = (await bus._states._jetstream.call("STREAM.NAMES"))["streams"]

    assert sorted(names) == sorted([f"KV_{state.bucket}" for state in STATES] + [event.stream for event in EVENTS])


async def test_provision_succeeds_for_all_when_eight_services_start_at_once(nats_server: NatsServer) -> None:
    """Eight processes that provision at the same moment all succeed, and each finds everything as it should be."""

    async def start(number: int) -> dict[str, str]:
        async with Bus.session(NatsSettings(url=nats_server.url), name=f"service-{number}") as one:
            await one.provision()
            return await one.inspect()

    differences = await asyncio.gather(*(start(number) for number in range(8)))

    assert [set(one.values()) for one in differences] == [{""}] * 8


async def test_provision_names_the_difference_when_a_stream_has_drifted(bus: Bus) -> None:
    """Drift is refused with stream, field, got, wanted and what to do; nothing is changed behind the operator's back."""
    api = bus._states._jetstream
    info = await api.stream_info("KV_topobus_ledgers")
    assert info is not None
    await api.call("STREAM.UPDATE.KV_topobus_ledgers", {**info.config, "max_msgs_per_subject": 3})

    with pytest.raises(ConfigError, match=r"KV_topobus_ledgers.*max_msgs_per_subject is 3, wanted 16.*nats stream edit"):
        await bus.provision()


async def test_provision_refuses_when_replicas_are_wanted_of_an_old_server(nats_server: NatsServer) -> None:
    """Before 2.10 a replicated compare-and-set lets several writers win; a newer single server cannot replicate at all: both are said."""
    async with Bus.session(NatsSettings(url=nats_server.url, replicas=3, timeout_s=1.0), name="test") as bus:
        if bus.server_version < (2, 10, 0):
            with pytest.raises(ConfigError, match=r"2\.10"):
                await bus.provision()
        else:
            with pytest.raises(ConfigError, match="replicas"):
                await bus.provision()


async def test_bucket_cannot_be_emptied_when_somebody_purges_or_rolls_up(bus: Bus) -> None:
    """Neither a purge nor a rollup header empties the ledger: the stream refuses both."""
    api = bus._states._jetstream
    with pytest.raises(JetStreamError, match="purge"):
        await api.call(f"STREAM.PURGE.KV_{LEDGER.bucket}")
    with pytest.raises(JetStreamError, match=re.compile("roll", re.IGNORECASE)):
        await api.store(f"$KV.{LEDGER.bucket}.n1", b"{}", stream=f"KV_{LEDGER.bucket}", headers={"Nats-Rollup": "all"})
