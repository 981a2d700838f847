"""Traces: what a call does in each process, as spans of one trace, sent by OTLP to the operator's
endpoint.

Off by default: then no span is made, `span` and `called` cost a comparison, and a trace context
that another sender's message brings (W3C traceparent) is only passed on. The SDK is an extra
(`otlp`) and is imported when it is needed. A collector that is slow or away delays nothing: spans
are sent by a thread, from a queue with a bound.

Spans begin where a call enters Topobus (`entered`: kubelet, a container runtime, the controller's
own work) and below a span that is there already (`span`, `called`). Loops that run all the time
make none.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from topobus.values.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import context, trace
    from opentelemetry.sdk.trace import TracerProvider

__all__ = [
    "TracingSettings",
    "annotate",
    "called",
    "check_tracing",
    "continued",
    "entered",
    "injected",
    "span",
    "start_tracing",
    "stop_tracing",
]

# How long the last spans may take on their way at the end: a stop must end within 5 s.
_FLUSH_S = 2.0
_TRACEPARENT = "traceparent"


class TracingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where traces go."""

    endpoint: str = ""
    """An OTLP collector, by HTTP: `http://collector:4318` (`/v1/traces` is added where there is no
    path). Empty: no traces. Needs the extra `otlp`. Headers and certificates for it are read from
    OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_HEADERS."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Which part of the calls is traced, where the caller has not decided it. 1: all of them; a
    node has some calls a minute."""


_NOTHING: AbstractContextManager[None] = nullcontext()
_tracer: trace.Tracer | None = None
_provider: TracerProvider | None = None


def check_tracing(settings: TracingSettings) -> None:
    """Refuse an endpoint that is no URL.

    Errors: raises ConfigError.
    """
    url = urlsplit(settings.endpoint)
    if settings.endpoint and (url.scheme not in ("http", "https") or not url.hostname):
        raise ConfigError(
            f"tracing.endpoint: got {settings.endpoint!r}, wanted http://HOST:PORT",
            next_step="name the collector's OTLP/HTTP port, 4318 as a rule",
            key="tracing.endpoint",
        )


def start_tracing(settings: TracingSettings, *, service: str, node: str) -> None:
    """Send spans from now on, if the settings name an endpoint.

    Errors: raises ConfigError for an endpoint that is no URL, and where the extra `otlp` is not
    installed.
    """
    global _tracer, _provider
    if not settings.endpoint:
        return
    check_tracing(settings)
    from importlib import metadata

    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ModuleNotFoundError as err:
        raise ConfigError(
            f"tracing.endpoint is set, and {err.name} is not installed",
            next_step="pip install '.[otlp]' from the checkout",
            key="tracing.endpoint",
        ) from err
    version = metadata.version("topobus")
    attributes = {
        "service.name": f"topobus-{service}",
        "service.namespace": "topobus",
        "service.version": version,
        "k8s.node.name": node,
    }
    _provider = TracerProvider(
        resource=Resource.create(attributes), sampler=ParentBasedTraceIdRatio(settings.ratio), shutdown_on_exit=False
    )
    endpoint = (
        settings.endpoint
        if urlsplit(settings.endpoint).path.strip("/")
        else f"{settings.endpoint.rstrip('/')}/v1/traces"
    )
    _provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_FLUSH_S), schedule_delay_millis=1000)
    )
    _tracer = _provider.get_tracer("topobus", version)
    # The exporter logs each batch that a missing collector does not take, with a traceback. Its
    # first warning is enough, and it is no failure of ours.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def stop_tracing() -> None:
    """Send the spans that wait, for two seconds at most, and make no more."""
    global _tracer, _provider
    provider, _tracer, _provider = _provider, None, None
    if provider is not None:
        # A thread of our own: the process must not wait for one that a dead collector holds.
        last = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
        last.start()
        last.join(_FLUSH_S)


def entered(name: str, /, **attributes: str | int) -> AbstractContextManager[object]:
    """Run the block as a span, of a new trace if there is none yet. For calls from outside."""
    return _NOTHING if _tracer is None else _started(_tracer, name, "SERVER", attributes)


def span(name: str, /, **attributes: str | int) -> AbstractContextManager[object]:
    """Run the block as a span of the present trace. Without a trace it makes none.

    An error that leaves the block is recorded in the span.
    """
    return _NOTHING if _tracer is None or not _is_traced() else _started(_tracer, name, "INTERNAL", attributes)


def called(name: str, /, **attributes: str | int) -> AbstractContextManager[object]:
    """Do as `span` does, for the block that waits for another process."""
    return _NOTHING if _tracer is None or not _is_traced() else _started(_tracer, name, "CLIENT", attributes)


def annotate(**attributes: str | int) -> None:
    """Add facts to the present span: `annotate(decision_id=…)` is
    attribute `topobus.decision_id`.
    """
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_prefixed(attributes))


def injected(headers: dict[str, str]) -> dict[str, str]:
    """Add the present trace context, if there is one, to the headers, and return the same dict."""
    if _is_traced():
        # Here: it looks through all installed packages for propagators when it is imported,
        # and most processes see no trace.
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


def continued(headers: Mapping[str, str] | None, name: str) -> AbstractContextManager[object]:
    """Run the block in the trace that a message's headers name, as a span with the given name.

    Without such headers there is no trace.
    """
    if headers is None or _TRACEPARENT not in headers:
        return _NOTHING
    from opentelemetry import propagate, trace

    there = propagate.extract(dict(headers))
    if _tracer is None:
        return _Attached(there)
    return _tracer.start_as_current_span(name, context=there, kind=trace.SpanKind.SERVER)


def _is_traced() -> bool:
    # The library is loaded once a span has begun, or a foreign one was taken over. Most processes
    # never load it.
    if "opentelemetry.trace" not in sys.modules:
        return False
    from opentelemetry import trace

    return trace.get_current_span() is not trace.INVALID_SPAN


def _started(
    tracer: trace.Tracer, name: str, kind: Literal["SERVER", "INTERNAL", "CLIENT"], attributes: Mapping[str, str | int]
) -> AbstractContextManager[object]:
    from opentelemetry import trace

    return tracer.start_as_current_span(name, kind=trace.SpanKind[kind], attributes=_prefixed(attributes))


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, Any]:
    return {f"topobus.{key}": value for key, value in attributes.items()}


class _Attached:
    """The block runs with another sender's trace context, so that our messages pass it on."""

    def __init__(self, there: context.Context) -> None:
        self._there = there

    def __enter__(self) -> None:
        from opentelemetry import context

        self._token = context.attach(self._there)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        from opentelemetry import context

        context.detach(self._token)
