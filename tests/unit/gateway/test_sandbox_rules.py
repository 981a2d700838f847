"""Promises of the rules around a pod's sandbox: what may go where, and what an answer of a device
service may say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from topobus.gateway.containers.rules.sandbox_rules import refuse_interfaces, refuse_sandbox, refuse_taken
from topobus.values.sandbox import AttachedInterface, Sandbox


@dataclass(frozen=True)
class Claim:
    """A claim with one device."""

    namespace: str = "default"
    name: str = "net"
    to_attach: tuple[str, ...] = ("nic-0",)


SANDBOX = Sandbox(id="s1", uid="u1", namespace="default", name="app", network_namespace="/var/run/netns/a")
ANEW = Sandbox(id="s2", uid="u1", namespace="default", name="app", network_namespace="/var/run/netns/b")
OTHER = Sandbox(id="s3", uid="u3", namespace="default", name="other", network_namespace="/var/run/netns/c")
GOOD = AttachedInterface(name="net1", mac="02:00:00:00:00:01", addresses=("10.1.2.3/24", "fd00::3/64"), mtu=1400)
WRONG = {
    "name-too-long": (AttachedInterface(name="x" * 16), "the interface name"),
    "name-with-a-slash": (AttachedInterface(name="a/b"), "the interface name"),
    "name-with-a-newline": (AttachedInterface(name="a\nb"), "the interface name"),
    "no-name": (AttachedInterface(name=""), "the interface name"),
    "mac-in-capitals": (AttachedInterface(name="net1", mac="02:00:00:00:00:0A"), "the MAC"),
    "address-of-words": (AttachedInterface(name="net1", addresses=("home",)), "the address 'home'"),
    "address-without-prefix": (AttachedInterface(name="net1", addresses=("10.1.2.3",)), "without its prefix"),
    "too-many-addresses": (AttachedInterface(name="net1", addresses=("10.1.2.3/24",) * 17), "17 addresses"),
}


def test_sandbox_is_taken_when_it_has_a_namespace_of_its_own() -> None:
    """Nothing stands in the way of an ordinary pod."""
    assert refuse_sandbox(Claim(), SANDBOX) is None


@pytest.mark.parametrize(
    ("sandbox", "code"),
    [
        (Sandbox(id="s1", uid="u1", namespace="default", name="app"), "pod-on-host-network"),
        (Sandbox(id="s1", uid="u1", namespace="elsewhere", name="app", network_namespace="/n"), "claim-not-for-pod"),
    ],
    ids=["host-network", "other-namespace"],
)
def test_sandbox_is_refused_when_nothing_can_be_moved_into_it(sandbox: Sandbox, code: str) -> None:
    """The reason's code says which of the two it is."""
    refusal = refuse_sandbox(Claim(), sandbox)

    assert refusal is not None
    assert refusal.reasons[0].code == code


def test_device_is_taken_only_while_another_pods_sandbox_lives() -> None:
    """A former sandbox of the same pod, and one that is gone, hold nothing.

    The reason names the pod that does.
    """
    alive = {sandbox.id: sandbox for sandbox in (SANDBOX, OTHER)}

    assert refuse_taken(Claim(), None, OTHER, alive) is None
    assert refuse_taken(Claim(), SANDBOX, ANEW, alive) is None
    assert refuse_taken(Claim(), SANDBOX, OTHER, {OTHER.id: OTHER}) is None
    refusal = refuse_taken(Claim(), SANDBOX, OTHER, alive)
    assert refusal is not None
    assert "nic-0 is in pod default/app (uid u1)" in refusal.reasons[0].message


def test_answer_is_taken_when_it_can_be_true() -> None:
    """A device that is no interface is absent from it."""
    assert refuse_interfaces(Claim(), {"nic-0": GOOD}) is None
    assert refuse_interfaces(Claim(), {}) is None


@pytest.mark.parametrize(("interface", "what"), WRONG.values(), ids=WRONG)
def test_answer_is_refused_when_it_cannot_be_true(interface: AttachedInterface, what: str) -> None:
    """It goes into the claim's status for everybody to read."""
    refusal = refuse_interfaces(Claim(), {"nic-0": interface})

    assert refusal is not None
    assert what in refusal.reasons[0].message


def test_answer_is_refused_when_it_names_a_device_that_was_not_asked_for() -> None:
    """Another claim's device has no place in this one's status."""
    refusal = refuse_interfaces(replace(Claim(), to_attach=("nic-0",)), {"nic-1": GOOD})

    assert refusal is not None
    assert "'nic-1', which was not asked for" in refusal.reasons[0].message
