"""What one bad node or one malformed object does to the controller in a cluster: it is named and
set aside, and its neighbours are served.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from support.cluster_home import (
    GATE,
    ClusterHome,
    Object,
    claim,
    node,
    own_class,
    pod,
    slice_of,
    template,
)
from support.cluster_poison import WHOLE, poison
from support.looks import until
from topobus.bus.bus import Bus
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceRequest, ReleaseReply, ReleaseRequest
from topobus.kubernetes.answers import Plain, Rejected
from topobus.kubernetes.reading import Kind, Page, WatchEvent
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.errors import ContractError, HardwareError
from topobus.values.ledger import Allocation, Ledger
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

BAD_NODE = "bad-node"
GPU = "gpu.topobus.dev"


@pytest_asyncio.fixture
async def home(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[ClusterHome]:
    """A cluster with nodes n1 and n2 of a vendor's devices."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        home = ClusterHome(server, nats_server.url, tmp_path)
        home.machine_room(devices=8)
        yield home


async def _fail_in_hardware(request: PlaceRequest) -> Any:
    raise HardwareError("nvml: the driver is gone")


async def _fail_in_contract(request: PlaceRequest) -> Any:
    raise ContractError("pod default/p: cpus is 9007199254740993")


async def _answer_garbage(request: PlaceRequest) -> Any:
    return ReleaseReply()


async def _fail_unforeseen(request: PlaceRequest) -> Any:
    raise ValueError("nobody thought of this")


@pytest.mark.parametrize("answer", [_fail_in_hardware, _fail_in_contract, _answer_garbage, _fail_unforeseen])
async def test_bad_node_keeps_nobody_else_from_devices(home: ClusterHome, bus: Bus, answer: Any) -> None:
    """A node whose topology answers `place` with an error or with garbage refuses its own pod.

    Pods on other nodes are served, before and after.
    """
    devices = (Device(name="gpu-0", device_class="gpu"),)
    await bus.put(
        catalogue.INVENTORY,
        Inventory(node=BAD_NODE, device_class="gpu", generation=1, devices=devices),
        node=BAD_NODE,
        device_class="gpu",
    )
    await bus.answer(catalogue.PLACE, answer, node=BAD_NODE)
    stored = home.server.put(node(BAD_NODE))
    owner = {"apiVersion": "v1", "kind": "Node", "name": BAD_NODE, "uid": stored["metadata"]["uid"], "controller": True}
    published = slice_of(BAD_NODE, 1, driver=DRIVER)
    published["metadata"]["ownerReferences"] = [owner]
    published["spec"]["devices"] = [{"name": "gpu-0", "attributes": {"class": {"string": "gpu"}}}]
    home.put(published, own_class("gpu"))
    home.put(claim("bad", device_class_name=GPU), pod("p", "bad"), claim("good"), pod("q", "good"))

    async with home.controller():
        await home.until(lambda: not home.gates("q"), "the neighbour served")
        await home.until(
            lambda: [reason for reason, _ in home.events("p") if reason == "RefusedByNode"], "a word to the pod"
        )
        home.put(claim("late"), pod("r", "late"))
        await home.until(lambda: not home.gates("r"), "a later neighbour served")

    assert home.gates("p") == [GATE]
    assert home.devices("bad") == []
    assert all(BAD_NODE in message for reason, message in home.events("p") if reason == "RefusedByNode")


async def test_bad_node_keeps_no_other_node_from_letting_go(home: ClusterHome, bus: Bus) -> None:
    """A claim that a bad node and a good one hold is let go by the good one, whatever the bad one
    answers.
    """
    asked: list[str] = []

    async def fail(request: ReleaseRequest) -> Any:
        raise HardwareError("gone")

    async def release(request: ReleaseRequest) -> ReleaseReply:
        asked.append(request.owner.name)
        return ReleaseReply()

    holding = _ledger_of("n1"), _ledger_of("n2")
    await bus.answer(catalogue.RELEASE, fail, node="n1")
    await bus.answer(catalogue.RELEASE, release, node="n2")
    for ledger in holding:
        await bus.put(catalogue.LEDGER, ledger, node=ledger.node)
    home.put(claim("c"), pod("p", "c"))
    held = home.get("ResourceClaim", "c")["metadata"]["uid"]
    for ledger in holding:
        await bus.put(catalogue.LEDGER, _ledger_of(ledger.node, held), node=ledger.node)

    async with home.controller():
        await until(lambda: asked)

    assert set(asked) == {"c"}


def _ledger_of(node_name: str, uid: str = "somebody") -> Any:

    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid=uid)
    return Ledger(node=node_name, allocations={owner.key: Allocation(owner=owner, decision_id="d")})


class PoisonedApi:
    """An API server's client that shows malformed objects besides the server's own, as a newer
    server, a defect or an attacker might.
    """

    def __init__(self, api: KubernetesApi, poison: Mapping[str, list[Plain]]) -> None:
        self._api = api
        self._poison = poison
        self.shown: set[str] = set()

    async def version_of(self, kind: Kind) -> str:
        """As the real one."""
        return await self._api.version_of(kind)

    def drop_versions(self) -> None:
        """As the real one."""
        self._api.drop_versions()

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Show what the list showed."""
        poison = self._poison_of(kind, name)
        return poison if poison is not None else await self._api.get(kind, namespace, name)

    def _poison_of(self, kind: Kind, name: str) -> Plain | None:
        for plain in self._poison.get(kind.name, ()):
            metadata = plain.get("metadata")
            if isinstance(metadata, dict) and metadata.get("name") == name:
                return plain
        return None

    async def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """Put the poison first."""
        self.shown.add(kind.name)
        yield Page(items=tuple(self._poison.get(kind.name, ())))
        async for page in self._api.pages(kind):
            yield page

    def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """As the real one."""
        return self._api.watch(kind, version)

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Plain | Rejected:
        """As the real one."""
        return await self._api.create(kind, plain)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = ""
    ) -> Plain | Rejected:
        """Refuse to change the poison, as a server does that validates the whole object at each
        change; otherwise as the real one.
        """
        if self._poison_of(kind, name) is not None:
            return Rejected(code=422, reason="Invalid", message=f"{kind.name} {name[:50]!r} is invalid")
        return await self._api.patch(kind, namespace, name, patch, part=part)

    async def delete(self, kind: Kind, namespace: str, name: str, *, version: str) -> Rejected | None:
        """As the real one."""
        return await self._api.delete(kind, namespace, name, version=version)


def _bearing(tolerant: Object) -> Object:
    """Let a claim bear every taint: a rule whose selector lost its parts rightly means every
    device.
    """
    tolerant["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] = [{"operator": "Exists"}]
    return tolerant


@pytest.mark.parametrize("housekeeping", ["cluster", "own"])
@pytest.mark.parametrize("what", sorted(WHOLE))
async def test_malformed_objects_keep_nobody_else_from_devices(home: ClusterHome, what: str, housekeeping: str) -> None:
    """With every object of a kind that is spoilt at one place beside them, good pods get their
    devices, and the replica goes on.
    """
    kind, whole = WHOLE[what]
    spoilt_objects = poison(whole)
    # All of them are put into a copy in tests/unit/controller/test_cluster_state_garbage.py; here
    # every n-th, each of which costs requests.
    spoilt_objects = spoilt_objects[:: 1 + len(spoilt_objects) // 120]
    assert len(spoilt_objects) > 30
    api: list[PoisonedApi] = []

    def wrap(real: KubernetesApi) -> KubernetesApi:
        api.append(PoisonedApi(real, {kind.name: spoilt_objects}))
        return api[0]

    cluster = structs.replace(home.settings.cluster, housekeeping=housekeeping)
    settings = structs.replace(home.settings, cluster=cluster)
    home.put(template("t"), claim("shared"), _bearing(claim("good")), pod("before", "good"))
    async with home.controller(wrap=wrap, settings=settings):
        await home.until(lambda: not home.gates("before"), "a good pod served")
        home.put(_bearing(claim("late")), pod("after", "late"))
        await home.until(lambda: not home.gates("after"), "a later good pod served")

    assert kind.name in api[0].shown
    assert len(home.devices("good")) == len(home.devices("late")) == 1
