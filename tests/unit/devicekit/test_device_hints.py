"""Which hints a device service gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.toy_driver import ToyDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.host import hinting_driver, hints_of
from topobus.values.device import Device
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, NumaNode


class _Opinionated(ToyDriver):
    """A driver with hints of its own."""

    def hints(
        self, machine: Machine, devices: Sequence[Device], count: int, available: Sequence[str]
    ) -> tuple[Hint, ...] | None:
        """Prefer node 1, always."""
        return (Hint(NodeSet(1), preferred=True),)


_MACHINE = Machine(
    node="n", numa_nodes=tuple(NumaNode(id=ids, cpus=CpuSet(ids), memory_bytes=1) for ids in (0, 1)), cpus=()
)


def _device(name: str, node: int | None, driver: str = "toy") -> Device:
    return Device(name=name, device_class="gpu", driver=driver, numa_nodes=None if node is None else NodeSet(node))


def test_hints_follow_kubelets_rules_when_no_driver_has_an_opinion() -> None:
    """One free device on node 1 and none on node 0 gives node 1 alone, and both together."""
    hints = hints_of(_MACHINE, [_device("a", 0), _device("b", 1)], ["b"], 1)

    assert hints == (Hint(NodeSet(1), preferred=True), Hint(NodeSet(0, 1), preferred=False))


def test_hints_ignore_names_that_are_no_devices_when_asked() -> None:
    """An unknown name is no device: with it alone nothing can be served."""
    assert hints_of(_MACHINE, [_device("a", 0)], ["ghost"], 1) == ()


def test_hints_are_no_opinion_when_no_device_tells_a_node() -> None:
    """Devices without a NUMA node have no opinion, which is not the same as node 0."""
    assert hints_of(_MACHINE, [_device("a", None)], ["a"], 1) is None


@pytest.mark.parametrize(
    ("devices", "drivers", "has_opinion"),
    [
        pytest.param(
            [_device("a", 0, "own")], [_Opinionated("own"), ToyDriver()], True, id="the only driver with devices"
        ),
        pytest.param(
            [_device("a", 0, "toy")], [_Opinionated("own"), ToyDriver()], False, id="another driver has the devices"
        ),
        pytest.param(
            [_device("a", 0, "own"), _device("b", 0, "toy")],
            [_Opinionated("own"), ToyDriver()],
            False,
            id="two drivers have some",
        ),
        pytest.param([], [_Opinionated("own")], False, id="no devices"),
    ],
)
def test_own_hints_speak_when_one_driver_has_all_devices(
    devices: list[Device], drivers: list[DeviceDriver], *, has_opinion: bool
) -> None:
    """A driver's own hints count only when all devices of the class are its own."""
    assert (hinting_driver(drivers, devices) is not None) is has_opinion
