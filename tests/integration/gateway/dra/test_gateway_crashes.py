"""A gateway killed (SIGKILL) at every single step of kubelet's calls: the next one goes on
correctly, whether kubelet asks again or gives up.

The steps are counted while the call runs (see `support.mortal_gateway`), so a step that is added to
the gateway later is covered by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.laws import steps
from support.lives import LIMIT_S, GatewayLives, is_transport
from support.looks import next_look, until
from support.node_plane import claim, device
from topobus.formats.containers.cdi import file_name
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    PreparedClaim,
)
from topobus.values.dra_names import DRIVER

pytestmark = pytest.mark.integration

GPU = "topobus.dev/gpu"
BOTH = ClaimReference(name="both", uid="u-both", drivers=(DRIVER,))
RIVAL = ClaimReference(name="rival", uid="u-rival", drivers=(DRIVER,))
HELD = {"claim/default/both/u-both": {"gpu": ("gpu-0",), "nic": ("nic-0",)}}
# More than any call has: a loop that never ends would be a bug of the test.
MOST_STEPS = 100


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs and a NIC, a claim for one of each, and a rival that wants the same GPU."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0))
        yield made


def entries(rig: Rig) -> tuple[ClaimEntry, ...]:
    """The checkpoint as it stands on disk."""
    return Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()


def check_files(rig: Rig, at: str) -> None:
    """Promise: a start leaves one CDI file for each prepared claim, no other, and no half-written
    file anywhere.
    """
    wanted = {
        file_name(CDI_VENDOR, claim_entry.device_class, claim_entry.uid)
        for claim_entry in entries(rig)
        if claim_entry.is_running
    }
    names = {path.name for path in rig.cdi_dir.iterdir()} if rig.cdi_dir.is_dir() else set()
    assert names == wanted, at
    state = Path(rig.settings.checkpoint_path)
    assert {path.name for path in state.parent.iterdir()} <= {
        state.name,
        state.name + ".lock",
        state.name + ".queue",
        "given.json",
    }, at


def check_nothing_left(rig: Rig, at: str) -> None:
    """Promise: when the claim is gone, nothing of it is left."""
    assert entries(rig) == (), at
    assert rig.plane.ledger.allocations == {}, at
    check_files(rig, at)


def check_deaths(last_step: int, least: int) -> None:
    """Promise: the call had as many steps as it has to have.

    Fewer would mean that steps were missed.
    """
    assert least <= last_step - 1 < MOST_STEPS - 2, f"{last_step - 1} steps"


def check_both_classes(lives: GatewayLives, verb: str) -> None:
    """Promise: the device services of both classes were asked in the one call whose steps are
    counted.
    """
    assert lives.taken().count(f"before ask {verb}") == 2, lives.taken()


async def prepare(rig: Rig, reference: ClaimReference, at: str) -> PreparedClaim:
    """Prepare as kubelet does: again while nobody listens.

    What the gateway itself says is final.
    """
    async with asyncio.timeout(LIMIT_S):
        while True:
            (prepared,) = await rig.kubelet.prepare_claims([reference])
            if not is_transport(prepared.error):
                return prepared
            await next_look()
    raise AssertionError(at)


async def unprepare(rig: Rig, reference: ClaimReference) -> dict[str, str]:
    """Unprepare as kubelet does."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            errors = await rig.kubelet.unprepare_claims([reference])
            if not any(is_transport(error) for error in errors.values()):
                return errors
            await next_look()


async def check_whole(rig: Rig, at: str) -> None:
    """Promise: the claim is prepared with the devices of both classes, ledger and checkpoint say the
    same, and nobody else gets its device.
    """
    prepared = await prepare(rig, BOTH, at)
    assert prepared.error == "", at
    assert [claim_device.device for claim_device in prepared.devices] == ["gpu-0", "nic-0"], at
    assert {key: allocation.holdings[0].devices for key, allocation in rig.plane.ledger.allocations.items()} == HELD, at
    assert {claim_entry.key for claim_entry in entries(rig) if claim_entry.is_prepared} == {
        "u-both/gpu",
        "u-both/nic",
    }, at
    check_files(rig, at)
    named = {name for claim_device in prepared.devices for name in claim_device.cdi_devices}
    assert named == {"topobus.dev/gpu=claim-u-both-gpu-0", "topobus.dev/nic=claim-u-both-nic-0"}, at
    rival = await prepare(rig, RIVAL, at)
    assert "gpu-0" in rival.error, at


async def undo(rig: Rig, at: str) -> None:
    """Delete the claim and let kubelet undo it; nothing is left."""
    await rig.plane.drop("both")
    assert await unprepare(rig, BOTH) == {}, at
    check_nothing_left(rig, at)


@pytest.mark.law
@pytest.mark.parametrize("is_retried", [True, False], ids=["asked-again", "given-up"])
async def test_gateway_goes_on_when_killed_at_any_step_of_prepare(
    rig: Rig, lives: GatewayLives, is_retried: bool
) -> None:
    """Asked again, the claim of a GPU and a NIC is prepared once and whole, with the same devices.

    Given up, or undone after that, nothing of it is left: whatever the step was.
    """
    await rig.plane.store(claim("rival", RIVAL.uid, "gpu-0"))
    for step in steps(MOST_STEPS):
        await rig.plane.store(claim("both", BOTH.uid, "gpu-0", "nic-0"))
        await rig.kubelet.wait_for_driver(DRIVER)
        lives.doom(f"NodePrepareResources/{DRIVER}", step)
        await rig.kubelet.prepare_claims([BOTH])
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        check_files(rig, at)
        if is_retried:
            await check_whole(rig, at)
        await undo(rig, at)

    check_both_classes(lives, "prepare")
    check_deaths(step, 20)


@pytest.mark.law
async def test_gateway_goes_on_when_killed_at_any_step_of_unprepare(rig: Rig, lives: GatewayLives) -> None:
    """Kubelet asks until it is told that all is undone.

    Then nothing is left, whatever the step was.
    """
    for step in steps(MOST_STEPS):
        await rig.plane.store(claim("both", BOTH.uid, "gpu-0", "nic-0"))
        assert (await prepare(rig, BOTH, "")).error == ""
        await rig.plane.drop("both")
        lives.doom(f"NodeUnprepareResources/{DRIVER}", step)
        await rig.kubelet.unprepare_claims([BOTH])
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        check_files(rig, at)
        await undo(rig, at)

    check_both_classes(lives, "unprepare")
    check_deaths(step, 20)


@pytest.mark.law
@pytest.mark.parametrize("is_retried", [True, False], ids=["asked-again", "given-up"])
async def test_gateway_goes_on_when_killed_at_any_step_of_allocate(
    rig: Rig, lives: GatewayLives, is_retried: bool
) -> None:
    """The pod that comes next gets the devices, and what the dead call has taken is let go:
    whatever the step was.
    """
    for deaths, step in enumerate(steps(MOST_STEPS), start=1):
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        first = Pod(name="first", uid=f"first-{step}", containers=(Container(name="main", resources={GPU: 2}),))
        lives.doom("Allocate/gpu", step)
        await rig.kubelet.admit(first)
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        await rig.kubelet.remove(first)
        await rig.kubelet.wait_for_event("ListAndWatch.closed", count=deaths)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        if is_retried:
            second = Pod(name="second", uid=f"second-{step}", containers=(Container(name="main", resources={GPU: 2}),))
            answer = await rig.kubelet.admit(second)
            assert isinstance(answer, Admission), f"{at}: {answer}"
            held = [allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()]
            assert held == [{"gpu": ("gpu-0", "gpu-1")}], at
            await rig.kubelet.remove(second)
        await until(lambda: not rig.plane.ledger.allocations, f"{at}: an empty ledger")
        check_files(rig, at)

    check_deaths(step, 4)
