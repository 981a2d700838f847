"""Promises of `topobus slices`, and what an autoscaler makes of the pools of the recorded machines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.formats.kubernetes.pool_slices import pool_slices
from topobus.formats.kubernetes.resource import Counter, CounterConsumption, CounterSet, SliceDevice, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.values.quantity import Quantity

ROOT = Path(__file__).resolve().parents[3]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run the command; the document that it prints."""
    assert run(["slices", *words]) == ExitCode.OK
    document: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return document


def specs(capsys: pytest.CaptureFixture[str], *words: str) -> list[SliceSpec]:
    """The slices that it prints."""
    return [
        read_as(item["spec"], SliceSpec, where=item["metadata"]["name"]) for item in printed(capsys, *words)["items"]
    ]


def test_slices_name_the_node_when_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Node, pool and the object's name follow --node, and --class leaves the others out of the pool."""
    (item,) = printed(capsys, "--machine", "dgx", "--class", "gpu", "--node", "node-7")["items"]

    assert item["metadata"]["name"] == "000-topobus.dev-node-7"
    assert (item["spec"]["nodeName"], item["spec"]["pool"]["name"]) == ("node-7", "node-7")
    assert len(item["spec"]["devices"]) == 8


def test_slices_are_two_pools_of_one_driver_when_all_classes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """CPUs have a pool of their own. The other classes share one, in the order of their names and each
    in slices of its own.
    """
    printed_specs = specs(capsys, "--machine", "dgx", "--node", "n1")

    assert {(spec.driver, spec.node_name) for spec in printed_specs} == {("topobus.dev", "n1")}
    places = [(spec.pool.name, {device.name.partition("-")[0] for device in spec.devices}) for spec in printed_specs]
    assert places == [("n1", {"fpga"}), ("n1", {"gpu"}), ("n1", {"nic"}), *[("n1/cpu", {"cpu"})] * 4]
    assert [spec.pool.resource_slice_count for spec in printed_specs] == [3] * 3 + [4] * 4


def test_slices_are_allocated_from_when_a_claim_is_tried_on_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What it prints is what `topobus allocate --slices` reads: a claim is tried on a machine that
    no cluster has yet.
    """
    file = tmp_path / "slices.yaml"
    file.write_text(yaml.safe_dump(printed(capsys, "--machine", "dgx")))
    examples = ROOT / "examples" / "claims"

    code = run(
        [
            "allocate",
            "-f",
            str(examples / "gpu-nic-pair.yaml"),
            "--slices",
            str(file),
            "--slices",
            str(examples / "classes.yaml"),
        ]
    )

    assert (code, "gpu-0000-18-00-0" in capsys.readouterr().out) == (ExitCode.OK, True)


def test_slices_as_a_template_have_nothing_of_one_card_or_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Pools are named for their driver, devices have no uuid and no taint, a slice without devices is
    left out, and all names of devices differ.
    """
    template = printed(capsys, "--machine", "laptop", "--template")

    slices = template["spec"]["resourceSliceTemplates"]
    devices = [device for each in slices for device in each.get("devices", ())]
    assert template["kind"] == "DynamicResourceTemplate"
    assert all(each.keys() <= {"driver", "poolName", "devices", "sharedCounters"} for each in slices)
    assert {(each["driver"], each["poolName"]) for each in slices} == {
        ("topobus.dev", "topobus.dev"),
        ("topobus.dev", "topobus.dev/cpu"),
    }
    assert all(each.get("devices") or each.get("sharedCounters") for each in slices)
    assert not any("taints" in device or "uuid" in device["attributes"] for device in devices)
    assert len({device["name"] for device in devices}) == len(devices) > 0


@pytest.mark.parametrize(
    ("words", "code", "wanted"),
    [
        (("--machine", "dxg"), ExitCode.NO_INPUT, "profile"),
        (("--machine", "dgx", "--class", "gpus"), ExitCode.NO, "gpu"),
        (("--machine", "dgx", "--node", "Node_7"), ExitCode.USAGE, "--node"),
    ],
)
def test_slices_name_what_is_wrong_when_an_option_is(
    words: tuple[str, ...], code: ExitCode, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown machine, class or node name ends with its exit code and a next step."""
    assert run(["slices", *words]) == code
    assert wanted in capsys.readouterr().err


def utilization(pools: Iterable[SliceSpec], held: Collection[str]) -> float:
    """What cluster-autoscaler makes of a node's slices: the highest use over pools.

    A pool's use is the share of its devices that claims hold; with counters it is the mean over
    counter sets of the highest use of a counter. CPU and memory do not count.
    Source: cluster-autoscaler 1.36, docs/dra_support.md, "Node consolidation".
    """
    by_pool: dict[str, list[SliceSpec]] = {}
    for spec in pools:
        by_pool.setdefault(spec.pool.name, []).append(spec)
    return max(_pool_use(of_pool, held) for of_pool in by_pool.values())


def _pool_use(specs_of_pool: list[SliceSpec], held: Collection[str]) -> float:
    devices = [device for spec in specs_of_pool for device in spec.devices]
    counter_sets = [counter_set for spec in specs_of_pool for counter_set in spec.shared_counters]
    if not counter_sets:
        return sum(device.name in held for device in devices) / max(len(devices), 1)
    used: dict[tuple[str, str], int] = {}
    for device in devices:
        for consumption in device.consumes_counters if device.name in held else ():
            for name, counter in consumption.counters.items():
                key = (consumption.counter_set, name)
                used[key] = used.get(key, 0) + Quantity.parse(counter.value).nano
    shares = [
        max(
            used.get((counter_set.name, name), 0) / Quantity.parse(counter.value).nano
            for name, counter in counter_set.counters.items()
        )
        for counter_set in counter_sets
    ]
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("classes", "held", "use"),
    [
        pytest.param((), {}, 0.0, id="nothing-held"),
        # 8 GPUs, 8 NICs and 2 FPGAs are one pool; the CPUs are another.
        pytest.param((), {"gpu": 4}, 4 / 18, id="half-of-the-gpus"),
        pytest.param((), {"gpu": 8}, 8 / 18, id="all-gpus"),
        pytest.param((), {"gpu": 8, "nic": 8}, 16 / 18, id="all-gpus-and-nics"),
        pytest.param(("gpu", "cpu"), {"gpu": 4}, 0.5, id="half-of-the-gpus-beside-cpus"),
        pytest.param(("gpu", "cpu"), {"gpu": 8}, 1.0, id="all-gpus-beside-cpus"),
        pytest.param(("cpu", "nic"), {}, 0.0, id="cpus-and-nics-alone"),
    ],
)
def test_pools_mean_to_an_autoscaler_what_the_page_says(
    classes: tuple[str, ...], held: Mapping[str, int], use: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Free CPUs do not make a GPU node look empty, because they are another pool, but free NICs do,
    where they are published; and a node of CPUs and NICs alone looks empty however many pods compute
    on it.
    """
    words = [word for device_class in classes for word in ("--class", device_class)]
    printed_specs = specs(capsys, "--machine", "dgx", *words)
    names = [device.name for spec in printed_specs for device in spec.devices]
    taken = {
        name
        for device_class, count in held.items()
        for name in [name for name in names if name.startswith(f"{device_class}-")][:count]
    }

    assert utilization(printed_specs, taken) == use


def test_pool_with_counters_counts_by_them_to_an_autoscaler() -> None:
    """Half of one of two cards is a quarter of the node, although one of six devices is held."""
    cards = ("gpu-0", "gpu-1")
    devices = [
        device(name, card, amount)
        for card in cards
        for name, amount in ((card, "80Gi"), (f"{card}-a", "40Gi"), (f"{card}-b", "40Gi"))
    ]
    counter_sets = [CounterSet(name=card, counters={"memory": Counter(value="80Gi")}) for card in cards]

    pool = pool_slices("node-a", devices, counter_sets)

    assert utilization(pool.values(), {"gpu-1-b"}) == 0.25


def device(name: str, card: str, amount: str) -> SliceDevice:
    """A device that takes so much of its card's memory."""
    taken = CounterConsumption(counter_set=card, counters={"memory": Counter(value=amount)})
    return SliceDevice(name=name, consumes_counters=(taken,))
