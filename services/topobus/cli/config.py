"""Settings of `topobus`: the address of NATS and the default node.

Flags win over environment, environment over file, file over default.
"""

from __future__ import annotations

from topobus.process.config import LogSettings, ServiceSettings

__all__ = ["CliSettings"]


class CliSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator's tool reads from its file and from
    `TOPOBUS_ALL__…` and `TOPOBUS_CLI__…`.
    """

    connect_timeout_s: float = 3.0
    """How long a command waits for NATS before it reports that there is no server. 3 s: a local
    server answers within milliseconds."""
    log: LogSettings = LogSettings(level="error", format="console")
    """Only errors, as a command prints its results itself. `debug` shows what the bus does."""
