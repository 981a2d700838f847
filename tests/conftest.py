"""What holds for all tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import structlog
from hypothesis import settings

from topobus.testing.clock import VirtualTimeLoop

# No test times anything: Hypothesis fails an example that takes more than 200 ms by itself, which a busy machine makes of any.
settings.register_profile("topobus", deadline=None)
settings.load_profile("topobus")


@pytest.fixture(autouse=True)
def own_log_configuration() -> Iterator[None]:
    """Take back what a test's commands configured: a level that one of them sets for the process would hide the next test's lines."""
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is marked `virtual_time` on a loop whose time jumps, the rest on asyncio's own."""
    return {"virtual": VirtualTimeLoop} if item.get_closest_marker("virtual_time") else {"real": asyncio.new_event_loop}
