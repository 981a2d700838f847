"""A cluster named by the environment.

Without one these tests are skipped, and the end of the run says in
capitals that nothing was checked.

| variable | what | default |
|---|---|---|
| KUBECONFIG | who may list nodes and slices, and make pods, claims and classes | needed |
| TOPOBUS_KUBELET_DIR | kubelet's folder of that node, on this machine: /var/lib/kubelet | needed, but not with `none` |
| TOPOBUS_CLUSTER_NODE | the node, when there are several | the only one |
| TOPOBUS_CLUSTER_INSTALLATION | `running`, `manifests`, `processes`, `hands` or `nodes` (see tests/support/installation.py), or `none`: a control plane without nodes | `running` |
| TOPOBUS_CLUSTER_CLASS | the class that is asked for | `gpu` |
| TOPOBUS_CLUSTER_SECOND_CLASS | the class that is asked for beside it | `nic` |
| TOPOBUS_CLUSTER_IMAGE | an image that waits | registry.k8s.io/pause:3.10 |
| TOPOBUS_CLUSTER_LIMIT_S | how long a state may take | 100 |
| TOPOBUS_CLUSTER_LOOK_S | how often it looks | 0.5 |
| TOPOBUS_CLUSTER_CDI_DIR | where CDI files are | /var/run/cdi |
| TOPOBUS_CLUSTER_NATS_URL | where the installation's NATS is reached, for the console | that test is skipped; `processes` needs none |
| TOPOBUS_CLUSTER_RESTART_KUBELET | shell command | that test is skipped |
| TOPOBUS_CLUSTER_RESTART_RUNTIME | shell command that ends the container runtime and starts it again | that test is skipped |
| TOPOBUS_CLUSTER_KILL_GATEWAY, _UPDATE_SURGE, _UPDATE, _BREAK_DEVICE, _SET_SPARES, _UNINSTALL | shell commands, with installation `running` | that test is skipped |
"""  # noqa: E501

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.cluster.hands import Hands
from support.cluster import Cluster
from support.installation import Installation, make_installation
from support.real_hands import HandsInstallation

_HERE = "tests/e2e/cluster/"
_WANTED = ("KUBECONFIG", "TOPOBUS_KUBELET_DIR")
# A control plane without nodes is enough for these.
_WITHOUT_NODES = ("test_migration.py", "test_tokens.py", "test_what_if.py", "test_why.py")


def _missing(item: pytest.Item | None = None) -> list[str]:
    wanted = _WANTED[:1] if item is not None and item.path.name in _WITHOUT_NODES else _WANTED
    return [name for name in wanted if not os.environ.get(name)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies here when no cluster is named.

    Else keep the order of the file, whatever order the other tests are put
    into: its last test uninstalls.
    """
    places = [index for index, item in enumerate(items) if item.nodeid.startswith(_HERE)]
    in_order = sorted((items[index] for index in places), key=lambda item: (str(item.path), item.reportinfo()[1] or 0))
    for index, item in zip(places, in_order, strict=True):
        items[index] = item
    for item in in_order:
        # Several states a test, each of which may take TOPOBUS_CLUSTER_LIMIT_S.
        item.add_marker(pytest.mark.timeout(1200))
        missing = _missing(item)
        if missing:
            reason = f"NOT CHECKED ON A CLUSTER: {' and '.join(missing)} not set"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it once more where everybody looks."""
    skipped = [stat for stat in terminalreporter.stats.get("skipped", []) if stat.nodeid.startswith(_HERE)]
    if skipped and _missing():
        terminalreporter.write_sep("!", f"{len(skipped)} CLUSTER TESTS DID NOT RUN: set {', '.join(_WANTED)}", red=True)
    elif skipped:
        terminalreporter.write_sep(
            "!", f"{len(skipped)} CLUSTER TESTS DID NOT RUN: each says which command it needs (-rs)", red=True
        )


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    """Topobus on the node; brought up before the first test where the suite does that itself."""
    kubelet = Path(os.environ["TOPOBUS_KUBELET_DIR"])
    _check_folder(kubelet)
    node = asyncio.run(Cluster.find_node(Path(os.environ["KUBECONFIG"]), os.environ.get("TOPOBUS_CLUSTER_NODE", "")))
    made = make_installation(node)
    try:
        asyncio.run(made.install())
        yield made
    finally:
        made.close()


def _check_folder(kubelet: Path) -> None:
    """Fail with a sentence when this cannot be kubelet's folder, or it is not ours to look into."""
    for name in ("plugins_registry", "device-plugins"):
        try:
            # Not is_dir(), to which a folder without rights is none.
            list((kubelet / name).iterdir())
        except PermissionError:
            pytest.fail(
                f"TOPOBUS_KUBELET_DIR={kubelet}: {name} cannot be read by user {os.getuid()}: run this as root",
                pytrace=False,
            )
        except OSError as err:
            why = f"{kubelet / name}: {err.strerror}"
            pytest.fail(
                f"TOPOBUS_KUBELET_DIR={kubelet} is not this node's kubelet folder ({why}): see kubelet's --root-dir",
                pytrace=False,
            )


@pytest_asyncio.fixture
async def cluster(installation: Installation) -> AsyncIterator[Cluster]:
    """The cluster that KUBECONFIG names, on the node of TOPOBUS_KUBELET_DIR, with Topobus on it."""
    installation.check()
    async with Cluster.open(Path(os.environ["KUBECONFIG"]), os.environ.get("TOPOBUS_CLUSTER_NODE", "")) as opened:
        yield opened


@pytest_asyncio.fixture
async def hands(topobus: HandsInstallation) -> AsyncIterator[Hands]:
    """Classes and pods of one test, on a module's own installation; removed at the end."""
    topobus.check()
    async with Cluster.open(Path(os.environ["KUBECONFIG"]), os.environ.get("TOPOBUS_CLUSTER_NODE", "")) as opened:
        made = Hands(opened)
        await made.make_classes()
        try:
            yield made
        finally:
            await made.clean()
