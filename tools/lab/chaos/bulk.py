"""Many operations on one node's ledger at full speed, under faults, with a history that is checked
for linearizability.

A real topology process works on a real nats-server, both behind a proxy. No other service runs.
Operations come in windows: between two of them nothing is under way, the ledger is read, and what
stayed unknown is settled, so a run of any length takes the memory of one window. The seed
determines the operations of each worker, the faults and the share of the operations at which each
begins. Their timing differs from run to run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.service_process import ServiceProcess
from lab.chaos.faults import BULK_FAULTS, Fault, Planned, cause, plan_faults
from lab.chaos.histories import Histories, Operation, Violation
from lab.chaos.ledger_objects import double_holdings
from lab.chaos.nats_proxy import NatsProxy
from lab.chaos.small_node import NODE, SETTINGS, publish_small_node
from lab.chaos.workload import Draft, Verb, effects_of, operations, owner_keys, unknown_effects
from topobus.bus.bus import Bus
from topobus.bus.failures import NobodyThere
from topobus.formats.messages.catalogue import ADOPT, COMMIT, LEDGER, PLACE, RELEASE
from topobus.formats.messages.messages import CommitRequest, PlaceRequest, ReleaseRequest
from topobus.formats.messages.nouns import Ask
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Holders
from topobus.values.outcome import Refusal
from topobus.values.request import ContainerRequest, Owner, OwnerKind, PodRequest

__all__ = ["BulkOptions", "BulkResult", "run_bulk"]

_ASKS: dict[Verb, Ask[Any, Any]] = {Verb.PLACE: PLACE, Verb.ADOPT: ADOPT, Verb.COMMIT: COMMIT, Verb.RELEASE: RELEASE}
_ASK_S = 1.0
# A request is not executed when it is older than its requester's time-out and the difference that
# clocks may have (topobus.bus.asks.answerer).
_SETTLED_S = _ASK_S + 2.5
_PAUSE_S = 0.02
# The ledger keeps 256 answers: a repeat after so many other operations may be executed again.
_REPEATABLE = 120
# While no fault is active. It only ends a run that makes no progress, however loaded the machine
# is.
_STUCK_S = 180.0
# Before the first operation a busy machine may take its time.
_SET_UP_S = 60.0
# While two topology services run, both receive each request, and the slower one may still decide it
# after the other one has answered. It finds that answer among the 256 that the ledger keeps, as it
# does on a node that decides some operations a second. So each worker pauses, for any difference in
# speed.
_TWIN_PAUSE_S = 0.2
_EMPTY_OWNER = Owner(kind=OwnerKind.POD, name="nobody", uid="uid-nobody")


@dataclass(frozen=True, kw_only=True)
class BulkOptions:
    """The parameters of a run."""

    seed: int
    operations: int
    workers: int = 8
    window: int = 2500
    faults: int = 3
    """In each window."""
    most_s: float = 1.0
    """How long a fault lasts at most."""
    seconds: float = float("inf")
    """After so long no operation begins, and those under way are checked."""
    nats_server: Path | None = None
    report: Callable[[str], None] = field(default=lambda _: None)
    program: tuple[str, ...] = ()
    """The program in place of the topology service. Empty: the service."""


@dataclass
class BulkResult:
    """The result of a run."""

    operations: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    checked_s: float = 0.0
    widest: int = 1
    violation: Violation | None = None


async def run_bulk(options: BulkOptions, folder: Path) -> BulkResult:
    """Run until all operations are done, the time is over or a violation was found."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            NatsServer(binary=options.nats_server, parent=folder, start_limit_s=_SET_UP_S)
        )
        proxy = await stack.enter_async_context(NatsProxy(server.port, options.seed))
        async with Bus.session(NatsSettings(url=proxy.url, timeout_s=_SET_UP_S), name="topobus-cli") as patient:
            await patient.provision()
            await publish_small_node(patient)
        bus = await stack.enter_async_context(
            Bus.session(NatsSettings(url=proxy.url, timeout_s=_ASK_S), name="topobus-cli")
        )
        environment = {**SETTINGS, "TOPOBUS_ALL__NATS__URL": proxy.url}
        topology = ServiceProcess("topology", environment, folder, program=options.program)
        twin = ServiceProcess("topology", environment, folder, label="topology-twin", program=options.program)
        stack.push_async_callback(twin.kill)
        stack.push_async_callback(topology.kill)
        await topology.start()
        run = _BulkRun(options, bus, _Troublemaker(server, proxy, topology, twin))
        return await run.run()


class _Troublemaker:
    """Causes the faults of the schedule, and undoes them."""

    def __init__(self, server: NatsServer, proxy: NatsProxy, topology: ServiceProcess, twin: ServiceProcess) -> None:
        self.server = server
        self.proxy = proxy
        self.topology = topology
        self.twin = twin
        self.done: Counter[str] = Counter()
        self.has_twin = False
        self.ended_at = time.monotonic()
        """When the last fault was over. An active fault ends now."""

    async def do(self, planned: Planned) -> None:
        """Cause one fault, and return when it is over. The affected part may still be
        recovering.
        """
        self.done[planned.name] += 1
        self.ended_at = float("inf")
        try:
            if planned.fault is Fault.TWIN:
                self.has_twin = True
                await self.twin.start()
                await asyncio.sleep(2 + planned.lasts_s)
                await self.twin.stop()
                self.has_twin = False
            else:
                await cause(planned, self.topology, self.server, self.proxy)
        finally:
            self.ended_at = time.monotonic()


class _BulkRun:
    """One run."""

    def __init__(self, options: BulkOptions, bus: Bus, troublemaker: _Troublemaker) -> None:
        self._options = options
        self._bus = bus
        self._trouble = troublemaker
        self._owners = (*owner_keys(options.workers), _EMPTY_OWNER.key)
        self._histories = Histories(self._owners)
        self._numbers = itertools.count(1)
        self._result = BulkResult()
        self._in_window = 0
        self._until = float("inf")

    @property
    def _is_over(self) -> bool:
        """Say whether no more operation may begin."""
        return self._result.violation is not None or time.monotonic() >= self._until

    async def run(self) -> BulkResult:
        """Run window after window."""
        options, result = self._options, self._result
        workers = [operations(options.seed, worker) for worker in range(options.workers)]
        began = time.monotonic()
        self._until = began + options.seconds
        for window in itertools.count():
            left = options.operations - result.operations
            if left <= 0 or self._is_over:
                break
            each = -(-min(options.window, left) // options.workers)
            await self._run_window(window, workers, each)
            result.seconds = time.monotonic() - began
            options.report(self._progress(window))
        result.faults, result.messages = self._trouble.done, self._trouble.proxy.met
        return result

    async def _run_window(self, window: int, workers: list[Iterator[Draft]], each: int) -> None:
        """Have each worker do so many operations, beside the faults of this window.

        Then wait until nothing is under way, and check.
        """
        self._in_window = 0
        planned = plan_faults(
            f"{self._options.seed}/{window}",
            self._options.faults,
            BULK_FAULTS,
            ("topology",),
            most_s=self._options.most_s,
        )
        async with asyncio.TaskGroup() as group:
            faults = group.create_task(self._do_faults(planned, each * len(workers)))
            working = [group.create_task(self._work(worker, each)) for worker in workers]
            await asyncio.gather(*working)
            await faults
        await self._settle()

    async def _do_faults(self, planned: tuple[Planned, ...], total: int) -> None:
        for each in planned:
            while self._in_window < each.at * total and not self._is_over:
                await asyncio.sleep(_PAUSE_S)
                self._trouble.topology.check_runs()
            if self._is_over:
                return
            await self._trouble.do(each)

    async def _work(self, worker: Iterator[Draft], count: int) -> None:
        for draft in itertools.islice(worker, count):
            if self._is_over:
                return
            await self._perform(draft)
            if self._trouble.has_twin:
                await asyncio.sleep(_TWIN_PAUSE_S)

    async def _settle(self) -> None:
        """Wait until nothing is under way: an answer now means that every older request has been
        executed, or never will be.
        """
        if self._histories.has_unknown:
            await asyncio.sleep(_SETTLED_S)
            await self._write_over()
        op_id = f"{self._options.seed}-rest-{next(self._numbers)}"
        await self._perform(
            Draft(
                op_id=op_id,
                verb=Verb.COMMIT,
                owner=_EMPTY_OWNER,
                request=CommitRequest(op_id=op_id, owner=_EMPTY_OWNER),
            )
        )
        await self._perform(Draft(op_id=op_id, verb=Verb.READ, owner=_EMPTY_OWNER))
        began = time.monotonic()
        self._histories.settle_unknown()
        self._result.checked_s += time.monotonic() - began
        self._result.widest = self._histories.widest
        self._result.violation = self._result.violation or self._histories.violation

    async def _write_over(self) -> None:
        """Write the ledger twice: a write of a killed process that a slow server has not stored yet
        then loses its compare-and-set.
        """
        op_id = f"{self._options.seed}-over-{next(self._numbers)}"
        pod = PodRequest(owner=_EMPTY_OWNER, containers=(ContainerRequest(name="main"),))
        await self._asked(
            Draft(op_id=op_id, verb=Verb.PLACE, owner=_EMPTY_OWNER, request=PlaceRequest(op_id=op_id, pod=pod))
        )
        op_id += "-end"
        await self._asked(
            Draft(
                op_id=op_id,
                verb=Verb.RELEASE,
                owner=_EMPTY_OWNER,
                request=ReleaseRequest(op_id=op_id, owner=_EMPTY_OWNER),
            )
        )

    async def _perform(self, draft: Draft) -> None:
        operation = Operation(next(self._numbers), draft)
        self._histories.call(operation)
        reply = await self._asked(draft)
        if reply is None:
            operation.is_unknown, operation.effects = True, unknown_effects(draft)
            self._result.outcomes["unknown"] += 1
        else:
            operation.answer, operation.effects = reply, effects_of(draft, reply, self._owners)
            self._histories.end(operation)
            self._result.outcomes[f"{draft.verb} {_outcome_of(reply)}"] += 1
        self._in_window += 1
        self._result.operations += 1

    async def _asked(self, draft: Draft) -> Any:
        """Ask until there is an answer.

        None when no answer can be trusted to be the first one's.
        """
        done_before, began = self._result.operations, time.monotonic()
        is_sent = False
        # A fault does not mean that the system is stuck: the time counts from its end.
        while time.monotonic() - max(began, self._trouble.ended_at) < _STUCK_S:
            try:
                if draft.request is None:
                    return await self._read()
                return await self._bus.ask(_ASKS[draft.verb], draft.request, timeout_s=_ASK_S, node=NODE)
            except PeerUnavailable as err:
                # If the server reports that nothing listens there, nothing was done.
                is_sent = is_sent or not isinstance(err.__cause__, NobodyThere)
            if is_sent and draft.request is not None and not self._may_repeat(draft, done_before):
                return None
            await asyncio.sleep(_PAUSE_S)
        self._result.violation = Violation(f"operation {draft.op_id} ({draft.verb}) had no answer for {_STUCK_S:g} s")
        return None

    def _may_repeat(self, draft: Draft, done_before: int) -> bool:
        """Say whether the ledger still keeps the first answer.

        Of kubelet's own allocations, which kubelet never repeats, it keeps only the newest few.
        """
        return draft.owner.kind is not OwnerKind.DEVICE_PLUGIN and self._result.operations - done_before <= _REPEATABLE

    async def _read(self) -> Holders:
        entry = await self._bus.get(LEDGER.read_as(Holders), node=NODE)
        ledger = entry.value if entry is not None else Holders(node=NODE)
        if double := double_holdings(ledger):
            self._result.violation = self._result.violation or Violation(
                f"sequence {ledger.sequence} of the ledger: {'; '.join(double)}"
            )
        return ledger

    def _progress(self, window: int) -> str:
        result = self._result
        return (
            f"window {window + 1}: {result.operations} operations, {result.operations / result.seconds:.0f} a second, "
            f"{result.outcomes['unknown']} of unknown outcome, {self._trouble.done.total()} faults, widest "
            f"{result.widest}"
        )


def _outcome_of(reply: object) -> str:
    result = getattr(reply, "result", None) or getattr(reply, "refusal", None)
    return "refused" if isinstance(result, Refusal) else "done"
