"""What `topobus what-if` says of a hundred pods, against what kube-scheduler then does with each.

A control plane without nodes is enough, as for `test_why.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from support.installation import setting
from support.what_if_clusters import NEW_NODE, Change, changes
from support.why_objects import Plain
from support.why_plane import WhyPlane

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        setting("INSTALLATION") != "none",
        reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `none`",
    ),
]

_SEEDS = (1, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[WhyPlane]:
    """The control plane, with an empty namespace."""
    async with WhyPlane.open(os.environ["KUBECONFIG"]) as opened:
        yield opened


@pytest.mark.parametrize(
    "change", [pytest.param(each, id=f"{each.name}-{seed}") for seed in _SEEDS for each in changes(seed)]
)
async def test_what_if_predicts_which_pods_have_a_node(plane: WhyPlane, change: Change, tmp_path: Path) -> None:
    """With the change made, kube-scheduler binds each pod that was said to have a place, and no other.

    All pods that wait then are made again, in the order of their priorities: in which order
    kube-scheduler tries them again otherwise depends on how long it has put each off.
    """
    async with plane.cleaned():
        before = await plane.make(
            [*change.objects, *(claim for claim, _ in change.pods)], [pod for _, pod in change.pods]
        )
        homeless = [name for name, node in before.items() if not node or f"node/{node}" in change.without]
        put = [*change.put, *(claim for claim in change.claims if claim["metadata"]["name"] in homeless)]
        put += await _slices(change.machine) if change.machine else ()
        said = await _asked(put, change.without, tmp_path)

        gone = {each.rpartition("/")[2] for each in change.without if each.startswith("pod/")}
        # Those that wait first: kube-scheduler would begin to give them what the others leave, and of a claim
        # whose pod is deleted meanwhile nothing takes the devices back.
        for name in sorted({*homeless, *gone}, key=lambda name: (bool(before[name]), name)):
            await plane.drop("Pod", name)
        for each in change.without:
            if each.startswith("node/"):
                await plane.drop("Node", each.removeprefix("node/"))
        await plane.until_released()
        for plain in put:
            await plane.put(plain)
        after = await plane.make((), [pod for _, pod in change.pods if pod["metadata"]["name"] in {*homeless} - gone])

    wanted = {name: said.get(name, bool(before[name])) for name in after}
    assert {name: bool(node) for name, node in after.items()} == wanted
    assert said
    assert len(before) == len(change.pods) == 100


async def _asked(put: list[Plain], without: Sequence[str], folder: Path) -> dict[str, bool]:
    """Ask which pods would be otherwise, and whether each would have a node."""
    words = [word for each in without for word in ("--without", each)]
    if put:
        (folder / "put.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": put}))
        words += ["-f", str(folder / "put.json")]
    said = await _topobus("what-if", "-o", "json", *words)
    return {each["name"]: each["after"]["code"] in ("fits", "scheduled") for each in said["pods"]}


async def _slices(machine: str) -> list[Plain]:
    # Not its CPUs: what they say of PCIe roots is a list, which no API server takes by default.
    classes = ("--class", "gpu", "--class", "nic")
    return list((await _topobus("slices", "--machine", machine, *classes, "--node", NEW_NODE, "-o", "json"))["items"])


async def _topobus(*words: str) -> Plain:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.cli.main", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, warned = await process.communicate()
    assert process.returncode == 0, warned.decode()
    return dict(json.loads(printed))
