"""Promises of the topology service's settings: a mistake is named, never replaced by a default."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.process.config import find_mistakes, load_settings
from topobus.topology.config import TopologySettings, check
from topobus.values.errors import ConfigError
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Policy, Scope
from topobus.values.view import PlanMode


def load(text: str, tmp_path: Path) -> TopologySettings:
    """Load settings from a file with this text."""
    file = tmp_path / "topology.toml"
    file.write_text(text)
    return load_settings(TopologySettings, "topology", file=file, environ={})


def test_topology_settings_read_kubelets_names_when_given(tmp_path: Path) -> None:
    """Policy, scope, options and the reserved CPUs come through as they stand."""
    settings = load(
        '[alignment]\npolicy = "restricted"\nscope = "pod"\nreserved_cpus = '
        '"0,112"\n[alignment.cpu]\nfull_pcpus_only = true\n',
        tmp_path,
    )

    options = settings.alignment.options()
    assert (options.policy, options.scope, options.cpu.full_pcpus_only) == (Policy.RESTRICTED, Scope.POD, True)
    assert settings.alignment.reserved_cpus == "0,112"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param('[alignment]\npolicy = "strict"\n', "policy", id="unknown-policy"),
        pytest.param('[alignment]\nscope = "node"\n', "scope", id="unknown-scope"),
        pytest.param('[alignment]\nreserved_cpus = "0-x"\n', "cpulist", id="no-cpulist"),
        pytest.param("[alignment]\nprefer_closest = true\n", "prefer_closest", id="typo"),
        pytest.param(
            "[alignment.cpu]\nfull_pcpus_only = true\ndistribute_cpus_across_cores = true\n",
            "exclude each other",
            id="contradiction",
        ),
        pytest.param(
            '[alignment]\npolicy = "single-numa-node"\n[alignment.cpu]\nalign_by_socket = true\n',
            "single-numa-node",
            id="socket-and-node",
        ),
        pytest.param('[alignment]\nkubelet = "1.20"\n', "kubelet", id="unknown-kubelet"),
        pytest.param("[alignment]\nmax_allowable_numa_nodes = 4\n", "at least 8", id="limit-too-small"),
        pytest.param("[hints]\ntimeout_s = 0\n", "timeout_s", id="no-time"),
        pytest.param('[alignment]\nmode = "greedy"\n', "mode", id="unknown-mode"),
        pytest.param("[alignment]\nsearch_steps = -1\n", "search_steps", id="negative-steps"),
        pytest.param("[reservations]\nexpire_s = 0\n", "expire_s", id="no-time-to-commit"),
    ],
)
def test_topology_settings_name_the_mistake_when_there_is_one(text: str, says: str, tmp_path: Path) -> None:
    """Every wrong or contradictory setting is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=says):
        load(text, tmp_path)


def test_topology_settings_take_over_what_the_kubelet_release_changed(tmp_path: Path) -> None:
    """From 1.37 on the affinity's width is a floor for spreading CPUs."""
    assert load('[alignment]\nkubelet = "1.37"\n', tmp_path).alignment.options().cpu.has_affinity_floor
    assert not load("", tmp_path).alignment.options().cpu.has_affinity_floor


def test_topology_settings_say_how_whole_pods_are_planned_when_given(tmp_path: Path) -> None:
    """The mode, its budget and what pods may ask for come through.

    The defaults are kubelet's order and open to wishes.
    """
    given = load(
        '[alignment]\nmode = "corrected"\nsearch_steps = 50\nallow_request_policy = false\n', tmp_path
    ).alignment.options()
    plain = load("", tmp_path).alignment.options()

    assert (given.mode, given.search_steps, given.allow_request_policy) == (PlanMode.CORRECTED, 50, False)
    assert (plain.mode, plain.allow_request_policy) == (PlanMode.COMPATIBLE, True)


OWN_SHAPES = "TOPOBUS_TOPOLOGY__OWN_SHAPES"
HOW = (
    'write each as {"name": "trio", "parts": {"gpu": 2, "nic": 1}, "within": "numa"}; docs/how-to/shapes.md has the '
    "rules"
)


@pytest.mark.parametrize(
    ("text", "says", "next_step"),
    [
        pytest.param(
            '[{"name": "half", "parts": {"gpu": 2}, "within": "numa"}]',
            "own_shapes: name: got 'half', which every machine's own tree may have; wanted another, such as 'trio'",
            HOW,
            id="any-fault-of-the-shapes",
        ),
        pytest.param(
            '[{"name": "trio", "parts": {"gpu": 2, "smart-card": 1}, "within": "numa"}]',
            "own_shapes: trio: parts: device class 'smart-card': wanted 1 to 20 lowercase letters and digits, a letter "
            "first (a hyphen marks classes of other vendors' device plugins)",
            HOW,
            id="class-that-no-service-can-have",
        ),
        pytest.param(
            '[{"name": "trio", "parts": {"gpu": 2}, "within": "rack"}]',
            "own_shapes[0].within: Invalid enum value 'rack', wanted one of switch, numa, socket, quarter, half, "
            "machine",
            "see docs/reference/settings.md for the keys",
            id="unknown-level",
        ),
        pytest.param(
            '[{"name": "trio", "parts": {"gpu": 2}}]',
            "own_shapes[0]: Object missing required field `within`",
            "see docs/reference/settings.md for the keys",
            id="key-left-out",
        ),
        pytest.param(
            '[{"name": "trio", "parts": {"gpu": "two"}, "within": "numa"}]',
            "own_shapes[0].parts[...]: Expected `int`, got `str`",
            "see docs/reference/settings.md for the keys",
            id="no-number",
        ),
    ],
)
def test_topology_settings_name_what_is_wrong_with_own_shapes(text: str, says: str, next_step: str) -> None:
    """Where it was written, what was got and wanted, and how to write it."""
    environ = {"TOPOBUS_ALL__NODE": "n1", OWN_SHAPES: text}

    settings, mistakes = find_mistakes(TopologySettings, "topology", file=None, environ=environ, checks=(check,))

    assert [(mistake.message, mistake.next_step) for mistake in mistakes] == [
        (f"topology: {says} (from {OWN_SHAPES})", next_step)
    ]
    assert settings == TopologySettings(node="n1")


def test_topology_settings_read_own_shapes_from_a_file(tmp_path: Path) -> None:
    """As a list of tables."""
    settings = load('[[own_shapes]]\nname = "trio"\nwithin = "numa"\nparts = {nic = 1, gpu = 2}\n', tmp_path)

    check(settings)
    assert [own.shape() for own in settings.own_shapes] == [
        OwnShape(name="trio", parts={"gpu": 2, "nic": 1}, within="numa")
    ]
