"""The gateway's benchmark as a whole, with few calls: what it measures, and against what.

No time is looked at.
"""

from __future__ import annotations

import json

import pytest

from lab.bench import gateway

pytestmark = pytest.mark.integration


def test_bench_gateway_measures_a_floor_beside_allocate_and_prepare_when_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both calls have the floor's times and ratios, and processor time is told for every process of
    both.
    """
    status = gateway.main(["--json", "--rounds", "10", "--only", "calls,claims"])

    cases = {row["case"]: row for row in json.loads(capsys.readouterr().out)["cases"]}
    allocated, prepared = cases["Allocate of one GPU"], cases["prepare of one claim"]
    assert status == 0
    assert (
        min(
            row[key]
            for row in (allocated, prepared)
            for key in ("value", "p99", "floor", "floor_p99", "ratio", "ratio_p99")
        )
        > 0
    )
    assert set(allocated["processors"]) == {"gateway", "topology", "device", "nats-server", "others"}
    assert set(allocated["floor_processors"]) == {"gateway", "topology", "device", "nats-server"}
    assert (allocated["rounds"], allocated["budget_ratio"], allocated["budget_ratio_p99"]) == (10, 2.0, 5.0)


def test_bench_gateway_refuses_a_group_when_there_is_none_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped group is an error that names those that there are, not a run that measures
    nothing.
    """
    with pytest.raises(SystemExit):
        gateway.main(["--only", "call"])

    assert "no such group: call; there are calls, claims" in capsys.readouterr().err
