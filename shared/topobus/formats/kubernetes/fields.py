"""Legal field names of Kubernetes objects that Topobus has no use for, so that they are not
mistaken for typing errors.

Source: k8s.io/api/core/v1/types.go and k8s.io/apimachinery/pkg/apis/meta/v1/types.go, 1.36.
"""

from __future__ import annotations

from topobus.formats.kubernetes import pod, resource
from topobus.formats.kubernetes.objects import Metadata

__all__ = ["TOP_FIELDS", "UNUSED_FIELDS"]

TOP_FIELDS = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_META = frozenset(
    [
        "name",
        "generateName",
        "namespace",
        "selfLink",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "labels",
        "annotations",
        "ownerReferences",
        "finalizers",
        "managedFields",
    ]
)
# Legal names that we have no use for. Source: k8s.io/api/core/v1/types.go, 1.36.
UNUSED_FIELDS: dict[type, frozenset[str]] = {
    Metadata: _META,
    pod.PodSpec: frozenset(
        [
            "volumes",
            "ephemeralContainers",
            "restartPolicy",
            "terminationGracePeriodSeconds",
            "activeDeadlineSeconds",
            "dnsPolicy",
            "serviceAccountName",
            "serviceAccount",
            "automountServiceAccountToken",
            "hostNetwork",
            "hostPID",
            "hostIPC",
            "shareProcessNamespace",
            "securityContext",
            "imagePullSecrets",
            "hostname",
            "subdomain",
            "affinity",
            "schedulerName",
            "tolerations",
            "hostAliases",
            "priorityClassName",
            "priority",
            "dnsConfig",
            "readinessGates",
            "runtimeClassName",
            "enableServiceLinks",
            "preemptionPolicy",
            "overhead",
            "topologySpreadConstraints",
            "setHostnameAsFQDN",
            "os",
            "hostUsers",
            "schedulingGates",
            "resources",
            "hostnameOverride",
            "workloadRef",
            "schedulingGroup",
        ]
    ),
    pod.Container: frozenset(
        [
            "image",
            "command",
            "args",
            "workingDir",
            "ports",
            "envFrom",
            "env",
            "resizePolicy",
            "restartPolicyRules",
            "volumeMounts",
            "volumeDevices",
            "livenessProbe",
            "readinessProbe",
            "startupProbe",
            "lifecycle",
            "terminationMessagePath",
            "terminationMessagePolicy",
            "imagePullPolicy",
            "securityContext",
            "stdin",
            "stdinOnce",
            "tty",
        ]
    ),
    pod.PodClaim: frozenset(["podGroupResourceClaim"]),
    resource.ExactRequest: frozenset(["derivedAttributes"]),
    resource.SubRequest: frozenset(["derivedAttributes"]),
    resource.SliceDevice: frozenset(
        ["nodeAllocatableResourceMappings", "nodeAllocatableResources", "skipNodeOperations", "compatibilityGroups"]
    ),
}
