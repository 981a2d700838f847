"""Random histories of a small fleet under a policy of repairs: faults, owners, persons, pauses, and
controllers that plan on the same document, die, or never hear an answer.

The device services' own rules decide what an operation does. An assertion fails where a budget is
exceeded, a protected device is taken, a person is overruled, or a person is called twice.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from msgspec import structs

from topobus.devicekit.maintenance.maintenance import changed_by, fault_of_expectation, performed, with_operation
from topobus.engine.repair.fleet import Fleet, withholds
from topobus.engine.repair.plan import is_paused, operations, plan
from topobus.formats.messages.messages import RepairState
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated, OperateRequest, PerformRequest
from topobus.values.device import Device, Inventory
from topobus.values.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb, Maintenance
from topobus.values.outcome import Refusal, refuse
from topobus.values.pools import Condition as Match
from topobus.values.repair import (
    REPAIR_POLICY,
    Place,
    Protected,
    RepairEnd,
    RepairPause,
    RepairPolicy,
    RepairRuleSettings,
)
from topobus.values.request import Owner, OwnerKind

__all__ = ["POLICY", "RepairHistory"]

NODES = ("n1", "n2")
NAMES = ("gpu-0", "gpu-1", "gpu-2")
PLACES: tuple[Place, ...] = tuple((node, "gpu", name) for node in NODES for name in NAMES)
HOUR_S = 3600.0
POLICY = RepairPolicy(
    rules=(
        RepairRuleSettings(
            name="lost",
            device_class="gpu",
            reasons=("gpu-lost",),
            steps=("maintain", "drain", "wait-idle", "reset", "forgive", "wait-healthy", "return"),
            tries=2,
            grace_s=60.0,
            idle_within_s=900.0,
            within_s=600.0,
            hold_s=30.0,
        ),
        RepairRuleSettings(name="xid", device_class="gpu", reasons=("xid",), steps=("maintain",)),
        RepairRuleSettings(
            name="hot", device_class="gpu", reasons=("thermal-slowdown",), steps=("drain", "wait-healthy", "return")
        ),
    ),
    at_once=3,
    at_once_per_node=2,
    per_hour=5,
    protect=(Protected(device_class="gpu", where=(Match(field="name", one_of=("gpu-0", "gpu-1")),), keep=1),),
)
_OWNER = Owner(kind=OwnerKind.POD, name="trainer", uid="u")
_FAULTS = (
    ("gpu-lost", HealthState.UNHEALTHY),
    ("xid", HealthState.UNHEALTHY),
    ("thermal-slowdown", HealthState.DEGRADED),
    ("row-remap-failed", HealthState.UNHEALTHY),
)


class RepairHistory:
    """A fleet, its document of repairs, and what was seen of both."""

    def __init__(self, random: Random, policy: RepairPolicy = POLICY) -> None:
        self._random = random
        self.now_s = 1_000_000.0
        self._policy = policy
        self.document = RepairState()
        self.ends: Counter[RepairEnd] = Counter()
        self._devices = {place: Device(name=place[2], device_class="gpu") for place in PLACES}
        self._maintenances = {node: ClassMaintenance(node=node, device_class="gpu") for node in NODES}
        self._held: set[Place] = set()
        self._calls: Counter[tuple[Place, tuple[str, ...]]] = Counter()
        self._persons = 0

    @property
    def fleet(self) -> Fleet:
        """The copies of a controller that has read everything."""
        inventories = {
            (node, "gpu"): Inventory(
                node=node,
                device_class="gpu",
                generation=1,
                devices=tuple(
                    structs.replace(self._devices[place], maintenance=self._in_force(place))
                    for place in PLACES
                    if place[0] == node
                ),
            )
            for node in NODES
        }
        ledgers = {node: Ledger(node=node, allocations=self._allocations(node)) for node in NODES}
        maintenances = {(node, "gpu"): maintenance for node, maintenance in self._maintenances.items()}
        return Fleet(inventories, ledgers, maintenances)

    def act(self) -> None:
        """Let something happen."""
        place = self._random.choice(PLACES)
        act = self._random.choice(
            ("fault", "fault", "heal", "hold", "release", "person", "pause", "round", "round", "round", "round", "wait")
        )
        getattr(self, f"_{act}")(place)

    def settle(self) -> None:
        """Let time pass without any further trouble."""
        self._resume()
        self._held.clear()
        for _ in range(60):
            before = self.document
            self.now_s += 240.0
            self.round(is_mortal=False)
            if not self.document.under_way and self.document == before:
                break

    def _fault(self, place: Place) -> None:
        reason, state = self._random.choice(_FAULTS)
        conditions = {each.reason: each for each in self._devices[place].health.conditions}
        conditions[reason] = Condition(
            dimension=Dimension.COMPUTE, state=state, reason=reason, is_sticky=self._random.random() < 0.5
        )
        self._put_conditions(place, conditions.values())

    def _heal(self, place: Place) -> None:
        self._put_conditions(place, [each for each in self._devices[place].health.conditions if each.is_sticky])

    def _put_conditions(self, place: Place, conditions: object) -> None:
        listed = tuple(conditions)  # type: ignore[call-overload] # of conditions
        unhealthy = any(each.state is HealthState.UNHEALTHY for each in listed)
        state = HealthState.UNHEALTHY if unhealthy else HealthState.DEGRADED
        health = DeviceHealth(state=state, conditions=listed) if listed else HEALTHY
        self._devices[place] = structs.replace(self._devices[place], health=health)

    def _hold(self, place: Place) -> None:
        if self._devices[place].health.is_allocatable and self._in_force(place) is None:
            self._held.add(place)

    def _release(self, place: Place) -> None:
        self._held.discard(place)

    def _wait(self, _: Place) -> None:
        self.now_s += self._random.choice((1.0, 30.0, 120.0, 700.0, 3000.0))

    def _pause(self, _: Place) -> None:
        if is_paused(self.document, self.now_s) or self._random.random() < 0.5:
            self._resume()
        else:
            until_s = self._random.choice((None, self.now_s + 600.0))
            self.document = structs.replace(
                self.document, pause=RepairPause(who="ada", since_s=self.now_s, until_s=until_s)
            )

    def _resume(self) -> None:
        pause = self.document.pause
        if pause is not None and pause.holds_at(self.now_s):
            self.document = structs.replace(self.document, pause=structs.replace(pause, until_s=self.now_s))

    def _person(self, place: Place) -> None:
        """Let a person work on a device, whom no repair may overrule from then on."""
        self._persons += 1
        verb = self._random.choice((DeviceVerb.MAINTAIN, DeviceVerb.EXCLUDE, DeviceVerb.FORGIVE, DeviceVerb.RETURN))
        operation = DeviceOperation(device_class="gpu", device=place[2], verb=verb, why="fan", who="ada")
        self._perform(place[0], OperateRequest(op_id=f"person-{self._persons}", operation=operation))
        self._forget_calls(place)

    def _forget_calls(self, place: Place) -> None:
        self._calls = Counter({key: count for key, count in self._calls.items() if key[0] != place})

    def _round(self, _: Place) -> None:
        self.round(is_mortal=True)

    def round(self, *, is_mortal: bool) -> None:
        """Let a controller plan, and ask; where it is mortal it may die before each, or not hear."""
        before, fleet = self.document, self.fleet
        for place in PLACES:
            device = fleet.device(place)
            if device is not None and device.is_allocatable and not device.health.conditions:
                # What is wrong with it later is another matter.
                self._forget_calls(place)
        after = plan(self._policy, before, fleet, self.now_s)
        if is_mortal and self._random.random() < 0.2:
            return
        self._check(before, after, fleet)
        self.document = structs.replace(after, events=())
        for asked in operations(self.document, self.now_s):
            if is_mortal and self._random.random() < 0.2:
                continue
            result = self._perform(asked.repair.node, asked.request)
            if not is_mortal or self._random.random() < 0.7:
                planned = plan(self._policy, self.document, self.fleet, self.now_s, {asked.request.op_id: result})
                self._check(self.document, planned, self.fleet)
                self.document = planned

    def _perform(self, node: str, request: OperateRequest) -> Operated | Refusal:
        """Do what topology and a device service do."""
        operation, stored = request.operation, self._maintenances[node]
        place: Place = (node, "gpu", operation.device)
        earlier = performed(stored, request.op_id)
        if earlier is not None:
            assert earlier.operation == operation
            return earlier.result
        refusal = fault_of_expectation(stored, operation)
        if refusal is not None:
            return refusal
        if operation.verb is DeviceVerb.RESET:
            if place in self._held:
                return refuse("device-held", "held")
            if self._random.random() < 0.3:
                return refuse("driver-failed", "no")
            if self._random.random() < 0.6:
                self._heal(place)
        if operation.verb is DeviceVerb.FORGIVE and self._random.random() < 0.8:
            self._put_conditions(place, ())
        in_force = stored.devices.get(operation.device)
        if operation.who == REPAIR_POLICY:
            assert in_force is None or in_force.who == REPAIR_POLICY, "a person was overruled"
        if operation.is_draining:
            self._held.discard(place)
        asked = PerformRequest(op_id=request.op_id, operation=operation, time="")
        changed = changed_by(stored, asked)
        result = Operated(health=self._devices[place].health, maintenance=changed.devices.get(operation.device))
        self._maintenances[node] = with_operation(changed, asked, result)
        return result

    def _check(self, before: RepairState, after: RepairState, fleet: Fleet) -> None:
        policy = self._policy
        assert len(after.under_way) <= policy.at_once
        on_nodes = Counter(repair.node for repair in after.under_way)
        assert max(on_nodes.values(), default=0) <= policy.at_once_per_node
        assert sum(began_s > self.now_s - HOUR_S for began_s in after.begun_s) <= policy.per_hour
        seen = {event.id for event in before.events}
        for event in after.events:
            note = event.repair
            if event.id in seen or note is None:
                continue
            place: Place = (event.node, note.device_class, note.device)
            if note.end is not None:
                self.ends[note.end] += 1
            if note.end is RepairEnd.REPAIRED:
                self._forget_calls(place)
            if note.end is RepairEnd.GAVE_UP:
                left = next(repair for repair in after.repairs if repair.place == place)
                self._calls[place, left.left_codes] += 1
                assert self._calls[place, left.left_codes] == 1, "a person was called twice"
        asked = {repair.op_id for repair in before.under_way if repair.is_asked}
        away = {repair.place for repair in after.under_way}
        for repair in after.under_way:
            takes = repair.is_asked and (bool(repair.why) or withholds(repair.what)) and repair.op_id not in asked
            for protected in policy.protect if takes else ():
                offered = fleet.offered(protected)
                assert repair.place not in offered or len(offered - away) >= protected.keep, "a last device was taken"

    def _in_force(self, place: Place) -> Maintenance | None:
        return self._maintenances[place[0]].devices.get(place[2])

    def _allocations(self, node: str) -> dict[str, Allocation]:
        names = tuple(name for there, _, name in sorted(self._held) if there == node)
        return {_OWNER.key: Allocation(owner=_OWNER, holdings=(Holding(devices={"gpu": names}),))} if names else {}
