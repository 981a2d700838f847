"""Several device plugins of others behind one gateway: each has a device host of its own, and one
that ends is told and started again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.foreign_rig import connected, inventory, trivial_plugin, unregistered_plugin
from support.gateway_rig import Rig
from support.kubelet_plugins import device as listed
from support.looks import until
from support.node_plane import NODE
from topobus.devicekit.host import host
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import PREPARE
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState

pytestmark = pytest.mark.integration

ONE, TWO, THREE = "acme.example/one", "other.example/two", "third.example/three"


class _EndingHost:
    """In place of the device host: that of one class ends so often, the others run."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, device_class: str, *, times: int, is_serving: bool = False
    ) -> None:
        self.left = times
        self._class = device_class
        self._is_serving = is_serving
        self._serve = host.serve_devices
        monkeypatch.setattr(host, "serve_devices", self.serve)

    async def serve(self, settings: Any, runtime: Any, device_class: str, **options: Any) -> None:
        """Serve as the real one, or end."""
        if device_class == self._class and self.left:
            self.left -= 1
            if self._is_serving:
                # Half of it is up already, as where the bus gives up in between.
                await runtime.bus.answer(PREPARE, self._refuse, node=NODE, device_class=device_class)
            raise RuntimeError("no room for another one")
        await self._serve(settings, runtime, device_class, **options)

    async def _refuse(self, request: Any) -> Any:
        raise AssertionError("the host that ended was asked")


def healthy(rig: Rig, device_class: str) -> float | None:
    """How many devices of a class its metrics count as healthy."""
    labels = {"class": device_class, "state": str(HealthState.HEALTHY), "reason": ""}
    return rig.registry.get_sample_value("topobus_device_inventory_devices", labels)


async def test_plugins_are_all_served_when_there_are_several_at_once(rig: Rig) -> None:
    """Each has its inventory, its resource at kubelet and its lines of metrics."""
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("a", 0), listed("b", 1), resource=ONE):
        await inventory(rig, [HealthState.HEALTHY] * 2, "one-acme")
        async with trivial_plugin(rig, listed("c", 0), resource=TWO):
            await inventory(rig, [HealthState.HEALTHY], "two-other")
            await rig.kubelet.wait_for_resource(ONE, allocatable=2)
            await rig.kubelet.wait_for_resource(TWO, allocatable=1)
            await connected(rig)
            await until(lambda: [healthy(rig, name) for name in ("one-acme", "two-other")] == [2, 1])


async def test_plugins_are_all_served_when_the_gateway_starts_with_several_of_them(rig: Rig) -> None:
    """A gateway that was started again serves those of the one before it, in whatever order their
    plugins come back, and asks none of them twice.
    """
    resources = (ONE, TWO, THREE)
    async with rig.kubelet:
        for _ in range(2):
            async with rig.gateway(), AsyncExitStack() as plugins:
                for resource in reversed(resources):
                    await plugins.enter_async_context(trivial_plugin(rig, listed("a", 0), resource=resource))
                for resource in resources:
                    await rig.kubelet.wait_for_resource(resource, allocatable=1)
        async with rig.gateway():
            report = await rig.readiness.until(
                lambda report: "waiting for the device plugin of" in report.get("foreign-plugins", "")
            )
            node_pods = await rig.pods()

    # None is there this time: each is waited for by name, and none of the hosts has ended.
    assert all(resource in report["foreign-plugins"] for resource in resources)
    assert "ended" not in report["foreign-plugins"]
    assert node_pods.plugin_failures == {}


async def test_plugin_is_served_when_another_one_has_left_and_when_it_comes_back(rig: Rig) -> None:
    """What once registered takes nobody's place."""
    async with rig.kubelet, rig.gateway():
        async with trivial_plugin(rig, listed("a", 0), resource=ONE):
            await rig.kubelet.wait_for_resource(ONE, allocatable=1)
        await rig.kubelet.wait_for_resource(ONE, allocatable=0)
        async with trivial_plugin(rig, listed("a", 0), resource=THREE):
            await rig.kubelet.wait_for_resource(THREE, allocatable=1)
            async with trivial_plugin(rig, listed("a", 0), resource=ONE):
                await rig.kubelet.wait_for_resource(ONE, allocatable=1)


async def test_plugins_register_again_when_the_folder_was_replaced(rig: Rig) -> None:
    """An installer that replaces the folder, with a file in its place for a moment, ends no gateway.

    Readiness says so until the folder is served again, whatever becomes of a plugin meanwhile.
    """
    folder = Path(rig.settings.foreign.dir)
    async with rig.kubelet, rig.gateway():
        async with trivial_plugin(rig, listed("a", 0), resource=ONE):
            await rig.kubelet.wait_for_resource(ONE, allocatable=1)
            shutil.rmtree(folder)
            folder.write_text("")  # noqa: ASYNC240  (one line of a test)
            await rig.readiness.until(lambda report: "cannot serve" in report["foreign-plugins"])
        report = await rig.readiness.until(
            lambda report: f"waiting for the device plugin of {ONE}" in report["foreign-plugins"]
        )
        folder.unlink()  # noqa: ASYNC240  (one line of a test)
        await rig.readiness.until(lambda report: "cannot serve" not in report["foreign-plugins"])
        async with trivial_plugin(rig, listed("b", 0), resource=TWO):
            await rig.kubelet.wait_for_resource(TWO, allocatable=1)

    assert report["foreign-plugins"].startswith("ready: gateway: foreign.dir: cannot serve in")


async def test_plugin_is_refused_and_told_of_when_its_device_host_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Register's answer, readiness and the gateway's own word say which and why.

    The neighbour is served, and so is this one as soon as its host stays.
    """
    broken = _EndingHost(monkeypatch, "two-other", times=10_000)
    async with (
        rig.kubelet,
        rig.gateway(),
        trivial_plugin(rig, listed("a", 0), resource=ONE),
        unregistered_plugin(rig, listed("c", 0), resource=TWO) as plugin,
    ):
        refusal = await plugin.register()
        report = rig.readiness.report()
        node_pods = await rig.pods()
        await rig.kubelet.wait_for_resource(ONE, allocatable=1)
        await rig.kubelet.wait_for_driver(DRIVER)
        judged = await _doctor(rig)
        broken.left = 0
        # It does not register again.
        await rig.kubelet.wait_for_resource(TWO, allocatable=1)
        mended = await rig.pods()
        again = await plugin.register()

    assert (
        "other.example/two is not served now, and tried again: its device host ended: no room for another one"
        in refusal
    )
    assert "other.example/two: its device host ended: no room for another one" in report["foreign-plugins"]
    assert node_pods.plugin_failures == {TWO: "its device host ended: no room for another one"}
    # By the gateway's word: its kubelet is not where this machine has one.
    assert judged[f"{NODE}: kubelet"] == ("ok", f"has acme.example/one, {DRIVER}")
    assert judged[f"{NODE}: {TWO}"] == (
        "fail",
        "its device plugin is not served: its device host ended: no room for another one",
    )
    assert mended.plugin_failures == {}
    assert again == ""


async def _doctor(rig: Rig) -> dict[str, tuple[str, str]]:
    """What `topobus doctor` finds, by what it looked at."""
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.cli.main", "doctor", "--json", "--nats", rig.url, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await command.communicate()
    return {finding["what"]: (finding["level"], finding["found"]) for finding in json.loads(printed)["findings"]}


async def test_host_alone_answers_when_it_takes_the_place_of_one_that_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the earlier one answered goes with it: nobody is asked who follows nothing any more, and
    nobody is taken for a twin.
    """
    _EndingHost(monkeypatch, "one-acme", times=2, is_serving=True)
    async with rig.kubelet, rig.gateway(), unregistered_plugin(rig, listed("a", 0), resource=ONE) as plugin:
        await plugin.register()
        await rig.kubelet.wait_for_resource(ONE, allocatable=1)
        signs = [await rig.bus.is_answered(PREPARE, timeout_s=30, node=NODE, device_class="one-acme") for _ in range(3)]
        admitted = await rig.kubelet.admit(
            Pod(name="p", uid="pod-u", containers=(Container(name="main", resources={ONE: 1}),))
        )

    assert all(isinstance(sign, Answered) for sign in signs)
    assert isinstance(admitted, Admission), admitted
