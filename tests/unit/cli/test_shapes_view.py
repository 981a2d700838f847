"""Shapes for people: a claim's shape is shown with its parts, and who is in the way is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.printed import printed
from support.shape_names import full, plain
from support.shape_nodes import NODE, holding, recorded, sick
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.render.description import describe, view
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.kubernetes.built_in_classes import (
    built_in_class,
    built_in_class_object,
    class_selector,
    shape_selector,
)
from topobus.formats.messages.messages import ApiObject
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind
from topobus.values.resource_names import SHAPE_LEVELS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PODS = EXAMPLES / "pods" / "shapes.yaml"


def example(*names: str) -> list[dict[str, Any]]:
    """The example's pods of these names, with its templates."""
    documents = [document for document in yaml.safe_load_all(PODS.read_text()) if document]
    return [each for each in documents if each["kind"] != "Pod" or each["metadata"]["name"] in names]


def simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: list[dict[str, Any]], *words: str
) -> tuple[int, str]:
    """Plan these objects on the recorded DGX."""
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all(documents))
    code = run(["simulate", "--machine", "dgx", "--pods", str(tmp_path), *words])
    return code, capsys.readouterr().out


def kinds(answer: dict[str, Any]) -> list[list[str]]:
    """The levels of each claim's devices, or their class."""
    return [
        [granted["device"].removeprefix("shape-").partition("-0")[0] for granted in result["devices"]["results"]]
        for claim in answer["claims"]
        for result in claim["allocations"].values()
    ]


@pytest.mark.parametrize(
    ("pods", "got", "held"),
    [
        pytest.param(("half",), [["half"]], {"gpu": 4, "nic": 4}, id="a-half"),
        pytest.param(
            ("pair-per-container",), [["gpu-nic"], ["gpu-nic"]], {"gpu": 2, "nic": 2}, id="a-pair-per-container"
        ),
        pytest.param(("half-or-less",), [["half"]], {"gpu": 4, "nic": 4}, id="the-first-alternative"),
        pytest.param(("pairs-by-resource",), [["gpu-nic"] * 2], {"gpu": 2, "nic": 2}, id="by-a-resource"),
    ],
)
@pytest.mark.parametrize("classes", [(), ("claims/shapes.yaml",)], ids=["built-in", "stored"])
def test_examples_fit_on_a_dgx(
    pods: tuple[str, ...],
    got: list[list[str]],
    held: dict[str, int],
    classes: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each gets what its comment says, and the ledger has the parts."""
    for index, name in enumerate(classes):
        (tmp_path / f"{index}.yaml").write_text((EXAMPLES / name).read_text())

    code, out = simulate(tmp_path, capsys, example(*pods), "--json")

    answer = json.loads(out)
    assert (code, kinds(answer)) == (ExitCode.OK, got)
    counts: dict[str, int] = {}
    for allocation in answer["ledger"]["allocations"].values():
        for holds in allocation["holdings"]:
            for device_class, names in holds.get("devices", {}).items():
                counts[device_class] = counts.get(device_class, 0) + len(names)
    assert counts == held


def test_example_with_cpus_fits_on_a_dgx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command of its comment. The ledger has devices, and no CPUs before the node prepares the claims."""
    text = (EXAMPLES / "pods" / "worker-with-cpus.yaml").read_text()
    own_shapes, cpus = re.findall(r"--(?:own-shapes|cpus) '(.*)'", text)[::-1]

    code, out = simulate(
        tmp_path, capsys, list(yaml.safe_load_all(text)), "--own-shapes", own_shapes, "--cpus", cpus, "--json"
    )

    answer = json.loads(out)
    assert (code, sorted(kinds(answer))) == (ExitCode.OK, [["cpu-numa"] * 4, ["worker"]])
    held = [holds for each in answer["ledger"]["allocations"].values() for holds in each["holdings"]]
    assert [holds["devices"].keys() for holds in held if holds.get("devices")] == [{"gpu", "nic"}]
    assert not any(holds.get("cpus") for holds in held)
    parts = {plain(name): of_shape for claim in answer["claims"] for name, of_shape in claim["parts"].items()}
    assert parts["shape-worker-0000-18-00-0"] == ["gpu-0000-18-00-0", "nic-0000-19-00-0", "cpu-numa-0"]


def test_example_classes_are_those_that_are_built_in() -> None:
    """The file is for clusters, which have no built-in classes."""
    stored = {
        each["metadata"]["name"]: each["spec"]
        for each in yaml.safe_load_all((EXAMPLES / "claims" / "shapes.yaml").read_text())
    }

    assert stored == {
        f"{level}.topobus.dev": {
            "extendedResourceName": f"topobus.dev/{level}",
            "selectors": [{"cel": {"expression": shape_selector(level)}}],
        }
        for level in SHAPE_LEVELS
    }
    for level in SHAPE_LEVELS:
        built_in = built_in_class_object(level, is_level=True)
        assert built_in.spec == stored[built_in.metadata["name"]]
        assert built_in_class(level, is_level=True).extended_resource_name == f"topobus.dev/{level}"


def test_simulation_shows_the_parts_of_a_shape_and_who_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all halves gone, the refusal names devices and their holders."""
    pods = example("half")
    half = next(each for each in pods if each["kind"] == "Pod")
    second, third = ({**half, "metadata": {"name": name}} for name in ("second", "third"))
    parts = {plain(name): of_shape for name, of_shape in shapes_of(recorded("dgx")[1]).parts.items()}

    code, out = simulate(tmp_path, capsys, [*pods, second, third])

    text = plain(" ".join(out.replace("│", " ").split()))
    assert code == ExitCode.NO
    assert f"claim default/half-half: shape-half-0: {', '.join(parts['shape-half-0'])} (shape)" in text
    assert f"1 device (shape-half-1): {', '.join(parts['shape-half-1'][:4])} and 4 more are held by claim" in text


def test_dry_run_shows_the_parts_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on printed slices, of which nobody has published an inventory."""
    assert run(["slices", "--machine", "dgx", "--shapes"]) == ExitCode.OK
    slices = tmp_path / "slices.yaml"
    slices.write_text(capsys.readouterr().out)
    claim = tmp_path / "claim.yaml"
    template = next(each for each in example() if each["metadata"]["name"] == "pair")
    claim.write_text(yaml.safe_dump({**template, "kind": "ResourceClaim", "spec": template["spec"]["spec"]}))

    code = run(
        ["allocate", "-f", str(claim), "--slices", str(slices), "--slices", str(EXAMPLES / "claims" / "shapes.yaml")]
    )

    text = plain(" ".join(capsys.readouterr().out.split()))
    assert code == ExitCode.OK
    assert "pair: shape-gpu-nic-0000-18-00-0: gpu-0000-18-00-0, nic-0000-19-00-0 (topobus.dev, pool dgx)" in text


def test_description_lists_the_parts_when_a_claim_has_a_shape() -> None:
    """Each with its place and its health, as its node has it now."""
    pair = full(shapes_of(recorded("dgx")[1]).parts, "shape-gpu-nic-0000-18-00-0")
    gpu, nic = "gpu-0000-18-00-0", "nic-0000-19-00-0"
    results = [
        {"request": "r", "driver": "topobus.dev", "pool": NODE, "device": device} for device in (pair, "shape-half-7")
    ]
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "u"},
        spec={"devices": {"requests": []}},
        status={"allocation": {"devices": {"results": results}}},
    )
    inventories = [sick(inventory, nic) for inventory in recorded("dgx")[1]]
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid="u")

    description = describe(claim, {}, inventories, [holding(owner, gpu, nic)], [])

    assert [(each.shape, each.device, each.numa_nodes, each.health) for each in description.devices] == [
        (pair, gpu, "0", "healthy"),
        (pair, nic, "0", "unhealthy"),
        ("", "shape-half-7", "?", "not in the inventory"),
    ]
    assert f"{pair}: {nic}" in printed(view(claim, description), 200)


TRIO = OwnShape(name="trio", parts={"gpu": 2, "nic": 1}, within="numa")


def test_description_knows_the_parts_of_a_shape_that_the_operator_adds() -> None:
    """By what the shape's node has published."""
    inventories = recorded("dgx")[1]
    trio = full(shapes_of(inventories, [TRIO]).parts, "shape-trio-0000-18-00-0")
    results = [{"request": "r", "driver": "topobus.dev", "pool": NODE, "device": trio}]
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "u"},
        status={"allocation": {"devices": {"results": results}}},
    )

    of_node, of_another = (
        describe(claim, {}, inventories, [], [], own_shapes={node: [TRIO]}) for node in (NODE, "another")
    )

    assert [(each.shape, each.device) for each in of_node.devices] == [
        (trio, "gpu-0000-18-00-0"),
        (trio, "gpu-0000-1a-00-0"),
        (trio, "nic-0000-19-00-0"),
    ]
    assert [(each.shape, each.device) for each in of_another.devices] == [("", trio)]


def test_simulation_has_the_shapes_that_the_operator_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pod asks for one by a resource of the operator's class."""
    expression = f'{class_selector("shape")} && device.attributes["topobus.dev"].level == "trio"'
    documents = [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "trio.example.com"},
            "spec": {"extendedResourceName": "example.com/trio", "selectors": [{"cel": {"expression": expression}}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "trainer"},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {"example.com/trio": 2}}}]},
        },
    ]
    text = json.dumps([{"name": TRIO.name, "parts": TRIO.parts, "within": TRIO.within}])

    code, out = simulate(tmp_path, capsys, documents, "--own-shapes", text, "--json")
    without, _ = simulate(tmp_path, capsys, documents, "--json")

    assert (code, kinds(json.loads(out)), without) == (ExitCode.OK, [["trio"] * 2], ExitCode.NO)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(["--own-shapes", "trio"], "--own-shapes: JSON is malformed", id="no-json"),
        pytest.param(
            ["--own-shapes", '[{"name": "half", "parts": {"gpu": 2}, "within": "numa"}]'],
            "--own-shapes: name: got 'half', which every machine's own tree may have",
            id="wrong-as-in-the-setting",
        ),
        pytest.param(
            ["--own-shapes", '[{"name": "duo", "parts": {"gpu": 2}, "within": "numa"}]'],
            "--own-shapes is given without --shapes",
            id="without-shapes",
        ),
    ],
)
def test_slices_refuse_own_shapes_that_are_wrong(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the machine is read."""
    assert run(["slices", "--machine", "dgx", *words]) == ExitCode.USAGE
    assert says in capsys.readouterr().err
