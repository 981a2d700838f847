"""What a service loads at its start: nothing that only another way to run it needs.

Each library is processor time and memory on every node.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_CLUSTER = {"lightkube", "httpx2", "yaml"}
_TERMINAL = {"cyclopts", "rich", "watchfiles"}


@pytest.mark.parametrize(
    ("service", "unneeded"),
    [
        pytest.param("gateway", _CLUSTER | _TERMINAL | {"re2", "topobus.devicekit.host.host"}, id="gateway"),
        pytest.param("controller.standalone", _CLUSTER | _TERMINAL | {"grpc", "google.protobuf"}, id="controller"),
        pytest.param("topology", _CLUSTER | _TERMINAL | {"grpc", "google.protobuf", "re2"}, id="topology"),
    ],
)
def test_service_loads_no_library_of_another_home_when_it_starts(service: str, unneeded: set[str]) -> None:
    """The Kubernetes client is loaded by who talks to a cluster, gRPC by the gateway alone, a
    device host in it for other vendors' plugins, the command line's libraries by none.
    """
    code = f"import sys, topobus.{service}.service, topobus.process.service; sys.stdout.write(' '.join(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert set(done.stdout.split()) & unneeded == set()
