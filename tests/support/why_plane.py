"""The clusters of `why_clusters` on a real control plane without nodes: Nodes are plain objects, so
pods are bound and never start.

The namespace, which must not be there, and all else that is made is removed again.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from support.cluster import until
from support.why_clusters import GENERATED, JOB, Case
from support.why_edits import without_server_fields
from support.why_objects import NAMESPACE, Plain, asks, claim, class_of, node, pod, slice_of
from topobus.controller.snapshots.listing import open_client, take_snapshot
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.snapshot import TAINT_RULES, Server, has_broken_taint_rules, keeps_counters
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.merge_patch import merged
from topobus.kubernetes.answers import NOT_FOUND, Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.values.cluster_answers import Change, Edit, Verdict

__all__ = ["Refused", "WhyPlane"]

_PLURALS = {
    "DeviceClass": "deviceclasses",
    "DeviceTaintRule": "devicetaintrules",
    "Namespace": "namespaces",
    "Node": "nodes",
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "PriorityClass": "priorityclasses",
    "Pod": "pods",
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "ResourceQuota": "resourcequotas",
    "ResourceSlice": "resourceslices",
    "ServiceAccount": "serviceaccounts",
    "StorageClass": "storageclasses",
}
_VERSIONS = {
    "DeviceTaintRule": "resource.k8s.io/v1beta2",
    "PriorityClass": "scheduling.k8s.io/v1",
    "StorageClass": "storage.k8s.io/v1",
    **dict.fromkeys(("DeviceClass", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice"), "resource.k8s.io/v1"),
}
_NAMESPACED = {
    "PersistentVolumeClaim",
    "Pod",
    "ResourceClaim",
    "ResourceClaimTemplate",
    "ResourceQuota",
    "ServiceAccount",
}
_ORDER = (
    "StorageClass",
    "PersistentVolume",
    "DeviceClass",
    "ResourceSlice",
    "DeviceTaintRule",
    "Node",
    "ResourceClaimTemplate",
    "ResourceClaim",
    # A quota counts what is there before it; a pod that waits comes after all else.
    "ResourceQuota",
    "PersistentVolumeClaim",
    "Pod",
)
_AT_ONCE = {"gracePeriodSeconds": "0"}


class Refused(Exception):
    """The API server did not take a request."""


class WhyPlane:
    """One control plane, on which one cluster after the other is made."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._made: list[tuple[str, str]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, kubeconfig: str) -> AsyncIterator[WhyPlane]:
        """Connect, and make the namespace.

        Errors: raises AssertionError for a control plane that has nodes: it is in use.
        """
        client = open_client(kubeconfig, "")
        plane = cls(client)
        try:
            nodes = await plane._names("Node")
            assert not nodes, f"{client.server} has nodes ({', '.join(nodes)}): name a control plane without any"
            await plane._create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
            await until(
                "the namespace has its account", lambda: plane._names("ServiceAccount"), lambda names: bool(names)
            )
            plane._made.clear()
            yield plane
            await plane._ask("DELETE", "Namespace", NAMESPACE)
            await plane._until_gone("Namespace", NAMESPACE)
        finally:
            await client.close()

    async def heeds(self, gate: str) -> bool:
        """Say whether kube-scheduler heeds what a feature gate lets in. It has the API server's gates."""
        server = await self._server()
        return server.gates[gate] and not (gate == TAINT_RULES and has_broken_taint_rules(server))

    async def keeps_counters(self) -> bool:
        """Say whether kube-scheduler keeps the counters of devices that it refuses."""
        return keeps_counters(await self._server())

    async def _server(self) -> Server:
        return (await take_snapshot(self._client, lambda plural, count: None)).server

    # Making a cluster

    @asynccontextmanager
    async def made(self, case: Case) -> AsyncIterator[None]:
        """Make the objects of a case, the pod to explain last, and remove them at the end."""
        async with self.cleaned():
            await self._make(case)
            yield

    @asynccontextmanager
    async def cleaned(self) -> AsyncIterator[None]:
        """Remove at the end what is made in between."""
        try:
            yield
        finally:
            await self._clean()

    async def make(self, objects: Iterable[Plain], pods: Iterable[Plain]) -> dict[str, str]:
        """Make objects, and pods once kube-scheduler has seen those, one after the other.

        Shapes: result — each pod's node once kube-scheduler has tried it, empty where it found none.
        """
        for plain in objects:
            await self._create(plain)
        await self._until_all_is_seen()
        names = [(await self._create(plain))["metadata"]["name"] for plain in pods]

        async def look() -> dict[str, Plain]:
            listed = await self._ask("GET", "Pod")
            return {each["metadata"]["name"]: each for each in listed["items"] if each["metadata"]["name"] in names}

        def were_tried(stored: dict[str, Plain]) -> bool:
            return all(each["spec"].get("nodeName") or each["status"].get("conditions") for each in stored.values())

        stored = await until("kube-scheduler has tried the pods", look, were_tried)
        return {name: stored[name]["spec"].get("nodeName", "") for name in names}

    async def _until_all_is_seen(self) -> None:
        """Wait until kube-scheduler has seen all nodes, classes, slices and claims: it binds a pod to a node
        that comes after them.
        """
        probe = f"probe-{len(self._made)}"
        driver = "probe.example.com"
        wanted = f"device.driver == '{driver}' && device.attributes['{driver}'].name == '{probe}'"
        device = {"name": "probe", "attributes": {"name": {"string": probe}}}
        await self._create(node(probe))
        await self._create(class_of(driver, expression=wanted, name=probe))
        await self._create(slice_of(driver, probe, [device]))
        await self._create(claim(probe, asks(probe)))
        await self._create(pod(probe, probe))
        await self._until_bound(probe)

    async def _make(self, case: Case) -> None:
        objects = [plain for plain in case.objects if GENERATED not in plain["metadata"].get("annotations", {})]
        objects.sort(key=lambda plain: _ORDER.index(plain["kind"]))
        last = [plain for plain in objects if _is_last(plain)]
        uids: dict[str, str] = {}
        for plain in objects:
            if plain in last:
                continue
            stored = await self._create(plain)
            if plain["kind"] == "Pod":
                uids[plain["metadata"]["name"]] = stored["metadata"]["uid"]
                await self._put_status(plain, plain["status"])
        claims = [plain for plain in objects if plain["kind"] == "ResourceClaim"]
        held = [plain for plain in claims if plain["status"]]
        for plain in held:
            users = [{**user, "uid": uids[user["name"]]} for user in plain["status"]["reservedFor"]]
            await self._put_status(plain, {**plain["status"], "reservedFor": users})
        if held or any("deletionTimestamp" in plain["metadata"] for plain in claims):
            await self._until_claims_are_seen()
        for plain in last:
            await self._create(plain)
            if plain["kind"] != "Pod" and plain["status"].get("phase") != "Pending":
                await self._until_like(plain)

    async def _until_claims_are_seen(self) -> None:
        """Wait until kube-scheduler has seen all claims so far: it tries a pod only once it has seen the
        pod's claim, and sees claims in the order of their changes.

        Without this it would give away once more what a claim holds that it has not seen.
        """
        probe = "probe"
        await self._create(claim(probe, asks("no-such-class")))
        await self._create(pod(probe, probe))
        await until(
            "kube-scheduler has seen the claims",
            lambda: self.read("Pod", probe),
            lambda stored: bool(stored.get("status", {}).get("conditions")),
        )
        await self._remove("Pod", probe)
        await self._remove("ResourceClaim", probe)

    async def _put_status(self, plain: Plain, status: Mapping[str, Any]) -> None:
        await self._ask("PATCH", plain["kind"], plain["metadata"]["name"], body={"status": status}, part="status")

    async def _until_like(self, plain: Plain) -> None:
        """Wait until a controller has written the status that the case has."""
        kind, name = plain["kind"], plain["metadata"]["name"]
        await until(
            f"{kind} {name} has status {plain['status']}",
            lambda: self.read(kind, name),
            lambda stored: {key: (stored.get("status") or {}).get(key) for key in plain["status"]} == plain["status"],
        )

    async def _create(self, plain: Plain) -> Plain:
        kind, metadata = plain["kind"], plain["metadata"]
        self._made.append((kind, metadata["name"]))
        # A claim of a volume that says that it was bound already would count as lost.
        left_out = {"uid", "annotations"} if kind == "PersistentVolumeClaim" else {"uid"}
        kept = {key: value for key, value in metadata.items() if key not in left_out}
        # A Node comes with its status; all others get it later.
        body = {**plain, "metadata": kept} if kind == "Node" else {**without_server_fields(plain), "metadata": kept}
        stored = await self._ask("POST", kind, body=body)
        if kind == "Node":
            # Admission adds a taint to a node that has only just come.
            taints = {"spec": {"taints": plain["spec"].get("taints", [])}}
            await self._ask("PATCH", kind, metadata["name"], body=taints)
        if "deletionTimestamp" in metadata:
            await self._ask("DELETE", kind, metadata["name"])
        return stored

    # What is there

    async def verdict(self) -> Verdict:
        """Explain the pod from a snapshot of the server, as `topobus why` does."""
        snapshot = await take_snapshot(self._client, lambda plural, count: None)
        return explain_pod(ClusterView(snapshot), JOB, CelCompiler())

    async def read(self, kind: str, name: str) -> Plain:
        """Read an object."""
        return await self._ask("GET", kind, name)

    async def until_said(self, pattern: str) -> None:
        """Wait until kube-scheduler says this of the pod, for which it has found no node.

        What it says first may be of a part of the objects.
        """

        def said(stored: Plain) -> str:
            conditions = stored.get("status", {}).get("conditions") or ()
            return next((str(each.get("message")) for each in conditions if each["type"] == "PodScheduled"), "")

        async def look() -> str:
            stored = await self.read("Pod", JOB[1])
            return f"it is bound to {stored['spec']['nodeName']}" if "nodeName" in stored["spec"] else said(stored)

        await until(f"kube-scheduler says {pattern}", look, lambda text: re.search(pattern, text) is not None)

    async def until_bound(self) -> str:
        """Wait until kube-scheduler has bound the pod, and return its node."""
        return await self._until_bound(JOB[1])

    async def _until_bound(self, name: str) -> str:
        stored = await until(
            f"kube-scheduler has bound the pod {name}",
            lambda: self.read("Pod", name),
            lambda stored: bool(stored["spec"].get("nodeName")),
        )
        return str(stored["spec"]["nodeName"])

    # Changing it

    async def apply(self, change: Change) -> None:
        """Make a change, as a person would: what cannot be changed is deleted and made again."""
        for edit in change.edits:
            if edit.patch is None:
                await self._remove(edit.kind, edit.name)
            elif edit.kind == "Node":
                await self._ask("PATCH", "Node", edit.name, body=edit.patch)
            else:
                await self._replace(edit)
            if edit.kind == "ResourceClaimTemplate":
                # The claim that was made of it stays with its pod.
                await self._replace(Edit(kind="Pod", namespace=JOB[0], name=JOB[1], patch={}))

    async def drop(self, kind: str, name: str) -> None:
        """Remove an object as its owner would: a node with its slices, a pod so that the claims that only
        it has lose their devices.
        """
        if kind == "Node":
            for plain in (await self._ask("GET", "ResourceSlice"))["items"]:
                if plain["spec"].get("nodeName") == name:
                    await self._remove("ResourceSlice", plain["metadata"]["name"])
        await self._remove(kind, name)

    async def until_released(self) -> None:
        """Wait until each claim that no pod has is without devices."""

        async def look() -> list[str]:
            claims = (await self._ask("GET", "ResourceClaim"))["items"]
            pods = await self._names("Pod")
            return [
                each["metadata"]["name"]
                for each in claims
                if each.get("status", {}).get("allocation") and each["metadata"]["name"] not in pods
            ]

        await until("claims without pods have no devices", look, lambda names: not names)

    async def put(self, plain: Plain) -> None:
        """Make an object, in the place of one of its name."""
        if plain["metadata"]["name"] in await self._names(plain["kind"]):
            await self._remove(plain["kind"], plain["metadata"]["name"])
        await self._create(plain)

    async def _replace(self, edit: Edit) -> None:
        assert edit.patch is not None
        stored = await self.read(edit.kind, edit.name)
        await self._remove(edit.kind, edit.name)
        await self._create(without_server_fields(merged(stored, edit.patch, named=["containers"])))

    async def _remove(self, kind: str, name: str) -> None:
        await self._ask("DELETE", kind, name, params=_AT_ONCE)
        await self._until_gone(kind, name)

    async def _until_gone(self, kind: str, name: str) -> None:
        await until(f"{kind} {name} is gone", lambda: self._names(kind), lambda names: name not in names)

    async def _clean(self) -> None:
        """Remove what was made, pods first, and the claims that the cluster made."""
        claims = [("ResourceClaim", name) for name in await self._names("ResourceClaim")]
        places = sorted({*self._made, *claims}, key=lambda place: (place[0] != "Pod", place))
        for kind, name in places:
            with _ignoring_absence():
                await self._ask("DELETE", kind, name, params=_AT_ONCE)
                # Whoever would remove it is waiting for something else that is being deleted.
                await self._ask("PATCH", kind, name, body={"metadata": {"finalizers": None}})
        for kind, name in places:
            await self._until_gone(kind, name)
        self._made.clear()

    # The API

    async def _names(self, kind: str) -> list[str]:
        listed = await self._ask("GET", kind)
        return [each["metadata"]["name"] for each in listed["items"]]

    async def _ask(
        self,
        method: str,
        kind: str,
        name: str = "",
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        part: str = "",
    ) -> Plain:
        namespace = NAMESPACE if kind in _NAMESPACED else ""
        path = object_path(_VERSIONS.get(kind, "v1"), _PLURALS[kind], namespace=namespace, name=name, part=part)
        answer = await self._client.ask(method, path, params=params, body=body)
        if isinstance(answer, Rejected):
            raise Refused(f"{method} {path}: {answer.code} {answer.message}", answer.code)
        return dict(answer)


def _is_last(plain: Plain) -> bool:
    """Say whether an object is to find all others there: what a controller writes a status for, and
    the pods without a node.
    """
    if plain["kind"] == "Pod":
        return not plain["spec"].get("nodeName")
    return plain["kind"] in ("PersistentVolumeClaim", "ResourceQuota")


@contextmanager
def _ignoring_absence() -> Iterator[None]:
    try:
        yield
    except Refused as err:
        if err.args[1] != NOT_FOUND:
            raise
