"""A device service killed (SIGKILL) at every single step of every verb of its hands: the next start
finishes or undoes it, and no card is lost.

The steps are counted while the verb runs (see `support.mortal_hands`), so a step that is
added to the kit later is covered by itself. Hardware is a folder: each card is
somewhere, whole, at each moment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.hands_lives import NEIGHBOUR, HandsLives, check_attached, check_prepared, publish_machine
from support.laws import steps
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

# More than any verb has: a loop that never ends would be a bug of the test.
MOST_STEPS = 120
FRESH = {"image": "factory", "mac": "02:00:00:00:00:00", "mtu": "1500"}
NEIGHBOURS = {"image": "factory", "mac": "02:00:00:00:00:01", "mtu": "9000"}
PROGRAM: dict[str, Any] = {"image": "fast"}
SLOWLY: dict[str, Any] = {"image": "fast", "is_slow": True}
WIDE: dict[str, Any] = {"mtu": "9000"}


@pytest_asyncio.fixture
async def lives(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[HandsLives]:
    """Two cards, of which a neighbour has the second one in its sandbox all the time."""
    async with Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway:
        made = HandsLives(gateway, nats_server.url, tmp_path)
        await publish_machine(bus)
        await made.start()
        try:
            await made.inventory()
            check_prepared(await made.ask("prepare", owner=NEIGHBOUR, card="nic-card-1"), "begin")
            check_attached(
                await made.ask("attach", owner=NEIGHBOUR, card="nic-card-1", sandbox="other", **WIDE), "begin"
            )
            yield made
        finally:
            await made.stop()


async def undo(lives: HandsLives, at: str) -> None:
    """Promise: after unprepare the card is as its maker delivered it, the journal has forgotten it,
    and the neighbour noticed nothing.
    """
    assert await lives.ask("unprepare") is None, at
    assert lives.card() == FRESH, at
    assert lives.inside("s1") == {}, at
    check_neighbour(lives, at)
    assert lives.journals() == ["nic-card-1.json"], at


def check_neighbour(lives: HandsLives, at: str) -> None:
    """Promise: what is whole stays as it is, through all crashes of others."""
    assert lives.inside("other") == NEIGHBOURS, at
    assert lives.card("nic-card-1") == {}, at


def check_somewhere(lives: HandsLives, at: str) -> None:
    """Promise: at each moment the card is at home or in the sandbox, with its own MAC.

    Never in both, never in neither.
    """
    places = [card for card in (lives.card(), lives.inside("s1")) if card]
    assert [card["mac"] for card in places] == ["02:00:00:00:00:00"], at


async def check_deaths(lives: HandsLives, last_step: int, least: int) -> None:
    """Promise: the verb had as many steps as it has to have, and nobody was ever told that a card
    is gone or dirty.
    """
    assert least <= last_step - 1 < MOST_STEPS - 2, f"{last_step - 1} steps"
    assert await lives.health_states() <= {("healthy", ""), ("unknown", "cleaning")}


@pytest.mark.law
@pytest.mark.parametrize("is_retried", [True, False], ids=["asked-again", "given-up"])
@pytest.mark.parametrize(("config", "least"), [(PROGRAM, 15), (SLOWLY, 15)], ids=["short", "long-work"])
async def test_card_is_programmed_or_fresh_when_killed_at_any_step_of_prepare(
    lives: HandsLives, config: dict[str, Any], least: int, is_retried: bool
) -> None:
    """Asked again, the card is programmed.

    Given up, it is as it was: whatever the step was, also where the work is long.
    """
    for step in steps(MOST_STEPS):
        lives.doom("prepare", step)
        await lives.ask_once("prepare", **config)
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        check_somewhere(lives, at)
        await lives.start()
        if is_retried:
            check_prepared(await lives.ask("prepare", **config), at)
            assert lives.card()["image"] == "fast", at
        await undo(lives, at)

    await check_deaths(lives, step, least)


@pytest.mark.law
@pytest.mark.parametrize("is_retried", [True, False], ids=["asked-again", "given-up"])
async def test_card_is_inside_or_at_home_when_killed_at_any_step_of_attach(lives: HandsLives, is_retried: bool) -> None:
    """Asked again, the card is in the sandbox once and whole.

    Given up, it is at home with the MTU it had.
    """
    for step in steps(MOST_STEPS):
        check_prepared(await lives.ask("prepare"), "before")
        lives.doom("attach", step)
        await lives.ask_once("attach", **WIDE)
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        check_somewhere(lives, at)
        await lives.start()
        if is_retried:
            check_attached(await lives.ask("attach", **WIDE), at)
            assert lives.inside("s1") == {**FRESH, "mtu": "9000"}, at
        await undo(lives, at)

    await check_deaths(lives, step, least=20)


@pytest.mark.law
async def test_card_is_at_home_when_killed_at_any_step_of_detach(lives: HandsLives) -> None:
    """The next start brings it home before it answers about it, and the repeated detach finds
    nothing to do.
    """
    for step in steps(MOST_STEPS):
        check_prepared(await lives.ask("prepare"), "before")
        check_attached(await lives.ask("attach", **WIDE), "before")
        lives.doom("detach", step)
        await lives.ask_once("detach")
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        check_somewhere(lives, at)
        await lives.start()
        assert await lives.ask("detach") is None, at
        assert lives.card() == FRESH, at
        await undo(lives, at)

    await check_deaths(lives, step, least=15)


@pytest.mark.law
async def test_card_is_fresh_when_killed_at_any_step_of_unprepare_and_cleaning(lives: HandsLives) -> None:
    """It is detached, its image restored, its dirt swept, in however many lives.

    The next owner gets a clean card.
    """
    for step in steps(MOST_STEPS):
        check_prepared(await lives.ask("prepare", **PROGRAM), "before")
        check_attached(await lives.ask("attach", **WIDE), "before")
        lives.soil()
        lives.doom("unprepare", step)
        await lives.ask_once("unprepare")
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        check_somewhere(lives, at)
        await lives.start()
        await undo(lives, at)
        check_prepared(await lives.ask("prepare"), at)
        assert lives.card() == FRESH, at
        await undo(lives, at)

    await check_deaths(lives, step, least=35)


@pytest.mark.law
async def test_card_is_at_home_when_the_undoing_start_is_killed_at_any_step_too(lives: HandsLives) -> None:
    """A crash in the middle of undoing a crash is one more of the same.

    A question about another sandbox finds the card at home already.
    """
    for step in steps(MOST_STEPS):
        check_prepared(await lives.ask("prepare", **PROGRAM), "before")
        # Between the card's move and the note that it is done.
        lives.doom_after("attach", "os.rename nic-card-0")
        await lives.ask_once("attach", **WIDE)
        assert await lives.died()
        if await lives.start_doomed(step):
            await lives.ask_once("detach", sandbox="another")
            if not await lives.died():
                break
        at = f"killed at {lives.where()} of a start"
        check_somewhere(lives, at)
        await lives.start()
        assert await lives.ask("detach", sandbox="another") is None, at
        assert lives.card() == {**FRESH, "image": "fast"}, at
        await undo(lives, at)

    await check_deaths(lives, step, least=15)
