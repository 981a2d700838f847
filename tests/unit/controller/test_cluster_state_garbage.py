"""The copy of a cluster takes in or refuses any object, and what a claim holds is never lost over
one that nobody can read.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support.cluster_home import CLASS, claim, node, slice_of
from support.cluster_poison import WHOLE, poison
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster_objects import read_object
from topobus.engine.allocation.values import DeviceId, Mode
from topobus.engine.claims.objects import Claim
from topobus.values.errors import ContractError

GPU = DeviceId(CLASS, "n1", "n1-gpu-0")


def _state() -> ApiServerState:
    """A node with two devices."""
    state = ApiServerState()
    for plain in (node("n1"), slice_of("n1", 2)):
        state.put(str(plain["kind"]), "v1", plain)
    return state


def _holding(name: str = "holder") -> dict[str, Any]:
    """A claim that has the node's first device."""
    held = claim(name, uid="u", resourceVersion="5")
    held["status"] = {
        "allocation": {"devices": {"results": [{"request": "r", "driver": CLASS, "pool": "n1", "device": "n1-gpu-0"}]}}
    }
    return held


def _holders(state: ApiServerState) -> dict[DeviceId, str]:
    """Say who holds what on the node, as another claim sees it."""
    other = read_object("ResourceClaim", "v1", claim("other", uid="o"))
    assert other is not None
    return dict(state.input_for("n1", [(Claim(other), None)], mode=Mode.CORRECTED).usage.holders)  # type: ignore[list-item]  # the spec is not looked at


@pytest.mark.parametrize("what", sorted(WHOLE))
def test_world_takes_in_or_refuses_every_malformed_object(what: str) -> None:
    """Whatever one place of an object is, the copy has it or says why not.

    What was there before is as it was.
    """
    kind, whole = WHOLE[what]
    state = _state()
    state.put("ResourceClaim", "v1", _holding())
    refusals: list[str] = []
    for version in kind.versions:
        for plain in poison(whole):
            try:
                state.put(kind.name, version, plain)
            except ContractError as err:
                refusals.append(str(err))

    assert len(refusals) > 10
    assert all(refusals)
    assert _holders(state)[GPU] == "claim default/holder"


@pytest.mark.parametrize("spoil", ["annotations", "status", "reservedFor"])
def test_claim_keeps_its_devices_when_it_becomes_malformed(spoil: str) -> None:
    """A claim that was read before holds what it held until it is gone, and nobody is told to let
    go.
    """
    state = _state()
    state.put("ResourceClaim", "v1", _holding())
    worse = _spoilt(spoil)
    with pytest.raises(ContractError):
        state.put("ResourceClaim", "v1", worse)

    assert _holders(state)[GPU] == "claim default/holder"
    assert ("default", "holder") not in state.claims
    assert state.unreleased == {}
    state.drop("ResourceClaim", ("default", "holder"))
    assert GPU not in _holders(state)


def test_claim_stays_when_an_older_version_comes_late_and_is_malformed() -> None:
    """What this replica wrote is known before the watch brings the version that it mended."""
    state = _state()
    state.put("ResourceClaim", "v1", _holding())
    late = _spoilt("reservedFor")
    late["metadata"]["resourceVersion"] = "4"
    state.put("ResourceClaim", "v1", late)

    assert state.claims["default", "holder"].revision == 5


@pytest.mark.parametrize("spoil", ["annotations", "reservedFor"])
def test_claim_holds_what_it_names_when_it_was_never_readable(spoil: str) -> None:
    """A replica that starts beside a malformed claim gives its devices to nobody else."""
    state = _state()
    with pytest.raises(ContractError):
        state.put("ResourceClaim", "v1", _spoilt(spoil))

    assert _holders(state)[GPU] == "claim default/holder"


def test_claim_is_worked_on_again_when_it_is_mended() -> None:
    """The mended claim is the one that counts."""
    state = _state()
    with pytest.raises(ContractError):
        state.put("ResourceClaim", "v1", _spoilt("annotations"))
    mended = claim("holder", uid="u", resourceVersion="9")
    state.put("ResourceClaim", "v1", mended)

    assert ("default", "holder") in state.claims
    assert GPU not in _holders(state)


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
