"""Renders what a monitoring system is given: the alert rules as an object of the Prometheus
operator, and a dashboard for Grafana.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

__all__ = ["ALERTS_FILE", "render_dashboard", "render_rules"]

ALERTS_FILE = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "alerts.yaml"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Of Grafana's grid, which is 24 wide.
_WIDTH, _HEIGHT = 8, 7

_P99 = "histogram_quantile(0.99, sum by (le, {by}) (rate({metric}_bucket[5m])))"
_BY_POD = "{{node}} {{device}} {{namespace}}/{{pod}}"
# Row by row: a panel's title, unit, expression and legend.
_ROWS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "Fleet": (
        ("Services by release", "short", "count by (service, version) (topobus_build_info)", "{{service}} {{version}}"),
        ("Devices by class", "short", "sum by (class) (topobus_device_inventory_devices)", "{{class}}"),
        ("Devices held", "short", "sum by (class) (topobus_topology_held_devices)", "{{class}}"),
    ),
    "Health": (
        (
            "Devices not healthy",
            "short",
            'sum by (node, class, state, reason) (topobus_device_inventory_devices{state!="healthy"}) > 0',
            "{{node}} {{class}} {{state}} {{reason}}",
        ),
        (
            "Pods with such a device",
            "short",
            "sum by (class, state) (topobus_device_affected_pods)",
            "{{class}} {{state}}",
        ),
        (
            "Driver calls, p99",
            "s",
            _P99.format(by="class, driver, call", metric="topobus_device_driver_call_seconds"),
            "{{class}} {{driver}} {{call}}",
        ),
    ),
    "GPUs by pod": (
        (
            "Use by pod",
            "percentunit",
            'max by (node, device, namespace, pod) (topobus_device_utilization_ratio{class="gpu"})',
            _BY_POD,
        ),
        (
            "Memory by pod",
            "percentunit",
            'max by (node, device, namespace, pod) (topobus_device_memory_used_bytes{class="gpu"}) / max by (node, '
            'device, namespace, pod) (topobus_device_memory_size_bytes{class="gpu"})',
            _BY_POD,
        ),
        (
            "Power by pod",
            "watt",
            "sum by (namespace, pod) (topobus_device_power_watts or rate(topobus_device_energy_joules_total[5m]))",
            "{{namespace}}/{{pod}}",
        ),
    ),
    "NICs by pod": (
        (
            "Received by pod",
            "Bps",
            'sum by (node, device, namespace, pod) (rate(topobus_device_received_bytes_total{class="nic"}[5m]))',
            _BY_POD,
        ),
        (
            "Sent by pod",
            "Bps",
            'sum by (node, device, namespace, pod) (rate(topobus_device_sent_bytes_total{class="nic"}[5m]))',
            _BY_POD,
        ),
        (
            "Damaged and dropped frames",
            "pps",
            "sum by (node, device, direction) (rate(topobus_device_link_errors_total[5m]) + "
            "rate(topobus_device_link_drops_total[5m])) > 0",
            "{{node}} {{device}} {{direction}}",
        ),
    ),
    "kubelet's calls": (
        (
            "Calls",
            "reqps",
            "sum by (method, outcome) (rate(topobus_gateway_call_seconds_count[5m]))",
            "{{method}} {{outcome}}",
        ),
        ("Calls, p99", "s", _P99.format(by="method", metric="topobus_gateway_call_seconds"), "{{method}}"),
        (
            "Placements refused",
            "short",
            "sum by (reason) (increase(topobus_topology_refusals_total[5m]))",
            "{{reason}}",
        ),
    ),
    "Claims": (
        ("Claims prepared now", "short", "sum by (class) (topobus_gateway_claims_prepared)", "{{class}}"),
        (
            "Prepares by outcome",
            "short",
            "sum by (outcome) (increase(topobus_gateway_claim_prepares_total[5m]))",
            "{{outcome}}",
        ),
        ("Claims waiting", "short", "max(topobus_controller_claims_waiting)", "claims"),
    ),
    "Bus": (
        ("Round trip, p99", "s", _P99.format(by="node", metric="topobus_bus_echo_seconds"), "{{node}}"),
        (
            "Asks by outcome",
            "reqps",
            "sum by (noun, outcome) (rate(topobus_bus_ask_seconds_count[5m]))",
            "{{noun}} {{outcome}}",
        ),
        ("Clients lost", "short", "sum by (reason) (increase(topobus_bus_losses_total[5m]))", "{{reason}}"),
    ),
    "Stores": (
        (
            "Writes by outcome",
            "ops",
            "sum by (noun, outcome) (rate(topobus_bus_writes_total[5m]))",
            "{{noun}} {{outcome}}",
        ),
        ("Ledger writes, p99", "s", _P99.format(by="node", metric="topobus_topology_ledger_write_seconds"), "{{node}}"),
        ("CDI files, p99", "s", _P99.format(by="node", metric="topobus_gateway_cdi_write_seconds"), "{{node}}"),
    ),
}


def render_rules() -> str:
    """Give the alert rules as the operator's object."""
    rules: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "topobus", "namespace": "topobus", "labels": {"app.kubernetes.io/part-of": "topobus"}},
        "spec": yaml.safe_load(ALERTS_FILE.read_text(encoding="utf-8")),
    }
    return "# Generated by tools/render-docs from deploy/monitoring/alerts.yaml. Do not edit.\n" + yaml.safe_dump(
        rules, sort_keys=False, width=160
    )


def render_dashboard() -> str:
    """Give the dashboard as Grafana imports it; its data source is chosen at the top of it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, contents in _ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
                "panels": [],
            }
        )
        for place, (title, unit, expression, legend) in enumerate(contents):
            panels.append(
                {
                    "type": "timeseries",
                    "title": title,
                    "datasource": _SOURCE,
                    "gridPos": {"x": place * _WIDTH, "y": top + 1, "w": _WIDTH, "h": _HEIGHT},
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "targets": [{"refId": "A", "datasource": _SOURCE, "expr": expression, "legendFormat": legend}],
                }
            )
        top += 1 + _HEIGHT
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    dashboard = {
        "title": "Topobus",
        "uid": "topobus",
        "tags": ["topobus"],
        "schemaVersion": 38,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"
