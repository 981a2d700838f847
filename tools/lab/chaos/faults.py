"""Plans faults: a schedule drawn from a seed.

Each fault has the share of the operations at which it begins, and its length. The same seed gives
the same schedule. Faults of one process, of the server and of connections are caused here as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from lab.bench.service_process import ServiceProcess
from lab.chaos.nats_proxy import NatsProxy, Trouble
from topobus.simulation.nats_server import NatsServer

__all__ = [
    "BULK_FAULTS",
    "CLOCK_FAULTS",
    "HUB_FAULTS",
    "NODE_FAULTS",
    "TROUBLES",
    "Fault",
    "Planned",
    "cause",
    "plan_faults",
    "possible_faults",
]


class Fault(StrEnum):
    """The kinds of faults."""

    KILL_SERVICE = "kill"
    """SIGKILL, and a new process at once."""
    RESTART_SERVICE = "restart"
    FREEZE_SERVICE = "freeze"
    """SIGSTOP for a while."""
    TWIN = "twin"
    """A second instance of the service for a while."""
    KILL_SERVER = "kill-server"
    RESTART_SERVER = "restart-server"
    FREEZE_SERVER = "freeze-server"
    ROLL_BACK = "roll-back"
    """The server's store is replaced by an older copy."""
    EMPTY_STORE = "empty-store"
    LOSE_LEDGER = "lose-ledger"
    """The ledger's bucket is replaced by an older copy while topology is down as well: what
    happened since is known only to kubelet and the gateway."""
    FILL_DISK = "fill-disk"
    RESTART_KUBELET = "restart-kubelet"
    CUT = "cut"
    """All connections end without a notice."""
    LOSE = "lose"
    DOUBLE = "double"
    DELAY = "delay"
    SWALLOW = "swallow"
    """Writes happen, but are not confirmed."""
    MIXED = "mixed"
    STEP_CLOCK = "step-clock"
    """The machine's wall clock is set forward or back by hours, and stays so. That includes the
    clients' clock, as they are on the same machine."""
    SKEW_CLOCK = "skew-clock"
    """The wall clock of one process is hours away from the machine's for a while."""
    CUT_LINK = "cut-link"
    """The connection between a node's own server and the hub is down for a while."""
    KILL_HUB = "kill-hub"
    FREEZE_HUB = "freeze-hub"
    ROLL_BACK_HUB = "roll-back-hub"
    EMPTY_HUB = "empty-hub"


TROUBLES = {
    Fault.LOSE: Trouble(lose=0.03),
    Fault.DOUBLE: Trouble(double=0.2),
    Fault.DELAY: Trouble(delay=0.2, delay_s=0.2),
    Fault.SWALLOW: Trouble(swallow=0.1),
    Fault.MIXED: Trouble(lose=0.01, double=0.05, delay=0.05, swallow=0.03),
}

BULK_FAULTS = (
    Fault.KILL_SERVICE,
    Fault.KILL_SERVICE,
    Fault.FREEZE_SERVICE,
    Fault.TWIN,
    Fault.KILL_SERVER,
    Fault.FREEZE_SERVER,
    Fault.CUT,
    *TROUBLES,
)
"""Faults under which a ledger's history stays linearizable. A restored store is not among them:
until the ledger is written back, it shows old values."""


NODE_FAULTS = (
    Fault.KILL_SERVICE,
    Fault.KILL_SERVICE,
    Fault.KILL_SERVICE,
    Fault.RESTART_SERVICE,
    Fault.FREEZE_SERVICE,
    Fault.FREEZE_SERVICE,
    Fault.KILL_SERVER,
    Fault.RESTART_SERVER,
    Fault.FREEZE_SERVER,
    Fault.ROLL_BACK,
    Fault.EMPTY_STORE,
    Fault.LOSE_LEDGER,
    Fault.FILL_DISK,
    Fault.RESTART_KUBELET,
    Fault.CUT,
    *TROUBLES,
    Fault.STEP_CLOCK,
    Fault.SKEW_CLOCK,
)
"""Faults from which a whole node recovers."""

CLOCK_FAULTS = (Fault.STEP_CLOCK, Fault.SKEW_CLOCK)
"""Faults that need clocks that can be moved. Where the services' cannot, moving the clients' alone
would make requests of another time, which topology rightly refuses."""

HUB_FAULTS = (
    Fault.CUT_LINK,
    Fault.CUT_LINK,
    Fault.CUT_LINK,
    Fault.KILL_HUB,
    Fault.FREEZE_HUB,
    Fault.ROLL_BACK_HUB,
    Fault.EMPTY_HUB,
)
"""Additional faults where the node has a server of its own."""


def possible_faults(*, has_hub: bool, can_move_clocks: bool) -> tuple[Fault, ...]:
    """List the faults of a whole node here, each as often as it is drawn.

    >>> Fault.STEP_CLOCK in possible_faults(has_hub=False, can_move_clocks=False), Fault.CUT_LINK in possible_faults(has_hub=True, can_move_clocks=True)
    (False, True)
    """  # noqa: E501
    kinds = (*NODE_FAULTS, *(HUB_FAULTS if has_hub else ()))
    return tuple(kind for kind in kinds if can_move_clocks or kind not in CLOCK_FAULTS)


class Planned(Struct, frozen=True, kw_only=True):
    """One fault of the schedule."""

    at: float
    """After which share of the operations it begins, 0 to 1."""
    fault: Fault
    service: str = ""
    lasts_s: float

    @property
    def name(self) -> str:
        """The fault and the part that it affects."""
        is_of_service = self.fault in (
            Fault.KILL_SERVICE,
            Fault.RESTART_SERVICE,
            Fault.FREEZE_SERVICE,
            Fault.SKEW_CLOCK,
        )
        return f"{self.fault} {self.service}" if is_of_service else self.fault.value

    @property
    def moves_s(self) -> float:
        """By how much a clock is moved: forward or back, by as many hours as the fault's length has
        seconds.
        """
        return random.Random(f"{self.lasts_s}").choice((-3600, 3600)) * self.lasts_s


def plan_faults(
    seed: str, count: int, kinds: Sequence[Fault], services: Sequence[str], *, most_s: float
) -> tuple[Planned, ...]:
    """Draw a schedule, in the order of time."""
    chance = random.Random(seed)
    planned = [
        Planned(
            at=chance.random(),
            fault=chance.choice(kinds),
            service=chance.choice(services),
            lasts_s=0.2 + chance.random() * most_s,
        )
        for _ in range(count)
    ]
    return tuple(sorted(planned, key=lambda each: each.at))


async def cause(planned: Planned, service: ServiceProcess, server: NatsServer, proxy: NatsProxy) -> None:
    """Cause a fault of a service, of the server or of connections, and return when it is over. The
    affected part may still be recovering.
    """
    match planned.fault:
        case Fault.KILL_SERVICE:
            await service.kill()
            await service.start()
        case Fault.RESTART_SERVICE:
            await service.stop()
            await service.start()
        case Fault.FREEZE_SERVICE:
            service.freeze()
            await asyncio.sleep(planned.lasts_s)
            service.thaw()
        case Fault.KILL_SERVER:
            await server.kill()
            await server.start()
        case Fault.RESTART_SERVER:
            await server.stop()
            await server.start()
        case Fault.FREEZE_SERVER:
            server.pause()
            await asyncio.sleep(planned.lasts_s)
            server.resume()
        case Fault.CUT:
            proxy.cut()
        case fault:
            proxy.trouble = TROUBLES[fault]
            await asyncio.sleep(planned.lasts_s)
            proxy.trouble = Trouble()
