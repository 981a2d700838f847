"""Laws of the hands, over any history of owners who come, use, soil and go, of restarts, and of
dirt that sticks.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from support.hands_bench import CLEANING, HandsBench, new_card
from support.laws import examples
from support.looks import other_threads
from topobus.formats.messages.messages import Prepared
from topobus.formats.messages.sandbox_messages import Accepted, Attached
from topobus.testing.drivers.folder_driver import CARDS
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

OWNERS = [Owner(kind=OwnerKind.CLAIM, name=name, uid=f"u-{name}") for name in ("ada", "ben")]
# An owner's time, with anything in between; by chance alone few histories would have a card that is
# soiled, left and wanted again.
VISITS = st.tuples(
    st.sampled_from(["come-0", "come-1"]),
    st.lists(st.sampled_from(["attach", "detach", "soil", "stick", "restart"]), max_size=4),
    st.sampled_from(["go", "restart"]),
    st.lists(st.sampled_from(["loosen", "restart", "go"]), max_size=2),
)


class _History:
    """One card, whoever has it, and what a model says of it."""

    def __init__(self, root: Path) -> None:
        self.bench = HandsBench(root, cards=1)
        self.holder: Owner | None = None
        self.is_inside = False
        self.is_stuck = False
        self.sandbox = self.bench.sandbox("s1")
        self._life = AsyncExitStack()

    async def run(self, acts: list[str]) -> None:
        await self._life.enter_async_context(self.bench.life())
        try:
            for act in [*acts, "loosen", "go", "come-0", "go"]:
                await getattr(self, "_" + act.partition("-")[0])(act.partition("-")[2])
                self.check_somewhere()
        finally:
            await self._life.aclose()
        assert self.bench.card("nic-card-0") == new_card(0)
        assert self.bench.journal_of("nic-card-0") is None

    def check_somewhere(self) -> None:
        """The card is where the model has it, and nowhere else."""
        assert (self.bench.inside(self.sandbox), self.bench.card("nic-card-0") == {}) == (
            ["net1"] if self.is_inside else [],
            self.is_inside,
        )

    async def _come(self, number: str) -> None:
        owner = OWNERS[int(number)]
        # The ledger gives a card to one owner at a time.
        if self.holder not in (None, owner):
            return
        while isinstance((reply := await self.bench.prepare("nic-card-0", owner=owner, image="fast")).result, Accepted):
            await other_threads()
        if self.is_stuck and self.holder is None:
            assert isinstance(reply.result, Refusal), "a card was given whose dirt sticks"
            return
        assert isinstance(reply.result, Prepared), reply
        if self.holder is None:
            assert self.bench.card("nic-card-0") == {**new_card(0), "image": "fast"}, (
                "a card was given that is not clean"
            )
        self.holder = owner

    async def _attach(self, _: str) -> None:
        if self.holder is not None:
            reply = await self.bench.attach("nic-card-0", sandbox=self.sandbox, owner=self.holder, mtu="9000")
            assert isinstance(reply.result, Attached), reply
            self.is_inside = True

    async def _detach(self, _: str) -> None:
        if self.holder is not None:
            assert (await self.bench.detach("nic-card-0", sandbox=self.sandbox, owner=self.holder)).refusal is None
            self.is_inside = False

    async def _go(self, _: str) -> None:
        if self.holder is not None:
            assert (await self.bench.unprepare("nic-card-0", owner=self.holder)).refusal is None
            self.holder, self.is_inside = None, False

    async def _soil(self, _: str) -> None:
        self._leave("coffee")

    async def _stick(self, _: str) -> None:
        self.is_stuck = self._leave("stuck") or self.is_stuck

    async def _loosen(self, _: str) -> None:
        """Help, and let time pass until it is tried again."""
        if not self.is_stuck:
            return
        self.is_stuck = False
        (self._card() / "dirt").write_text("loose", encoding="utf-8")
        async with AsyncExitStack() as ticks:
            for doublings in range(7):
                # Time passes only while all wait for the next try, never while somebody cleans.
                await ticks.enter_async_context(self.bench.clock.ticking(CLEANING.retry_s * 2**doublings))
            while self.holder is None and self.bench.hands.observations():
                await other_threads()

    async def _restart(self, _: str) -> None:
        await self._life.aclose()
        await self._life.enter_async_context(self.bench.life())

    def _leave(self, dirt: str) -> bool:
        """Leave dirt on the card; only who has it can, and what sticks stays."""
        if self.holder is None or self.is_stuck:
            return False
        (self._card() / "dirt").write_text(dirt, encoding="utf-8")
        return True

    def _card(self) -> Path:
        return (
            Path(self.sandbox.network_namespace) / "net1" if self.is_inside else self.bench.root / CARDS / "nic-card-0"
        )


@settings(max_examples=examples(100))
@given(st.lists(VISITS, max_size=5))
def test_nobody_gets_a_card_that_was_not_cleaned_when_owners_come_and_go(
    visits: list[tuple[str, list[str], str, list[str]]],
) -> None:
    """Whatever the history: a card is given clean or not at all, is in one place, and is as its
    maker delivered it when all have gone.
    """
    acts = [act for come, use, leave, rest in visits for act in (come, *use, leave, *rest)]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_History(Path(folder)).run(acts))
