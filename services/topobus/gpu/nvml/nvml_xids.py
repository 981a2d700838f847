"""Maps Xid errors of NVIDIA's driver to health observations, by the table `nvidia_xids.toml`.

A number that the table lacks counts as a fault: new drivers add numbers, and a GPU that may be
broken must not get new work.
"""

from __future__ import annotations

import tomllib
from importlib import resources

from topobus.values.health import HealthState, Observation, RecoveryAction
from topobus.values.health_reasons import sign

__all__ = ["XidTable"]


class XidTable:
    """The table of Xid errors that matter."""

    def __init__(self) -> None:
        text = resources.files("topobus.gpu.nvml").joinpath("nvidia_xids.toml").read_text(encoding="utf-8")
        rows = tomllib.loads(text)
        self._ignored = frozenset(rows["ignored"])
        self._degraded = frozenset(rows["degraded"])
        self._reset = frozenset(rows["reset"])
        self._reboot = frozenset(rows["reboot"])
        self._instance = frozenset(rows["instance"])

    def is_of_whole_gpu(self, xid: int) -> bool:
        """Return whether an Xid that the driver ascribes to one MIG instance concerns all of its
        GPU.

        These are the faults that only a reset of the GPU or a reboot ends, unless the table makes
        an exception.
        """
        return xid in self._reset | self._reboot and xid not in self._instance

    def observation(self, xid: int) -> Observation | None:
        """Turn an Xid into an observation.

        None for an Xid that is no fault of the GPU: an application's fault, or news. One that needs
        a reset or a reboot is sticky, because no later query shows that it happened.
        """
        if xid in self._ignored:
            return None
        action = RecoveryAction.RESET_DEVICE if xid in self._reset else RecoveryAction.WAIT
        if xid in self._reboot:
            action = RecoveryAction.REBOOT_NODE
        return sign(
            "xid",
            f"the driver reported Xid {xid}",
            evidence={"xid": str(xid)},
            state=HealthState.DEGRADED if xid in self._degraded else HealthState.UNHEALTHY,
            action=action,
            is_sticky=action is not RecoveryAction.WAIT,
        )
