"""CPUs on a node whose setting `cpus.groups` was changed: those that were listed one by one can be
had by their group at once.
"""

from __future__ import annotations

import pytest

from support.alignment_nodes import dgx_facts
from topobus.engine.alignment.planning.node_view import node_view
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet
from topobus.values.view import AlignmentOptions


@pytest.mark.parametrize(
    ("reason", "has_group", "wanted"),
    [
        pytest.param("device-gone", True, CpuSet(), id="in a group now"),
        pytest.param("device-gone", False, CpuSet.of([3]), id="listed no more"),
        pytest.param("core-sick", True, CpuSet.of([3]), id="sick in a group"),
    ],
)
def test_cpu_is_unhealthy_unless_it_only_moved_into_a_group(reason: str, has_group: bool, wanted: CpuSet) -> None:
    """Its own device is gone, and stays in the inventory for a while.

    The group's says that the CPU is there.
    """
    machine, _ = dgx_facts()
    condition = Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason=reason)
    old = Device(
        name="cpu-3",
        device_class="cpu",
        cpu=3,
        health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(condition,)),
    )
    group = Device(name="cpu-machine", device_class="cpu", near_cpus=CpuSet.parse("0-7"), allows_multiple=True)
    inventory = Inventory(
        node=machine.node, device_class="cpu", generation=1, devices=(old, group) if has_group else (old,)
    )

    view = node_view(machine, {"cpu": inventory}, None, AlignmentOptions(), CpuSet())

    assert view.unhealthy_cpus == wanted
