"""The nats-server that the tests share: what one test leaves is nothing to another, and nobody
stops it for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.servers.lent_accounts import BorrowedServer, NatsAccounts
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import PODS
from topobus.formats.messages.messages import PodsReply, PodsRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable

pytestmark = pytest.mark.integration


async def test_accounts_have_nothing_in_common_when_two_are_lent_at_once(nats_accounts: NatsAccounts) -> None:
    """Streams and answers of one account are nobody's business in the other, on the same server."""

    async def answer(_request: PodsRequest) -> PodsReply:
        return PodsReply()

    async with (
        nats_accounts.borrow() as first,
        nats_accounts.borrow() as second,
        Bus.session(NatsSettings(url=first.url), name="topobus-cli") as bus,
        Bus.session(NatsSettings(url=second.url), name="topobus-cli") as other,
    ):
        await bus.provision()
        await bus.answer(PODS, answer, node="n1")
        seen = set((await other.inspect()).values())

        assert first.url.partition("@")[2] == second.url.partition("@")[2]
        assert seen == {"it does not exist"}
        with pytest.raises(PeerUnavailable, match="no service answers"):
            await other.ask(PODS, PodsRequest(), node="n1")


async def test_next_server_starts_when_all_accounts_were_lent(nats_binary: Path) -> None:
    """No account is lent twice, and the server that nobody uses any more is gone."""
    with NatsAccounts(binary=nats_binary, size=1) as accounts:
        async with accounts.borrow() as first:
            pass
        async with accounts.borrow() as second, Bus.session(NatsSettings(url=second.url), name="topobus-cli") as bus:
            await bus.provision()

        assert first.url != second.url
        assert not first.log.exists()


async def test_next_server_leaves_the_last_one_running_while_an_account_of_it_is_lent(nats_binary: Path) -> None:
    """A test that borrows two accounts may get the last one of a server and the first of the next."""
    with NatsAccounts(binary=nats_binary, size=1) as accounts:
        async with (
            accounts.borrow() as first,
            accounts.borrow() as second,
            Bus.session(NatsSettings(url=first.url), name="topobus-cli") as bus,
            Bus.session(NatsSettings(url=second.url), name="topobus-cli") as other,
        ):
            await bus.provision()
            await other.provision()

        async with accounts.borrow():
            assert not first.log.exists()


async def test_streams_are_deleted_when_an_account_is_given_back(nats_accounts: NatsAccounts) -> None:
    """What a test stored takes no disk and no memory from the next ones."""
    async with nats_accounts.borrow() as lent, Bus.session(NatsSettings(url=lent.url), name="topobus-cli") as bus:
        await bus.provision()

    async with Bus.session(NatsSettings(url=lent.url), name="topobus-cli") as bus:
        assert set((await bus.inspect()).values()) == {"it does not exist"}


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param(lambda server: server.pause(), id="pause"),
        pytest.param(lambda server: server.resume(), id="resume"),
        pytest.param(lambda server: server.reload(""), id="reload"),
        pytest.param(lambda server: server.pid, id="pid"),
        pytest.param(lambda server: server.store, id="store"),
        pytest.param(lambda server: server.folder, id="folder"),
        pytest.param(lambda server: server.port, id="port"),
    ],
)
def test_borrowed_server_refuses_when_a_test_would_touch_others(
    touch: Callable[[NatsServer], object], tmp_path: Path
) -> None:
    """A test that needs a server of its own is told so at once."""
    shared = NatsServer(binary=tmp_path / "nats-server", parent=tmp_path)

    with pytest.raises(RuntimeError, match="shared with other tests: take the fixture own_nats_server"):
        touch(BorrowedServer(shared, "test1"))


@pytest.mark.parametrize("verb", ["start", "stop", "kill", "__aenter__"])
async def test_borrowed_server_refuses_when_a_test_would_end_it(verb: str, tmp_path: Path) -> None:
    """Nobody starts or ends the server under other tests."""
    shared = NatsServer(binary=tmp_path / "nats-server", parent=tmp_path)

    with pytest.raises(RuntimeError, match="shared with other tests"):
        await getattr(BorrowedServer(shared, "test1"), verb)()
