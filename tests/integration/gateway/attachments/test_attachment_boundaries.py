"""What one claim's attachment meets must not reach the others: a defect of ours, a sandbox that
vanished while nobody was told.
"""

from __future__ import annotations

import pytest

from support.attachments import CDI, IMPATIENT, prepare, verbs
from support.gateway_rig import Rig
from topobus.gateway.config import RuntimeSettings
from topobus.simulation.container_runtime import Refused, SimulatedRuntime

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_defect_met_by_one_claim_ends_nothing_for_the_others(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod whose devices met it is refused and told so.

    Other pods start, and the next try succeeds when the values are others.
    """

    def break_down(*_: object) -> None:
        raise ZeroDivisionError("of the test")

    async with runtime.serving(), rig.kubelet, rig.gateway() as gateway:
        await runtime.synchronized.wait()
        await prepare(rig)
        with monkeypatch.context() as patch:
            patch.setattr("topobus.gateway.containers.rules.sandbox_rules.refuse_interfaces", break_down)
            await runtime.run_pod("app")
            with pytest.raises(
                Refused, match=r"a defect of the gateway: ZeroDivisionError\('of the test'\); see its log"
            ):
                await runtime.create("main", pod="app", cdi=CDI)
        await runtime.create("main", pod="other")
        await runtime.create("main", pod="app", cdi=CDI)
        assert not gateway.done()


async def test_device_does_not_stay_in_a_sandbox_that_vanished_on_the_way(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The runtime was away when the sandbox ended: what was begun for it is given up and undone."""
    settings = RuntimeSettings(socket=str(runtime.socket), attach_s=IMPATIENT)
    gate = rig.plane.asks.hold("attach")
    async with rig.kubelet, rig.gateway(runtime=settings):
        async with runtime.serving():
            await runtime.synchronized.wait()
            await prepare(rig)
            pod = await runtime.run_pod("app")
            await rig.plane.asks.wait_for("attach")
        await runtime.until(lambda: not runtime.synchronized.is_set())
        await runtime.remove_pod(pod)
        async with runtime.serving():
            await runtime.synchronized.wait()
            await rig.plane.asks.wait_for("detach")
            gate.set()

    assert verbs(rig) == ["prepare", "attach", "detach"]
