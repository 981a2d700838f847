"""A card that is offered whole and in functions: the functions are made for the first claim of one,
and go with the last.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from vm.kernel import PCI, interfaces, number, sh, state
from vm.node import Node
from vm.sriov.conftest import SETTINGS

_CARD, _FUNCTION, _MADE = "nic-0000-63-00-0", "nic-0000-63-10-0", PCI / "0000:63:00.0/sriov_numvfs"


@pytest_asyncio.fixture(scope="module", autouse=True)
async def on_demand(service: Node) -> AsyncIterator[None]:
    """The service with a rule for the card behind the switch."""
    rule = '[{"where":[{"field":"pci","equals":"0000:63:00.0"}],"count":2,"when_idle":"remove"}]'
    sh("ip addr flush dev ens31; ip link set ens31 up")
    await service.start(
        "nic", **SETTINGS, TOPOBUS_NIC__PARTITIONS__ON_DEMAND="true", TOPOBUS_NIC__PARTITIONS__VIRTUAL_FUNCTIONS=rule
    )
    await service.device(_FUNCTION)
    yield
    await service.start("nic", **SETTINGS)
    await service.device(_CARD)


async def hand_over(nic: Node) -> None:
    """Prepare and attach.

    The function exists at once, its interface when a driver has taken it, and the inventory has it
    a moment later.
    """
    for verb in ("prepare", "attach"):
        await nic.do(verb, _FUNCTION, waits_for="interface-changed")


async def test_function_is_made_for_its_claim_and_goes_with_it(nic: Node, pod: str) -> None:
    """Its driver comes a moment later, and it is prepared once it has an interface.

    The card cannot be claimed as a whole meanwhile.
    """
    before = state("ens31")
    assert number(_MADE) == 0
    await hand_over(nic)
    assert number(_MADE) == 2
    assert len(interfaces(pod)) == 1
    await nic.refused("prepare", _CARD, claim="whole")
    await nic.do("detach", _FUNCTION)
    await nic.do("unprepare", _FUNCTION)
    assert number(_MADE) == 0
    assert {**state("ens31"), "functions": before["functions"]} == before


async def test_functions_made_by_a_life_that_was_killed_go_with_the_claim(nic: Node, pod: str) -> None:
    """SIGKILL while a pod has it: the next life knows who has it, and
    what to take away afterwards.
    """
    await hand_over(nic)
    there = interfaces(pod)
    await nic.restart("nic")
    assert interfaces(pod) == there
    assert number(_MADE) == 2
    await nic.do("detach", _FUNCTION)
    await nic.do("unprepare", _FUNCTION)
    assert number(_MADE) == 0
