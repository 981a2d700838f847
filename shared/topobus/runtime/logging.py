"""Logs: one JSON object a line (or coloured text on a terminal), on standard error, event first.

Standard output belongs to what a command prints. Events are constants, `noun.verb-past`; facts are fields.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

from topobus.runtime.config import LogSettings
from topobus.runtime.packages import hiding

with hiding("rich"):
    # structlog prints tracebacks by rich where that is installed (for the CLI): with local variables, which may hold what must not be logged, and for 4 MiB of memory.
    import structlog

__all__ = ["get_logger", "setup_logging"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Give the process's logger. Each line carries what `setup_logging` bound, and what the calling task bound through structlog's contextvars."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def setup_logging(settings: LogSettings, **context: str) -> None:
    """Configure logs on standard error for this process; call it once, at start.

    Shapes: context — what every line carries (`service`, `node`). Warnings of libraries that use the standard library's logging come out in the same shape.
    """
    is_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    renderer: Any = (
        structlog.processors.JSONRenderer() if is_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), event_key="event")
    )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    # Frames without their local variables: those make a line of tens of kilobytes, and they may hold what must not be logged.
    tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
    final: list[Any] = [tracebacks, _event_first, renderer] if is_json else [renderer]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=_stderr_logger,
        cache_logger_on_first_use=False,
    )
    # Libraries log through the standard library: their warnings become lines of the same shape.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[_drop_own, *final], foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(**context)


def _stderr_logger(*_: object) -> structlog.WriteLogger:
    # Looked up at each call: a test (or a shell) may have replaced the stream since.
    return structlog.WriteLogger(sys.stderr)


def _event_first(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    head: dict[str, Any] = {key: event.pop(key) for key in ("ts", "level", "event", "service", "node") if key in event}
    return {**head, **event}


def _drop_own(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event


if not structlog.is_configured():
    # A program that never calls run() (the CLI, a test) must not find log lines in its standard output, which is structlog's own default.
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=_stderr_logger,
        cache_logger_on_first_use=False,
    )
