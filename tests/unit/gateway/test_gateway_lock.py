"""The node's turn: one has it, the next one stands in line, and nobody takes another's sockets by
going under its name.
"""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from topobus.gateway.node_lock import NodeLock, open_node_lock
from topobus.process.readiness import Readiness
from topobus.values.errors import ConfigError


def turns(tmp_path: Path, stack: ExitStack, *instances: str) -> list[NodeLock]:
    """Gateways in line; the kernel keeps their locks apart as it does those of processes."""
    return [
        stack.enter_context(open_node_lock(tmp_path / "state" / "checkpoint.json", instance, Readiness()))
        for instance in instances
    ]


async def test_turn_is_had_by_one_and_comes_to_the_next_when_it_ends(tmp_path: Path) -> None:
    """Who stands by knows who has it, who has it knows that somebody stands by, and the end of the
    one is the beginning of the other.
    """
    with ExitStack() as stack:
        first, second = turns(tmp_path, stack, "pod-1", "pod-2")
        had = (first.try_begin(), second.try_begin())
        waiting = asyncio.create_task(second.begin())
        await asyncio.sleep(0)
        seen = (second.other_instance(), first.is_awaited())
        first.end()
        await asyncio.wait_for(waiting, 10)
        after = (first.try_begin(), second.is_awaited(), second.other_instance())

    assert had == (True, False)
    assert seen == ("pod-1", True)
    assert after == (False, False, None)


def test_second_gateway_takes_another_name_when_the_first_one_has_its_own(tmp_path: Path) -> None:
    """A name that was set for both is an operator's slip, and must not make two gateways take each
    other's sockets away.
    """
    with ExitStack() as stack:
        first, second = turns(tmp_path, stack, "same", "same")
        first.try_begin()
        second.try_begin()

        assert first.instance == "same"
        assert second.instance.startswith("same-")
        assert second.other_instance() == "same"


def test_turn_begins_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that starts on a full disk still answers for what is prepared.

    Only its name is not there for who stands by.
    """

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_room)
    with ExitStack() as stack:
        first, second = turns(tmp_path, stack, "pod-1", "pod-2")

        assert (first.try_begin(), second.try_begin()) == (True, False)
        assert second.other_instance() is None


def test_turn_is_free_when_its_holder_has_died(tmp_path: Path) -> None:
    """What a dead gateway wrote into the file holds nobody up, and its name may be taken again."""
    with ExitStack() as stack:
        (dead,) = turns(tmp_path, stack, "pod-1")
        dead.try_begin()

    with ExitStack() as stack:
        (alive,) = turns(tmp_path, stack, "pod-1")
        assert alive.try_begin()
        assert alive.instance == "pod-1"


def test_settings_are_named_when_the_lock_cannot_be_made(tmp_path: Path) -> None:
    """A folder that cannot be made is the operator's to mend: the key and the path are told."""
    (tmp_path / "state").write_text("a file where the folder should be")

    with (
        pytest.raises(ConfigError, match=r"checkpoint_path: cannot make .*checkpoint\.json\.lock"),
        ExitStack() as stack,
    ):
        turns(tmp_path, stack, "pod-1")
