"""A whole node under faults: pods come and go through all three interfaces, and after the last
fault everything must recover by itself.

The result has the violations, and the time until everything was well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.service_process import unready, wait_ready
from lab.chaos.faults import Fault, Planned, plan_faults, possible_faults
from lab.chaos.node import DEVICES, NODE, READY_S, ChaosNode, Shape, chaos_node
from lab.chaos.observer import NodeObserver
from lab.chaos.pod_lives import CLASSES, Lives, Stuck, draw_lives, leaves
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import OBJECT
from topobus.process.config import NatsSettings
from topobus.values.errors import PeerUnavailable
from topobus.values.request import OwnerKind

__all__ = ["NodeOptions", "NodeResult", "run_node"]

WELL_S = 60.0
"""After the last fault everything is well again within this time."""
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The parameters of a run."""

    seed: int
    steps: int
    workers: int = 6
    most_s: float = 5.0
    """How long a fault lasts at most."""
    seconds: float = float("inf")
    """After so long no other step begins."""
    shape: Shape = field(default_factory=Shape)
    only: tuple[Fault, ...] = ()
    """Only these kinds of faults."""
    well_s: float = WELL_S
    report: Callable[[str], None] = field(default=lambda _: None)


@dataclass
class NodeResult:
    """The result of a run."""

    steps: int = 0
    lives: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    at_hub: Counter[str] = field(default_factory=Counter)
    granted: int = 0
    revisions: int = 0
    epochs: int = 0
    seconds: float = 0.0
    well_after_s: float = 0.0
    violations: list[str] = field(default_factory=list)


async def run_node(options: NodeOptions, folder: Path) -> NodeResult:
    """Run all steps, then wait until everything is well."""
    result = NodeResult()
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(chaos_node(folder, options.seed, options.shape))
        outside, inside = [
            await stack.enter_async_context(
                Bus.session(
                    NatsSettings(url=url, provisioner="topology" if options.shape.is_leaf else "controller"),
                    name="topobus-cli",
                    clock=node.clocks.machine,
                )
            )
            for url in (node.server.url, node.proxy.url)
        ]
        await outside.provision()
        observer = NodeObserver(outside, NODE, node.cdi_dir)
        lives = Lives(inside, node.kubelet, observer, NODE)
        run = _NodeRun(options, node, observer, lives, outside)
        try:
            await run.run(result)
        except* (Stuck, PeerUnavailable) as group:
            result.violations += [str(err) for err in leaves(group)]
        result.violations = [*observer.violations, *result.violations]
        result.lives, result.faults, result.messages = lives.outcomes, node.done, node.proxy.met
        result.at_hub = node.hub.counts if node.hub is not None else Counter()
        result.granted, result.revisions, result.epochs = observer.granted, observer.revisions, len(observer.epochs)
        result.seconds = time.monotonic() - began
    return result


class _NodeRun:
    """One run."""

    def __init__(
        self, options: NodeOptions, node: ChaosNode, observer: NodeObserver, lives: Lives, outside: Bus
    ) -> None:
        self._options = options
        self._node = node
        self._observer = observer
        self._lives = lives
        self._outside = outside
        self._is_over = False

    async def run(self, result: NodeResult) -> None:
        """Start, go through all steps while pods live, then wait twice until everything is well:
        with what is held then, and with nothing.
        """
        options = self._options
        await wait_ready(self._node.services.values(), limit_s=READY_S)
        for each in CLASSES:
            await self._lives.apply(each, f"uid-{each.metadata['name']}")
        options.report(f"ready: {', '.join(self._node.services)}{_missing(self._node)}")
        watching = asyncio.gather(self._observer.run(), self._node.supervise())
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(options.workers):
                    group.create_task(self._work(worker))
                await self._do_steps(result)
                last = time.monotonic()
                self._is_over = True
                self._lives.hold_all()
                options.report("the last fault is over: holding what is held")
                await self._until_well(last, "with what is held")
                result.well_after_s = time.monotonic() - last
                options.report(f"well again after {result.well_after_s:.1f} s; giving all back")
                self._lives.release_all()
            await self._until_well(time.monotonic(), "with nothing held")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _work(self, worker: int) -> None:
        for plan in draw_lives(self._options.seed, worker):
            if self._is_over:
                return
            await self._lives.lead(plan)

    async def _do_steps(self, result: NodeResult) -> None:
        options = self._options
        kinds = options.only or possible_faults(
            has_hub=self._node.hub is not None, can_move_clocks=self._node.clocks.can_move
        )
        planned = plan_faults(
            f"{options.seed}/node", options.steps, kinds, tuple(self._node.services), most_s=options.most_s
        )
        pauses = random.Random(f"{options.seed}/pauses")
        began = time.monotonic()
        for number, each in enumerate(planned, start=1):
            await asyncio.sleep(pauses.random() * 3)
            if time.monotonic() - began >= options.seconds or self._observer.violations:
                return
            options.report(
                f"step {number} of {len(planned)}: {_step_text(each)}; {self._observer.granted} grants, "
                f"{self._observer.revisions} revisions"
            )
            if each.fault is Fault.LOSE_LEDGER:
                await self._lose_ledger(each, number)
            else:
                await self._node.do(each, self._observer)
            if each.fault in (Fault.ROLL_BACK, Fault.EMPTY_STORE):
                self._lives.store_losses += 1
                await self._restore_objects()
            result.steps += 1

    async def _lose_ledger(self, planned: Planned, number: int) -> None:
        """Start topology from an older ledger, and check that it learns again what kubelet and the
        gateway know.

        Until then it may allocate a device that it does not know to be held, so no client asks
        meanwhile. Holdings that have ended since the copy are held again, and their clients end
        them again: the ledger takes nothing from an owner that it knows when another owner has the
        device.
        """
        copy = await self._node.copy_ledger()
        ended = len(self._lives.ended)
        await asyncio.sleep(planned.lasts_s)
        await self._lives.stand_still(self._options.workers)
        self._observer.ledger_is_lost()
        await self._node.put_ledger_back(copy)
        for end_again in self._lives.ended[ended:]:
            await end_again(f"again-{number}")
        self._lives.outcomes["placed pod lost with the ledger"] += await self._observer.until_recovered(
            self._options.well_s
        )
        self._lives.go_on()

    async def _restore_objects(self) -> None:
        """Do what users do after their stand-alone objects were restored from an earlier time:
        classes are applied again, and claims that are no longer wanted are deleted again.
        """
        for each in CLASSES:
            await self._lives.apply(each, f"uid-{each.metadata['name']}")
        # What cannot be read at this moment is checked again before the run counts as well.
        with suppress(PeerUnavailable):
            await self._sweep()

    async def _sweep(self) -> None:
        for entry in await self._outside.list(OBJECT, kind="resourceclaim"):
            if entry.parts["name"] not in self._lives.live_claims:
                await self._lives.ask_end(entry.value)

    async def _until_well(self, last: float, when: str) -> None:
        """Wait until everything is correct, for no longer than promised."""
        while True:
            problems = await self._problems()
            if not problems or self._observer.violations:
                return
            if time.monotonic() - last > self._options.well_s:
                raise Stuck(f"{when}, not well {self._options.well_s:g} s after the last fault: {'; '.join(problems)}")
            await asyncio.sleep(_LOOK_S)

    async def _problems(self) -> list[str]:
        """Return what is wrong."""
        problems = await unready(self._node.services.values())
        try:
            problems += await self._observer.differences()
            await self._sweep()
        except PeerUnavailable as err:
            return [*problems, str(err)]
        problems += self._capacity_problems(
            frozenset(
                name
                for grant in self._observer.grants
                if grant.kind is not OwnerKind.DEVICE_PLUGIN
                for name in grant.devices
            )
        )
        if self._node.hub is not None:
            try:
                problems += await self._node.hub.problems()
            except (PeerUnavailable, TimeoutError) as err:
                problems.append(f"the hub cannot be compared: {type(err).__name__} {err}")
        return problems

    def _capacity_problems(self, elsewhere: frozenset[str]) -> list[str]:
        """Compare kubelet's capacity: it has all devices except those that pods and claims hold."""
        problems: list[str] = []
        for resource, count in DEVICES.items():
            device_class = resource.rpartition("/")[2]
            wanted = count - sum(name.startswith(f"{device_class}-") for name in elsewhere)
            capacity = self._node.kubelet.capacity().get(resource)
            if capacity is None or capacity.allocatable != wanted:
                problems.append(f"kubelet has {capacity.allocatable if capacity else 'no'} {resource}, wanted {wanted}")
        return problems


def _step_text(planned: Planned) -> str:
    moved = f", {planned.moves_s / 3600:+.1f} h" if planned.fault in (Fault.STEP_CLOCK, Fault.SKEW_CLOCK) else ""
    return f"{planned.name} ({planned.lasts_s:.1f} s{moved})"


def _missing(node: ChaosNode) -> str:
    """Return which faults are impossible here."""
    missing = (
        ("disk of its own to fill", node.has_small_disk),
        ("clock to move (libfaketime is not installed)", node.clocks.can_move),
    )
    return "".join(f"; no {what}" for what, is_there in missing if not is_there)
