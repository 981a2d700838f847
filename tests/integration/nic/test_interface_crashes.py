"""SIGKILL at every moment of a hand-over and of a return: what the record says is enough to make
the interface again what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.hand_over_rig import FULL, TAG, Rig, configured, dies_at, read_record, rig
from support.laws import steps
from support.real_interfaces import ip, why_not_here
from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.netlink.hand_over import hand_over
from topobus.nic.netlink.take_back import take_back
from topobus.values.sandbox import AttachedInterface

pytestmark = [
    pytest.mark.integration,
    pytest.mark.law,
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "interfaces can be made"),
]

MOST_MOMENTS = 200


def kill_each(machine: Rig, file: Path, act: Callable[[DeviceRecord], object], begin: Callable[[], object]) -> int:
    """Kill `act` at its moments, one after the other, until it comes to its end.

    After each, undo from the record alone and compare. How many moments it has, or one or two more
    where not each is tried.
    """
    before, names = machine.state(), machine.names(machine.host)
    rules = ip("-n", machine.pod, "rule") + ip("-n", machine.pod, "-6", "rule")
    for moment in steps(MOST_MOMENTS):
        begin()
        is_killed = dies_at(moment, file, act)
        record = DeviceRecord(read_record(file))

        take_back(machine.places, machine.namespace, record)

        file.unlink(missing_ok=True)
        where = f"killed at moment {moment}"
        assert (machine.state(), where) == (before, where)
        assert (machine.names(machine.host), machine.names(machine.pod), where) == (names, {"lo"}, where)
        assert (ip("-n", machine.pod, "rule") + ip("-n", machine.pod, "-6", "rule"), record.steps, where) == (
            rules,
            (),
            where,
        )
        if not is_killed:
            return moment - 1
    raise AssertionError(f"it has more than {MOST_MOMENTS} moments")


def test_hand_over_is_undone_from_the_record_when_it_is_killed_at_any_moment(tmp_path: Path) -> None:
    """Name, MAC, MTU, queue, addresses, routes, settings, alias and up as before.

    No rule left in the pod.
    """
    file = tmp_path / "nic-eth1.json"
    with rig() as machine:

        def act(record: DeviceRecord) -> None:
            attached = hand_over(machine.places, "eth1", machine.namespace, configured(**FULL), record, tag=TAG)
            assert isinstance(attached, AttachedInterface), attached

        moments = kill_each(machine, file, act, lambda: None)

    # 12 steps, each with two moments at its intent and two at its end, and 16 requests and writes.
    assert moments >= 64


def test_share_is_undone_from_the_record_when_it_is_killed_at_any_moment(tmp_path: Path) -> None:
    """No child is left on the host or in the pod, and the parent is as it was."""
    file = tmp_path / "nic-eth1.json"
    config = configured(interface={"name": "net1", "addresses": ["10.0.0.9/24"]}, share={"mode": "macvlan"})
    with rig() as machine:

        def act(record: DeviceRecord) -> None:
            attached = hand_over(machine.places, "eth1", machine.namespace, config, record, tag=TAG)
            assert isinstance(attached, AttachedInterface), attached

        moments = kill_each(machine, file, act, lambda: None)

    assert moments >= 30


def test_return_is_finished_from_the_record_when_it_is_killed_at_any_moment(tmp_path: Path) -> None:
    """A return that died is asked again and ends as if it had not.

    So does one that died before it wrote that it was done.
    """
    file = tmp_path / "nic-eth1.json"
    with rig() as machine:

        def begin() -> None:
            assert not dies_at(
                0,
                file,
                lambda record: hand_over(
                    machine.places, "eth1", machine.namespace, configured(**FULL), record, tag=TAG
                ),
            )
            assert machine.names(machine.pod) == {"lo", "net1"}

        moments = kill_each(machine, file, lambda record: take_back(machine.places, machine.namespace, record), begin)

    assert moments >= 39
