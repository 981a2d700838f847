"""A Kubernetes API server for tests of controllers and DRA drivers: real HTTP on loopback, no cluster, no etcd, nothing to install.

    async with ApiServerSimulator() as server:
        server.put({"kind": "Node", "metadata": {"name": "n1"}})
        start_my_driver(kubeconfig=server.write_kubeconfig(tmp_path / "kubeconfig"))
        await server.until(lambda: server.objects("ResourceSlice"), what="a slice")
        server.wipe_slices("n1")                     # what kubelet does at its start
        server.compact()                             # the next watch from an old version gets 410
        server.refuse("POST", "resourceslices", code=500, times=2)
        assert not [request for request in server.requests if request.is_write]

As a process: `python -m topobus.testing.apiserver --kubeconfig FILE --node n1` serves until it is told to stop.

What it does: resource.k8s.io/v1 ResourceSlice, ResourceClaim, ResourceClaimTemplate, DeviceClass, DeviceTaintRule (also v1beta2, v1alpha3), v1 Pod and Node,
with validation by the published limits; as plain objects what a deployment is made of (`RESOURCES`); get, list (with limit and continue), watch (from a version,
from now, with initial events, bookmarks, 410), create with generateName, update, JSON patch, merge patch, strategic merge patch, server-side apply, delete
with preconditions and finalizers, deletecollection, the status subresource, pods/binding, field and label selectors, Status bodies for every error, bearer
tokens, users with the rights of the Role objects that it holds (403, and which rights were used), garbage collection by owner, claims from templates. `drops`
makes it an older server that does not know some fields. kubectl 1.36 gets, applies, patches, watches and deletes there.
What it does not: TLS, admission, scheduling, managedFields, protobuf, tables, and a continued list shows the present, not the state of its first page.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec import structs

from topobus.testing.apiserver.access import (
    ADMIN,
    Access,
    Right,
    verb_of,
)
from topobus.testing.apiserver.claims import release_claims, serve_templates
from topobus.testing.apiserver.http import Connection, HttpRequest
from topobus.testing.apiserver.patches import APPLY, patched
from topobus.testing.apiserver.routes import (
    Target,
    as_list,
    discovery,
    of_kind,
    place_of,
    target_of,
    version_of,
)
from topobus.testing.apiserver.shapes import Selector
from topobus.testing.apiserver.store import Store
from topobus.testing.apiserver.streams import Watch
from topobus.testing.apiserver.values import (
    RESOURCES,
    ApiError,
    ApiRequest,
    Object,
    Resource,
    bad_request,
)

__all__ = ["RESOURCES", "ApiError", "ApiRequest", "ApiServerSimulator", "Object", "Right"]


class ApiServerSimulator:
    """One API server on 127.0.0.1.

    Args:
        drops: kind to paths that this server does not know and drops in silence: `{"ResourceSlice": ["spec.devices.*.taints"]}`.
        token: the bearer token that every request must carry; empty: none.
        port: where to listen; 0 takes any that is free.
        bookmark_s: how often a watch that asked for bookmarks gets one (a real server: about a minute).
        collects_garbage: delete what a deleted object owned at once; else `collect_garbage` does when called.
    """

    def __init__(
        self,
        *,
        drops: Mapping[str, Iterable[str]] | None = None,
        token: str = "",
        bookmark_s: float = 60.0,
        port: int = 0,
        collects_garbage: bool = False,
    ) -> None:
        self._store = Store(drops or {}, is_collecting=collects_garbage)
        self._token = token
        self._access = Access(token, lambda kind: self.objects(kind))
        self._bookmark_s = bookmark_s
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._refusals: list[tuple[str, str, ApiError]] = []
        self._requests: list[ApiRequest] = []

    @property
    def url(self) -> str:
        """Where it listens; the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> tuple[ApiRequest, ...]:
        """Every request so far, in order of arrival; a watch has code 0 until it ends."""
        return tuple(self._requests)

    @property
    def open_watches(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; objects of before a stop are still there."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listening socket and every connection."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None

    def write_kubeconfig(self, path: Path, *, user: str = ADMIN) -> Path:
        """Write a kubeconfig that leads here, as the administrator or as somebody whose rights are the server's Role objects.

        A service account is user `system:serviceaccount:NAMESPACE:NAME`.
        """
        token = self._token if user == ADMIN else self._access.add_user(user)
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "simulator",
                    "clusters": [{"name": "simulator", "cluster": {"server": self.url}}],
                    "users": [{"name": "simulator", "user": {"token": token} if token else {}}],
                    "contexts": [{"name": "simulator", "context": {"cluster": "simulator", "user": "simulator", "namespace": "default"}}],
                }
            ),
            encoding="utf-8",
        )
        return path

    def put(self, api_object: Object, *, namespace: str = "default") -> Object:
        """Create an object, or replace it together with its status, as somebody else in the cluster would."""
        resource = of_kind(str(api_object.get("kind")))
        namespace = str(api_object.get("metadata", {}).get("namespace", namespace)) if resource.is_namespaced else ""
        name = str(api_object.get("metadata", {}).get("name", ""))
        try:
            self._store.get(resource, namespace, name)
        except ApiError:
            stored = self._store.create(resource, namespace, api_object)
        else:
            stored = self._store.update(resource, namespace, name, api_object, is_trusted=True)
        if resource.has_status and "status" in api_object:
            status = {"status": api_object["status"]}
            stored = self._store.update(resource, namespace, stored["metadata"]["name"], status, subresource="status", is_trusted=True)
        return stored

    def objects(self, kind: str, *, fields: str = "") -> list[Object]:
        """Read all objects of a kind."""
        resource = of_kind(kind)
        return self._store.select(resource, "", Selector(fields, "", resource.fields))

    def remove(self, kind: str, name: str, *, namespace: str = "default", grace_s: int | None = None) -> None:
        """Delete an object, as somebody else in the cluster would; a bound pod without any grace as kubelet does at its end."""
        self._store.delete(of_kind(kind), namespace, name, {} if grace_s is None else {"gracePeriodSeconds": grace_s})

    def bind(self, pod: str, node: str, *, namespace: str = "default") -> None:
        """Bind a pod to a node, as a scheduler does."""
        self._store.bind(of_kind("Pod"), namespace, pod, node)

    def wipe_slices(self, node: str, driver: str = "") -> int:
        """Delete a node's slices, or one driver's of them, as kubelet does at its start and when a driver stays away; how many there were."""
        resource = of_kind("ResourceSlice")
        fields = f"spec.nodeName={node}" + (f",spec.driver={driver}" if driver else "")
        names = [resource_slice["metadata"]["name"] for resource_slice in self.objects("ResourceSlice", fields=fields)]
        for name in names:
            self._store.delete(resource, "", name)
        return len(names)

    def collect_garbage(self) -> list[str]:
        """Delete objects whose owners are gone; their names."""
        return self._store.collect_garbage(RESOURCES)

    def generate_claims(self) -> list[str]:
        """Make the claims that pods want of templates, as kube-controller-manager does; their names."""
        return serve_templates(self._store, of_kind("Pod"), of_kind("ResourceClaimTemplate"), of_kind("ResourceClaim"))

    def release_claims(self) -> list[str]:
        """Take back reservations and allocations of pods that have ended or are gone, as kube-controller-manager does; the claims' names."""
        return release_claims(self._store, of_kind("Pod"), of_kind("ResourceClaim"))

    def add_user(self, user: str) -> str:
        """Make a user whose rights are the server's Role objects; its token."""
        return self._access.add_user(user)

    def rights_used(self, user: str) -> frozenset[Right]:
        """What a user has asked for, granted or not."""
        return self._access.used(user)

    def rights_unused(self, user: str) -> frozenset[Right]:
        """What the Role objects grant a user and it has never asked for."""
        return self._access.unused(user)

    def compact(self) -> None:
        """Forget the history: whoever goes on from an older version gets 410."""
        self._store.compact()

    def set_drops(self, drops: Mapping[str, Iterable[str]]) -> None:
        """Become another server version: other fields are dropped from now on."""
        self._store.drops = {kind: tuple(paths) for kind, paths in drops.items()}

    def close_watches(self) -> None:
        """Cut off every watch, as a server does that goes away."""
        for task in tuple(self._watches):
            task.cancel()

    def refuse(
        self, method: str, plural: str, *, code: int, reason: str = "InternalError", times: int = 1, retry_after_s: int | None = None
    ) -> None:
        """Answer the next requests of a kind with an error."""
        error = ApiError(code, reason, "refused by the test", retry_after_s=retry_after_s)
        self._refusals += [(method, plural, error)] * times

    async def until(self, holds: Callable[[], object], *, timeout_s: float = 10.0, what: str = "a state") -> None:
        """Wait until something about the objects or requests is true."""
        await self._store.until(lambda: bool(holds()), timeout_s, what)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._tasks.add(task)
        connection = Connection(reader, writer)
        try:
            while (request := await connection.read()) is not None:
                await self._serve(connection, request)
        except ApiError as err:
            await connection.answer(err.code, err.status)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client left, or the test closes us: either way this connection is over, and asyncio's stream callback must not see it.
            return
        finally:
            self._tasks.discard(task)
            self._watches.discard(task)
            await connection.close()

    async def _serve(self, connection: Connection, request: HttpRequest) -> None:
        index = len(self._requests)
        code, headers = 200, {}
        try:
            body = request.json()
            seen = ApiRequest(method=request.method, path=request.path, query=request.query, body=body)
            self._requests.append(seen)
            user = self._access.user_of(request.headers.get("authorization", ""))
            self._requests[index] = seen = structs.replace(seen, user=user)
            target = target_of(request.path)
            self._authorize(request, user, target)
            if target is None:
                answer = discovery(request.path)
            elif request.method == "GET" and request.query.get("watch") in ("true", "1"):
                self._check_refusal(request.method, target.resource)
                await self._watch(connection, target, request.query)
                return
            else:
                self._check_refusal(request.method, target.resource)
                with self._store.rehearsal() if request.query.get("dryRun") == "All" else nullcontext():
                    code, answer = self._act(target, request, body, user)
        except ApiError as err:
            code, answer = err.code, err.status
            headers = {} if err.retry_after_s is None else {"Retry-After": str(err.retry_after_s)}
        if index < len(self._requests):
            self._requests[index] = structs.replace(self._requests[index], code=code)
        self._store.wake()
        await connection.answer(code, answer, headers)

    def _act(self, target: Target, request: HttpRequest, body: Any, user: str) -> tuple[int, Object]:
        """Do one request that is no watch."""
        resource, namespace, name = target.resource, target.namespace, target.name
        selector = Selector(request.query.get("fieldSelector", ""), request.query.get("labelSelector", ""), resource.fields)
        match request.method, bool(name):
            case "GET", True:
                return 200, self._store.get(resource, namespace, name)
            case "GET", False:
                return 200, self._list(target, selector, request.query)
            case "POST", False:
                return 201, self._store.create(resource, namespace, body or {})
            case "POST", True if target.subresource == "binding":
                self._store.bind(resource, namespace, name, str(((body or {}).get("target") or {}).get("name", "")))
                return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}
            case "POST", True if target.subresource == "eviction":
                self._store.delete(resource, namespace, name, (body or {}).get("deleteOptions"))
                return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}
            case "PUT", True:
                self._check_status(target, user, "update", body or {})
                return 200, self._store.update(resource, namespace, name, body or {}, subresource=target.subresource)
            case "PATCH", True:
                return self._patch(target, request, body or {}, user)
            case "DELETE", True:
                return 200, self._store.delete(resource, namespace, name, body)[0]
            case "DELETE", False:
                gone = [
                    self._store.delete(resource, api_object["metadata"].get("namespace", ""), api_object["metadata"]["name"], body)[0]
                    for api_object in self._store.select(resource, namespace, selector)
                ]
                return 200, as_list(resource, gone, self._store.version)
        raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, target: Target, selector: Selector, query: Mapping[str, str]) -> Object:
        after = ""
        if query.get("continue"):
            version, after = json.loads(base64.urlsafe_b64decode(query["continue"]))
            try:
                self._store.check_version(version)
            except ApiError as err:
                raise ApiError(410, "Expired", "The provided continue parameter is too old to display a consistent list result.") from err
        elif query.get("resourceVersionMatch") == "Exact":
            self._store.check_version(version_of(query) or 0)
        api_objects = [
            api_object for api_object in self._store.select(target.resource, target.namespace, selector) if place_of(api_object) > after
        ]
        limit = int(query.get("limit") or 0) or len(api_objects)
        page = as_list(target.resource, api_objects[:limit], self._store.version)
        if api_objects[limit:]:
            token = json.dumps([self._store.version, place_of(api_objects[limit - 1])]).encode()
            page["metadata"] |= {"continue": base64.urlsafe_b64encode(token).decode(), "remainingItemCount": len(api_objects) - limit}
        return page

    def _patch(self, target: Target, request: HttpRequest, body: Any, user: str) -> tuple[int, Object]:
        content_type = request.headers.get("content-type", "").partition(";")[0]
        resource, namespace, name = target.resource, target.namespace, target.name
        if content_type in APPLY:
            manager = request.query.get("fieldManager", "")
            if not manager:
                raise bad_request("PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch")
            is_forced = request.query.get("force") == "true"
            self._check_status(target, user, "patch", body)
            applied, is_new = self._store.apply(
                resource, namespace, name, body, manager=manager, is_forced=is_forced, subresource=target.subresource
            )
            return (201 if is_new else 200), applied
        # Without a version in the patch nothing is compared: the patch is made on what there is now.
        wanted = patched(content_type, self._store.get(resource, namespace, name), body)
        self._check_status(target, user, "patch", wanted)
        return 200, self._store.update(resource, namespace, name, wanted, subresource=target.subresource)

    def _check_status(self, target: Target, user: str, verb: str, wanted: Object) -> None:
        """Judge what is written to a claim's status, part by part."""
        if target.resource.kind == "ResourceClaim" and target.subresource == "status":
            before = self._store.get(target.resource, target.namespace, target.name)
            self._access.check_claim_status(user, verb, target.resource, before, wanted, namespace=target.namespace)

    async def _watch(self, connection: Connection, target: Target, query: Mapping[str, str]) -> None:
        """Stream changes until the client leaves or its time is over."""
        watch = Watch(self._store, target, query, self._bookmark_s)
        task = asyncio.current_task()
        await connection.begin_stream()
        if task is not None:
            self._watches.add(task)
        self._store.wake()
        try:
            await watch.serve(connection)
        finally:
            if task is not None:
                self._watches.discard(task)
            self._store.wake()

    def _authorize(self, request: HttpRequest, user: str, target: Target | None) -> None:
        """Check the rights of a user; discovery is everybody's."""
        if target is None:
            return
        is_watch = request.query.get("watch") in ("true", "1")
        verb = verb_of(request.method, target.name, is_watch=is_watch)
        if target.subresource == "binding":
            verb = "create"
        self._access.check(user, verb, target.resource, namespace=target.namespace, name=target.name, part=target.subresource)

    def _check_refusal(self, method: str, resource: Resource) -> None:
        for index, (wanted, plural, error) in enumerate(self._refusals):
            if (wanted, plural) == (method, resource.plural):
                del self._refusals[index]
                raise error


async def _serve_until_told(arguments: argparse.Namespace) -> None:
    event = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, event.set)
    async with ApiServerSimulator(port=arguments.port, token=arguments.token) as server:
        for node in arguments.node:
            server.put({"kind": "Node", "metadata": {"name": node}})
        if arguments.kubeconfig is not None:
            server.write_kubeconfig(arguments.kubeconfig)
        print(server.url, flush=True)  # noqa: T201  (the answer of a program)
        await event.wait()


def main() -> None:
    """Serve as a process of its own; prints its address."""
    parser = argparse.ArgumentParser(prog="python -m topobus.testing.apiserver", description="A Kubernetes API server without a cluster.")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1; 0: any that is free")
    parser.add_argument("--token", default="", help="the bearer token that requests must carry; empty: none")
    parser.add_argument("--kubeconfig", type=Path, help="write a kubeconfig that leads here")
    parser.add_argument("--node", action="append", default=[], help="make a node of this name; may be repeated")
    asyncio.run(_serve_until_told(parser.parse_args()))
