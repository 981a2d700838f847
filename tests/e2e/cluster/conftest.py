"""A cluster named by the environment. Without one these tests are skipped, and the end of the run says in capitals that nothing was checked."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.cluster import Cluster

_HERE = Path(__file__).resolve().parent
_WANTED = ("KUBECONFIG", "TOPOBUS_KUBELET_DIR")


def _missing() -> list[str]:
    return [name for name in _WANTED if not os.environ.get(name)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies here when no cluster is named."""
    missing = _missing()
    if missing:
        reason = f"NOT CHECKED ON A CLUSTER: {' and '.join(missing)} not set"
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it once more where everybody looks."""
    skipped = [one for one in terminalreporter.stats.get("skipped", []) if "tests/e2e/cluster/" in one.nodeid]
    if skipped and _missing():
        terminalreporter.write_sep("!", f"{len(skipped)} CLUSTER TESTS DID NOT RUN: set {', '.join(_WANTED)}", red=True)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """The cluster that KUBECONFIG names, on the node of TOPOBUS_KUBELET_DIR (TOPOBUS_CLUSTER_NODE, or the only one)."""
    async with Cluster.open(Path(os.environ["KUBECONFIG"]), os.environ.get("TOPOBUS_CLUSTER_NODE", "")) as opened:
        yield opened
