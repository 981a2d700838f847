"""The terminal's styles for what a drawing and listings show: a holder's colour, and how well a
device is.
"""

from __future__ import annotations

from topobus.engine.drawing.letters import COLOUR_COUNT, DrawnHolder
from topobus.values.health import HealthState

__all__ = ["HEALTH_STYLES", "holder_style"]

# Plain ANSI colours read on dark, light and Solarized terminals; bright ones and white do not, and
# many terminals make bold colours bright. So letters tell owners apart where colours repeat.
_STYLES = ("cyan", "magenta", "yellow", "blue", "green", "bold")
assert len(_STYLES) == COLOUR_COUNT

HEALTH_STYLES = {
    HealthState.HEALTHY: "",
    HealthState.DEGRADED: "warn",
    HealthState.RECOVERING: "warn",
    HealthState.UNHEALTHY: "fail",
    HealthState.UNKNOWN: "warn",
}


def holder_style(holder: DrawnHolder | None, default: str = "") -> str:
    """Give a holder's style; the default for nobody."""
    return _STYLES[holder.colour] if holder is not None else default
