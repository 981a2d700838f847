"""Repairs by policy, as values: what an operator declares, and what became of each repair.

Moments are seconds since 1970 in UTC, because they are compared and added to.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from topobus.values.pools import Condition

__all__ = [
    "REPAIR_POLICY",
    "Place",
    "Protected",
    "Repair",
    "RepairEnd",
    "RepairNote",
    "RepairPause",
    "RepairPolicy",
    "RepairRule",
    "RepairRuleSettings",
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
    """What a repair does, step by step."""

    name: str
    """For people, decisions and `topobus repair`."""
    device_class: str
    """The class of its devices."""
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
    """What is done about some reasons of one device class. A key that it does not have is a
    mistake.
    """

    reasons: tuple[str, ...]
    """Codes of health (docs/reference/health-reasons.md), or `*`: any reason for which a device is
    unhealthy."""


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


class RepairEnd(StrEnum):
    """How a repair ended."""

    REPAIRED = "repaired"
    GAVE_UP = "gave-up"
    """A person is needed; the device stays withheld."""
    TAKEN_OVER = "taken-over"
    """A person worked on the device meanwhile, and decides."""
    GONE = "gone"
    """The device is not published any more."""


class Repair(Struct, frozen=True, kw_only=True):
    """The newest repair of a device. One that ended is kept while it decides on the next: until
    `again_within_s` is over, or while the device is left to a person.
    """

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
    """When the step began, or the repair ended."""
    attempt: int = 0
    """How often its operation was refused because the device was in use."""
    is_asked: bool = False
    """The step is an operation that may have been asked for."""
    healthy_s: float | None = None
    """Since when the device is healthy without the evidence."""
    withheld_by: str = ""
    """The repair's operation by which the device is withheld; empty: it is offered."""
    left_codes: tuple[str, ...] = ()
    """All that was wrong with the device when it was left to a person. Another reason is new
    evidence."""
    seen: str = ""
    """The newest operation of another on the device when the repair began, or that was seen since
    it ended."""
    why: str = ""
    """Why it ended. Before its end: why it gives up, and withholds the device as its last
    operation."""
    end: RepairEnd | None = None
    """None: it is under way."""

    @property
    def place(self) -> Place:
        """The device of the fleet."""
        return (self.node, self.device_class, self.device)

    @property
    def is_left(self) -> bool:
        """No repair touches the device until its evidence changes, or until a person acts."""
        return self.end in (RepairEnd.GAVE_UP, RepairEnd.TAKEN_OVER)

    @property
    def what(self) -> str:
        """The present step, or the end, in one word."""
        if self.end is not None:
            return self.end.value
        return "give up" if self.why else self.rule.steps[self.step]

    @property
    def text(self) -> str:
        """Write for people how far it is, or why it ended."""
        rule = self.rule
        return self.why or f"step {self.step + 1} of {len(rule.steps)}, try {self.trial} of {rule.tries}"

    @property
    def op_id(self) -> str:
        """The id of the present step's operation, the same however often it is asked for."""
        return f"{self.id}.end" if self.why else f"{self.id}.{self.trial}.{self.step}.{self.attempt}"


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
