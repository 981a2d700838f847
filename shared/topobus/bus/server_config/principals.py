"""Principals: the kinds of processes that connect to NATS.

Device classes that `topobus-device` serves are principals besides these
(`device_classes.principal_role`).
"""

from __future__ import annotations

from topobus.formats.messages.device_classes import DEVICE_SERVICES

__all__ = ["CLUSTER_WIDE", "LEAF_PRINCIPALS", "PRINCIPALS"]

PRINCIPALS = ("discovery", *DEVICE_SERVICES, "topology", "gateway", "controller", "console", "cli", "user", "verdicts")
"""Each kind of process, `user`, which follows events, and `verdicts`, which reports how devices
are."""
LEAF_PRINCIPALS = (*PRINCIPALS, "relay")
"""Those of an installation where nodes have servers of their own."""
CLUSTER_WIDE = ("controller", "console", "cli", "user", "verdicts")
"""These act for the whole cluster: a node in their subjects is always any."""
