"""Shares and partitions from an inventory to an allocation: what a
driver says is what claims get.
"""

from __future__ import annotations

import msgspec
import pytest

from topobus.controller.state.inventory_slices import devices_of_class, slices_of_pool
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.values import Allocated, AllocationInput, DeviceId, Mode, Node, NoFit, Outcome, Usage
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.limits import check_slice
from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device import Device, Inventory
from topobus.values.quantity import Quantity
from unit.controller.allocation import claim, request, solve

NODE = "n1"
SLICES = 7


def _card(number: int) -> tuple[Device, ...]:
    """A card as a whole, and its partitions of 4, 3 and 3 of 7 slices."""
    name = f"gpu-{number}"

    def part(suffix: str, slices: int) -> Device:
        uses = (CounterUse(counter_set=name, counter="slices", amount=slices),)
        return Device(
            name=name + suffix,
            device_class="gpu",
            consumes=uses,
            partition_of=name if suffix else "",
            attributes={"slices": slices},
        )

    return (part("", SLICES), part("-part-a", 4), part("-part-b", 3), part("-part-c", 3))


def _partitioned(cards: int) -> Inventory:
    return Inventory(
        node=NODE,
        device_class="gpu",
        generation=1,
        devices=tuple(
            sorted((device for number in range(cards) for device in _card(number)), key=lambda device: device.name)
        ),
        counter_sets=tuple(
            CounterSet(name=f"gpu-{number}", counters={"slices": SLICES}) for number in sorted(range(cards), key=str)
        ),
    )


SHARED_NIC = Inventory(
    node=NODE,
    device_class="nic",
    generation=1,
    devices=(
        Device(
            name="nic-0",
            device_class="nic",
            capacity={"bandwidth": 10_000},
            allows_multiple=True,
            capacity_policies={"bandwidth": CapacityPolicy(default=1_000, minimum=1_000, step=1_000)},
        ),
    ),
)


def _slices(inventory: Inventory) -> tuple[Slice, ...]:
    return slices_of_pool(NODE, [devices_of_class(inventory)])


def _allocate(inventory: Inventory, *claims: object, usage: Usage | None = None) -> Outcome:
    return solve(
        AllocationInput(
            node=Node(NODE),
            claims=claims,  # type: ignore[arg-type]  # claims of the builders
            classes={inventory.device_class: built_in_class(inventory.device_class)},
            slices=_slices(inventory),
            usage=usage or Usage(),
            mode=Mode.COMPATIBLE,
        )
    )


def _wants(slices: int, name: str) -> object:
    return claim(request(where=[f'device.attributes["topobus.dev"].slices == {slices}']), name=name)


def _granted(outcome: Outcome) -> list[str]:
    assert isinstance(outcome, Allocated), outcome
    return [granted.device for result in outcome.results for granted in result.devices.results]


def test_slices_keep_every_limit_when_a_node_has_many_partitions() -> None:
    """Twenty cards: devices in slices of at most 64, counter sets in slices of their own of at most
    8, one count for all of them.
    """
    slices = _slices(_partitioned(20))

    assert [problem for resource_slice in slices for problem in check_slice(resource_slice.spec)] == []
    assert [(len(each.spec.devices), len(each.spec.shared_counters)) for each in slices] == [
        (64, 0),
        (16, 0),
        (0, 8),
        (0, 8),
        (0, 4),
    ]
    assert {each.spec.pool.resource_slice_count for each in slices} == {5}


def test_claims_share_a_card_when_their_partitions_fit() -> None:
    """A part of 4 and a part of 3 slices come from one card of 7.

    The next whole card is another one.
    """
    outcome = _allocate(_partitioned(2), _wants(4, "d/a"), _wants(3, "d/b"), _wants(7, "d/c"))

    assert _granted(outcome) == ["gpu-0-part-a", "gpu-0-part-b", "gpu-1"]


@pytest.mark.parametrize(
    ("held", "slices"),
    [
        pytest.param("gpu-0", 3, id="a part of a held card"),
        pytest.param("gpu-0-part-a", 7, id="a card with a held part"),
        pytest.param("gpu-0-part-a", 4, id="the same part"),
    ],
)
def test_claim_waits_when_what_is_held_leaves_too_little(held: str, slices: int) -> None:
    """A card and a part of it are never given at once, whichever was first."""
    usage = Usage({DeviceId("topobus.dev", NODE, held): "claim a/b"})

    assert isinstance(_allocate(_partitioned(1), _wants(slices, "d/a"), usage=usage), NoFit)


def test_claims_share_a_nic_until_its_capacity_is_spent() -> None:
    """Three claims get a share each, with a share id and the amount rounded up by the policy.

    The fourth waits.
    """
    asks = {"a": "1500", "b": "", "c": "6000", "d": "1500"}
    claims = [
        claim(
            request(device_class="nic", **({"capacity": {"requests": {"bandwidth": amount}}} if amount else {})),
            name=f"d/{name}",
        )
        for name, amount in asks.items()
    ]

    outcome = _allocate(SHARED_NIC, *claims[:3])

    assert isinstance(outcome, Allocated)
    granted = [device for result in outcome.results for device in result.devices.results]
    assert [(device.device, str(device.consumed_capacity["bandwidth"])) for device in granted] == [
        ("nic-0", "2k"),
        ("nic-0", "1k"),
        ("nic-0", "6k"),
    ]
    assert len({device.share_id for device in granted}) == 3
    assert isinstance(_allocate(SHARED_NIC, *claims), NoFit)
    used = Usage(consumed={DeviceId("topobus.dev", NODE, "nic-0"): {"bandwidth": Quantity.parse("9k")}})
    assert isinstance(_allocate(SHARED_NIC, claims[3], usage=used), NoFit)


def test_old_inventory_shows_nothing_of_shares() -> None:
    """An inventory of a service that knows no shares is shown as before."""
    plain = msgspec.structs.replace(SHARED_NIC, devices=(Device(name="nic-0", device_class="nic"),))

    (resource_slice,) = _slices(plain)

    assert b"ounter" not in msgspec.json.encode(resource_slice.spec)
    assert b"allowMultiple" not in msgspec.json.encode(resource_slice.spec)
