"""Naming the pods of a device plugin's allocations: each allocation is told, also the next one of
the same devices.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from topobus.gateway.device_plugins.pod_resources import Listing
from topobus.gateway.reconcile import user_naming
from topobus.gateway.reconcile.rules.pods import PodUse
from topobus.gateway.reconcile.user_naming import UserNaming
from topobus.process.broadcast import Broadcast
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Allocation, AllocationPhase, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

RESOURCE = "topobus.dev/gpu"
PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=RESOURCE, uid="gpu-0")
USE = PodUse(
    namespace="default", pod="trainer", container="main", device_class="gpu", resource=RESOURCE, devices=("gpu-0",)
)


def ledger(sequence: int, decision: str) -> Ledger:
    """One allocation of gpu-0 whose pod nobody has said."""
    held = Allocation(
        owner=PLUGIN,
        phase=AllocationPhase.COMMITTED,
        holdings=(Holding(container="", devices={"gpu": ("gpu-0",)}),),
        decision_id=decision,
    )
    return Ledger(node="n1", epoch=1, sequence=sequence, allocations={PLUGIN.key: held})


async def test_naming_tells_the_next_allocation_when_the_copy_of_the_ledger_was_behind() -> None:
    """The same devices are handed out again before our copy of the ledger says so: the new
    allocation is told all the same, and each once.
    """
    named: list[str] = []

    async def name_pods(
        _op_id: str, _owner: Owner, *, decision_id: str, pods: tuple[Owner, ...], container: str
    ) -> None:
        assert container == USE.container
        named.append(f"{decision_id} {pods[0].name}")

    # Handed out twice already, while the copy still shows the first allocation.
    state = SimpleNamespace(ledger=ledger(3, "d-1"), times_handed_out=lambda _owner: 2)
    naming = UserNaming(SimpleNamespace(), state, SimpleNamespace(name_pods=name_pods), 1.0)  # type: ignore[arg-type]  # what naming uses of them
    listing: Any = SimpleNamespace(uses=(USE,))

    await naming.name(listing)
    await naming.name(listing)
    state.ledger = ledger(5, "d-2")
    await naming.name(listing)
    await naming.name(listing)

    assert named == ["d-1 trainer", "d-2 trainer"]


async def test_naming_goes_on_when_the_allocation_is_gone_before_topology_fails_to_answer() -> None:
    """The loop waits for topology while the reconciliation finds the allocation gone.

    Then there is no answer: the loop goes on, and the next allocation is told.
    """
    asked, is_away = asyncio.Event(), asyncio.Event()
    named: list[str] = []

    async def name_pods(
        _op_id: str, _owner: Owner, *, decision_id: str, pods: tuple[Owner, ...], container: str
    ) -> None:
        assert container == USE.container
        if is_away.is_set():
            named.append(f"{decision_id} {pods[0].name}")
            return
        asked.set()
        await is_away.wait()
        raise PeerUnavailable("no answer")

    state = SimpleNamespace(ledger=ledger(3, "d-1"), times_handed_out=lambda _owner: 1)
    naming = UserNaming(SimpleNamespace(), state, SimpleNamespace(name_pods=name_pods), 1.0)  # type: ignore[arg-type]  # what naming uses of them
    listing: Any = SimpleNamespace(uses=(USE,))

    loop = asyncio.create_task(naming.name(listing))
    await asked.wait()
    state.ledger = Ledger(node="n1", epoch=1, sequence=4)
    await naming.name(listing)
    is_away.set()
    await loop
    state.ledger = ledger(5, "d-2")
    await naming.name(listing)

    assert named == ["d-2 trainer"]


class _Watched(Broadcast):
    """Notes when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = asyncio.Event()

    def ticket(self) -> Any:
        """Give a ticket that notes its wait."""
        ticket = super().ticket()

        async def wait() -> None:
            self.is_awaited.set()
            await ticket.wait()

        return SimpleNamespace(wait=wait)


async def test_naming_asks_kubelet_until_it_lists_the_pod_of_a_prepared_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when the claim is adopted once more, but not for one that is not prepared."""
    monkeypatch.setattr(user_naming, "_FIRST_LOOK_S", 0.0)
    claim = Owner(kind=OwnerKind.CLAIM, name="training", uid="u")
    pod = Owner(kind=OwnerKind.POD, name="trainer", uid="p")
    held = Allocation(owner=claim, is_prepared=True, decision_id="d-1", pods=(pod,))
    use = structs.replace(USE, resource="", claim_namespace="default", claim="training")
    lists: list[tuple[PodUse, ...]] = [(), (use,), (use,)]

    def holding(allocation: Allocation) -> None:
        state.ledger = Ledger(node="n1", epoch=1, sequence=3, allocations={claim.key: allocation})
        state.ledger_changed.announce()

    async def listing() -> Listing:
        return Listing(kubelet=(1, 1, 1), in_use={}, uses=lists.pop(0))

    async def name_pods(
        _op_id: str, owner: Owner, *, decision_id: str, pods: tuple[Owner, ...], container: str
    ) -> None:
        before = state.ledger.allocations[owner.key]
        assert (decision_id, pods) == (before.decision_id, (pod,))
        holding(structs.replace(before, container=container))

    state = SimpleNamespace(ledger=None, ledger_changed=_Watched())
    naming = UserNaming(SimpleNamespace(listing=listing), state, SimpleNamespace(name_pods=name_pods), 0.0)  # type: ignore[arg-type]  # what naming uses of them
    loop = asyncio.create_task(naming.run())
    named: list[tuple[str, int]] = []
    for allocation in (held, structs.replace(held, decision_id="d-2"), structs.replace(held, is_prepared=False)):
        holding(allocation)
        state.ledger_changed.is_awaited.clear()
        await state.ledger_changed.is_awaited.wait()
        named.append((state.ledger.allocations[claim.key].container, len(lists)))
    loop.cancel()

    assert named == [("main", 1), ("main", 0), ("", 0)]
