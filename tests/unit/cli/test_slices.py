"""Promises of `topobus slices`, and what an autoscaler makes of the pools of the recorded machines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from support.shape_names import plain
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.formats.kubernetes.pool_slices import pool_slices
from topobus.formats.kubernetes.resource import Counter, CounterConsumption, CounterSet, SliceDevice, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.values.quantity import Quantity

ROOT = Path(__file__).resolve().parents[3]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run the command; the document that it prints, in the form that is read in no time."""
    assert run(["slices", *words, "--output", "json"]) == ExitCode.OK
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def specs(capsys: pytest.CaptureFixture[str], *words: str) -> list[SliceSpec]:
    """The slices that it prints."""
    return [
        read_as(item["spec"], SliceSpec, where=item["metadata"]["name"]) for item in printed(capsys, *words)["items"]
    ]


def test_slices_name_the_node_when_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Node, pool and the object's name follow --node, and --class leaves the others out of the pool."""
    words = ["--machine", "dgx", "--class", "gpu", "--node", "node-7", "--shapes"]
    gpus, shapes, counters = printed(capsys, *words)["items"]

    assert gpus["metadata"]["name"] == "000-topobus.dev-node-7"
    assert {(item["spec"]["nodeName"], item["spec"]["pool"]["name"]) for item in (gpus, shapes, counters)} == {
        ("node-7", "node-7")
    }
    assert [len(item["spec"].get("devices", ())) for item in (gpus, shapes, counters)] == [8, 7, 0]


def test_slices_have_shapes_of_the_printed_classes_and_say_what_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Without NICs there are no pairs. Where not all is equal, what is left out is told beside the
    document.
    """
    words = ["--machine", "dgx", "--class", "gpu", "--shapes"]
    devices = [device for spec in specs(capsys, *words) for device in spec.devices]
    assert run(["slices", "--machine", "epyc-8numa", "--shapes"]) == ExitCode.OK
    notes = capsys.readouterr().err

    names = [plain(device.name) for device in devices if device.name.startswith("shape-")]
    assert names == [
        *(f"shape-quarter-{number}" for number in range(4)),
        "shape-half-0",
        "shape-half-1",
        "shape-machine",
    ]
    assert "no shape: level gpu-nic: gpu-0000-61-00-0, gpu-0000-81-00-0: less than the others" in notes


def test_slices_are_two_pools_of_one_driver_when_all_classes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """CPUs have a pool of their own. The other classes share one, in the order of their names and each
    in slices of its own.
    """
    printed_specs = specs(capsys, "--machine", "dgx", "--node", "n1", "--shapes")

    assert {(spec.driver, spec.node_name) for spec in printed_specs} == {("topobus.dev", "n1")}
    places = [(spec.pool.name, {device.name.partition("-")[0] for device in spec.devices}) for spec in printed_specs]
    of_classes = [("n1", {device_class}) for device_class in ("fpga", "gpu", "nic", "shape")]
    assert places == [*of_classes, ("n1", set()), *[("n1/cpu", {"cpu"})] * 4]
    assert [spec.pool.resource_slice_count for spec in printed_specs] == [5] * 5 + [4] * 4


def test_slices_are_allocated_from_when_a_claim_is_tried_on_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What it prints is what `topobus allocate --slices` reads: a claim is tried on a machine that
    no cluster has yet.
    """
    file = tmp_path / "slices.yaml"
    assert run(["slices", "--machine", "dgx"]) == ExitCode.OK
    file.write_text(capsys.readouterr().out)
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
        (("--machine", "dgx", "--cpus", '{"group": "numa"}'), ExitCode.USAGE, "--cpus: Object contains unknown field"),
        (("--machine", "dgx", "--reserved-cpus", "x"), ExitCode.USAGE, "--reserved-cpus is"),
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

    CPU and memory do not count. A pool's use is that of its devices with counters, or of those without,
    where claims hold only such; else the mean of both, weighted by the number of counter sets and of
    devices without counters.
    Source: cluster-autoscaler, simulator/dynamicresources/utils/utilization.go, 1.36.
    """
    by_pool: dict[str, list[SliceSpec]] = {}
    for spec in pools:
        by_pool.setdefault(spec.pool.name, []).append(spec)
    return max(_pool_use(of_pool, held) for of_pool in by_pool.values())


def _pool_use(specs_of_pool: list[SliceSpec], held: Collection[str]) -> float:
    devices = [device for spec in specs_of_pool for device in spec.devices]
    plain = [device for device in devices if not device.consumes_counters]
    taken = [device for device in devices if device.name in held]
    plain_use = sum(device.name in held for device in plain) / max(len(plain), 1)
    if all(not device.consumes_counters for device in taken):
        return plain_use
    shares = _shares(specs_of_pool, taken)
    counted_use = sum(shares) / len(shares)
    if all(device.consumes_counters for device in taken):
        return counted_use
    return (counted_use * len(shares) + plain_use * len(plain)) / (len(shares) + len(plain))


def _shares(specs_of_pool: list[SliceSpec], taken: Iterable[SliceDevice]) -> list[float]:
    """The highest use of a counter in each set."""
    used: dict[tuple[str, str], int] = {}
    for device in taken:
        for consumption in device.consumes_counters:
            for name, counter in consumption.counters.items():
                key = (consumption.counter_set, name)
                used[key] = used.get(key, 0) + Quantity.parse(counter.value).nano
    return [
        max(
            used.get((counter_set.name, name), 0) / Quantity.parse(counter.value).nano
            for name, counter in counter_set.counters.items()
        )
        for spec in specs_of_pool
        for counter_set in spec.shared_counters
    ]


@pytest.mark.parametrize(
    ("words", "held", "use"),
    [
        pytest.param("dgx", (), 0.0, id="nothing-held"),
        pytest.param("dgx", ("gpu-0000-18-00-0",), 0.5, id="one-gpu"),
        pytest.param("dgx", ("nic-0000-19-00-0",), 0.5, id="one-nic"),
        pytest.param("dgx", ("gpu-0000-18-00-0", "gpu-0000-9a-00-0"), 1.0, id="a-gpu-on-each-socket"),
        pytest.param("dgx", ("gpu-0000-1", "gpu-0000-4"), 0.5, id="all-gpus-of-a-socket"),
        pytest.param("dgx", ("gpu-",), 1.0, id="all-gpus"),
        pytest.param("dgx", ("shape-gpu-nic-0000-18",), 0.5, id="a-pair"),
        pytest.param("dgx", ("shape-half-0",), 0.5, id="a-half"),
        pytest.param("dgx", ("shape-half-",), 1.0, id="both-halves"),
        pytest.param("dgx", ("shape-machine",), 1.0, id="the-machine"),
        pytest.param("dgx", ("cpu-223",), 1 / 224, id="a-cpu"),
        pytest.param("laptop", ("nic-0000-00-1f-6",), 1.0, id="one-socket"),
        pytest.param("dgx --class cpu --class nic", (), 0.0, id="cpus-and-nics-alone"),
        pytest.param("dgx --class cpu --class nic", ("nic-0000-19-00-0",), 1 / 8, id="one-of-eight-nics"),
    ],
)
def test_pools_mean_to_an_autoscaler_what_the_page_says(
    words: str, held: tuple[str, ...], use: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """With shapes a socket counts as used as soon as anything of it is: free NICs, FPGAs and CPUs do not
    make a GPU node look empty. A node of CPUs and NICs alone has no shapes, and looks empty however
    many pods compute on it.
    """
    printed_specs = specs(capsys, "--shapes", "--machine", *words.split())

    names = {device.name for spec in printed_specs for device in spec.devices if device.name.startswith(held or "-")}

    assert utilization(printed_specs, names) == pytest.approx(use)


@pytest.mark.parametrize(
    ("held", "use"),
    [
        pytest.param(("gpu-0000-18-00-0",), 1 / 18, id="one-gpu"),
        pytest.param(("gpu-0000-18-00-0", "gpu-0000-9a-00-0"), 2 / 18, id="a-gpu-on-each-socket"),
        pytest.param(("gpu-0000-1", "gpu-0000-4"), 4 / 18, id="all-gpus-of-a-socket"),
        pytest.param(("gpu-",), 8 / 18, id="all-gpus"),
    ],
)
def test_full_node_looks_half_empty_to_an_autoscaler_without_shapes(
    held: tuple[str, ...], use: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of 18 devices counts the same, whatever it is worth."""
    printed_specs = specs(capsys, "--machine", "dgx")
    names = {device.name for spec in printed_specs for device in spec.devices if device.name.startswith(held)}

    assert utilization(printed_specs, names) == pytest.approx(use)


def test_pool_of_both_kinds_is_averaged_to_an_autoscaler() -> None:
    """A device without counters, such as one that counters cannot guard, counts as one set does."""
    counted = [device("gpu-0", "gpu-0", "80Gi"), device("gpu-1", "gpu-1", "80Gi")]
    counter_sets = [CounterSet(name=card, counters={"memory": Counter(value="80Gi")}) for card in ("gpu-0", "gpu-1")]

    pool = pool_slices("node-a", [*counted, SliceDevice(name="gpu-2")], counter_sets)

    assert utilization(pool.values(), {"gpu-0", "gpu-2"}) == pytest.approx(2 / 3)


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
