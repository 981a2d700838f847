"""A device's record: what is about to be done is written before it is done, and what was there at
first is never overwritten.
"""

from __future__ import annotations

import pytest

from topobus.devicekit.device_record import DeviceRecord, RecordState, Step
from topobus.values.errors import InvariantError


def test_record_writes_each_state_before_it_holds_it_when_steps_come_and_go() -> None:
    """What a crash leaves on the disk is never older than what the driver was told."""
    written: list[RecordState] = []
    record = DeviceRecord(write=written.append)

    record.intend("rename", {"name": "eth0"})
    record.done("rename", {"name": "net1"})
    record.undone("rename")

    assert [state.steps for state in written] == [
        (Step(name="rename", before={"name": "eth0"}),),
        (Step(name="rename", before={"name": "eth0"}, after={"name": "net1"}, is_done=True),),
        (),
    ]


def test_record_keeps_the_state_of_before_when_a_write_fails() -> None:
    """What could not be written is not so."""

    def fail(_state: RecordState) -> None:
        raise OSError("disk is full")

    record = DeviceRecord(write=fail)

    with pytest.raises(OSError, match="disk is full"):
        record.intend("rename")

    assert record.steps == ()


def test_record_keeps_the_first_before_when_a_step_is_intended_again() -> None:
    """A driver that is asked again after a crash sees its own half-done work, and must not take it
    for what was there.
    """
    record = DeviceRecord()
    record.intend("mtu", {"mtu": 1500})

    record.intend("mtu", {"mtu": 9000})

    assert [step.before for step in record.steps] == [{"mtu": 1500}]


def test_record_refuses_a_done_step_when_it_was_never_intended() -> None:
    """A driver that acts before it writes is told in its first test."""
    with pytest.raises(InvariantError, match="never intended"):
        DeviceRecord().done("mtu")
