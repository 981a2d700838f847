"""A driver of made-up hardware that is shared and cut up: a card with partitions, a function with
parts, and a device that several claims may have.

It is an example of all that a driver reports of shares and partitions, and replaces one in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.sysfs.tree import Tree
from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.health import Observation
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal

__all__ = ["CardDriver"]

_GIB = 1 << 30


class CardDriver(DeviceDriver):
    """Finds one card of 7 slices and 80 GiB with its partitions (`profiles`: slices of each), one
    function with `parts`, and one shared port.
    """

    name = "card"

    def __init__(self, device_class: str = "gpu", *, profiles: Sequence[int] = (4, 3, 3), parts: int = 2) -> None:
        self.device_class = device_class
        self.profiles = tuple(profiles)
        self.parts = parts

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Describe the present hardware."""
        card, function, port = (f"{self.device_class}-{part}-0" for part in ("card", "function", "port"))
        shared = Device(
            name=port,
            device_class=self.device_class,
            allows_multiple=True,
            capacity={"bandwidth": 10_000},
            capacity_policies={"bandwidth": CapacityPolicy(default=1_000, minimum=1_000, step=1_000)},
        )
        partitions = [
            self._part(f"{card}-{slices}-{index}", slices, card) for index, slices in enumerate(self.profiles)
        ]
        functions = [Device(name=function, device_class=self.device_class)] if self.parts else []
        # No counters of its own: any number of the parts at once, and never beside the function.
        parts = [
            Device(name=f"{function}-{index}", device_class=self.device_class, partition_of=function)
            for index in range(self.parts)
        ]
        return Discovery(
            devices=(self._part(card, 7), *partitions, *functions, *parts, shared),
            counter_sets=(CounterSet(name=card, counters={"slices": 7, "memory": 80 * _GIB}),),
        )

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Find nothing wrong."""
        return {}

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Return one variable for each device."""
        return {
            device.name: ContainerEdits(env={f"CARD_{device.name.upper().replace('-', '_')}": "1"})
            for device in devices
        }

    def _part(self, name: str, slices: int, partition_of: str = "") -> Device:
        amounts = {"slices": slices, "memory": slices * 80 * _GIB // 7 // _GIB * _GIB if partition_of else 80 * _GIB}
        return Device(
            name=name,
            device_class=self.device_class,
            partition_of=partition_of,
            consumes=tuple(
                CounterUse(counter_set=partition_of or name, counter=counter, amount=amount)
                for counter, amount in amounts.items()
            ),
            capacity={"memory": amounts["memory"]},
        )
