"""Logs: one JSON object per line (or coloured text on a terminal), on standard error, event first.

Standard output is for what a command prints. Events are constants, `noun.verb-past`, and facts are
fields. The module that formats lines (`log_lines`) is loaded with the first one, because a command
of `topobus` usually writes none.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    import structlog

    from topobus.process.config import LogSettings

    _Stream = logging.StreamHandler[TextIO]
else:
    _Stream = logging.StreamHandler

__all__ = ["get_logger", "setup_logging"]


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the process's logger.

    Each line carries the context of `setup_logging`, and what the calling task bound through
    structlog's contextvars.
    """
    lines = next((handler for handler in logging.getLogger().handlers if isinstance(handler, _Lines)), None)
    if lines is not None and lines.formatter is None:
        return cast("structlog.typing.FilteringBoundLogger", _LateLogger(lines))
    from topobus.process.log_lines import process_logger

    return process_logger()


def setup_logging(settings: LogSettings, **context: str) -> None:
    """Configure logs on standard error for this process. Call it once, at start.

    Shapes: context — what every line carries (`service`, `node`). Warnings of libraries that use
    the standard library's logging come out in the same shape.
    """
    root = logging.getLogger()
    root.handlers[:] = [_Lines(settings, context)]
    root.setLevel(logging.WARNING)


class _Lines(_Stream):
    """Writes the lines of libraries, and stores the configuration until the first one is due."""

    def __init__(self, settings: LogSettings, context: Mapping[str, str]) -> None:
        super().__init__(sys.stderr)
        self._settings = settings
        self._context = context

    @property
    def least(self) -> int:
        """The least level that is written."""
        return _LEVELS[self._settings.level]

    def configure(self) -> None:
        """Configure how lines are made, once."""
        if self.formatter is None:
            from topobus.process.log_lines import configure_lines

            self.setFormatter(configure_lines(self._settings, self.least, self._context))

    def format(self, record: logging.LogRecord) -> str:
        """Make a library's line."""
        self.configure()
        return super().format(record)


class _LateLogger:
    """The logger before the first line: drops what is below the level, and passes anything else to
    structlog's.
    """

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines

    def __getattr__(self, name: str) -> Any:
        if name in _LEVELS and _LEVELS[name] < self._lines.least:
            return _drop
        self._lines.configure()
        from topobus.process.log_lines import process_logger

        return getattr(process_logger(), name)


def _drop(_event: str, **_facts: object) -> None:
    """Write nothing."""
