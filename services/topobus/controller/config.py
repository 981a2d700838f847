"""Settings of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from topobus.engine.allocation.values import Mode
from topobus.engine.claims.reservations import AllocationMode
from topobus.engine.health.silence import SilenceSettings
from topobus.engine.repair.policy_faults import fault_of_policy
from topobus.process.config import ServiceSettings
from topobus.values.errors import ConfigError
from topobus.values.repair import RepairPolicy

__all__ = ["ClusterSettings", "ControllerSettings", "check"]

Seconds = Annotated[float, Meta(gt=0)]


class ClusterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API server of the cluster that is the controller's home. Read with `home = "cluster"`
    only.
    """

    kubeconfig: str = ""
    """Path of a kubeconfig file. Empty: the service account of the pod in which the controller
    runs."""
    context: str = ""
    """Context of the file. Empty: its current one."""
    call_s: Seconds = 10.0
    """How long one call may take, in seconds."""
    retry_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """First pause after a call that failed, in seconds. It doubles up to ten, shortened at random
    so that replicas do not return together."""
    page: Annotated[int, Meta(ge=1, le=10_000)] = 500
    """Objects in one page of a list: no more of them are in memory in the server's form. kubectl
    asks for 500."""
    resync_s: Annotated[float, Meta(ge=1)] = 600.0
    """How often a copy is compared with a whole list, in seconds. Changes arrive by watches. The
    list repairs what a watch may have lost."""
    unschedulable_s: Annotated[float, Meta(gt=0, le=86_400)] = 5.0
    """How long kube-scheduler may report a pod as unschedulable before its claims are deallocated
    and tried elsewhere, in seconds: 60 at least while it evicts other pods for it, and 10 more on
    each further node. 5 s: its refusal is final unless it evicts pods, and the devices are idle
    meanwhile. When all nodes were refused, they are tried again after as long, which doubles each
    time up to five minutes."""
    settle_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Time between removing the reservation and deallocating the devices, in seconds. By then a
    binding that kube-scheduler had begun is visible."""
    parallel_pods: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Pods whose writes are in progress at the same time. 16 keep a burst of pods far below what an
    API server allows one client."""
    housekeeping: Literal["cluster", "own"] = "cluster"
    """Which component makes claims from templates, prunes reservations of pods that ended and
    deallocates: kube-controller-manager (`cluster`), or, for gated pods and their claims in
    clusters without it, the controller itself (`own`, which needs more rights)."""


class ControllerSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the controller."""

    home: Literal["stand-alone", "cluster"] = "stand-alone"
    """Where classes, claims and pods are stored: in the stand-alone API on NATS, or at a cluster's
    API server, where pods with the scheduling gate `topobus.dev/allocation` are served. A
    controller has one home. NATS is needed in both, for it has the nodes' ledgers."""
    cluster: ClusterSettings = ClusterSettings()
    mode: Mode = Mode.CORRECTED
    """`corrected` keeps every constraint. `compatible` also has the defects of Kubernetes 1.36, for
    users who must get the very devices that kube-scheduler would choose.
    docs/reference/allocation.md lists the differences."""
    nearness: Literal["prefer", "first-fit"] = "prefer"
    """Which of several equal devices a claim without an alignment request gets: `prefer` those that
    lie closest together (one PCIe switch, else one NUMA node, else one socket), `first-fit` the
    first ones by name, as kube-scheduler does. Mode `compatible` is always first fit."""
    claim_allocation: AllocationMode = AllocationMode.IMMEDIATE
    """When a claim of the stand-alone API is allocated that has no annotation
    `topobus.dev/allocation-mode` and is used by no stored pod. `Immediate`: as soon as it is
    stored, which users who try a claim expect. `WaitForFirstConsumer`: when a pod that uses it is
    scheduled, and until the last such pod is gone."""
    step_budget: Annotated[int, Meta(ge=100)] = 200_000
    """Steps of one search on one node before it gives up, which is never reported as "does not
    fit". The default is about a second of work."""
    ask_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """How long one node may take to answer. 2 s: several times a node's p99, and a plan over silent
    nodes still ends within its own 10 s."""
    parallel_asks: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Nodes asked at the same time for one plan. 32 keeps one plan from flooding the bus in a large
    cluster."""
    parallel_plans: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Plans (`topobus place`) over several nodes that run at the same time. Others wait behind
    plans for one node, in turn by requester. A plan that finds no room is answered with the time of
    the next try. 4: each asks all nodes of the fleet, `parallel_asks` at a time."""
    binding_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """How long a claim may wait for its devices' binding conditions before they are released and
    others are tried, in seconds. 600 s as kube-scheduler's."""
    silence: SilenceSettings = SilenceSettings(every_s=3.0)
    """When a device service that does not answer makes its devices Unknown here: nothing is
    allocated on them, and nothing is released. Services are asked while a claim or a pod waits, and
    until each has been heard: one small message per class and node every nine seconds (every three
    while a service on the node does not answer), `parallel_asks` at a time. Each node's topology
    checks this itself, and sooner."""
    classic_call_s: Annotated[float, Meta(gt=0, le=300)] = 10.0
    """How long one call of a classic driver may take before it is cancelled and tried again later.
    10 s: a driver may have to ask its nodes."""
    retry_s: Annotated[float, Meta(gt=0, le=300)] = 2.0
    """How long to wait before a node that did not answer is asked again for a claim. Changes on the
    bus take effect at once, without this wait."""

    repair: RepairPolicy = RepairPolicy()
    """Which faults are repaired without a person, and how (docs/how-to/repair-by-policy.md). The
    default repairs nothing: faults are observed. All replicas follow the policy of the one that
    started last."""


def check(settings: ControllerSettings) -> None:
    """Refuse settings that cannot work together.

    Errors: raises ConfigError that names the key.
    """
    fault = fault_of_policy(settings.repair)
    if fault is not None:
        raise ConfigError(
            f"controller: repair.{fault[0]}: {fault[1]}",
            next_step="docs/how-to/repair-by-policy.md has an example",
            key=f"repair.{fault[0].partition('[')[0]}",
        )
    if settings.home != "cluster" and settings.cluster != ClusterSettings():
        raise ConfigError(
            f"controller: cluster: settings of a cluster are given, but home is {settings.home!r}",
            next_step="set TOPOBUS_CONTROLLER__HOME=cluster, or leave the cluster's settings out",
            key="home",
        )
    if settings.cluster.kubeconfig and not Path(settings.cluster.kubeconfig).is_file():
        raise ConfigError(
            f"controller: cluster.kubeconfig: there is no file {settings.cluster.kubeconfig}",
            next_step="set TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG to a kubeconfig file, or leave it out in a pod with "
            "a service account",
            key="cluster.kubeconfig",
        )
