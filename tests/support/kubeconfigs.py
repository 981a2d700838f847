"""Kubeconfigs that tests write, and the gateway's cluster opened by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.config import ClusterSettings


def kubeconfig(folder: Path, url: str, user: dict[str, Any], **cluster: Any) -> Path:
    """Write a kubeconfig in place of the one that is there."""
    path = folder / "kubeconfig"
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content), encoding="utf-8")
    fresh.rename(path)
    return path


def opened(path: Path) -> KubernetesCluster:
    """Open a kubeconfig with short pauses."""
    return KubernetesCluster.open(ClusterSettings(mode="kubeconfig", kubeconfig=str(path), retry_s=0.01, call_s=5.0))
