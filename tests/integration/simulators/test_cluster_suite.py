"""The cluster suite itself, whole, on the two simulators together: it passes where Topobus does
what it should.

Proves nothing about a real cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 600.0


@contextmanager
def small_cluster(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the simulators as a process; its kubeconfig is there when it serves."""
    kubeconfig = folder / "kubeconfig"
    command = [sys.executable, str(ROOT / "tests" / "support" / "small_cluster.py"), str(folder), str(kubeconfig)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")})
    try:
        for _ in range(600):
            if kubeconfig.exists():
                break
            assert process.poll() is None, "the small cluster ended"
            time.sleep(0.1)  # noqa: TID251 - the suite runs without a loop
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def cluster_for_errors() -> Iterator[Path]:
    """A small cluster without Topobus, and two kubeconfigs that lead nowhere or as somebody without
    rights.
    """
    made = Path(tempfile.mkdtemp(prefix="sc"))
    with small_cluster(made):
        text = (made / "kubeconfig").read_text()
        server = json.loads(text)["clusters"][0]["cluster"]["server"]
        (made / "dead").write_text(text.replace(server, "http://127.0.0.1:9"))
        yield made
    shutil.rmtree(made)


def suite(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite as its user does."""
    command = [
        sys.executable,
        "-m",
        "support.pytest_run",
        "tests/e2e/cluster/test_on_a_cluster.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rs",
        *arguments,
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_") and key != "KUBECONFIG"}
    given = {**kept, "PYTHONPATH": str(ROOT / "tests"), **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=_LIMIT_S, check=False)


@pytest.mark.timeout(_LIMIT_S + 60)
def test_suite_passes_when_it_runs_topobus_on_simulators(short_folder: Path) -> None:
    """All of it, from the first slice to the uninstall, with NATS and five services as processes of
    the suite's own.

    Nothing is skipped.
    """
    with small_cluster(short_folder) as cluster:
        answer = suite(
            {
                "KUBECONFIG": str(short_folder / "kubeconfig"),
                "TOPOBUS_KUBELET_DIR": str(short_folder),
                "TOPOBUS_CLUSTER_INSTALLATION": "processes",
                "TOPOBUS_CLUSTER_CDI_DIR": str(short_folder / "cdi"),
                "TOPOBUS_CLUSTER_RESTART_KUBELET": f"kill -USR1 {cluster.pid}",
                "TOPOBUS_CLUSTER_UNINSTALLED": f"kill -USR2 {cluster.pid}",
                "TOPOBUS_CLUSTER_LOOK_S": "0.05",
                # What a pod leaves is free after two looks.
                "TOPOBUS_CLUSTER_SETTINGS": '{"TOPOBUS_GATEWAY__DEADLINES__RECONCILE_S": "0.5"}',
            }
        )

    assert answer.returncode == 0, answer.stdout[-6000:]
    assert "15 passed" in answer.stdout
    assert "skipped" not in answer.stdout


def test_suite_fails_with_reasons_when_topobus_is_not_there(short_folder: Path) -> None:
    """A node without Topobus: no test passes in silence, and the first line of the failure says
    what was awaited.
    """
    with small_cluster(short_folder):
        environment = {
            "KUBECONFIG": str(short_folder / "kubeconfig"),
            "TOPOBUS_KUBELET_DIR": str(short_folder),
            "TOPOBUS_CLUSTER_LIMIT_S": "0.5",
        }
        answer = suite(environment)

    assert answer.returncode == 1
    assert "passed" not in answer.stdout
    assert "not within 0.5 s: slices of gpu on small-node; last seen: {}" in answer.stdout


def test_suite_is_skipped_aloud_when_no_cluster_is_named() -> None:
    """Without a cluster nothing runs, and the end of the run says so in capitals."""
    answer = suite({})

    assert answer.returncode == 0
    assert "CLUSTER TESTS DID NOT RUN: set KUBECONFIG, TOPOBUS_KUBELET_DIR" in answer.stdout


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"TOPOBUS_KUBELET_DIR": "nowhere"}, "is not this node's kubelet folder"),
        ({"KUBECONFIG": "nowhere"}, "KUBECONFIG=nowhere cannot be used"),
        ({"KUBECONFIG": "dead"}, "cannot be reached"),
        (
            {"KUBECONFIG": "nobody"},
            'the suite needs the rights of a cluster\'s administrator: nodes is forbidden: User "nobody" cannot list',
        ),
        ({"TOPOBUS_CLUSTER_NODE": "other"}, "TOPOBUS_CLUSTER_NODE: there is no node 'other', there are small-node"),
        ({"TOPOBUS_CLUSTER_INSTALLATION": "helm"}, "TOPOBUS_CLUSTER_INSTALLATION is 'helm', wanted one of running"),
        ({"TOPOBUS_CLUSTER_LIMIT_S": "long"}, "TOPOBUS_CLUSTER_LIMIT_S is 'long', wanted a number of seconds"),
    ],
    ids=["folder", "kubeconfig", "server", "rights", "node", "installation", "limit"],
)
def test_suite_says_what_is_wrong_when_its_environment_is(
    cluster_for_errors: Path, environment: dict[str, str], said: str
) -> None:
    """One sentence with the variable, what it says and what is wanted.

    Never the traceback of a client.
    """
    folder = cluster_for_errors
    files = {"dead": folder / "dead", "nobody": folder / "nobody"}
    given = {"KUBECONFIG": str(folder / "kubeconfig"), "TOPOBUS_KUBELET_DIR": str(folder), **environment}
    given["KUBECONFIG"] = str(files.get(given["KUBECONFIG"], given["KUBECONFIG"]))
    answer = suite(given)

    assert answer.returncode != 0
    assert said in " ".join(answer.stdout.split()) + " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stdout
    assert "site-packages" not in answer.stdout
