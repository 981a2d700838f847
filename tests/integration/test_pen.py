"""The controller's one way of writing objects, on a real server."""

from __future__ import annotations

import pytest

from topobus.contracts.catalogue import OBJECT
from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import ObjectKey
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.object_writer import ObjectWriter
from topobus.runtime.bus import Bus

pytestmark = pytest.mark.integration


async def test_pen_gives_what_it_wrote_when_the_content_is_malformed(bus: Bus) -> None:
    """Telling a pod that nobody can read what is wrong with it is a write like any other: it is stored and known, and no error ends the controller."""
    key = ObjectKey("pod", "default", "spoilt")
    spoilt = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "spoilt", "namespace": "default", "uid": "u"},
        spec={"containers": [{"name": "main", "resources": {"claims": [{}]}}]},
    )
    world = StandaloneState()

    written = await ObjectWriter(bus, world).write(key, 0, spoilt)

    assert written is not None
    assert world.objects[key] == written
    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == spoilt
