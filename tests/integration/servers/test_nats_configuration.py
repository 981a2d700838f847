"""The rendered server configuration and permissions on real servers: they start, and honest
processes can work under them.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from docpages.nats_files import render_hub, render_leaf, render_server, render_shape
from integration.values import health, inventory, release, released
from support.reading import Reader
from support.secured_nats import SecuredNats, secured_nats
from topobus.bus.bus import ChangeKind
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_accounts_config import render_passwords
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import HEALTH, HINT, INVENTORY, LEDGER, MACHINE, PREPARE, RELEASE
from topobus.process.readiness import Readiness
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

_KEY = {"node": "n1", "device_class": "gpu"}
_ROOT = Path(__file__).parents[3]
_PAGE = _ROOT / "docs" / "how-to" / "secure-nats.md"
_DEPLOYED = _ROOT / "deploy" / "nats"


@pytest_asyncio.fixture
async def guarded(nats_binary: Path, tmp_path: Path) -> AsyncIterator[SecuredNats]:
    """A server with the rendered permissions."""
    async with secured_nats(tmp_path, binary=nats_binary) as nats:
        yield nats


def _version(binary: Path) -> tuple[int, int]:
    text = (
        subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout.split("v")[-1].strip()
    )
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.parametrize("version", [(2, 9), (2, 10), (2, 14)])
async def test_server_accepts_its_configuration_when_it_is_new_enough(
    nats_binary: Path, tmp_path: Path, version: tuple[int, int]
) -> None:
    """Each rendered file is taken by the servers that it is for."""
    if _version(nats_binary) < version:
        pytest.skip(f"this server is older than {version}")
    file = tmp_path / "nats.conf"
    file.write_text(render_server(version))
    checked = await asyncio.to_thread(
        subprocess.run, [nats_binary, "-t", "-c", str(file)], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("version", "text"),
    [((2, 10), render_leaf((2, 10))), ((2, 14), render_leaf((2, 14)))]
    + [(version, render_hub(version)) for version in ((2, 10), (2, 12), (2, 14))],
    ids=["leaf-2.10", "leaf-2.14", "hub-2.10", "hub-2.12", "hub-2.14"],
)
async def test_server_accepts_the_configuration_of_its_shape_when_it_is_new_enough(
    nats_binary: Path, tmp_path: Path, version: tuple[int, int], text: str
) -> None:
    """Leaf and hub: each rendered file is taken by the servers that it is for, with the names from
    their environment.
    """
    if _version(nats_binary) < version:
        pytest.skip(f"this server is older than {version}")
    file = tmp_path / "nats.conf"
    file.write_text(text)
    names = {
        "TOPOBUS_LEAF_DOMAIN": "node-n1",
        "TOPOBUS_LEAF_HUB_URL": "nats://hub.topobus.svc:7422",
        "TOPOBUS_HUB_NAME": "hub-0",
    }
    checked = await asyncio.to_thread(
        subprocess.run, [nats_binary, "-t", "-c", str(file)], env=names, capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("shape", list(Shape))
async def test_server_accepts_the_accounts_when_passwords_come_from_a_file(
    nats_binary: Path, tmp_path: Path, shape: Shape
) -> None:
    """Every version takes the accounts of each shape, for any node and for some.

    Without a password it does not start.
    """
    for nodes in ([], ["n1"]):
        users = [user for account in accounts(shape, nodes=nodes) for user in account.users]
        passwords = tmp_path / "passwords.conf"
        passwords.write_text(render_passwords({user.variable: f"4 {user.name} #" for user in users}))
        file = tmp_path / "nats.conf"
        file.write_text(f"{render_server()}include accounts.conf\n")
        for text, status in (
            (f"include passwords.conf\n{render_shape(shape, nodes=nodes)}", 0),
            (render_shape(shape, nodes=nodes), 1),
        ):
            (tmp_path / "accounts.conf").write_text(text)
            checked = await asyncio.to_thread(
                subprocess.run, [nats_binary, "-t", "-c", str(file)], capture_output=True, text=True, check=False
            )

            assert checked.returncode == status, checked.stderr


async def test_server_accepts_the_shipped_files_when_they_are_put_together_as_the_page_says(
    nats_binary: Path, tmp_path: Path
) -> None:
    """The page's own commands make of the shipped accounts, and of passwords in a file, a
    configuration that the server takes.
    """
    for file in _DEPLOYED.glob("*.conf"):
        shutil.copy(file, tmp_path)
    users = [user for account in accounts(Shape.CENTRAL) for user in account.users]
    (tmp_path / "passwords.conf").write_text(render_passwords({user.variable: user.name for user in users}))
    section = _PAGE.read_text().partition("\n## Accounts\n")[2].partition("\n## ")[0]
    commands = [line[2:] for line in section.splitlines() if line.startswith("$ ") and "include " in line]
    for command in commands:
        await asyncio.to_thread(
            subprocess.run, ["sh", "-c", command.replace("/etc/topobus", str(tmp_path))], check=True
        )
    checked = await asyncio.to_thread(
        subprocess.run,
        [nats_binary, "-t", "-c", str(tmp_path / "nats-server.conf")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (len(commands), checked.returncode) == (2, 0), checked.stderr


async def test_services_can_work_when_permissions_are_on(guarded: SecuredNats) -> None:
    """Under the rendered rights each does its part and none is denied anything: provision, watch,
    write, publish, follow, ask, answer.
    """
    readiness = {name: Readiness() for name in ("controller", "discovery", "gpu", "topology", "gateway", "cli")}
    async with AsyncExitStack() as stack:
        buses = {
            name: await stack.enter_async_context(guarded.bus(name, readiness=readiness[name])) for name in readiness
        }
        for bus in buses.values():
            await bus.provision()
        await buses["discovery"].put(MACHINE, Machine(node="n1", numa_nodes=(), cpus=()), node="n1")
        async with Reader(buses["gpu"].watch(MACHINE, node="n1")) as machines:
            await machines.until(lambda items: ChangeKind.SNAPSHOT_END in [item.kind for item in items])
            await buses["discovery"].put(MACHINE, Machine(node="n1", numa_nodes=(), cpus=(), generation=2), node="n1")
            await machines.until(lambda items: items[-1].value is not None and items[-1].value.generation == 2)
        assert len(await buses["gpu"].history(MACHINE, node="n1")) == 2
        await buses["gpu"].compare_and_set(INVENTORY, inventory(1), 0, **_KEY)
        await buses["gpu"].publish(HEALTH, health(1), event_id="1", device="gpu-0", **_KEY)
        async with Reader(buses["gateway"].follow(HEALTH)) as events:
            await events.until(lambda items: len(items) == 1)
        assert len(await buses["topology"].list(INVENTORY, node="n1")) == 1
        await buses["topology"].compare_and_set(LEDGER, Ledger(node="n1"), 0, node="n1")

        async def handle(_request: object) -> object:
            return released()

        await buses["topology"].answer(RELEASE, handle, node="n1")  # type: ignore[arg-type]  # a handler for any request
        for asker in ("gateway", "cli"):
            assert await buses[asker].ask(RELEASE, release(), node="n1") == released()
        for ask in (HINT, PREPARE):
            await buses["gpu"].answer(ask, handle, **_KEY)  # type: ignore[arg-type, type-var]  # never asked
        for asker, ask in (("topology", HINT), ("cli", HINT), ("gateway", PREPARE)):
            assert isinstance(await buses[asker].is_answered(ask, timeout_s=10, **_KEY), Answered)

        assert [name for name, other_readiness in readiness.items() if not other_readiness.is_ready] == []


async def test_service_is_denied_when_it_writes_what_is_not_its_own(guarded: SecuredNats) -> None:
    """The gpu service cannot write a ledger, nor another class's inventory.

    It learns of it by its readiness.
    """
    readiness = Readiness()
    async with guarded.bus("topology") as topology, guarded.bus("gpu", readiness=readiness, timeout_s=0.5) as gpu:
        await topology.provision()
        with pytest.raises(PeerUnavailable):
            await gpu.put(LEDGER, Ledger(node="n1"), node="n1")
        with pytest.raises(PeerUnavailable):
            await gpu.put(INVENTORY, inventory(1), node="n1", device_class="nic")

        assert await topology.get(LEDGER, node="n1") is None
        assert await topology.list(INVENTORY, node="n1") == ()
        assert "Permissions Violation" in readiness.report()["bus-permissions"].title()


@pytest.mark.parametrize("principal", PRINCIPALS)
async def test_attacker_has_only_the_rights_of_its_credential(guarded: SecuredNats, principal: str) -> None:
    """A bare client as any principal is let in, reaches its own inbox, and is told of what it may
    not do: the attacks of other tests are real ones.
    """
    async with guarded.attacker(principal) as attacker:
        inbox = f"{attacker.client.new_inbox()}"
        echo = await attacker.client.subscribe(inbox)
        await attacker.send(inbox, b"echo")
        assert (await echo.next_msg(10)).data == b"echo"
        await attacker.send("somewhere.else")

        assert ["somewhere.else" in denial for denial in attacker.denials] == [True]
