"""Each alert has a runbook, whose commands exist and whose fault a test seeds."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml
from cyclopts import CycloptsError

from support.written_pages import ROOT, files_of_tests
from topobus.cli.application import application
from topobus.cli.command_words import with_options_behind

_PAGE = ROOT / "docs" / "reference" / "runbooks.md"
_PARTS = ["Meaning", "Impact", "First look", "Repair", "Tried by"]
_SECTIONS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", _PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
)
_RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
_ALERTS = {rule["alert"]: rule for rule in _RULES if "alert" in rule}
# What Prometheus itself says of a target, and not the target.
_OF_PROMETHEUS = {"TopobusServiceDown"}


def _metrics_of(alert: str) -> set[str]:
    """Name the metrics that an alert reads, those of its recordings included."""
    expression = _ALERTS[alert]["expr"]
    levels = set(re.findall(r'level="([^"]+)"', expression))
    recorded = [rule["expr"] for rule in _RULES if "record" in rule and rule["labels"]["level"] in levels]
    names = re.findall(r"\btopobus_\w+", " ".join([expression, *recorded]))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """In both directions, by the anchor that the alert's annotation names."""
    anchors = {name: rule["annotations"]["runbook"] for name, rule in _ALERTS.items()}

    assert _SECTIONS.keys() == _ALERTS.keys()
    assert anchors == {name: f"docs/reference/runbooks.md#{name.lower()}" for name in _ALERTS}


@pytest.mark.parametrize("alert", sorted(_SECTIONS))
def test_runbook_has_all_parts(alert: str) -> None:
    """Whoever is woken up finds the same five lines in the same order."""
    assert re.findall(r"^- \*\*([^*]+)\*\*: ", _SECTIONS[alert], re.MULTILINE) == _PARTS


@pytest.mark.parametrize("alert", sorted(_SECTIONS))
def test_runbook_names_commands_that_exist(alert: str) -> None:
    """Each `topobus …` of a runbook is taken by the program."""
    refused = {}
    for line in re.findall(r"`(topobus [^`]+)`", " ".join(_SECTIONS[alert].split())):
        if line.endswith(" --help"):
            continue
        try:
            arguments = with_options_behind(shlex.split(line)[1:])
            application().parse_args(arguments, exit_on_error=False, print_error=False)
        except CycloptsError as err:
            refused[line] = str(err)

    assert refused == {}


def test_fault_of_every_alert_is_seeded_by_a_test() -> None:
    """The test that a runbook names exists, and its file reads a metric of the alert."""
    texts = files_of_tests()
    named = {
        alert: re.findall(r"`(test_\w+)`", text.rpartition("**Tried by**")[2]) for alert, text in _SECTIONS.items()
    }
    unseeded = [
        alert
        for alert, names in named.items()
        if not any(
            alert in _OF_PROMETHEUS
            or any(metric in texts[name] or _short(metric) in texts[name] for metric in _metrics_of(alert))
            for name in names
            if name in texts
        )
    ]

    assert [alert for alert, names in named.items() if not names or set(names) - texts.keys()] == []
    assert unseeded == []


def _short(metric: str) -> str:
    """Return a metric's name without the service's, as some tests have it."""
    return f'"{metric.removeprefix("topobus_").partition("_")[2]}'
