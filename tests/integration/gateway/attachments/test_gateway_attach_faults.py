"""Answers of a device service that no service should give, when the gateway brings devices into
sandboxes: one pod waits, and the gateway goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.attachments import prepare
from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.sandbox_messages import AttachReply, AttachRequest
from topobus.gateway.config import RuntimeSettings
from topobus.simulation.container_runtime import Refused, SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

NET, OTHER = (ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,)) for name in ("net", "other"))


def of_pod(value: ApiObject, pod: str) -> ApiObject:
    """A claim that is reserved for a pod."""
    consumers = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"}]
    return msgspec.structs.replace(value, status={**value.status, "reservedFor": consumers})


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two NICs that go into their pods' sandboxes."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        made.plane.to_attach = frozenset({"nic-0", "nic-1"})
        await made.plane.show("nic", device("nic-0", 0), device("nic-1", 0))
        await made.plane.store(of_pod(claim("net", NET.uid, "nic-0"), "app"))
        await made.plane.store(of_pod(claim("other", OTHER.uid, "nic-1"), "next"))
        made.settings = msgspec.structs.replace(
            made.settings, runtime=RuntimeSettings(socket=str(made.root / "nri.sock"))
        )
        yield made


@pytest.fixture
def runtime(rig: Rig) -> SimulatedRuntime:
    """A runtime; the test starts it."""
    return SimulatedRuntime(rig.root / "nri.sock", CpuSet(0, 1), cdi_dir=rig.cdi_dir)


async def test_gateway_goes_on_when_a_device_service_refuses_without_a_reason(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A driver of somebody else's may be that rude: its own pod waits, and everybody else's are
    served.
    """

    async def refuse_net(request: AttachRequest) -> AttachReply | None:
        return AttachReply(result=Refusal(reasons=())) if request.owner.name == "net" else None

    rig.plane.attach_by = refuse_net
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        errors = (await prepare(rig, NET), await prepare(rig, OTHER))
        await runtime.run_pod("app")
        with pytest.raises(Refused) as refused:
            await runtime.create("main", pod="app", cdi=("topobus.dev/nic=claim-u-net-nic-0",))
        await runtime.run_pod("next")
        container = await runtime.create("main", pod="next", cdi=("topobus.dev/nic=claim-u-other-nic-1",))

    assert (errors, container.mounts) == (("", ""), ())
    assert "cannot start: claim default/net: its device service refuses without a reason" in str(refused.value)


async def test_container_is_refused_when_its_claim_was_prepared_in_the_boot_before(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CDI file is there again, and its devices have not been made ready: a container that names
    them does not start, and nothing is attached to its pod.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig, NET)
        await runtime.until(lambda: not runtime.synchronized.is_set())
        monkeypatch.setattr("topobus.gateway.service.boot_id", lambda: "the-next-boot")
        async with rig.gateway():
            await runtime.synchronized.wait()
            await runtime.run_pod("app")
            with pytest.raises(Refused, match="of a claim \\(uid u-net\\) that is not prepared on this node"):
                await runtime.create("main", pod="app", cdi=("topobus.dev/nic=claim-u-net-nic-0",))

    assert rig.plane.asks.requests("attach") == []


async def test_dead_sandbox_of_the_boot_before_gets_nothing_when_the_runtime_lists_it(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot the claim is prepared anew and its devices are in no sandbox.

    A runtime that shows the dead one once more is not believed.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig, NET)
            dead = await runtime.run_pod("app")
        await runtime.until(lambda: not runtime.synchronized.is_set())
        monkeypatch.setattr("topobus.gateway.service.boot_id", lambda: "the-next-boot")
        async with rig.gateway():
            await runtime.synchronized.wait()
            await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=2)
            error = await prepare(rig, NET)
            runtime.disconnect()
            await runtime.synchronized.wait()
            # Whatever was begun with the dead one has been asked for by the end of this.
            await prepare(rig, OTHER)
            pod = await runtime.run_pod("app")
            inside = dict(rig.plane.attached)

    assert error == ""
    assert [request.sandbox.id for request in rig.plane.asks.requests("attach")] == [dead.id, pod.id]
    assert inside == {(NET.uid, "nic-0"): pod.id}
