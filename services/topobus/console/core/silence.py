"""Which services have stopped talking, from what the console may read: it asks nobody.

A node's topology says on the bus which device services do not answer, and says so anew now and then; when that ends, topology itself is silent. Flows in: these
words, with the time at which the console heard them. Flows out: who is silent, and since when. Silence is no fault: devices are Unknown, and what is held stays held. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from topobus.console.core.node_drawing import View
from topobus.domain.device import Inventory
from topobus.domain.silence import SERVICE_SILENT, unheard
from topobus.domain.view import NodeAlignment

__all__ = ["API_SERVER", "TOPOLOGY", "Words", "as_heard", "silence_view"]

TOPOLOGY = "topology"
API_SERVER = "API server"
# So many words may be missed: a store that is busy or away for a moment is no silence.
_MISSED_WORDS = 3
_SLACK_S = 10.0


class Words:
    """What each node's topology said last, and when it was heard; times are seconds of one monotonic clock.

    >>> words = Words()
    >>> words.note("n1", NodeAlignment(node="n1", unheard_classes={"gpu": "09:00"}, is_said_every_s=30.0), at=0.0, said_at="09:05")
    >>> words.silent("n1", now=50.0), words.silent("n1", now=101.0)
    ({'gpu': '09:00'}, {'gpu': '09:00', 'topology': '09:05'})
    """

    def __init__(self) -> None:
        self._words: dict[str, tuple[NodeAlignment, str]] = {}
        self._heard_at: dict[str, float] = {}

    def note(self, node: str, alignment: NodeAlignment, *, at: float, said_at: str) -> None:
        """Take in a word; `said_at` is when it was stored, RFC 3339."""
        self._words[node] = (alignment, said_at)
        self._heard_at[node] = at

    def drop(self, node: str) -> None:
        """Forget a node that is gone."""
        self._words.pop(node, None)
        self._heard_at.pop(node, None)

    def excuse(self, at: float) -> None:
        """Say that until now nobody could be heard: whoever is silent, is so from now on."""
        self._heard_at = dict.fromkeys(self._heard_at, at)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Whose words are known, sorted."""
        return tuple(sorted(self._words))

    def silent(self, node: str, now: float) -> dict[str, str]:
        """Name the silent: classes and TOPOLOGY, with the time since when, RFC 3339; empty when all speak, or nothing is known."""
        if node not in self._words:
            return {}
        alignment, said_at = self._words[node]
        limit_s = _MISSED_WORDS * alignment.is_said_every_s + _SLACK_S
        is_silent = alignment.is_said_every_s > 0 and now - self._heard_at[node] > limit_s
        return {**alignment.unheard_classes, **({TOPOLOGY: said_at} if is_silent else {})}


def as_heard(inventories: Mapping[str, Inventory], silent: Mapping[str, str]) -> dict[str, Inventory]:
    """Give the inventories as they are to be read: devices of a silent service are Unknown. By class, and a warning says why."""
    heard = {}
    for device_class, inventory in sorted(inventories.items()):
        since = silent.get(device_class)
        if since is None:
            heard[device_class] = inventory
        else:
            warning = f"{SERVICE_SILENT}: no answer since {since}; its devices are unknown, and new pods get none of them"
            heard[device_class] = structs.replace(unheard(inventory, since=since), warnings=(warning, *inventory.warnings))
    return heard


def silence_view(node: str, what: str, since: str, classes: Iterable[str], trouble: str = "") -> View:
    """Say who is silent and what follows from it; `trouble`: what is known of the reason."""
    if what == API_SERVER:
        follows = f"claims and pods are shown as they last were: {trouble}"
    elif what == TOPOLOGY:
        follows = f"what is shown of this node may be old, and no pod gets devices there ({', '.join(sorted(classes)) or 'none'}); what runs goes on"
    else:
        follows = "its devices are Unknown and new pods get none of them; what is held stays held"
    return {"node": node, "service": what, "state": "silent", "since": since, "message": follows}
