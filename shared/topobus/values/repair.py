"""Repairs by policy, as values: what an operator declares, and the one document of repairs that are
under way, paused, or left to a person.

Moments are seconds since 1970 in UTC, because they are compared and added to.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from topobus.values.health import DeviceHealth
from topobus.values.pools import Condition

__all__ = [
    "REPAIR_POLICY",
    "LeftDevice",
    "Place",
    "Protected",
    "Repair",
    "RepairEnd",
    "RepairNote",
    "RepairNoteEvent",
    "RepairPause",
    "RepairPolicy",
    "RepairRule",
    "RepairRuleSettings",
    "RepairState",
    "RepairedDevice",
    "Step",
]

REPAIR_POLICY = "repair-policy"
"""Who asks for the operations of a repair. Its operations' ids begin with the repair's id."""

Place = tuple[str, str, str]
"""A device of the fleet: node, class, name."""

Seconds = Annotated[float, Meta(gt=0, le=2_592_000)]
Count = Annotated[int, Meta(ge=1, le=100_000)]


class Step(StrEnum):
    """The steps of a rule that are no operation of their own. Any other step is a verb of `topobus
    device` by its name.
    """

    OBSERVE = "observe"
    """Nothing is done. The only step of its rule."""
    DRAIN = "drain"
    """`maintain --drain`, after `grace_s`: the claims that have the device are evicted."""
    WAIT_IDLE = "wait-idle"
    """Wait until nothing holds the device, nor what a reset of it also resets."""
    WAIT_HEALTHY = "wait-healthy"
    """Wait until the device is healthy without the rule's evidence for `hold_s`."""
    CALL_A_PERSON = "call-a-person"
    """Give up: the device stays withheld."""


class RepairRule(Struct, frozen=True, kw_only=True):
    """What is done about some reasons of one device class."""

    name: str
    """For people, decisions and `topobus repair`."""
    device_class: str
    """The class of its devices."""
    reasons: tuple[str, ...]
    """Codes of health (docs/reference/health-reasons.md), or `*`: any reason for which a device is
    unhealthy."""
    steps: tuple[str, ...]
    """Done in order: `observe`, `drain`, `wait-idle`, `wait-healthy`, `call-a-person`, or a verb of
    `topobus device` such as `maintain`, `reset`, `forgive`, `return`."""
    tries: Annotated[int, Meta(ge=1, le=10)] = 1
    """How often the steps are done for the same evidence before a person is called."""
    again_within_s: Seconds = 86_400.0
    """Evidence that is back so soon after a repair is the same evidence: the next try, or a
    person."""
    grace_s: Annotated[float, Meta(ge=0, le=2_592_000)] = 0.0
    """How long `drain` lets the owners of the device end by themselves."""
    idle_within_s: Seconds = 86_400.0
    """How long `wait-idle` may take before a person is called."""
    within_s: Seconds = 1800.0
    """How long any other step may take: an operation that is not answered, or a device that does
    not become healthy. More than eight minutes, the longest recovery of a device that relapsed."""
    hold_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """How long the device must be healthy to count as repaired."""


class RepairRuleSettings(RepairRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule as an operator writes it: a key that it does not have is a mistake."""


class Protected(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of which no repair takes the last healthy ones, in the whole fleet."""

    device_class: str
    """Their class."""
    where: tuple[Condition, ...] = ()
    """Conditions as of a pool; all must be true. None: all devices of the class."""
    keep: Count = 1
    """So many of them stay healthy and offered."""


class RepairPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What repairs are done without a person. The default does nothing: faults are observed."""

    rules: tuple[RepairRuleSettings, ...] = ()
    """The first rule that has the class and a reason of a device applies. Without one a fault is
    observed."""
    at_once: Count = 1
    """Repairs under way at the same time."""
    at_once_per_node: Count = 1
    """The same, on one node."""
    per_hour: Count = 4
    """Repairs begun in any hour."""
    protect: tuple[Protected, ...] = ()
    """Devices of which some stay healthy and offered, whatever is wrong with others."""
    own_reasons: tuple[str, ...] = ()
    """Codes of drivers of your own, which are not on the page of health reasons."""


class Repair(Struct, frozen=True, kw_only=True):
    """A repair that is under way."""

    id: str
    node: str
    device_class: str
    device: str
    rule: RepairRule
    """As it was when the repair began: a changed policy does not change it."""
    codes: tuple[str, ...]
    """The evidence: its reasons, sorted."""
    began_s: float
    trial: int = 1
    """From 1: which try it is for this evidence."""
    step: int = 0
    """The index of its step."""
    step_s: float
    """When the step began."""
    attempt: int = 0
    """How often its operation was refused because the device was in use."""
    is_asked: bool = False
    """The step is an operation that may have been asked for."""
    healthy_s: float | None = None
    """Since when the device is healthy without the evidence."""
    withheld_by: str = ""
    """The repair's operation by which the device is withheld; empty: it is offered."""
    left_codes: tuple[str, ...] = ()
    """Evidence for which an earlier repair called a person, and that may still be there."""
    seen: str = ""
    """The newest operation of another on the device when the repair began."""
    failure: str = ""
    """Why it gives up. It then withholds the device as its last operation."""

    @property
    def place(self) -> Place:
        """The device of the fleet."""
        return (self.node, self.device_class, self.device)

    @property
    def what(self) -> str:
        """The present step in one word."""
        return "give up" if self.failure else self.rule.steps[self.step]

    @property
    def why(self) -> str:
        """Why it gives up, else how far it is."""
        steps, tries = len(self.rule.steps), self.rule.tries
        return self.failure or f"step {self.step + 1} of {steps}, try {self.trial} of {tries}"

    @property
    def op_id(self) -> str:
        """The id of the present step's operation, the same however often it is asked for."""
        return f"{self.id}.end" if self.failure else f"{self.id}.{self.trial}.{self.step}.{self.attempt}"


class RepairEnd(StrEnum):
    """How a repair ended."""

    REPAIRED = "repaired"
    GAVE_UP = "gave-up"
    """A person is needed; the device stays withheld."""
    TAKEN_OVER = "taken-over"
    """A person worked on the device meanwhile, and decides."""
    GONE = "gone"
    """The device is not published any more."""


class LeftDevice(Struct, frozen=True, kw_only=True):
    """A device that no repair touches until its evidence changes, or until a person acts."""

    node: str
    device_class: str
    device: str
    codes: tuple[str, ...]
    """All that was wrong with it. Another reason is new evidence."""
    end: RepairEnd
    why: str
    since_s: float
    repair: str
    rule: str
    withheld_by: str = ""
    """The repair's operation by which it is withheld."""
    seen: str = ""
    """The newest operation of another on the device."""

    @property
    def place(self) -> Place:
        """The device of the fleet."""
        return (self.node, self.device_class, self.device)


class RepairedDevice(Struct, frozen=True, kw_only=True):
    """A device that was repaired, remembered for `again_within_s`."""

    node: str
    device_class: str
    device: str
    codes: tuple[str, ...]
    trial: int
    until_s: float

    @property
    def place(self) -> Place:
        """The device of the fleet."""
        return (self.node, self.device_class, self.device)


class RepairNote(Struct, frozen=True, kw_only=True):
    """What was decided about a repair: it began, waits, or ended."""

    repair: str
    rule: str
    device_class: str
    device: str
    what: str
    """`begun`, a step, or how it ended."""
    codes: tuple[str, ...]
    why: str = ""
    end: RepairEnd | None = None

    @property
    def text(self) -> str:
        """Write for people which repair it is of, without what was decided.

        >>> RepairNote(repair="r-1", rule="aer", device_class="gpu", device="gpu-0", what="begun", codes=("aer-fatal",)).text
        'repair gpu-0 by rule aer (aer-fatal)'
        """  # noqa: E501
        return f"repair {self.device} by rule {self.rule} ({', '.join(self.codes)})"

    @property
    def answer(self) -> str:
        """Write for people what was decided.

        >>> note = RepairNote(repair="r-1", rule="a", device_class="gpu", device="g", codes=(), what="reset", why="-")
        >>> note.answer
        'reset: -'
        """
        return f"{self.what}: {self.why}" if self.why else self.what


class RepairNoteEvent(Struct, frozen=True, kw_only=True):
    """A decision that is written and perhaps not published yet."""

    id: str
    node: str
    time_s: float
    note: RepairNote
    health: DeviceHealth | None = None


class RepairPause(Struct, frozen=True, kw_only=True):
    """No repair begins or continues."""

    who: str
    why: str = ""
    since_s: float
    until_s: float | None = None
    """None: until somebody resumes them."""

    def holds_at(self, now_s: float) -> bool:
        """Say whether repairs are paused at a moment."""
        return self.until_s is None or now_s < self.until_s


class RepairState(Struct, frozen=True, kw_only=True):
    """All repairs of a fleet. It is written before an operation is asked for, by compare-and-set:
    so budgets hold, and a step is done once, whatever number of controllers there is.
    """

    policy: str = ""
    """The policy as JSON, of the controller that started last: all replicas follow one. A replica
    of another release that cannot read it does nothing."""
    repairs: tuple[Repair, ...] = ()
    """Sorted by place."""
    begun_s: tuple[float, ...] = ()
    """When repairs began in the last hour."""
    left: tuple[LeftDevice, ...] = ()
    repaired: tuple[RepairedDevice, ...] = ()
    pause: RepairPause | None = None
    """The newest, also one that is over."""
    events: tuple[RepairNoteEvent, ...] = ()
    """Decisions to publish."""
