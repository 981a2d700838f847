"""Alerts and the dashboard of deploy/monitoring ask for what services really have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docpages.metrics import METRIC_MODULES, descriptors_of, series_of
from support.debian_packages import fetch_packages
from support.kustomize import built
from topobus.process.metric_descriptors import MetricDescriptor

_ROOT = Path(__file__).resolve().parents[3]
_MONITORING = _ROOT / "deploy" / "monitoring"
_WATCH = _ROOT / "docs" / "how-to" / "watch-with-prometheus.md"
_LEVELS = _ROOT / "docs" / "how-to" / "service-levels.md"
# What the scrape jobs add to each sample, and a histogram's bound.
_TARGET_LABELS = {"namespace", "node", "pod", "container", "instance", "job", "le"}
_SELECTOR = re.compile(r"\b(topobus_[a-z_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'\s*([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def _declared() -> dict[str, MetricDescriptor]:
    modules = [__import__(module, fromlist=["*"]) for names in METRIC_MODULES.values() for module in names]
    return {series: metric for metric in descriptors_of(modules) for series in series_of(metric)}


def _rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((_MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]


def _alerts() -> list[dict[str, Any]]:
    return [rule for rule in _rules() if "alert" in rule]


def _recorded() -> list[dict[str, Any]]:
    return [rule for rule in _rules() if "record" in rule]


def _panels() -> list[dict[str, Any]]:
    return [
        panel
        for panel in json.loads((_MONITORING / "grafana-dashboard.json").read_text())["panels"]
        if panel["type"] != "row"
    ]


def _expressions() -> dict[str, str]:
    return {
        **{rule["alert"]: rule["expr"] for rule in _alerts()},
        **{f"{rule['record']} {rule['labels']['level']}": rule["expr"] for rule in _recorded()},
        **{panel["title"]: target["expr"] for panel in _panels() for target in panel["targets"]},
    }


def _faults(expression: str) -> Iterator[str]:
    """Tell what an expression names and no service has."""
    declared = _declared()
    allowed = set(_TARGET_LABELS)
    for name, matchers in _SELECTOR.findall(expression):
        if name not in declared:
            yield f"no metric {name}"
            continue
        labels = declared[name].labels
        allowed |= labels.keys()
        for matcher in filter(str.strip, matchers.split(",")):
            match = _MATCHER.fullmatch(matcher)
            assert match is not None, matcher
            label, operator, text = match.groups()
            if label not in {*labels, *_TARGET_LABELS}:
                yield f"{name} has no label {label}"
            listed = labels.get(label, "")
            for value in text.split("|") if "~" in operator else [text]:
                if isinstance(listed, tuple) and value not in listed:
                    yield f"{name}: {label} is never {value!r}"
    for grouping in _GROUPING.findall(expression):
        yield from (f"no label {label}" for label in map(str.strip, grouping.split(",")) if label not in allowed)


@pytest.mark.parametrize(("title", "expression"), sorted(_expressions().items()))
def test_expression_names_what_services_have(title: str, expression: str) -> None:
    """Each metric, label and listed value of an expression is declared by a service."""
    assert list(_faults(expression)) == [], title


def _queries() -> list[str]:
    """The queries of the pages: in blocks, and in the tables before those for users of others."""
    blocks = [
        block
        for page in (_LEVELS, _WATCH)
        for block in re.findall(r"^```promql\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]
    tables = _WATCH.read_text(encoding="utf-8").partition("## The first queries\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
    assert len(rows) > 10
    return [*blocks, *rows]


@pytest.mark.parametrize("query", _queries())
def test_query_of_a_page_names_what_services_have(query: str) -> None:
    """Each query of the pages can be asked as it stands."""
    # dcgm-exporter's own label, which one query makes of ours.
    assert [fault for fault in _faults(query) if fault != "no label UUID"] == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("topobus_gateway_slices_total > 0", "no metric topobus_gateway_slices_total"),
        ('topobus_bus_connected{class="gpu"}', "topobus_bus_connected has no label class"),
        ('topobus_device_affected_pods{state="Unhealthy"}', "topobus_device_affected_pods: state is never 'Unhealthy'"),
        ("sum by (verb) (topobus_gateway_slices)", "no label verb"),
    ],
)
def test_check_finds_an_expression_of_something_else(expression: str, fault: str) -> None:
    """The check above finds each kind of mistake."""
    assert list(_faults(expression)) == [fault]


@pytest.mark.parametrize("rule", _alerts(), ids=lambda rule: str(rule["alert"]))
def test_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """Each alert has a severity, a summary and a description; its runbook: test_runbooks.py."""
    notes = rule["annotations"]

    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert notes["summary"]
    assert notes["description"]


def test_every_alert_is_tried_on_a_recorded_sample() -> None:
    """No alert is missing in alerts-test.yaml, which promtool runs."""
    assert {
        name for rule in _alerts() if (name := rule["alert"]) not in (_MONITORING / "alerts-test.yaml").read_text()
    } == set()


@pytest.mark.parametrize(
    "overlay",
    [
        "kubernetes",
        "kubernetes-console",
        "kubernetes-fpga-functions",
        "kubernetes-gpu",
        "kubernetes-leaf",
        "kubernetes-nic-hand-over",
    ],
)
def test_monitor_and_job_collect_every_service_of_an_overlay(overlay: str) -> None:
    """Whichever pod a service has, the operator's PodMonitor and the job of prometheus.yml take its
    port, and no port of another kind.
    """
    (monitor,) = yaml.safe_load_all((_MONITORING / "prometheus-operator" / "pod-monitors.yaml").read_text())
    (job,) = yaml.safe_load((_MONITORING / "scrape.yaml").read_text())
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    kept = re.compile(job["relabel_configs"][0]["regex"])
    pods = [
        manifest["spec"]["template"]
        for manifest in built(overlay)
        if manifest["kind"] in {"DaemonSet", "Deployment", "StatefulSet"}
    ]
    probed = {
        (container["livenessProbe"]["httpGet"]["port"], labels <= pod["metadata"]["labels"].items())
        for pod in pods
        for container in pod["spec"]["containers"]
        if container["image"].startswith("topobus/")
    }
    others = {
        port["name"] for pod in pods for container in pod["spec"]["containers"] for port in container.get("ports", ())
    } - {name for name, _ in probed}

    assert {name for name, _ in probed} <= wanted
    assert all(is_seen for _, is_seen in probed)
    assert len(probed) >= 8
    assert {name for name, _ in probed if not kept.fullmatch(name)} == set()
    assert not others & wanted
    assert not {name for name in others if kept.fullmatch(name)}


def test_jobs_keep_the_labels_of_a_device_and_its_holder() -> None:
    """Else `pod` and `container` of a GPU's line would be those of the service that was read."""
    (monitor,) = yaml.safe_load_all((_MONITORING / "prometheus-operator" / "pod-monitors.yaml").read_text())
    (job,) = yaml.safe_load((_MONITORING / "scrape.yaml").read_text())
    (beside_compose,) = yaml.safe_load((_MONITORING / "prometheus.yml").read_text())["scrape_configs"]

    assert all(endpoint["honorLabels"] for endpoint in monitor["spec"]["podMetricsEndpoints"])
    assert job["honor_labels"] is beside_compose["honor_labels"] is True
    others = [metric for metric in _declared().values() if not metric.is_per_device]
    assert [metric.name for metric in others if _TARGET_LABELS & metric.labels.keys()] == []


def test_alerts_fire_on_recorded_samples() -> None:
    """On a sick node every alert fires, on a quiet one none."""
    ended = subprocess.run(
        [_promtool(), "test", "rules", str(_MONITORING / "alerts-test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_queries_of_the_dashboard_and_the_pages_are_read_by_prometheus(tmp_path: Path) -> None:
    """Prometheus' own checker reads a query as the expression of a rule."""
    queries = [*(target["expr"] for panel in _panels() for target in panel["targets"]), *_queries()]
    rules = [{"record": f"query:number:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    ended = subprocess.run(
        [_promtool(), "check", "rules", str(tmp_path / "rules.yaml")], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(queries)} rules found" in ended.stdout


def _promtool() -> str:
    """Find Prometheus' own checker: on the PATH, else in Debian's package, unpacked aside.

    Skips where there is neither.
    """
    installed = shutil.which("promtool")
    if installed is not None:
        return installed
    fetched = fetch_packages("prometheus")
    if isinstance(fetched, str):
        pytest.skip(f"no promtool on the PATH, and Debian's package prometheus cannot be had: {fetched}")
    return str(fetched[0] / "usr" / "bin" / "promtool")
