"""Passes what conditions of this node's Node say of its devices on to their device services, as
verdicts of source `node-condition`.

Each look passes all of them on: a verdict that a service has already changes nothing there. So
nothing is remembered here, and none is lost when either side is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import REPORT
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.report_messages import ReportRequest
from topobus.gateway.cluster.rules.condition_verdicts import SOURCE, condition_verdicts
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.outcome import Refusal

__all__ = ["NodeVerdicts"]


class NodeVerdicts:
    """The verdicts of one Node's conditions."""

    def __init__(
        self, bus: Bus, node: str, mapping: Mapping[str, tuple[str, ...]], tell: Callable[[str], None]
    ) -> None:
        """`mapping` is the setting `cluster.condition_verdicts`. `tell` is called with what is wrong;
        empty: nothing.
        """
        self._bus = bus
        self._node = node
        self._mapping = mapping
        self._tell = tell
        self._trouble = ""

    async def pass_on(self, node: ApiObject) -> None:
        """Pass on what the Node says now. What fails is tried again at the next look."""
        troubles: list[str] = []
        for device_class, verdict in condition_verdicts(node, self._mapping):
            try:
                request = ReportRequest(verdict=verdict)
                result = (await self._bus.ask(REPORT, request, node=self._node, device_class=device_class)).result
            except (PeerUnavailable, ContractError) as err:
                troubles.append(f"{verdict.source} to class {device_class}: {err.message}")
                continue
            if isinstance(result, Refusal):
                troubles += [reason.message for reason in result.reasons]
        trouble = "; ".join(sorted(set(troubles)))
        if trouble != self._trouble:
            self._trouble = trouble
            self._tell(trouble)
            if trouble:
                get_logger().warning(
                    "node-verdicts.refused",
                    error=trouble,
                    next_step=f"let health.sources of the class's service name {SOURCE}, and "
                    "cluster.condition_verdicts of the gateway classes and devices that are there",
                )
