"""Tells the operator of this process that its peers run another release, by what they say when they ask.

Flows in: askers and their releases, which are their own word. Flows out: a log line for each change, one asker's at most each ten seconds, and a remark of readiness. Nothing is refused for it: askers are
those of the catalogue, so the remark is bounded, and a stranger's word costs a line.
"""

from __future__ import annotations

import importlib.metadata

from topobus.bus.server_config.inboxes import connection_name
from topobus.formats.messages.releases import Standing, release_remark, standing
from topobus.process.quiet import QuietLog
from topobus.process.readiness import Readiness

__all__ = ["OWN_RELEASE", "AskerReleases"]

OWN_RELEASE = importlib.metadata.version("topobus")
"""Read once, at the import: it is a file."""

# A command on somebody's laptop is no part of the installation; `topobus doctor` tells its user what differs.
# Who asks from another account need not say who it is.
_UNREMARKED = (connection_name("cli"), "")


class AskerReleases:
    """Whose release differs from ours."""

    def __init__(self, readiness: Readiness, own: str, quiet: QuietLog) -> None:
        self._quiet = quiet
        self._readiness = readiness
        self._own = own
        self._said: dict[str, str] = {}
        self._remarks: dict[str, str] = {}

    def note(self, asker: str, release: str) -> None:
        """Take in what an asker said; one that says nothing says nothing new."""
        if not release or asker in _UNREMARKED or self._said.get(asker) == release:
            return
        self._said[asker] = release
        remark = release_remark(asker, release, self._own)
        if remark == self._remarks.get(asker, ""):
            return
        self._remarks[asker] = remark
        if remark:
            newer = standing(release, self._own) is Standing.NEWER
            step = "upgrade this process" if newer else f"upgrade {asker}, or see what connects under this name"
            # Two instances of one principal, an older and a newer one, ask in turn while they are replaced.
            self._quiet.warning("release.differs", asker, asker=asker, why=remark, own=self._own, next_step=step)
        self._readiness.set("releases", is_ready=True, why="; ".join(text for _, text in sorted(self._remarks.items()) if text))
