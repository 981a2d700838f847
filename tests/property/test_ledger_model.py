"""The topology service against a store that loses, delays, repeats and reorders, as a state machine
beside a simple model of who holds what.

Two instances of the real service (book, answers, announcer) share one bus in memory. Operations are
delivered in any order, any number of times, to either instance; each step of the store may time out
before or after it has happened, or kill the instance. Somebody who is no instance writes ledgers of
his own making into the store, whatever the service is doing. The model knows only effects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from msgspec import structs

from lab.memory_nats.fates import Died, Dies, Fate, Unconfirmed
from lab.memory_nats.memory_bus import FatedBus, Fates, MemoryBus, MemoryNats
from lab.memory_nats.memory_streams import MemoryStream
from support.alignment_nodes import container, dgx_facts, owner, pod
from support.laws import examples
from topobus.engine.ledger import transitions
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.formats.messages.catalogue import DECISION, LEDGER
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import AdoptRequest, CommitRequest, DecisionEvent, PlaceRequest, ReleaseRequest
from topobus.process.readiness import Readiness
from topobus.testing.clock import ManualClock
from topobus.topology.announcer import Announcer
from topobus.topology.ask_handlers import AskHandlers
from topobus.topology.ledger_store import LedgerStore
from topobus.topology.metrics import TopologyMetrics
from topobus.topology.node_inputs import NodeInputs
from topobus.topology.reservations import Reservations
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Allocation, AllocationPhase, Holding, Ledger, OperationRecord
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

NODE = "demo-node"
EXPIRE_S = 60.0
FACTS = dgx_facts()

# What befalls one step of the store: nothing, a time-out before or after it
# happened, death before or after.
FATES = st.lists(
    st.sampled_from(
        [
            None,
            None,
            None,
            Unconfirmed(is_done=False),
            Unconfirmed(is_done=True),
            Dies(is_done=False),
            Dies(is_done=True),
        ]
    ),
    max_size=3,
)
# Reading the newest events never fails here, for the announcer would wait in real time.
COUNTED = frozenset({"get", "history", "compare_and_set", "publish"})
KEY = f"$KV.{LEDGER.bucket}.{NODE}"
NAMES = st.sampled_from(["a", "b", "c"])
Units = frozenset[tuple[str, str]]


class Store:
    """What outlives every process: the server, and the fates of what is done there next."""

    def __init__(self) -> None:
        self.server = MemoryNats()
        self.fates: list[Fate | None] = []
        self._sessions = AsyncExitStack()
        self._decoded: tuple[int, Ledger] = (0, Ledger(node=NODE))

    async def open(self) -> None:
        """Connect and make what belongs there."""
        self._bus = await self._sessions.enter_async_context(MemoryBus.session(self.server, name="topology"))
        await self._bus.provision()

    async def close(self) -> None:
        """Disconnect."""
        await self._sessions.aclose()

    def bus(self) -> FatedBus:
        """Give an instance's bus."""
        return FatedBus(self._bus, Fates(lambda _: self.fates.pop(0) if self.fates else None, counted=COUNTED))

    @property
    def has_ledger(self) -> bool:
        """Say whether anything stands at the key."""
        return self._stream(LEDGER.bucket).last_of(KEY) is not None

    def ledger(self) -> Ledger:
        """Read the key past the bus.

        Errors: raises ContractError when what stands there is no ledger.
        """
        stored = self._stream(LEDGER.bucket).last_of(KEY)
        if stored is None:
            return Ledger(node=NODE)
        if self._decoded[0] != stored.sequence:
            self._decoded = (stored.sequence, decode(stored.data, Ledger))
        return self._decoded[1]

    def events(self) -> list[str]:
        """Give the ids of all decisions that were told of."""
        return [
            decode(stored.data, DecisionEvent).id
            for stored in self.server.streams[str(DECISION.stream)].messages.values()
        ]

    async def forge(self, data: bytes) -> None:
        """Write the key as somebody who is no instance."""
        self.server.receive(KEY, data, "", {})

    def _stream(self, bucket: str) -> MemoryStream:
        return self.server.streams[f"KV_{bucket}"]


class Instance:
    """One process of the service."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        bus = store.bus()
        metrics, readiness = TopologyMetrics(None), Readiness()
        facts = NodeInputs(bus, NodeAlignment(node=NODE), readiness)
        facts.machine, facts.inventories, facts._has_inventories = FACTS[0], FACTS[1], True
        self.book = LedgerStore(bus, node=NODE, readiness=readiness, metrics=metrics)
        self.announcer = Announcer(bus, node=NODE, store=self.book, metrics=metrics)
        self.reservations = Reservations(store=self.book, announcer=self.announcer, clock=clock, expire_s=EXPIRE_S)
        self.answers = AskHandlers(
            bus,
            node=NODE,
            inputs=facts,
            store=self.book,
            announcer=self.announcer,
            clock=clock,
            metrics=metrics,
            hint_timeout_s=0.02,
        )


def _without_owners(ledger: Ledger, **numbers: int) -> Ledger:
    return structs.replace(ledger, allocations={}, **numbers)


def _with_one_more(ledger: Ledger) -> Ledger:
    thief = owner("thief")
    stolen = Allocation(owner=thief, holdings=(Holding(devices={"fpga": ("fpga-stolen",)}),))
    return structs.replace(ledger, epoch=ledger.epoch + 1, allocations={**ledger.allocations, thief.key: stolen})


# What somebody who is no topology service may write over a ledger.
FORGERS: dict[str, Callable[[Ledger], bytes]] = {
    "empty-of-a-later-epoch": lambda ledger: encode(
        Ledger(node=NODE, epoch=ledger.epoch + 50, sequence=ledger.sequence + 100)
    ),
    "without-owners": lambda ledger: encode(_without_owners(ledger, epoch=ledger.epoch + 1)),
    "without-owners-in-place": lambda ledger: encode(_without_owners(ledger)),
    "without-owners-far-ahead": lambda ledger: encode(_without_owners(ledger, sequence=ledger.sequence + 1000)),
    "with-one-more": lambda ledger: encode(_with_one_more(ledger)),
    "last-epoch": lambda ledger: encode(_without_owners(ledger, epoch=2**53, sequence=2**53)),
    "last-epoch-and-all-owners": lambda ledger: encode(structs.replace(ledger, epoch=2**53)),
    "out-of-range": lambda ledger: encode(ledger).replace(b'"epoch":', b'"epoch":9007199254740994,"x":'),
    "garbage": lambda _ledger: b'{"stream":"KV_topobus_ledgers","seq":7}',
    "of-an-earlier-time": lambda _ledger: encode(Ledger(node=NODE)),
    "unchanged-but-later": lambda ledger: encode(structs.replace(ledger, epoch=ledger.epoch + 3)),
}
# A forgery may claim an epoch so far ahead and be answered with the next one;
# what claims more is not followed.
EPOCHS_A_FORGERY = 1025


def kubelet(name: str) -> Owner:
    """An owner behind kubelet's device-plugin door."""
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=name)


def units_of(allocation: Allocation) -> Units:
    """All that an owner holds."""
    return frozenset(
        {
            (device_class, name)
            for holding in allocation.holdings
            for device_class, names in holding.devices.items()
            for name in names
        }
        | {("cpu", str(cpu)) for holding in allocation.holdings for cpu in holding.cpus}
    )


class LedgerModel(RuleBasedStateMachine):
    """Drives the service; `sent` holds operations that are under way, `answered` those whose answer
    has arrived.
    """

    sent: Bundle[tuple[str, Any]] = Bundle("sent")

    @initialize()
    def start(self) -> None:
        """An empty store and two instances."""
        self.runner = asyncio.Runner()
        self.store = Store()
        self.runner.run(self.store.open())
        self.clock = ManualClock()
        self.instances = [Instance(self.store, self.clock) for _ in range(2)]
        self.count = 0
        self.answers: dict[str, Any] = {}
        self.applied: dict[str, OperationRecord] = {}
        self.holds: dict[str, tuple[Units, AllocationPhase]] = {}
        self.forgeries = 0

    def teardown(self) -> None:
        """In the end every decision was told of, once; to let go of what nobody holds is none."""
        if not hasattr(self, "runner"):
            return
        self.store.fates = []
        for which in range(2):
            self._on(which, lambda instance: self._open(instance), [])
            self._on(which, lambda instance: self._announce(instance), [])
        self._learn()
        decided = [
            record.decision_id
            for record in self.applied.values()
            if record.verb != "release" or record.devices or record.outcome is not None
        ]
        assert sorted(decided) == sorted(self.store.events())
        assert transitions.unannounced(self.store.ledger()) == ()
        self.runner.run(self.store.close())
        self.runner.close()

    def _on(self, which: int, action: Callable[[Instance], Coroutine[Any, Any, Any]], fates: list[Fate | None]) -> Any:
        """Let an instance do something; a dead one is replaced, a time-out is nobody's answer."""
        self.store.fates = list(fates)
        try:
            return self.runner.run(action(self.instances[which]))
        except Died:
            self.instances[which] = Instance(self.store, self.clock)
            return None
        except PeerUnavailable:
            return None
        finally:
            self.store.fates = []
            self._learn()

    @staticmethod
    async def _open(instance: Instance) -> None:
        async with instance.book._lock:
            await instance.book._reload()

    @staticmethod
    async def _announce(instance: Instance, *, is_quiet: bool = True) -> None:
        if instance.book._is_known:
            await instance.announcer._read_announced()
            await instance.announcer._publish_all()
            if is_quiet:
                await instance.book.write_marks()

    def _learn(self) -> None:
        """Apply to the model what has newly happened, oldest first."""
        ledger = self.store.ledger()
        new = sorted((operation.number, key) for key, operation in ledger.operations.items() if key not in self.applied)
        for _, key in new:
            record = ledger.operations[key]
            self.applied[key] = record
            self._apply(record, ledger)

    def _apply(self, record: OperationRecord, ledger: Ledger) -> None:
        if isinstance(record.outcome, Refusal):
            return
        if record.verb == "release":
            self.holds.pop(record.owner_key, None)
        elif record.verb == "commit":
            self.holds[record.owner_key] = (self.holds[record.owner_key][0], AllocationPhase.COMMITTED)
        elif isinstance(record.outcome, Placement):
            units = frozenset(
                {
                    (name, device)
                    for container_placement in record.outcome.containers
                    for name, devices in container_placement.devices.items()
                    for device in devices
                }
                | {
                    ("cpu", str(cpu))
                    for container_placement in record.outcome.containers
                    for cpu in container_placement.cpus
                }
            )
            self.holds[record.owner_key] = (units, ledger.allocations[record.owner_key].phase)
        else:
            own_units = units_of(ledger.allocations[record.owner_key])
            for displaced in record.displaced:
                left = self.holds[displaced.key][0] - own_units
                self.holds.pop(displaced.key)
                if left:
                    self.holds[displaced.key] = (left, AllocationPhase.COMMITTED)
            self.holds[record.owner_key] = (own_units, AllocationPhase.COMMITTED)

    def _new(self, make: Callable[[str], Any]) -> tuple[str, Any]:
        self.count += 1
        return f"op-{self.count}", make(f"op-{self.count}")

    @rule(target=sent, name=NAMES, cpus=st.integers(0, 8), gpus=st.integers(0, 4), is_reservation=st.booleans())
    def ask_to_place(self, name: str, cpus: int, gpus: int, is_reservation: bool) -> tuple[str, Any]:
        """Somebody asks for a pod."""
        request = pod(name, container(cpus=cpus, **({"gpu": gpus} if gpus else {})))
        return self._new(lambda op_id: PlaceRequest(op_id=op_id, pod=request, is_reservation=is_reservation))

    @rule(
        target=sent,
        name=NAMES,
        gpus=st.frozensets(st.sampled_from([f"gpu-{index}" for index in range(8)]), min_size=1, max_size=2),
    )
    def ask_to_adopt(self, name: str, gpus: frozenset[str]) -> tuple[str, Any]:
        """Kubelet has decided."""
        return self._new(
            lambda op_id: AdoptRequest(op_id=op_id, owner=kubelet(name), devices={"gpu": tuple(sorted(gpus))})
        )

    @rule(target=sent, name=NAMES, is_pod=st.booleans())
    def ask_to_release(self, name: str, is_pod: bool) -> tuple[str, Any]:
        """Somebody lets go."""
        return self._new(lambda op_id: ReleaseRequest(op_id=op_id, owner=owner(name) if is_pod else kubelet(name)))

    @rule(target=sent, name=NAMES)
    def ask_to_commit(self, name: str) -> tuple[str, Any]:
        """Somebody keeps what was reserved."""
        return self._new(lambda op_id: CommitRequest(op_id=op_id, owner=owner(name)))

    @rule(operation=sent, which=st.integers(0, 1), fates=FATES)
    def deliver(self, operation: tuple[str, Any], which: int, fates: list[Fate | None]) -> None:
        """Any operation arrives, for the first time or again, early or late.

        The same operation gives the same answer, or says what became of it.
        """
        op_id, request = operation
        verbs: dict[type, str] = {
            PlaceRequest: "place",
            AdoptRequest: "adopt",
            ReleaseRequest: "release",
            CommitRequest: "commit",
        }
        reply = self._on(which, lambda instance: getattr(instance.answers, verbs[type(request)])(request), fates)
        if reply is None:
            return
        answer = (
            reply.devices
            if isinstance(request, ReleaseRequest)
            else reply.refusal
            if isinstance(request, CommitRequest)
            else reply.result
        )
        codes = [reason.code for reason in answer.reasons] if isinstance(answer, Refusal) else []
        if codes == ["released-since"]:
            # True only when what was given is not held any more.
            record = self.applied[op_id]
            assert not isinstance(record.outcome, Refusal)
            assert self.holds.get(record.owner_key) is None or not self._is_held(record, request)
            return
        first = self.answers.setdefault(op_id, answer)
        if isinstance(answer, Placement | Refusal):
            assert type(answer) is type(first)
        if isinstance(answer, Placement):
            got = [(container_placement.cpus, container_placement.devices) for container_placement in answer.containers]
            assert got == [(each_container.cpus, each_container.devices) for each_container in first.containers]

    def _is_held(self, record: OperationRecord, request: Any) -> bool:
        held = self.holds[record.owner_key][0]
        if isinstance(request, AdoptRequest):
            return all((name, device) in held for name, devices in request.devices.items() for device in devices)
        return self.store.ledger().allocations[record.owner_key].decision_id == record.decision_id

    @rule(operation=consumes(sent))
    def lose(self, operation: tuple[str, Any]) -> None:
        """A message never arrives (again)."""

    @rule(which=st.integers(0, 1), fates=FATES, is_quiet=st.booleans())
    def announce(self, which: int, fates: list[Fate | None], is_quiet: bool) -> None:
        """An instance publishes what is to be told; when nothing else comes, it marks that, too."""
        self._on(which, lambda instance: self._announce(instance, is_quiet=is_quiet), fates)

    @rule(which=st.integers(0, 1), fates=FATES)
    def look(self, which: int, fates: list[Fate | None]) -> None:
        """An instance looks at the store."""
        self._on(which, self._open, fates)

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        """An instance dies between two operations and starts again."""
        self.instances[which] = Instance(self.store, self.clock)

    @rule(which=st.integers(0, 1), fates=FATES, seconds=st.sampled_from([1.0, EXPIRE_S]))
    def let_time_pass(self, which: int, fates: list[Fate | None], seconds: float) -> None:
        """Reservations that are old enough end; committed holdings never do."""
        committed = {key for key, (_, phase) in self.holds.items() if phase is AllocationPhase.COMMITTED}
        self._on(which, lambda instance: instance.reservations.expire(), [])
        self.clock.advance(seconds)
        self._on(which, lambda instance: instance.reservations.expire(), fates)

        assert committed <= self.holds.keys()

    @rule(
        which=st.integers(0, 1),
        forger=st.sampled_from(sorted(FORGERS)),
        fates=st.lists(st.sampled_from([None, Unconfirmed(is_done=False), Unconfirmed(is_done=True)]), max_size=2),
        is_start=st.booleans(),
    )
    def forge(self, which: int, forger: str, fates: list[Fate | None], is_start: bool) -> None:
        """Somebody else writes the key.

        An instance, whatever it knew or freshly started, puts back what
        was answered when it has looked.
        """
        if not self.store.has_ledger:
            return
        before = self.store.ledger()
        self.runner.run(self.store.forge(FORGERS[forger](before)))
        self.forgeries += 1
        if is_start:
            self.instances[which] = Instance(self.store, self.clock)
        # A look that fails changes nothing of what was forged or mends it; the next one, which
        # nothing befalls, has mended it.
        if fates:
            self.store.fates = list(fates)
            with contextlib.suppress(PeerUnavailable):
                self.runner.run(self._open(self.instances[which]))
            self.store.fates = []
        self.runner.run(self._open(self.instances[which]))

        assert self.store.ledger().allocations == before.allocations
        assert self.store.ledger().epoch <= before.epoch + EPOCHS_A_FORGERY

    @invariant()
    def the_ledger_holds_what_the_model_holds(self) -> None:
        """Nothing leaks, nothing is lost, nothing is held twice, and no operation counts twice."""
        if not hasattr(self, "store"):
            return
        ledger = self.store.ledger()
        check_holders(ledger)
        assert {
            key: (units_of(allocation), allocation.phase) for key, allocation in ledger.allocations.items()
        } == self.holds
        assert ledger.sequence == len(self.applied)
        assert ledger.epoch <= 1 + EPOCHS_A_FORGERY * self.forgeries


LedgerModel.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestLedgerModel = LedgerModel.TestCase
