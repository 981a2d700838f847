"""What an event tells somebody to do: waiting only where something ends by itself."""

from __future__ import annotations

import pytest

from topobus.gateway.cluster.rules.next_steps import AGAIN, next_step


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("name-taken", "interface.name"),
        ("interface-config-invalid", "correct the configuration"),
        ("vf-refused", "correct the configuration"),
        ("share-failed", "correct the configuration"),
        ("hand-over-failed", "log"),
        ("address-in-use", "another address"),
        ("attach-unsupported", "rights"),
        ("not-permitted", "rights"),
        ("package-missing", "install"),
        ("attach-failed", "log"),
        ("attach-malformed", "log"),
        ("claim-not-for-pod", "claims of its own"),
        ("cpu-of-claim", "other claim's pod"),
        ("device-in-another-pod", "a claim of its own"),
        ("journal-unreadable", "log"),
        ("pod-on-host-network", "hostNetwork"),
        ("undo-failed", "log"),
        ("work-overdue", "log"),
    ],
)
def test_step_says_what_to_do_when_waiting_ends_nothing(code: str, words: str) -> None:
    """These last until somebody does something: a pod's eth0 stays where it is, a right does not
    come by itself.
    """
    assert words in next_step(code)
    assert next_step(code) != AGAIN


@pytest.mark.parametrize(
    "code", ["address-not-ready", "attach-pending", "attach-unanswered", "vf-gone", "device-dirty", "claim-busy"]
)
def test_step_is_to_wait_when_it_ends_by_itself(code: str) -> None:
    """Nobody is sent to mend what comes right without them."""
    assert next_step(code) == AGAIN
