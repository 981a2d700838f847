"""Provisioning on a real server: idempotent, safe in a race, refusing drift in words."""

from __future__ import annotations

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from integration.values import inventory
from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.bus.failures import JetStreamError
from topobus.bus.server_config.streams import stream_names, wanted_streams
from topobus.bus.streams.jetstream import JetStream
from topobus.formats.messages.catalogue import BUCKETS, EVENTS, INVENTORY, LEDGER, PROVISIONER
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import ConfigError

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

# Ends a test that waits for what never comes; nothing is measured with it.
_LIMIT_S = 60.0


async def test_provision_makes_every_stream_and_bucket_when_the_server_is_empty(bus: Bus) -> None:
    """All of the catalogue exists afterwards, and doing it again changes nothing."""
    await bus.provision()
    names = (await bus._jetstream.call("STREAM.NAMES"))["streams"]

    assert sorted(names) == sorted([f"KV_{state.bucket}" for state in BUCKETS] + [event.stream for event in EVENTS])


async def test_provision_succeeds_for_all_when_eight_services_start_at_once(nats_server: NatsServer) -> None:
    """Eight processes that provision at the same moment all succeed, and each finds everything as
    it should be.
    """

    async def start(number: int) -> dict[str, str]:
        async with Bus.session(NatsSettings(url=nats_server.url), name=f"service-{number}") as bus:
            await bus.provision()
            return await bus.inspect()

    differences = await asyncio.gather(*(start(number) for number in range(8)))

    assert [set(differences_of_service.values()) for differences_of_service in differences] == [{""}] * 8


async def test_provision_goes_on_when_the_server_takes_a_stream_made_meanwhile_for_another(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server looks at names, unlocks, and then looks at subjects: who makes a stream that another
    makes at that moment hears of overlapping subjects.
    """
    call = JetStream.call
    overlaps: list[str] = []

    async def late(jetstream: JetStream, verb: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = await call(jetstream, verb, payload)
        if verb == f"STREAM.CREATE.KV_{LEDGER.bucket}":
            overlaps.append(verb)
            raise JetStreamError(400, JetStreamError.SUBJECTS_OVERLAP, "subjects overlap with an existing stream")
        return answer

    monkeypatch.setattr(JetStream, "call", late)
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        await bus.provision()

        assert set((await bus.inspect()).values()) == {""}
    assert overlaps == [f"STREAM.CREATE.KV_{LEDGER.bucket}"]


@pytest.mark.parametrize("is_made_meanwhile", [True, False], ids=["made-meanwhile", "not-made-yet"])
async def test_provision_goes_on_when_the_server_has_no_store_for_a_stream_that_another_makes(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, is_made_meanwhile: bool
) -> None:
    """Two controllers that start at once on an empty server: one of them hears that the store
    cannot be made, and the stream is there, or can be made, a moment later.
    """
    call = JetStream.call
    refused: list[str] = []

    async def late(jetstream: JetStream, verb: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        if verb != f"STREAM.CREATE.KV_{LEDGER.bucket}" or refused:
            return await call(jetstream, verb, payload)
        refused.append(verb)
        if is_made_meanwhile:
            await call(jetstream, verb, payload)
        raise JetStreamError(500, JetStreamError.NO_STORE, "error creating store for stream")

    monkeypatch.setattr(JetStream, "call", late)
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        await bus.provision()

        assert set((await bus.inspect()).values()) == {""}
    assert refused == [f"STREAM.CREATE.KV_{LEDGER.bucket}"]


async def test_provision_refuses_when_the_server_has_no_store_for_a_stream(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that the server cannot write is no race: the refusal comes again, and is told."""
    call = JetStream.call

    async def refuse(jetstream: JetStream, verb: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        if verb == f"STREAM.CREATE.KV_{LEDGER.bucket}":
            raise JetStreamError(500, JetStreamError.NO_STORE, "error creating store for stream")
        return await call(jetstream, verb, payload)

    monkeypatch.setattr(JetStream, "call", refuse)
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        with pytest.raises(ConfigError, match=rf"KV_{LEDGER.bucket}.*error creating store"):
            await bus.provision()


async def test_provision_names_the_subject_when_a_stream_of_others_takes_it(nats_server: NatsServer) -> None:
    """Subjects that another stream takes keep ours from being made: the error names stream, subject
    and what to do.
    """
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        await bus._jetstream.call("STREAM.CREATE.OTHERS", {"name": "OTHERS", "subjects": [f"$KV.{LEDGER.bucket}.>"]})

        with pytest.raises(
            ConfigError, match=rf"KV_{LEDGER.bucket}.*another stream takes.*\$KV\.{LEDGER.bucket}"
        ) as error:
            await bus.provision()

    assert "nats stream ls --subject" in error.value.next_step


async def test_provision_names_the_difference_when_a_stream_has_drifted(bus: Bus) -> None:
    """Drift is refused with stream, field, got, wanted and what to do.

    Nothing is changed behind the operator's back.
    """
    api = bus._jetstream
    info = await api.stream_info("KV_topobus_ledgers")
    assert info is not None
    await api.call("STREAM.UPDATE.KV_topobus_ledgers", {**info.config, "max_msgs_per_subject": 3})

    with pytest.raises(
        ConfigError, match=r"KV_topobus_ledgers.*max_msgs_per_subject is 3, wanted 16.*nats stream edit"
    ):
        await bus.provision()


async def test_provision_makes_the_others_and_names_the_first_when_two_streams_have_drifted(
    nats_server: NatsServer,
) -> None:
    """Streams are made at the same time: one that is refused keeps no other from being made, and
    the error does not depend on which answer came first.
    """
    spoilt = {
        config["name"]: config
        for config in wanted_streams(1)
        if config["name"] in (stream_names()[1], stream_names()[-1])
    }
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        for name, config in spoilt.items():
            await bus._jetstream.call(f"STREAM.CREATE.{name}", {**config, "max_msgs_per_subject": 3})

        with pytest.raises(ConfigError, match=stream_names()[1]):
            await bus.provision()
        wrong = {name for name, text in (await bus.inspect()).items() if text}

    assert wrong == set(spoilt)


async def test_provision_refuses_when_replicas_are_wanted_of_an_old_server(nats_server: NatsServer) -> None:
    """Before 2.10 a replicated compare-and-set lets several writers win.

    A newer single server cannot replicate at all: both are said.
    """
    async with Bus.session(NatsSettings(url=nats_server.url, replicas=3, timeout_s=1.0), name="test") as bus:
        if bus.server_version < (2, 10, 0):
            with pytest.raises(ConfigError, match=r"2\.10"):
                await bus.provision()
        else:
            with pytest.raises(ConfigError, match="replicas"):
                await bus.provision()


async def test_bucket_cannot_be_emptied_when_somebody_purges_or_rolls_up(bus: Bus) -> None:
    """Neither a purge nor a rollup header empties the ledger: the stream refuses both."""
    api = bus._jetstream
    with pytest.raises(JetStreamError, match="purge"):
        await api.call(f"STREAM.PURGE.KV_{LEDGER.bucket}")
    with pytest.raises(JetStreamError, match=re.compile("roll", re.IGNORECASE)):
        await api.store(f"$KV.{LEDGER.bucket}.n1", b"{}", stream=f"KV_{LEDGER.bucket}", headers={"Nats-Rollup": "all"})


def _session(server: NatsServer, **options: int) -> AbstractAsyncContextManager[Bus]:
    return Bus.session(NatsSettings(url=server.url, **options), name="test")  # type: ignore[arg-type]  # numbers only


@pytest.mark.parametrize(
    "field",
    [
        {"republish": {"src": "$KV.topobus_inventories.attack.gpu", "dest": "$KV.topobus_ledgers.demo-node"}},
        {"sources": [{"name": "ELSEWHERE"}]},
        {"subjects": ["$KV.topobus_inventories.>", "somebody.elses"]},
        {"sealed": True},
        {"max_bytes": 1024 * 1024},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_provision_refuses_a_stream_that_somebody_made_beforehand(
    nats_server: NatsServer, field: dict[str, Any]
) -> None:
    """A bucket that is as the catalogue wants it but for one field more is refused by name, and the
    check-up names it, too.
    """
    name = f"KV_{INVENTORY.bucket}"
    wanted = next(config for config in wanted_streams(1) if config["name"] == name)
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        api = bus._jetstream
        # No server makes a sealed stream; one that is there can be sealed.
        await api.call(f"STREAM.CREATE.{name}", wanted if "sealed" in field else {**wanted, **field})
        if "sealed" in field:
            await api.call(f"STREAM.UPDATE.{name}", {**wanted, **field, "deny_delete": True})
        with pytest.raises(ConfigError, match=rf"{name} differs from the catalogue: .*{next(iter(field))}"):
            await bus.provision()

        assert next(iter(field)) in (await bus.inspect())[name]


async def test_provision_says_what_room_is_missing_when_the_store_is_too_small(
    nats_binary: Path, tmp_path: Path
) -> None:
    """A store that the bounds do not fit into is refused with the stream, its size and what to do.

    A smaller wish fits.
    """
    small = 'jetstream {{ store_dir: "{}", max_file_store: 400MB }}'
    async with NatsServer(binary=nats_binary, config=small.format(tmp_path / "a")) as server, _session(server) as bus:
        with pytest.raises(ConfigError, match=r"no room for stream KV_\w+, which may take \d+ MiB.*nats\.store_mib"):
            await bus.provision()
    async with NatsServer(binary=nats_binary, config=small.format(tmp_path / "b")) as server:
        async with Bus.session(NatsSettings(url=server.url, store_mib=360), name="test") as bus:
            await bus.provision()

            assert set((await bus.inspect()).values()) == {""}
        async with Bus.session(NatsSettings(url=server.url), name="test") as other:
            await other.provision()
            assert set((await other.inspect()).values()) == {""}


async def test_streams_are_made_again_when_somebody_deletes_them_while_the_controller_runs(
    nats_server: NatsServer,
) -> None:
    """Every deleted stream is back without a restart and without a reconnect, also when nobody uses
    it.
    """
    async with Bus.session(NatsSettings(url=nats_server.url), name=PROVISIONER) as bus:
        await bus.provision()
        api = bus._jetstream
        for name in stream_names():
            await api.call(f"STREAM.DELETE.{name}")
        async with asyncio.timeout(_LIMIT_S):
            while await api.stream_names() != set(stream_names()):
                await next_look()

        assert set((await bus.inspect()).values()) == {""}


async def test_stream_is_made_again_when_a_writer_misses_it(nats_server: NatsServer) -> None:
    """Without a controller, and without users, whoever writes to a stream that is gone makes it
    again, and the write is done within its timeout.
    """
    async with Bus.session(NatsSettings(url=nats_server.url), name="test") as bus:
        await bus.provision()
        await bus._jetstream.call(f"STREAM.DELETE.KV_{INVENTORY.bucket}")

        assert await bus.put(INVENTORY, inventory(1), node="n1", device_class="gpu") == 1
