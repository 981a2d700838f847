"""`topobus size`: its figures are those of the pages, scaled, and marked where nothing was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.rules.fleet_size import MEASURED_DEVICES, FleetSize, Need, size_fleet

_ROOT = Path(__file__).resolve().parents[3]


def _need(size: FleetSize, part: str, what: str) -> Need:
    return next(need for need in size.needs if (need.part, need.what) == (part, what))


def _row(page: str, begins: str) -> list[float]:
    """Give the numbers of a table's row, by the beginning of its first cell."""
    lines = (_ROOT / page).read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| {begins}"))
    return [float(number.replace(",", "")) for number in re.findall(r"(?<=\| )[\d,.]+", line)]


@pytest.mark.parametrize(
    ("what", "row"),
    [("memory", "… started again on its store"), ("processor at rest", "hub at rest: % of a core")],
)
def test_hub_needs_what_was_measured(what: str, row: str) -> None:
    """At each measured number of nodes the figure is the page's."""
    measured = _row("docs/explanation/large-fleets.md", row)

    needs = [_need(size_fleet(nodes, MEASURED_DEVICES), "hub", what) for nodes in (100, 300, 1000)]

    assert [need.value for need in needs] == measured[1:]
    assert not any(need.is_extrapolated for need in needs)


def test_controller_needs_what_was_measured() -> None:
    """The same for its memory."""
    measured = _row("docs/explanation/large-fleets.md", "resident memory of the controller")

    needs = [_need(size_fleet(nodes, MEASURED_DEVICES), "controller", "memory").value for nodes in (1000, 5000)]

    assert needs == measured


def test_node_needs_what_was_measured() -> None:
    """Its services are those of the page, and a server of its own comes beside them."""
    text = (_ROOT / "docs/explanation/at-rest.md").read_text(encoding="utf-8")
    (services,) = map(float, re.findall(r"^\| 300 MiB a node \| (\d+) resident", text, re.MULTILINE))

    assert _need(size_fleet(1, MEASURED_DEVICES), "node", "memory").value == services
    assert _need(size_fleet(11, MEASURED_DEVICES), "node", "memory").value == services + 50


def test_pages_of_the_figures_exist() -> None:
    """Each figure says where it comes from."""
    sources = {need.source for nodes in (1, 11) for need in size_fleet(nodes, MEASURED_DEVICES).needs}

    assert [source for source in sources if not (_ROOT / source).is_file()] == []


@pytest.mark.parametrize(
    ("nodes", "devices", "rate", "shape", "regions", "beyond"),
    [
        pytest.param(1, 242, 0, "central", 1, set(), id="one node"),
        pytest.param(10, 242, 0, "central", 1, {"server"}, id="a handful at one server"),
        pytest.param(25, 242, 0, "leaf", 1, set(), id="as measured with real leaves"),
        pytest.param(1000, 242, 0, "leaf", 1, {"hub"}, id="compression was measured with 25"),
        pytest.param(6000, 242, 0, "leaf", 2, {"hub"}, id="two regions"),
        pytest.param(20, 243, 0, "leaf", 1, {"node", "hub", "controller"}, id="a larger machine"),
        pytest.param(20, 242, 3600 * 528, "leaf", 1, {"hub", "controller"}, id="more claims than were measured"),
    ],
)
def test_fleet_is_marked_where_it_is_larger_than_what_was_measured(
    nodes: int, devices: int, rate: float, shape: str, regions: int, beyond: set[str]
) -> None:
    """Shape and regions are those of the pages; nothing beyond a measurement passes for one."""
    size = size_fleet(nodes, devices, rate)

    assert (size.shape, size.regions) == (shape, regions)
    assert {need.part for need in size.needs if need.is_extrapolated} == beyond


def test_fleet_of_small_nodes_needs_the_links_still() -> None:
    """A hub keeps a link for each node, however few devices that has, and all bounds of the catalogue."""
    small, large = (size_fleet(1000, devices) for devices in (1, MEASURED_DEVICES))

    assert 145 < _need(small, "hub", "memory").value < 150
    assert _need(small, "hub", "disk (nats.store_mib)").value == 3376
    assert _need(large, "hub", "disk (nats.store_mib)").value == 10_000


def test_size_counts_the_devices_of_a_machine_and_its_claims(capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON."""
    words = ["size", "--nodes", "1000", "--machine", "dgx", "--claims-per-hour", "20000"]
    codes = [run(words), run([*words, "--output", "json"])]
    text, _, document = capsys.readouterr().out.partition("{")

    assert codes == [ExitCode.OK, ExitCode.OK]
    assert text.startswith("1000 nodes with 242 devices each, 20000 claims an hour: shape leaf\n")
    assert re.search(r"hub +memory +722 +MiB +large-fleets\n", text)
    assert json.loads("{" + document)["devices"] == MEASURED_DEVICES


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nodes", "0"], '"0" for --nodes. Must be >= 1.'),
        (["--nodes", "9" * 330], "for --nodes. Must be <= 1000000."),
        (["--nodes", "1", "--claims-per-hour", "-1"], "for --claims-per-hour. Must be >= 0."),
        (["--nodes", "1", "--claims-per-hour", "nan"], "for --claims-per-hour. Must be <= 1000000000."),
    ],
    ids=["no node", "more than a float holds", "negative claims", "no number"],
)
def test_size_refuses_what_is_no_fleet(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what was given and what is wanted."""
    assert run(["size", "--machine", "dgx", *words]) == ExitCode.USAGE
    assert text in capsys.readouterr().err.replace("\n", " ")
