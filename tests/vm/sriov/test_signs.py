"""What happens to a card shows in the health of its devices, and does not hold up the pod that has
it.
"""

from __future__ import annotations

import asyncio

import pytest

from support.asking import ask_patiently
from topobus.formats.messages.catalogue import ADOPT, HEALTH, RELEASE
from topobus.formats.messages.messages import AdoptRequest
from topobus.formats.messages.release_messages import ReleaseRequest
from topobus.values.request import Owner, OwnerKind
from vm.kernel import PCI, interfaces, number, sh
from vm.monitor import Monitor
from vm.node import NAME, PATIENCE_S, Node

_CARD, _FUNCTION, _VIRTIO = "nic-0000-63-00-0", "nic-0000-21-10-2", "nic-0000-01-00-0"


async def test_carrier_of_a_card_is_its_own_and_its_functions_health(nic: Node, monitor: Monitor) -> None:
    """The cable is pulled and put back."""
    monitor.link("nic1", is_up=False)
    await nic.device(_FUNCTION, "unhealthy")
    monitor.link("nic3", is_up=False)
    await nic.device(_CARD, "unhealthy", "carrier-lost")
    monitor.link("nic1", is_up=True)
    monitor.link("nic3", is_up=True)
    await nic.device(_CARD)
    await nic.device(_FUNCTION)


async def test_event_names_the_claim_and_the_pod_that_have_the_sick_card(nic: Node, monitor: Monitor) -> None:
    """As the ledger has them, from the event of the loss to the one of the recovery."""
    claim = Owner(kind=OwnerKind.CLAIM, namespace="vm", name="claim", uid="claim")
    reader = Owner(kind=OwnerKind.POD, namespace="vm", name="reader", uid="reader")
    await nic.start("topology")
    adoption = AdoptRequest(op_id="adopt", owner=claim, devices={"nic": (_CARD,)}, pods=(reader,))
    await ask_patiently(nic.bus, ADOPT, adoption, limit_s=PATIENCE_S, node=NAME)
    monitor.link("nic3", is_up=False)
    heard = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in nic.bus.follow(HEALTH, node=NAME, device_class="nic", device=_CARD):
            if event.value.affected or heard:
                heard.append((event.value.health.state.value, event.value.affected, event.value.pods))
            if event.value.health.state.value == "unhealthy":
                monitor.link("nic3", is_up=True)
            elif heard and event.value.health.state.value == "healthy":
                break
    assert heard == [(state, (claim,), (reader,)) for state in ("unhealthy", "recovering", "healthy")]
    await nic.bus.ask(RELEASE, ReleaseRequest(op_id="release", owner=claim), node=NAME)
    nic.kill("topology")


async def test_error_that_a_function_tells_is_its_devices_health(nic: Node, monitor: Monitor) -> None:
    """By Advanced Error Reporting, through the root port and the kernel's count.

    Nothing follows, so the device recovers. One corrected error before it is no sign.
    """
    counted = f"tail -n 1 {PCI}/0000:01:00.0/aer_dev_correctable"
    before = sh(counted).strip()
    monitor.fail("nic9", "BAD_TLP")
    sh(f"while [ \"$({counted})\" = '{before}' ]; do sleep 0.2; done")
    monitor.fail("nic9", "COMP_TIME")
    sick = await nic.device(_VIRTIO, "degraded", "aer-nonfatal")
    assert [condition.reason for condition in sick.health.conditions] == ["aer-nonfatal"]
    await nic.device(_VIRTIO)


async def test_fatal_error_that_the_kernel_counts_at_the_root_port_alone_is_its_devices_health(
    nic: Node, monitor: Monitor
) -> None:
    """The kernel does not read the function's status then (6.12: `type=Inaccessible`): its own
    count stays, the root port's rises, and the device recovers when nothing follows.
    """
    of_port = (PCI / "0000:01:00.0").resolve().parent / "aer_rootport_total_err_fatal"
    before = number(of_port)
    await nic.device(_VIRTIO)
    monitor.fail("nic9", "DLP")
    sick = await nic.device(_VIRTIO, "unhealthy", "aer-fatal")

    assert [(each.reason, each.evidence) for each in sick.health.conditions] == [
        ("aer-fatal", {"path": str(of_port).removeprefix("/"), "value": str(before + 1)})
    ]
    assert sh(f"tail -n 1 {PCI}/0000:01:00.0/aer_dev_fatal") == "TOTAL_ERR_FATAL 0\n"
    await nic.device(_VIRTIO)


@pytest.mark.short
async def test_card_that_is_taken_out_of_a_pod_is_given_up_and_another_life_begins(
    nic: Node, monitor: Monitor, pod: str
) -> None:
    """Off the bus at once; the claim ends all the same.

    The card that comes into the slot serves the next claim.
    """
    await nic.do("prepare", _CARD)
    await nic.do("attach", _CARD)
    monitor.unplug("nic3")
    await nic.device(_CARD, "unhealthy", "fell-off-bus")
    assert not (PCI / "0000:63:00.0").exists()
    await nic.do("detach", _CARD)
    await nic.do("unprepare", _CARD)

    monitor.plug("igb,bus=down31,id=nic3,mac=52:54:00:00:03:00,netdev=net3")
    sh("until ip link show ens31; do sleep 0.2; done; ip link set ens31 up")
    await nic.device(_CARD)
    await nic.do("prepare", _CARD, claim="next")
    await nic.do("attach", _CARD, claim="next")
    assert interfaces(pod) == {"ens31"}
    await nic.do("detach", _CARD, claim="next")
    await nic.do("unprepare", _CARD, claim="next")


async def test_physical_function_that_is_taken_out_takes_its_functions_from_their_pods(
    nic: Node, monitor: Monitor, pod: str
) -> None:
    """A virtual function in a pod leaves with its card, and its claim ends.

    Functions are made again when the card is back.
    """
    await nic.do("prepare", _FUNCTION)
    await nic.do("attach", _FUNCTION)
    monitor.unplug("nic1")
    await nic.device(_FUNCTION, "unhealthy", "fell-off-bus")
    await nic.do("detach", _FUNCTION)
    await nic.do("unprepare", _FUNCTION)

    monitor.plug("igb,bus=root1,id=nic1,mac=52:54:00:00:01:00,netdev=net1")
    sh("until ip link show ens1; do sleep 0.2; done; ip link set ens1 up")
    await nic.device(_FUNCTION)
