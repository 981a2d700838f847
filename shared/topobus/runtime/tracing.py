"""Trace context in message headers (W3C traceparent), through the OpenTelemetry API alone: without an SDK it costs nothing and does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, propagate

__all__ = ["continued", "injected"]


def injected(headers: dict[str, str]) -> dict[str, str]:
    """Add the present trace context to the headers; gives the same dict."""
    propagate.inject(headers)
    return headers


@contextmanager
def continued(headers: Mapping[str, str] | None) -> Iterator[None]:
    """Run the block in the trace that the headers name."""
    token = context.attach(propagate.extract(dict(headers or {})))
    try:
        yield
    finally:
        context.detach(token)
