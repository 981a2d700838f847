"""The drills of docs/how-to/backup-and-restore.md: the store of a server is lost under a running
node, and what is not there again by itself comes from the backup.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from docpages.nats_files import render_server
from lab.servers.shaped_servers import ShapedServer, version_of
from support.alignment_nodes import container, pod
from support.claim_manifests import claim
from support.cli_process import run_cli
from support.leaf_pair import leaf_pair
from support.looks import next_look
from support.relays import relay, states
from support.running import NODE, all_services, system_settings, until_all_ready
from support.topology_node import ask_place
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import LEDGER

pytestmark = pytest.mark.integration

_NODE_SERVICES = ("discovery", "gpu", "topology", "gateway")
_SERVICES = ("discovery", "gpu", "topology", "gateway", "controller")


@dataclass(frozen=True, kw_only=True)
class _System:
    server: ShapedServer
    folder: Path

    async def run(self, *arguments: str) -> str:
        """Run a command that succeeds."""
        code, output, errors = await run_cli(self.server, *arguments)
        assert code == 0, (arguments, output, errors)
        return output

    async def claims(self, is_enough: Callable[[dict[str, list[str]]], bool]) -> dict[str, list[str]]:
        """Wait until the claims' devices are so."""
        while True:
            listed = msgspec.json.decode(await self.run("get", "claims", "-o", "json"))
            devices = {item["metadata"]["name"]: _devices(item) for item in listed["items"]}
            if is_enough(devices):
                return devices
            await next_look()

    async def apply(self, name: str, count: int) -> dict[str, list[str]]:
        """Apply a claim for so many GPUs; gives the devices of all claims."""
        manifest = self.folder / f"{name}.yaml"
        manifest.write_text(claim(name, count))
        await self.run("apply", "-f", str(manifest))
        return await self.claims(lambda devices: bool(devices.get(name)))

    async def held(self, is_enough: Callable[[dict[str, list[str]]], bool] = bool) -> dict[str, list[str]]:
        """Wait until what is held by uid of the owner is so."""
        while True:
            listed = msgspec.json.decode(await self.run("holders", "--json"))["holders"]
            held = {
                holder["allocation"]["owner"]["uid"]: sorted(holder["allocation"]["holdings"][0]["devices"]["gpu"])
                for holder in listed
            }
            if is_enough(held):
                return held
            await next_look()

    async def lose_store(self, copy: Path | None = None) -> None:
        """End the server, remove its store or put a copy back, start it, and wait until all is well."""
        await self.server.kill()
        if copy is None:
            self.server.lose_store()
        else:
            self.server.restore_store(copy)
        await self.server.start()
        while (await run_cli(self.server, "doctor"))[0]:
            await next_look()


def _devices(item: dict[str, Any]) -> list[str]:
    allocation = item.get("status", {}).get("allocation", {})
    return sorted(result["device"] for result in allocation.get("devices", {}).get("results", ()))


@pytest_asyncio.fixture
async def system(nats_binary: Path) -> AsyncIterator[_System]:
    """One server for everything, and the services of one node."""
    with TemporaryDirectory(prefix="tb-") as name:
        text = render_server(min(version_of(nats_binary), (2, 14)))
        async with (
            ShapedServer(binary=nats_binary, text=text, environment={}) as server,
            all_services(server.url, Path(name), order=_SERVICES) as running,
        ):
            await until_all_ready(running)
            yield _System(server=server, folder=Path(name))


async def test_objects_alone_come_from_the_backup_when_the_store_of_the_server_is_lost(system: _System) -> None:
    """Machine, inventory and ledger are there again by themselves.

    A claim that is applied again is another claim: what its name held before is released, and what
    a claim held that is in no backup stays held until somebody releases it.
    """
    backup = system.folder / "objects.yaml"
    await system.apply("training", 2)
    backup.write_text(await system.run("get", "deviceclasses,claims,templates,pods", "-A", "-o", "yaml"))
    await system.apply("late", 1)
    before = await system.held()

    await system.lose_store()
    await system.held(lambda held: held == before)
    stored = await system.claims(lambda _: True)
    await system.run("apply", "-f", str(backup))
    restored = await system.claims(lambda devices: bool(devices.get("training")))
    after = await system.held(lambda held: len(held) == 2)
    await system.run("release", "claim", "default/late")
    at_last = await system.held()

    assert stored == {}
    assert restored.keys() == {"training"}
    assert sorted(at_last.values()) == [restored["training"]]
    assert sorted(map(len, after.values())) == [1, 2]


async def test_claims_are_the_same_when_a_copy_of_the_store_is_put_back(system: _System) -> None:
    """A claim of the copy has the devices that it had; the ledger is newer than the copy, so a
    claim that was applied since keeps its devices until somebody releases them.
    """
    await system.apply("training", 2)
    await system.server.stop()
    system.server.copy_store(system.folder / "copy")
    await system.server.start()
    claims = await system.apply("late", 1)
    before = await system.held()

    await system.lose_store(system.folder / "copy")
    # The copy's ledger is there until topology writes its own over it.
    await system.held(lambda held: held == before)
    restored = await system.claims(lambda devices: bool(devices.get("training")))
    await system.run("release", "claim", "default/late")
    at_last = await system.held()

    assert restored == {"training": claims["training"]}
    assert list(at_last.values()) == [claims["training"]]


async def test_node_begins_anew_and_the_hub_follows_when_its_disk_is_lost(nats_binary: Path) -> None:
    """Store and checkpoint are gone, and so is what ran there: the node has an empty ledger, and the
    hub's copies are those of the new node.
    """
    with TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        settings = {**system_settings(folder), "TOPOBUS_ALL__NATS__PROVISIONER": "topology"}
        async with leaf_pair(nats_binary) as pair:
            async with all_services(pair.leaf.url, folder, order=_NODE_SERVICES, settings=settings) as node:
                await until_all_ready(node)
                async with pair.buses() as (hub, leaf), relay(pair):
                    await ask_place(leaf, "before", pod("trainer", container(gpu=2)))
                    await _until_same_states(hub, leaf)
                    before = await _owners(hub)
            await pair.leaf.kill()
            pair.leaf.lose_store()
            (folder / "checkpoint.json").unlink(missing_ok=True)
            await pair.leaf.start()
            async with all_services(pair.leaf.url, folder, order=_NODE_SERVICES, settings=settings) as node:
                await until_all_ready(node)
                async with pair.buses() as (hub, leaf), relay(pair):
                    await _until_same_states(hub, leaf)
                    after = await _owners(hub)
                    await ask_place(leaf, "after", pod("second", container(gpu=1)))
                    await _until_same_states(hub, leaf)
                    at_last = await _owners(hub)

    assert (before, after, at_last) == ({"trainer"}, set(), {"second"})


async def _until_same_states(hub: Bus, leaf: Bus) -> None:
    """Wait until the hub's copies are the node's. Events from before stay at the hub."""
    while await states(hub) != await states(leaf):
        await next_look()


async def _owners(hub: Bus) -> set[str]:
    entry = await hub.get(LEDGER, node=NODE)
    assert entry is not None
    return {allocation.owner.name for allocation in entry.value.allocations.values()}
