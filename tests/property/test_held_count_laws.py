"""The counts of held devices, over histories of ledgers: always what a count of the last ledger
gives.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.engine.ledger.holdings import next_counts
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.request import Owner, OwnerKind

OWNERS = [Owner(kind=OwnerKind.CLAIM, namespace="d", name=f"claim-{number}", uid="u") for number in range(4)]
NAMES = st.frozensets(st.sampled_from(["a", "b", "c"]), min_size=1).map(lambda names: tuple(sorted(names)))
HOLDINGS = st.builds(
    Holding,
    devices=st.dictionaries(st.sampled_from(["gpu", "nic"]), NAMES),
    cpus=st.frozensets(st.integers(0, 5)).map(CpuSet.of),
)
CHANGES = st.dictionaries(st.sampled_from(OWNERS), st.none() | st.lists(HOLDINGS, max_size=2).map(tuple), max_size=3)


@given(st.lists(CHANGES, min_size=1, max_size=6))
@settings(max_examples=examples(300))
def test_counts_are_those_of_the_last_ledger_when_each_change_was_followed(
    history: list[dict[Owner, tuple[Holding, ...] | None]],
) -> None:
    """Nothing is counted twice or forgotten, and a class of which nothing is held is not listed."""
    ledger, counts = Holders(node="n"), dict[str, int]()
    for changes in history:
        held = dict(ledger.allocations)
        for owner, holdings in changes.items():
            held.pop(owner.key, None)
            if holdings is not None:
                held[owner.key] = Allocation(owner=owner, holdings=holdings)
        after = Holders(node="n", allocations=held)
        counts = next_counts(counts, ledger, after)
        ledger = after

    holdings_now = [holding for allocation in ledger.allocations.values() for holding in allocation.holdings]
    expected = {name: sum(len(holding.devices.get(name, ())) for holding in holdings_now) for name in ("gpu", "nic")}
    expected["cpu"] = sum(len(holding.cpus) for holding in holdings_now)
    assert counts == {name: count for name, count in expected.items() if count}
