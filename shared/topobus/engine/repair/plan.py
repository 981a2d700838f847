"""Decides what becomes of each repair: which begin, which step follows, when a person is called.

In flow the one document of repairs, the fleet, and answers of operations; out flows the next
document, with the operations that may be asked for once it is written. Each decision that is no
operation of topology is noted in the document, to be published.

A person always wins: a repair ends when another than the policy has worked on its device, and each
operation names the maintenance over which it may be done, so a device service refuses one that
comes late.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import Struct, structs

from topobus.engine.repair.fleet import Fleet, codes_of, disrupts, rule_for, withholds
from topobus.formats.messages.messages import DecisionEvent, RepairState
from topobus.formats.messages.operation_messages import Operated, OperateRequest
from topobus.values.device import Device
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.repair import (
    REPAIR_POLICY,
    Place,
    Repair,
    RepairEnd,
    RepairNote,
    RepairPolicy,
    RepairRule,
    RepairRuleSettings,
    Step,
)
from topobus.values.request import Owner, OwnerKind
from topobus.values.timestamps import rfc3339

__all__ = ["Asked", "is_paused", "obstacle", "operations", "plan"]

_HOUR_S = 3600.0
# The document of repairs has a bound. A fleet with more devices that wait for a person has another
# trouble than those devices.
_MOST_LEFT = 512
_MOST_REPAIRED = 512
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


def plan(
    policy: RepairPolicy,
    state: RepairState,
    fleet: Fleet,
    now_s: float,
    answers: Mapping[str, Operated | Refusal] | None = None,
) -> RepairState:
    """Compute the next document: the same value when nothing is to be decided.

    Shapes: answers — of operations, by id; one that the document does not wait for, because it came
    twice or late, changes nothing.
    Order: repairs by place; new ones by place, as far as the budgets go.
    Cost: O(repairs + devices × rules), and for each new repair O(devices) where some are protected.
    """
    return _Round(policy, state, fleet, now_s).run(answers or {})


def operations(state: RepairState, now_s: float) -> tuple[Asked, ...]:
    """List the operations to ask for. Call it with a document that is written.

    An operation that was not answered is listed again, with the same id.
    """
    return tuple(
        Asked(repair=repair, request=OperateRequest(op_id=repair.op_id, operation=operation))
        for repair in (() if is_paused(state, now_s) else state.under_way)
        if repair.is_asked and (operation := _operation(repair)) is not None
    )


def obstacle(policy: RepairPolicy, state: RepairState, fleet: Fleet, place: Place, now_s: float) -> Reason | None:
    """Explain why no repair of a device begins now. None: one is under way, or begins."""
    repair = next((repair for repair in state.repairs if repair.place == place), None)
    if repair is not None and repair.end is None:
        return None
    device = fleet.device(place)
    rule = rule_for(policy, device) if device is not None else None
    if rule is None and repair is not None and repair.is_left:
        return Reason(code="repair-left", message=f"{place[2]}: {repair.end}: {repair.why}")
    if device is None or rule is None:
        text = "no rule has steps for what is wrong with it" if device is not None else "it is not published"
        return Reason(code="repair-observed", message=f"{place[2]}: {text}")
    return _Round(policy, state, fleet, now_s).obstacle(place, device, rule)


def _operation(repair: Repair) -> DeviceOperation | None:
    is_draining = repair.what == Step.DRAIN
    step = DeviceVerb.MAINTAIN if repair.why or is_draining else repair.what
    # A replica of another release may know more steps.
    if step not in list(DeviceVerb):
        return None
    said = repair.why or f"{repair.what}, try {repair.trial}"
    why = f"rule {repair.rule.name} for {', '.join(repair.codes)}: {said} (repair {repair.id})"
    return DeviceOperation(
        device_class=repair.device_class,
        device=repair.device,
        verb=DeviceVerb(step),
        why=_one_line(why),
        who=REPAIR_POLICY,
        is_draining=is_draining,
        expects=repair.withheld_by,
    )


def _one_line(text: str) -> str:
    """Cut a text that topology and the bounds of the document take, whatever a node has answered."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_WHY_CHARACTERS])


def _reasons(device: Device) -> set[str]:
    return {condition.reason for condition in device.health.conditions}


class _Round:
    """One computation of the next document."""

    def __init__(self, policy: RepairPolicy, state: RepairState, fleet: Fleet, now_s: float) -> None:
        self._before = state
        self._policy = policy
        self._fleet = fleet
        self._now_s = now_s
        self._is_paused = is_paused(state, now_s)
        self._repairs = {repair.place: repair for repair in state.repairs}
        self._begun_s = tuple(began_s for began_s in state.begun_s if began_s > now_s - _HOUR_S)
        self._events = list(state.events)

    def run(self, answers: Mapping[str, Operated | Refusal]) -> RepairState:
        """Decide on everything."""
        for repair in self._before.under_way:
            if repair.is_asked and repair.op_id in answers:
                self._answer(repair, answers[repair.op_id])
        for repair in tuple(self._repairs.values()):
            if repair.is_left:
                self._review(repair)
            elif repair.end is None:
                self._advance(repair)
        # What ended in this round is looked at in the next one, when its end is written.
        busy = {repair.place for repair in self._before.under_way}
        for place in () if self._is_paused else self._fleet.sick(self._policy):
            device = self._fleet.device(place)
            rule = rule_for(self._policy, device) if device is not None else None
            if place not in busy and device and rule and self.obstacle(place, device, rule) is None:
                self._begin(place, device, rule)
        return self._after()

    def _after(self) -> RepairState:
        repairs = sorted(self._repairs.values(), key=lambda repair: repair.place)
        # Times that have passed are dropped with the next change: alone they are worth no write.
        if tuple(repairs) == self._before.repairs:
            return self._before
        repaired = [repair for repair in repairs if repair.end is RepairEnd.REPAIRED]
        recent = sorted(filter(self._is_recent, repaired), key=lambda repair: repair.step_s)[-_MOST_REPAIRED:]
        return structs.replace(
            self._before,
            repairs=tuple(repair for repair in repairs if repair not in repaired or repair in recent),
            begun_s=self._begun_s,
            events=tuple(self._events),
        )

    def _is_recent(self, repaired: Repair) -> bool:
        """Say whether evidence that is back is the same evidence."""
        return self._now_s < repaired.step_s + repaired.rule.again_within_s

    def obstacle(self, place: Place, device: Device, rule: RepairRuleSettings) -> Reason | None:
        """Explain why no repair of a sick device begins. None: it may begin."""
        name = f"{place[2]} of node {place[0]}"
        last, policy = self._repairs.get(place), self._policy
        if self._is_paused:
            return Reason(code="repair-paused", message=f"{name}: repairs are paused")
        if last is not None and set(codes_of(rule, device)) <= set(last.left_codes):
            return Reason(code="repair-left", message=f"{name}: {last.end}: {last.why}")
        if device.maintenance is not None and device.maintenance.op_id != (last.withheld_by if last else ""):
            return Reason(code="repair-kept-back", message=f"{name} is {device.why_not}")
        under_way = [there for there, repair in self._repairs.items() if repair.end is None]
        for count, most, what in (
            (len(under_way), policy.at_once, "repairs are under way, at_once"),
            (
                sum(there[0] == place[0] for there in under_way),
                policy.at_once_per_node,
                "repairs are under way on its node, at_once_per_node",
            ),
            (len(self._begun_s), policy.per_hour, "repairs began within the hour, per_hour"),
            (
                sum(repair.is_left for repair in self._repairs.values()),
                _MOST_LEFT,
                "devices wait for a person, the most",
            ),
        ):
            if count >= most:
                return Reason(code="repair-budget", message=f"{name}: {count} {what} is {most}")
        return self._protection(place, rule.steps)

    def _answer(self, repair: Repair, result: Operated | Refusal) -> None:
        """Note the answer of a repair's operation."""
        if isinstance(result, Operated):
            if repair.why:
                self._put(repair, withheld_by=repair.op_id)
            elif withholds(repair.what):
                self._next(repair, withheld_by=repair.op_id)
            elif repair.what == DeviceVerb.RETURN:
                self._next(repair, withheld_by="")
            else:
                self._next(repair)
            return
        codes = {reason.code for reason in result.reasons}
        text = _one_line(result.why)
        done = repair.rule.steps[: repair.step]
        if "maintenance-changed" in codes:
            self._end(repair, RepairEnd.TAKEN_OVER, text)
        elif repair.why:
            self._end(repair, RepairEnd.GAVE_UP, f"{repair.why}; it is not withheld: {text}")
        elif codes & _IN_USE and repair.attempt < _MOST_ATTEMPTS and Step.WAIT_IDLE in done:
            idle = len(done) - 1 - done[::-1].index(Step.WAIT_IDLE.value)
            self._enter(repair, idle, attempt=repair.attempt + 1)
        else:
            self._fail(repair, f"{repair.what} was refused: {text}")

    def _begin(self, place: Place, device: Device, rule: RepairRuleSettings) -> None:
        codes, last = codes_of(rule, device), self._repairs.get(place)
        is_back = last is not None and last.end is RepairEnd.REPAIRED and self._is_recent(last)
        trial = last.trial + 1 if last is not None and is_back and set(last.codes) & set(codes) else 1
        newest = self._fleet.newest_of_others(place)
        text = "\0".join((*place, *codes, f"{self._now_s:.6f}", str(len(self._begun_s))))
        repair = Repair(
            id="r-" + hashlib.sha256(text.encode()).hexdigest()[:16],
            node=place[0],
            device_class=place[1],
            device=place[2],
            rule=msgspec.convert(rule, RepairRule, from_attributes=True),
            codes=codes,
            began_s=self._now_s,
            step_s=self._now_s,
            trial=trial,
            withheld_by=last.withheld_by if last is not None else "",
            left_codes=last.left_codes if last is not None else (),
            seen=newest.op_id if newest is not None else "",
            why=f"{', '.join(codes)} came back after try {trial - 1}" if trial > rule.tries else "",
        )
        self._begun_s = (*self._begun_s, self._now_s)
        self._note(repair, "begun", f"{repair.id}.begun")
        self._advance(repair if repair.why else self._enter(repair, 0))

    def _review(self, left: Repair) -> None:
        """Look whether a left device may be repaired again."""
        device, newest = self._fleet.device(left.place), self._fleet.newest_of_others(left.place)
        if device is None:
            del self._repairs[left.place]
        elif newest is not None and newest.op_id != left.seen:
            verb, who = newest.operation.verb, newest.operation.who
            if verb is DeviceVerb.FORGIVE and left.end is RepairEnd.GAVE_UP:
                why = f"{who} forgave it: another repair may begin"
                self._put(left, seen=newest.op_id, left_codes=(), why=why)
            else:
                self._put(left, seen=newest.op_id, end=RepairEnd.TAKEN_OVER, why=f"{who}: {verb}")
        elif (
            (left.end is RepairEnd.TAKEN_OVER or not left.withheld_by)
            and device.is_fit
            and not _reasons(device) & set(left.left_codes)
        ):
            del self._repairs[left.place]

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
        if repair.why:
            kept_safe = self._protection(repair.place, (DeviceVerb.MAINTAIN,))
            if repair.withheld_by:
                self._end(repair, RepairEnd.GAVE_UP, repair.why)
            elif is_late or (kept_safe is not None and not repair.is_asked):
                unkept = kept_safe.message if kept_safe is not None else "no answer"
                self._end(repair, RepairEnd.GAVE_UP, f"{repair.why}; it is not withheld: {unkept}")
            else:
                self._put(repair, is_asked=True)
            return None
        match repair.what:
            case Step.CALL_A_PERSON:
                return self._give_up(repair)
            case Step.WAIT_IDLE:
                pause_s = _FIRST_PAUSE_S * 2 ** (repair.attempt - 1) if repair.attempt else 0.0
                if waited_s >= pause_s and not self._fleet.holders(repair.place):
                    return self._next(repair)
                return self._give_up(repair, "it is still held") if is_late else None
            case Step.WAIT_HEALTHY:
                is_well = device.health.is_allocatable and not _reasons(device) & set(repair.codes)
                if not is_well and is_late:
                    return self._fail(
                        repair, f"it is still {device.health.state}: {', '.join(sorted(_reasons(device)))}"
                    )
                since_s = self._now_s if repair.healthy_s is None else repair.healthy_s
                if is_well and self._now_s - since_s >= rule.hold_s:
                    return self._next(repair)
                self._put(repair, healthy_s=since_s if is_well else None)
            case _ if is_late:
                return self._give_up(repair, f"{repair.what} is not done after {waited_s:.0f} s")
            case Step.DRAIN if waited_s < rule.grace_s and self._fleet.holders(repair.place):
                pass
            case _ if not repair.is_asked and self._protection(repair.place, (repair.what,)) is None:
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
        away = {
            there
            for there, repair in self._repairs.items()
            if there != place and (repair.end is None or repair.withheld_by)
        }
        for protected in self._policy.protect:
            offered = self._fleet.offered(protected) - away
            if taken & offered and len(offered - taken) < protected.keep:
                text = f"{place[2]} of node {place[0]}: {len(offered)} are healthy, {protected.keep} must stay"
                return Reason(code="repair-protected", message=text)
        return None

    def _next(self, repair: Repair, **changes: object) -> Repair | None:
        repair = structs.replace(repair, **changes)
        if repair.step + 1 < len(repair.rule.steps):
            return self._enter(repair, repair.step + 1)
        if repair.withheld_by:
            return self._give_up(repair)
        self._end(repair, RepairEnd.REPAIRED, f"by rule {repair.rule.name}, try {repair.trial}")
        return None

    def _enter(self, repair: Repair, step: int, **changes: object) -> Repair:
        entered = self._put(repair, step=step, step_s=self._now_s, is_asked=False, healthy_s=None, **changes)
        if entered.what in (Step.WAIT_IDLE, Step.WAIT_HEALTHY):
            self._note(entered, entered.what, entered.op_id)
        return entered

    def _fail(self, repair: Repair, why: str) -> Repair:
        """End a try: another one begins, or a person is called."""
        if repair.trial >= repair.rule.tries:
            return self._give_up(repair, why)
        self._note(repair, f"try {repair.trial} failed", f"{repair.id}.{repair.trial}.failed", why)
        return self._enter(repair, 0, trial=repair.trial + 1, attempt=0)

    def _give_up(self, repair: Repair, why: str = "") -> Repair:
        why = why or f"the steps of rule {repair.rule.name} end here"
        return self._put(repair, why=why, step_s=self._now_s, is_asked=False)

    def _put(self, repair: Repair, **changes: object) -> Repair:
        changed = structs.replace(repair, **changes)
        self._repairs[repair.place] = changed
        return changed

    def _end(self, repair: Repair, end: RepairEnd, why: str) -> None:
        device, newest = self._fleet.device(repair.place), self._fleet.newest_of_others(repair.place)
        ended = self._put(repair, end=end, why=why, step_s=self._now_s)
        self._note(repair, end.value, f"{repair.id}.{end}", why, end)
        if end is RepairEnd.REPAIRED:
            self._put(ended, left_codes=())
        elif device is not None and ended.is_left:
            wrong = {*repair.codes, *repair.left_codes, *_reasons(device)}
            seen = newest.op_id if newest is not None else repair.seen
            self._put(ended, left_codes=tuple(sorted(wrong)), seen=seen)
        else:
            del self._repairs[repair.place]

    def _note(self, repair: Repair, what: str, event_id: str, why: str = "", end: RepairEnd | None = None) -> None:
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
        uid = f"{repair.device_class}:{repair.device}"
        gave_up = refuse("repair-gave-up", why, device=repair.device, repair=repair.id)
        event = DecisionEvent(
            id=event_id,
            verb="repair",
            node=repair.node,
            op_id=event_id,
            time=rfc3339(datetime.fromtimestamp(self._now_s, UTC)),
            owner=Owner(kind=OwnerKind.OPERATOR, namespace="", name=REPAIR_POLICY, uid=uid),
            outcome=gave_up if end is RepairEnd.GAVE_UP else None,
            repair=note,
        )
        self._events.append(event)
