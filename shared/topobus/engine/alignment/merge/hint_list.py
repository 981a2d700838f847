"""A list of hints as the merge works on it: the hints of a resource that kubelet would receive.

Lists come from device services that have hints of their own, and from replays of kubelet's
decisions. A hint without nodes is "no opinion" where it is preferred and "cannot be satisfied"
where it is not. Either leaves every node in play.
Source: kubelet 1.36 pkg/kubelet/cm/topologymanager/policy.go.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.engine.alignment.merge.mask_algebra import MaskAlgebra, pack
from topobus.values.hint import Hint

__all__ = ["HintMasks"]


class HintMasks:
    """A list of hints, taken apart, with the properties of a `HintRule`. Immutable."""

    __slots__ = ("is_empty", "is_open", "is_wild", "masks", "preferred", "reach", "width")

    def __init__(self, hints: Sequence[Hint] | None) -> None:
        given = [Hint(None, preferred=True)] if hints is None else hints
        self.masks = tuple(dict.fromkeys(hint.nodes.bits for hint in given if hint.nodes is not None))
        """Bits of node ids, nodes that the machine does not have included."""
        self.preferred = frozenset(hint.nodes.bits for hint in given if hint.nodes is not None and hint.preferred)
        self.is_wild = any(hint.nodes is None and hint.preferred for hint in given)
        """Whether any mask is as good as a preferred one."""
        self.is_open = not self.masks or any(hint.nodes is None for hint in given)
        """Whether all nodes together are among the masks."""
        self.is_empty = not self.masks
        self.width = min((mask.bit_count() for mask in self.masks), default=0)
        self.reach = -1 if self.is_open else 0
        for mask in self.masks:
            self.reach |= mask

    def clipped(self, algebra: MaskAlgebra, order: Sequence[int]) -> int:
        """The masks clipped to the nodes of `order`, as a family over its positions."""
        family = 1 << algebra.full if self.is_open else 0
        for mask in self.masks:
            family |= 1 << pack(mask, order)
        return family
