"""What kube-scheduler says of a pod that it does not place, and which of it names a rule that is
not looked at here.
"""

from __future__ import annotations

import pytest

from topobus.engine.scheduling.kube_rules.scheduler_reasons import uncovered_reasons

PREEMPTION = " preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("0/4 nodes are available: 1 Insufficient cpu, 3 cannot allocate all claims." + PREEMPTION, ()),
        (
            "0/4 nodes are available: 1 node(s) did not have enough free storage, 3 resourceclaim not "
            "available on the node." + PREEMPTION,
            ("node(s) did not have enough free storage",),
        ),
        (
            "0/2 nodes are available: 2 node(s) had no available disk, 2 node(s) had no available disk.",
            ("node(s) had no available disk",),
        ),
        ("0/9 nodes are available: 1 Insufficient cpu, 8 node(s) didn't satisfy plugin(s) [NodeAffinity].", ()),
        (
            "0/2 nodes are available: 2 node(s) didn't satisfy plugin(s) [Rack].",
            ("node(s) didn't satisfy plugin(s) [Rack]",),
        ),
        # A plugin that somebody added, with a comma in its words.
        (
            "0/2 nodes are available: 1 the rack, and its twin, are cold, 1 Too many pods.",
            ("the rack, and its twin, are cold",),
        ),
        # Before any node is looked at.
        (
            "0/2 nodes are available: waiting for minCount pods from a gang to appear in scheduling queue.",
            ("waiting for minCount pods from a gang to appear in scheduling queue",),
        ),
        ('0/2 nodes are available: persistentvolumeclaim "data" not found. not found', ()),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {example.com/a.b: 7}. no new claims to "
            "deallocate," + PREEMPTION,
            (),
        ),
        ("0/2 nodes: insufficient cpu", ()),
        (
            "csi.example.com CSI driver is not installed on the node",
            ("csi.example.com CSI driver is not installed on the node",),
        ),
        ("", ()),
    ],
)
def test_reasons_of_rules_that_are_not_looked_at_are_named_in_the_schedulers_words(
    message: str, expected: tuple[str, ...]
) -> None:
    """What is looked at, what speaks of the claims, and what preemption would do is left out."""
    assert uncovered_reasons(message) == expected
