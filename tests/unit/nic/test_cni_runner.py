"""The runner with plugins that are real programs: order, records, what is asked again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from support.cni_plugins import Bench, PluginFolder, chain_of, code_of, error, own_namespace, result, target
from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.messages import CniResult


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Nothing attached, no plugins."""
    return Bench(PluginFolder(tmp_path / "bin"), tmp_path / "records")


def test_add_hands_each_result_on_when_a_chain_is_run(bench: Bench) -> None:
    """Each plugin gets the result of the one before; the first gets none.

    The last one's is the answer.
    """
    bench.plugins.add("first", ADD=result({"dns": {"domain": "first"}}))
    bench.plugins.add("second", ADD=result({"interfaces": [{"name": "net1", "sandbox": "x"}]}))

    outcome = bench.runner().add(chain_of("first", "second"), target())

    assert isinstance(outcome, CniResult)
    assert [interface.name for interface in outcome.interfaces] == ["net1"]
    assert "prevResult" not in bench.plugins.calls[0].input
    assert bench.plugins.calls[1].input["prevResult"] == {"cniVersion": "1.0.0", "dns": {"domain": "first"}}


def test_add_is_on_disk_when_its_first_plugin_runs(bench: Bench) -> None:
    """A death in the middle of ADD leaves a record by which the next start can run DEL."""
    bench.plugins.add("only", ADD=f"cp -r {bench.records} {bench.plugins.path}/seen; {result()}")

    bench.runner().add(chain_of("only"), target())

    seen = json.loads(next((bench.plugins.path / "seen").iterdir()).read_text())
    assert (seen["is_attached"], seen["result"], seen["target"]["container_id"]) == (False, None, "c1")
    assert bench.record is not None
    assert bench.record["is_attached"] is True


def test_add_gives_the_same_answer_when_it_is_asked_again(bench: Bench) -> None:
    """Also by a runner that was started since: no plugin runs twice."""
    bench.plugins.add("only", ADD=result({"ips": [{"address": "10.0.0.2/24"}]}))
    before = bench.runner().add(chain_of("only"), target())

    after = bench.runner().add(chain_of("only"), target())

    assert after == before
    assert bench.plugins.in_short == ["only ADD"]


@pytest.mark.parametrize(
    "change",
    [{"runtime_values": {"mac": "02:00:00:00:00:01"}}, {"arguments": (("A", "b"),)}],
    ids=["values", "arguments"],
)
def test_add_detaches_first_when_it_is_asked_for_something_else(bench: Bench, change: dict[str, Any]) -> None:
    """An attachment with other values is another one: the old one goes by DEL before ADD."""
    bench.plugins.add("only")
    runner = bench.runner()
    runner.add(chain_of("only"), target())

    runner.add(chain_of("only"), target(**change))

    assert bench.plugins.in_short == ["only ADD", "only DEL", "only ADD"]


def test_delete_goes_backwards_with_the_result_when_a_chain_is_attached(bench: Bench) -> None:
    """DEL in reverse order, each with the last result of ADD, and the record is gone."""
    bench.plugins.add("first")
    bench.plugins.add("second", ADD=result({"dns": {"domain": "second"}}))
    bench.runner().add(chain_of("first", "second"), target())

    outcome = bench.runner().delete("data", "c1", "net1")

    assert outcome is None
    assert bench.plugins.in_short == ["first ADD", "second ADD", "second DEL", "first DEL"]
    assert all(call.input["prevResult"]["dns"] == {"domain": "second"} for call in bench.plugins.calls[2:])
    assert bench.record is None


def test_delete_has_no_result_when_the_version_has_none(bench: Bench) -> None:
    """Before 0.4.0, DEL does not get the result."""
    bench.plugins.add("only", ADD=result(version="0.3.1"))
    bench.runner().add(chain_of("only", version="0.3.1"), target())

    bench.runner().delete("data", "c1", "net1")

    assert "prevResult" not in bench.plugins.calls[1].input


def test_delete_is_well_when_nothing_is_attached(bench: Bench) -> None:
    """Never attached, or detached before: no plugin is run, and that is no fault."""
    bench.plugins.add("only")
    runner = bench.runner()
    runner.add(chain_of("only"), target())

    outcomes = [
        runner.delete("data", "c1", "net1"),
        runner.delete("data", "c1", "net1"),
        runner.delete("other", "c1", "net1"),
    ]

    assert outcomes == [None, None, None]
    assert bench.plugins.in_short == ["only ADD", "only DEL"]


def test_delete_names_no_namespace_when_the_sandbox_is_gone(bench: Bench, tmp_path: Path) -> None:
    """CNI_NETNS is empty then, so that plugins release what they hold outside of it."""
    bench.plugins.add("only")
    path = tmp_path / "netns"
    path.symlink_to(own_namespace())
    bench.runner().add(chain_of("only"), target(network_namespace=str(path)))
    path.unlink()
    # What the mount of a namespace leaves behind.
    path.touch()

    outcome = bench.runner().delete("data", "c1", "net1")

    assert outcome is None
    assert bench.plugins.calls[1].env["CNI_NETNS"] == ""


def test_delete_names_no_namespace_when_it_was_attached_in_another_boot(bench: Bench, tmp_path: Path) -> None:
    """Inodes of namespaces are given again after a reboot: what is at the path then is a stranger's
    sandbox.
    """
    bench.plugins.add("only")
    path = tmp_path / "netns"
    path.symlink_to(own_namespace())
    with patch("topobus.nic.cni.runner.read_boot_id", return_value="of another boot"):
        bench.runner().add(chain_of("only"), target(network_namespace=str(path)))

    outcome = bench.runner().delete("data", "c1", "net1")

    assert outcome is None
    assert bench.plugins.calls[1].env["CNI_NETNS"] == ""


def test_delete_goes_on_where_it_failed_when_it_is_asked_again(bench: Bench) -> None:
    """A plugin that undid its part is not run twice; the record stays until all have."""
    bench.plugins.add("first", DEL=f"[ -e {bench.plugins.path}/mended ] || {{ {error(100, 'busy')}; }}")
    bench.plugins.add("second")
    bench.runner().add(chain_of("first", "second"), target())

    refused = bench.runner().delete("data", "c1", "net1")
    (bench.plugins.path / "mended").touch()
    again = bench.runner().delete("data", "c1", "net1")

    assert code_of(refused) == "cni-plugin-failed"
    assert again is None
    assert bench.plugins.in_short[2:] == ["second DEL", "first DEL", "first DEL"]
    assert bench.record is None


def test_delete_uses_the_list_of_then_when_it_was_changed_since(bench: Bench) -> None:
    """What DEL undoes is what ADD did, whatever the operator's file says by now."""
    bench.plugins.add("only")
    then = parse_chain(
        {"cniVersion": "1.0.0", "name": "data", "plugins": [{"type": "only", "vlan": 7}]}, "data.conflist"
    )
    assert isinstance(then, Chain)
    bench.runner().add(then, target())

    bench.runner().delete("data", "c1", "net1")

    assert bench.plugins.calls[1].input["vlan"] == 7


def test_chain_runs_in_the_newest_common_version_when_plugins_differ(bench: Bench) -> None:
    """What VERSION answers decides, for all plugins alike."""
    bench.plugins.add("newer", versions=("0.4.0", "1.0.0", "1.1.0"), ADD=result(version="0.4.0"))
    bench.plugins.add("older", versions=("0.3.1", "0.4.0"), ADD=result(version="0.4.0"))

    outcome = bench.runner().add(
        chain_of("newer", "older", version="0.4.0", cniVersions=["0.4.0", "1.0.0", "1.1.0"]), target()
    )

    assert isinstance(outcome, CniResult)
    assert [call.input["cniVersion"] for call in bench.plugins.calls] == ["0.4.0", "0.4.0"]


def test_operations_on_one_container_wait_for_each_other_when_threads_ask(bench: Bench) -> None:
    """Of eight threads that attach the same, one runs the plugin, and all have its answer."""
    bench.plugins.add("only", ADD=result({"dns": {"domain": "x"}}))
    runner = bench.runner()
    outcomes: list[object] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(runner.add(chain_of("only"), target()))) for _ in range(8)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert bench.plugins.in_short == ["only ADD"]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert len(outcomes) == 8
