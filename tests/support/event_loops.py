"""The event loop of a test: asyncio's own, which ignores what gRPC reports after the loop's end.

gRPC has a single queue of completions in a process. The event loop that reads it passes what is
another loop's to that one, by `call_soon_threadsafe`. A program of ours has one loop until its end;
a run of tests has one after the other. A call that a test cancelled may end later, when the busy
library reports it while the next test runs. asyncio's own loop is closed and raises there, and the
next test would find a traceback in its log that is not its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

from grpc._cython import cygrpc

__all__ = ["RealTimeLoop"]

# Its only name is a private one.
_COMPLETION: Callable[..., Any] = cygrpc._handle_callback_wrapper  # type: ignore[attr-defined]


class RealTimeLoop(asyncio.SelectorEventLoop):
    """An event loop of asyncio that drops gRPC's completions once it is closed.

    Whatever else comes then is an error, as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late_completions = 0
        """How many were dropped."""

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a call from any thread."""
        if self.is_closed() and callback is _COMPLETION:
            self.late_completions += 1
            return asyncio.Handle(callback, arguments, self, context)
        return super().call_soon_threadsafe(callback, *arguments, context=context)
