"""Traces: off they change nothing and hand on what others bring.

On they are spans of the right kind, and settings are refused that cannot work.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace

from support.trace_collector import TraceCollector, trace_collector
from topobus.process.tracing import (
    TracingSettings,
    annotate,
    called,
    check_tracing,
    continued,
    entered,
    injected,
    span,
    start_tracing,
    stop_tracing,
)
from topobus.values.errors import ConfigError

_THERE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    """Traces of this process at a collector; off again afterwards."""
    with trace_collector() as made:
        start_tracing(TracingSettings(endpoint=made.endpoint), service="test", node="n1")
        try:
            yield made
        finally:
            stop_tracing()


def _sent(collector: TraceCollector) -> list[list[str]]:
    stop_tracing()
    return sorted(collector.path_of(each) for each in collector.spans)


def test_nothing_is_made_when_no_endpoint_is_set() -> None:
    """Blocks run as they are, and a message gets no header."""
    start_tracing(TracingSettings(), service="test", node="n1")
    with entered("a"), called("b", node="n1"), span("c"), continued({"x": "y"}, "d"):
        annotate(decision_id="d-1")
        assert trace.get_current_span() is trace.INVALID_SPAN
        assert injected({"x": "y"}) == {"x": "y"}


def test_foreign_trace_is_handed_on_when_no_endpoint_is_set() -> None:
    """Who asks us with a trace finds it in what we ask others; afterwards it is gone."""
    with continued(_THERE, "answer x"):
        assert injected({})["traceparent"] == _THERE["traceparent"]
    assert injected({}) == {}


def test_spans_hang_below_each_other_when_a_call_is_traced(collector: TraceCollector) -> None:
    """A call from outside begins a trace, a message continues it, tasks inherit it."""

    async def work() -> dict[str, str]:
        with entered("kubelet Allocate"):
            with called("ask adopt", node="n1"):
                headers = injected({})
            with span("write"):
                await asyncio.sleep(0)
        return headers

    headers = asyncio.run(work())
    with continued(headers, "answer adopt"):
        annotate(decision_id="d-1")

    assert _sent(collector) == [
        ["topobus-test: kubelet Allocate"],
        ["topobus-test: kubelet Allocate", "topobus-test: ask adopt"],
        ["topobus-test: kubelet Allocate", "topobus-test: ask adopt", "topobus-test: answer adopt"],
        ["topobus-test: kubelet Allocate", "topobus-test: write"],
    ]
    assert collector.named("answer adopt")[0].attributes == {"topobus.decision_id": "d-1"}
    assert collector.named("ask adopt")[0].attributes == {"topobus.node": "n1"}


def test_no_trace_begins_when_nobody_called(collector: TraceCollector) -> None:
    """What runs all the time is in no trace: neither asks nor steps begin one, nor does a message
    without one.
    """
    with called("ask adopt"), span("look"), continued({}, "answer adopt"):
        assert trace.get_current_span() is trace.INVALID_SPAN

    assert _sent(collector) == []


def test_error_is_in_the_span_when_a_block_fails(collector: TraceCollector) -> None:
    """The error passes on as it is."""
    with pytest.raises(ValueError, match="why"), entered("kubelet Allocate"):
        raise ValueError("why")

    _sent(collector)
    assert [each.is_error for each in collector.spans] == [True]


def test_nothing_is_sent_when_the_ratio_is_zero() -> None:
    """A trace that somebody else decided to record is recorded all the same."""
    with trace_collector() as made:
        start_tracing(TracingSettings(endpoint=f"{made.endpoint}/v1/traces", ratio=0.0), service="test", node="n1")
        with entered("a"):
            pass
        with continued(_THERE, "answer b"):
            pass
        stop_tracing()

        assert [each.name for each in made.spans] == ["answer b"]


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://"])
def test_endpoint_is_refused_when_it_is_no_url(endpoint: str) -> None:
    """The error names the setting, and what it wants."""
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: got .*wanted http://HOST:PORT") as refused:
        check_tracing(TracingSettings(endpoint=endpoint))
    assert refused.value.facts["key"] == "tracing.endpoint"


def test_extra_is_named_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that cannot do what it is told does not start."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint is set") as refused:
        start_tracing(TracingSettings(endpoint="http://collector:4318"), service="test", node="n1")
    assert refused.value.next_step == "pip install '.[otlp]' from the checkout"
