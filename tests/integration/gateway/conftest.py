"""An API server for the gateways of a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.node_plane import NODE
from topobus.testing.apiserver import ApiServerSimulator


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server that knows our node."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as running:
        running.put({"kind": "Node", "metadata": {"name": NODE}})
        yield running
