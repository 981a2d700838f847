"""The idle benchmark's arithmetic and table; nothing here is timed."""

from __future__ import annotations

import os
import time

import pytest
from msgspec import structs

from lab.bench.idle import SERVICES, budgets, draw, total
from lab.bench.process_use import Counts, Use, count_messages, parse_field, read_counts, use_between

COUNTS = Counts(
    processor_s=2.0, reads=100, wakeups=40, resident_mib=41.5, own_mib=30.5, threads=4, sent=10, received=20
)


def test_use_between_divides_by_the_time_when_counts_have_grown() -> None:
    """What grew is told a second, what is is told as it was at the end."""
    after = Counts(
        processor_s=2.3, reads=160, wakeups=70, resident_mib=42.0, own_mib=31.0, threads=5, sent=25, received=80
    )

    use = use_between("nic", COUNTS, after, 30.0)

    assert (use.processor_percent, use.reads_per_s, use.wakeups_per_s) == pytest.approx((1.0, 2.0, 1.0))
    assert (use.sent_per_s, use.received_per_s) == pytest.approx((0.5, 2.0))
    assert (use.name, use.resident_mib, use.own_mib, use.threads) == ("nic", 42.0, 31.0, 5)


def test_count_messages_adds_connections_when_a_service_has_several() -> None:
    """The server's `in` is what the service sent; a connection without a name is nobody's."""
    connz = {
        "connections": [
            {"name": "gpu-1a2b3c4d", "in_msgs": 3, "out_msgs": 5},
            {"name": "gpu-00000000", "in_msgs": 1, "out_msgs": 1},
            {"name": "floor-0", "in_msgs": 7, "out_msgs": 7},
            {"cid": 9, "in_msgs": 2, "out_msgs": 2},
        ]
    }

    counts = count_messages(connz)

    assert counts == {"gpu": (4, 6), "floor": (7, 7)}


def test_parse_field_raises_when_the_file_lacks_it() -> None:
    """A kernel without the number is told by name, not counted as zero."""
    with pytest.raises(KeyError, match="syscr"):
        parse_field("rchar: 5\nwchar: 6\n", "syscr")


def test_read_counts_sees_processor_time_when_this_process_works() -> None:
    """The clock of a process by its id is the one that the process itself reads."""
    own_s = time.process_time()

    counts = read_counts(os.getpid())

    assert own_s <= counts.processor_s <= time.process_time()
    assert counts.threads >= 1
    assert counts.resident_mib >= counts.own_mib > 0


def test_total_leaves_out_server_and_floor_when_adding_up() -> None:
    """The sum is that of the services."""
    uses = [_use(name, 0.25) for name in (*SERVICES, "nats-server", "floor")]

    summed = total(uses)

    assert summed.processor_percent == pytest.approx(0.25 * len(SERVICES))
    assert summed.threads == 4 * len(SERVICES)


def test_draw_names_each_process_and_the_ratio_when_all_were_measured() -> None:
    """The table has a line a process, one for the sum, and how often the floor goes into it."""
    uses = [*(_use(name, 0.25) for name in SERVICES), _use("floor", 0.05), _use("nats-server", 0.5)]

    text = draw(uses)

    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        *SERVICES,
        "floor",
        "nats-server",
        "all",
        "processor",
        *["budget"] * 4,
    ]
    assert "5.0 times the floor's" in text
    assert f"all {len(SERVICES)} services           2.000" in text


def test_budgets_are_kept_or_missed_when_measured() -> None:
    """Each budget is compared with its own sum: all services, the hub's share of them, the largest
    one, and the node's without the controller.
    """
    uses = [*(_use(name, 0.1) for name in SERVICES), _use("floor", 5.0), _use("nats-server", 5.0)]

    measured = budgets(uses)
    missed = budgets(
        [_use("controller", 1.1), *(structs.replace(use, resident_mib=61.0) for use in uses if use.name == "gateway")]
    )

    assert [budget.used for budget in measured] == pytest.approx([0.8, 1.0, 40.0, 280.0])
    assert [budget.is_kept for budget in measured] == [True, True, True, True]
    assert [budget.is_kept for budget in missed] == [False, True, False, True]


def test_draw_says_which_budget_is_missed() -> None:
    """A person and a script find the word."""
    text = draw([_use(name, 0.25) for name in SERVICES])

    assert "budget MISSED: processor time of all services: 2.00 of 1 % of a core" in text
    assert "budget kept: resident memory of the node plane: 280.00 of 300 MiB" in text


def _use(name: str, percent: float) -> Use:
    return Use(
        name=name,
        processor_percent=percent,
        reads_per_s=1.0,
        wakeups_per_s=2.0,
        sent_per_s=0.5,
        received_per_s=0.5,
        resident_mib=40.0,
        own_mib=30.0,
        threads=4,
    )
