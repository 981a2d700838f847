"""Who may read a device service's journal on a node: the container that makes the folder of a
service without rights gives it what is there, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.kustomize import built, container_of, pod_of

_NOBODY = 65532


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(
    ("overlay", "workload", "service"),
    [("kubernetes-gpu", "topobus-gpu", "gpu"), ("kubernetes-own-class", "topobus-npu", "npu")],
)
def test_journal_belongs_to_the_service_when_root_wrote_it_before(
    overlay: str, workload: str, service: str, tmp_path: Path
) -> None:
    """An overlay whose service is root leaves a lock and entries that nobody else reads.

    The next one's service has them.
    """
    pod = pod_of(built(overlay), "DaemonSet", workload)
    (container,) = pod["initContainers"]
    for name in ("lock", "gpu-0.json"):
        (tmp_path / name).touch(mode=0o600)
    _, *arguments = [part.replace(f"/var/lib/topobus/{service}", str(tmp_path)) for part in container["command"]]

    subprocess.run([sys.executable, *arguments], check=True)

    paths = (tmp_path, *tmp_path.iterdir())
    assert {path.stat().st_uid for path in paths} == {_NOBODY}
    assert len(paths) == 3
    assert (
        container_of(pod, service)["volumeMounts"].count({"name": "state", "mountPath": f"/var/lib/topobus/{service}"})
        == 1
    )
