"""Manifests of claims, as a user applies them."""

from __future__ import annotations


def claim(name: str, count: int, device_class: str = "gpu.topobus.dev") -> str:
    """Write a claim for some devices."""
    return (
        f"apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}}}\n"
        f"spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: {device_class}, count: "
        f"{count}}}}}]}}}}\n"
    )
