"""Migration: what becomes of each classic object, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.classic.classic_migration import Migration, Severity, migrate
from topobus.formats.kubernetes.manifest import parse_some

CLASS = """
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: gpu, uid: u, resourceVersion: "7", labels: {team: a}}
driverName: gpu.topobus.dev
parametersRef: {apiGroup: gpu.resource.topobus.dev, kind: DeviceClassParameters, name: p}
---
apiVersion: gpu.resource.topobus.dev/v1alpha1
kind: DeviceClassParameters
metadata: {name: p}
spec: {shareable: true, selector: {productName: "H100"}}
"""
CLAIM = """
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {name: c, namespace: team}
spec: {resourceClassName: gpu, parametersRef: {apiGroup: gpu.resource.topobus.dev, kind: ClaimParameters, name: p}}
---
apiVersion: gpu.resource.topobus.dev/v1alpha1
kind: ClaimParameters
metadata: {name: p, namespace: team}
spec: {count: 3, sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 8Gi}}}
"""


def _migrate(*texts: str) -> Migration:
    return migrate(
        parse_some(
            "".join(texts),
            where="f",
            choose=lambda value: value if value.get("apiVersion") not in ("v1", "batch/v1") else None,
        )
    )


def _notes(done: Migration) -> dict[str, Severity]:
    return {note.path: note.severity for note in done.notes}


def test_class_becomes_a_device_class_with_its_parameters_as_selectors() -> None:
    """Identity that only a server gives is left behind, labels are kept."""
    (made,) = _migrate(CLASS).objects

    assert (made["apiVersion"], made["kind"], made["metadata"]) == (
        "resource.k8s.io/v1",
        "DeviceClass",
        {"name": "gpu", "labels": {"team": "a"}},
    )
    assert made["spec"]["selectors"][0] == {"cel": {"expression": class_selector("gpu")}}
    assert made["spec"]["selectors"][1]["cel"]["expression"].endswith('.model.lowerAscii() == "h100"')
    assert _migrate(CLASS).is_complete


def test_claim_becomes_one_request_with_count_and_configuration() -> None:
    """Count, sharing and allocation mode; the mode by an annotation that Kubernetes ignores."""
    done = _migrate(CLASS, CLAIM)
    made = done.objects[1]

    (request,) = made["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 3}
    (config,) = made["spec"]["devices"]["config"]
    assert config["opaque"]["parameters"] == {
        "apiVersion": "topobus.dev/v1",
        "kind": "SharingParameters",
        "strategy": "MPS",
        "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "8Gi"},
    }
    assert made["metadata"]["annotations"] == {"topobus.dev/allocation-mode": "WaitForFirstConsumer"}
    assert done.is_complete


@pytest.mark.parametrize(
    ("texts", "path", "severity"),
    [
        ((CLASS.replace("shareable: true", "shareable: false"),), "parametersRef.shareable", Severity.LOST),
        (
            (CLASS.replace("driverName:", "suitableNodes: {nodeSelectorTerms: [{}]}\ndriverName:"),),
            "suitableNodes",
            Severity.LOST,
        ),
        (
            (CLASS.replace("driverName:", "structuredParameters: true\ndriverName:"),),
            "structuredParameters",
            Severity.LOST,
        ),
        ((CLASS.replace("gpu.topobus.dev", "x.example.com"),), "parametersRef", Severity.LOST),
        ((CLASS.partition("---\napiVersion: gpu")[0],), "parametersRef", Severity.OMITTED),
        (
            (CLASS, CLAIM.replace("spec: {resource", "spec: {allocationMode: Immediate, resource")),
            "spec.allocationMode",
            Severity.LOST,
        ),
        ((CLASS, CLAIM.partition("---\napiVersion: gpu")[0]), "spec.parametersRef", Severity.OMITTED),
        (
            (CLASS, CLAIM.replace("namespace: team}\nspec: {count", "namespace: other}\nspec: {count")),
            "spec.parametersRef",
            Severity.OMITTED,
        ),
        (
            (
                CLASS,
                CLAIM + "status: {}\n",
                CLAIM.replace("kind: ClaimParameters, name: p}", "kind: Foreign, name: p}"),
            ),
            "spec.parametersRef",
            Severity.OMITTED,
        ),
        ((CLAIM,), "spec.resourceClassName", Severity.INFO),
        (
            (CLAIM.replace("metadata: {name: c,", "status: {allocation: {shareable: true}}\nmetadata: {name: c,"),),
            "status.allocation",
            Severity.LOST,
        ),
    ],
)
def test_note_says_where_and_how_much_is_lost(texts: tuple[str, ...], path: str, severity: Severity) -> None:
    """What cannot be said in structured parameters is told with its field, and an object that would
    mean something else is not written.
    """
    done = _migrate(*texts)

    assert _notes(done)[path] is severity
    assert done.is_complete is (severity is Severity.INFO)


def test_object_is_left_out_when_its_meaning_would_be_wider() -> None:
    """A claim whose parameters are not known would take any device."""
    done = _migrate(CLASS, CLAIM.partition("---\napiVersion: gpu")[0])

    assert [api_object["kind"] for api_object in done.objects] == ["DeviceClass"]


def test_parameters_of_another_driver_are_passed_on_as_opaque_configuration() -> None:
    """Its structured driver may know them.

    What they say of count and selection is told to be lost.
    """
    done = _migrate(
        CLASS.replace("gpu.topobus.dev", "x.example.com").partition("parametersRef")[0],
        CLAIM.replace("gpu.resource.topobus.dev", "x.example.com").replace("ClaimParameters", "FooParameters"),
    )
    (config,) = done.objects[1]["spec"]["devices"]["config"]

    assert config["opaque"] == {
        "driver": "x.example.com",
        "parameters": {
            "apiVersion": "x.example.com/v1alpha1",
            "kind": "FooParameters",
            "spec": {
                "count": 3,
                "sharing": {"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "8Gi"}},
            },
        },
    }
    assert _notes(done)["spec.parametersRef"] is Severity.LOST


def test_nvidias_parameters_of_2023_are_translated_for_its_present_driver() -> None:
    """Same words, another driver's name, its own kind of configuration, and only whole GPUs."""
    done = _migrate(
        CLASS.replace("gpu.topobus.dev", "gpu.resource.nvidia.com").partition("parametersRef")[0],
        CLAIM.replace("gpu.resource.topobus.dev", "gpu.resource.nvidia.com").replace(
            "ClaimParameters", "GpuClaimParameters"
        ),
    )
    device_class, claim = done.objects

    assert device_class["spec"]["selectors"] == [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}]
    assert (
        '.type.lowerAscii() == "gpu"'
        in claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"]
    )
    assert claim["spec"]["devices"]["config"][0]["opaque"]["parameters"]["kind"] == "GpuConfig"


def test_template_keeps_the_metadata_of_its_claims() -> None:
    """What the template writes into each claim stays."""
    template = """
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: t}
spec: {metadata: {labels: {a: b}}, spec: {resourceClassName: gpu}}
"""
    made = _migrate(CLASS, template).objects[1]

    assert (made["kind"], made["spec"]["metadata"]) == ("ResourceClaimTemplate", {"labels": {"a": "b"}})
    assert made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] == "gpu"


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ({"apiVersion": "v1", "kind": "Pod", "spec": {"resourceClaims": []}}, ("spec",)),
        ({"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": {}}}}, ("spec", "template", "spec")),
        (
            {
                "apiVersion": "batch/v1",
                "kind": "CronJob",
                "spec": {"jobTemplate": {"spec": {"template": {"spec": {}}}}},
            },
            ("spec", "jobTemplate", "spec", "template", "spec"),
        ),
    ],
)
def test_claims_of_pods_and_of_pod_templates_get_their_newer_form(
    written: dict[str, Any], where: tuple[str, ...]
) -> None:
    """`source` goes; whatever else stands in the object stays as it is."""
    inner = written
    for key in where:
        inner = inner[key]
    inner["resourceClaims"] = [
        {"name": "g", "source": {"resourceClaimTemplateName": "t"}},
        {"name": "h", "resourceClaimName": "x"},
    ]

    (made,) = migrate([written]).objects
    for key in where:
        made = made[key]
    assert made["resourceClaims"] == [
        {"name": "g", "resourceClaimTemplateName": "t"},
        {"name": "h", "resourceClaimName": "x"},
    ]
