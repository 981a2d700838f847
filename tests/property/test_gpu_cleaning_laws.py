"""A law of clean GPUs: over any history of tenants, processes that stay, restarts of the service
and of NVML, nobody is given a GPU that was not found clean.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import pynvml
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_nvml import GIB, IDLE_BYTES, FakeGpu, FakeNvml, fake_nvml, needs_gcc
from support.gpu_processes import add_process, end_recorded
from support.hands_bench import CLEANING, HandsBench
from support.laws import examples
from support.looks import other_threads
from topobus.devicekit.pauses import Pauses
from topobus.formats.messages.messages import Prepared
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.leftovers import Leftovers
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = needs_gcc

PROFILE = Path(__file__).parent.parent / "data" / "profiles" / "h100-pair.toml"
OWNERS = [Owner(kind=OwnerKind.CLAIM, name=name, uid=f"u-{name}") for name in ("ada", "ben")]
ACTS = st.sampled_from(["come-0", "come-1", "work", "leak", "end", "go", "go", "restart", "silence", "answer"])
# One tenant's time, with a process that outlives it: by chance alone few histories would have one.
STAINS = st.just(["come-0", "work", "go"])
_PID = 4711


class _History:
    """One GPU, whoever has it, and what a model says of it."""

    def __init__(self, root: Path, library: FakeNvml) -> None:
        self.bench = HandsBench(root / "cards", cards=0)
        self.root = root / "machine"
        self.library = library
        recorded = build(PROFILE, self.root)
        self.address = recorded.pci("h100")[0]
        library.gpus = {self.address: FakeGpu(address=self.address)}
        library.end_session(0)
        self.tree = Tree(HardwareSettings(root=str(self.root), library_path=str(library.folder)))
        self.holder: Owner | None = None
        self.has_process = False
        self.leaked_bytes = 0
        self.is_silent = False
        self._life = AsyncExitStack()
        self._now_s = 0.0

    async def run(self, acts: list[str]) -> None:
        await self._start()
        try:
            for act in [*acts, "answer", "end", "go"]:
                await getattr(self, "_" + act.partition("-")[0])(act.partition("-")[2])
            assert isinstance(await self._ask(OWNERS[0]), Prepared), "a clean GPU was kept back"
        finally:
            await self._life.aclose()

    async def _start(self) -> None:
        driver = NvidiaDriver()

        def pass_time(seconds: float) -> None:
            self._now_s += seconds

        driver.leftovers = Leftovers(
            LeftoverSettings(wait_s=0.2), pauses=Pauses(now=lambda: self._now_s, sleep=pass_time)
        )
        device = driver.discover(self.tree, read_machine(self.tree, "n1")).devices[0]
        self.device = device.name
        self.bench.driver, self.bench.tree, self.bench.devices = driver, self.tree, {device.name: device}
        await self._life.enter_async_context(self.bench.life())

    @property
    def _is_clean(self) -> bool:
        return not self.has_process and self.leaked_bytes == 0 and not self.is_silent

    async def _ask(self, owner: Owner) -> object:
        while isinstance((reply := await self.bench.prepare(self.device, owner=owner)).result, Accepted):
            await other_threads()
        if isinstance(reply.result, Refusal) and self._is_clean:
            # Tried again only after a pause.
            self.bench.clock.advance(CLEANING.retry_s * 64)
            while isinstance((reply := await self.bench.prepare(self.device, owner=owner)).result, Accepted | Refusal):
                await other_threads()
        return reply.result

    async def _come(self, number: str) -> None:
        owner = OWNERS[int(number)]
        # The ledger gives a GPU to one owner at a time.
        if self.holder not in (None, owner):
            return
        answer = await self._ask(owner)
        if isinstance(answer, Prepared):
            assert self.holder is owner or not self.has_process, "a GPU was given with a process of somebody else's"
            assert self.holder is owner or self.leaked_bytes == 0, "a GPU was given with somebody else's memory"
            self.holder = owner

    async def _work(self, _: str) -> None:
        if self.holder is not None and not self.has_process:
            add_process(self.root, _PID, pod=self.holder.name)
            self.has_process = True
            self._write()

    async def _leak(self, _: str) -> None:
        if self.holder is not None:
            self.leaked_bytes = 4 * GIB
            self._write()

    async def _end(self, _: str) -> None:
        if self.has_process:
            end_recorded(self.root, _PID)
        self.has_process, self.leaked_bytes = False, 0
        self._write()

    async def _go(self, _: str) -> None:
        if self.holder is not None:
            owner, self.holder = self.holder, None
            await self.bench.unprepare(self.device, owner=owner)

    async def _restart(self, _: str) -> None:
        await self._life.aclose()
        self._life = AsyncExitStack()
        if self.is_silent:
            # A service that starts without NVML finds GPUs by sysfs, and who has their nodes
            # open by /proc: another history.
            await self._answer("")
        await self._start()

    async def _silence(self, _: str) -> None:
        self.is_silent = True
        self._write()

    async def _answer(self, _: str) -> None:
        self.is_silent = False
        self._write()

    def _write(self) -> None:
        processes = ((_PID, GIB),) if self.has_process else ()
        used = IDLE_BYTES + self.leaked_bytes + (GIB if self.has_process else 0)
        self.library.set(
            self.address, processes=processes, used_bytes=used, error=pynvml.NVML_ERROR_UNKNOWN if self.is_silent else 0
        )


@settings(max_examples=examples(40), deadline=None)
@given(parts=st.lists(st.one_of(STAINS, st.lists(ACTS, max_size=6)), max_size=4))
def test_gpu_is_given_to_nobody_whose_cleaning_has_not_succeeded(parts: list[list[str]]) -> None:
    """And once nothing is left on it, somebody gets it."""
    with tempfile.TemporaryDirectory() as folder, fake_nvml(Path(folder) / "lib") as library:
        asyncio.run(_History(Path(folder), library).run([act for part in parts for act in part]))
