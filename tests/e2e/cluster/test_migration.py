"""Claims for NVIDIA's DRA driver while some nodes have it and others have Topobus: kube-scheduler
serves them from both by the classes of examples/migration/nvidia-classes.yaml.

A control plane without nodes is enough (TOPOBUS_CLUSTER_INSTALLATION=none, KUBECONFIG).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from support.installation import setting
from support.why_objects import Plain, asks, claim, node, nvidia_gpus, pod, slice_of
from support.why_plane import WhyPlane

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        setting("INSTALLATION") != "none",
        reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `none`",
    ),
]

_CLASSES = Path(__file__).parents[3] / "examples" / "migration" / "nvidia-classes.yaml"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[WhyPlane]:
    """The control plane, with an empty namespace."""
    async with WhyPlane.open(os.environ["KUBECONFIG"]) as opened:
        yield opened


def ours() -> Plain:
    """A GPU as a gateway with the profile `nvidia` publishes it, as far as claims select by it."""
    attributes = {"class": "gpu", "gpu.nvidia.com/type": "gpu", "gpu.nvidia.com/productName": "NVIDIA H100 80GB HBM3"}
    return {
        "name": "gpu-0000-18-00-0",
        "attributes": {name: {"string": value} for name, value in attributes.items()},
        "capacity": {"gpu.nvidia.com/memory": {"value": "80Gi"}},
    }


async def test_claims_are_served_from_nodes_of_both_drivers(plane: WhyPlane) -> None:
    """Two GPUs, one by each driver: two of three pods have a node, one each; a selector of the user's
    own holds on both.
    """
    own = "device.attributes['gpu.nvidia.com'].productName.lowerAscii().contains('h100')"
    names = ("first", "second", "third")
    classes = list(yaml.safe_load_all(_CLASSES.read_text(encoding="utf-8")))
    slices = [slice_of("gpu.nvidia.com", "theirs", nvidia_gpus(1)), slice_of("topobus.dev", "ours", [ours()])]
    wanted = [claim(name, asks("gpu.nvidia.com", 1, own)) for name in names]
    async with plane.cleaned():
        placed = await plane.make(
            [*classes, *slices, node("theirs"), node("ours"), *wanted], [pod(name, name) for name in names]
        )

    assert sorted(placed.values()) == ["", "ours", "theirs"]
