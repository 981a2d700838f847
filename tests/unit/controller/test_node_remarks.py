"""What the controller's log costs when a node's writers alternate: a line of each kind in ten
seconds.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge
from structlog.testing import capture_logs

from topobus.controller.node_remarks import NodeRemarks
from topobus.formats.messages import catalogue
from topobus.formats.messages.origin import Origin
from topobus.process.quiet import QuietLog
from topobus.process.readiness import Readiness
from topobus.testing.clock import ManualClock


def test_node_whose_writers_alternate_costs_a_line_each_ten_seconds() -> None:
    """An older and a newer instance write in turn while a service is replaced: readiness follows
    each write, the log does not.
    """
    readiness, clock = Readiness(), ManualClock()
    gauge = Gauge("remarked", "nodes", registry=CollectorRegistry())
    remarks = NodeRemarks(readiness, "0.2.0", gauge, QuietLog(clock))
    parts = {"node": "n1", "device_class": "gpu"}
    with capture_logs() as lines:
        for release in ("0.1.0", "0.2.0") * 20:
            remarks.note(catalogue.INVENTORY, parts, Origin(release=release))
        clock.advance(10.0)
        remarks.note(catalogue.INVENTORY, parts, Origin(release="0.1.0"))

    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [(line["event"], line["node"], line["what"], line["count"]) for line in warnings] == [
        ("node.differs", "n1", "gpu", 1),
        ("node.differs", "n1", "gpu", 20),
    ]
    assert "n1: gpu runs release 0.1.0" in readiness.report()["nodes"]
