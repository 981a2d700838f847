"""The state folder of a `topobus up` in a test, with the server of this run as the one that it
launches.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.local_system.system import Layout

__all__ = ["launched_layout"]

_LIMIT_S = 60.0


def launched_layout(folder: Path, nats_binary: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Make the folder.

    The server is started at a port that no other test tries at the same moment.
    """
    monkeypatch.setenv("TOPOBUS_NATS_SERVER", str(nats_binary))
    monkeypatch.setattr("topobus.local_system.system._NATS_READY_S", _LIMIT_S)
    layout = Layout(state=folder / "state")
    layout.nats.mkdir(parents=True)
    return layout
