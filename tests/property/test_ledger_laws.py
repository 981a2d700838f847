"""The ledger as a state machine: random placements, adoptions, releases, retries.

Nothing is ever held twice, and a release undoes.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from support.alignment_nodes import container, dgx, owner, pod
from support.laws import examples
from topobus.engine.alignment.planning.node_view import with_ledger
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.engine.ledger.transitions import Step
from topobus.formats.messages.codec import decode, encode
from topobus.values.ledger import Adoption, AllocationPhase, Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import Owner, OwnerKind

NAMES = st.sampled_from(["a", "b", "c", "d"])
GPUS = st.frozensets(st.sampled_from([f"gpu-{index}" for index in range(8)]), min_size=1, max_size=3)


def kubelet(name: str) -> Owner:
    """An owner behind kubelet's device-plugin door."""
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=name)


def claim(name: str) -> Owner:
    """An owner behind the DRA door."""
    return Owner(kind=OwnerKind.CLAIM, name=name, uid=name)


class LedgerMachine(RuleBasedStateMachine):
    """Drives one ledger; every operation may be asked again at any time."""

    done: Bundle[tuple[str, str]] = Bundle("done")

    @initialize()
    def start(self) -> None:
        """An empty ledger."""
        self.ledger = Ledger(node="demo-node")
        self.count = 0

    def _apply(self, step: Step) -> tuple[str, str]:
        self.ledger = step.ledger
        self.count += 1
        return (f"op-{self.count - 1}", step.record.verb)

    @property
    def _op(self) -> str:
        return f"op-{self.count}"

    @rule(
        target=done,
        name=NAMES,
        cpus=st.integers(0, 20),
        gpus=st.integers(0, 4),
        phase=st.sampled_from(list(AllocationPhase)),
    )
    def place(self, name: str, cpus: int, gpus: int, phase: AllocationPhase) -> tuple[str, str]:
        """Place a pod on what the ledger leaves free."""
        request = pod(name, container(cpus=cpus, **({"gpu": gpus} if gpus else {})))
        outcome = place(with_ledger(dgx(), self.ledger), request)
        if isinstance(outcome, Placement):
            return self._apply(
                transitions.reserve(
                    self.ledger, op_id=self._op, request=request, placement=outcome, decision_id="d", phase=phase
                )
            )
        return self._apply(
            transitions.record_refusal(
                self.ledger, op_id=self._op, verb="place", owner=request.owner, decision_id="d", refusal=outcome
            )
        )

    @rule(target=done, name=NAMES, gpus=GPUS, cpu=st.integers(0, 223))
    def adopt(self, name: str, gpus: frozenset[str], cpu: int) -> tuple[str, str]:
        """Write down kubelet's choice; only a pod's or a claim's holding may refuse it."""
        wanted = {"gpu": tuple(gpus), "cpu": (f"cpu-{cpu}",)}
        before = self.ledger
        outcome = transitions.adopt(
            before, Adoption(owner=kubelet(name), devices=wanted), op_id=self._op, decision_id="d"
        )
        if isinstance(outcome, Refusal):
            held = {
                name
                for allocation in before.allocations.values()
                if allocation.owner.kind is not OwnerKind.DEVICE_PLUGIN
                for h in allocation.holdings
                for name in h.devices.get("gpu", ())
            }
            cpus = [
                h.cpus
                for allocation in before.allocations.values()
                if allocation.owner.kind is OwnerKind.POD
                for h in allocation.holdings
            ]
            assert held & gpus or any(cpu in cpu_set for cpu_set in cpus)
            return self._apply(
                transitions.record_refusal(
                    before, op_id=self._op, verb="adopt", owner=kubelet(name), decision_id="d", refusal=outcome
                )
            )
        assert set(outcome.ledger.allocations[kubelet(name).key].holdings[0].devices["gpu"]) == gpus
        return self._apply(outcome)

    @rule(target=done, name=NAMES, gpus=GPUS, shares=GPUS, has_shares=st.booleans())
    def prepare(self, name: str, gpus: frozenset[str], shares: frozenset[str], *, has_shares: bool) -> object:
        """A claim's devices are prepared: only when no other owner, of whichever door, holds one of
        them.

        Shares bear each other, and nothing else.
        """
        by_share = gpus & shares if has_shares else frozenset[str]()
        others = {
            (gpu, gpu in h.shared.get("gpu", ()))
            for allocation in self.ledger.allocations.values()
            if allocation.owner != claim(name)
            for h in allocation.holdings
            for gpu in h.devices.get("gpu", ())
        }
        step = transitions.adopt(
            self.ledger,
            Adoption(owner=claim(name), devices={"gpu": gpus}, shared={"gpu": by_share}, is_prepared=True),
            op_id=self._op,
            decision_id="d",
        )
        assert isinstance(step, Refusal) == any(
            gpu in gpus and not (is_share and gpu in by_share) for gpu, is_share in others
        )
        if isinstance(step, Refusal):
            return multiple()
        assert step.ledger.allocations[claim(name).key].is_prepared
        return self._apply(step)

    @rule(target=done, name=NAMES, is_undone=st.booleans(), keeps_devices=st.booleans())
    def release_claim(self, name: str, *, is_undone: bool, keeps_devices: bool) -> object:
        """What is prepared stays held, whoever asks, until it is undone.

        Then it goes, or stays without the mark.
        """
        key, before = claim(name).key, self.ledger.allocations
        step = transitions.release(
            self.ledger,
            op_id=self._op,
            owner=claim(name),
            decision_id="d",
            is_undone=is_undone,
            keeps_devices=keeps_devices,
        )
        is_prepared = key in before and before[key].is_prepared
        assert isinstance(step, Refusal) == (is_prepared and not is_undone)
        if isinstance(step, Refusal):
            return multiple()
        after = step.ledger.allocations
        assert {owner_key: held for owner_key, held in after.items() if owner_key != key} == {
            owner_key: held for owner_key, held in before.items() if owner_key != key
        }
        assert (key in after) == (keeps_devices and key in before)
        assert key not in after or (after[key].holdings == before[key].holdings and not after[key].is_prepared)
        return self._apply(step)

    @rule(target=done, name=NAMES, is_pod=st.booleans())
    def release(self, name: str, is_pod: bool) -> tuple[str, str]:
        """Let go; the rest stays as it was."""
        holder = owner(name) if is_pod else kubelet(name)
        before = self.ledger.allocations
        step = transitions.release(self.ledger, op_id=self._op, owner=holder, decision_id="d")
        assert step.ledger.allocations == {key: held for key, held in before.items() if key != holder.key}
        return self._apply(step)

    @rule(target=done, name=NAMES)
    def place_and_release(self, name: str) -> object:
        """A release right after a placement restores exactly what was held before."""
        request = pod(name, container(cpus=4, gpu=1))
        outcome = place(with_ledger(dgx(), self.ledger), request)
        if not isinstance(outcome, Placement):
            return multiple()
        before = self.ledger.allocations
        first = self._apply(
            transitions.reserve(self.ledger, op_id=self._op, request=request, placement=outcome, decision_id="d")
        )
        second = self._apply(transitions.release(self.ledger, op_id=self._op, owner=request.owner, decision_id="d"))
        assert self.ledger.allocations == before
        return multiple(first, second)

    @rule(name=NAMES)
    def commit(self, name: str) -> None:
        """Committing changes the phase and nothing else; without a reservation it is refused."""
        step = transitions.commit(self.ledger, op_id=self._op, owner=owner(name), decision_id="d")
        if isinstance(step, Refusal):
            assert owner(name).key not in self.ledger.allocations
            return
        held = step.ledger.allocations[owner(name).key]
        assert held.phase is AllocationPhase.COMMITTED
        assert held.holdings == self.ledger.allocations[owner(name).key].holdings
        self._apply(step)

    @rule(operation=done)
    def retry(self, operation: tuple[str, str]) -> None:
        """A known operation gives its record again and changes nothing, whatever is asked under its
        id.
        """
        op_id, _ = operation
        record = self.ledger.operations.get(op_id)
        if record is None:
            return
        for step in (
            transitions.release(self.ledger, op_id=op_id, owner=owner("a"), decision_id="other"),
            transitions.adopt(
                self.ledger, Adoption(owner=kubelet("z"), devices={"gpu": ("gpu-0",)}), op_id=op_id, decision_id="other"
            ),
        ):
            assert isinstance(step, Step)
            assert step.is_repeat
            assert step.record == self.ledger.operations[op_id]
            assert step.ledger == self.ledger

    @rule()
    def announce(self) -> None:
        """Announcing keeps every answer and the sequence."""
        names = [op_id for op_id, _ in transitions.unannounced(self.ledger)]
        announced = transitions.announce(self.ledger, names)
        assert all(operation.pending is None for operation in announced.operations.values())
        assert transitions.unannounced(announced) == ()
        assert (announced.sequence, announced.allocations) == (self.ledger.sequence, self.ledger.allocations)
        self.ledger = announced

    @rule()
    def crash(self) -> None:
        """What is written is what comes back."""
        self.ledger = decode(encode(self.ledger), Ledger)

    @invariant()
    def nothing_is_held_twice(self) -> None:
        """No device and no CPU has two owners, and old answers stay bounded."""
        if hasattr(self, "ledger"):
            check_holders(self.ledger)
            holds: dict[str, list[bool]] = {}
            for allocation in self.ledger.allocations.values():
                for gpu, is_share in {
                    (gpu, gpu in h.shared.get("gpu", ()))
                    for h in allocation.holdings
                    for gpu in h.devices.get("gpu", ())
                }:
                    holds.setdefault(gpu, []).append(is_share)
            assert all(len(shares) == 1 or all(shares) for shares in holds.values())
            assert len(self.ledger.operations) <= transitions.OPERATIONS_KEPT


LedgerMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_operations_are_forgotten_oldest_first_when_there_are_too_many() -> None:
    """The newest answers are kept, the oldest go, and old ones lose their explanations first."""
    ledger = Ledger(node="n")
    for number in range(transitions.OPERATIONS_KEPT + 5):
        refusal = place(dgx(), pod("p", container(gpu=9)))
        assert isinstance(refusal, Refusal)
        ledger = transitions.record_refusal(
            ledger, op_id=f"op-{number}", verb="place", owner=owner("p"), decision_id="d", refusal=refusal
        ).ledger
        if number % 50 == 0:
            ledger = decode(encode(ledger), Ledger)

    assert set(ledger.operations) == {f"op-{number}" for number in range(5, transitions.OPERATIONS_KEPT + 5)}
    newest, oldest = ledger.operations[f"op-{transitions.OPERATIONS_KEPT + 4}"], ledger.operations["op-5"]
    assert isinstance(newest.outcome, Refusal)
    assert isinstance(oldest.outcome, Refusal)
    assert newest.outcome.reasons[0].facts
    assert [reason.code for reason in oldest.outcome.reasons] == ["not-enough-devices"]
    assert (oldest.number, newest.number) == (6, transitions.OPERATIONS_KEPT + 5)
