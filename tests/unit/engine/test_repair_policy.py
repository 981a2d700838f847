"""A policy of repairs that could do harm, or means nothing, is refused with the key and what is wanted."""

from __future__ import annotations

import msgspec
import pytest

from topobus.engine.repair.policy_faults import fault_of_policy
from topobus.values.repair import Protected, RepairPolicy, RepairRuleSettings

_STEPS = ("drain", "wait-idle", "reset", "forgive", "wait-healthy", "return")


def _rule(**changes: object) -> RepairRuleSettings:
    rule = RepairRuleSettings(name="lost", device_class="gpu", reasons=("gpu-lost",), steps=_STEPS)
    return msgspec.structs.replace(rule, **changes)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(_rule(), id="all steps"),
        pytest.param(_rule(steps=("observe",)), id="observe"),
        pytest.param(_rule(steps=("maintain",)), id="withhold alone"),
        pytest.param(_rule(steps=("maintain", "wait-idle", "reset", "call-a-person")), id="a person looks"),
        pytest.param(_rule(steps=("forgive", "wait-healthy")), id="forgive alone"),
        pytest.param(_rule(reasons=("*",)), id="any reason"),
        pytest.param(_rule(device_class="npu", reasons=("melted",)), id="a class of one's own"),
    ],
)
def test_policy_is_accepted_when_its_steps_are_safe(rule: RepairRuleSettings) -> None:
    """Nothing is wrong with these."""
    assert fault_of_policy(RepairPolicy(rules=(rule,))) is None


@pytest.mark.parametrize(
    ("rule", "key", "words"),
    [
        pytest.param(_rule(name=""), "name", "wanted 1 to 63", id="no name"),
        pytest.param(
            _rule(device_class="gpu-nvidia"), "device_class", "a hyphen marks", id="class of another's plugin"
        ),
        pytest.param(_rule(reasons=()), "reasons", "got none", id="no reason"),
        pytest.param(_rule(reasons=("gpu-lots",)), "reasons", "did you mean gpu-lost?", id="unknown reason"),
        pytest.param(_rule(steps=()), "steps", "got none", id="no step"),
        pytest.param(_rule(steps=("maintian",)), "steps", "did you mean maintain?", id="unknown step"),
        pytest.param(_rule(steps=("fly",)), "steps", "wanted observe", id="no step at all"),
        pytest.param(_rule(steps=("reset", "wait-healthy")), "steps", "reset comes before wait-idle", id="reset first"),
        pytest.param(
            _rule(steps=("maintain", "reset", "wait-healthy", "return")),
            "steps",
            "reset comes before wait-idle",
            id="reset of a held device",
        ),
        pytest.param(
            _rule(steps=("maintain", "wait-idle", "return", "reset", "wait-healthy")),
            "steps",
            "reset comes before wait-idle",
            id="reset of a device that is offered",
        ),
        pytest.param(
            _rule(steps=("wait-idle", "reset")), "steps", "wait-idle comes before maintain", id="idle for how long"
        ),
        pytest.param(
            _rule(steps=("drain", "wait-idle", "reset", "return")), "steps", "without wait-healthy", id="unseen"
        ),
        pytest.param(_rule(steps=("forgive",)), "steps", "nothing looks whether forgive helped", id="no look"),
        pytest.param(
            _rule(steps=("observe", "maintain")), "steps", "wanted it as the last step", id="observe and more"
        ),
        pytest.param(_rule(steps=("maintain", "observe")), "steps", "wanted it alone", id="more and observe"),
        pytest.param(_rule(steps=("call-a-person", "return")), "steps", "followed by return", id="after the person"),
    ],
)
def test_policy_is_refused_with_its_key_when_a_rule_is_wrong(rule: RepairRuleSettings, key: str, words: str) -> None:
    """The key names the rule, the message what is wanted."""
    fault = fault_of_policy(RepairPolicy(rules=(_rule(name="other"), rule)))

    assert fault is not None
    assert fault[0] == f"rules[1].{key}"
    assert words in fault[1]


def test_policy_is_refused_when_two_rules_have_one_name_or_a_protected_class_is_none() -> None:
    """Decisions name rules, and a protected class that cannot exist protects nothing."""
    twice = fault_of_policy(RepairPolicy(rules=(_rule(), _rule())))
    unprotected = fault_of_policy(RepairPolicy(protect=(Protected(device_class="all"),)))

    assert twice == ("rules[1].name", "'lost' is listed twice, wanted a name for each rule")
    assert unprotected is not None
    assert unprotected[0] == "protect[0].device_class"


def test_policy_is_refused_when_the_document_of_repairs_could_not_have_it() -> None:
    """A document out of bounds would be begun again, with all repairs lost."""
    fault = fault_of_policy(RepairPolicy(rules=tuple(_rule(name=f"rule {number}") for number in range(400))))

    assert fault is not None
    assert fault[0] == "rules"
    assert "bytes as JSON, wanted at most 65536" in fault[1]


def test_policy_accepts_a_reason_of_ones_own_driver_when_it_is_listed() -> None:
    """A driver of another vendor has codes that this code has never seen."""
    assert fault_of_policy(RepairPolicy(rules=(_rule(reasons=("melted",)),), own_reasons=("melted",))) is None


@pytest.mark.parametrize("text", ['{"at_once": 0}', '{"rules": [{"name": "a", "device_class": "gpu", "reason": []}]}'])
def test_policy_is_no_policy_when_a_budget_is_zero_or_a_key_is_misspelt(text: str) -> None:
    """Numbers and keys are checked where settings are read."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=RepairPolicy)
