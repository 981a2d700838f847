"""Two network namespaces a test: one that is the host for the plugins, one that is the pod; and the
plugins themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cni_bundle import Bundle, provide_bundle
from support.net_namespaces import Namespace, new_namespace
from support.nic_rig import NicRig, nic_rig
from topobus.nic.cni.records import AttachmentRecords
from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.messages import CniResult, Target
from topobus.nic.cni.runner import CniRunner, RunnerSettings
from topobus.values.outcome import Refusal

# Real time: a plugin of the bundle takes some tens of milliseconds, and this machine may be busy.
_LIMIT_S = 30.0


@dataclass
class Node:
    """A host with a pod's sandbox.

    Plugins run in the host's namespace, so that the machine's own
    interfaces and rules are never touched.
    """

    bundle: Bundle
    host: Namespace
    pod: Namespace
    folder: Path
    stack: ExitStack

    @property
    def runner(self) -> CniRunner:
        """A runner as after a start."""
        settings = RunnerSettings(
            bin_dirs=(self.bundle.bin_dir,), program_path=self.bundle.program_path, limit_s=_LIMIT_S
        )
        return CniRunner(settings, AttachmentRecords(self.folder / "records"))

    def namespace(self, role: str) -> Namespace:
        """One more namespace, such as a network beyond the host."""
        return self.stack.enter_context(new_namespace(role))

    def target(self, interface: str = "net1", **changes: Any) -> Target:
        """The attachment of the pod."""
        fields = {"container_id": self.pod.name, "interface": interface, "network_namespace": self.pod.path}
        return Target(**{**fields, **changes})

    def chain(self, *plugins: dict[str, Any], version: str = "1.0.0", name: str = "data") -> Chain:
        """A chain of real plugins."""
        chain = parse_chain({"cniVersion": version, "name": name, "plugins": list(plugins)}, f"{name}.conflist")
        assert isinstance(chain, Chain), chain
        return chain

    def add(self, chain: Chain, target: Target | None = None) -> CniResult:
        """Attach; a refusal fails the test with its words."""
        outcome = self.host.call(lambda: self.runner.add(chain, target or self.target()))
        assert isinstance(outcome, CniResult), outcome
        return outcome

    def delete(self, interface: str = "net1", network: str = "data") -> Refusal | None:
        """Detach."""
        return self.host.call(lambda: self.runner.delete(network, self.pod.name, interface))

    def host_local(self, subnet: str = "10.99.0.0/24", **keys: Any) -> dict[str, Any]:
        """Addresses of host-local, kept in the test's folder."""
        return {
            "type": "host-local",
            "ranges": [[{"subnet": subnet}]],
            "dataDir": str(self.folder / "addresses"),
            **keys,
        }

    @property
    def leased(self) -> list[str]:
        """Addresses that host-local holds."""
        return sorted(path.name for path in (self.folder / "addresses").glob("*/*.*") if path.name[0].isdigit())


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """Debian's plugins, or NOT CHECKED."""
    return provide_bundle()


@pytest.fixture
def node(bundle: Bundle, tmp_path: Path) -> Iterator[Node]:
    """A host and a pod, nothing attached."""
    with ExitStack() as stack:
        host = stack.enter_context(new_namespace("host"))
        pod = stack.enter_context(new_namespace("pod"))
        yield Node(bundle, host, pod, tmp_path, stack)


@pytest.fixture
def rig() -> Iterator[NicRig]:
    """One interface of this machine, and one pod."""
    with nic_rig() as made:
        yield made
