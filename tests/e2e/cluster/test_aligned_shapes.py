"""Shapes on a real cluster with its stock scheduler: pods that ask for pairs or half of a machine by
a plain resource, and for nothing else of ours.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.cluster import Cluster, until
from topobus.formats.kubernetes.built_in_classes import shape_selector


def given(pod: str) -> dict[str, tuple[str, ...]]:
    """What the kernel shows that the container of a pod was given, by class."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        variables = dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
        if variables.get("HOSTNAME") == pod and "TOPOBUS_GPU_DEVICES" in variables:
            names = {name: variables.get(f"TOPOBUS_{name.upper()}_DEVICES", "") for name in ("gpu", "nic")}
            return {name: tuple(text.replace(",", " ").split()) for name, text in names.items()}
    raise AssertionError(f"no container of pod {pod} was given a GPU")


@pytest.mark.timeout(600)
async def test_pods_get_pairs_and_halves_by_plain_resources(cluster: Cluster) -> None:
    """Two pairs under a switch each, a half on one NUMA node; a second half waits until one is free."""
    shapes = await until("shapes", lambda: cluster.devices("shape"), bool)

    pair = await cluster.offer("gpu-nic", shape_selector("gpu-nic"))
    half = await cluster.offer("half", shape_selector("half"))

    first = await cluster.make_pod(resource=pair, count=2)
    await cluster.until_running(first)
    second = await cluster.make_pod(resource=half)
    await cluster.until_running(second)
    third = await cluster.make_pod(resource=half)
    why = await until("a second half waits", lambda: cluster.why_waiting(third), bool)
    had = {pod: given(pod) for pod in (first, second)}
    await cluster.remove(second)
    await cluster.until_running(third)
    had_third = given(third)

    places = await _places(cluster)
    assert "cannot allocate all claims" in why
    assert {name: len(devices) for name, devices in had[first].items()} == {"gpu": 2, "nic": 2}
    assert Counter(places[name][0] for name in had[first]["gpu"]) == Counter(
        places[name][0] for name in had[first]["nic"]
    )
    assert {name: len(devices) for name, devices in had[second].items()} == {"gpu": 4, "nic": 4}
    assert len({places[name][1] for devices in had[second].values() for name in devices}) == 1
    assert had_third == had[second]
    taken = {name for devices in (*had[first].values(), *had[second].values()) for name in devices}
    assert len(taken) == 12
    assert Counter(shape["attributes"]["level"]["string"] for shape in shapes.values()) == {
        "gpu-nic": 8,
        "quarter": 4,
        "half": 2,
        "machine": 1,
    }
    for pod in (first, third):
        await cluster.remove(pod)


async def _places(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Root and NUMA node of each GPU and NIC, as the slices have them."""
    devices = {**await cluster.devices("gpu"), **await cluster.devices("nic")}
    return {
        name: (
            device["attributes"]["resource.kubernetes.io/pcieRoot"]["string"],
            device["attributes"]["resource.kubernetes.io/numaNode"]["int"],
        )
        for name, device in devices.items()
    }
