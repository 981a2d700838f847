"""An answer of `prepare` that was allowed once is looked at again as soon as anything differs: its
words, the rights, where its paths lead.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from topobus.bus.bus import Bus
from topobus.formats.messages.messages import Prepared
from topobus.gateway import asks as gateway_asks
from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.rules.edit_limits import EditRights
from topobus.values.edits import ContainerEdits, Mount


class _Door:
    """The check of answers of class `acme`, whose rights a test may change."""

    def __init__(self, folder: Path) -> None:
        self.rights = EditRights(mounts=(str(folder),))
        self.asks = NodeAsks(cast(Bus, None), "n", DeadlineSettings(), lambda _: self.rights, None)

    async def is_allowed(self, path: Path, device: str = "acme-0") -> bool:
        mount = Mount(host_path=str(path), container_path="/opt/acme", options=("ro", "bind"))
        return (
            await self.asks.refuse_forbidden("acme", Prepared(edits={device: ContainerEdits(mounts=(mount,))})) is None
        )


@pytest.fixture
def door(tmp_path: Path) -> _Door:
    """Files below `acme` are allowed."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "file").touch()
    return _Door(tmp_path / "acme")


async def test_answer_is_refused_when_its_path_leads_elsewhere_since_it_was_allowed(
    door: _Door, tmp_path: Path
) -> None:
    """Who replaces an allowed file by a link gives the container nothing else."""
    file = tmp_path / "acme" / "file"
    before = await door.is_allowed(file)
    file.unlink()
    file.symlink_to("/etc/shadow")

    assert (before, await door.is_allowed(file)) == (True, False)


async def test_answer_is_refused_when_the_rights_are_fewer_since_it_was_allowed(door: _Door, tmp_path: Path) -> None:
    """Rights count as they are now."""
    before = await door.is_allowed(tmp_path / "acme" / "file")
    door.rights = EditRights()

    assert (before, await door.is_allowed(tmp_path / "acme" / "file")) == (True, False)


async def test_answer_is_refused_when_the_devices_say_something_else(door: _Door, tmp_path: Path) -> None:
    """That a device's answer was allowed says nothing of another answer for it."""
    before = await door.is_allowed(tmp_path / "acme" / "file")

    assert (before, await door.is_allowed(tmp_path / "other")) == (True, False)


async def test_answer_is_looked_at_once_when_nothing_differs(
    door: _Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are gone through for the first answer of a device, and for no equal one.

    Of many devices the oldest is forgotten.
    """
    looked_at: list[str] = []
    rule = gateway_asks.refuse_forbidden

    def note(device_class: str, prepared: Prepared, *rest: object) -> object:
        looked_at.extend(prepared.edits)
        return rule(device_class, prepared, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(gateway_asks, "refuse_forbidden", note)
    monkeypatch.setattr(gateway_asks, "_ALLOWED_LIMIT", 2)
    for device in ("acme-0", "acme-0", "acme-1", "acme-0", "acme-2", "acme-0"):
        assert await door.is_allowed(tmp_path / "acme" / "file", device)

    assert looked_at == ["acme-0", "acme-1", "acme-2", "acme-0"]
