"""Manifests: what is read, and what a user is told about a mistake."""

from __future__ import annotations

import pytest

from topobus.formats.kubernetes import (
    admit,
    ask_deletion,
    object_parts,
    parse_manifest,
)
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: trainer
spec:
  containers:
  - name: main
    image: registry.example/trainer:1
    env:
    - {name: A, value: "1"}
    volumeMounts: []
    resources:
      limits:
        cpu: 16
        memory: 64Gi
        topobus.dev/gpu: 2
"""

CLAIM = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: fast
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: gpu
        selectors:
        - cel:
            expression: device.attributes["topobus.dev"].model == "H100"
    - name: nic
      exactly:
        deviceClassName: nic
    constraints:
    - requests: [gpu, nic]
      matchAttribute: resource.kubernetes.io/pcieRoot
"""


def test_parse_manifest_reads_every_document_in_order_when_there_are_several() -> None:
    """A file of several YAML documents gives its objects in the order written.

    Empty documents are nothing.
    """
    api_objects = parse_manifest(f"---\n{POD}---\n---\n{CLAIM}", where="all.yaml")

    assert [(api_object.kind, api_object.metadata["name"]) for api_object in api_objects] == [
        ("Pod", "trainer"),
        ("ResourceClaim", "fast"),
    ]


def test_parse_manifest_keeps_fields_that_topobus_does_not_use_when_they_are_legal() -> None:
    """What belongs to a pod but not to us is kept as it was written."""
    (pod,) = parse_manifest(POD, where="pod.yaml")

    assert pod.spec["containers"][0]["image"] == "registry.example/trainer:1"
    assert pod.spec["containers"][0]["env"] == [{"name": "A", "value": "1"}]


def test_parse_manifest_reads_json_and_lists_when_kubectl_wrote_them() -> None:
    """JSON is read like YAML, and the items of a List one by one."""
    text = (
        '{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a",\n'
        '"creationTimestamp": null}, "spec": {"containers": [{"name": "c", "resources": {"limits": null}}]}, '
        '"status": {}}]}'
    )

    (pod,) = parse_manifest(text, where="list.json")

    assert pod.metadata == {"name": "a"}


def test_parse_manifest_keeps_times_as_text_when_they_are_not_quoted() -> None:
    """A time stamp without quotes stays the text that Kubernetes reads."""
    (pod,) = parse_manifest(
        POD.replace("  name: trainer", "  name: trainer\n  creationTimestamp: 2026-01-02T03:04:05Z"), where="pod.yaml"
    )

    assert pod.metadata["creationTimestamp"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param(
            POD.replace("resources", "reources"),
            ("line 12", "spec.containers[0].reources", 'did you mean "resources"?'),
            id="typo-in-container",
        ),
        pytest.param(POD.replace("cpu: 16", "cpus: 16"), ("limits.cpus", 'did you mean "cpu"?'), id="typo-in-resource"),
        pytest.param(POD.replace("spec:", "spce:"), ("line 5", "spce", 'did you mean "spec"?'), id="typo-at-top"),
        pytest.param(
            POD.replace("kind: Pod", "kind: Pdo"), ("line 2", "'Pdo'", 'did you mean "Pod"?'), id="typo-in-kind"
        ),
        pytest.param(
            POD.replace("name: main", "name: 7"),
            ("line 7", "spec.containers[0].name", "wanted str, got int"),
            id="wrong-type",
        ),
        pytest.param(
            POD.replace("gpu: 2", "gpu: 1500m"),
            ("limits.topobus.dev/gpu is 1500m", "whole number"),
            id="part-of-a-device",
        ),
        pytest.param(POD.replace("gpu: 2", "gpu: -1"), ("limits.topobus.dev/gpu is -1", "0 or more"), id="negative"),
        pytest.param(POD.replace("gpu: 2", "gpu: 0"), ("limits.topobus.dev/gpu is 0", "leave the line out"), id="zero"),
        pytest.param(POD.replace("dev/gpu", "dev/GPU"), ("topobus.dev/GPU", "no device class"), id="illegal-class"),
        pytest.param(POD.replace("64Gi", "64GiB"), ("limits.memory", "'64GiB'"), id="not-a-quantity"),
        pytest.param(
            POD.replace("  name: trainer", "  name: Trainer_1"),
            ("metadata.name", "'Trainer_1'", "lower-case"),
            id="illegal-name",
        ),
        pytest.param(
            POD.replace("  name: trainer", "  name: trainer\n  annotations: {topobus.dev/policy: single-numa}"),
            ("'single-numa'", 'did you mean "single-numa-node"?'),
            id="unknown-policy",
        ),
        pytest.param(
            POD.replace("      limits:", "      limits:\n      limits:"),
            ("line 14", "limits is here twice"),
            id="key-twice",
        ),
        pytest.param(POD.replace("    image:", "     image:"), ("line", "neither YAML nor JSON"), id="broken-yaml"),
        pytest.param("a: &a [x]\nb: &b [*a,*a]\n" + "c: [" + "*b," * 60000 + "]", ("too many",), id="anchor-bomb"),
        pytest.param("", ("no object",), id="empty"),
        pytest.param("- 1", ("got list",), id="not-an-object"),
        pytest.param(
            CLAIM.replace("k8s.io/v1", "k8s.io/v1alpha3"), ("apiVersion", "wanted resource.k8s.io/v1"), id="old-version"
        ),
        pytest.param(CLAIM.replace("cel:", "cle:"), ("selectors[0].cle", 'did you mean "cel"?'), id="unknown-selector"),
        pytest.param(
            CLAIM.replace("[gpu, nic]", "[gpu, nik]"),
            ("line 18", "constraints[0].requests[1]", "no request 'nik'"),
            id="unknown-request",
        ),
        pytest.param(
            CLAIM.replace("resource.kubernetes.io/pcieRoot", "pcieRoot"),
            ("constraints[0]", "wanted domain/name"),
            id="bare-attribute",
        ),
        pytest.param(
            CLAIM.replace("name: nic\n", "name: gpu\n"), ("requests[1].name", "is here twice"), id="request-twice"
        ),
        pytest.param(
            CLAIM.replace("deviceClassName: nic", "deviceClassName: nic\n        count: 0"),
            ("exactly.count", "at least 1"),
            id="count-zero",
        ),
        pytest.param(
            CLAIM.replace("deviceClassName: nic", "deviceClassName: nic\n        allocationMode: Al"),
            ("allocationMode", "'Al'"),
            id="mode",
        ),
        pytest.param(
            CLAIM.replace('"H100"', '"' + "x" * 10300 + '"'),
            ("cel.expression", "10240 bytes"),
            id="expression-too-long",
        ),
    ],
)
def test_parse_manifest_names_the_place_when_something_is_wrong(text: str, wanted: tuple[str, ...]) -> None:
    """A mistake is answered with the file, the place, what was found and what was wanted."""
    with pytest.raises(ContractError) as caught:
        parse_manifest(text, where="mine.yaml")

    message = str(caught.value)
    assert "mine.yaml" in message
    assert [part for part in wanted if part not in message] == []


def test_parse_manifest_tells_all_mistakes_at_once_when_there_are_several() -> None:
    """One run is enough to see every mistake in a file."""
    with pytest.raises(ContractError) as caught:
        parse_manifest(
            POD.replace("image", "imgae") + "---\n" + CLAIM.replace("constraints", "constraint"), where="mine.yaml"
        )

    assert [line.split(": ")[-2] for line in str(caught.value).splitlines()] == [
        "spec.containers[0].imgae",
        "spec.devices.constraint",
    ]


def test_parse_manifest_leaves_foreign_resources_alone_when_they_are_unknown() -> None:
    """An extended resource of somebody else is no mistake."""
    (pod,) = parse_manifest(POD.replace("topobus.dev/gpu: 2", "example.com/anything: 3"), where="pod.yaml")

    assert pod.spec["containers"][0]["resources"]["limits"]["example.com/anything"] == 3


def test_object_parts_use_the_cluster_token_when_the_kind_has_no_namespace() -> None:
    """Classes and slices belong to no namespace; claims without one belong to `default`."""
    api_object = ApiObject(api_version="resource.k8s.io/v1", kind="DeviceClass", metadata={"name": "gpu"})
    claim = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "fast"})

    assert object_parts(api_object) == {"kind": "deviceclass", "namespace": "_", "name": "gpu"}
    assert object_parts(claim) == {"kind": "resourceclaim", "namespace": "default", "name": "fast"}


def test_admit_keeps_identity_and_status_when_an_object_is_replaced() -> None:
    """Applying again never changes who the object is or what the controller wrote."""
    (claim,) = parse_manifest(CLAIM, where="claim.yaml")
    first = admit(claim, uid="u1", now="2026-01-01T00:00:00Z")
    notes = {"finalizers": ["x"], "annotations": {"topobus.dev/attempts": "2"}}
    stored = ApiObject(**{**_fields(first), "status": {"allocation": {}}, "metadata": first.metadata | notes})

    again = admit(claim, uid="u2", now="2027-01-01T00:00:00Z", previous=stored)

    assert again == stored


@pytest.mark.parametrize(
    "limits",
    ["{topobus.dev/gpu: [1]}", "{topobus.dev/gpu: {a: 1}}", "{'a[0].b[': [1]}"],
    ids=["list", "mapping", "odd-key"],
)
def test_parse_manifest_ends_when_a_value_of_a_mapping_is_wrong(limits: str) -> None:
    """A wrong value under a key with dots and brackets in it is named with its line.

    Finding that line always comes to an end.
    """
    text = (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: c\n    resources:\n   "
        f"   limits: {limits}\n"
    )

    with pytest.raises(ContractError, match=r"line 8: spec\.containers\[0\]\.resources\.limits"):
        parse_manifest(text, where="pod.yaml")


def test_admit_takes_no_status_from_the_user_when_the_object_is_new() -> None:
    """What `kubectl get -o yaml` printed may be applied elsewhere: it is not allocated there."""
    text = (
        CLAIM.replace("  name: fast", "  name: fast\n  annotations: {topobus.dev/attempts: '9', mine: x}")
        + "status:\n  allocation: {devices: {}}\n"
    )
    (claim,) = parse_manifest(text, where="claim.yaml")

    made = admit(claim, uid="u1", now="2026-01-01T00:00:00Z")

    assert made.status == {}
    assert made.metadata["annotations"] == {"mine": "x"}


def test_admit_refuses_when_the_spec_of_a_claim_changes() -> None:
    """A claim's spec is immutable, as in Kubernetes; a class's is not."""
    (claim,) = parse_manifest(CLAIM, where="claim.yaml")
    (other,) = parse_manifest(
        CLAIM.replace("name: nic", "name: port").replace("gpu, nic", "gpu, port"), where="claim.yaml"
    )
    stored = admit(claim, uid="u1", now="2026-01-01T00:00:00Z")

    with pytest.raises(ContractError, match="cannot be changed"):
        admit(other, uid="u2", now="2026-01-01T00:00:00Z", previous=stored)


def test_ask_deletion_says_that_nothing_holds_it_when_there_is_no_finalizer() -> None:
    """An object with a finalizer is marked and kept; one without may go at once."""
    (claim,) = parse_manifest(CLAIM, where="claim.yaml")
    held = ApiObject(**{**_fields(claim), "metadata": claim.metadata | {"finalizers": ["x"]}})

    marked = ask_deletion(held, now="2026-01-01T00:00:00Z")

    assert ask_deletion(claim, now="2026-01-01T00:00:00Z") is None
    assert marked is not None
    assert marked.metadata["deletionTimestamp"] == "2026-01-01T00:00:00Z"


def _fields(api_object: ApiObject) -> dict[str, object]:
    return {name: getattr(api_object, name) for name in api_object.__struct_fields__}
