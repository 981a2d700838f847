"""Names the nodes that run another release, whose clock is wrong, or that published a value that
cannot be read.

Each change gives a log line (at most one per node and topic in ten seconds), a remark in the
readiness answer, and a metric. No decision depends on these remarks: such a node is served as far
as its values can be read, and other nodes are not affected.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Gauge

from topobus.formats.messages.catalogue import ALIGNMENT, INVENTORY, MACHINE
from topobus.formats.messages.nouns import State, from_token
from topobus.formats.messages.origin import Origin
from topobus.formats.messages.releases import Standing, release_remark, standing
from topobus.process.quiet import QuietLog
from topobus.process.readiness import Readiness

__all__ = ["NodeRemarks"]

# As many as a person reads. The metric counts all.
_SHOWN = 16
_MOST_TEXT = 300
_CLOCK = "clock"
# Keys of nodes that do not exist must not fill the memory: beyond so many nodes, no more are named.
_MOST_NODES = 4096


class NodeRemarks:
    """The remarks on nodes, by node and topic."""

    def __init__(self, readiness: Readiness, own_release: str, nodes: Gauge, quiet: QuietLog) -> None:
        self._quiet = quiet
        self._readiness = readiness
        self._own = own_release
        self._gauge = nodes
        self._remarks: dict[str, dict[str, str]] = {}
        self._clocks: dict[str, int] = {}
        """When the newest write of a node with a remark on its clock was stored."""

    def note(self, state: State[Any], parts: dict[str, str], origin: Origin) -> None:
        """Record that a node's value was read, and which service wrote it."""
        node = parts["node"]
        self._put(node, _unreadable(state, parts), "")
        writer = _writer_of(state, parts)
        if writer:
            # A value written with NATS' own tools carries no release of the service.
            has_release = standing(origin.release, self._own) is not Standing.UNSAID
            self._put(node, writer, release_remark(writer, origin.release, self._own) if has_release else "")
        if origin.ahead_s is not None and origin.time_ns >= self._clocks.get(node, 0):
            remark = origin.clock_remark
            self._put(node, _CLOCK, remark)
            if remark:
                self._clocks[node] = origin.time_ns
            else:
                self._clocks.pop(node, None)

    def note_rejected(self, state: State[Any], key: str, why: str) -> None:
        """Record that a node's value cannot be read. The reader logs it."""
        node, _, rest = key.partition(".")
        self._put(
            from_token(node)[:_MOST_TEXT],
            f"{state.name} {rest}".strip(),
            f"its {state.name} cannot be read: {why}",
            is_logged=True,
        )

    def drop(self, state: State[Any], parts: dict[str, str]) -> None:
        """Drop the remarks on a value that was deleted."""
        self._put(parts["node"], _unreadable(state, parts), "")
        self._put(parts["node"], _writer_of(state, parts), "")

    def clear(self, state: State[Any]) -> None:
        """Drop the remarks on unreadable values of a bucket, whose values will be sent again."""
        for node, remarks in list(self._remarks.items()):
            for topic in [topic for topic in remarks if topic.partition(" ")[0] == state.name]:
                self._put(node, topic, "")

    def _put(self, node: str, topic: str, text: str, *, is_logged: bool = False) -> None:
        remarks = self._remarks.get(node)
        text = text[:_MOST_TEXT]
        if (remarks.get(topic, "") if remarks is not None else "") == text or (
            remarks is None and len(self._remarks) >= _MOST_NODES
        ):
            return
        if remarks is None:
            remarks = self._remarks[node] = {}
        if text:
            remarks[topic] = text
        else:
            del remarks[topic]
            if not remarks:
                del self._remarks[node]
        if text and not is_logged:
            step = (
                "upgrade the older side, its services in any order"
                if topic != _CLOCK
                else "run one time service (chrony, ntp) on all machines"
            )
            self._quiet.warning(
                "node.differs",
                f"{node} {topic}",
                node=node,
                what=topic,
                why=text,
                own_release=self._own,
                next_step=step,
            )
        elif not text:
            self._quiet.info("node.agrees", f"{node} {topic}", node=node, what=topic)
        self._report()

    def _report(self) -> None:
        self._gauge.set(len(self._remarks))
        shown = [
            f"{node}: {'; '.join(text for _, text in sorted(self._remarks[node].items()))}"
            for node in sorted(self._remarks)[:_SHOWN]
        ]
        more = len(self._remarks) - len(shown)
        self._readiness.set(
            "nodes", is_ready=True, why="; ".join([*shown, *([f"and {more} more nodes"] if more else [])])
        )


def _writer_of(state: State[Any], parts: dict[str, str]) -> str:
    """Name the service that wrote a value which it writes again at each start.

    Empty for other values: a release that no longer runs may have written them.
    """
    if state is INVENTORY:
        return parts["device_class"]
    return state.writer[0] if state in (MACHINE, ALIGNMENT) else ""


def _unreadable(state: State[Any], parts: dict[str, str]) -> str:
    return f"{state.name} {state.key(**parts).partition('.')[2]}".strip()
