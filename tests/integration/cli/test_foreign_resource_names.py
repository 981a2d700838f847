"""A resource that is not ours, through every command: refused where nobody offers it, the plugin's
devices where its plugin is with the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from topobus.bus.bus import Bus
from topobus.cli.targets import choose_target
from topobus.formats.messages.catalogue import INVENTORY, OBJECT
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_TOPOBUS = (sys.executable, "-m", "topobus.cli.main")
_LIMIT_S = 60.0
RESOURCE = "widgets.example.com/widget"
CLASS = "widget-widgets"
FOREIGN_POD = """
apiVersion: v1
kind: Pod
metadata: {name: n}
spec:
  containers:
    - {name: main, image: x, resources: {limits: {nvidia.com/gpu: 9, rdma/hca: 1, cpu: 2, memory: 1Gi}}}
"""


class System:
    """A running `topobus up` whose gateway takes other people's plugins."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        own = {"XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"], "TOPOBUS_ALL__NATS__URL": url}
        self.environment = {**os.environ, **own, "COLUMNS": "200"}
        """Of commands: its context is there, by which they find its login."""

    def topobus(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one command against the system and check its exit code."""
        done = subprocess.run(
            [*_TOPOBUS, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments: object, code: int = 0) -> Any:
        """Run one command with --json and read its answer."""
        return json.loads(self.topobus(*arguments, "--json", code=code).stdout)

    def write(self, name: str, text: str) -> Path:
        """Write a manifest."""
        path = self.folder / name
        path.write_text(text)
        return path


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """Run the system on the recorded dgx, with a folder for others' plugins.

    Not below pytest's folders: unix socket paths are short.
    """
    state = Path(tempfile.mkdtemp(prefix="tb-"))
    (state / "others").mkdir()
    environment = {
        **os.environ,
        "TOPOBUS_GATEWAY__FOREIGN__DIR": str(state / "others"),
        "TOPOBUS_GATEWAY__FOREIGN__LOOK_S": "0.1",
    }
    process = subprocess.Popen(
        [*_TOPOBUS, "up", "--dir", str(state / "up"), "--json"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        for text in process.stdout:
            line = json.loads(text)
            if line.get("system") == "ready":
                break
        yield System(state, line["nats"])
    finally:
        process.terminate()
        process.communicate(timeout=_LIMIT_S)
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def plugin(system: System) -> Iterator[None]:
    """Register an ordinary plugin with three devices."""
    script = Path(__file__).parents[2] / "support" / "plain_plugin.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(system.folder / "others"), RESOURCE, "a=0", "b=0", "c=1"],
        stdout=subprocess.DEVNULL,
    )
    yield
    process.kill()
    process.wait()


@pytest_asyncio.fixture
async def widgets(system: System, plugin: None) -> AsyncIterator[Bus]:
    """Wait until the plugin's devices are in the inventory."""
    target = choose_target(nats=None, context=None, config=None, environ=system.environment)
    async with Bus.session(target.settings.nats, name="topobus-cli") as bus:
        async for change in bus.watch(INVENTORY, node="demo-node", device_class=CLASS):
            if (
                change.value is not None
                and [device.health.is_allocatable for device in change.value.devices] == [True] * 3
            ):
                break
        yield bus


def widget_pod(name: str, resource: str = RESOURCE) -> str:
    """Write a pod that asks for one widget."""
    return (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: main, resources: "
        f"{{limits: {{{resource}: 1}}}}}}]}}\n"
    )


def test_pod_is_refused_when_nobody_offers_what_it_asks(system: System) -> None:
    """`place`, its dry run on all nodes and on one, and the scheduler of stored pods: none gives a
    node to a pod without what it asked for.
    """
    manifest = system.write("npod.yaml", FOREIGN_POD)

    for arguments in (("place",), ("place", "--dry-run"), ("place", "--node", "demo-node")):
        shown = " ".join(system.topobus(*arguments, manifest, code=1).stdout.split())
        assert "offers nvidia.com/gpu; topobus.dev/gpu is offered by driver nvidia: did you mean it?" in shown
        assert "offers rdma/hca; topobus.dev/nic is offered by driver pci-netdev: did you mean it?" in shown
    applied = system.topobus("apply", "-f", manifest)
    assert "did you mean it?" in " ".join((applied.stdout + applied.stderr).split())
    system.topobus("delete", "pod", "n")


async def test_foreign_resource_is_one_thing_when_its_plugin_is_with_the_gateway(system: System, widgets: Bus) -> None:
    """The vendor's name and our class are the same for `place` and for stored pods.

    The inventory shows both.
    """
    assert f"{CLASS} ({RESOURCE})" in system.topobus("inventory").stdout
    assert f"{CLASS} ({RESOURCE})" in system.topobus("inventory", CLASS).stdout

    placed = {
        name: system.json("place", system.write(f"{name}.yaml", widget_pod(name, resource)))["chosen"]["result"][
            "containers"
        ][0]["devices"]
        for name, resource in (("by-name", RESOURCE), ("by-class", f"topobus.dev/{CLASS}"))
    }
    assert [len(devices[CLASS]) for devices in placed.values()] == [1, 1]
    assert placed["by-name"] != placed["by-class"]

    system.topobus("apply", "-f", system.write("stored.yaml", widget_pod("stored")))
    entry = await widgets.get(OBJECT, kind="pod", namespace="default", name="stored")
    assert entry is not None
    assert entry.value.spec["nodeName"] == "demo-node"
    refused = system.topobus("place", system.write("late.yaml", widget_pod("late")), code=1).stdout
    assert "not-enough-devices" in refused

    system.topobus("delete", "pod", "stored")
    for name in placed:
        system.topobus("release", "pod", name)
    system.topobus("place", system.folder / "late.yaml", code=0)
    system.topobus("release", "pod", "late")


def test_commands_name_the_system_that_they_talk_to(system: System) -> None:
    """A command that writes says to which server, and where its address comes from.

    The answer itself is as before.
    """
    manifest = system.write("named.yaml", widget_pod("named", "topobus.dev/gpu"))

    placed = system.topobus("place", manifest)
    released = system.topobus("release", "pod", "named", "--nats", system.url)

    assert f"NATS at {system.url}, from TOPOBUS_ALL__NATS__URL" in placed.stderr
    assert f"NATS at {system.url}, from --nats" in released.stderr
    assert "NATS at" not in placed.stdout


async def test_server_without_our_streams_is_said_to_be_none_of_ours() -> None:
    """A NATS server of somebody else's is named as what it is, in place of a silence."""
    async with NatsServer() as server:
        done = await asyncio.to_thread(
            subprocess.run,
            [*_TOPOBUS, "machine", "--nats", server.url],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )

    assert done.returncode == 69
    said = " ".join(done.stderr.split())
    assert (
        "this NATS server has no Topobus streams: it is not the server of a Topobus system (NATS at "
        f"{server.url}, from --nats)" in said
    )
    assert "next: choose your system with --context NAME or --nats URL" in said
