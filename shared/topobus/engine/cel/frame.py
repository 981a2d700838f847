"""The state of one evaluation: its variables, the cost so far, and the limit at which it ends.

Source: cel-go interpreter/runtimecost.go.
"""

from __future__ import annotations

from topobus.engine.cel.errors import CostExceeded

__all__ = ["Frame"]

# Values and tens of characters that are read or copied by operations that Kubernetes treats as
# cheap (a sum of lists, `==` of nested ones). A macro that visits a million values has exceeded the
# cost before. This limits work that has no cost.
_MOST_WORK = 1_000_000


class Frame:
    """One evaluation: variables by number (0 is `device`), and the cost."""

    __slots__ = ("cost", "limit", "slots", "work")

    def __init__(self, device: object, slots: int, limit: int) -> None:
        self.slots: list[object] = [device, *([None] * slots)]
        self.cost = 0
        self.limit = limit
        self.work = 0

    def charge(self, cost: int) -> None:
        """Add to the cost.

        Errors: raises CostExceeded.
        """
        self.cost += cost
        if self.cost > self.limit:
            raise CostExceeded("operation cancelled: actual cost limit exceeded")

    def labour(self, work: int) -> None:
        """Add to the work that no cost covers, before it is done.

        Errors: raises CostExceeded.
        """
        self.work += work
        if self.work > _MOST_WORK:
            raise CostExceeded("operation cancelled: it copies or compares too much")
