"""The codes of docs/reference/health-reasons.md, by which a policy of repairs is checked."""

from __future__ import annotations

__all__ = ["REASON_CODES"]

_CODES = """
    aer-correctable-storm aer-fatal aer-nonfatal carrier-lost cleaning device-gone device-offline
    dirty driver-failed driver-hung driver-not-loaded ecc-uncorrected engine-error
    engine-fatal-error fabric-degraded fabric-failed fabric-not-ready fell-off-bus firewall-tripped
    function-crashed gpu-excluded gpu-lost half-duplex health-indicator journal-unreadable
    link-errors link-narrow link-slow memory-corrected-storm memory-errors memory-pages-lost
    mig-occupied mps-daemon-gone no-kernel-driver node-missing nvlink-down nvlink-errors page-retirement-pending
    parent-aer-correctable-storm parent-aer-fatal parent-aer-nonfatal parent-carrier-lost
    parent-gone parent-link-narrow parent-link-slow parent-no-kernel-driver port-error power-limited
    power-stopped power-throttled ras-uncorrected rdma-port-down recovery-advised reported-by-source
    row-remap-failed row-remap-pending shell-not-ready speed-dropped survivability-mode thermal-slowdown throttled
    too-hot tree-unreadable unmonitored user-function-missing wedged xid
"""
REASON_CODES = frozenset(_CODES.split())
