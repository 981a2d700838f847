"""Runs the classic DRA drivers of the stand-alone home, each in a task of its own, and reports
claims that no driver serves.

Third-party drivers are found by their entry point. A driver's calls may take long or hang, and its
own task keeps that from delaying the claims of other drivers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from topobus.controller.classic.builtin_driver import BuiltinDriver
from topobus.controller.classic.reconciler import ClassicClaimReconciler
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.devicekit.classic.classic import ClassicDriver
from topobus.devicekit.classic.classic_registry import load_classic_drivers
from topobus.engine.claims import lifecycle as conditions
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue
from topobus.values.dra_names import class_of_group
from topobus.values.timestamps import rfc3339

__all__ = ["ClassicDriverRunner", "StoreContext"]


class StoreContext:
    """Gives drivers the parameters from the store and the known nodes."""

    def __init__(self, state: StandaloneState) -> None:
        self._state = state

    async def read_parameters(self, api_group: str, kind: str, namespace: str, name: str) -> ApiObject | None:
        """Read from the copy that the watch keeps."""
        stored = self._state.objects.get(ObjectKey(kind.lower(), namespace or CLUSTER, name))
        if stored is None or stored.value.kind != kind or stored.value.api_version.partition("/")[0] != api_group:
            return None
        return stored.value

    def nodes(self) -> tuple[str, ...]:
        """List the nodes that published a machine or an inventory."""
        return self._state.nodes()


class ClassicDriverRunner:
    """Runs the reconcilers of all classic drivers.

    Errors: making it raises ConfigError when two installed drivers have one name.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        metrics: ControllerMetrics,
        is_whole: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._state = state
        self._metrics = metrics
        self._is_whole = is_whole
        self._store = NatsStore(runtime.bus, state)
        self._queue = WorkQueue("classic", runtime.clock, settings.retry_s, failures=metrics.set_aside)
        self._context = StoreContext(state)
        self._found = load_classic_drivers(self._context)
        self._own: dict[str, BuiltinDriver] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Wake the reconcilers after a change."""
        self._news.set()
        for event in self._changed.values():
            event.set()

    async def run(self) -> None:
        """Run until cancelled."""
        for skipped in self._found.skipped:
            get_logger().warning("classic.driver-skipped", driver=skipped.name, value=skipped.value, why=skipped.why)
        async with asyncio.TaskGroup() as group:
            for driver in self._found.drivers:
                self._start(group, driver)
            await self._whenever(self._news, self._queue, partial(self._keep_house, group))

    async def _keep_house(self, group: asyncio.TaskGroup) -> None:
        """Start new reconcilers, and do the work that belongs to no driver."""
        for device_class in sorted(self._state.device_classes - self._own.keys()):
            own = BuiltinDriver(device_class, self._settings, self._runtime, self._state, self._context)
            self._own[device_class] = own
            self._start(group, own)
        for key, stored in self._state.classic_claims():
            version = (stored.revision, self._state.shared_epoch, self._state.supply)
            await self._queue.run(key, version, partial(self._reconcile_claim, key, stored), name=stored.shown)
        self._queue.keep(self._state.objects.keys())

    def _start(self, group: asyncio.TaskGroup, driver: ClassicDriver) -> None:
        reconciler = ClassicClaimReconciler(driver, self._settings, self._runtime, self._state, self._metrics)
        self._changed[driver.name] = asyncio.Event()
        self._changed[driver.name].set()
        get_logger().info("classic.driver-started", driver=driver.name)
        group.create_task(self._whenever(self._changed[driver.name], reconciler.queue, reconciler.reconcile_all))

    async def _reconcile_claim(self, key: ObjectKey, stored: Stored) -> None:
        """Delete a claim that nothing holds any more, release what it holds twice, and report a
        claim without a driver.
        """
        claim = stored.value
        metadata = stored.metadata
        if metadata.deletion_timestamp:
            if not metadata.finalizers and await self._store.delete(key, stored.revision):
                get_logger().info("claim.released", claim=stored.shown)
            return
        device_class = class_of_group(str(claim.status.get("driverName") or ""))
        if claim.status.get("allocation") and device_class in self._own:
            await self._own[device_class].tidy(claim)
        elif not claim.status.get("allocation"):
            await self._report_missing_driver(key, stored)

    async def _report_missing_driver(self, key: ObjectKey, stored: Stored) -> None:
        name = str(stored.value.spec.get("resourceClassName"))
        stored_class = self._state.objects.get(ObjectKey("resourceclass", CLUSTER, name))
        driver = str(stored_class.value.spec.get("driverName")) if stored_class is not None else ""
        if driver in self._changed:
            return
        reason = "NoDriver" if stored_class is not None else "NoClass"
        drivers = ", ".join(sorted(self._changed)) or "none"
        if stored_class is None:
            message = f"there is no ResourceClass {name}"
        elif device_class := class_of_group(driver):
            message = f"ResourceClass {name} names driver {driver}, and no node offers devices of class {device_class}"
        else:
            message = f"ResourceClass {name} names driver {driver}: installed are {drivers}"
        now = rfc3339(self._runtime.clock.now())
        api_object = conditions.with_condition(stored.value, is_true=False, reason=reason, message=message, now=now)
        if api_object is not stored.value:
            await self._store.write(key, stored.revision, api_object)

    async def _whenever(self, changed: asyncio.Event, queue: WorkQueue, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work after each change, and when an object is due."""
        while True:
            await is_set_within(changed, self._runtime.clock.timeout(queue.wait_s()))
            changed.clear()
            if self._is_whole():
                await work()
