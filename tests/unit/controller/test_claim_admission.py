"""What an API server refuses when a claim is created: admin access outside of its namespaces,
selectors that cost too much.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.standalone.validate_classes import validate
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.admission import admin_problem, asks_admin, costly_selector
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from unit.controller.allocation import COMPILER

COSTLY = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10].all(a, " * 7 + "true" + ")" * 7


def spec(*exactly: dict[str, Any], alternatives: list[dict[str, Any]] | None = None) -> ClaimSpec:
    """Make the spec of a claim with requests r0, r1 and so on; alternatives make one more."""
    requests: list[dict[str, Any]] = [
        {"name": f"r{index}", "exactly": {"deviceClassName": "gpu", **fields}} for index, fields in enumerate(exactly)
    ]
    if alternatives is not None:
        requests.append({"name": "alt", "firstAvailable": alternatives})
    return read_as({"devices": {"requests": requests}}, ClaimSpec, where="claim")


@pytest.mark.parametrize(
    ("labels", "is_refused"),
    [
        pytest.param({}, True, id="no-label"),
        pytest.param({"resource.kubernetes.io/admin-access": "true"}, False, id="label"),
        pytest.param({"resource.kubernetes.io/admin-access": "yes"}, True, id="other-value"),
        pytest.param({"resource.k8s.io/admin-access": "true"}, True, id="other-name"),
    ],
)
def test_admin_access_needs_the_namespaces_label(labels: dict[str, str], is_refused: bool) -> None:
    """A claim that asks for admin access is refused where its namespace does not allow it, and told
    the label.
    """
    state = StandaloneState()
    namespace = ApiObject(api_version="v1", kind="Namespace", metadata={"name": "ops", "labels": labels})
    state.put_object(ObjectKey("namespace", CLUSTER, "ops"), Stored(1, namespace))

    reason = admin_problem(spec({}, {"adminAccess": True}), "ops", state.labels_of)

    assert (reason is not None) is is_refused
    if reason is not None:
        assert reason.code == "admin-access-forbidden"
        assert "request r1" in reason.message
        assert "resource.kubernetes.io/admin-access=true" in reason.message


def test_admin_access_is_nobodys_business_when_it_is_not_asked() -> None:
    """A claim without admin access, or with `false`, needs no label."""
    assert asks_admin(spec({}, {"adminAccess": False})) == ""
    assert admin_problem(spec({}, {"adminAccess": False}), "ops", StandaloneState().labels_of) is None


def test_selector_is_refused_when_it_may_cost_too_much() -> None:
    """Request, selector, estimate and limit are named; in alternatives, too.

    One that does not compile is left to the search.
    """
    costly = {"selectors": [{"cel": {"expression": "true"}}, {"cel": {"expression": COSTLY}}]}

    reason = costly_selector(spec({}, costly), "claim c", COMPILER)
    other = costly_selector(
        spec(alternatives=[{"name": "a", "deviceClassName": "gpu"}, {"name": "b", **costly}]), "claim c", COMPILER
    )

    assert reason is not None
    assert reason.code == "selector-error"
    assert "request r1: selector #1 is too complex" in reason.message
    assert "wanted at most 1000000" in reason.message
    assert other is not None
    assert other.facts["request"] == "alt/b"
    assert (
        costly_selector(spec({"selectors": [{"cel": {"expression": "1 +"}}, {"rego": {}}]}), "claim c", COMPILER)
        is None
    )


def test_class_is_invalid_when_a_selector_may_cost_too_much() -> None:
    """A class tells so before a claim names it."""
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceClass",
        metadata={"name": "gpu"},
        spec={"selectors": [{"cel": {"expression": COSTLY}}]},
    )

    reason, message = validate(api_object, COMPILER)

    assert reason == "Invalid"
    assert "too complex" in message
