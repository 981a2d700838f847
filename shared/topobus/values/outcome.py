"""Answers that a caller expects: a Placement, or a Refusal with reasons a machine can act on and a
person can understand.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet

__all__ = [
    "ContainerPlacement",
    "Fact",
    "HintList",
    "MemoryBlock",
    "Placement",
    "Reason",
    "Refusal",
    "refuse",
    "summary",
]

Fact = str | int | float | bool | tuple[str, ...]

# The nearest miss and what would fit are among the reasons, but refuse nothing.
_ADVICE = ("nearest-miss", "would-fit")
# Reasons of a container whose policy or resources do not decide on which nodes it is.
_UNALIGNED = ("no-alignment", "no-affinity")


class Reason(Struct, frozen=True, kw_only=True):
    """One reason: a stable kebab code, a sentence, and the facts behind it.

    docs/reference/reasons.md lists the codes in use. `facts` values are numbers, names or cpulists,
    never sentences.
    """

    code: str
    message: str
    facts: dict[str, Fact] = {}


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal", tag_field="outcome"):
    """A negative answer with its reasons.

    `to_free` names the owners whose devices would have to be released for a placement. It is empty
    when no device that is held prevents one.
    """

    reasons: tuple[Reason, ...]
    to_free: tuple[Reason, ...] = ()

    @property
    def why(self) -> str:
        """The sentences of all reasons, in one line.

        >>> refuse("count-zero", "count is 0, wanted 1 or more").why
        'count is 0, wanted 1 or more'
        """
        return "; ".join(reason.message for reason in self.reasons)


class HintList(Struct, frozen=True, kw_only=True):
    """The hints of one resource, for the record.

    None is "no opinion", an empty tuple is "cannot be satisfied".
    """

    resource: str
    hints: tuple[Hint, ...] | None
    omitted: int = 0
    """At most how many more there were: a record keeps the narrowest ones of a long list."""


class MemoryBlock(Struct, frozen=True, kw_only=True):
    """What one container holds of one kind of memory: the affinity, and how many bytes of which
    node.
    """

    kind: str
    """`memory`, or `hugepages-2Mi` and the like."""
    nodes: NodeSet
    shares: tuple[tuple[int, int], ...] = ()
    """(NUMA node, bytes), by node; a node of the affinity that gave nothing is left out, but
    belongs to the group."""

    @property
    def by_node(self) -> dict[int, int]:
        """NUMA node to bytes."""
        return dict(self.shares)

    @property
    def size_bytes(self) -> int:
        """The sum over all NUMA nodes."""
        return sum(size for _, size in self.shares)


class ContainerPlacement(Struct, frozen=True, kw_only=True):
    """What one container gets."""

    name: str
    alignment: Hint
    """The merged hint; `nodes` None means that no resource had an opinion (or policy none)."""
    cpus: CpuSet = CpuSet()
    numa_nodes: NodeSet = NodeSet()
    """NUMA nodes that the CPUs and devices chosen really touch."""
    devices: dict[str, tuple[str, ...]] = {}
    """Class to device names, sorted."""
    memory: tuple[MemoryBlock, ...] = ()
    """Memory by NUMA node, where the node aligns memory."""
    hints: tuple[HintList, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """Why this alignment and why these devices: which hint decided,
    what tied, how the tie broke."""

    @property
    def has_alignment(self) -> bool:
        """Say whether its alignment is worth showing.

        Nothing is merged for a claim: its devices are chosen before the node is asked to hold them.
        """
        return bool(self.name or self.hints or self.alignment.nodes is not None)

    @property
    def shown_reasons(self) -> tuple[Reason, ...]:
        """The reasons to show to people.

        For a claim, a reason that nothing is aligned is left out beside the one that describes how
        near its devices are.

        >>> why = (Reason(code="no-alignment", message="policy none: nothing is aligned"), Reason(code="devices-chosen", message="gpu-0"))
        >>> [reason.code for reason in ContainerPlacement(name="", alignment=Hint(None, True), reasons=why).shown_reasons]
        ['devices-chosen']
        """  # noqa: E501
        return (
            self.reasons
            if self.has_alignment
            else tuple(reason for reason in self.reasons if reason.code not in _UNALIGNED)
        )


class Placement(Struct, frozen=True, kw_only=True, tag="placement", tag_field="outcome"):
    """A positive answer: one entry for each container, in the order of the request."""

    containers: tuple[ContainerPlacement, ...]


def refuse(code: str, message: str, **facts: Fact) -> Refusal:
    """Refuse with one reason.

    >>> refuse("count-zero", "count is 0, wanted 1 or more", count=0).reasons[0].facts
    {'count': 0}
    """
    return Refusal(reasons=(Reason(code=code, message=message, facts=facts),))


def summary(result: Placement | Refusal | None) -> str:
    """Summarize an answer in one line.

    >>> placed = ContainerPlacement(name="main", alignment=Hint(None, True), cpus=CpuSet(0), devices={"gpu": ("gpu-0",)})
    >>> summary(Placement(containers=(placed,))), summary(refuse("numa-capacity", "")), summary(None)
    ('placed: main: 1 gpu, 1 cpus on NUMA unknown', 'refused: numa-capacity', 'done')
    """  # noqa: E501
    if result is None:
        return "done"
    if isinstance(result, Refusal):
        return "refused: " + ", ".join(
            dict.fromkeys(reason.code for reason in result.reasons if reason.code not in _ADVICE)
        )
    parts = []
    for container in result.containers:
        held = [f"{len(names)} {device_class}" for device_class, names in sorted(container.devices.items())]
        held += [f"{len(container.cpus)} cpus"] if container.cpus else []
        where = f" on NUMA {container.numa_nodes or 'unknown'}" if held else ""
        parts.append(f"{container.name or 'claim'}: {', '.join(held) or 'nothing'}{where}")
    return "placed: " + "; ".join(parts)
