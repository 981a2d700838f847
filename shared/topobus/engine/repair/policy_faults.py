"""Finds what is wrong with a policy of repairs before anything is done by it.

Pure. Types and numbers are checked where settings are read.
"""

from __future__ import annotations

from topobus.engine.repair.fleet import ANY_REASON, disrupts, withholds
from topobus.formats.messages.bounds import MAX_TEXT
from topobus.formats.messages.codec import encode
from topobus.formats.messages.device_classes import DEVICE_SERVICES, class_complaint
from topobus.values.health_reasons import HEALTH_REASONS
from topobus.values.maintenance import DeviceVerb
from topobus.values.names import meant_name
from topobus.values.repair import RepairPolicy, RepairRuleSettings, Step

__all__ = ["fault_of_policy"]

_STEPS = (*map(str, Step), *map(str, DeviceVerb))


def fault_of_policy(policy: RepairPolicy) -> tuple[str, str] | None:
    """Explain what is wrong with a policy: the key, and what is wanted. None when nothing is.

    Order: the first fault, rules first.
    """
    names: set[str] = set()
    for index, rule in enumerate(policy.rules):
        for key, fault in (
            ("name", _fault_of_name(rule, names)),
            ("device_class", class_complaint(rule.device_class)),
            ("reasons", _fault_of_reasons(rule, policy.own_reasons)),
            ("steps", _fault_of_steps(rule)),
        ):
            if fault:
                return f"rules[{index}].{key}", fault
        names.add(rule.name)
    # The document of repairs has the policy, and one out of bounds is unreadable.
    if (size := len(encode(policy))) > MAX_TEXT:
        return "rules", f"the whole policy has {size} bytes as JSON, wanted at most {MAX_TEXT}: fewer rules"
    return next(
        (
            (f"protect[{index}].device_class", fault)
            for index, protected in enumerate(policy.protect)
            if (fault := class_complaint(protected.device_class))
        ),
        None,
    )


def _fault_of_name(rule: RepairRuleSettings, names: set[str]) -> str:
    if not rule.name or not rule.name.isprintable() or len(rule.name) > 63:
        return f"got {rule.name!r}, wanted 1 to 63 printable characters"
    return f"{rule.name!r} is listed twice, wanted a name for each rule" if rule.name in names else ""


def _fault_of_reasons(rule: RepairRuleSettings, own: tuple[str, ...]) -> str:
    if not rule.reasons:
        return f"got none, wanted codes of health, or {ANY_REASON!r} for any"
    # Classes of one's own have drivers, and so codes, that this code has never seen.
    for code in rule.reasons if rule.device_class in DEVICE_SERVICES else ():
        if code != ANY_REASON and code not in HEALTH_REASONS and code not in own:
            meant = meant_name(code, sorted({*HEALTH_REASONS, *own}))
            hint = f"did you mean {meant}? " if meant else ""
            return (
                f"there is no reason {code!r}: {hint}docs/reference/health-reasons.md has all; "
                "list those of your own drivers in own_reasons"
            )
    return ""


def _fault_of_steps(rule: RepairRuleSettings) -> str:
    """Refuse steps in an order that would take a device from an owner, or offer it unseen."""
    if not rule.steps:
        return "got none, wanted at least observe"
    is_withheld = is_idle = False
    unseen = ""
    for index, step in enumerate(rule.steps):
        if step not in _STEPS:
            meant = meant_name(step, _STEPS)
            hint = f"did you mean {meant}?" if meant else f"wanted {', '.join(_STEPS)}"
            return f"there is no step {step!r}: {hint}"
        if step in (Step.OBSERVE, Step.CALL_A_PERSON) and index != len(rule.steps) - 1:
            return f"{step} is followed by {rule.steps[index + 1]}, wanted it as the last step"
        if step == Step.OBSERVE and index:
            return "observe follows another step, wanted it alone"
        if step == Step.WAIT_IDLE and not is_withheld:
            return "wait-idle comes before maintain, exclude or drain, wanted one of them first: a new owner may come"
        if disrupts(step) and not (is_withheld and is_idle):
            return f"{step} comes before wait-idle, wanted maintain or drain and wait-idle first: it disrupts owners"
        if step == DeviceVerb.RETURN and unseen:
            return f"return follows {unseen} without wait-healthy between them: a sick device would be offered"
        is_withheld = (is_withheld or withholds(step)) and step != DeviceVerb.RETURN
        is_idle = (is_idle or step == Step.WAIT_IDLE) and is_withheld
        if step == Step.WAIT_HEALTHY:
            unseen = ""
        elif disrupts(step) or step == DeviceVerb.FORGIVE:
            unseen = step
    if unseen and rule.steps[-1] != Step.CALL_A_PERSON:
        return f"nothing looks whether {unseen} helped, wanted wait-healthy after it"
    return ""
