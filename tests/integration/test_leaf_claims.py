"""Stand-alone claims on a node with a server of its own, over real links: said by the controller, kept by the relay, prepared by the gateway, also while the node is cut off."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio

from support.garbage import write_garbage
from support.leaf_claims import LIMIT_S, allocated, claims_on, parts, saying_claims, store, until_on_node
from support.leaf_pair import NODE, Joined, leaf_pair, version_of
from support.relays import relay, until
from support.running import Service, all_services, readiness_report, service, system_settings, until_all_ready
from topobus.contracts.catalogue import HELD_CLAIMS, LEDGER, NODE_CLAIM, OBJECT
from topobus.contracts.messages import ApiObject
from topobus.domain.idset import NodeSet
from topobus.domain.ledger import Ledger
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.testing.kubelet import ClaimReference, KubeletSimulator

pytestmark = pytest.mark.integration

_DRIVER = "gpu.topobus.dev"
_NODE_SERVICES = ("discovery", "gpu", "nic", "cpu", "topology", "gateway", "relay")


@pytest_asyncio.fixture
async def joined(nats_binary: Path) -> AsyncIterator[Joined]:
    """Both servers with all streams."""
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with leaf_pair(nats_binary) as pair, pair.buses() as (hub, leaf):
        yield Joined(pair=pair, hub=hub, leaf=leaf)


async def test_claims_come_and_go_after_the_cut_when_they_were_allocated_and_taken_back_meanwhile(joined: Joined) -> None:
    """While cut off the node has what it had; joined again it gets what was allocated, changed and taken back, and nothing else of it is at the hub than the note."""
    async with relay(joined.pair) as running, saying_claims(joined.hub):
        await store(joined.hub, allocated("stays"))
        await store(joined.hub, allocated("goes"))
        await until_on_node(joined.leaf, lambda claims: claims.keys() == {"stays", "goes"})

        joined.pair.link.cut()
        await until(lambda: "cut off since" in running.remark)
        await joined.hub.delete(OBJECT, **parts("goes"))
        await store(joined.hub, allocated("stays", device="gpu-1"))
        await store(joined.hub, allocated("comes"))
        assert await claims_on(joined.leaf) == {"stays": allocated("stays"), "goes": allocated("goes")}

        joined.pair.link.join()
        wanted = {"stays": allocated("stays", device="gpu-1"), "comes": allocated("comes")}
        await until_on_node(joined.leaf, lambda claims: claims == wanted)

        assert await claims_on(joined.hub) == {}, "the node's bucket is the node's alone"


async def test_claims_are_said_again_when_the_nodes_store_was_lost(joined: Joined) -> None:
    """The relay notes that it has none, and that alone has the controller say them."""
    async with relay(joined.pair), saying_claims(joined.hub):
        await store(joined.hub, allocated("a"))
        await store(joined.hub, allocated("b"))
        await until_on_node(joined.leaf, lambda claims: len(claims) == 2)
        await joined.pair.leaf.kill()
        joined.pair.leaf.lose_store()
        await joined.pair.leaf.start()
        await joined.leaf.wait_connected()
        await joined.leaf.provision()

        assert await until_on_node(joined.leaf, lambda claims: len(claims) == 2) == {"a": allocated("a"), "b": allocated("b")}


async def test_claims_and_note_are_written_over_when_nobody_can_read_them(joined: Joined) -> None:
    """Garbage at a claim's key and at the note is written over at its revision: the node has its claims again, and the hub hears the truth."""
    async with relay(joined.pair), saying_claims(joined.hub):
        await store(joined.hub, allocated("a"))
        await until_on_node(joined.leaf, lambda claims: claims == {"a": allocated("a")})
        await write_garbage(joined.leaf, NODE_CLAIM, node=NODE, namespace="default", name="a")
        note = await write_garbage(joined.leaf, HELD_CLAIMS, node=NODE)

        await until_on_node(joined.leaf, lambda claims: claims == {"a": allocated("a")})
        async with asyncio.timeout(60), aclosing(joined.leaf.watch(HELD_CLAIMS, node=NODE)) as changes:
            async for change in changes:
                if change.revision > note and change.value is not None and change.value.versions:
                    break


async def test_nothing_is_said_again_when_relay_and_controller_restart(joined: Joined) -> None:
    """Both know nothing then, and find that the node has what it is to have: no claim is written a second time."""
    async with relay(joined.pair), saying_claims(joined.hub):
        await store(joined.hub, allocated("a"))
        await until_on_node(joined.leaf, lambda claims: claims.keys() == {"a"})
    async with relay(joined.pair) as running, saying_claims(joined.hub):
        await store(joined.hub, allocated("later"))
        await until_on_node(joined.leaf, lambda claims: claims.keys() == {"a", "later"})

    assert running.registry.get_sample_value("topobus_relay_claims_total", {"outcome": "written"}) == 1


async def test_old_claims_go_when_the_node_comes_back_from_the_central_shape(joined: Joined) -> None:
    """A node that gave up its server kept what that had: when it is a leaf again the hub's word counts, and of a deleted claim nothing is left."""
    async with relay(joined.pair), saying_claims(joined.hub):
        await store(joined.hub, allocated("old"))
        await until_on_node(joined.leaf, lambda claims: claims.keys() == {"old"})
    await joined.hub.delete(OBJECT, **parts("old"))
    await store(joined.hub, allocated("of-central"))
    async with relay(joined.pair), saying_claims(joined.hub):
        await until_on_node(joined.leaf, lambda claims: claims.keys() == {"of-central"})


# the whole node, as processes


async def _topobus(url: str, *arguments: str) -> tuple[int, str]:
    """Run the CLI; its exit code and what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.cli.main", *arguments, "--nats", url,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def _apply(folder: Path, url: str, *names: str) -> None:
    file = folder / "claims.yaml"
    file.write_text(
        "\n---\n".join(
            f"""apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
  devices:
    requests:
      - name: gpu
        exactly: {{deviceClassName: {_DRIVER}, count: 1}}
"""
            for name in names
        ),
        encoding="utf-8",
    )
    code, output = await _topobus(url, "apply", "-f", str(file))
    assert code == 0, output


async def _until_allocated(hub: Bus, name: str) -> ApiObject:
    """Wait until a claim is allocated."""
    async with asyncio.timeout(LIMIT_S):
        async for change in hub.watch(OBJECT, **parts(name)):
            if change.value is not None and change.value.status.get("allocation"):
                return change.value
    raise AssertionError("a watch does not end")


async def _until_gone(hub: Bus, name: str) -> None:
    """Wait until a claim is gone at the hub."""
    async with asyncio.timeout(LIMIT_S):
        while await hub.get(OBJECT, **parts(name)) is not None:  # noqa: ASYNC110 - it may be gone before anybody watches
            await asyncio.sleep(0.05)


async def _until_ledger(leaf: Bus, owner: str, *, is_prepared: bool) -> Ledger:
    async with asyncio.timeout(LIMIT_S):
        async for change in leaf.watch(LEDGER, node=NODE):
            held = (
                {key: allocation for key, allocation in change.value.allocations.items() if key.startswith(owner)} if change.value else {}
            )
            if held and all(allocation.is_prepared is is_prepared for allocation in held.values()):
                assert change.value is not None
                return change.value
    raise AssertionError("a watch does not end")


def _reference(claim: ApiObject) -> ClaimReference:
    return ClaimReference(name=claim.metadata["name"], uid=claim.metadata["uid"], drivers=(_DRIVER,))


async def _until_cut(running: Service, *, is_cut: bool) -> None:
    """Wait until the relay's report says that the hub is away, or is there."""
    async with asyncio.timeout(LIMIT_S):
        while ("cut off since" in await readiness_report(running.port)) is not is_cut:  # noqa: ASYNC110 - nothing tells when it says something else
            await asyncio.sleep(0.05)


async def _settle(hub: Bus, leaf: Bus, names: Sequence[str]) -> dict[str, ApiObject]:
    """Wait until claims are allocated at the hub and are on the node."""
    claims: dict[str, Any] = {name: await _until_allocated(hub, name) for name in names}
    await until_on_node(leaf, lambda there: claims.keys() <= there.keys())
    return claims


async def test_claims_of_the_cli_are_prepared_on_a_leaf_when_it_is_joined_and_when_it_is_cut_off(nats_binary: Path) -> None:
    """Applied at the hub, allocated there, prepared by kubelet's call on the node; cut off, another one is prepared, and what was deleted meanwhile goes after the cut."""
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with AsyncExitStack() as stack:
        # A path so short that sockets below it fit.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tb-")))
        settings = {
            **system_settings(folder),
            "TOPOBUS_ALL__NATS__PROVISIONER": "topology",
            "TOPOBUS_RELAY__CHECK_S": "1",
            "TOPOBUS_RELAY__RETRY_S": "0.5",
            "TOPOBUS_GATEWAY__DEADLINES__CLAIM_RETRY_S": "0.5",
        }
        pair = await stack.enter_async_context(leaf_pair(nats_binary))
        hub = await stack.enter_async_context(Bus.session(NatsSettings(url=pair.hub.url), name="topobus-cli"))
        await stack.enter_async_context(service("controller", pair.hub.url))
        kubelet = await stack.enter_async_context(KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1)))
        node = await stack.enter_async_context(all_services(pair.leaf.url, folder, order=_NODE_SERVICES, settings=settings))
        leaf = await stack.enter_async_context(Bus.session(NatsSettings(url=pair.leaf.url, provisioner="topology"), name="gateway"))
        await until_all_ready(node)
        await kubelet.wait_for_driver(_DRIVER)

        await _apply(folder, pair.hub.url, "first", "second", "third")
        claims = await _settle(hub, leaf, ("first", "second", "third"))
        (first,) = await kubelet.prepare_claims([_reference(claims["first"])])
        assert (first.error, len(first.devices)) == ("", 1)
        unknown = ClaimReference(name="unknown", uid="u", drivers=(_DRIVER,))
        (late,) = await kubelet.prepare_claims([unknown])
        assert "does not exist at this node's own server yet" in late.error

        pair.link.cut()
        await _until_cut(node["relay"], is_cut=True)
        (second,) = await kubelet.prepare_claims([_reference(claims["second"])])
        assert (second.error, len(second.devices)) == ("", 1)
        code, output = await _topobus(pair.hub.url, "delete", "claim", "third", "second")
        assert code == 0, output
        assert claims.keys() <= (await claims_on(leaf)).keys()

        pair.link.join()
        await _until_gone(hub, "third")
        await until_on_node(leaf, lambda there: "third" not in there)
        # Prepared, it stays where its containers need it; then it goes as the other one did.
        assert "second" in await claims_on(leaf)
        assert (await hub.get(OBJECT, **parts("second"))) is not None
        assert await kubelet.unprepare_claims([_reference(claims["second"])]) == {}
        await _until_gone(hub, "second")
        await until_on_node(leaf, lambda there: there.keys() == {"first"})
        note = await hub.get(HELD_CLAIMS, node=NODE)
        assert note is not None
        assert await kubelet.unprepare_claims([_reference(claims["first"])]) == {}
        await _until_ledger(leaf, "claim/default/first/", is_prepared=False)
