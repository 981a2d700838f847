"""A collector of traces for tests: takes OTLP over HTTP as any collector does, and gives the spans
by trace.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

__all__ = ["CollectedSpan", "TraceCollector", "trace_collector"]


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came."""

    trace: bytes
    span: bytes
    parent: bytes
    name: str
    service: str
    attributes: dict[str, str]
    is_error: bool


@dataclass
class TraceCollector:
    """Spans that came so far."""

    port: int = 0
    spans: list[CollectedSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def endpoint(self) -> str:
        """The value for `tracing.endpoint`."""
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> list[CollectedSpan]:
        """Give the spans of a name."""
        return [span for span in self.spans if span.name == name]

    def parent_of(self, span: CollectedSpan) -> CollectedSpan | None:
        """Give the span within which another one ran; None for the first of a trace."""
        return next((other for other in self.spans if other.span == span.parent), None)

    def path_of(self, span: CollectedSpan) -> list[str]:
        """Name the spans from the first of the trace to this one, each with its service."""
        above = self.parent_of(span)
        return [*(self.path_of(above) if above is not None else ()), f"{span.service}: {span.name}"]

    def wait_for(self, name: str, count: int, timeout_s: float = 60.0) -> list[CollectedSpan]:
        """Wait until so many spans of a name are there.

        Errors: raises TimeoutError that lists what came.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.named(name)) >= count, timeout_s):
                raise TimeoutError(f"{name}: got {sorted(span.name for span in self.spans)}")
            return self.named(name)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep what a process sent."""
        with self._changed:
            for of_process in request.resource_spans:
                service = {attribute.key: attribute.value.string_value for attribute in of_process.resource.attributes}[
                    "service.name"
                ]
                for span in (span for scope in of_process.scope_spans for span in scope.spans):
                    attributes = {attribute.key: attribute.value.string_value for attribute in span.attributes}
                    self.spans.append(
                        CollectedSpan(
                            span.trace_id,
                            span.span_id,
                            span.parent_span_id,
                            span.name,
                            service,
                            attributes,
                            is_error=span.status.code == 2,
                        )
                    )
            self._changed.notify_all()


@contextmanager
def trace_collector() -> Iterator[TraceCollector]:
    """Listen at a free port until the block ends."""
    collector = TraceCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                raise AssertionError("nobody asked for compression")
            assert self.path == "/v1/traces"
            collector.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
