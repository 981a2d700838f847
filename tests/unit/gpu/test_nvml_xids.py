"""Which Xid errors say something of a GPU's health, and what is to be done."""

from __future__ import annotations

import pytest

from topobus.gpu.nvml.nvml_xids import XidTable
from topobus.values.health import HealthState, RecoveryAction


@pytest.mark.parametrize("xid", [8, 13, 31, 43, 45, 63, 68, 94, 106, 137, 154])
def test_xid_table_says_nothing_when_the_catalogue_restarts_or_ignores(xid: int) -> None:
    """RESTART_APP and IGNORE of NVIDIA's catalogue say nothing of the GPU: a contained memory error
    (94) does not take it out.
    """
    assert XidTable().observation(xid) is None


@pytest.mark.parametrize("xid", [92, 144, 149, 157])
def test_xid_table_degrades_when_the_catalogue_leaves_it_to_the_driver(xid: int) -> None:
    """What the driver's own recovery advice decides leaves the GPU in use."""
    observation = XidTable().observation(xid)

    assert observation is not None
    assert (observation.state, observation.is_sticky) == (HealthState.DEGRADED, False)


@pytest.mark.parametrize(
    ("xid", "action"),
    [
        (48, RecoveryAction.RESET_DEVICE),
        (74, RecoveryAction.RESET_DEVICE),
        (79, RecoveryAction.REBOOT_NODE),
        (109, RecoveryAction.RESET_DEVICE),
        (110, RecoveryAction.RESET_DEVICE),
        (136, RecoveryAction.RESET_DEVICE),
        (140, RecoveryAction.RESET_DEVICE),
        (151, RecoveryAction.REBOOT_NODE),
        (999, RecoveryAction.WAIT),
    ],
)
def test_xid_table_says_what_to_do_when_a_number_is_known(xid: int, action: RecoveryAction) -> None:
    """Known numbers have their action; an unknown one is a fault that may pass."""
    observation = XidTable().observation(xid)

    assert observation is not None
    assert (observation.action, observation.is_sticky) == (action, action is not RecoveryAction.WAIT)
