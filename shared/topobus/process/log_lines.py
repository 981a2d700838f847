"""Log lines: one JSON object per line (or coloured text on a terminal), on standard error, event
first.

A fact may be a caller's own text: each one is cut to a length that a person reads, and a line as a
whole to what a collector takes, here and nowhere else. Loaded with the first line
(`topobus.process.logging`), because structlog costs as much as asyncio.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from topobus.process.config import LogSettings
from topobus.process.packages import hiding

with hiding("rich"):
    # structlog prints tracebacks by rich where that is installed (for the CLI): with local
    # variables, which may hold what must not be logged, and for 4 MiB of memory.
    import structlog

__all__ = ["configure_lines", "process_logger"]

# Letters of one text, and of all facts of a line together. Collectors cut lines of more than 16 KiB
# in two (containerd's CRI log). A traceback gets most of that.
_TEXT_LETTERS, _LINE_LETTERS = 2000, 16_000
_HEAD = ("ts", "level", "event", "service", "node")


def configure_lines(settings: LogSettings, least: int, context: Mapping[str, str]) -> logging.Formatter:
    """Configure structlog for this process.

    Return the formatter that gives the same shape to lines of libraries, which log through the
    standard library.

    Shapes: least — the level of `logging` below which nothing is written; context — what every line
    carries.
    """
    is_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    renderer: Any = structlog.processors.JSONRenderer() if is_json else _for_people(colors=sys.stderr.isatty())

    def add_context(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**context, **event}

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        # Not by structlog's contextvars: the first line may be written in a task, whose own context
        # ends with it.
        add_context,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    # Frames without their local variables: those make a line of tens of kilobytes, and they
    # may hold what must not be logged.
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    )
    final: list[Any] = [tracebacks, cut_facts, _event_first, renderer] if is_json else [cut_facts, renderer]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=_stderr_logger,
        cache_logger_on_first_use=False,
    )
    return structlog.stdlib.ProcessorFormatter(processors=[_drop_own, *final], foreign_pre_chain=shared)


def process_logger() -> structlog.typing.FilteringBoundLogger:
    """Give structlog's logger, typed as what both ways of configuring it make."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def _for_people(*, colors: bool) -> structlog.dev.ConsoleRenderer:
    """Render for people.

    Tracebacks are plain even when structlog was imported first by other code: rich's have local
    variables, and take seconds for a large service.
    """
    return structlog.dev.ConsoleRenderer(
        colors=colors, event_key="event", exception_formatter=structlog.dev.plain_traceback
    )


def _stderr_logger(*_: object) -> structlog.WriteLogger:
    # Looked up at each call: a test (or a shell) may have replaced the stream since.
    return structlog.WriteLogger(sys.stderr)


def _event_first(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    head: dict[str, Any] = {key: event.pop(key) for key in _HEAD if key in event}
    return {**head, **event}


def cut_facts(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut the facts of a line.

    Callers choose texts, and a line of them must not fill a disk.
    """
    room = _Room(_LINE_LETTERS)
    # The facts that identify the line come first, then the others in their order.
    for key in sorted(event, key=lambda key: key not in _HEAD):
        # A traceback for a terminal is rendered from the exception itself.
        if key not in ("exc_info", "_record", "_from_structlog"):
            event[key] = room.cut(event[key])
    return event


class _Room:
    """The characters that are left in one line."""

    def __init__(self, letters: int) -> None:
        self._left = letters

    def cut(self, fact: Any) -> Any:
        """Give a fact as far as there is room for it.

        What it is made of is looked at no further than that.
        """
        if isinstance(fact, str):
            return self._cut_text(fact)
        if fact is None or isinstance(fact, bool | float):
            self._left -= len(str(fact))
            return fact
        if isinstance(fact, int) and fact.bit_length() <= 64:
            self._left -= len(str(fact))
            return fact
        if isinstance(fact, list | tuple | set | frozenset):
            items: list[Any] = []
            for value in fact:
                if self._left <= 0:
                    items.append(f"... {len(fact) - len(items)} more")
                    break
                items.append(self.cut(value))
            return items
        if isinstance(fact, Mapping):
            cut: dict[str, Any] = {}
            for key, value in fact.items():
                if self._left <= 0:
                    cut["..."] = f"{len(fact) - len(cut)} more"
                    break
                cut[self._cut_text(str(key))] = self.cut(value)
            return cut
        if isinstance(fact, int):
            return self._cut_text(hex(fact))
        return self._cut_text(repr(fact))

    def _cut_text(self, text: str) -> str:
        limit = max(0, min(_TEXT_LETTERS, self._left))
        self._left -= min(len(text), limit) + 1
        return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} letters)"


def _drop_own(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event


if not structlog.is_configured():
    # A program that never calls run() (the CLI, a test) must not find log lines in its standard
    # output, which is structlog's own default.
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            cut_facts,
            _for_people(colors=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=_stderr_logger,
        cache_logger_on_first_use=False,
    )
