"""Attacks on the last door: whoever has a device service's credential answers `prepare` in its
place, and gets nothing written for a container runtime.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, claim, device, show, store
from support.secured_nats import Attacker, SecuredNats, secured_nats
from topobus.formats.messages.catalogue import PREPARE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import Prepared, PrepareReply
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.containers.rules.edit_limits import EditRights
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    Rejection,
)
from topobus.values.dra_names import DRIVER
from topobus.values.edits import ContainerEdits, DeviceNode, Mount

pytestmark = pytest.mark.integration

UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"
TRAINING = ClaimReference(name="training", uid=UID, drivers=(DRIVER,))
HONEST = ContainerEdits(env={"GPU": "1"}, device_nodes=(DeviceNode(path="/dev/gpu-0"),))
ATTACKS = {
    "mount-of-the-root": ContainerEdits(
        mounts=(Mount(host_path="/", container_path="/host", options=("rw", "rbind")),)
    ),
    "disk": ContainerEdits(device_nodes=(DeviceNode(path="/dev/sda", permissions="rwm"),)),
    "disk-as-a-gpu": ContainerEdits(device_nodes=(DeviceNode(path="/dev/gpu-0", host_path="/dev/sda"),)),
    "preload": ContainerEdits(env={"LD_PRELOAD": "/tmp/x.so"}),
    "second-variable-in-a-value": ContainerEdits(env={"GPU": "1\nLD_PRELOAD=/tmp/x.so"}),
    "mknod": ContainerEdits(device_nodes=(DeviceNode(path="/dev/gpu-0", permissions="rwm"),)),
    "relative-mount": ContainerEdits(mounts=(Mount(host_path="../../etc", container_path="/host"),)),
}


@pytest_asyncio.fixture
async def nats(nats_binary: Path, tmp_path: Path) -> AsyncIterator[SecuredNats]:
    """A server with the shipped permissions."""
    async with secured_nats(tmp_path, binary=nats_binary) as server:
        yield server


@pytest_asyncio.fixture
async def rig(nats: SecuredNats) -> AsyncIterator[Rig]:
    """One GPU whose service has ended, a claim for it.

    Topology and gateway with credentials of their own.
    """
    async with make_rig(nats.url, secured=nats) as made, nats.bus("gpu") as gpu, nats.bus("controller") as controller:
        await show(gpu, "gpu", device("gpu-0", 0))
        await store(controller, claim("training", UID, "gpu-0"))
        yield made


async def answer_prepare(attacker: Attacker, edits: ContainerEdits, *, is_common: bool) -> None:
    """Answer `prepare` of the class from now on, as its service would."""
    own = Prepared(edits={"gpu-0": HONEST}, common=edits) if is_common else Prepared(edits={"gpu-0": edits})

    async def answer(message: Msg) -> None:
        await message.respond(encode(PrepareReply(result=own)))

    await attacker.client.subscribe(PREPARE.subject(node=NODE, device_class="gpu"), cb=answer)
    await attacker.barrier()


@pytest.mark.parametrize("is_common", [False, True], ids=["device", "common"])
@pytest.mark.parametrize("edits", ATTACKS.values(), ids=ATTACKS.keys())
async def test_claim_is_refused_when_an_attacker_answers_prepare(
    rig: Rig, nats: SecuredNats, edits: ContainerEdits, is_common: bool
) -> None:
    """With the credential of the gpu service: kubelet gets a refusal that names the edit, and no
    CDI file exists.
    """
    async with nats.attacker("gpu") as attacker, rig.kubelet, rig.gateway():
        await answer_prepare(attacker, edits, is_common=is_common)
        await rig.kubelet.wait_for_driver(DRIVER)
        (answer,) = await rig.kubelet.prepare_claims([TRAINING])

    assert "which the gateway forbids" in answer.error
    assert answer.devices == ()
    assert list(rig.cdi_dir.iterdir()) == []
    assert attacker.denials == []


async def test_claim_is_prepared_when_the_same_credential_answers_honestly(rig: Rig, nats: SecuredNats) -> None:
    """The refusals above are not for want of rights: what the class may give goes through."""
    async with nats.attacker("gpu") as service, rig.kubelet, rig.gateway():
        await answer_prepare(service, HONEST, is_common=False)
        await rig.kubelet.wait_for_driver(DRIVER)
        (answer,) = await rig.kubelet.prepare_claims([TRAINING])
        names = [path.name for path in rig.cdi_dir.iterdir()]

    assert answer.error == ""
    assert names == [f"topobus.dev-gpu_{UID}.json"]


@pytest.mark.parametrize("edits", ATTACKS.values(), ids=ATTACKS.keys())
async def test_pod_is_refused_when_an_attacker_answers_prepare(
    rig: Rig, nats: SecuredNats, edits: ContainerEdits
) -> None:
    """The other door is closed, too: Allocate fails, and the device is given back."""
    pod = Pod(name="p", uid="pod-u", containers=(Container(name="main", resources={"topobus.dev/gpu": 1}),))
    async with nats.attacker("gpu") as attacker, rig.kubelet, rig.gateway():
        await answer_prepare(attacker, edits, is_common=False)
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1)
        admitted = await rig.kubelet.admit(pod)

    assert isinstance(admitted, Rejection)
    assert "which the gateway forbids" in admitted.message
    assert rig.plane.ledger.allocations == {}


async def test_operator_widens_what_a_class_may_give_when_a_driver_needs_it(rig: Rig, nats: SecuredNats) -> None:
    """A setting of the gateway allows what is refused without it; nothing on the bus can."""
    wanted = ContainerEdits(mounts=(Mount(host_path="/opt/acme", container_path="/opt/acme", options=("ro", "rbind")),))
    pod = Pod(name="p", uid="pod-u", containers=(Container(name="main", resources={"topobus.dev/gpu": 1}),))
    async with (
        nats.attacker("gpu") as service,
        rig.kubelet,
        rig.gateway(edits={"gpu": EditRights(mounts=("/opt/acme",))}),
    ):
        await answer_prepare(service, wanted, is_common=False)
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1)
        admitted = await rig.kubelet.admit(pod)

    assert isinstance(admitted, Admission), admitted
    assert [mount.host_path for mount in admitted.container("main").edits.mounts] == ["/opt/acme"]


async def test_stored_file_is_not_written_again_when_its_class_lost_the_right(rig: Rig, nats: SecuredNats) -> None:
    """What an earlier gateway process wrote into its checkpoint is looked at as well: no file after
    the start, a refusal when kubelet asks, the others as they were.
    """
    async with nats.attacker("gpu") as service, rig.kubelet:
        await answer_prepare(service, HONEST, is_common=False)
        async with rig.gateway():
            await rig.kubelet.wait_for_driver(DRIVER)
            (before,) = await rig.kubelet.prepare_claims([TRAINING])
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        async with rig.gateway(edits={}):
            await rig.kubelet.wait_for_driver(DRIVER)
            files = list(rig.cdi_dir.iterdir())
            (after,) = await rig.kubelet.prepare_claims([TRAINING])
        kept = Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()

    assert before.error == ""
    assert files == []
    assert "wanted a node whose path begins with '/dev/nvidia' or '/dev/dri/' or '/dev/kfd'" in after.error
    assert [entry.is_prepared for entry in kept] == [True]
