"""What commands say of a name, a class or a label that nothing here has: what there is, and what
may be meant.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.cli_process import run_cli
from support.garbage import write_garbage
from topobus.bus.bus import Bus
from topobus.formats.kubernetes.manifest import parse_manifest
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MAINTENANCE, OBJECT
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.request import Owner, OwnerKind
from topobus.values.resource_names import SHAPE_LEVELS

pytestmark = pytest.mark.integration

_CLAIM = (
    "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: fast, labels: {team: a}}\nspec: "
    "{devices: {requests: []}}\n"
)
_NEXA = Path(__file__).parents[3] / "examples" / "nexa-npu"
_CLASS = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: gpu.topobus.dev}\nspec: {selectors: []}\n"


@pytest.fixture
async def publishing(bus: Bus) -> None:
    """One node with a gpu that a claim holds and an operator keeps back, and its stored claim."""
    device = Device(name="gpu-0", device_class="gpu", driver="nvidia")
    await bus.put(
        INVENTORY,
        Inventory(node="n1", device_class="gpu", generation=1, devices=(device,)),
        node="n1",
        device_class="gpu",
    )
    owner = Owner(kind=OwnerKind.CLAIM, name="fast", uid="u")
    held = Allocation(owner=owner, holdings=(Holding(devices={"gpu": ("gpu-0",)}),))
    await bus.put(LEDGER, Ledger(node="n1", allocations={owner.key: held}), node="n1")
    kept = ClassMaintenance(
        node="n1", device_class="gpu", devices={"gpu-0": Maintenance(verb=DeviceVerb.MAINTAIN, who="ann", why="fan")}
    )
    await bus.put(MAINTENANCE, kept, node="n1", device_class="gpu")
    (claim,) = parse_manifest(_CLAIM, where="claim")
    await bus.put(OBJECT, claim, **object_parts(claim))


@pytest.mark.usefixtures("publishing")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("health", "watch", "--class", "gpus"), ("unknown device class 'gpus'", "did you mean gpu? known are gpu")),
        (("health", "watch", "--node", "nope"), ("unknown node 'nope'", "known are n1")),
        (
            ("hints", "watch", "--class", "memry"),
            ("unknown device class 'memry'", "did you mean memory? known are gpu, memory"),
        ),
        (("hints", "watch", "--node", "n11"), ("unknown node 'n11'", "did you mean n1? known are n1")),
        (("decisions", "--node", "nope", "--follow"), ("unknown node 'nope'", "known are n1")),
        (("device", "list", "--class", "npu"), ("unknown device class 'npu'", "next: known are gpu")),
        (("inventory", "GPU"), ("unknown device class 'GPU'", "did you mean gpu?")),
    ],
    ids=" ".join,
)
async def test_command_refuses_a_name_when_nothing_here_has_it(
    nats_server: NatsServer, arguments: tuple[str, ...], said: tuple[str, str]
) -> None:
    """Silence would look as if nothing happened there: the error says what there is, and does not
    wait.
    """
    code, output, error = await run_cli(nats_server, *arguments)

    assert (code, output) == (1, "")
    assert [part for part in said if part not in error] == []


@pytest.mark.usefixtures("publishing")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("inventory",),
            "no device matches foo=bar: none has a label foo; there are class, driver, health, holder, name, "
            "node, reason, role",
        ),
        (
            ("inventory", "gpu"),
            "no device matches foo=bar: none has a label foo; there are class, driver, health, holder, name, "
            "node, reason, role",
        ),
        (
            ("health",),
            "no device matches foo=bar: none has a label foo; there are class, driver, health, holder, name, "
            "node, reason, role",
        ),
        (
            ("health", "--all"),
            "no device matches foo=bar: none has a label foo; there are class, driver, health, holder, name, "
            "node, reason, role",
        ),
        (("holders",), "no holder matches foo=bar: none has a label foo; there are kind, name, namespace, node, way"),
        (
            ("device", "list"),
            "no withheld device matches foo=bar: none has a label foo; there are class, name, node, verb, who",
        ),
        (("decisions",), "no decision matches foo=bar"),
        (
            ("get", "claims"),
            "no resourceclaim in namespace default matches foo=bar: none has a label foo; there are team",
        ),
        (("get", "pods,claims", "-A"), "no pod or resourceclaim matches foo=bar: none has a label foo; there are team"),
        (("get", "deviceclasses"), "no deviceclass matches foo=bar"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_list_says_that_a_selector_selects_nothing_when_it_does(
    nats_server: NatsServer, arguments: tuple[str, ...], said: str
) -> None:
    """Nobody takes a selector that fits nothing for an empty system, and a misspelt label is told
    with those that there are.
    """
    code, output, error = await run_cli(nats_server, *arguments, "-l", "foo=bar")

    assert code == 0
    assert "gpu-0" not in output
    assert " ".join(error.split()).endswith(said)


@pytest.mark.usefixtures("publishing")
async def test_list_names_the_label_that_is_meant_when_one_is_misspelt(nats_server: NatsServer) -> None:
    """A negated term selects what lacks the label, so only the other one is told."""
    _, _, error = await run_cli(nats_server, "inventory", "-l", "driverr!=x,clas=gpu")

    assert "none has a label clas, did you mean class?" in " ".join(error.split())


@pytest.mark.usefixtures("publishing")
async def test_get_counts_what_nobody_can_read_when_there_is_some(nats_server: NatsServer, bus: Bus) -> None:
    """What can be read is listed as ever, and the rest is no silence."""
    for name in ("one", "two"):
        await write_garbage(bus, OBJECT, kind="resourceclaim", namespace="default", name=name)

    code, output, error = await run_cli(nats_server, "get", "claims")

    assert (code, [line.split()[0] for line in output.splitlines()]) == (0, ["name", "fast"])
    assert "2 objects cannot be read: `topobus doctor` names them" in error


async def test_built_in_classes_are_listed_when_nobody_stored_any(
    nats_server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims can name them, so `get` and `describe` show them and say what they are.

    A stored one of the name takes its place, and only that is deleted.
    """
    monkeypatch.setenv("COLUMNS", "220")
    await bus.put(INVENTORY, Inventory(node="n1", device_class="gpu", generation=1), node="n1", device_class="gpu")
    built_in = (await run_cli(nats_server, "get", "deviceclasses"))[1]
    described = (await run_cli(nats_server, "describe", "deviceclass", "gpu.topobus.dev"))[1]
    refused = await run_cli(nats_server, "delete", "deviceclass", "gpu.topobus.dev")
    (stored,) = parse_manifest(_CLASS, where="class")
    await bus.put(OBJECT, stored, **object_parts(stored))
    with_stored = (await run_cli(nats_server, "get", "deviceclasses"))[1]

    rows = {line.split()[0]: line.split() for line in built_in.splitlines()[1:]}
    selector = 'device.driver == "topobus.dev" && device.attributes["topobus.dev"].class == "gpu"'
    assert rows.keys() == {f"{name}.topobus.dev" for name in ("gpu", *SHAPE_LEVELS)}
    assert rows["gpu.topobus.dev"] == ["gpu.topobus.dev", "built-in", *selector.split(), "-"]
    assert "a DeviceClass of this name that is applied takes its place" in " ".join(described.split())
    assert refused[0] == 1
    assert "deviceclass gpu.topobus.dev is built in, and not stored" in refused[2]
    assert [line.split()[:2] for line in with_stored.splitlines()[1:] if line.split()[1] != "built-in"] == [
        ["gpu.topobus.dev", "stored"]
    ]


@pytest.fixture
def nexa_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example vendor's driver of class npu on the path of the commands, as an installed package
    has it.
    """
    metadata = tmp_path / "topobus_nexa_npu-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: topobus-nexa-npu\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[topobus.drivers]\nnexa = topobus_nexa_npu:NexaDriver\n")
    paths = (str(tmp_path), str(_NEXA), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.usefixtures("publishing", "nexa_installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("inventory", "npu"),
        ("inventory", "--class", "npu"),
        ("health", "watch", "--class", "npu"),
        ("device", "return", "--class", "npu"),
    ],
    ids=" ".join,
)
async def test_command_says_how_a_class_is_served_when_only_its_driver_is_installed(
    nats_server: NatsServer, arguments: tuple[str, ...]
) -> None:
    """The class is no misspelt one: its driver is here, and nobody runs it."""
    code, _, error = await run_cli(nats_server, *arguments)

    assert code == 1
    assert "no service of device class 'npu' runs; its driver nexa is installed" in error
    assert "next: topobus up --class npu" in error


@pytest.mark.usefixtures("publishing", "nexa_installed")
async def test_doctor_names_an_installed_driver_until_a_node_serves_its_class(
    nats_server: NatsServer, bus: Bus
) -> None:
    """A warning with the command; of a class that some node has nothing is said."""
    before = await _driver_findings(nats_server)
    await bus.put(INVENTORY, Inventory(node="n2", device_class="npu", generation=1), node="n2", device_class="npu")

    after = await _driver_findings(nats_server)

    assert [(finding["what"], finding["level"]) for finding in before] == [("driver nexa", "warn")]
    assert "topobus up --class npu" in before[0]["next_step"]
    assert after == []


async def _driver_findings(nats_server: NatsServer) -> list[dict[str, str]]:
    _, output, _ = await run_cli(nats_server, "doctor", "--json")
    return [finding for finding in json.loads(output)["findings"] if finding["what"].startswith("driver")]
