"""The how-to page on shapes: each manifest gets on a recorded machine what the page says."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.shape_machines import at_level
from support.shape_names import plain
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.simulation.node import open_machine
from topobus.engine.shapes.shapes import Shapes, shapes_of
from topobus.formats.kubernetes.limits import check_object
from topobus.formats.messages.messages import ApiObject
from topobus.values.resource_names import SHAPE_LEVELS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/shapes.md"
PICTURE = ROOT / "docs/how-to/shapes.svg"
CLASSES = ROOT / "examples/claims/shapes.yaml"
SECOND_SOCKET = 'device.attributes["resource.kubernetes.io"].numaNode == 1'
FIRST_CPUS = [f"cpu-{cpu}" for core in range(8) for cpu in (core, 112 + core)]
EXAMPLES = [CLASSES, ROOT / "examples/claims/classes.yaml", ROOT / "examples/claims/nic-and-cpu.yaml"]


@cache
def of_page() -> list[dict[str, Any]]:
    """The manifests of the page."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def own_shapes(*, with_cpus: bool) -> str:
    """One of the two settings of the page: without CPUs and with them."""
    settings = re.findall(r"^\$ export TOPOBUS_TOPOLOGY__OWN_SHAPES='(.*)'$", PAGE.read_text(), re.MULTILINE)
    assert ['"cpu"' in setting for setting in settings] == [False, True]
    return str(settings[with_cpus])


@cache
def classes() -> list[dict[str, Any]]:
    """The classes that an administrator makes."""
    documents = [document for path in EXAMPLES for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return [document for document in (*documents, *of_page()) if document["kind"] == "DeviceClass"]


def claims() -> dict[str, dict[str, Any]]:
    """The claims of the page by name; for a pod's plain resource the claim that kube-scheduler makes."""
    specs: dict[str, dict[str, Any]] = {}
    for document in of_page():
        if document["kind"] == "DeviceClass":
            continue
        if document["kind"] == "ResourceClaimTemplate":
            specs[document["metadata"]["name"]] = document["spec"]["spec"]
            continue
        for resource, count in document["spec"]["containers"][0]["resources"].get("limits", {}).items():
            (device_class,) = (
                each["metadata"]["name"] for each in classes() if each["spec"].get("extendedResourceName") == resource
            )
            exactly = {"deviceClassName": device_class, "count": count}
            specs[document["metadata"]["name"]] = {"devices": {"requests": [{"name": "main", "exactly": exactly}]}}
    return specs


def claim(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A claim as an object."""
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}


@cache
def slices(*, with_cpus: bool) -> str:
    """What the command prints for a DGX."""
    words = ["--own-shapes", own_shapes(with_cpus=with_cpus), *(["--cpus", '{"groups": "numa"}'] if with_cpus else [])]
    with redirect_stdout(StringIO()) as printed:
        assert run(["slices", "--machine", "dgx", "--shapes", *words]) == ExitCode.OK
    return printed.getvalue()


def allocated(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *wanted: dict[str, Any],
    wait: bool = False,
    with_cpus: bool = False,
) -> list[dict[str, list[str]]]:
    """What claims get on a DGX, one after the other: request to devices."""
    (folder / "slices.yaml").write_text(slices(with_cpus=with_cpus))
    (folder / "classes.yaml").write_text(yaml.safe_dump_all(classes()))
    (folder / "claims.yaml").write_text(yaml.safe_dump_all(wanted))
    words = ["allocate", "-f", str(folder / "claims.yaml"), "-o", "json"]
    code = run([*words, "--slices", str(folder / "slices.yaml"), "--slices", str(folder / "classes.yaml")])
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert (code == ExitCode.OK) is not wait, answers
    of_claims: list[dict[str, list[str]]] = []
    for answer in answers:
        devices: dict[str, list[str]] = {}
        for allocation in answer.get("allocations", {}).values():
            for result in allocation["devices"]["results"]:
                devices.setdefault(result["request"], []).append(plain(result["device"]).removeprefix("shape-"))
        of_claims.append(devices)
    return of_claims


LANDS: dict[str, dict[str, list[str]]] = {
    "trainer": {"main": ["half-0"]},
    "two-pairs": {"main": ["gpu-nic-0000-18-00-0", "gpu-nic-0000-1a-00-0"]},
    "two-pairs-together": {"pairs": ["gpu-nic-0000-18-00-0", "gpu-nic-0000-1a-00-0"]},
    "half-of-h100": {"half": ["half-0"]},
    "four-gpus": {"gpus/half": ["half-0"]},
    "left-and-right": {"left": ["gpu-nic-0000-18-00-0"], "right": ["gpu-nic-0000-1a-00-0"]},
    "one-quarter": {"quarter": ["quarter-0"]},
    "two-trios": {"main": ["trio-0000-18-00-0", "trio-0000-4b-00-0"]},
    "two-workers-with-cpus": {"main": ["worker-0000-18-00-0", "worker-0000-1a-00-0"]},
    "worker-and-cpus": {"worker": ["worker-0000-18-00-0"], "cpus": [f"cpu-numa-0-{number}" for number in range(4)]},
    "half-with-cpus": {"half": ["half-0"], "cpus": FIRST_CPUS},
}
"""Request to devices, on an empty DGX."""


@pytest.mark.parametrize("name", LANDS)
def test_claim_of_the_page_gets_what_it_says(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where the page says that it lands."""
    assert allocated(capsys, tmp_path, claim(name, claims()[name]), with_cpus="worker" in name) == [LANDS[name]]


def test_every_claim_of_the_page_is_tried() -> None:
    """None is left out above, and each keeps the API's limits."""
    objects = [*classes(), *(claim(name, spec) for name, spec in claims().items())]
    faults = [
        fault
        for each in objects
        for fault in check_object(
            ApiObject(api_version=each["apiVersion"], kind=each["kind"], metadata=each["metadata"], spec=each["spec"])
        )
    ]

    assert claims().keys() == LANDS.keys()
    assert faults == []


def test_soft_claim_gets_the_next_best_when_each_half_is_broken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Four pairs where each half lacks a part, and nothing where there are not four GPUs."""
    soft = claims()["four-gpus"]
    pair = {"deviceClassName": "gpu-nic.topobus.dev", "selectors": [{"cel": {"expression": SECOND_SOCKET}}]}
    nics = {"deviceClassName": "nic.topobus.dev", "count": 3}
    one_pair, three_nics = ({"devices": {"requests": [{"name": "a", "exactly": exactly}]}} for exactly in (pair, nics))
    wanted = [claim("a", one_pair), claim("b", three_nics), claim("c", soft), claim("d", soft)]

    of_claims = allocated(capsys, tmp_path, *wanted, wait=True)

    assert [len(devices.get("gpus/pairs", ())) for devices in of_claims] == [0, 0, 4, 0]
    assert of_claims[3] == {}


def test_each_level_has_a_class_and_a_resource() -> None:
    """Named after it."""
    names = {
        each["metadata"]["name"]: each["spec"]["extendedResourceName"]
        for each in yaml.safe_load_all(CLASSES.read_text(encoding="utf-8"))
    }

    assert names == {f"{level}.topobus.dev": f"topobus.dev/{level}" for level in SHAPE_LEVELS}


def test_picture_shows_the_shapes_of_the_machine() -> None:
    """As many of each level, each with as many parts as it has, and above them."""
    with open_machine("dgx") as opened:
        shapes = shapes_of(opened.snapshot.inventories)
    picture = PICTURE.read_text(encoding="utf-8")

    assert _boxes(picture, "pair") == _sizes(shapes, "gpu-nic")
    assert _boxes(picture, "quarter") == _sizes(shapes, "quarter") == _sizes(shapes, "switch")
    assert _boxes(picture, "half") == _sizes(shapes, "half") == _sizes(shapes, "socket") == _sizes(shapes, "numa")
    # The FPGAs are drawn beside it.
    assert [size + 2 for size in _boxes(picture, "machine")] == _sizes(shapes, "machine")
    for name in ("shape-quarter-3", "shape-half-1", "shape-machine"):
        assert name in picture
        assert name in map(plain, shapes.parts)


def _boxes(picture: str, kind: str) -> list[int]:
    """How many parts each box of a kind is drawn over."""

    def spans(of_kind: str) -> list[tuple[float, float]]:
        boxes = re.findall(
            rf'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="46" rx="5" class="{of_kind}"', picture
        )
        return [(float(left), float(left) + float(width)) for left, width in boxes]

    parts = spans("part")
    return [sum(left <= start and end <= right for start, end in parts) for left, right in spans(kind)]


def _sizes(shapes: Shapes, level: str) -> list[int]:
    return [len(parts) for parts in at_level(shapes, level)]
