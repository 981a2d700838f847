"""The copy of a cluster takes in or refuses any object, and what a claim holds is never lost over one that nobody can read."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support.cluster_home import CLASS, claim, node, slice_of
from support.cluster_poison import WHOLE, poison
from topobus.controller.allocation.values import DeviceId, Mode
from topobus.controller.claims.objects import Claim
from topobus.controller.state.api_server_state import ApiServerState
from topobus.controller.state.cluster_objects import read_object
from topobus.domain.errors import ContractError

GPU = DeviceId(CLASS, "n1", "n1-gpu-0")


def _world() -> ApiServerState:
    """A node with two devices."""
    world = ApiServerState()
    for plain in (node("n1"), slice_of("n1", 2)):
        world.put(str(plain["kind"]), "v1", plain)
    return world


def _holding(name: str = "holder") -> dict[str, Any]:
    """A claim that has the node's first device."""
    held = claim(name, uid="u", resourceVersion="5")
    held["status"] = {"allocation": {"devices": {"results": [{"request": "r", "driver": CLASS, "pool": "n1", "device": "n1-gpu-0"}]}}}
    return held


def _holders(world: ApiServerState) -> dict[DeviceId, str]:
    """Say who holds what on the node, as another claim sees it."""
    other = read_object("ResourceClaim", "v1", claim("other", uid="o"))
    assert other is not None
    return dict(world.input_for("n1", [(Claim(other), None)], mode=Mode.CORRECTED).usage.holders)  # type: ignore[list-item]  # the spec is not looked at


@pytest.mark.parametrize("what", sorted(WHOLE))
def test_world_takes_in_or_refuses_every_malformed_object(what: str) -> None:
    """Whatever one place of an object is, the copy has it or says why not; what was there before is as it was."""
    kind, whole = WHOLE[what]
    world = _world()
    world.put("ResourceClaim", "v1", _holding())
    refusals: list[str] = []
    for version in kind.versions:
        for plain in poison(whole):
            try:
                world.put(kind.name, version, plain)
            except ContractError as err:
                refusals.append(str(err))

    assert len(refusals) > 10
    assert all(refusals)
    assert _holders(world)[GPU] == "claim default/holder"


@pytest.mark.parametrize("spoil", ["annotations", "status", "reservedFor"])
def test_claim_keeps_its_devices_when_it_becomes_malformed(spoil: str) -> None:
    """A claim that was read before holds what it held until it is gone, and nobody is told to let go."""
    world = _world()
    world.put("ResourceClaim", "v1", _holding())
    worse = _spoilt(spoil)
    with pytest.raises(ContractError):
        world.put("ResourceClaim", "v1", worse)

    assert _holders(world)[GPU] == "claim default/holder"
    assert ("default", "holder") not in world.claims
    assert world.let_go == {}
    world.drop("ResourceClaim", ("default", "holder"))
    assert GPU not in _holders(world)


@pytest.mark.parametrize("spoil", ["annotations", "reservedFor"])
def test_claim_holds_what_it_names_when_it_was_never_readable(spoil: str) -> None:
    """A replica that starts beside a malformed claim gives its devices to nobody else."""
    world = _world()
    with pytest.raises(ContractError):
        world.put("ResourceClaim", "v1", _spoilt(spoil))

    assert _holders(world)[GPU] == "claim default/holder"


def test_claim_is_worked_on_again_when_it_is_mended() -> None:
    """The mended claim is the one that counts."""
    world = _world()
    with pytest.raises(ContractError):
        world.put("ResourceClaim", "v1", _spoilt("annotations"))
    mended = claim("holder", uid="u", resourceVersion="9")
    world.put("ResourceClaim", "v1", mended)

    assert ("default", "holder") in world.claims
    assert GPU not in _holders(world)


def _spoilt(place: str) -> dict[str, Any]:
    worse = copy.deepcopy(_holding())
    worse["metadata"]["resourceVersion"] = "6"
    if place == "annotations":
        worse["metadata"]["annotations"] = 7
    elif place == "status":
        worse["status"]["allocation"] = {"devices": 7}
    else:
        worse["status"]["reservedFor"] = [{"name": 7}, 7]
    return worse
