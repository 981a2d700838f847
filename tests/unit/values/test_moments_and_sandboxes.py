"""Small values that are shown to people and to API servers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from topobus.values.sandbox import ContainerName, Sandbox
from topobus.values.timestamps import in_whole_seconds


def test_moment_is_cut_to_whole_seconds_in_utc() -> None:
    """As an API server keeps its times, from any zone."""
    moment = datetime(2026, 1, 2, 3, 4, 5, 999_999, tzinfo=UTC)

    assert in_whole_seconds(moment) == "2026-01-02T03:04:05Z"
    assert in_whole_seconds(moment.astimezone(timezone(timedelta(hours=9)))) == "2026-01-02T03:04:05Z"


def test_sandbox_is_shown_by_its_pod() -> None:
    """People know a pod by namespace and name, not by the runtime's id."""
    assert str(Sandbox(id="4f1c", uid="u1", namespace="default", name="web")) == "default/web"
    assert str(ContainerName(namespace="default", pod="web", pod_uid="u1", name="main")) == "default/web/main"
