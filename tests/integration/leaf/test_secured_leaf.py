"""The leaf shape with users and accounts, as processes: a node and its hub work together with the
rendered files, and subscribers hear at both.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from support.account_nats import LIMIT_S, AccountNats
from support.alignment_nodes import container, pod
from support.asking import ask_patiently
from support.leaf_pair import leaf_pair, version_of
from support.looks import until
from support.relays import relay, until_equal
from support.running import NODE, all_services, service, system_settings, until_all_ready
from support.secured_leaves import UsersServer, foreign_leaf, secured_leaves
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import HEALTH, HINT, INVENTORY, MACHINE, PLACE, PLAN, PREPARE, REPORT
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import HealthEvent, PlaceRequest, Prepared, PrepareRequest
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.formats.messages.report_messages import ReportRequest
from topobus.simulation.machines import build
from topobus.values.health import HealthState
from topobus.values.machine import Machine
from topobus.values.outcome import Placement, Refusal
from topobus.values.verdict import Verdict, VerdictState

pytestmark = pytest.mark.integration

_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "health_subscriber.py"
_NODE_SERVICES = ("discovery", "gpu", "nic", "topology", "gateway", "relay")


def _login(nats: AccountNats, principal: str) -> dict[str, str]:
    settings = nats.settings(principal)
    own = f"TOPOBUS_{principal.upper()}__NATS"
    return {
        f"{own}__USER": settings.user,
        f"{own}__PASSWORD_FILE": settings.password_file,
        f"{own}__ZONE": settings.zone,
    }


async def _hears(nats: AccountNats, device: str, state: HealthState) -> None:
    """Follow health as the documented subscriber does, until it has told of a device."""
    url = nats.server.url.replace("//", "//user:user@")
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(_EXAMPLE), env={"PATH": os.environ["PATH"], "NATS_URL": url}, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    try:
        while True:
            event = decode((await program.stdout.readline()).strip(), HealthEvent, where="the example's output")
            if (event.device, event.health.state) == (device, state):
                return
    finally:
        program.kill()
        await program.wait()


async def test_node_and_hub_work_together_when_all_have_users(nats_binary: Path) -> None:
    """The node's services behind their accounts place and prepare.

    The hub has its copies, asks it through both servers' accounts, plans; subscribers hear at both.
    """
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with asyncio.timeout(2 * LIMIT_S), AsyncExitStack() as stack:
        # A path so short that sockets below it fit.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tb-")))
        machine = build("dgx", folder / "machine")
        shape = await stack.enter_async_context(secured_leaves(nats_binary, nodes=[NODE, "other"], behind=[NODE]))
        leaf_nats = shape.leaves[NODE]
        await stack.enter_async_context(service("controller", shape.hub.server.url, _login(shape.hub, "controller")))
        settings = {
            **system_settings(folder),
            "TOPOBUS_ALL__NATS__PROVISIONER": "topology",
            "TOPOBUS_RELAY__CHECK_S": "1",
            **{name: value for principal in _NODE_SERVICES for name, value in _login(leaf_nats, principal).items()},
        }
        node = await stack.enter_async_context(
            all_services(leaf_nats.server.url, folder, order=_NODE_SERVICES, settings=settings)
        )
        hub = await stack.enter_async_context(shape.hub.bus("cli"))
        leaf = await stack.enter_async_context(leaf_nats.bus("cli"))
        await until_all_ready(node)
        await until_equal(hub, leaf)
        gpus = await hub.get(INVENTORY, node=NODE, device_class="gpu")
        assert gpus is not None

        wanted = pod("trainer", container(cpus=8, gpu=1))
        placed = await ask_patiently(hub, PLACE, PlaceRequest(op_id="place-1", pod=wanted, is_dry_run=True), node=NODE)
        assert isinstance(placed.result, Placement)
        # An ask of the hub to a vendor's service crosses two imports, and
        # its answer comes back by both.
        assert isinstance(await hub.is_answered(HINT, timeout_s=LIMIT_S, node=NODE, device_class="gpu"), Answered)
        # So does a verdict, of a user who reaches nothing else at either server.
        verdict = ReportRequest(verdict=Verdict(source="npd", state=VerdictState.UNHEALTHY))
        for server in (shape.hub, leaf_nats):
            async with server.bus("verdicts") as reporter:
                refused = (await reporter.ask(REPORT, verdict, node=NODE, device_class="gpu")).result
                assert isinstance(refused, Refusal)
                assert refused.reasons[0].code == "source-unlisted"
        plan = await ask_patiently(hub, PLAN, PlanRequest(op_id="plan-1", pod=wanted), node="_")
        assert plan.chosen is not None
        assert isinstance(plan.chosen.result, Placement)
        request = PrepareRequest(op_id="prepare-1", owner=wanted.owner, devices=(gpus.value.devices[0].name,))
        async with leaf_nats.bus("gateway") as gateway:
            prepared = await gateway.ask(PREPARE, request, node=NODE, device_class="gpu")
        assert isinstance(prepared.result, Prepared), prepared.result

        nics = await hub.get(INVENTORY, node=NODE, device_class="nic")
        assert nics is not None
        nic = next(device for device in nics.value.devices if str(device.pci) == machine.pci("connectx-7")[0])
        machine.set_carrier(str(nic.pci), is_up=False)
        await _hears(leaf_nats, nic.name, HealthState.UNHEALTHY)
        await _hears(shape.hub, nic.name, HealthState.UNHEALTHY)
        await until_equal(hub, leaf)
        (newest,) = await hub.last(HEALTH, limit=1, node=NODE, device_class="nic", device=nic.name)
        assert newest.value.health.state is HealthState.UNHEALTHY
        assert [peer["account"] for peer in shape.linked()] == [f"NODES-{NODE}"]


async def test_leaf_is_let_in_with_a_nodes_user_alone(nats_binary: Path) -> None:
    """A server that comes with a subscriber's or a controller's login is not linked: what a leaf
    sends is looked at less than what a client sends.
    """
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with asyncio.timeout(LIMIT_S), secured_leaves(nats_binary, nodes=["n1"], behind=[]) as shape:
        for user in ("user", "controller", "cli"):
            # One client login shows that the password is right.
            async with shape.hub.client(user) as client:
                await client.barrier()
            async with foreign_leaf(nats_binary, shape.link_url(user)) as leaf:
                await until(lambda: "Leafnode Error" in leaf.read_log())
            assert shape.linked() == []


async def test_doctor_warns_when_a_hub_has_no_users(nats_binary: Path) -> None:
    """Of a hub that nodes say their states to without a login, and of no other server."""
    async with asyncio.timeout(LIMIT_S), leaf_pair(nats_binary) as pair, pair.buses() as (hub, leaf):
        await leaf.put(MACHINE, Machine(node=NODE, numa_nodes=(), cpus=()), node=NODE)
        async with relay(pair):
            await until_equal(hub, leaf)
        findings = {}
        for name, url in (("hub", pair.hub.url), ("leaf", pair.leaf.url)):
            program = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "topobus.cli.main", "doctor", "--json", "--nats", url),
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _ = await program.communicate()
            findings[name] = {finding["what"]: finding for finding in json.loads(printed)["findings"]}

    assert findings["hub"]["hub"]["level"] == "warn"
    assert "hub of 1 node with servers of their own, and no users" in findings["hub"]["hub"]["found"]
    assert "hub" not in findings["leaf"]


async def test_leaf_takes_a_new_password_when_it_is_told_while_it_runs(nats_binary: Path) -> None:
    """At SIGHUP a node's own server reads its users anew: it ends the connections of who has
    another password now, and no other's; from 2.15 on its link to the hub stays, too.
    """
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with asyncio.timeout(2 * LIMIT_S), secured_leaves(nats_binary, nodes=[NODE]) as shape:
        server = shape.leaves[NODE].server
        assert isinstance(server, UsersServer)
        ended: asyncio.Queue[str] = asyncio.Queue()

        async def connect(user: str, password: str) -> Client:
            async def note() -> None:
                ended.put_nowait(user)

            return await nats.connect(server.url, user=user, password=password, allow_reconnect=False, closed_cb=note)

        async with shape.hub.bus("cli") as hub, shape.leaves[NODE].bus("topology") as leaf:
            await leaf.provision()
            nic = await connect("nic", "nic")
            await connect("gpu", "gpu")
            linked = shape.linked()
            server.users = server.users.replace('TOPOBUS_GPU_PASSWORD: "gpu"', 'TOPOBUS_GPU_PASSWORD: "another"')
            server.write_config()
            os.kill(server.pid, signal.SIGHUP)
            first_ended = await ended.get()
            newer = await connect("gpu", "another")
            with pytest.raises(nats.errors.Error):
                await nats.connect(
                    server.url, user="gpu", password="gpu", allow_reconnect=False, max_reconnect_attempts=1
                )

            assert first_ended == "gpu"
            assert nic.is_connected
            if version_of(nats_binary) >= (2, 15):
                # The same link, and not one that came anew; 2.10 cuts it.
                assert [(peer["port"], peer["account"]) for peer in shape.linked()] == [
                    (peer["port"], peer["account"]) for peer in linked
                ]
            assert len(linked) == 1
            assert hub.is_connected
            assert leaf.is_connected
            await newer.close()
            await nic.close()
