"""Manifests as users bring them: charts with kinds that are not ours, workloads, and objects of
older API versions.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from topobus.formats.kubernetes.manifest import parse_manifest, parse_mixed
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.values.errors import ContractError

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"app": "web"}, "annotations": {"topobus.dev/locality": "hard:numa"}},
    "spec": {"containers": [{"name": "main", "image": "web", "resources": {"limits": {"topobus.dev/gpu": 1}}}]},
}


def workload(version: str, kind: str, **spec: Any) -> str:
    """A workload named web in namespace prod."""
    return json.dumps(
        {"apiVersion": version, "kind": kind, "metadata": {"name": "web", "namespace": "prod"}, "spec": spec}
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(workload("apps/v1", "Deployment", replicas=3, template=TEMPLATE), 3, id="deployment"),
        pytest.param(workload("apps/v1", "Deployment", template=TEMPLATE), 1, id="one-replica-by-default"),
        pytest.param(workload("apps/v1", "ReplicaSet", replicas=0, template=TEMPLATE), 0, id="none"),
        pytest.param(workload("apps/v1", "StatefulSet", replicas=2, template=TEMPLATE), 2, id="stateful"),
        pytest.param(workload("apps/v1", "DaemonSet", template=TEMPLATE), 1, id="one-a-node"),
        pytest.param(workload("v1", "ReplicationController", replicas=2, template=TEMPLATE), 2, id="controller"),
        pytest.param(workload("batch/v1", "Job", template=TEMPLATE), 1, id="job"),
        pytest.param(workload("batch/v1", "Job", parallelism=4, template=TEMPLATE), 4, id="work-queue"),
        pytest.param(
            workload("batch/v1", "Job", parallelism=4, completions=2, template=TEMPLATE), 2, id="few-completions"
        ),
        pytest.param(workload("batch/v1", "Job", completions=9, template=TEMPLATE), 1, id="one-after-the-other"),
        pytest.param(
            workload("batch/v1", "CronJob", jobTemplate={"spec": {"parallelism": 3, "template": TEMPLATE}}),
            3,
            id="cron-job",
        ),
    ],
)
def test_workload_is_read_as_the_pods_that_run_at_once(text: str, count: int) -> None:
    """Each pod has a name of its own, the workload's namespace, and the template's annotations."""
    mixed = parse_mixed(text, where="web.yaml", has_workloads=True)

    assert [name_of(pod) for pod in mixed.objects] == [f"Pod prod/web-{number}" for number in range(count)]
    assert all(metadata_of(pod).annotations == {"topobus.dev/locality": "hard:numa"} for pod in mixed.objects)
    assert mixed.workloads[0].endswith(f" web: {count} pod{'s' if count != 1 else ''}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  template:\n    spec:\n   "
            "   containers:\n      - {name: a, imag: x}\n",
            "web.yaml: document 1 (Deployment default/web), line 8: spec.template.spec.containers[0].imag: "
            'unknown field, did you mean "image"?',
            id="template",
        ),
        pytest.param(
            workload("apps/v1", "Deployment", replicas="2", template=TEMPLATE),
            "(Deployment prod/web), line 1: spec.replicas: got '2', wanted a number",
            id="text",
        ),
        pytest.param(
            workload("batch/v1", "Job", parallelism=True, template=TEMPLATE),
            "spec.parallelism: got True, wanted a number",
            id="bool",
        ),
        pytest.param(
            workload("apps/v1", "Deployment", replicas=10_000, template=TEMPLATE),
            "wanted a number from 0 to 1000",
            id="too-many",
        ),
        pytest.param(
            workload("apps/v1", "Deployment"),
            "(Deployment prod/web), line 1: spec.template: it is missing",
            id="no-template",
        ),
        pytest.param(
            workload("batch/v1", "CronJob", jobtemplate={"spec": {"template": TEMPLATE}}),
            '(CronJob prod/web), line 1: spec.jobtemplate: unknown field, did you mean "jobTemplate"?',
            id="cron-job",
        ),
        pytest.param(
            workload("batch/v1", "CronJob", jobTemplate={"spec": {"templat": TEMPLATE}}),
            'spec.jobTemplate.spec.templat: unknown field, did you mean "template"?',
            id="job-in-cron-job",
        ),
        pytest.param(
            workload("apps/v1", "Deployment", replica=2, template=TEMPLATE),
            'spec.replica: unknown field, did you mean "replicas"?',
            id="number",
        ),
        pytest.param(
            json.dumps({"apiVersion": "apps/v1", "kind": "Deploymnt"}),
            "kind: got 'Deploymnt', did you mean \"Deployment\"?",
            id="kind",
        ),
        pytest.param(
            json.dumps({"apiVersion": "v1", "kind": "Job"}),
            "apiVersion: got 'v1', wanted batch/v1 for a Job",
            id="version",
        ),
    ],
)
def test_workload_is_refused_with_its_place_when_its_template_is_no_pod(text: str, said: str) -> None:
    """A mistake in a template is told with the line in which it stands."""
    with pytest.raises(ContractError) as refused:
        parse_mixed(text, where="web.yaml", has_workloads=True)

    assert said in refused.value.message


def test_fields_beside_a_template_are_not_judged_when_they_are_like_none_that_is_looked_at() -> None:
    """A field of a newer Kubernetes, and one whose name begins as another's, are no typing errors.

    Another group's Job is not ours.
    """
    job = workload("batch/v1", "Job", completionMode="Indexed", somethingNew=1, template=TEMPLATE)
    other = '{"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job"}'

    mixed = parse_mixed(f"{job}\n---\n{other}", where="jobs.yaml", has_workloads=True)

    assert (len(mixed.objects), mixed.left_out) == (1, ("Job",))


def test_workload_without_a_name_is_called_by_what_it_has() -> None:
    """Jobs are often made with a generated name."""
    text = json.dumps(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"generateName": "run-"}, "spec": {"template": TEMPLATE}}
    )

    assert [name_of(pod) for pod in parse_mixed(text, where="j", has_workloads=True).objects] == ["Pod default/run-0"]


def test_kinds_of_others_are_left_out_and_named_when_ours_stand_beside_them() -> None:
    """Services, custom resources and, where nobody plans pods, workloads; ours are read as ever."""
    texts = [
        workload("apps/v1", "Deployment", template=TEMPLATE),
        '{"apiVersion": "v1", "kind": "Service"}',
        '{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"}',
        '{"apiVersion": "openshift.io/v1", "kind": "Node"}',
        '{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}',
        json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": TEMPLATE["spec"]}),
    ]

    mixed = parse_mixed("\n---\n".join(texts), where="all.yaml", has_nodes=True)

    assert [name_of(api_object) for api_object in mixed.objects] == ["Node n1", "Pod default/a"]
    assert (mixed.workloads, mixed.left_out) == ((), ("Deployment", "Service", "MPIJob", "Node"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{apiVersion: v1, kind: Podd}", 'did you mean "Pod"'),
        ("{apiVersion: resource.k8s.io/v1, kind: ResourceClam}", 'did you mean "ResourceClaim"'),
        ("{apiVersion: apps/v1, kind: Pod}", "apiVersion: got 'apps/v1', wanted v1"),
        ("{kind: Deployment}", "apiVersion: got nothing, wanted apps/v1 for a Deployment"),
        ("[1]", "wanted an object"),
        ("", "there is no object in it"),
    ],
)
def test_misspelt_kind_of_ours_stays_an_error_when_others_are_left_out(text: str, said: str) -> None:
    """Nothing that was meant for us is passed over."""
    with pytest.raises(ContractError) as refused:
        parse_mixed(text, where="a.yaml", has_workloads=True)

    assert said in refused.value.message


REQUEST = {"name": "g", "deviceClassName": "gpu", "count": 2, "selectors": [{"cel": {"expression": "true"}}]}
OF_V1 = {"name": "g", "exactly": {key: value for key, value in REQUEST.items() if key != "name"}}


def older(version: str, kind: str, spec: Any) -> str:
    """An object of an older version."""
    return json.dumps(
        {"apiVersion": f"resource.k8s.io/{version}", "kind": kind, "metadata": {"name": "a"}, "spec": spec}
    )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        pytest.param(
            older("v1beta1", "ResourceClaim", {"devices": {"requests": [REQUEST]}}),
            {"devices": {"requests": [OF_V1]}},
            id="claim",
        ),
        pytest.param(
            older("v1beta2", "ResourceClaim", {"devices": {"requests": [OF_V1]}}),
            {"devices": {"requests": [OF_V1]}},
            id="v1beta2",
        ),
        pytest.param(
            older("v1beta1", "ResourceClaimTemplate", {"spec": {"devices": {"requests": [REQUEST]}}}),
            {"spec": {"devices": {"requests": [OF_V1]}}},
            id="template",
        ),
        pytest.param(
            older(
                "v1beta1",
                "ResourceClaim",
                {"devices": {"requests": [{"name": "g", "firstAvailable": [{"name": "x", "deviceClassName": "gpu"}]}]}},
            ),
            {"devices": {"requests": [{"name": "g", "firstAvailable": [{"name": "x", "deviceClassName": "gpu"}]}]}},
            id="alternatives",
        ),
        pytest.param(older("v1beta1", "DeviceClass", {"selectors": []}), {"selectors": []}, id="class"),
        pytest.param(
            older(
                "v1beta1",
                "ResourceSlice",
                {
                    "driver": "d",
                    "nodeName": "n",
                    "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "a", "basic": {"capacity": {"memory": {"value": "1Gi"}}}}, {"name": "b"}],
                },
            ),
            {
                "driver": "d",
                "nodeName": "n",
                "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "a", "capacity": {"memory": {"value": "1Gi"}}}, {"name": "b"}],
            },
            id="slice",
        ),
    ],
)
def test_object_of_an_older_version_is_read_as_v1(text: str, spec: Any) -> None:
    """As an API server converts it when it stores it."""
    (api_object,) = parse_manifest(text, where="a.yaml")

    assert (api_object.api_version, api_object.spec) == ("resource.k8s.io/v1", spec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            older("v1beta1", "ResourceClaim", {"devices": {"requests": [{**REQUEST, "cont": 1}]}}),
            "spec.devices.requests[0].exactly.cont",
        ),
        (older("v1beta1", "ResourceClaim", {"devices": {"requests": {}}}), "spec.devices.requests"),
        (older("v1beta1", "ResourceClaim", {"devices": {"requests": [1]}}), "spec.devices.requests[0]"),
        (older("v1beta1", "ResourceClaim", [1]), "spec"),
        (older("v1beta1", "ResourceSlice", {"devices": [1]}), "spec.devices[0]"),
        (
            older("v1alpha3", "ResourceClaim", {}),
            "wanted resource.k8s.io/v1 or resource.k8s.io/v1beta2 or resource.k8s.io/v1beta1 or",
        ),
    ],
)
def test_object_of_an_older_version_is_refused_with_its_place_when_it_is_wrong(text: str, said: str) -> None:
    """What cannot be converted keeps its shape, and is told as it would be in v1."""
    with pytest.raises(ContractError) as refused:
        parse_manifest(text, where="a.yaml")

    assert said in refused.value.message


def test_object_of_an_older_version_without_a_spec_is_read_as_v1() -> None:
    """Some users leave it out of classes that select everything."""
    (api_object,) = parse_manifest(
        '{"apiVersion": "resource.k8s.io/v1beta1", "kind": "DeviceClass", "metadata": {"name": "a"}}', where="a"
    )

    assert (api_object.api_version, api_object.spec) == ("resource.k8s.io/v1", {})
