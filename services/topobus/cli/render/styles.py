"""The terminal's styles of drawings and listings: a holder's colour, and a device's health."""

from __future__ import annotations

from rich.text import Text

from topobus.engine.drawing.letters import COLOUR_COUNT, DrawnHolder
from topobus.values.health import HealthState

__all__ = ["HEALTH_STYLES", "health_text", "holder_style"]

# Plain ANSI colours are readable on dark, light and Solarized terminals. Bright ones and white are
# not, and many terminals make bold colours bright. So letters distinguish owners where colours
# repeat.
_STYLES = ("cyan", "magenta", "yellow", "blue", "green", "bold")
assert len(_STYLES) == COLOUR_COUNT

HEALTH_STYLES = {
    HealthState.HEALTHY: "",
    HealthState.DEGRADED: "warn",
    HealthState.RECOVERING: "warn",
    HealthState.UNHEALTHY: "fail",
    HealthState.UNKNOWN: "warn",
}


def health_text(state: HealthState, detail: str = "") -> Text:
    """Write a health, with what is wrong."""
    return Text(f"{state.value}: {detail}" if detail else state.value, HEALTH_STYLES[state] or "ok")


def holder_style(holder: DrawnHolder | None, default: str = "") -> str:
    """Return a holder's style, or the default where there is no holder."""
    return _STYLES[holder.colour] if holder is not None else default
