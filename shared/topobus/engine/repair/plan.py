"""Decides what becomes of each repair: which begin, which step follows, when a person is called.

In flow the one document of repairs and the fleet; out flows the next document, and the operations
that may be asked for once it is written. An answer makes a document of its own. Each decision that
is no operation of topology is noted in the document, to be published.

A person always wins: a repair ends when another than the policy has worked on its device, and each
operation names the maintenance over which it may be done, so a device service refuses one that
comes late.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import Struct, structs

from topobus.engine.repair.fleet import Fleet, codes_of, disrupts, rule_for, withholds
from topobus.formats.messages.operation_messages import Operated, OperateRequest
from topobus.values.device import Device
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Reason, Refusal
from topobus.values.repair import (
    REPAIR_POLICY,
    LeftDevice,
    Place,
    Repair,
    RepairedDevice,
    RepairEnd,
    RepairNote,
    RepairNoteEvent,
    RepairPolicy,
    RepairRule,
    RepairState,
    Step,
)

__all__ = ["Asked", "answered", "is_paused", "obstacle", "operations", "plan", "published"]

_HOUR_S = 3600.0
# The document of repairs has a bound, and a fleet with more devices that wait for a person has
# another trouble than those devices.
_MOST_LEFT = 512
# Pauses before an operation is asked for again that was refused because the device was in use:
# 10 s, 20 s, … 320 s. What cleans a device takes about as long at last.
_FIRST_PAUSE_S = 10.0
_MOST_ATTEMPTS = 6
_IN_USE = frozenset({"device-held", "device-busy"})
_WHY_CHARACTERS = 512


class Asked(Struct, frozen=True, kw_only=True):
    """An operation that a repair asks a node for."""

    repair: Repair
    request: OperateRequest


def is_paused(state: RepairState, now_s: float) -> bool:
    """Say whether repairs are paused."""
    return state.pause is not None and state.pause.holds_at(now_s)


def plan(policy: RepairPolicy, state: RepairState, fleet: Fleet, now_s: float) -> RepairState:
    """Compute the next document: the same value when nothing is to be decided.

    Order: repairs by place; new ones by place, as far as the budgets go.
    Cost: O(repairs + sick devices), and for each new one O(devices) where devices are protected.
    """
    return _Round(policy, state, fleet, now_s).run()


def operations(state: RepairState, now_s: float) -> tuple[Asked, ...]:
    """List the operations to ask for. Call it with a document that is written.

    An operation that was not answered is listed again, with the same id.
    """
    if is_paused(state, now_s):
        return ()
    return tuple(
        Asked(repair=repair, request=OperateRequest(op_id=repair.op_id, operation=operation))
        for repair in state.repairs
        if repair.is_asked and (operation := _operation(repair)) is not None
    )


def answered(
    policy: RepairPolicy, state: RepairState, fleet: Fleet, op_id: str, result: Operated | Refusal, now_s: float
) -> RepairState:
    """Note the answer of an operation. One that the document does not wait for changes nothing."""
    repair = next((repair for repair in state.repairs if repair.op_id == op_id and repair.is_asked), None)
    if repair is None:
        return state
    decided = _Round(policy, state, fleet, now_s)
    decided.answer(repair, result)
    return decided.state()


def published(state: RepairState, ids: Iterable[str]) -> RepairState:
    """Drop decisions that are published."""
    gone = frozenset(ids)
    return structs.replace(state, events=tuple(event for event in state.events if event.id not in gone))


def obstacle(policy: RepairPolicy, state: RepairState, fleet: Fleet, place: Place, now_s: float) -> Reason | None:
    """Explain why no repair of a device begins now. None: one is under way, or begins."""
    if any(repair.place == place for repair in state.repairs):
        return None
    device = fleet.device(place)
    rule = rule_for(policy, device) if device is not None else None
    left = next((left for left in state.left if left.place == place), None)
    if rule is None and left is not None:
        return Reason(code="repair-left", message=f"{place[2]}: {left.end}: {left.why}")
    if device is None or rule is None:
        text = "no rule has steps for what is wrong with it" if device is not None else "it is not published"
        return Reason(code="repair-observed", message=f"{place[2]}: {text}")
    return _Round(policy, state, fleet, now_s).obstacle(place, device, rule)


def _operation(repair: Repair) -> DeviceOperation | None:
    verb = DeviceVerb.MAINTAIN if repair.failure or repair.what == Step.DRAIN else _verb(repair.what)
    if verb is None:
        return None
    said = repair.failure or f"{repair.what}, try {repair.trial}"
    why = f"rule {repair.rule.name} for {', '.join(repair.codes)}: {said} (repair {repair.id})"
    return DeviceOperation(
        device_class=repair.device_class,
        device=repair.device,
        verb=verb,
        why=_one_line(why),
        who=REPAIR_POLICY,
        is_draining=not repair.failure and repair.what == Step.DRAIN,
        expects=repair.withheld_by,
    )


def _one_line(text: str) -> str:
    """Cut a text that topology and the bounds of the document take, whatever a node has answered."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_WHY_CHARACTERS])


def _verb(step: str) -> DeviceVerb | None:
    return DeviceVerb(step) if step in list(DeviceVerb) else None


class _Round:
    """One computation of the next document."""

    def __init__(self, policy: RepairPolicy, state: RepairState, fleet: Fleet, now_s: float) -> None:
        self._before = state
        self._policy = policy
        self._fleet = fleet
        self._now_s = now_s
        self._is_paused = is_paused(state, now_s)
        self._repairs = {repair.place: repair for repair in state.repairs}
        self._left = {left.place: left for left in state.left}
        self._repaired = {repaired.place: repaired for repaired in state.repaired if repaired.until_s > now_s}
        self._begun_s = tuple(began_s for began_s in state.begun_s if began_s > now_s - _HOUR_S)
        self._events = list(state.events)

    def run(self) -> RepairState:
        """Decide on everything."""
        for left in tuple(self._left.values()):
            self._review(left)
        for repair in tuple(self._repairs.values()):
            self._advance(repair)
        if not self._is_paused:
            # What ended in this round is looked at in the next one, when its end is written.
            busy = {repair.place for repair in self._before.repairs}
            for place in sorted(set(self._fleet.sick) - busy):
                device = self._fleet.device(place)
                rule = rule_for(self._policy, device) if device is not None else None
                if device is not None and rule is not None and self.obstacle(place, device, rule) is None:
                    self._begin(place, device, rule)
        return self.state()

    def state(self) -> RepairState:
        """Return the document as it is decided by now."""
        after = structs.replace(
            self._before,
            repairs=tuple(repair for _, repair in sorted(self._repairs.items())),
            begun_s=self._begun_s,
            left=tuple(left for _, left in sorted(self._left.items())),
            repaired=tuple(repaired for _, repaired in sorted(self._repaired.items())),
            events=tuple(self._events),
        )
        # Times that have passed are dropped with the next change: alone they are worth no write.
        passed = structs.replace(after, begun_s=self._before.begun_s, repaired=self._before.repaired)
        return after if passed != self._before else self._before

    def obstacle(self, place: Place, device: Device, rule: RepairRule) -> Reason | None:
        """Explain why no repair of a sick device begins. None: it may begin."""
        name = f"{place[2]} of node {place[0]}"
        left, policy = self._left.get(place), self._policy
        if self._is_paused:
            return Reason(code="repair-paused", message=f"{name}: repairs are paused")
        if left is not None and set(codes_of(rule, device)) <= set(left.codes):
            return Reason(code="repair-left", message=f"{name}: {left.end}: {left.why}")
        if device.maintenance is not None and device.maintenance.op_id != (left.withheld_by if left else ""):
            return Reason(code="repair-kept-back", message=f"{name} is {device.why_not}")
        on_node = sum(there[0] == place[0] for there in self._repairs)
        for count, most, what in (
            (len(self._repairs), policy.at_once, "repairs are under way, at_once"),
            (on_node, policy.at_once_per_node, "repairs are under way on its node, at_once_per_node"),
            (len(self._begun_s), policy.per_hour, "repairs began within the hour, per_hour"),
            (len(self._left), _MOST_LEFT, "devices wait for a person, the most"),
        ):
            if count >= most:
                return Reason(code="repair-budget", message=f"{name}: {count} {what} is {most}")
        return self._protection(place, rule.steps)

    def answer(self, repair: Repair, result: Operated | Refusal) -> None:
        """Note the answer of a repair's operation."""
        if isinstance(result, Operated):
            if repair.failure:
                self._put(repair, withheld_by=repair.op_id)
            elif withholds(repair.what):
                self._next(repair, withheld_by=repair.op_id)
            else:
                self._next(repair, withheld_by="" if repair.what == DeviceVerb.RETURN else repair.withheld_by)
            return
        codes = {reason.code for reason in result.reasons}
        text = _one_line("; ".join(each.message for each in result.reasons))
        if "maintenance-changed" in codes:
            self._end(repair, RepairEnd.TAKEN_OVER, text)
        elif repair.failure:
            self._end(repair, RepairEnd.GAVE_UP, f"{repair.failure}; it is not withheld: {text}")
        elif codes & _IN_USE and repair.attempt < _MOST_ATTEMPTS and Step.WAIT_IDLE in repair.rule.steps[: repair.step]:
            steps = repair.rule.steps[: repair.step]
            self._enter(repair, len(steps) - 1 - steps[::-1].index(Step.WAIT_IDLE.value), attempt=repair.attempt + 1)
        else:
            self._fail(repair, f"{repair.what} was refused: {text}")

    def _begin(self, place: Place, device: Device, rule: RepairRule) -> None:
        codes, left, before = codes_of(rule, device), self._left.pop(place, None), self._repaired.pop(place, None)
        newest = self._fleet.newest_of_others(place)
        is_back = before is not None and bool(set(before.codes) & set(codes))
        trial = before.trial + 1 if before is not None and is_back else 1
        text = "\0".join((*place, *codes, f"{self._now_s:.6f}", str(len(self._begun_s))))
        repair = Repair(
            id="r-" + hashlib.sha256(text.encode()).hexdigest()[:16],
            node=place[0],
            device_class=place[1],
            device=place[2],
            rule=RepairRule(**structs.asdict(rule)),
            codes=codes,
            began_s=self._now_s,
            step_s=self._now_s,
            trial=trial,
            withheld_by=left.withheld_by if left is not None else "",
            left_codes=left.codes if left is not None else (),
            seen=newest.op_id if newest is not None else "",
            failure=f"{', '.join(codes)} came back after try {trial - 1}" if trial > rule.tries else "",
        )
        self._begun_s = (*self._begun_s, self._now_s)
        self._note(repair, "begun", f"{repair.id}.begun")
        self._repairs[place] = repair
        if not repair.failure:
            self._enter(repair, 0)
        self._advance(self._repairs[place])

    def _review(self, left: LeftDevice) -> None:
        """Look whether a left device may be repaired again."""
        device, newest = self._fleet.device(left.place), self._fleet.newest_of_others(left.place)
        if device is None:
            del self._left[left.place]
        elif newest is not None and newest.op_id != left.seen:
            verb, who = newest.operation.verb, newest.operation.who
            is_retry = verb is DeviceVerb.FORGIVE and left.end is RepairEnd.GAVE_UP
            self._left[left.place] = structs.replace(
                left,
                seen=newest.op_id,
                codes=() if is_retry else left.codes,
                end=left.end if is_retry else RepairEnd.TAKEN_OVER,
                why=f"{who} forgave it: another repair may begin" if is_retry else f"{who}: {verb}",
            )
        elif left.end is RepairEnd.TAKEN_OVER or not left.withheld_by:
            codes = {condition.reason for condition in device.health.conditions}
            if device.is_fit and not codes & set(left.codes):
                del self._left[left.place]

    def _advance(self, repair: Repair) -> None:
        """Move a repair on as far as it goes without an answer."""
        device, newest = self._fleet.device(repair.place), self._fleet.newest_of_others(repair.place)
        if device is None:
            self._end(repair, RepairEnd.GONE, "it is not published any more")
        elif newest is not None and newest.op_id != repair.seen:
            self._end(repair, RepairEnd.TAKEN_OVER, f"{newest.operation.who}: {newest.operation.verb}")
        elif not self._is_paused:
            while (step := self._step(repair, device)) is not None:
                repair = step

    def _step(self, repair: Repair, device: Device) -> Repair | None:
        """Do what can be done at the present step. Return the repair when it is at another one."""
        rule, waited_s = repair.rule, self._waited_s(repair)
        limit_s = rule.idle_within_s if repair.what == Step.WAIT_IDLE else rule.within_s
        is_late = waited_s > limit_s + (rule.grace_s if repair.what == Step.DRAIN else 0.0)
        if repair.failure:
            kept_safe = self._protection(repair.place, (DeviceVerb.MAINTAIN,))
            if repair.withheld_by or is_late or (kept_safe is not None and not repair.is_asked):
                unkept = "" if repair.withheld_by else f"; it is not withheld: {_text(kept_safe) or 'no answer'}"
                self._end(repair, RepairEnd.GAVE_UP, repair.failure + unkept)
            else:
                self._put(repair, is_asked=True)
            return None
        match repair.what:
            case Step.CALL_A_PERSON:
                return self._give_up(repair, f"the steps of rule {rule.name} end here")
            case Step.WAIT_IDLE:
                pause_s = _FIRST_PAUSE_S * 2 ** (repair.attempt - 1) if repair.attempt else 0.0
                if waited_s >= pause_s and not self._fleet.holders(repair.place):
                    return self._next(repair)
                return self._give_up(repair, "it is still held") if is_late else None
            case Step.WAIT_HEALTHY:
                reasons = {condition.reason for condition in device.health.conditions}
                if not device.health.is_allocatable or reasons & set(repair.codes):
                    if is_late:
                        return self._fail(repair, f"it is still {device.health.state}: {', '.join(sorted(reasons))}")
                    self._put(repair, healthy_s=None)
                    return None
                since_s = self._now_s if repair.healthy_s is None else repair.healthy_s
                if self._now_s - since_s >= rule.hold_s:
                    return self._next(repair)
                self._put(repair, healthy_s=since_s)
                return None
            case _ if is_late:
                return self._give_up(repair, f"{repair.what} is not done after {waited_s:.0f} s")
            case Step.DRAIN if waited_s < rule.grace_s and self._fleet.holders(repair.place):
                return None
            case _:
                if not repair.is_asked and self._protection(repair.place, (repair.what,)) is None:
                    self._put(repair, is_asked=True)
                return None

    def _waited_s(self, repair: Repair) -> float:
        """Return for how long a step takes. The time of a pause does not count."""
        pause = self._before.pause
        resumed_s = pause.until_s if pause is not None and pause.until_s is not None else repair.step_s
        return self._now_s - max(repair.step_s, min(resumed_s, self._now_s))

    def _protection(self, place: Place, steps: Iterable[str]) -> Reason | None:
        """Explain which protected devices steps would take too many of."""
        steps = tuple(steps)
        taken = {place} if any(map(withholds, steps)) else set()
        if any(map(disrupts, steps)):
            taken |= {(place[0], place[1], device.name) for device in self._fleet.together(place)}
        if not taken:
            return None
        # A copy of an inventory may be older than what repairs have withheld.
        away = (self._repairs.keys() | {left.place for left in self._left.values() if left.withheld_by}) - {place}
        for protected in self._policy.protect:
            offered = self._fleet.offered(protected) - away
            if taken & offered and len(offered - taken) < protected.keep:
                text = f"{place[2]} of node {place[0]}: {len(offered)} are healthy, {protected.keep} must stay"
                return Reason(code="repair-protected", message=text)
        return None

    def _next(self, repair: Repair, *, withheld_by: str | None = None) -> Repair | None:
        withheld = repair.withheld_by if withheld_by is None else withheld_by
        repair = structs.replace(repair, withheld_by=withheld)
        if repair.step + 1 < len(repair.rule.steps):
            return self._enter(repair, repair.step + 1)
        if withheld:
            return self._give_up(repair, f"the steps of rule {repair.rule.name} end here")
        self._end(repair, RepairEnd.REPAIRED, f"by rule {repair.rule.name}, try {repair.trial}")
        return None

    def _enter(self, repair: Repair, step: int, *, trial: int | None = None, attempt: int | None = None) -> Repair:
        entered = structs.replace(
            repair,
            step=step,
            step_s=self._now_s,
            trial=repair.trial if trial is None else trial,
            attempt=repair.attempt if attempt is None else attempt,
            is_asked=False,
            healthy_s=None,
        )
        if entered.what in (Step.WAIT_IDLE, Step.WAIT_HEALTHY):
            self._note(entered, entered.what, entered.op_id)
        self._repairs[repair.place] = entered
        return entered

    def _fail(self, repair: Repair, why: str) -> Repair:
        """End a try: another one begins, or a person is called."""
        if repair.trial >= repair.rule.tries:
            return self._give_up(repair, why)
        self._note(repair, f"try {repair.trial} failed", f"{repair.id}.{repair.trial}.failed", why=why)
        return self._enter(repair, 0, trial=repair.trial + 1, attempt=0)

    def _give_up(self, repair: Repair, why: str) -> Repair:
        return self._put(repair, failure=why, step_s=self._now_s, is_asked=False)

    def _put(self, repair: Repair, **changes: object) -> Repair:
        changed = structs.replace(repair, **changes)
        self._repairs[repair.place] = changed
        return changed

    def _end(self, repair: Repair, end: RepairEnd, why: str) -> None:
        del self._repairs[repair.place]
        self._note(repair, end.value, f"{repair.id}.{end}", why=why, end=end)
        device, newest = self._fleet.device(repair.place), self._fleet.newest_of_others(repair.place)
        place = {"node": repair.node, "device_class": repair.device_class, "device": repair.device}
        if end is RepairEnd.REPAIRED:
            until_s = self._now_s + repair.rule.again_within_s
            self._repaired[repair.place] = RepairedDevice(
                **place, codes=repair.codes, trial=repair.trial, until_s=until_s
            )
        elif end is not RepairEnd.GONE:
            present = {condition.reason for condition in device.health.conditions} if device is not None else set()
            self._left[repair.place] = LeftDevice(
                **place,
                codes=tuple(sorted({*repair.codes, *repair.left_codes, *present})),
                end=end,
                why=why,
                since_s=self._now_s,
                repair=repair.id,
                rule=repair.rule.name,
                withheld_by=repair.withheld_by,
                seen=newest.op_id if newest is not None else repair.seen,
            )

    def _note(self, repair: Repair, what: str, event_id: str, *, why: str = "", end: RepairEnd | None = None) -> None:
        device = self._fleet.device(repair.place)
        note = RepairNote(
            repair=repair.id,
            rule=repair.rule.name,
            device_class=repair.device_class,
            device=repair.device,
            what=what,
            codes=repair.codes,
            why=why,
            end=end,
        )
        health = device.health if device is not None else None
        self._events.append(
            RepairNoteEvent(id=event_id, node=repair.node, time_s=self._now_s, note=note, health=health)
        )


def _text(reason: Reason | None) -> str:
    return reason.message if reason is not None else ""
