"""Laws of the linearizability checker: on any small history it says what trying all orders says,
and a ledger with a defect does not pass it.
"""

from __future__ import annotations

import random
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from lab.chaos.histories import Histories, Operation
from lab.chaos.ledger_objects import FREE, Act, DeviceAction, device_step, double_holdings, is_look
from lab.chaos.linearizability import History
from lab.chaos.workload import Draft, Verb, effects_of, operations, owner_keys, unknown_effects
from support.laws import examples
from topobus.formats.messages.messages import Adopted, AdoptReply, CommitReply, PlaceReply, PlaceRequest, ReleaseReply
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, AllocationPhase, Holders, Holding
from topobus.values.outcome import ContainerPlacement, Placement, Reason, Refusal
from topobus.values.request import Owner, OwnerKind

OWNERS = ("a", "b", "c")
ACTIONS = st.builds(
    DeviceAction,
    st.sampled_from([Act.TAKE, Act.LET_GO, Act.DROP, Act.HOLDER, Act.NOT_HOLDER]),
    st.sampled_from((*OWNERS, FREE)),
    st.sampled_from([frozenset[str](), frozenset({"a"})]),
)
# Calls and ends of up to six operations in any order; an operation whose end is
# not drawn is of unknown outcome.
EVENTS = st.lists(st.tuples(st.integers(0, 5), ACTIONS), min_size=1, max_size=11)
Event = tuple[bool, int, DeviceAction]


def events_of(drawn: list[tuple[int, DeviceAction]]) -> list[Event]:
    """The first mention of a number is a call, the second its end, the rest nothing."""
    events: list[Event] = []
    calls: dict[int, DeviceAction] = {}
    ended: set[int] = set()
    for number, action in drawn:
        if number not in calls:
            calls[number] = action
            events.append((True, number, action))
        elif number not in ended:
            ended.add(number)
            events.append((False, number, calls[number]))
    return events


def checked(events: list[Event]) -> bool:
    """What the checker says."""
    history: History[str, DeviceAction] = History(FREE, device_step, is_look)
    for is_call, number, action in events:
        if is_call:
            history.call(number, action)
        elif not history.end(number):
            return False
    return True


def tried(events: list[Event]) -> bool:
    """What trying every order of the ended operations, with any of the others, says."""
    begins = {number: place for place, (is_call, number, _) in enumerate(events) if is_call}
    ends = {number: place for place, (is_call, number, _) in enumerate(events) if not is_call}
    actions = {number: action for _, number, action in events}
    unknown = sorted(begins.keys() - ends.keys())
    for count in range(len(unknown) + 1):
        for chosen in combinations(unknown, count):
            for order in permutations([*ends, *chosen]):
                places = {number: place for place, number in enumerate(order)}
                is_in_time = all(
                    places[first] < places[second]
                    for first in ends
                    for second in places
                    if first != second and ends[first] < begins[second]
                )
                if is_in_time and _runs([actions[number] for number in order]):
                    return True
    return False


def _runs(actions: list[DeviceAction]) -> bool:
    holder: str | None = FREE
    for action in actions:
        holder = device_step(holder, action) if holder is not None else None
    return holder is not None


@given(drawn=EVENTS)
@settings(max_examples=examples(200))
def test_checker_says_what_all_orders_say_when_the_history_is_small(drawn: list[tuple[int, DeviceAction]]) -> None:
    """It accepts every linearizable history and no other one, also with operations of unknown
    outcome.
    """
    events = events_of(drawn)

    assert checked(events) == tried(events)


@given(drawn=EVENTS, chance=st.randoms(use_true_random=False))
@settings(max_examples=examples(100))
def test_forgotten_operation_has_happened_before_or_never_when_a_history_goes_on(
    drawn: list[tuple[int, DeviceAction]], chance: random.Random
) -> None:
    """After all unknown operations are forgotten, a look sees a state that some order leads to."""
    events = events_of(drawn)
    unknown = {number for is_call, number, _ in events if is_call} - {
        number for is_call, number, _ in events if not is_call
    }
    history: History[str, DeviceAction] = History(FREE, device_step, is_look)
    is_good = all(
        history.call(number, action) is None if is_call else history.end(number) for is_call, number, action in events
    )
    if not is_good:
        return
    for number in unknown:
        history.forget(number)
    seen = chance.choice((*OWNERS, FREE))
    look: list[Event] = [(True, 99, DeviceAction(Act.HOLDER, seen)), (False, 99, DeviceAction(Act.HOLDER, seen))]

    assert (seen in history.states) == tried([*events, *look])


class SmallLedger:
    """A ledger as a handful of dictionaries, with the rules of the real one, and on demand with a
    defect.
    """

    def __init__(self, defect: str) -> None:
        self.held: dict[str, tuple[Owner, str, frozenset[str]]] = {}
        self.answers: dict[str, Any] = {}
        self.older: list[dict[str, tuple[Owner, str, frozenset[str]]]] = [{}]
        self.defect = defect

    def apply(self, draft: Draft, chance: random.Random) -> Any:
        """Do an operation at this moment; an operation that is known gets its answer again."""
        if draft.op_id in self.answers and self.defect != "forgets-answers":
            return self.answers[draft.op_id]
        reply = getattr(self, f"_{draft.verb}")(draft, chance)
        self.answers[draft.op_id] = reply
        self.older.append(dict(self.held))
        return reply

    def _read(self, _draft: Draft, _chance: random.Random) -> Holders:
        held = self.older[max(0, len(self.older) - 30)] if self.defect == "reads-old" else self.held
        allocations = {
            key: Allocation(
                owner=owner, phase=AllocationPhase(phase), holdings=(Holding(devices={"gpu": tuple(sorted(names))}),)
            )
            for key, (owner, phase, names) in held.items()
        }
        return Holders(node="n", allocations=allocations)

    def _holders(self, names: frozenset[str], but: str) -> dict[str, frozenset[str]]:
        if self.defect == "two-owners":
            return {}
        return {key: both for key, (_, _, held) in self.held.items() if key != but and (both := held & names)}

    def _place(self, draft: Draft, chance: random.Random) -> PlaceReply:
        key = draft.owner.key
        free = sorted(
            {f"gpu-{number}" for number in range(12)} - {name for _, _, held in self.held.values() for name in held}
        )
        names = draft.names or frozenset(chance.sample(free, min(2, len(free))))
        code = (
            "already-placed"
            if key in self.held
            else "not-enough-devices"
            if not names or self._holders(names, key)
            else ""
        )
        if code:
            return PlaceReply(decision_id="d", node="n", result=Refusal(reasons=(Reason(code=code, message=""),)))
        assert isinstance(draft.request, PlaceRequest)
        phase = "reserved" if draft.request.is_reservation and self.defect != "keeps-reservations" else "committed"
        self.held[key] = (draft.owner, phase, names)
        placed = ContainerPlacement(
            name="main", alignment=Hint(None, preferred=False), devices={"gpu": tuple(sorted(names))}
        )
        return PlaceReply(decision_id="d", node="n", result=Placement(containers=(placed,)))

    def _adopt(self, draft: Draft, _chance: random.Random) -> AdoptReply:
        key = draft.owner.key
        others = self._holders(draft.names, key)
        live = {
            other: both
            for other, both in others.items()
            if not self.held[other][0].kind is draft.owner.kind is OwnerKind.DEVICE_PLUGIN
        }
        if live:
            reasons = tuple(
                Reason(code="device-held", message="", facts={"owner": other, "devices": tuple(sorted(both))})
                for other, both in live.items()
            )
            return AdoptReply(result=Refusal(reasons=reasons))
        displaced = tuple(self.held[other][0] for other in others)
        for other in others:
            owner, phase, held = self.held.pop(other)
            if left := held - draft.names:
                self.held[other] = (owner, phase, left)
        self.held[key] = (draft.owner, "committed", draft.names)
        if self.defect == "hides-displaced":
            displaced = ()
        return AdoptReply(result=Adopted(decision_id="d", displaced=displaced))

    def _commit(self, draft: Draft, _chance: random.Random) -> CommitReply:
        if draft.owner.key not in self.held:
            return CommitReply(refusal=Refusal(reasons=(Reason(code="no-reservation", message=""),)))
        owner, _, names = self.held[draft.owner.key]
        self.held[draft.owner.key] = (owner, "committed", names)
        return CommitReply()

    def _release(self, draft: Draft, chance: random.Random) -> ReleaseReply:
        if draft.owner.key not in self.held:
            return ReleaseReply()
        if self.defect == "forgets-releases" and chance.random() < 0.2:
            return ReleaseReply(devices={"gpu": tuple(sorted(self.held[draft.owner.key][2]))})
        _, _, names = self.held.pop(draft.owner.key)
        if self.defect == "loses-another" and self.held and chance.random() < 0.2:
            del self.held[min(self.held)]
        return ReleaseReply(devices={"gpu": tuple(sorted(names))})


def run(seed: int, defect: str, *, count: int = 800, workers: int = 6) -> Histories:
    """Let workers ask a small ledger in a random order of calls, moments and returns.

    Some ask twice, some answers are lost for good.
    """
    chance = random.Random(seed)
    owners = owner_keys(workers)
    ledger, histories = SmallLedger(defect), Histories(owners)
    drafts = [operations(seed, worker) for worker in range(workers)]
    open_: dict[int, tuple[Operation, list[Any], int]] = {}
    for number in range(count * 4):
        worker = chance.randrange(workers)
        if worker not in open_:
            operation = Operation(number, next(drafts[worker]))
            # Once mostly, now and then twice, or never: then the answer is lost, too.
            open_[worker] = (operation, [], chance.choice((1, 1, 1, 2)))
            histories.call(operation)
            continue
        operation, replies, times = open_[worker]
        if len(replies) < times:
            replies.append(ledger.apply(operation.draft, chance))
            continue
        del open_[worker]
        if operation.draft.verb is not Verb.READ and chance.random() < 0.02:
            operation.is_unknown, operation.effects = True, unknown_effects(operation.draft)
            continue
        operation.effects = effects_of(operation.draft, replies[-1], owners)
        histories.end(operation)
    for operation, _, _ in open_.values():
        operation.is_unknown, operation.effects = True, unknown_effects(operation.draft)
    histories.settle_unknown()
    return histories


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(5))
def test_history_passes_when_the_ledger_is_right(seed: int) -> None:
    """Whatever the order of calls and returns, with answers that are asked for twice and answers
    that are lost.
    """
    assert run(seed, "").violation is None


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(
    "defect",
    [
        "two-owners",
        "forgets-releases",
        "loses-another",
        "forgets-answers",
        "reads-old",
        "hides-displaced",
        "keeps-reservations",
    ],
)
def test_history_does_not_pass_when_the_ledger_has_a_defect(defect: str, seed: int) -> None:
    """Each of these is found within 800 operations, for each seed."""
    violation = run(seed, defect).violation

    assert violation is not None


def test_two_owners_are_told_when_one_value_of_the_ledger_has_them() -> None:
    """A device and a CPU that two owners hold are named.

    A device of which both have a share is not.
    """
    first, second = (Owner(kind=OwnerKind.CLAIM, name=name, uid=name) for name in "ab")
    holding = Holding(devices={"gpu": ("gpu-1",), "nic": ("nic-0",)}, shared={"nic": ("nic-0",)}, cpus=CpuSet(3, 4))
    whole = structs.replace(holding, devices={"gpu": ("gpu-1",)}, shared={}, cpus=CpuSet(4))
    shares = structs.replace(holding, devices={"nic": ("nic-0",)}, cpus=CpuSet(5))

    def doubles(other: Holding) -> tuple[str, ...]:
        return double_holdings(
            Holders(
                node="n",
                allocations={
                    "a": Allocation(owner=first, holdings=(holding,)),
                    "b": Allocation(owner=second, holdings=(other,)),
                },
            )
        )

    assert doubles(whole) == ("cpu-4 is held by a and by b", "gpu-1 is held by a and by b")
    assert doubles(shares) == ()
