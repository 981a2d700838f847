"""One registered DRA driver in kubelet: its connection and the connection's state, its health
stream, and the prepare and unprepare calls.

kubelet 1.36 watches the connection to the service socket, so it also detects a driver that died
without removing its sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from topobus.kubeletpb.dra.v1 import api_pb2 as dra
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.simulation.kubelet.values import ClaimReference, EventLog, KubeletTimings
from topobus.simulation.kubelet.wire import (
    go_error,
    outcome_of,
    shown,
    to_plain,
)

__all__ = ["PLUGIN_PACKAGES", "Driver"]

# Label in supported_versions to wire package: they differ for the
# plugin itself and agree for health.
PLUGIN_PACKAGES = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
}


class Driver:
    """A registered driver. Several of one name may be registered at once, as in a
    rolling update.
    """

    def __init__(
        self,
        name: str,
        socket: Path,
        channel: grpc.aio.Channel,
        versions: tuple[str, ...],
        log: EventLog,
        timings: KubeletTimings,
    ) -> None:
        self.name = name
        self.socket = socket
        self.channel = channel
        self.is_connected = True
        self._versions = versions
        self._package = next(package for label, package in PLUGIN_PACKAGES.items() if label in versions)
        self._log = log
        self._timings = timings

    async def prepare(self, claims: Iterable[ClaimReference]) -> dict[str, dra.NodePrepareResourceResponse] | str:
        """Call NodePrepareResources. A text is Go's error."""
        request = dra.NodePrepareResourcesRequest(claims=[_claim(claim) for claim in claims])
        self._log.add("NodePrepareResources", self.name, to_plain(request), self._timings.dra_s)
        call = self.channel.unary_unary(
            f"/{self._package}.DRAPlugin/NodePrepareResources",
            request_serializer=dra.NodePrepareResourcesRequest.SerializeToString,
            response_deserializer=dra.NodePrepareResourcesResponse.FromString,
        )
        try:
            answer = await outcome_of(call(request, timeout=self._timings.dra_s))
        except grpc.aio.AioRpcError as err:
            return f"NodePrepareResources failed: {go_error(err)}"
        return dict(answer.claims)

    async def unprepare(self, claims: Iterable[ClaimReference]) -> dict[str, dra.NodeUnprepareResourceResponse] | str:
        """Call NodeUnprepareResources. A text is Go's error."""
        request = dra.NodeUnprepareResourcesRequest(claims=[_claim(claim) for claim in claims])
        self._log.add("NodeUnprepareResources", self.name, to_plain(request), self._timings.dra_s)
        call = self.channel.unary_unary(
            f"/{self._package}.DRAPlugin/NodeUnprepareResources",
            request_serializer=dra.NodeUnprepareResourcesRequest.SerializeToString,
            response_deserializer=dra.NodeUnprepareResourcesResponse.FromString,
        )
        try:
            answer = await outcome_of(call(request, timeout=self._timings.dra_s))
        except grpc.aio.AioRpcError as err:
            return f"NodeUnprepareResources failed: {go_error(err)}"
        return dict(answer.claims)

    async def follow_connection(self, on_change: Callable[[Driver], None]) -> None:
        """Call back, without end, when the connection is lost and when it is up again."""
        while True:
            state = self.channel.get_state(try_to_connect=True)
            is_connected = state is grpc.ChannelConnectivity.READY
            if is_connected is not self.is_connected:
                self.is_connected = is_connected
                self._log.add("Connected" if is_connected else "Disconnected", self.name, {"socket": self.socket.name})
                on_change(self)
            await self.channel.wait_for_state_change(state)

    async def follow_health(
        self,
        take: Callable[[str, health.NodeWatchResourcesResponse, dict[str, Any]], None],
        forget: Callable[[str], None],
    ) -> None:
        """Hold the health stream, opened again after a pause whenever it ends.

        Does nothing for a driver that offers none.
        """
        # 1.36 opens v1alpha1 although v1 is offered.
        offered = [api for api in ("v1alpha1", "v1") if f"{api}.DRAResourceHealth" in self._versions]
        if not offered:
            return
        api = offered[0]
        open_stream = self.channel.unary_stream(
            f"/{api}.DRAResourceHealth/NodeWatchResources",
            request_serializer=health.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=health.NodeWatchResourcesResponse.FromString,
        )
        while True:
            self._log.add("NodeWatchResources.open", self.name, {"api": api})
            try:
                async for message in open_stream(health.NodeWatchResourcesRequest()):
                    take(self.name, message, await shown(message))
            except grpc.aio.AioRpcError:
                # Any end of the stream is answered by a new one.
                pass
            finally:
                forget(self.name)
                self._log.add("NodeWatchResources.closed", self.name, {"api": api})
            await asyncio.sleep(self._timings.health_retry_s)


def _claim(claim_reference: ClaimReference) -> dra.Claim:
    return dra.Claim(namespace=claim_reference.namespace, uid=claim_reference.uid, name=claim_reference.name)
