"""What a running service has at /metrics, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["families_of", "read_page", "types_of"]

_TYPE = re.compile(r"^# TYPE (topobus_\S+) (\S+)$", re.MULTILINE)


async def read_page(port: int) -> str:
    """Give a service's page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await writer.drain()
    head, _, page = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    assert " 200 " in head.splitlines()[0], head
    return page


def types_of(page: str) -> dict[str, str]:
    """Return the type of each metric of ours by its name, as the page has it."""
    return dict(_TYPE.findall(page))


def families_of(page: str) -> tuple[Metric, ...]:
    """Give the metrics of ours with their samples."""
    return tuple(family for family in text_string_to_metric_families(page) if family.name.startswith("topobus_"))
