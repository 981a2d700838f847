"""Keeps the conditions of this node's Node about its device classes up to date, and takes the
start-up taint off when the expected classes become ready.

It writes what the pure rule (`cluster.rules.class_conditions`) decides, when that differs from what
the Node shows, and only in the gateway that holds the node lock. Nothing is written periodically.
The taint goes first: a gateway that ends in between leaves conditions that are not ready, so that
the next one completes the step. What conditions of others say of devices is passed on with each
look at the Node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.objects import NODES, Rejected
from topobus.gateway.cluster.rules.class_conditions import (
    ClassState,
    class_conditions,
    read_taint,
    ready_classes,
    shown_conditions,
    taint_removal,
)
from topobus.gateway.config import ClusterSettings
from topobus.gateway.node_state import NodeState
from topobus.process.backoff import full_jitter
from topobus.process.broadcast import Broadcast, first_of
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.values.errors import PeerUnavailable
from topobus.values.timestamps import in_whole_seconds

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["NodeReadiness", "read_node"]

_PART = "node-conditions"
_BACKOFF_LIMIT_S = 10.0
# Seconds between two looks at the Node where its conditions say how devices are.
# node-problem-detector itself looks for most problems each 30 s or less often.
_CONDITIONS_S = 30.0


class NodeReadiness:
    """The conditions of one Node about its device classes."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        state: NodeState,
        *,
        awaited: Callable[[str], tuple[str, ...] | None],
        registered: Broadcast,
        published: Broadcast,
        settings: ClusterSettings,
        clock: Clock,
        boot_id: str,
        readiness: Readiness,
        pass_on: Callable[[ApiObject], Awaitable[None]] | None,
    ) -> None:
        """`awaited` returns what pods need to have a class's devices and is not there yet. None:
        the class is not offered to pods. `registered` and `published` announce that it changed.
        `pass_on` gets each Node that was read.
        """
        self._cluster = cluster
        self._state = state
        self._awaited = awaited
        self._registered = registered
        self._published = published
        self._settings = settings
        self._taint = read_taint(settings.startup_taint) if settings.startup_taint else None
        self._clock = clock
        self._boot_id = boot_id
        self._readiness = readiness
        self._node: ApiObject | None = None
        """The Node as last read or written. None: to be read again."""
        self._pass_on = pass_on
        self._passed_on: ApiObject | None = None
        self._look_s = settings.resync_s if pass_on is None else min(settings.resync_s, _CONDITIONS_S)
        self._trouble = ""

    async def run(self) -> None:
        """Write until cancelled."""
        failures = 0
        while True:
            registered = self._registered.ticket()
            tickets = (registered, self._published.ticket(), self._state.changed.ticket())
            try:
                trouble = await self._sync()
            except PeerUnavailable as err:
                trouble = str(err)
            self._report(trouble)
            if trouble:
                self._node = None
                await asyncio.sleep(full_jitter(failures, least_s=self._settings.retry_s, most_s=_BACKOFF_LIMIT_S))
                failures += 1
                continue
            failures = 0
            if self._pass_on is not None and self._node is not None and self._node is not self._passed_on:
                self._passed_on = self._node
                await self._pass_on(self._node)
            await first_of(tickets, self._look_s)
            if registered.is_set() or not any(ticket.is_set() for ticket in tickets):
                # kubelet was started again, and may have made another Node; or the time is over.
                self._node = None

    async def _sync(self) -> str:
        """Write what differs. Returns the error, empty when there is none."""
        node = self._node or await read_node(self._cluster, self._state.node)
        present = shown_conditions(node)
        now = in_whole_seconds(self._clock.now())
        wanted = class_conditions(self._classes(), present, boot_id=self._boot_id, now=now)
        expected, were_ready = self._settings.expected_devices.keys(), ready_classes(present, self._boot_id)
        # The step to ready alone, so that a taint that an operator sets later stays.
        if self._taint is not None and ready_classes(wanted, self._boot_id) >= expected and not were_ready >= expected:
            # Read again: other taints come and go while a node starts.
            node = await read_node(self._cluster, self._state.node)
            if removal := taint_removal(node, self._taint):
                answer = await self._cluster.patch_node(self._state.node, removal)
                if isinstance(answer, Rejected):
                    return f"the taint {self._settings.startup_taint} stays: {answer.message}"
                get_logger().info("node.untainted", taint=self._settings.startup_taint)
        if wanted != present:
            applied = [msgspec.to_builtins(condition) for condition in wanted.values()]
            uid = str(node.metadata.get("uid", ""))
            answer = await self._cluster.apply_node_conditions(self._state.node, uid=uid, conditions=applied)
            if isinstance(answer, Rejected):
                return answer.message
            news = [each for name, each in wanted.items() if each != present.get(name)]
            shown = [f"{each.type}={each.status} {each.reason}: {each.message}" for each in news]
            get_logger().info("node-conditions.written", conditions=shown)
            node = answer
        self._node = node
        return ""

    def _classes(self) -> dict[str, ClassState]:
        """Return what is known of the classes that are expected, or offered and there."""
        inventories, expected = self._state.inventories(), self._settings.expected_devices
        awaited = {name: self._awaited(name) for name in inventories.keys() | expected.keys()}
        return {
            name: ClassState(inventory=inventories.get(name), expected=expected.get(name), awaited=missing or ())
            for name, missing in sorted(awaited.items())
            if name in expected or (missing is not None and inventories[name].devices)
        }

    def _report(self, trouble: str) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        # Ready in any case: what the gateway does for pods does not depend on it.
        self._readiness.set(_PART, is_ready=True, why=trouble)
        if trouble:
            get_logger().warning(
                "node-conditions.write-failed",
                error=trouble,
                next_step="let the gateway patch nodes/status, and nodes where cluster.startup_taint is set",
            )


async def read_node(cluster: KubernetesCluster, name: str) -> ApiObject:
    """Read a Node.

    Errors: raises PeerUnavailable, also where there is none of this name.
    """
    node = await cluster.get(NODES, name)
    if node is None:
        raise PeerUnavailable(
            f"there is no node {name} in the cluster",
            next_step="set TOPOBUS_ALL__NODE to the node's name in the cluster",
        )
    return node
