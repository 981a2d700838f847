"""Remember on which nodes a claim's like did not fit, until something there becomes free.

A claim that does not fit on a node does not fit there either when more is taken; only what is let go, published or changed can make it fit. Claims of one
template are alike, so a thousand of them look at a full node once. Flows in: outcomes with the node's freedom count. Flows out: the outcome that is still true.
"""

from __future__ import annotations

from collections.abc import Hashable

from topobus.controller.allocation.values import NoFit

__all__ = ["KnownMisses"]

# Different claims remembered; beyond that all is forgotten and found again.
_MOST = 512


class KnownMisses:
    """Nodes that are known not to fit, by what is asked."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[str, tuple[Hashable, NoFit]]] = {}

    def find(self, asked: Hashable, node: str, freedom: Hashable) -> NoFit | None:
        """Give the miss that is still true, if there is one."""
        found = self._known.get(asked, {}).get(node)
        return found[1] if found is not None and found[0] == freedom else None

    def remember(self, asked: Hashable, node: str, freedom: Hashable, outcome: NoFit) -> None:
        """Keep a miss."""
        if len(self._known) >= _MOST and asked not in self._known:
            self._known.clear()
        self._known.setdefault(asked, {})[node] = (freedom, outcome)
