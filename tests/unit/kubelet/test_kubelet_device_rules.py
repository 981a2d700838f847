"""kubelet's device manager rules in the simulator, against answers of kubelet 1.36.2's own code."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from topobus.simulation.kubelet.devices import DeviceStore, PluginDevice, split_by_affinity
from topobus.values.idset import NodeSet
from topobus.values.names import is_extended_resource_name

CASES = Path(__file__).resolve().parents[2] / "data" / "kubelet" / "device-hints.jsonl.gz"
X = "rec.example.com/x"


def _cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(CASES.read_bytes()).splitlines()]


def _devices(case: dict[str, Any]) -> dict[str, PluginDevice]:
    return {
        device["id"]: PluginDevice(
            id=device["id"], is_healthy=True, nodes=None if device["numa"] is None else NodeSet.of(device["numa"])
        )
        for device in case["devices"]
    }


def test_split_equals_kubelets_when_run_on_recorded_cases() -> None:
    """Aligned, unaligned and without topology are the sets that kubelet's own code made, in each of
    200 random cases.
    """
    wrong = []
    for case in _cases():
        affinity = None if case["affinity"] is None else NodeSet.of(case["affinity"])
        split = split_by_affinity(_devices(case), case["available"], affinity)
        expect = case["expect"]
        if [list(split.aligned), list(split.unaligned), list(split.no_topology)] != [
            expect["aligned"],
            expect["unaligned"],
            expect["noAffinity"],
        ]:
            wrong.append(case["id"])

    assert len(_cases()) == 200
    assert wrong == []


def test_hints_equal_kubelets_when_run_on_recorded_cases() -> None:
    """The store gives kubelet's hints when devices are held, as kubelet's own code did in each of
    200 random cases.
    """
    wrong = []
    for case in _cases():
        store = DeviceStore(grace_s=300.0)
        devices = _devices(case)
        store.replace(X, devices.values())
        store.take(X, devices.keys() - set(case["available"]))
        hints = store.hints(X, case["request"], NodeSet.of(case["nodes"]), case["reusable"])
        expect = case["expect"]["hints"]
        # The recording writes Go's nil list ("no opinion") as an empty one.
        plain = sorted((list(hint.nodes.ids) if hint.nodes else [], hint.preferred) for hint in hints or ())
        if plain != sorted((hint["nodes"], hint["preferred"]) for hint in expect):
            wrong.append(case["id"])

    assert wrong == []


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [
        pytest.param("topobus.dev/gpu", True, id="ordinary"),
        pytest.param("topobus.dev/mig-1g.10gb", True, id="dots-and-dashes"),
        pytest.param("nodomain", False, id="no-domain"),
        pytest.param("kubernetes.io/x", False, id="kubernetes-own"),
        pytest.param("node.kubernetes.io/x", False, id="kubernetes-own-subdomain"),
        pytest.param("requests.topobus.dev/x", False, id="quota-prefix"),
        pytest.param("topobus.dev/x-", False, id="ends-with-dash"),
        pytest.param("topobus.dev/", False, id="no-name"),
        pytest.param("Topobus.dev/x", False, id="upper-case-domain"),
        pytest.param("topobus.dev/" + "x" * 63, True, id="longest-name"),
        pytest.param("topobus.dev/" + "x" * 64, False, id="name-too-long"),
        pytest.param(f"{'a.' * 122}/x", False, id="domain-ends-with-dot"),
        pytest.param(f"{'a.' * 121}aa/x", True, id="longest-domain"),
        pytest.param(f"{'a.' * 121}aaa/x", False, id="domain-too-long-with-requests-prefix"),
    ],
)
def test_resource_name_follows_kubelets_rule_when_checked(name: str, *, is_valid: bool) -> None:
    """A name counts only when kubelet would take it, the quota form `requests.<name>` included."""
    assert is_extended_resource_name(name) is is_valid
