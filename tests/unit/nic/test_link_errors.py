"""Damaged and lost frames of an interface: a storm between two looks is a sign, what was counted
before is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sysfs_trees import write
from topobus.devicekit.counter_rises import CounterRises
from topobus.nic.plugins.link_health import judge_errors
from topobus.sysfs.net import NetInterface
from topobus.values.health import HealthState

PATH = "sys/class/net/eth0"


@pytest.mark.parametrize(
    ("counter", "rise", "carrier", "reasons"),
    [
        ("rx_crc_errors", 100, True, ["link-errors"]),
        ("tx_carrier_errors", 250, True, ["link-errors"]),
        ("rx_frame_errors", 100, True, ["link-errors"]),
        ("rx_errors", 100, True, ["link-errors"]),
        ("tx_errors", 100, True, ["link-errors"]),
        ("rx_length_errors", 1000, True, []),
        ("rx_crc_errors", 99, True, []),
        ("rx_crc_errors", 1000, False, []),
        ("rx_dropped", 1000, True, []),
    ],
    ids=[
        "damaged",
        "lost",
        "broken",
        "damaged in all",
        "lost in all",
        "too long",
        "few",
        "without a carrier",
        "another counter",
    ],
)
def test_judge_errors_tells_a_storm_when_the_link_is_up(
    tmp_path: Path, counter: str, rise: int, carrier: bool, reasons: list[str]
) -> None:
    """A link that trains counts errors, too, which say nothing."""
    interface = NetInterface(name="eth0", path=PATH, is_up=True, carrier=carrier)
    counters = CounterRises()
    before = judge_errors(write(tmp_path, {f"{PATH}/statistics/{counter}": 5000}), [interface], counters)

    seen = judge_errors(write(tmp_path, {f"{PATH}/statistics/{counter}": 5000 + rise}), [interface], counters)

    assert before is None
    assert [(observation.reason, observation.state) for observation in [seen] if observation is not None] == [
        (reason, HealthState.DEGRADED) for reason in reasons
    ]


def test_judge_errors_passes_over_too_long_frames_when_the_driver_counts_them_as_errors(tmp_path: Path) -> None:
    """A sender with another MTU is no fault of this link, whatever else it damages."""
    interface = NetInterface(name="eth0", path=PATH, is_up=True, carrier=True)
    counters = CounterRises()
    judge_errors(
        write(tmp_path, {f"{PATH}/statistics/rx_errors": 0, f"{PATH}/statistics/rx_length_errors": 0}),
        [interface],
        counters,
    )

    seen = judge_errors(
        write(tmp_path, {f"{PATH}/statistics/rx_errors": 599, f"{PATH}/statistics/rx_length_errors": 500}),
        [interface],
        counters,
    )

    assert seen is None


def test_judge_errors_counts_each_look_by_itself_when_several_counters_rise(tmp_path: Path) -> None:
    """A counter that another one hid at one look does not tell two looks' rise at the next."""
    interface = NetInterface(name="eth0", path=PATH, is_up=True, carrier=True)
    counters = CounterRises()
    files = [f"{PATH}/statistics/rx_crc_errors", f"{PATH}/statistics/tx_errors"]
    looks = [
        judge_errors(write(tmp_path, dict.fromkeys(files, count)), [interface], counters) for count in (0, 150, 200)
    ]

    assert [look.reason if look is not None else "" for look in looks] == ["", "link-errors", ""]
