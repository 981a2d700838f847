"""Which devices of a class are spares: how many, which, and which one is released when a device gets
sick.
"""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from support.alignment_nodes import dgx
from topobus.engine.alignment.devices.proximity import socket_of_nodes
from topobus.engine.alignment.devices.spare_choice import SpareSettings, odd_spares, with_spares
from topobus.values.counters import CounterUse
from topobus.values.device import Device, DeviceRole
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.maintenance import DeviceVerb, Maintenance

_SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="fell-off-bus"),),
)
_MAINTAINED = Maintenance(verb=DeviceVerb.MAINTAIN, why="fan", who="ada")
# Eight GPUs: four on each NUMA node, two under each switch.
_GPUS = dgx().devices["gpu"]
_SOCKETS = socket_of_nodes(dgx().cores)
_Per = Literal["node", "numa", "switch"]


def _step(
    devices: tuple[Device, ...],
    *,
    sick: tuple[int, ...] = (),
    held: tuple[int, ...] | None = (),
    count: int = 1,
    per: _Per = "node",
) -> tuple[Device, ...]:
    """Take one step: of the devices as they were, exactly these are sick."""
    now = tuple(
        structs.replace(device, health=_SICK if place in sick else DeviceHealth(), is_spare=False)
        for place, device in enumerate(devices)
    )
    return with_spares(
        now,
        devices,
        held=None if held is None else {devices[place].name for place in held},
        settings=SpareSettings(count=count, per=per),
        sockets=_SOCKETS,
    )


def _spares(devices: tuple[Device, ...]) -> str:
    return ",".join(device.name.removeprefix("gpu-") for device in devices if device.is_spare)


@pytest.mark.parametrize(
    ("count", "per", "spares"),
    [
        pytest.param(0, "node", "", id="none"),
        pytest.param(1, "node", "7", id="one"),
        pytest.param(3, "node", "5,6,7", id="three"),
        pytest.param(1, "numa", "3,7", id="one-a-numa-node"),
        pytest.param(1, "switch", "1,3,5,7", id="one-a-switch"),
        pytest.param(5, "switch", "1,3,5,7", id="never-all-of-a-switch"),
    ],
)
def test_last_devices_of_a_group_are_spares(count: int, per: _Per, spares: str) -> None:
    """So many of each group, from the last by name, and one at least is offered."""
    assert _spares(_step(_GPUS, count=count, per=per)) == spares


def test_nearest_spare_is_released_when_a_device_gets_sick() -> None:
    """Of spares on both sockets first the one under the sick device's switch, then on its socket; the
    third fault finds none left. A device that is well again is no spare while it is held.
    """
    three = tuple(structs.replace(device, is_spare=place in (1, 2, 7)) for place, device in enumerate(_GPUS))

    first = _step(three, sick=(3,), count=3)
    second = _step(first, sick=(3, 0), count=3)
    third = _step(second, sick=(3, 0, 6), count=3)
    again = _step(third, sick=(0, 6), held=(1, 2, 3, 7), count=3)
    free = _step(again, sick=(0, 6), held=(1, 2, 7), count=3)

    assert [_spares(step) for step in (first, second, third, again, free)] == ["1,7", "7", "", "5", "5"]


def test_operators_maintenance_releases_a_spare() -> None:
    """A device that is withheld by an operator counts as a sick one."""
    before = _step(_GPUS)

    now = (structs.replace(before[0], maintenance=_MAINTAINED), *before[1:])

    assert _spares(before) == "7"
    assert _spares(with_spares(now, before, held=(), settings=SpareSettings(count=1), sockets=_SOCKETS)) == ""


def test_sick_spare_is_not_replaced() -> None:
    """It is the one that is sick: as many are offered as before."""
    assert _spares(_step(_step(_GPUS), sick=(7,))) == ""


def test_device_becomes_no_spare_while_its_owner_is_unknown() -> None:
    """Before the ledger was read only earlier spares stay, and sick ones count all the same."""
    before = _step(_GPUS)

    assert _spares(_step(_GPUS, held=None)) == ""
    assert _spares(_step(before, held=None)) == "7"
    assert _spares(_step(before, held=None, sick=(4,))) == ""


_OF_ANOTHER_KIND = {
    "model": {"model": "H200"},
    "pool": {"pool": "gpu-lab"},
    "role": {"role": DeviceRole.PASSTHROUGH},
}
_NO_WHOLE_ONE = {
    "virtual-function": {"parent": "gpu-8"},
    "partition": {"partition_of": "gpu-8"},
    "cut-on-demand": {"consumes": (CounterUse(counter_set="gpu-8", counter="parts", amount=1),)},
    "shared": {"allows_multiple": True},
    "management": {"role": DeviceRole.MANAGEMENT},
}


@pytest.mark.parametrize("fields", _OF_ANOTHER_KIND.values(), ids=_OF_ANOTHER_KIND)
def test_device_of_another_kind_is_in_a_group_of_its_own(fields: dict[str, object]) -> None:
    """It could not replace the others, and is alone."""
    assert _spares(_step((*_GPUS[:2], structs.replace(_GPUS[2], **fields)))) == "1"


@pytest.mark.parametrize("fields", _NO_WHOLE_ONE.values(), ids=_NO_WHOLE_ONE)
def test_device_is_no_spare_when_it_is_not_a_whole_one_for_workloads(fields: dict[str, object]) -> None:
    """Two equal ones are a part of something, shared, or the node's own."""
    others = tuple(structs.replace(device, **fields) for device in _GPUS[2:4])

    assert _spares(_step((*_GPUS[:2], *others))) == "1"


@pytest.mark.parametrize(
    ("devices", "per", "warnings"),
    [
        pytest.param(_GPUS, "switch", (), id="some"),
        pytest.param((), "node", (), id="no-device"),
        pytest.param(
            _GPUS[::4],
            "numa",
            ("spares: no two whole devices of a NUMA node are equal, so none is withheld",),
            id="alone",
        ),
    ],
)
def test_warning_says_that_no_device_can_be_a_spare(
    devices: tuple[Device, ...], per: _Per, warnings: tuple[str, ...]
) -> None:
    """Only where there are devices of the class, for on other nodes that is normal."""
    assert odd_spares(devices, SpareSettings(count=1, per=per)) == warnings
    assert odd_spares(devices, SpareSettings(per=per)) == ()


_PLACES = st.sets(st.integers(0, 7))


@given(
    count=st.integers(0, 9),
    per=st.sampled_from(["node", "numa", "switch"]),
    steps=st.lists(st.tuples(_PLACES, _PLACES), min_size=1, max_size=6),
)
def test_spares_follow_the_rule_of_numbers_after_any_history(
    count: int, per: _Per, steps: list[tuple[set[int], set[int]]]
) -> None:
    """No spare is sick or held. Of each group there are as many as are wanted less the sick ones, or
    all that are free. A repeated step changes nothing, and a spare stays one as long as the same
    number is wanted.
    """
    devices = _GPUS
    size = {"node": 8, "numa": 4, "switch": 2}[per]
    for sick, held in steps:
        before, devices = devices, _step(devices, sick=tuple(sick), held=tuple(held), count=count, per=per)

        now = {place for place, device in enumerate(devices) if device.is_spare}
        assert not now & (sick | held)
        assert devices == _step(devices, sick=tuple(sick), held=tuple(held), count=count, per=per)
        for start in range(0, 8, size):
            group = set(range(start, start + size))
            wanted = max(0, min(count, size - 1) - len(group & sick))
            assert len(now & group) == min(wanted, len(group - sick - held))
            earlier = {place for place in group if before[place].is_spare} - sick - held
            assert earlier <= now or now & group <= earlier
