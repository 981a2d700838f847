"""What happens to a card shows in the health of its devices, and does not hold up the pod that has
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from topobus.formats.messages.catalogue import HEALTH
from topobus.values.request import Owner, OwnerKind
from vm.hands import CARD_AT, VIRTIO_AT, Fault, inject_fatal
from vm.kernel import PCI, interfaces, number, sh
from vm.node import NAME, PATIENCE_S, Node

_CARD, _FUNCTION, _VIRTIO = "nic-0000-63-00-0", "nic-0000-21-10-2", "nic-0000-01-00-0"


async def test_event_names_the_claim_and_the_pod_that_have_the_sick_card(nic: Node, hands: Mapping[str, Fault]) -> None:
    """As the ledger has them, from the event of the loss to the one of the recovery."""
    reader = Owner(kind=OwnerKind.POD, namespace="vm", name="reader", uid="reader")
    await nic.start("topology")
    claim = await nic.adopt(_CARD, reader)
    hands["cable"].cause()
    heard = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in nic.bus.follow(HEALTH, node=NAME, device_class="nic", device=_CARD):
            if event.value.affected or heard:
                heard.append((event.value.health.state.value, event.value.affected, event.value.pods))
            if event.value.health.state.value == "unhealthy":
                hands["cable"].take_back()
            elif heard and event.value.health.state.value == "healthy":
                break
    assert heard == [(state, (claim,), (reader,)) for state in ("unhealthy", "recovering", "healthy")]
    await nic.release(claim)
    nic.kill("topology")


async def test_function_that_the_kernel_gives_up_after_a_fatal_error_is_held_until_it_is_exchanged(
    nic: Node, hands: Mapping[str, Fault]
) -> None:
    """The kernel does not read the function's status then (6.12: `type=Inaccessible`): its own
    count stays, and the root port's rises. It resets the slot, and virtio's driver cannot recover.
    """
    of_port = (PCI / VIRTIO_AT).resolve().parent / "aer_rootport_total_err_fatal"
    before = number(of_port)
    await nic.device(_VIRTIO)
    hands["fatal-error"].cause()
    sick = await nic.device(_VIRTIO, "unhealthy", "aer-fatal")
    held = await nic.device(_VIRTIO, "unhealthy", "recovery-failed")

    assert [(each.reason, each.evidence) for each in sick.health.conditions] == [
        ("aer-fatal", {"path": str(of_port).removeprefix("/"), "value": str(before + 1)})
    ]
    assert [each.reason for each in held.health.conditions] == ["recovery-failed"]
    assert sh(f"tail -n 1 {PCI}/{VIRTIO_AT}/aer_dev_fatal") == "TOTAL_ERR_FATAL 0\n"
    assert "AER: device recovery failed" in sh("dmesg | tail -n 5")
    hands["fatal-error"].take_back()
    await nic.device(_VIRTIO)


async def test_function_below_a_switch_is_held_when_the_kernel_gives_it_up(
    nic: Node, hands: Mapping[str, Fault]
) -> None:
    """With its driver, which writes configuration space again, it recovers; without one it does
    not.
    """
    await nic.device(_CARD)
    assert inject_fatal(CARD_AT) == "successful"
    await nic.device(_CARD)
    hands["fatal-error-unbound"].cause()
    held = await nic.device(_CARD, "unhealthy", "recovery-failed")

    assert sorted(each.reason for each in held.health.conditions) == ["no-kernel-driver", "recovery-failed"]
    hands["fatal-error-unbound"].take_back()
    await nic.device(_CARD)


@pytest.mark.short
async def test_card_that_is_taken_out_of_a_pod_is_given_up_and_another_life_begins(
    nic: Node, hands: Mapping[str, Fault], pod: str
) -> None:
    """Off the bus at once; the claim ends all the same.

    The card that comes into the slot serves the next claim.
    """
    await nic.do("prepare", _CARD)
    await nic.do("attach", _CARD)
    hands["taken-out"].cause()
    await nic.device(_CARD, "unhealthy", "fell-off-bus")
    assert not (PCI / "0000:63:00.0").exists()
    await nic.do("detach", _CARD)
    await nic.do("unprepare", _CARD)

    hands["taken-out"].take_back()
    await nic.device(_CARD)
    await nic.do("prepare", _CARD, claim="next")
    await nic.do("attach", _CARD, claim="next")
    assert interfaces(pod) == {"ens31"}
    await nic.do("detach", _CARD, claim="next")
    await nic.do("unprepare", _CARD, claim="next")


async def test_physical_function_that_is_taken_out_takes_its_functions_from_their_pods(
    nic: Node, hands: Mapping[str, Fault], pod: str
) -> None:
    """A virtual function in a pod leaves with its card, and its claim ends.

    Functions are made again when the card is back.
    """
    await nic.do("prepare", _FUNCTION)
    await nic.do("attach", _FUNCTION)
    hands["parent-taken-out"].cause()
    await nic.device(_FUNCTION, "unhealthy", "fell-off-bus")
    await nic.do("detach", _FUNCTION)
    await nic.do("unprepare", _FUNCTION)

    hands["parent-taken-out"].take_back()
    await nic.device(_FUNCTION)
