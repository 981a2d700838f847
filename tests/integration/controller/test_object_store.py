"""One suite for both stores of objects: a bucket of NATS and an API server keep the same promises
to the controller.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.garbage import write_garbage
from support.object_stores import Place, api_server_place, nats_place
from topobus.bus.bus import Bus
from topobus.cli.objects.applying import apply_objects, delete_object
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import metadata_of
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.answers import Rejected
from topobus.values.errors import ContractError, PeerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

KEY = ObjectKey("resourceclaim", "default", "one")
FRESH = ApiObject(
    api_version="resource.k8s.io/v1",
    kind="ResourceClaim",
    metadata={"name": "one", "namespace": "default", "uid": "made-here", "creationTimestamp": "2026-01-01T00:00:00Z"},
    spec={
        "devices": {
            "requests": [
                {"name": "r", "exactly": {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}}
            ]
        }
    },
)
RESERVED = {"allocation": {"devices": {"results": []}}, "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}


@pytest_asyncio.fixture(params=["nats", "api-server"])
async def place(request: pytest.FixtureRequest, bus: Bus, tmp_path: Path) -> AsyncIterator[Place]:
    """Each store in turn."""
    if request.param == "api-server":
        async with api_server_place(tmp_path) as made:
            yield made
        return
    yield nats_place(bus)


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
    """What was made stands in the copy at once, and whoever reads the store finds it at the same
    revision.
    """
    made = stored(await place.store.create(KEY, FRESH))

    assert made.value.spec == FRESH.spec
    assert place.copied(KEY) == made
    seen = await place.rival.read(KEY)
    assert seen is not None
    assert seen.revision == made.revision > 0


async def test_store_makes_nothing_when_an_object_of_the_name_is_there(place: Place) -> None:
    """Of two who make an object of one name the second is told so, and the first one's stands."""
    first = stored(await place.rival.create(KEY, noted(FRESH, "first")))

    assert await place.store.create(KEY, noted(FRESH, "second")) is None

    seen = await place.rival.read(KEY)
    assert seen is not None
    assert seen.revision == first.revision


@pytest.mark.parametrize("change", [reserved, lambda claim: noted(claim, "new")], ids=["status", "metadata"])
async def test_store_writes_onto_the_revision_when_nobody_wrote_since(place: Place, change: Any) -> None:
    """A write grows the revision, and the copy shows it at once."""
    made = stored(await place.store.create(KEY, FRESH))

    written = stored(await place.store.write(KEY, made.revision, change(made.value)))

    assert written.revision > made.revision
    assert place.copied(KEY) == written
    assert written.value.status == change(made.value).status
    assert metadata_of(written.value).annotations == metadata_of(change(made.value)).annotations


async def test_store_takes_a_note_off_when_the_object_is_written_without_it(place: Place) -> None:
    """A part that the new object lacks is gone from the store."""
    made = stored(await place.store.create(KEY, noted(FRESH, "old")))
    without = msgspec.structs.replace(made.value, metadata={**made.value.metadata, "annotations": {}})

    written = stored(await place.store.write(KEY, made.revision, without))

    assert metadata_of(written.value).annotations == {}


async def test_store_refuses_a_write_when_somebody_wrote_since(place: Place) -> None:
    """A write that was decided on an older revision changes nothing."""
    made = stored(await place.store.create(KEY, FRESH))
    seen = await place.rival.read(KEY)
    assert seen is not None
    stored(await place.rival.write(KEY, seen.revision, noted(seen.value, "theirs")))

    assert await place.store.write(KEY, made.revision, noted(made.value, "ours")) is None

    newest = await place.rival.read(KEY)
    assert newest is not None
    assert metadata_of(newest.value).annotations["note"] == "theirs"


async def test_store_refuses_a_write_when_the_object_is_gone(place: Place) -> None:
    """Nobody writes a deleted object back into being."""
    made = stored(await place.store.create(KEY, FRESH))
    assert await place.rival.delete(KEY, made.revision)

    assert await place.store.write(KEY, made.revision, reserved(made.value)) is None

    assert await place.store.read(KEY) is None


async def test_store_deletes_only_what_was_read_when_it_deletes(place: Place) -> None:
    """A deletion that somebody's write came before is lost.

    At the present revision the object goes, and a second time it is gone.
    """
    made = stored(await place.store.create(KEY, FRESH))
    changed = stored(await place.store.write(KEY, made.revision, noted(made.value, "protected")))

    assert not await place.store.delete(KEY, made.revision)
    assert await place.store.delete(KEY, changed.revision)
    assert not await place.store.delete(KEY, changed.revision)

    assert await place.rival.read(KEY) is None


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_store_raises_when_a_write_has_no_answer(place: Place, lost: str) -> None:
    """A write without an answer is neither done nor undone, and no lost write either: a
    reconciler's work on the object ends there. A read tells which it was.
    """
    made = stored(await place.store.create(KEY, FRESH))
    place.peer.lost = lost

    with pytest.raises(PeerUnavailable):
        await place.store.write(KEY, made.revision, reserved(made.value))

    place.peer.lost = ""
    newest = await place.store.read(KEY)
    assert newest is not None
    assert bool(newest.value.status.get("reservedFor")) == (lost == "answer")


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_store_raises_when_making_has_no_answer(place: Place, lost: str) -> None:
    """The same holds for an object that was to be made."""
    place.peer.lost = lost

    with pytest.raises(PeerUnavailable):
        await place.store.create(KEY, FRESH)

    assert (await place.rival.read(KEY) is not None) == (lost == "answer")


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_store_raises_when_deleting_has_no_answer(place: Place, lost: str) -> None:
    """And for one that was to go: it stays where the request was lost."""
    made = stored(await place.store.create(KEY, FRESH))
    place.peer.lost = lost

    with pytest.raises(PeerUnavailable):
        await place.store.delete(KEY, made.revision)

    assert (await place.rival.read(KEY) is None) == (lost == "answer")


async def test_api_server_store_says_why_when_the_namespace_is_not_there(tmp_path: Path) -> None:
    """Nobody was faster: an object that cannot be made must not be taken for one that is there
    already.
    """
    async with api_server_place(tmp_path) as place:

        async def refuse(*_: Any) -> Rejected:
            return Rejected(code=404, reason="NotFound", message='namespaces "default" not found')

        place.peer._peer.create = refuse

        with pytest.raises(PeerUnavailable, match='404 namespaces "default" not found'):
            await place.store.create(KEY, FRESH)


async def test_store_gives_what_it_wrote_when_the_content_is_malformed(bus: Bus) -> None:
    """Telling a pod that nobody can read what is wrong with it is a write like any other: it is
    stored and known, and no error ends the controller.
    """
    key = ObjectKey("pod", "default", "spoilt")
    spoilt = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "spoilt", "namespace": "default", "uid": "u"},
        spec={"containers": [{"name": "main", "resources": {"claims": [{}]}}]},
    )
    state = StandaloneState()

    written = stored(await NatsStore(bus, state).create(key, spoilt))

    assert state.objects[key] == written
    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == spoilt


OTHER = ObjectKey("resourceclaim", "default", "two")


def _named(key: ObjectKey) -> ApiObject:
    """The claim under another name."""
    return msgspec.structs.replace(FRESH, metadata={**FRESH.metadata, "name": key.name, "uid": f"uid-{key.name}"})


async def test_watch_tells_what_exists_and_then_what_others_write(place: Place) -> None:
    """A copy that was empty has all objects when the watch says so, and each later change of
    somebody else once its revision is reached.
    """
    first = stored(await place.rival.create(KEY, FRESH))
    watched = place.watched("resourceclaim")
    async with watched.running() as watch:
        copied = place.copied(KEY)
        changed = stored(await place.rival.write(KEY, first.revision, noted(first.value, "theirs")))
        made = stored(await place.rival.create(OTHER, _named(OTHER)))

        assert await watch.reached(made.revision, 10)

    assert copied is not None
    assert copied.revision == first.revision
    assert [place.copied(key) and place.copied(key).revision for key in (KEY, OTHER)] == [
        changed.revision,
        made.revision,
    ]  # type: ignore[union-attr]
    assert (watch.is_whole, watch.trouble, watched.refused) == (True, "", [])


async def test_watch_has_reached_what_was_there_when_nothing_follows(place: Place) -> None:
    """The end of the list is as far as its newest object.

    A revision that never comes is not reached.
    """
    made = stored(await place.rival.create(KEY, FRESH))
    async with place.watched("resourceclaim").running() as watch:
        assert await watch.reached(made.revision, 10)
        assert not await watch.reached(made.revision + 1000, 0.01)


async def test_watch_drops_an_object_when_somebody_deletes_it(place: Place) -> None:
    """What is deleted at the store goes from the copy, and its neighbour stays."""
    made = stored(await place.rival.create(KEY, FRESH))
    stored(await place.rival.create(OTHER, _named(OTHER)))
    watched = place.watched("resourceclaim")
    async with watched.running():
        assert await place.rival.delete(KEY, made.revision)
        await watched.until(lambda: place.copied(KEY) is None)

    assert place.copied(OTHER) is not None


@pytest.mark.parametrize("later", ["changed", "deleted"])
async def test_copy_shows_what_came_after_a_write_when_the_watch_is_faster_than_the_answer(
    place: Place, later: str
) -> None:
    """An answer that is late brings back neither what was replaced since nor what was deleted."""
    made = stored(await place.store.create(KEY, FRESH))
    watched = place.watched("resourceclaim")
    newest: list[Stored] = []

    async def others_go_on() -> None:
        ours = await place.rival.read(KEY)
        assert ours is not None
        if later == "deleted":
            assert await place.rival.delete(KEY, ours.revision)
            await watched.until(lambda: place.copied(KEY) is None)
            return
        newest.append(stored(await place.rival.write(KEY, ours.revision, noted(ours.value, "theirs"))))
        await watched.until(lambda: (copied := place.copied(KEY)) and copied.revision == newest[0].revision)

    async with watched.running():
        place.peer.before_answer = others_go_on
        stored(await place.store.write(KEY, made.revision, noted(made.value, "ours")))

        copied = place.copied(KEY)

    assert (copied and copied.revision) == (newest[0].revision if newest else None)


async def test_watch_drops_what_went_while_nobody_watched(place: Place) -> None:
    """After a gap of which the store keeps no history the objects are told anew: who is not among
    them is gone, also one made anew under its name.
    """
    kept = ObjectKey("resourceclaim", "default", "kept")
    gone, old = stored(await place.rival.create(KEY, FRESH)), stored(await place.rival.create(OTHER, _named(OTHER)))
    stored(await place.rival.create(kept, _named(kept)))
    watched = place.watched("resourceclaim")
    async with watched.running():
        pass
    for lost in (gone, old):
        key = ObjectKey("resourceclaim", "default", lost.value.metadata["name"])
        assert await place.rival.delete(key, lost.revision)
    again = stored(await place.rival.create(OTHER, noted(_named(OTHER), "again")))
    place.forget_history()

    async with watched.running() as watch:
        assert await watch.reached(again.revision, 10)
        await watched.until(lambda: place.copied(KEY) is None)

    copied = place.copied(OTHER)
    assert copied is not None
    assert (copied.revision, metadata_of(copied.value).annotations["note"]) == (again.revision, "again")
    assert place.copied(kept) is not None


async def test_watch_goes_on_when_an_object_is_garbage(place: Place) -> None:
    """An object that nobody can read is told once, in a list and as a change, and those around it
    are taken in.
    """
    for name, uses in (("a", []), ("b", [{"name": 5}]), ("c", [])):
        await place.write_raw(_pod(name, uses))
    watched = place.watched("pod")
    async with watched.running():
        assert [refusal.split(":")[0] for refusal in watched.refused] == ["Pod default/b"]
        for name, uses in (("d", [{"name": 5}]), ("e", [])):
            await place.write_raw(_pod(name, uses))
        await watched.until(lambda: place.copied(ObjectKey("pod", "default", "e")))

    assert [refusal.split(":")[0] for refusal in watched.refused] == ["Pod default/b", "Pod default/d"]
    assert all(place.copied(ObjectKey("pod", "default", name)) for name in "ace")


def _pod(name: str, more_uses: list[dict[str, object]]) -> ApiObject:
    """Make a pod that uses a claim; more uses may be malformed."""
    return ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": name, "namespace": "default", "uid": f"uid-{name}"},
        spec={"resourceClaims": [{"name": "r", "resourceClaimName": "c"}, *more_uses]},
    )


async def test_watch_falls_back_to_the_newest_readable_version_when_garbage_stands_there(bus: Bus) -> None:
    """What the server was made to write over an object takes nothing away: the copy goes on with
    the last good version, and the next write heals the key.
    """
    place = nats_place(bus)
    made = stored(await place.store.create(KEY, FRESH))
    noted_last = stored(await place.store.write(KEY, made.revision, noted(FRESH, "last")))
    revision = await write_garbage(bus, OBJECT, **KEY._asdict())

    restarted = nats_place(bus)
    async with restarted.watched("resourceclaim").running():
        copied = restarted.copied(KEY)
        assert copied is not None
        healed = stored(await restarted.store.write(KEY, copied.revision, reserved(copied.value)))

    assert (copied.revision, copied.value) == (revision, noted_last.value)
    assert healed.revision > revision
    entry = await bus.get(OBJECT, **KEY._asdict())
    assert entry is not None
    assert entry.value == reserved(noted_last.value)


async def test_watch_leaves_an_object_alone_when_another_release_wrote_what_it_cannot_read(bus: Bus) -> None:
    """It may be right for that release: nothing is written over it."""
    place = nats_place(bus)
    stored(await place.store.create(KEY, FRESH))
    await write_garbage(bus, OBJECT, release="99.0.0", **KEY._asdict())

    restarted = nats_place(bus)
    async with restarted.watched("resourceclaim").running():
        pass

    assert restarted.copied(KEY) is None


async def test_delete_and_apply_work_at_the_revision_when_nobody_can_read_the_object(bus: Bus) -> None:
    """The CLI writes over garbage and keeps the last readable version's uid and status, asks for
    the end of what holds something, and deletes what has no readable version.
    """
    held = msgspec.structs.replace(
        FRESH, metadata={**FRESH.metadata, "finalizers": ["resource.kubernetes.io/delete-protection"]}, status=RESERVED
    )
    for name in ("applied", "deleted"):
        parts = {**KEY._asdict(), "name": name}
        await bus.put(OBJECT, msgspec.structs.replace(held, metadata={**held.metadata, "name": name}), **parts)
        await write_garbage(bus, OBJECT, **parts)
    await write_garbage(bus, OBJECT, kind="pod", namespace="default", name="unknown")
    wanted = msgspec.structs.replace(FRESH, metadata={"name": "applied", "namespace": "default"})

    (applied,) = await apply_objects(bus, [wanted])
    marked = await delete_object(bus, {**KEY._asdict(), "name": "deleted"})
    gone = await delete_object(bus, {"kind": "pod", "namespace": "default", "name": "unknown"})

    assert (applied.verb, applied.stored.status) == ("written over what could not be read", RESERVED)
    assert applied.stored.metadata["uid"] == "made-here"
    assert marked.metadata["deletionTimestamp"]
    entry = await bus.get(OBJECT, **{**KEY._asdict(), "name": "deleted"})
    assert entry is not None
    assert entry.value == marked
    assert (gone.api_version, await bus.get(OBJECT, kind="pod", namespace="default", name="unknown")) == ("", None)


async def test_apply_reads_each_object_once_and_again_only_when_somebody_wrote_meanwhile(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked at before the first write is what the write goes by.

    A status that came after the look is kept.
    """
    named = [msgspec.structs.replace(FRESH, metadata={**FRESH.metadata, "name": name}) for name in ("first", "second")]
    await bus.put(OBJECT, named[0], **{**KEY._asdict(), "name": "first"})
    read: list[str] = []
    get_or_last = bus.get_or_last

    async def read_and_reserve(*catalogued: Any, **parts: str) -> Any:
        """The controller reserves the first one as soon as it was looked at."""
        entry = await get_or_last(*catalogued, **parts)
        read.append(parts["name"])
        if read == ["first"]:
            await bus.put(OBJECT, reserved(named[0]), **parts)
        return entry

    monkeypatch.setattr(bus, "get_or_last", read_and_reserve)
    changed = [
        msgspec.structs.replace(api_object, metadata={**api_object.metadata, "labels": {"a": "b"}})
        for api_object in named
    ]

    applied = await apply_objects(bus, changed)
    again = await apply_objects(bus, changed, is_dry_run=True)

    assert read == ["first", "second", "first", "first", "second"]
    assert [(each.verb, each.stored.status) for each in applied] == [("changed", RESERVED), ("created", {})]
    assert [each.verb for each in again] == ["unchanged", "unchanged"]


async def test_apply_writes_nothing_when_an_object_stands_twice_in_a_manifest(bus: Bus) -> None:
    """The second one would be written over the first."""
    with pytest.raises(ContractError, match="default/one is twice in the manifest"):
        await apply_objects(bus, [FRESH, FRESH])

    assert await bus.get(OBJECT, **KEY._asdict()) is None
