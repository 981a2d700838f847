"""The controller in a cluster dies at each of its writes, before and after it took effect, and
writes get lost in every way: whoever comes next goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.cluster_home import ClusterHome, claim, pod, template
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.kubernetes.answers import Plain, Rejected
from topobus.kubernetes.reading import Kind, Page, WatchEvent
from topobus.values.errors import PeerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


class Crash(BaseException):
    """The replica dies here; no handler of its own may catch that."""


class MortalApi:
    """An API server's client that dies, or loses the answer, at its n-th write: before the write
    reaches the server, or after.
    """

    def __init__(self, api: KubernetesApi, deadly: int, *, is_after: bool, is_silent: bool = False) -> None:
        self._api = api
        self._deadly = deadly
        self._is_after = is_after
        self._is_silent = is_silent
        self.writes = 0
        self.died = asyncio.Event()

    async def version_of(self, kind: Kind) -> str:
        """As the real one."""
        return await self._api.version_of(kind)

    def drop_versions(self) -> None:
        """As the real one."""
        self._api.drop_versions()

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """As the real one."""
        return await self._api.get(kind, namespace, name)

    def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """As the real one."""
        return self._api.pages(kind)

    def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """As the real one."""
        return self._api.watch(kind, version)

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Plain | Rejected:
        """Die at it when it is its turn."""
        self._before()
        written = await self._api.create(kind, plain)
        self._after()
        return written

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = ""
    ) -> Plain | Rejected:
        """Die at it when it is its turn."""
        self._before()
        written = await self._api.patch(kind, namespace, name, patch, part=part)
        self._after()
        return written

    async def delete(self, kind: Kind, namespace: str, name: str, *, version: str) -> Rejected | None:
        """Die at it when it is its turn."""
        self._before()
        gone = await self._api.delete(kind, namespace, name, version=version)
        self._after()
        return gone

    def _before(self) -> None:
        self.writes += 1
        if self.writes == self._deadly and not self._is_after:
            self._die()

    def _after(self) -> None:
        if self.writes == self._deadly and self._is_after:
            self._die()

    def _die(self) -> None:
        self.died.set()
        raise PeerUnavailable("the answer was lost") if self._is_silent else Crash


async def _die_at(
    home: ClusterHome, write: int, *, is_after: bool, done_when: Callable[[], object] | None = None
) -> bool:
    """Run a replica until it dies at a write; False when the work was done without that many."""
    made: list[MortalApi] = []

    def wrap(api: KubernetesApi) -> KubernetesApi:
        made.append(MortalApi(api, write, is_after=is_after))
        return made[0]

    try:
        async with home.controller(wrap=wrap):
            died = asyncio.create_task(made[0].died.wait())
            done = asyncio.create_task(home.until(done_when or (lambda: not home.gates("p")), "the work done"))
            await asyncio.wait({died, done}, return_when=asyncio.FIRST_COMPLETED)
            if made[0].writes >= write:
                # The server shows a write before its writer has the answer, at which it dies.
                await made[0].died.wait()
            for task in (died, done):
                task.cancel()
    except* Crash:
        pass  # as ordered
    return made[0].died.is_set()


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
async def test_pod_is_served_when_the_replica_dies_at_any_write(home: ClusterHome, *, is_after: bool) -> None:
    """Two claims of one pod: a crash at the n-th write, for each n there is, leaves a state from
    which the next replica goes on; nothing is given twice.
    """
    crashes = 0
    for write in range(1, 20):
        home.put(claim("a"), claim("b"), pod("p", "a", "b"))
        has_died = await _die_at(home, write, is_after=is_after)
        async with home.controller():
            await home.until(lambda: not home.gates("p"), "an open gate")

        assert home.devices("a") + home.devices("b") == ["n1-gpu-0", "n1-gpu-1"]
        assert (home.users("a"), home.users("b")) == (["p"], ["p"])
        _clear(home, "a", "b")
        if not has_died:
            break
        crashes += 1

    assert crashes == 5  # two intents, two statuses, the gate


def _clear(home: ClusterHome, *claims: str) -> None:
    """Remove a pod and its claims past their finalizers."""
    home.server.remove("Pod", "p")
    for name in claims:
        home.set_status("ResourceClaim", name, allocation=None, reservedFor=None)
        stored = home.get("ResourceClaim", name)
        home.server.put({**stored, "metadata": {**stored["metadata"], "finalizers": []}})
        home.server.remove("ResourceClaim", name)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
async def test_devices_are_taken_back_when_the_replica_dies_at_any_write(home: ClusterHome, *, is_after: bool) -> None:
    """Reservation off, devices off, a new intent, a new status: a crash at the n-th write of these
    is gone on from, and the pod ends on the other node.
    """

    def is_elsewhere() -> bool:
        return home.node_of("a") == "n2" and home.users("a") == ["p"]

    crashes = 0
    for write in range(1, 20):
        home.put(claim("a"), pod("p", "a"))
        async with home.controller():
            await home.until(lambda: not home.gates("p"), "an open gate")
        home.set_status("Pod", "p", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}])
        has_died = await _die_at(home, write, is_after=is_after, done_when=is_elsewhere)
        async with home.controller():
            await home.until(is_elsewhere, "devices elsewhere")

        assert home.devices("a") == ["n2-gpu-0"]
        _clear(home, "a")
        if not has_died:
            break
        crashes += 1

    assert crashes >= 5  # and the event


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", [1, 2, 3])
async def test_pod_is_served_when_the_answer_to_a_write_is_lost(
    home: ClusterHome, write: int, *, is_after: bool
) -> None:
    """A write that timed out is neither done nor undone: it is read again, and nothing is written
    twice.
    """
    home.put(claim("a"), pod("p", "a"))

    async with home.controller(wrap=lambda api: MortalApi(api, write, is_after=is_after, is_silent=True)):
        await home.until(lambda: not home.gates("p"), "an open gate")

    patches = [request.path for request in home.server.requests if request.method == "PATCH" and request.code == 200]
    assert home.devices("a") == ["n1-gpu-0"]
    assert len(patches) == 3


@pytest.mark.parametrize(
    ("method", "plural"), [("PATCH", "resourceclaims"), ("PATCH", "pods"), ("GET", "resourceclaims")]
)
@pytest.mark.parametrize("code", [409, 429, 500, 503])
async def test_pod_is_served_when_the_server_refuses_for_a_while(
    home: ClusterHome, method: str, plural: str, code: int
) -> None:
    """Conflicts, throttling and a server in trouble are waited out."""
    home.server.refuse(method, plural, code=code, reason="Conflict" if code == 409 else "InternalError", times=3)
    home.put(claim("a"), pod("p", "a"))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.users("a") == ["p"]


async def test_controller_goes_on_when_the_server_restarts_and_forgets(home: ClusterHome) -> None:
    """Cut watches, forgotten history and a server that was away are no more than a pause."""
    home.put(claim("a"), pod("p", "a"))
    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")
        home.server.compact()
        home.server.close_watches()
        home.put(claim("b"), pod("q", "b"))
        await home.until(lambda: not home.gates("q"), "an open gate after lost history")
        await home.server.stop()
        home.put(claim("c"), pod("r", "c"))
        await home.server.start()
        await home.until(lambda: not home.gates("r"), "an open gate after the restart")

    assert sorted(home.holders()) == ["n1-gpu-0", "n1-gpu-1", "n2-gpu-0"]


async def test_three_replicas_never_give_a_device_twice(home: ClusterHome) -> None:
    """Three replicas serve eight pods for four devices: four are served, no device was ever in two
    claims, whichever replica wrote.
    """
    async with home.controller(), home.controller(), home.controller():
        for index in range(8):
            home.put(claim(f"c{index}"), pod(f"p{index}", f"c{index}"))
        await home.until(
            lambda: len([index for index in range(8) if not home.gates(f"p{index}")]) == 4, "four open gates"
        )
        await home.until(
            lambda: all(home.events(f"p{index}") for index in range(8) if home.gates(f"p{index}")),
            "a word to each of the others",
        )

    assert all(len(holders) == 1 for holders in home.holders().values())
    assert len(home.holders()) == 4
    assert _most_holders(home) == 1


def _most_holders(home: ClusterHome) -> int:
    """Say how many claims had one device at the same time, over the server's whole history of
    statuses written.
    """
    held: dict[str, set[str]] = {}
    most = 0
    for request in home.server.requests:
        if not request.path.endswith("/status") or "/resourceclaims/" not in request.path or request.code != 200:
            continue
        name = request.path.split("/")[-2]
        status = (request.body or {}).get("status") or {}
        if "allocation" not in status:
            continue
        for holders in held.values():
            holders.discard(name)
        for result in (status["allocation"] or {}).get("devices", {}).get("results", ()):
            held.setdefault(result["device"], set()).add(name)
        most = max([most, *(len(holders) for holders in held.values())])
    return most


def _has_written(home: ClusterHome, wanted: int) -> bool:
    return len([request for request in home.server.requests if request.is_write]) >= wanted


async def _spawn(home: ClusterHome, folder: Path) -> asyncio.subprocess.Process:
    """Start a controller as a process of its own."""
    environment = {
        **os.environ,
        "TOPOBUS_ALL__NATS__URL": home.nats_url,
        "TOPOBUS_ALL__HTTP__PORT": "0",
        "TOPOBUS_CONTROLLER__HOME": "cluster",
        "TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG": str(home.kubeconfig),
        "TOPOBUS_CONTROLLER__CLUSTER__RETRY_S": "0.1",
    }
    log = (folder / f"controller-{Random().random()}.log").open("wb")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.controller.main", env=environment, stdout=log, stderr=asyncio.subprocess.STDOUT
    )


@pytest.mark.real_server
async def test_killed_replicas_leave_nothing_half_done(home: ClusterHome, tmp_path: Path) -> None:
    """Three processes serve pods of one and two claims, each is killed and replaced: in the end all
    pods have devices, and no device was ever in two claims.
    """
    random = Random(7)
    home.machine_room(nodes=4, devices=5)
    processes = [await _spawn(home, tmp_path) for _ in range(3)]
    try:
        for index in range(12):
            home.put(
                template(f"t{index}"),
                claim(f"c{index}"),
                pod(f"p{index}", *[f"c{index}"][: random.randrange(2)], templates=(f"t{index}",)),
            )
            home.server.generate_claims()
            if index % 3 == 2:
                writes = len([request for request in home.server.requests if request.is_write]) + random.randrange(1, 5)
                await home.until(partial(_has_written, home, writes), "some writes")
                victim = processes.pop(0)
                victim.send_signal(signal.SIGKILL)
                await victim.wait()
                processes.append(await _spawn(home, tmp_path))
        waiting = [f"p{index}" for index in range(12)]
        await home.server.until(lambda: not any(home.gates(name) for name in waiting), timeout_s=60, what="open gates")
    finally:
        for process in processes:
            process.kill()
            await process.wait()

    assert all(len(holders) == 1 for holders in home.holders().values())
    assert _most_holders(home) == 1
    for stored in home.server.objects("Pod"):
        for use in stored["status"].get("resourceClaimStatuses", ()):
            assert home.users(use["resourceClaimName"]) == [stored["metadata"]["name"]]


async def test_pod_moves_as_a_whole_when_its_second_claim_was_overtaken_after_a_crash(home: ClusterHome) -> None:
    """One claim was allocated when the replica died, and somebody else took the other's device:
    behind the gate the first one moves, too.
    """
    home.put(claim("a"), claim("b"), pod("p", "a", "b"))
    assert await _die_at(home, 3, is_after=True)
    home.put(claim("theirs"))
    result = {"request": "r", "driver": "gpu.example.com", "pool": "n1", "device": "n1-gpu-1"}
    home.set_status("ResourceClaim", "theirs", allocation={"devices": {"results": [result]}})

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.devices("a") + home.devices("b") == ["n2-gpu-0", "n2-gpu-1"]
    assert home.devices("theirs") == ["n1-gpu-1"]


async def test_pod_that_costs_a_long_search_is_served_when_the_replica_died_after_its_intent(home: ClusterHome) -> None:
    """The next replica leaves the intent to its writer for a moment, and makes it true when it is
    the pod's turn for a long search.
    """
    ten = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
    costly = claim("a")
    (request,) = costly["spec"]["devices"]["requests"]
    request["exactly"]["selectors"] = [{"cel": {"expression": f"{ten}.all(a, {ten}.all(b, {ten}.all(c, a > 0)))"}}]
    home.put(costly, pod("p", "a"))
    assert await _die_at(home, 1, is_after=True)

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.devices("a") == ["n1-gpu-0"]
