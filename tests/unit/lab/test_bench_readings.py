"""What `python -m lab.bench readings` measures."""

from __future__ import annotations

import pytest

from lab.bench.readings import ReadingCost, measure


def test_readings_bench_reads_every_device_of_both_classes() -> None:
    """Without NVML a GPU of NVIDIA's has no reading; its NICs have theirs."""
    gpus, nics = measure("dgx", "", rounds=1)

    assert (gpus.device_class, gpus.devices, gpus.lines) == ("gpu", 8, 0)
    assert (nics.device_class, nics.devices) == ("nic", 8)
    assert nics.lines >= 8


def test_reading_cost_is_a_share_of_a_core_at_its_pauses() -> None:
    """5 ms each 10 s and 3 ms each 15 s."""
    cost = ReadingCost(device_class="gpu", devices=8, lines=1, reading_ms=5.0, scrape_ms=3.0)

    assert cost.percent == pytest.approx(0.07)
