"""One suite for both stores of objects: a bucket of NATS and an API server keep the same promises to the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from support.cluster_home import ClusterHome
from topobus.contracts.catalogue import OBJECT
from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.cluster_metrics import ClusterMetrics
from topobus.controller.state.api_server_state import ApiServerState
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.api_server_store import ApiServerStore
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.controller.store.nats_store import NatsStore
from topobus.controller.store.object_writer import ObjectWriter
from topobus.controller.store.protocol import Conflict, Deleted, ObjectStore, Unknown
from topobus.domain.errors import PeerUnavailable
from topobus.kubernetes.api.objects import metadata_of
from topobus.kubernetes.client import Rejected
from topobus.runtime.bus import AmbiguousWrite, Bus
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

KEY = ObjectKey("resourceclaim", "default", "one")
FRESH = ApiObject(
    api_version="resource.k8s.io/v1",
    kind="ResourceClaim",
    metadata={"name": "one", "namespace": "default", "uid": "made-here", "creationTimestamp": "2026-01-01T00:00:00Z"},
    spec={"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}}]}},
)
RESERVED = {"allocation": {"devices": {"results": []}}, "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}


class _Deafening:
    """A bus or an API server whose answers to writes are lost, before or after the write was done."""

    def __init__(self, peer: Any, error: Exception, names: tuple[str, ...]) -> None:
        self._peer = peer
        self._error = error
        self._names = names
        self.lost = ""
        """`request` or `answer`: what of the next writes is lost."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._peer, name)
        if name not in self._names:
            return real

        async def write(*arguments: Any, **options: Any) -> Any:
            if self.lost == "request":
                raise self._error
            done = await real(*arguments, **options)
            if self.lost == "answer":
                raise self._error
            return done

        return write


class Place:
    """A store, a second writer of it, and a way to make it lose answers."""

    def __init__(self, store: ObjectStore, rival: ObjectStore, peer: _Deafening, copy: StandaloneState | ApiServerState) -> None:
        self.store = store
        self.rival = rival
        self.peer = peer
        self._copy = copy

    def known(self) -> ApiObject | None:
        """The claim as the store's copy shows it."""
        if isinstance(self._copy, ApiServerState):
            return self._copy.claims.get((KEY.namespace, KEY.name))
        stored = self._copy.objects.get(KEY)
        return stored.value if stored is not None else None


@asynccontextmanager
async def _api_server(folder: Path) -> AsyncIterator[Place]:
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        home = ClusterHome(server, "", folder)
        api, other = KubernetesApi.open(home.settings.cluster), KubernetesApi.open(home.settings.cluster)
        try:
            peer: Any = _Deafening(api, PeerUnavailable("no answer"), ("create", "patch", "delete"))
            copy = ApiServerState()
            metrics = ClusterMetrics(CollectorRegistry())
            yield Place(ApiServerStore(peer, copy, metrics), ApiServerStore(other, ApiServerState(), metrics), peer, copy)
        finally:
            await api.close()
            await other.close()


@pytest_asyncio.fixture(params=["nats", "api-server"])
async def place(request: pytest.FixtureRequest, bus: Bus, tmp_path: Path) -> AsyncIterator[Place]:
    """Each store in turn."""
    if request.param == "api-server":
        async with _api_server(tmp_path) as made:
            yield made
        return
    peer: Any = _Deafening(bus, AmbiguousWrite("no answer"), ("compare_and_set", "compare_and_delete"))
    copy = StandaloneState()
    yield Place(NatsStore(peer, copy), NatsStore(bus, StandaloneState()), peer, copy)


def stored(outcome: object) -> Stored:
    """Give what was stored."""
    assert isinstance(outcome, Stored), outcome
    return outcome


def reserved(claim: ApiObject) -> ApiObject:
    """Reserve a claim: a change of its status."""
    return msgspec.structs.replace(claim, status={**claim.status, **RESERVED})


def noted(claim: ApiObject, note: str) -> ApiObject:
    """Put a note on a claim: a change of its metadata."""
    return msgspec.structs.replace(claim, metadata={**claim.metadata, "annotations": {"note": note}})


async def test_store_shows_an_object_to_its_copy_and_to_others_when_it_was_made(place: Place) -> None:
    """What was made stands in the copy at once, and whoever reads the store finds it at the same revision."""
    made = stored(await place.store.create(KEY, FRESH))

    assert made.value.spec == FRESH.spec
    assert place.known() == made.value
    seen = await place.rival.get(KEY)
    assert seen is not None
    assert seen.revision == made.revision > 0


async def test_store_makes_nothing_when_an_object_of_the_name_is_there(place: Place) -> None:
    """Of two who make an object of one name the second is told so, and the first one's stands."""
    first = stored(await place.rival.create(KEY, noted(FRESH, "first")))

    assert isinstance(await place.store.create(KEY, noted(FRESH, "second")), Conflict)

    seen = await place.rival.get(KEY)
    assert seen is not None
    assert seen.revision == first.revision


@pytest.mark.parametrize("change", [reserved, lambda claim: noted(claim, "new")], ids=["status", "metadata"])
async def test_store_writes_onto_the_revision_when_nobody_wrote_since(place: Place, change: Any) -> None:
    """A write grows the revision, and the copy shows it at once."""
    made = stored(await place.store.create(KEY, FRESH))

    written = stored(await place.store.put(KEY, made.revision, change(made.value)))

    assert written.revision > made.revision
    assert place.known() == written.value
    assert written.value.status == change(made.value).status
    assert metadata_of(written.value).annotations == metadata_of(change(made.value)).annotations


async def test_store_takes_a_note_off_when_the_object_is_written_without_it(place: Place) -> None:
    """A part that the new object lacks is gone from the store."""
    made = stored(await place.store.create(KEY, noted(FRESH, "old")))
    without = msgspec.structs.replace(made.value, metadata={**made.value.metadata, "annotations": {}})

    written = stored(await place.store.put(KEY, made.revision, without))

    assert metadata_of(written.value).annotations == {}


async def test_store_refuses_a_write_when_somebody_wrote_since(place: Place) -> None:
    """A write that was decided on an older revision changes nothing."""
    made = stored(await place.store.create(KEY, FRESH))
    seen = await place.rival.get(KEY)
    assert seen is not None
    stored(await place.rival.put(KEY, seen.revision, noted(seen.value, "theirs")))

    assert isinstance(await place.store.put(KEY, made.revision, noted(made.value, "ours")), Conflict)

    newest = await place.rival.get(KEY)
    assert newest is not None
    assert metadata_of(newest.value).annotations["note"] == "theirs"


async def test_store_refuses_a_write_when_the_object_is_gone(place: Place) -> None:
    """Nobody writes a deleted object back into being."""
    made = stored(await place.store.create(KEY, FRESH))
    assert isinstance(await place.rival.delete(KEY, made.revision), Deleted)

    assert isinstance(await place.store.put(KEY, made.revision, reserved(made.value)), Conflict)

    assert await place.store.get(KEY) is None


async def test_store_deletes_only_what_was_read_when_it_deletes(place: Place) -> None:
    """A deletion that somebody's write came before is lost; at the present revision the object goes, and a second time it is gone."""
    made = stored(await place.store.create(KEY, FRESH))
    changed = stored(await place.store.put(KEY, made.revision, noted(made.value, "protected")))

    assert isinstance(await place.store.delete(KEY, made.revision), Conflict)
    assert isinstance(await place.store.delete(KEY, changed.revision), Deleted)
    assert isinstance(await place.store.delete(KEY, changed.revision), Conflict)

    assert await place.rival.get(KEY) is None


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_store_says_unknown_when_a_write_has_no_answer(place: Place, lost: str) -> None:
    """A write without an answer is neither done nor undone: it is told as such whichever it was, and a read tells which."""
    made = stored(await place.store.create(KEY, FRESH))
    place.peer.lost = lost

    outcome = await place.store.put(KEY, made.revision, reserved(made.value))

    place.peer.lost = ""
    assert isinstance(outcome, Unknown)
    newest = await place.store.get(KEY)
    assert newest is not None
    assert bool(newest.value.status.get("reservedFor")) == (lost == "answer")


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_store_says_unknown_when_making_has_no_answer(place: Place, lost: str) -> None:
    """The same holds for an object that was to be made."""
    place.peer.lost = lost

    made = await place.store.create(KEY, FRESH)

    assert isinstance(made, Unknown)
    assert (await place.rival.get(KEY) is not None) == (lost == "answer")


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_store_says_unknown_when_deleting_has_no_answer(place: Place, lost: str) -> None:
    """And for one that was to go: it stays where the request was lost."""
    made = stored(await place.store.create(KEY, FRESH))
    place.peer.lost = lost

    deleted = await place.store.delete(KEY, made.revision)

    assert isinstance(deleted, Unknown)
    assert (await place.rival.get(KEY) is None) == (lost == "answer")


async def test_api_server_store_says_why_when_the_namespace_is_not_there(tmp_path: Path) -> None:
    """Nobody was faster: an object that cannot be made must not be taken for one that is there already."""
    async with _api_server(tmp_path) as place:

        async def refuse(*_: Any) -> Rejected:
            return Rejected(code=404, reason="NotFound", message='namespaces "default" not found')

        place.peer._peer.create = refuse

        with pytest.raises(PeerUnavailable, match='404 namespaces "default" not found'):
            await place.store.create(KEY, FRESH)


async def test_writer_raises_what_is_unknown_when_a_write_has_no_answer(place: Place) -> None:
    """A reconciler's work on the object ends there, so that the next round begins with what is there then; a lost write only is dropped."""
    writer = ObjectWriter(place.store)
    made = await writer.create(KEY, FRESH)
    assert made is not None
    place.peer.lost = "answer"

    with pytest.raises(PeerUnavailable):
        await writer.write(KEY, made.revision, reserved(made.value))
    seen = await place.rival.get(KEY)
    assert seen is not None
    with pytest.raises(PeerUnavailable):
        await writer.delete(KEY, seen.revision)


async def test_store_gives_what_it_wrote_when_the_content_is_malformed(bus: Bus) -> None:
    """Telling a pod that nobody can read what is wrong with it is a write like any other: it is stored and known, and no error ends the controller."""
    key = ObjectKey("pod", "default", "spoilt")
    spoilt = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "spoilt", "namespace": "default", "uid": "u"},
        spec={"containers": [{"name": "main", "resources": {"claims": [{}]}}]},
    )
    world = StandaloneState()

    written = stored(await NatsStore(bus, world).create(key, spoilt))

    assert world.objects[key] == written
    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == spoilt
