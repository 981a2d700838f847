"""Polls the devices of one driver: calls `discover` at each rescan and after the machine changed,
and `observe` at each poll.

`view` is the driver's last answer. A driver that hangs or fails gives a view with a silence. As
long as the answers do not change, the driver's own thread repeats the polls (`watch`), and the
event loop is woken for changes only. A counter shows its rise at one look alone, so the observations
of a look stay in the shown answer until an inventory with them was published, and for at least 5 s,
which those who look at inventories from time to time need.

A driver that measures gives its readings after such a look, each 10 s, in the same thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import msgspec

from topobus.devicekit.host.isolation import DriverError, IsolatedDriver
from topobus.devicekit.host.metrics import DeviceMetrics
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import DeviceServiceSettings
from topobus.engine.health.health_machine import silence
from topobus.engine.health.inventory_merge import DriverView
from topobus.process.clock import Clock, is_real, until_tick
from topobus.process.logging import get_logger
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.machine import Machine
from topobus.values.pci import PciAddress
from topobus.values.readings import Quantity, Reading

__all__ = ["READ_EVERY_S", "DriverPoller"]

T = TypeVar("T")

# The most looks in a row during which a device went to VFIO or came back. Each such change takes
# longer than a look.
_MOST_LOOKS = 8
# Looks in a row that differ and that are not published while NATS is away: a minute's. The oldest
# is forgotten first.
_LOOKS = 64
# Seconds for which evidence is shown at least. A round of repairs reads the inventories of all nodes,
# a second or two after the round before. Where operators want a shorter hold they get it.
_SHOWN_S = 5.0
# Seconds between two readings of what people graph: Prometheus asks each 15 or 30 s, and a reading
# of eight GPUs takes longer than a look at their health.
READ_EVERY_S = 10.0


_Kind: TypeAlias = tuple[Dimension, HealthState, str]


class DriverPoller:
    """Polls one driver. `metrics` counts calls that failed or hung."""

    def __init__(
        self,
        isolated: IsolatedDriver,
        tree: Tree,
        settings: DeviceServiceSettings,
        clock: Clock,
        metrics: DeviceMetrics,
        journal: Journal,
    ) -> None:
        """Keep the collaborators. `journal` has the devices that are in a sandbox or that VFIO has, as
        they were before; it is asked in the driver's thread.
        """
        self.view = DriverView()
        self._looks: deque[tuple[float, Mapping[str, Sequence[Observation]]]] = deque(maxlen=_LOOKS)
        """Until when to show what a look saw that the look before did not, written in the driver's
        thread. The result of a look that was interrupted, or took too long, arrives only here."""
        self._last_look: Mapping[str, Sequence[Observation]] = {}
        self._earlier: dict[str, dict[_Kind, tuple[float, Observation]]] = {}
        """By device: observations of earlier looks that are still to be shown, and until when."""
        self.generation = 0
        """Generation of the machine on which the driver last looked for devices."""
        self._isolated = isolated
        self._tree = tree
        self._poll_s = settings.health.poll_s
        self._shown_s = min(_SHOWN_S, settings.health.hold_s)
        self._rescan_s = settings.hardware.rescan_s
        self._clock = clock
        self._metrics = metrics
        self._journal = journal
        self._switched: frozenset[PciAddress] = frozenset()
        """Functions that VFIO has, or had in this life: the machine that discovery publishes may be
        older than their driver."""
        self._due_at_s = 0.0
        self._measures = isolated.driver.capabilities.measures
        self._measured: Mapping[str, Sequence[Reading]] = {}
        self._measure_at_s = 0.0
        self._measure_fault = ""
        self._waiting: list[asyncio.Future[None]] = []

    async def poll(self, machine: Machine, pcis: Collection[PciAddress]) -> None:
        """Poll once.

        `pcis`: the functions of this driver's known devices, which may have left the bus.
        """
        is_due = self._is_due(machine, self._clock.monotonic())
        if is_due:
            self._note_due(machine, self._clock.monotonic())
        before = self.view
        verb = "discover"
        view = before
        try:
            if is_due or before.devices is None:
                waiting, self._waiting = self._waiting, []
                view = await self._isolated.call(verb, lambda: self._discover(machine, pcis))
                for waiter in waiting:
                    if not waiter.done():
                        waiter.set_result(None)
            verb = "observe"
            present = view.devices or ()
            observations: Mapping[str, Sequence[Observation]] = {}
            if present:
                observations = await self._isolated.call(verb, lambda: self._observe(present))
            if self._is_measured_now():
                verb = "measure"
                await self._isolated.call(verb, lambda: self._measure(present))
        except DriverError as err:
            self._note_silence(verb, err, view)
            return
        if before.silence is not None:
            get_logger().info("driver.recovered", driver=self._isolated.name)
        self.view = replace(view, observations=observations, silence=None)

    async def watch(self, machine: Machine, pcis: Collection[PciAddress]) -> None:
        """Poll in the driver's thread, at the same times as `poll` would, until something changes,
        or until `interrupt`.

        Returns at once where the thread cannot do that (the clock is not real time, or the driver
        does not answer). The caller then continues with `poll` every `pause_s`.
        """
        if not is_real(self._clock) or self.view.silence is not None:
            return
        last_view = discovered = self.view
        verb = "observe"

        def poll(begin_method: Callable[[], None]) -> DriverView | None:
            nonlocal verb, discovered
            view = last_view
            now_s = self._clock.monotonic()
            if self._is_due(machine, now_s):
                self._note_due(machine, now_s)
                verb = "discover"
                view = discovered = self._discover(machine, pcis)
                begin_method()
            verb = "observe"
            present = view.devices or ()
            observations = self._observe(present) if present else {}
            if self._is_measured_now():
                begin_method()
                verb = "measure"
                self._measure(present)
            view = replace(view, observations=observations, silence=None)
            return None if view == last_view else view

        try:
            view = await self._isolated.watch(poll, self.pause_s)
        except DriverError as err:
            self._note_silence(verb, err, discovered)
        else:
            self.view = view or last_view

    @property
    def readings(self) -> Mapping[str, Sequence[Reading]]:
        """Return the last readings by the device's name. None of a driver that does not answer."""
        return self._measured if self.view.silence is None else {}

    def shown(self) -> DriverView:
        """Return the last answer, together with earlier observations that are still to be shown."""
        while self._looks:
            until_s, fresh = self._looks.popleft()
            for name, seen in fresh.items():
                self._earlier.setdefault(name, {}).update({_kind(each): (until_s, each) for each in seen})
        observations = {name: tuple(seen) for name, seen in self.view.observations.items()}
        for name, earlier in self._earlier.items():
            present = {_kind(observation) for observation in observations.get(name, ())}
            ended = tuple(observation for kind, (_, observation) in earlier.items() if kind not in present)
            if ended:
                observations[name] = (*observations.get(name, ()), *ended)
        return replace(self.view, observations=observations) if self._earlier else self.view

    def note_published(self, view: DriverView) -> None:
        """Note that an inventory was published with all that `shown` returned, or more."""
        now_s = self._clock.monotonic()
        left: dict[str, dict[_Kind, tuple[float, Observation]]] = {}
        for name, earlier in self._earlier.items():
            published = {_kind(observation) for observation in view.observations.get(name, ())}
            if kept := {kind: due for kind, due in earlier.items() if kind not in published or now_s < due[0]}:
                left[name] = kept
        self._earlier = left

    def interrupt(self) -> None:
        """End the present `watch`."""
        self._isolated.interrupt()

    def look_again(self) -> None:
        """Make the next poll look for devices again, and begin soon."""
        self._due_at_s = 0.0
        self._isolated.interrupt()

    async def looked_again(self) -> None:
        """Make the next poll look for devices again, and return when it has."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.look_again()
        await waiter

    def pause_s(self) -> float:
        """Compute the seconds until the next poll. With no device there is nothing to observe, so
        the pause lasts until the next rescan.
        """
        now_s = self._clock.monotonic()
        has_devices = self.view.devices != () or self.view.silence is not None
        return (
            until_tick(now_s, self._poll_s)
            if has_devices
            else max(until_tick(now_s, self._poll_s), self._due_at_s - now_s)
        )

    def _is_due(self, machine: Machine, now_s: float) -> bool:
        # Looks come at ticks: half a pause early counts as due. Otherwise a rescan that ended a
        # little after its tick would wait for one tick more.
        return machine.generation != self.generation or now_s >= self._due_at_s - self._poll_s / 2

    def _note_due(self, machine: Machine, now_s: float) -> None:
        self.generation = machine.generation
        self._due_at_s = now_s + self._rescan_s

    def _note_silence(self, verb: str, err: DriverError, discovered: DriverView) -> None:
        before = self.view
        outcome = err.code.removeprefix("driver-")
        self._metrics.count_failure(self._isolated.name, verb, outcome)
        if before.silence is None:
            get_logger().warning("driver.silent", driver=self._isolated.name, verb=verb, outcome=outcome, why=str(err))
        # The first observation stays as long as the driver is silent: the inventory must not change
        # with each new attempt.
        observation = (
            before.silence
            if before.silence is not None and before.silence.reason == err.code
            else silence(err.code, err.message)
        )
        self.view = replace(discovered, observations=before.observations, silence=observation, warnings=before.warnings)

    def _discover(self, machine: Machine, pcis: Collection[PciAddress]) -> DriverView:
        """Find the driver's devices, in its thread.

        A device that VFIO has is expected to be absent, so it changes nothing.
        """
        view, passed = self._steadily(lambda: self._look(machine, pcis))
        addresses = {str(device.pci) for device in passed.values()}
        return replace(
            view,
            devices=tuple(device for device in view.devices or () if device.name not in passed),
            away={**view.away, **passed},
            kept=tuple(function for function in view.kept if str(function.pci) not in addresses),
            warnings=tuple(
                warning
                for warning in view.warnings
                if not any(
                    warning.startswith((f"{address} is not offered", f"{address} is not cut on demand"))
                    for address in addresses
                )
            ),
        )

    def _look(self, machine: Machine, pcis: Collection[PciAddress]) -> DriverView:
        driver = self._isolated.driver
        # Before the look: a device that returns meanwhile (it cannot, in this thread) would count
        # as away once more, never as gone.
        away = self._out_of_sight()
        # A device that leaves or comes back during the look is not found by it, nor is one that
        # this copy of the machine lacks: no driver is at fault.
        known_functions = {pci_device.address for pci_device in machine.pci_devices}
        off_bus = self._off_bus(pcis) | (frozenset(pcis) - known_functions)
        discovery = driver.discover(self._tree, self._with_present_drivers(machine))
        return DriverView(
            devices=tuple(discovery.devices),
            counter_sets=tuple(discovery.counter_sets),
            warnings=tuple(discovery.warnings),
            kept=tuple(discovery.kept),
            uncut=discovery.uncut,
            seen=frozenset(device.pci for device in discovery.devices if device.pci is not None),
            off_bus=off_bus | self._off_bus(pcis),
            away=away,
        )

    def _with_present_drivers(self, machine: Machine) -> Machine:
        """Return the machine with the present kernel drivers of switched functions."""
        self._switched |= {device.pci for device in self._journal.passed().devices.values() if device.pci is not None}
        if not self._switched:
            return machine
        return msgspec.structs.replace(
            machine,
            pci_devices=tuple(
                msgspec.structs.replace(function, driver=self._tree.link_name(f"{pci_folder(function.address)}/driver"))
                if function.address in self._switched
                else function
                for function in machine.pci_devices
            ),
        )

    def _steadily(self, look: Callable[[], T]) -> tuple[T, Mapping[str, Device]]:
        """Look until no device went to VFIO or came back meanwhile.

        Return what was seen, and the devices that VFIO has, as they were before.
        """
        for _ in range(_MOST_LOOKS - 1):
            before = self._journal.passed()
            seen = look()
            if self._journal.passed().turn == before.turn:
                return seen, before.devices
        before = self._journal.passed()
        return look(), {**before.devices, **self._journal.passed().devices}

    def _off_bus(self, pcis: Collection[PciAddress]) -> frozenset[PciAddress]:
        return frozenset(pci_address for pci_address in pcis if not self._tree.exists(pci_folder(pci_address)))

    def _observe(self, present: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look at the devices' health, in the driver's thread.

        A device that was moved into a sandbox is expected to be absent, so its absence is not
        reported.
        """
        away = self._out_of_sight()
        seen, passed = self._steadily(lambda: self._isolated.driver.observe(self._tree, present))
        observations = {
            name: [part for part in observations if part.reason != "device-gone"] if name in away else observations
            for name, observations in seen.items()
            if name not in passed
        }
        if observations != self._last_look:
            last = self._last_look
            fresh = {
                name: [each for each in seen if each not in last.get(name, ())] for name, seen in observations.items()
            }
            self._looks.append((self._clock.monotonic() + self._shown_s, fresh))
            self._last_look = observations
        return observations

    def _is_measured_now(self) -> bool:
        return self._measures and self._clock.monotonic() >= self._measure_at_s - self._poll_s / 2

    def _measure(self, present: Sequence[Device]) -> None:
        """Read what people graph, in the driver's thread.

        A driver that fails at it has no readings until the next time, and its devices stay as they
        are.
        """
        self._measure_at_s = self._clock.monotonic() + READ_EVERY_S
        fault = ""
        try:
            self._measured = _copied(self._isolated.driver.measure(self._tree, present)) if present else {}
        except Exception as err:  # noqa: BLE001 - boundary: a vendor's module may fail in any way
            self._measured, fault = {}, str(err) or repr(err)
            self._metrics.count_failure(self._isolated.name, "measure", "failed")
        if fault and fault != self._measure_fault:
            get_logger().warning("readings.missing", driver=self._isolated.name, why=fault)
        self._measure_fault = fault

    def _out_of_sight(self) -> dict[str, Device]:
        """Return the devices in a sandbox that leave the host for it.

        A device that several pods may hold stays, and gives each a part.
        """
        return {name: device for name, device in self._journal.away().items() if not device.allows_multiple}


def _copied(measured: Mapping[str, Sequence[Reading]]) -> dict[str, tuple[Reading, ...]]:
    """Copy a driver's answer: a scrape has no boundary of its own against one that is no reading, or
    that the driver changes later.

    Errors: raises anything for such an answer.
    """
    return {
        name: tuple(
            Reading(quantity=Quantity(reading.quantity), value=float(reading.value), part=str(reading.part))
            for reading in readings
        )
        for name, readings in measured.items()
    }


def _kind(observation: Observation) -> _Kind:
    return observation.dimension, observation.state, observation.reason
