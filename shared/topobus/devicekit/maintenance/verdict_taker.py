"""Takes verdicts of others on the devices of one class, as far as the service trusts their source.

A verdict is stored before it is answered, so a restart does not lose it, and its effect is
published with the next step at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from topobus.devicekit.host.publishing import DevicePublisher
from topobus.devicekit.maintenance.maintenance_store import MaintenanceStore
from topobus.devicekit.maintenance.verdicts import checked, is_about, with_verdict
from topobus.formats.messages.report_messages import ReportReply, ReportRequest, Taken
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.outcome import Refusal
from topobus.values.verdict import Verdict

__all__ = ["VerdictTaker"]


class VerdictTaker:
    """Answers those who report how devices of one class are."""

    def __init__(
        self,
        device_class: str,
        trust: Mapping[str, str],
        store: MaintenanceStore,
        publisher: DevicePublisher,
        clock: Clock,
    ) -> None:
        """Keep the collaborators. `trust` is the setting `health.sources`."""
        self._class = device_class
        self._trust = trust
        self._store = store
        self._publisher = publisher
        self._clock = clock

    async def take(self, request: ReportRequest) -> ReportReply:
        """Take a verdict, or refuse it with the reason."""
        verdict = checked(
            request.verdict,
            self._publisher.devices,
            self._trust,
            device_class=self._class,
            now=self._clock.now(),
        )
        result = verdict if isinstance(verdict, Refusal) else await self._keep(verdict)
        if isinstance(result, Refusal) or result.is_newest:
            get_logger().info(
                "verdict.taken" if isinstance(result, Taken) else "verdict.refused",
                device_class=self._class,
                device=request.verdict.device[:128],
                source=request.verdict.source[:160],
                state=str(request.verdict.state),
                code=request.verdict.code[:64],
                reasons=[reason.message for reason in result.reasons] if isinstance(result, Refusal) else [],
            )
        return ReportReply(result=result)

    async def _keep(self, verdict: Verdict) -> Taken | Refusal:
        async with self._store.writing:
            before = self._store.value
            kept = with_verdict(before.verdicts, verdict)
            if isinstance(kept, Refusal):
                return kept
            await self._store.put(structs.replace(before, verdicts=kept))
        if is_newest := kept != before.verdicts:
            # Stored, so it applies, whether or not it is published when this is answered.
            await self._publisher.publish()
        names = (device.name for device in self._publisher.devices if is_about(verdict, device))
        return Taken(devices=tuple(names), is_newest=is_newest)
