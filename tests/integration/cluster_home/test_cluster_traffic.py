"""What the controller in a cluster asks of the API server while pods come: one list a kind,
watches, and three writes for a pod with a claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lab.bench.cluster import measure_fill
from lab.cluster_fill.fill_rig import CONTROLLER, fill_rig
from lab.cluster_fill.gated_pods import NAMESPACE, claim_object, pod_object
from lab.cluster_fill.played_nodes import CLASSES, open_client, publish_nodes
from lab.fleet.fill_outcome import faults_of
from lab.fleet.fleet_node import FleetNode, node_template
from lab.leaves.node_content import NodeContent
from support.cluster_home import ClusterHome
from support.node_contents import content_of
from topobus.bus.bus import Bus
from topobus.controller.store.api import WATCHED
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.apiserver.request_counts import count_requests
from topobus.testing.clock import ManualClock
from topobus.values.device import Inventory
from topobus.values.machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

NODES = 20
CLAIMS = 60
PLURALS = sorted(kind.plural for kind in WATCHED)


class Filling:
    """A cluster of played nodes, filled with gated pods by the test."""

    def __init__(self, home: ClusterHome, nodes: list[FleetNode]) -> None:
        self.home = home
        self.nodes = nodes
        self._made = 0

    async def fill(self, count: int) -> None:
        """Make so many pods with a claim each, and wait until their gates are open."""
        for number in range(self._made, self._made + count):
            self.home.put(claim_object(number), pod_object(number))
        self._made += count
        await self.home.until(
            lambda: (
                len([pod for pod in self.home.server.objects("Pod") if not pod["spec"].get("schedulingGates")])
                == self._made
            ),
            "gates",
        )

    def asked(self, verb: str) -> Counter[str]:
        """Count the controllers' requests of a verb by resource, whatever came of them."""
        counts: Counter[str] = Counter()
        for kind, count in count_requests(self.home.server.requests).items():
            if kind.user == CONTROLLER and kind.verb == verb:
                counts[kind.resource] += count
        return counts

    def faults(self) -> list[str]:
        """Say what is wrong with claims and ledgers."""
        claims = [
            claim for claim in self.home.server.objects("ResourceClaim") if claim["metadata"]["namespace"] == NAMESPACE
        ]
        return faults_of(claims, [node.ledger for node in self.nodes])


@pytest.fixture
def content(recorded: tuple[Machine, list[Inventory]]) -> NodeContent:
    """What each of the nodes says of itself."""
    return content_of(*recorded)


@pytest_asyncio.fixture
async def filling(nats_server: NatsServer, bus: Bus, content: NodeContent, tmp_path: Path) -> AsyncIterator[Filling]:
    """Twenty nodes of eight GPUs; the controller is a user of its own."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        home = ClusterHome(server, nats_server.url, tmp_path)
        server.write_kubeconfig(home.kubeconfig, user=CONTROLLER, is_master=True)
        client = open_client(str(server.write_kubeconfig(tmp_path / "nodes")))
        try:
            yield Filling(home, await publish_nodes(bus, client, node_template(content, CLASSES), NODES))
        finally:
            await client.close()


async def test_controller_lists_once_and_writes_three_times_a_claim_when_pods_come(filling: Filling) -> None:
    """One list and one watch a kind, no read of a single object, and for each pod the intent, the
    status and the gate: nothing else is asked in a fill.
    """
    async with filling.home.controller():
        await filling.fill(CLAIMS)

        once = Counter(dict.fromkeys(PLURALS, 1))
        assert filling.asked("list") == once
        assert filling.asked("watch") == once
        assert filling.asked("get") == {}
        assert filling.asked("patch") == {"resourceclaims": CLAIMS, "resourceclaims/status": CLAIMS, "pods": CLAIMS}
        assert filling.asked("create") + filling.asked("update") + filling.asked("delete") == {}
        assert filling.faults() == []


async def test_controller_watches_on_without_a_list_when_watches_are_cut(filling: Filling) -> None:
    """A cut watch goes on from its last version: no kind is listed again, and what came meanwhile
    is served.
    """
    async with filling.home.controller():
        await filling.fill(5)
        filling.home.server.close_watches()
        await filling.fill(5)
        await filling.home.until(lambda: filling.home.server.open_watches == len(PLURALS), "all watches again")

        assert filling.asked("list") == Counter(dict.fromkeys(PLURALS, 1))
        assert filling.asked("watch") == Counter(dict.fromkeys(PLURALS, 2))
        assert filling.asked("get") == {}
        assert filling.faults() == []


async def test_controller_lists_again_only_when_the_history_is_gone(filling: Filling) -> None:
    """After 410 each kind is listed once more, and the watch goes on from that list."""
    async with filling.home.controller():
        await filling.fill(5)
        filling.home.put(claim_object(1_000))
        filling.home.server.compact()
        filling.home.server.close_watches()
        await filling.home.until(
            lambda: filling.asked("list") == Counter(dict.fromkeys(PLURALS, 2)), "a second list of each kind"
        )
        await filling.fill(5)

        assert filling.asked("list") == Counter(dict.fromkeys(PLURALS, 2))
        assert filling.asked("get") == {}


async def test_pods_get_other_devices_when_their_intents_are_written_at_the_same_time(filling: Filling) -> None:
    """Intents that are under way count as taken: sixteen pods that are planned before any intent is
    stored want sixteen devices, and no intent is withdrawn.
    """
    async with filling.home.controller():
        await filling.fill(1)
        await filling.fill(40)

        intents = [
            request
            for request in filling.home.server.requests
            if request.method == "PATCH" and "resourceclaims/" in request.path
        ]
        assert len(intents) == 2 * 41
        assert filling.faults() == []


async def test_pods_that_fit_nowhere_are_told_once_and_counted_in_one_event(filling: Filling) -> None:
    """Of 30 pods that wait each has its condition.

    Of the 60 words to them and their claims 25 are Events of their own, and one Event stands for
    the rest, whatever is served meanwhile.
    """
    clock = ManualClock()
    for number in range(2_000, 2_030):
        filling.home.put(claim_object(number, devices=9), pod_object(number))

    async with filling.home.controller(clock=clock):
        await filling.home.until(lambda: filling.asked("patch")["pods/status"] == 30, "a condition of each pod")
        for number in range(10):
            filling.home.put(claim_object(number), pod_object(number))
        await filling.home.until(lambda: filling.asked("patch")["pods"] == 10, "ten open gates")
        clock.advance(10.0)
        await filling.home.until(lambda: filling.asked("patch")["events"] == 1, "the count of the others")

        assert filling.asked("create") == {"events": 26}
        assert filling.asked("patch") == {
            "pods/status": 30,
            "pods": 10,
            "resourceclaims": 10,
            "resourceclaims/status": 10,
            "events": 1,
        }
        assert max(event["count"] for event in filling.home.server.objects("Event")) == 35


@pytest.mark.real_server
async def test_fill_goes_on_without_loss_when_a_replica_is_killed(content: NodeContent) -> None:
    """Two replicas fill a cluster, one is killed half way: the other goes on, every claim has its
    devices, no device two claims, and the ledgers say the same.
    """
    async with fill_rig(content, 6) as rig:
        figures = await measure_fill(rig, 6, 36, kills=True)

    assert figures.faults == []
    assert figures.pause_after_kill_s is not None
    assert figures.requests_of_fill["patch pods"] >= 36
    # Ready is who has its copies: of what a fill asks no list is left.
    assert {name: count for name, count in figures.requests_until_ready.items() if name.startswith("list")} == {
        f"list {plural}": 2 for plural in PLURALS
    }
    assert not [name for name in figures.requests_of_fill if name.startswith(("list", "watch"))]
