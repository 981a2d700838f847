"""Every code of docs/reference/health-reasons.md has a recorded fault that shows it, or a reason
why none can exist and a test that shows it otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.device_faults import FAULTS
from support.nvml_faults import NVML_FAULTS
from topobus.values.health_reasons import HEALTH_REASONS

_ROOT = Path(__file__).parent.parent.parent
_PAGE = _ROOT / "docs" / "reference" / "health-reasons.md"

# What the service finds out by itself, and no file of a machine tells; and the test that shows it.
_WITHOUT_A_FAULT = {
    "driver-hung": "tests/unit/devicekit/test_inventory_merge.py",
    "driver-failed": "tests/unit/devicekit/test_inventory_merge.py",
    "driver-not-loaded": "tests/unit/devicekit/test_inventory_merge.py",
    "cleaning": "tests/integration/devices/test_device_cleaning.py",
    "dirty": "tests/integration/devices/test_gpu_cleaning.py",
    "journal-unreadable": "tests/integration/devices/test_device_cleaning.py",
    "mig-occupied": "tests/unit/gpu/test_mig_on_demand.py",
    "mps-daemon-gone": "tests/integration/devices/test_mps_daemons.py",
    "reported-by-source": "tests/integration/devices/test_reported_devices.py",
    "node-missing": "tests/unit/engine/test_strays.py",
}


def _rows() -> list[list[str]]:
    return [line.split("|") for line in _PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]


def _documented() -> dict[str, set[str]]:
    """States by code, from the page's tables."""
    states: dict[str, set[str]] = {}
    for row in _rows():
        for code in re.findall(r"`([a-z-]+)`", row[1]):
            states.setdefault(code, set()).update(re.findall(r"Unhealthy|Degraded|Unknown", f"{row[3]} {row[4]}"))
    return states


def test_page_has_the_codes_of_the_catalogue_with_dimension_and_state() -> None:
    """A policy of repairs may name these codes and no other, and a sign is as bad as its page says."""
    listed = {code: (row[2].strip(), row[3]) for row in _rows() for code in re.findall(r"`([a-z-]+)`", row[1])}
    different = [
        code
        for code, reason in HEALTH_REASONS.items()
        if code in listed
        and not (
            (str(reason.dimension) in listed[code][0] or listed[code][0] == "any")
            and str(reason.state).capitalize() in listed[code][1]
        )
    ]

    assert sorted(listed) == sorted(HEALTH_REASONS)
    assert different == []


def test_every_documented_reason_has_a_recorded_fault_or_a_reason_why_not() -> None:
    """A code without a row would be a promise that nobody checks, and a row without a code a sign
    that nobody can look up.
    """
    shown = {fault.code for fault in (*FAULTS, *NVML_FAULTS)}

    assert sorted(_documented()) == sorted({*shown, *_WITHOUT_A_FAULT})
    assert shown.isdisjoint(_WITHOUT_A_FAULT)


def test_every_recorded_fault_has_a_state_that_its_page_tells() -> None:
    """The page says how bad it is."""
    documented = _documented()

    assert [
        (fault.code, fault.state)
        for fault in (*FAULTS, *NVML_FAULTS)
        if str(fault.state).capitalize() not in documented[fault.code]
    ] == []


@pytest.mark.parametrize(("code", "test"), sorted(_WITHOUT_A_FAULT.items()))
def test_a_reason_without_a_fault_is_shown_by_the_test_that_is_named(code: str, test: str) -> None:
    """The named file speaks of the code."""
    assert f'"{code}"' in (_ROOT / test).read_text(encoding="utf-8")
