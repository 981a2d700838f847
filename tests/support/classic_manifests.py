"""Manifests of the classic API: classes, claims with parameters, and pods that use them."""

from __future__ import annotations

CLASSES = """
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: gpu}
driverName: gpu.topobus.dev
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: shared-gpu}
driverName: gpu.topobus.dev
parametersRef: {apiGroup: gpu.resource.topobus.dev, kind: DeviceClassParameters, name: shared}
---
apiVersion: gpu.resource.topobus.dev/v1alpha1
kind: DeviceClassParameters
metadata: {name: shared}
spec: {shareable: true, selector: {productName: "*h100*"}, sharing: {strategy: TimeSlicing}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: nic}
driverName: nic.topobus.dev
"""


def claim(name: str, *, mode: str = "WaitForFirstConsumer", of: str = "gpu", parameters: str = "") -> str:
    """Write a claim."""
    reference = (
        f"parametersRef: {{apiGroup: gpu.resource.topobus.dev, kind: ClaimParameters, name: {parameters}}}"
        if parameters
        else ""
    )
    return f"""
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
  resourceClassName: {of}
  allocationMode: {mode}
  {reference}
"""


def parameters(name: str, text: str) -> str:
    """Write claim parameters for GPUs."""
    return (
        "---\napiVersion: gpu.resource.topobus.dev/v1alpha1\nkind: ClaimParameters\nmetadata: {name: "
        f"{name}}}\nspec: {text}\n"
    )


def pod(name: str, *claims: str, template: str = "", extra: str = "", gpus: int = 0) -> str:
    """Write a pod with claims in the form of Kubernetes 1.26 to 1.30."""
    entries = [
        f"{{name: c{index}, source: {{resourceClaimName: {each_claim}}}}}" for index, each_claim in enumerate(claims)
    ]
    entries += [f"{{name: made, source: {{resourceClaimTemplateName: {template}}}}}"] if template else []
    limits = f"{{topobus.dev/gpu: {gpus}}}" if gpus else "{}"
    return f"""
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  containers: [{{name: main, resources: {{limits: {limits}}}}}]
  resourceClaims: [{", ".join(entries)}]
  {extra}
"""


TEMPLATE = """
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {resourceClassName: gpu}}
"""
