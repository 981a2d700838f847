"""A resource that is not ours, through every command: refused where nobody offers it, the plugin's
devices where its plugin is with the gateway.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.topobus_up import LIMIT_S, TOPOBUS, UpSystem, topobus_up
from topobus.bus.bus import Bus
from topobus.cli.targets import choose_target
from topobus.formats.messages.catalogue import INVENTORY, OBJECT
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

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


@pytest.fixture(scope="module")
def system() -> Iterator[UpSystem]:
    """Run the system on the recorded dgx, with a folder for others' plugins beside it."""
    with tempfile.TemporaryDirectory(prefix="tb-", ignore_cleanup_errors=True) as folder:
        others = Path(folder, "others")
        others.mkdir()
        settings = {"TOPOBUS_GATEWAY__FOREIGN__DIR": str(others), "TOPOBUS_GATEWAY__FOREIGN__LOOK_S": "0.1"}
        with topobus_up(Path(folder, "up"), columns="200", settings=settings) as running:
            yield running


def written(system: UpSystem, name: str, text: str) -> Path:
    """Write a manifest beside the system."""
    path = system.state.parent / name
    path.write_text(text)
    return path


@pytest.fixture
def plugin(system: UpSystem) -> Iterator[None]:
    """Register an ordinary plugin with three devices."""
    script = Path(__file__).parents[2] / "support" / "plain_plugin.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(system.state.parent / "others"), RESOURCE, "a=0", "b=0", "c=1"],
        stdout=subprocess.DEVNULL,
    )
    yield
    process.kill()
    process.wait()


@pytest_asyncio.fixture
async def widgets(system: UpSystem, plugin: None) -> AsyncIterator[Bus]:
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


def test_pod_is_refused_when_nobody_offers_what_it_asks(system: UpSystem) -> None:
    """`place`, its dry run on all nodes and on one, and the scheduler of stored pods: none gives a
    node to a pod without what it asked for.
    """
    manifest = written(system, "npod.yaml", FOREIGN_POD)

    for arguments in (("place",), ("place", "--dry-run"), ("place", "--node", "demo-node")):
        shown = " ".join(system.run(*arguments, manifest, code=1).stdout.split())
        assert "offers nvidia.com/gpu; topobus.dev/gpu is offered by driver nvidia: did you mean it?" in shown
        assert "offers rdma/hca; topobus.dev/nic is offered by driver pci-netdev: did you mean it?" in shown
    applied = system.run("apply", "-f", manifest)
    assert "did you mean it?" in " ".join((applied.stdout + applied.stderr).split())
    system.run("delete", "pod", "n")


async def test_foreign_resource_is_one_thing_when_its_plugin_is_with_the_gateway(
    system: UpSystem, widgets: Bus
) -> None:
    """The vendor's name and our class are the same for `place` and for stored pods.

    The inventory shows both.
    """
    assert f"{CLASS} ({RESOURCE})" in system.run("inventory").stdout
    assert f"{CLASS} ({RESOURCE})" in system.run("inventory", CLASS).stdout

    placed = {
        name: system.json("place", written(system, f"{name}.yaml", widget_pod(name, resource)))["chosen"]["result"][
            "containers"
        ][0]["devices"]
        for name, resource in (("by-name", RESOURCE), ("by-class", f"topobus.dev/{CLASS}"))
    }
    assert [len(devices[CLASS]) for devices in placed.values()] == [1, 1]
    assert placed["by-name"] != placed["by-class"]

    system.run("apply", "-f", written(system, "stored.yaml", widget_pod("stored")))
    entry = await widgets.get(OBJECT, kind="pod", namespace="default", name="stored")
    assert entry is not None
    assert entry.value.spec["nodeName"] == "demo-node"
    refused = system.run("place", written(system, "late.yaml", widget_pod("late")), code=1).stdout
    assert "not-enough-devices" in refused

    system.run("delete", "pod", "stored")
    for name in placed:
        system.run("release", "pod", name)
    system.run("place", system.state.parent / "late.yaml", code=0)
    system.run("release", "pod", "late")


def test_commands_name_the_system_that_they_talk_to(system: UpSystem) -> None:
    """A command that writes says to which server, and where its address comes from.

    The answer itself is as before.
    """
    manifest = written(system, "named.yaml", widget_pod("named", "topobus.dev/gpu"))

    placed = system.run("place", manifest)
    released = system.run("release", "pod", "named", "--nats", system.nats_url)

    assert f"NATS at {system.nats_url}, from TOPOBUS_ALL__NATS__URL" in placed.stderr
    assert f"NATS at {system.nats_url}, from --nats" in released.stderr
    assert "NATS at" not in placed.stdout


async def test_server_without_our_streams_is_said_to_be_none_of_ours() -> None:
    """A NATS server of somebody else's is named as what it is, in place of a silence."""
    async with NatsServer() as server:
        done = await asyncio.to_thread(
            subprocess.run,
            [*TOPOBUS, "machine", "--nats", server.url],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    assert done.returncode == 69
    said = " ".join(done.stderr.split())
    assert (
        "this NATS server has no Topobus streams: it is not the server of a Topobus system (NATS at "
        f"{server.url}, from --nats)" in said
    )
    assert "next: choose your system with --context NAME or --nats URL" in said
