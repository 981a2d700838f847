"""Classic drivers on a real server: our own one keeps the contract that third parties keep, and a
third party's serves pods beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import Any

import pytest
import pytest_asyncio

from lab.memory_nats.fates import FatedBus, Fates, Interrupted
from support.classic_home import SETTINGS, ClassicPlace, classic_place, controller
from support.classic_scenes import classic_scene
from support.controllers import runtime_on
from support.licence_driver import GROUP, SERVER, LicenceDriver
from topobus.bus.bus import Bus
from topobus.controller.classic.builtin_driver import BuiltinDriver
from topobus.controller.state.standalone_state import StandaloneState
from topobus.devicekit.classic.classic import ClaimWork, ClassicDriver
from topobus.devicekit.classic.classic_registry import GROUP as ENTRY_POINTS
from topobus.formats.messages import catalogue
from topobus.simulation.nats_server import NatsServer
from topobus.testing.drivers.classic_contract import ClassicDriverContract, ClassicScene, SceneContext

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


def _seen_bus(bus: Bus, state: StandaloneState) -> FatedBus:
    """Give a bus whose asks the world learns of at once, as a controller's watch does a moment
    later.
    """

    async def see(node: str) -> None:
        entry = await bus.get(catalogue.LEDGER, node=node)
        if entry is not None:
            state.put_ledger(entry.value)

    return FatedBus(bus, Fates(lambda step: Interrupted(lambda: see(step.parts["node"])), counted=frozenset({"ask"})))


class TestOwnDriver(ClassicDriverContract):
    """Our driver of GPUs, on the ledgers of two nodes."""

    @pytest.fixture
    def scene(self) -> ClassicScene:
        """Four GPUs a node."""
        return classic_scene(
            "gpu",
            "gpu.topobus.dev",
            kind="ClaimParameters",
            version="gpu.resource.topobus.dev/v1alpha1",
            pair={"count": 2},
            many={"count": 9},
        )

    @pytest_asyncio.fixture
    async def make(
        self, bus: Bus, nats_server: NatsServer, scene: ClassicScene
    ) -> AsyncIterator[Callable[[], ClassicDriver]]:
        """Make drivers over one world."""
        async with classic_place(bus, nats_server.url):
            state = StandaloneState()
            for machine in await bus.list(catalogue.MACHINE):
                state.put_machine(machine.value)
            for inventory in await bus.list(catalogue.INVENTORY):
                state.put_inventory(inventory.value)
            for ledger in await bus.list(catalogue.LEDGER):
                state.put_ledger(ledger.value)
            runtime = runtime_on(_seen_bus(bus, state))
            yield lambda: BuiltinDriver("gpu", SETTINGS, runtime, state, SceneContext(scene))


MANIFEST = f"""
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {{name: licence}}
driverName: {GROUP}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {{name: gpu}}
driverName: gpu.topobus.dev
---
apiVersion: {GROUP}/v1
kind: LicenceParameters
metadata: {{name: three}}
spec: {{seats: 3}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {{name: seats}}
spec: {{resourceClassName: licence, parametersRef: {{apiGroup: {GROUP}, kind: LicenceParameters, name: three}}}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {{name: gpu}}
spec: {{resourceClassName: gpu}}
---
apiVersion: v1
kind: Pod
metadata: {{name: solver}}
spec:
  containers: [{{name: main}}]
  resourceClaims: [{{name: a, source: {{resourceClaimName: seats}}}}, {{name: b, source: {{resourceClaimName: gpu}}}}]
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the third party's package, as far as the controller can tell."""
    SERVER.taken.clear()
    line = metadata.EntryPoint(name="licence", value="support.licence_driver:LicenceDriver", group=ENTRY_POINTS)
    real = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda **wanted: [line] if wanted.get("group") == ENTRY_POINTS else real(**wanted)
    )


@pytest_asyncio.fixture
async def place(bus: Bus, nats_server: NatsServer) -> AsyncIterator[ClassicPlace]:
    """Two nodes, no controller."""
    async with classic_place(bus, nats_server.url) as made:
        yield made


@pytest.mark.usefixtures("installed")
async def test_third_partys_claims_are_negotiated_beside_ours(place: ClassicPlace) -> None:
    """One pod with a claim of each driver: both allocated, its handle as the driver wrote it, and
    both given back with the pod.
    """
    async with controller(place.url):
        await place.apply(MANIFEST)
        await place.scheduled("solver")
        seats = await place.allocated("seats")

        assert seats.status["allocation"]["resourceHandles"] == [{"driverName": GROUP, "data": "seats=3"}]
        assert seats.metadata["finalizers"] == [f"{GROUP}/deletion-protection"]
        assert SERVER.free == 1

        await place.delete("pod", "solver")
        await place.until(
            "resourceclaim", "seats", lambda claim: claim is not None and "allocation" not in claim.status
        )
        assert SERVER.free == 4


@pytest.mark.usefixtures("installed")
async def test_hung_driver_never_holds_up_its_neighbours(place: ClassicPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of other drivers go on while one driver does not answer, and the hung one's are tried
    again.
    """
    answer = asyncio.Event()
    real = LicenceDriver.allocate

    async def hang(self: LicenceDriver, claims: list[ClaimWork], node: str) -> Any:
        await answer.wait()
        return await real(self, claims, node)

    monkeypatch.setattr(LicenceDriver, "allocate", hang)
    async with controller(place.url):
        await place.apply(
            MANIFEST.partition("---\napiVersion: v1\n")[0].replace(
                "{resourceClassName", "{allocationMode: Immediate, resourceClassName"
            )
        )
        await place.allocated("gpu")
        assert "allocation" not in (await place.claim("seats")).status

        answer.set()
        await place.allocated("seats")


@pytest.mark.usefixtures("installed")
async def test_failing_driver_is_asked_again(place: ClassicPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a vendor's code is that vendor's trouble: nothing crashes, and the claim is
    allocated once it works.
    """
    real = LicenceDriver.allocate
    failures = [RuntimeError("boom"), KeyError("x")]

    async def fail(self: LicenceDriver, claims: list[ClaimWork], node: str) -> Any:
        if failures:
            raise failures.pop()
        return await real(self, claims, node)

    monkeypatch.setattr(LicenceDriver, "allocate", fail)
    async with controller(place.url):
        await place.apply(MANIFEST)
        await place.scheduled("solver")

    assert failures == []
