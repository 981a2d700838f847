"""Which claims belong to pods that are not stored any more."""

from __future__ import annotations

from topobus.controller.state.pod_links import PodLinks
from topobus.engine.claims.reservations import Consumer
from topobus.engine.claims.stored import ObjectKey

POD = ObjectKey("pod", "default", "trainer")
MADE, SHARED = (ObjectKey("resourceclaim", "default", name) for name in ("made", "shared"))


def _user(uid: str, name: str = "trainer", resource: str = "pods") -> Consumer:
    return Consumer(resource, name, uid)


def test_claims_are_named_when_their_pod_goes() -> None:
    """The claim that was made for a pod, and the one that it has reserved."""
    links = PodLinks()
    links.put_pod(POD, "u1")
    links.put_claim(MADE, "u1", [])
    links.put_claim(SHARED, None, [_user("u1")])
    before = (links.owned_by_gone_pods(), links.reserved_by_gone_pods())

    links.drop_pod(POD)

    assert before == ([], [])
    assert (links.owned_by_gone_pods(), links.reserved_by_gone_pods()) == ([MADE], [SHARED])


def test_claims_are_named_when_another_pod_has_the_name() -> None:
    """A pod that was made anew under the same name is another one."""
    links = PodLinks()
    links.put_pod(POD, "u1")
    links.put_claim(SHARED, "u1", [_user("u1")])

    links.put_pod(POD, "u2")

    assert (links.owned_by_gone_pods(), links.reserved_by_gone_pods()) == ([SHARED], [SHARED])


def test_claim_is_named_once_when_two_of_its_users_are_gone() -> None:
    """And not any more when one that is stored has it alone."""
    links = PodLinks()
    links.put_pod(POD, "u1")
    links.put_claim(SHARED, None, [_user("u1"), _user("u2", "a"), _user("u3", "b")])
    both = links.reserved_by_gone_pods()

    links.put_claim(SHARED, None, [_user("u1")])

    assert both == [SHARED]
    assert links.reserved_by_gone_pods() == []


def test_users_that_are_no_pods_are_not_looked_for() -> None:
    """Nobody here knows of what else may reserve a claim."""
    links = PodLinks()

    links.put_claim(SHARED, None, [_user("u1", resource="jobs")])

    assert links.reserved_by_gone_pods() == []


def test_uid_is_known_while_one_of_two_pods_has_it() -> None:
    """Malformed as that is, a claim is not taken from the pod that is left."""
    links, other = PodLinks(), ObjectKey("pod", "default", "other")
    links.put_pod(POD, "")
    links.put_pod(other, "")
    links.put_claim(MADE, "", [])

    links.drop_pod(POD)
    links.drop_pod(POD)

    assert links.owned_by_gone_pods() == []
