"""The limits of resource.k8s.io/v1: each is kept at its number and told, with its path, one beyond
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from topobus.formats.kubernetes import resource as r
from topobus.formats.kubernetes.limits import (
    check_object,
    check_taint_rule,
)
from topobus.formats.kubernetes.shape import Problem, read_as
from topobus.formats.messages.messages import ApiObject
from unit.formats.kubernetes_objects import (
    UUID,
    a_class,
    a_slice,
    allocation,
    asking,
    claim,
    counters,
    device,
    granted,
    many,
    names,
    opaque,
    policy,
    request,
    said,
    selectors,
    status,
    tolerations,
    users,
)


def condition(kind: str) -> dict[str, str]:
    """A condition as the API server takes it."""
    return {
        "type": kind,
        "status": "True",
        "reason": "Attached",
        "message": "",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }


class Limit(NamedTuple):
    """A number up to which something is legal."""

    most: int
    check: Callable[[int], list[Problem]]
    path: str


LIMITS = {
    "requests": Limit(32, lambda n: claim({"requests": [request(f"r{i}") for i in range(n)]}), "spec.devices.requests"),
    "constraints": Limit(
        32, lambda n: claim({"constraints": [{"matchAttribute": "d.io/a"}] * n}), "spec.devices.constraints"
    ),
    "claim-config": Limit(32, lambda n: claim({"config": [opaque(20)] * n}), "spec.devices.config"),
    "config-parameters": Limit(
        10240, lambda n: claim({"config": [opaque(n)]}), "spec.devices.config[0].opaque.parameters"
    ),
    "config-driver": Limit(
        63, lambda n: claim({"config": [opaque(20, driver="d" * n)]}), "spec.devices.config[0].opaque.driver"
    ),
    "request-name": Limit(63, lambda n: claim({"requests": [request("r" * n)]}), "spec.devices.requests[0].name"),
    "class-name": Limit(63, lambda n: asking(deviceClassName="c" * n), "exactly.deviceClassName"),
    "selectors": Limit(32, lambda n: asking(selectors=selectors(n)), "exactly.selectors"),
    "expression": Limit(
        10240, lambda n: asking(selectors=[{"cel": {"expression": "t" * n}}]), "selectors[0].cel.expression"
    ),
    "expression-bytes": Limit(
        10240, lambda n: asking(selectors=[{"cel": {"expression": "ä" * 5120 + "t" * (n - 10240)}}]), "cel.expression"
    ),
    "tolerations": Limit(16, lambda n: asking(tolerations=tolerations(n)), "exactly.tolerations"),
    "toleration-key": Limit(63, lambda n: asking(tolerations=[{"key": "k" * n}]), "tolerations[0].key"),
    "toleration-value": Limit(
        63, lambda n: asking(tolerations=[{"key": "k", "value": "v" * n}]), "tolerations[0].value"
    ),
    "alternatives": Limit(
        8,
        lambda n: claim(
            {
                "requests": [
                    {"name": "r", "firstAvailable": [{"name": f"s{i}", "deviceClassName": "c"} for i in range(n)]}
                ]
            }
        ),
        "requests[0].firstAvailable",
    ),
    "constraint-requests": Limit(
        32,
        lambda n: claim(
            {
                "requests": [request(f"r{i}") for i in range(32)],
                "constraints": [{"matchAttribute": "d.io/a", "requests": [f"r{i}" for i in range(n)]}],
            }
        ),
        "constraints[0].requests",
    ),
    "attribute-name": Limit(
        32, lambda n: claim({"constraints": [{"matchAttribute": "d.io/" + "a" * n}]}), "constraints[0]"
    ),
    "attribute-domain": Limit(
        63, lambda n: claim({"constraints": [{"distinctAttribute": "d" * n + "/a"}]}), "constraints[0]"
    ),
    "class-selectors": Limit(32, lambda n: a_class(selectors=selectors(n)), "spec.selectors"),
    "class-config": Limit(32, lambda n: a_class(config=[opaque(20)] * n), "spec.config"),
    "extended-resource": Limit(
        63, lambda n: a_class(extendedResourceName="d.io/" + "x" * n), "spec.extendedResourceName"
    ),
    "driver": Limit(63, lambda n: a_slice(driver="d" * n), "spec.driver"),
    "pool": Limit(
        253,
        lambda n: a_slice(pool={"name": "/".join(["p" * 50] * 4) + "/" + "p" * (n - 204), "resourceSliceCount": 1}),
        "spec.pool.name",
    ),
    "devices": Limit(128, many, "spec.devices"),
    "devices-with-taints": Limit(64, lambda n: many(n, taints=[{"key": "k", "effect": "None"}]), "spec.devices"),
    "devices-with-lists": Limit(64, lambda n: many(n, attributes={"a": {"ints": [1]}}), "spec.devices"),
    "devices-with-counters": Limit(
        64, lambda n: many(n, consumesCounters=[{"counterSet": "s", "counters": counters(1)}]), "spec.devices"
    ),
    "device-name": Limit(63, lambda n: device("d" * n), "spec.devices[0].name"),
    "attributes": Limit(32, lambda n: device(attributes={name: {"int": 1} for name in names(n)}), "spec.devices[0]"),
    "capacities": Limit(32, lambda n: device(capacity={name: {"value": 1} for name in names(n)}), "spec.devices[0]"),
    "both": Limit(
        32,
        lambda n: device(attributes={"a": {"int": 1}}, capacity={name: {"value": 1} for name in names(n - 1)}),
        "spec.devices[0]",
    ),
    "attribute-values": Limit(
        48,
        lambda n: device(attributes={"a": {"ints": list(range(n - 1))}, "b": {"int": 1}}),
        "spec.devices[0].attributes",
    ),
    "attribute-text": Limit(64, lambda n: device(attributes={"a": {"string": "x" * n}}), "attributes.a"),
    "attribute-bytes": Limit(
        64, lambda n: device(attributes={"a": {"strings": ["ä" * 32 + "x" * (n - 64)]}}), "attributes.a"
    ),
    "attribute-version": Limit(
        64, lambda n: device(attributes={"a": {"version": "1.2.3-" + "x" * (n - 6)}}), "attributes.a"
    ),
    "device-attribute-name": Limit(32, lambda n: device(attributes={"a" * n: {"int": 1}}), "attributes."),
    "capacity-domain": Limit(63, lambda n: device(capacity={"d" * n + "/a": {"value": 1}}), "capacity."),
    "taints": Limit(16, lambda n: device(taints=[{"key": "k", "effect": "None"}] * n), "spec.devices[0].taints"),
    "taint-key": Limit(63, lambda n: device(taints=[{"key": "a.io/" + "k" * n, "effect": "None"}]), "taints[0].key"),
    "taint-value": Limit(
        63, lambda n: device(taints=[{"key": "k", "value": "v" * n, "effect": "None"}]), "taints[0].value"
    ),
    "counter-sets": Limit(
        8,
        lambda n: a_slice(sharedCounters=[{"name": name, "counters": counters(1)} for name in names(n)]),
        "spec.sharedCounters",
    ),
    "counters": Limit(
        32, lambda n: a_slice(sharedCounters=[{"name": "s", "counters": counters(n)}]), "sharedCounters[0].counters"
    ),
    "counter-name": Limit(
        63, lambda n: a_slice(sharedCounters=[{"name": "s", "counters": {"c" * n: {"value": 1}}}]), "counters."
    ),
    "consumed-sets": Limit(
        2,
        lambda n: device(consumesCounters=[{"counterSet": name, "counters": counters(1)} for name in names(n)]),
        "consumesCounters",
    ),
    "consumed-counters": Limit(
        32,
        lambda n: device(consumesCounters=[{"counterSet": "s", "counters": counters(n)}]),
        "consumesCounters[0].counters",
    ),
    "binding-conditions": Limit(
        4, lambda n: device(bindingConditions=names(n), bindingFailureConditions=["f"]), "bindingConditions"
    ),
    "failure-conditions": Limit(
        4, lambda n: device(bindingConditions=["f"], bindingFailureConditions=names(n)), "bindingFailureConditions"
    ),
    "valid-values": Limit(10, lambda n: policy(default=0, validValues=list(range(n))), "requestPolicy.validValues"),
    "highest-valid-value": Limit(1000, lambda n: policy(default=1, validValues=[1, n]), "requestPolicy.validValues[1]"),
    "highest-of-range": Limit(1000, lambda n: policy(default=1, validRange={"min": 1, "max": n}), "validRange.max"),
    "range-default": Limit(9, lambda n: policy(default=n, validRange={"min": 1, "max": 9}), "validRange.default"),
    "range-step": Limit(999, lambda n: policy(default=1, validRange={"min": 1, "step": n}), "validRange.step"),
    "results": Limit(32, lambda n: allocation(results=[granted()] * n), "status.allocation.devices.results"),
    "granted-config": Limit(
        64, lambda n: allocation(config=[opaque(20, source="FromClaim")] * n), "status.allocation.devices.config"
    ),
    "granted-tolerations": Limit(
        16, lambda n: allocation(results=[granted(tolerations=tolerations(n))]), "results[0].tolerations"
    ),
    "granted-binding": Limit(
        4,
        lambda n: allocation(results=[granted(bindingConditions=names(n), bindingFailureConditions=["f"])]),
        "results[0].bindingConditions",
    ),
    "reserved-for": Limit(256, lambda n: status(reservedFor=users(n)), "status.reservedFor"),
    "device-conditions": Limit(
        8,
        lambda n: said(conditions=[condition(f"Type{number}") for number in range(n)]),
        "status.devices[0].conditions",
    ),
    "device-data": Limit(10240, lambda n: said(data={"a": "x" * (n - len('{"a":""}'))}), "status.devices[0].data"),
    "interface": Limit(256, lambda n: said(networkData={"interfaceName": "x" * n}), "networkData.interfaceName"),
    "hardware-address": Limit(
        128, lambda n: said(networkData={"hardwareAddress": "x" * n}), "networkData.hardwareAddress"
    ),
    "addresses": Limit(
        16, lambda n: said(networkData={"ips": [f"10.0.0.{i}/24" for i in range(n)]}), "networkData.ips"
    ),
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_check_takes_what_is_at_the_limit_and_tells_what_is_beyond(limit: Limit) -> None:
    """The number itself is legal; one more is one problem, whose path names the place."""
    assert limit.check(limit.most) == []

    beyond = limit.check(limit.most + 1)
    assert len(beyond) == 1, beyond
    assert limit.path in beyond[0].path
    assert beyond[0].message


GOOD = {
    "claim": lambda: claim({}),
    "all": lambda: asking(allocationMode="All"),
    "count": lambda: asking(allocationMode="ExactCount", count=1),
    "tolerates-none": lambda: asking(
        tolerations=[{"key": "a.io/k", "operator": "Equal", "value": "v", "effect": "None", "tolerationSeconds": 5}]
    ),
    "capacity": lambda: asking(capacity={"requests": {"d.io/memory": "1Gi", "cores": 5}}),
    "subrequest-reference": lambda: claim(
        {
            "requests": [{"name": "r", "firstAvailable": [{"name": "s", "deviceClassName": "c"}]}],
            "constraints": [
                {"matchAttribute": "d.io/a", "requests": ["r/s"]},
                {"distinctAttribute": "d.io/a", "requests": ["r"]},
            ],
        }
    ),
    "class": lambda: a_class(extendedResourceName="example.com/gpu", config=[opaque(20)]),
    "selector": lambda: a_slice(
        nodeSelector={
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "a.io/b", "operator": "In", "values": ["x"]}]}]
        }
    ),
    "field": lambda: a_slice(
        nodeSelector={
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]
        }
    ),
    "number": lambda: a_slice(
        nodeSelector={"nodeSelectorTerms": [{"matchExpressions": [{"key": "b", "operator": "Gt", "values": ["-3"]}]}]}
    ),
    "all-nodes": lambda: a_slice(allNodes=True),
    "own-nodes": lambda: a_slice(
        perDeviceNodeSelection=True, devices=[{"name": "d", "allNodes": True}, {"name": "e", "nodeName": "n"}]
    ),
    "version": lambda: device(attributes={"a": {"version": "1.0.0-rc.1+build.5"}, "d.io/b": {"bools": [True]}}),
    "pool-of-parts": lambda: a_slice(pool={"name": "a/b.c", "resourceSliceCount": 1}),
    "values": lambda: policy(default=5, validValues=[5, 10]),
    "range": lambda: policy(default=5, validRange={"min": 5, "max": 25, "step": 10}),
    "default-alone": lambda: policy(default=5),
    "binding": lambda: device(bindsToNode=True, bindingConditions=["a.io/ready"], bindingFailureConditions=["failed"]),
    "shared": lambda: status(
        allocation={"devices": {"results": [granted(shareID=UUID + "0", consumedCapacity={"m": "1"})]}}
    ),
    "addresses": lambda: said(networkData={"ips": ["10.0.0.5/24", "2001:db8::5/64"], "interfaceName": "eth0"}),
    "rule": lambda: check_taint_rule(
        read_as(
            {
                "deviceSelector": {"driver": "d.io", "pool": "p/q", "device": "d"},
                "taint": {"key": "k", "effect": "NoExecute"},
            },
            r.TaintRuleSpec,
            where="",
        )
    ),
}

BAD = {
    "no-kind-of-request": (
        lambda: claim({"requests": [{"name": "r"}]}),
        "requests[0]",
        "exactly one of exactly and firstAvailable",
    ),
    "two-kinds-of-request": (
        lambda: claim({"requests": [{**request(), "firstAvailable": [{"name": "s", "deviceClassName": "c"}]}]}),
        "requests[0]",
        "exactly one",
    ),
    "same-request": (lambda: claim({"requests": [request("a"), request("a")]}), "requests[1].name", "twice"),
    "request-name": (lambda: claim({"requests": [request("A")]}), "requests[0].name", "DNS label"),
    "no-class": (lambda: asking(deviceClassName=""), "deviceClassName", "DeviceClass"),
    "mode": (lambda: asking(allocationMode="all"), "allocationMode", 'did you mean "All"'),
    "count-of-all": (lambda: asking(allocationMode="All", count=2), "count", "none with allocationMode All"),
    "count": (lambda: asking(count=0), "count", "at least 1"),
    "selector-kind": (lambda: asking(selectors=[{"rego": {}}]), "selectors[0]", "wanted cel"),
    "empty-expression": (lambda: asking(selectors=[{"cel": {"expression": ""}}]), "expression", "got 0 bytes"),
    "toleration-operator": (
        lambda: asking(tolerations=[{"key": "k", "operator": "exists"}]),
        "operator",
        "Exists or Equal",
    ),
    "toleration-without-key": (
        lambda: asking(tolerations=[{"operator": "Equal"}]),
        "operator",
        "Exists when there is no key",
    ),
    "toleration-value": (
        lambda: asking(tolerations=[{"operator": "Exists", "value": "x"}]),
        "value",
        "none with operator Exists",
    ),
    "toleration-effect": (lambda: asking(tolerations=[{"operator": "Exists", "effect": "No"}]), "effect", "NoSchedule"),
    "capacity-name": (lambda: asking(capacity={"requests": {"1x": 1}}), "capacity.requests.1x", "identifier"),
    "capacity-amount": (lambda: asking(capacity={"requests": {"m": "1KiB"}}), "capacity.requests.m", "not a quantity"),
    "two-constraints": (
        lambda: claim({"constraints": [{"matchAttribute": "d.io/a", "distinctAttribute": "d.io/a"}]}),
        "constraints[0]",
        "exactly one",
    ),
    "no-constraint": (lambda: claim({"constraints": [{"sameRack": True}]}), "constraints[0]", "exactly one"),
    "constraint-without-domain": (
        lambda: claim({"constraints": [{"matchAttribute": "a"}]}),
        "constraints[0]",
        "domain/name",
    ),
    "constraint-on-nothing": (
        lambda: claim({"constraints": [{"matchAttribute": "d.io/a", "requests": ["r9"]}]}),
        "requests[0]",
        "there is no request",
    ),
    "reference-twice": (
        lambda: claim({"config": [opaque(20, requests=["r0", "r0"])]}),
        "config[0].requests[1]",
        "twice",
    ),
    "no-opaque": (lambda: claim({"config": [{}]}), "config[0]", "wanted opaque"),
    "no-parameters": (lambda: claim({"config": [{"opaque": {"driver": "d.io"}}]}), "parameters", "JSON object"),
    "parameters-no-object": (
        lambda: claim({"config": [{"opaque": {"driver": "d.io", "parameters": [1]}}]}),
        "parameters",
        "got list",
    ),
    "native-resource": (lambda: a_class(extendedResourceName="cpu"), "extendedResourceName", "extended resource"),
    "own-resource": (
        lambda: a_class(extendedResourceName="kubernetes.io/x"),
        "extendedResourceName",
        "extended resource",
    ),
    "two-places": (lambda: a_slice(nodeName="n", allNodes=True), "spec", "exactly one of nodeName"),
    "no-place": (lambda: a_slice(nodeName=None), "spec", "exactly one of nodeName"),
    "not-all-nodes": (lambda: a_slice(allNodes=False), "allNodes", "wanted true"),
    "terms": (lambda: a_slice(nodeSelector={"nodeSelectorTerms": [{}, {}]}), "nodeSelector", "exactly one"),
    "operator": (
        lambda: a_slice(nodeSelector={"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Is"}]}]}),
        "operator",
        "In, NotIn",
    ),
    "field": (
        lambda: a_slice(nodeSelector={"nodeSelectorTerms": [{"matchFields": [{"key": "spec", "operator": "In"}]}]}),
        "matchFields",
        "metadata.name",
    ),
    "devices-and-counters": (
        lambda: a_slice(devices=[{"name": "d"}], sharedCounters=[{"name": "s", "counters": counters(1)}]),
        "spec",
        "not both",
    ),
    "counter-set-twice": (
        lambda: a_slice(sharedCounters=[{"name": "s", "counters": counters(1)}] * 2),
        "sharedCounters[1].name",
        "twice",
    ),
    "no-counters": (lambda: a_slice(sharedCounters=[{"name": "s"}]), "counters", "at least one"),
    "consumed-twice": (
        lambda: device(consumesCounters=[{"counterSet": "s", "counters": counters(1)}] * 2),
        "counterSet",
        "twice",
    ),
    "device-twice": (lambda: a_slice(devices=[{"name": "d"}] * 2), "devices[1].name", "twice"),
    "attribute-of-nothing": (lambda: device(attributes={"a": {}}), "attributes.a", "exactly one of int"),
    "attribute-of-new-kind": (lambda: device(attributes={"a": {"float": 1.5}}), "attributes.a", "exactly one of int"),
    "attribute-of-two": (
        lambda: device(attributes={"a": {"int": 1, "bool": True}}),
        "attributes.a",
        "exactly one of int",
    ),
    "empty-list": (lambda: device(attributes={"a": {"ints": []}}), "attributes.a", "at least one value"),
    "loose-version": (lambda: device(attributes={"a": {"version": "v1.2.3"}}), "attributes.a", "semantic version"),
    "zero-in-version": (lambda: device(attributes={"a": {"version": "1.02.3"}}), "attributes.a", "semantic version"),
    "two-slashes": (lambda: device(attributes={"a/b/c": {"int": 1}}), "attributes.a/b/c", "identifier"),
    "policy-alone": (
        lambda: device(capacity={"m": {"value": 1, "requestPolicy": {"default": 1}}}),
        "requestPolicy",
        "allowMultipleAllocations",
    ),
    "two-policies": (lambda: policy(default=1, validValues=[1], validRange={"min": 1}), "requestPolicy", "not both"),
    "no-default": (lambda: policy(validValues=[1]), "default", "wanted one"),
    "default-outside": (lambda: policy(default=2, validValues=[1]), "validValues", "wanted the default 2"),
    "unsorted": (lambda: policy(default=2, validValues=[2, 1]), "validValues[1]", "ascending"),
    "no-minimum": (lambda: policy(default=2, validRange={"max": 5}), "min", "wanted one"),
    "zero-step": (lambda: policy(default=2, validRange={"min": 2, "step": 0}), "step", "more than 0"),
    "off-step": (lambda: policy(default=3, validRange={"min": 2, "step": 2}), "step", "whole number of steps"),
    "policy-amount": (lambda: policy(default="x", validRange={"min": 2}), "default", "not a quantity"),
    "taint-effect": (lambda: device(taints=[{"key": "k", "effect": "NoWay"}]), "effect", "NoSchedule"),
    "taint-key": (lambda: device(taints=[{"key": "", "effect": "None"}]), "key", "name of a label"),
    "binding-alone": (lambda: device(bindingConditions=["a"]), "bindingFailureConditions", "at least one"),
    "failure-alone": (lambda: device(bindingFailureConditions=["a"]), "bindingConditions", "at least one"),
    "binding-twice": (
        lambda: device(bindingConditions=["a", "a"], bindingFailureConditions=["b"]),
        "bindingConditions[1]",
        "twice",
    ),
    "binding-overlap": (
        lambda: device(bindingConditions=["a"], bindingFailureConditions=["a"]),
        "bindingFailureConditions",
        "is also in",
    ),
    "own-node-alone": (lambda: device(nodeName="n"), "devices[0]", "only with perDeviceNodeSelection"),
    "own-node-missing": (
        lambda: a_slice(perDeviceNodeSelection=True, devices=[{"name": "d"}]),
        "devices[0]",
        "exactly one",
    ),
    "granted-request": (
        lambda: allocation(
            read_as({"devices": {"requests": [request("a")]}}, r.ClaimSpec, where=""), results=[granted(request="b")]
        ),
        "results[0].request",
        "there is no request",
    ),
    "granted-device": (lambda: allocation(results=[granted(device="D")]), "results[0].device", "DNS label"),
    "config-source": (lambda: allocation(config=[opaque(20, source="FromUser")]), "config[0].source", "FromClass"),
    "share-id": (lambda: status(allocation={"devices": {"results": [granted(shareID="SHARE-0")]}}), "shareID", "UUID"),
    "user-twice": (lambda: status(reservedFor=users(1) * 2), "reservedFor[1].uid", "twice"),
    "user-without-name": (
        lambda: status(reservedFor=[{"resource": "pods", "uid": "u"}]),
        "reservedFor[0]",
        "wanted name",
    ),
    "reserved-alone": (lambda: status(allocation=None, reservedFor=users(1)), "reservedFor", "without an allocation"),
    "status-of-another": (
        lambda: status(devices=[{"driver": "d.io", "pool": "p", "device": "e"}]),
        "devices[0]",
        "was allocated",
    ),
    "address-without-prefix": (lambda: said(networkData={"ips": ["10.0.0.1"]}), "ips[0]", "prefix"),
    "rule-device": (
        lambda: check_taint_rule(
            read_as(
                {"deviceSelector": {"device": "D"}, "taint": {"key": "k", "effect": "None"}}, r.TaintRuleSpec, where=""
            )
        ),
        "deviceSelector.device",
        "DNS label",
    ),
}


@pytest.mark.parametrize("check", GOOD.values(), ids=GOOD)
def test_check_says_nothing_when_all_is_right(check: Callable[[], list[Problem]]) -> None:
    """What an API server takes is taken."""
    assert check() == []


@pytest.mark.parametrize(("check", "path", "message"), BAD.values(), ids=BAD)
def test_check_names_place_and_wish_when_something_is_wrong(
    check: Callable[[], list[Problem]], path: str, message: str
) -> None:
    """What an API server refuses is refused: the path ends where the fault is, the message says
    what was wanted.
    """
    problems = check()

    assert any(path in problem.path and message in problem.message for problem in problems), problems


@pytest.mark.parametrize(
    "kind", ["ResourceClaim", "DeviceClass", "ResourceSlice", "DeviceTaintRule", "ResourceClaimTemplate"]
)
def test_check_object_tells_a_wrong_type_when_a_stored_object_has_one(kind: str) -> None:
    """An object that anybody stored is told, never raised over."""
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind=kind,
        metadata={"name": "x"},
        spec={"devices": 5, "selectors": 5, "driver": 5, "taint": 5, "spec": 5},
    )

    assert check_object(api_object)
