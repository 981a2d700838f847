"""A Kubernetes API server for tests of controllers and DRA drivers: real HTTP on loopback, no
cluster, no etcd, nothing to install.

    async with ApiServerSimulator() as server:
        server.put({"kind": "Node", "metadata": {"name": "n1"}})
        start_my_driver(kubeconfig=server.write_kubeconfig(tmp_path / "kubeconfig"))
        await server.until(lambda: server.objects("ResourceSlice"), what="a slice")
        server.wipe_slices("n1")                     # what kubelet does at its start
        server.compact()                             # the next watch from an old version gets 410
        server.refuse("POST", "resourceslices", code=500, times=2)
        assert not [request for request in server.requests if request.is_write]

As a process, `python -m topobus.testing.apiserver --kubeconfig FILE --node n1` serves until it is
stopped.

It has resource.k8s.io/v1 ResourceSlice, ResourceClaim, ResourceClaimTemplate, DeviceClass,
DeviceTaintRule (also v1beta2, v1alpha3), v1 Pod and Node, with validation by the published limits,
and as plain objects what a deployment consists of (`RESOURCES`). It has get, list (with limit and
continue), watch (from a version, from now, with initial events, bookmarks, 410), create with
generateName, update, JSON patch, merge patch, strategic merge patch, server-side apply, delete with
preconditions and finalizers, deletecollection, the status subresource, pods/binding, field and
label selectors, Status bodies for every error, bearer tokens, users with the rights of the Role
objects that it holds (403, and which rights were used), garbage collection by owner, claims from
templates. `set_drops` makes it an older server that does not know some fields. kubectl 1.36 gets,
applies, patches, watches and deletes there. It lacks TLS, admission, scheduling, managedFields,
protobuf and tables, and a continued list shows the present, not the state of its first page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from topobus.testing.apiserver.access import ADMIN, Access, Right
from topobus.testing.apiserver.claims import release_claims, serve_templates
from topobus.testing.apiserver.http import Connection
from topobus.testing.apiserver.request_handler import RequestHandler
from topobus.testing.apiserver.routes import of_kind
from topobus.testing.apiserver.shapes import Selector
from topobus.testing.apiserver.store import Store
from topobus.testing.apiserver.values import RESOURCES, ApiError, ApiRequest, Object

__all__ = ["RESOURCES", "ApiError", "ApiRequest", "ApiServerSimulator", "Object", "Right"]


class ApiServerSimulator:
    """One API server on 127.0.0.1.

    Args:
        token: the bearer token that every request must carry. Empty: none.
        port: where to listen. 0 takes any that is free.
        bookmark_s: how often a watch that wants bookmarks gets one (a real server: about a minute).
        collects_garbage: delete the dependents of a deleted object at once. Otherwise
            `collect_garbage` does when called.
    """

    def __init__(
        self,
        *,
        token: str = "",
        bookmark_s: float = 60.0,
        port: int = 0,
        collects_garbage: bool = False,
    ) -> None:
        self._store = Store(is_collecting=collects_garbage)
        self._token = token
        self._access = Access(token, lambda kind: self.objects(kind))
        self._handler = RequestHandler(self._store, self._access, bookmark_s=bookmark_s)
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL where it listens, the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> tuple[ApiRequest, ...]:
        """Every request so far, in order of arrival. A watch has code 0 until it ends."""
        return tuple(self._handler.requests)

    @property
    def open_watches(self) -> int:
        """How many watches are open."""
        return len(self._handler.watches)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. Objects from before a stop are still there."""
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

    def write_kubeconfig(self, path: Path, *, user: str = ADMIN, node: str = "", is_master: bool = False) -> Path:
        """Write a kubeconfig for this server, as the administrator or as a user whose rights are
        the server's Role objects.

        A service account is user `system:serviceaccount:NAMESPACE:NAME`. `node` is where its pod
        runs, which its token contains. One that `is_master` may do everything.
        """
        token = self._token if user == ADMIN else self._access.add_user(user, node=node, is_master=is_master)
        # There is no TLS. Without this each client would first read this machine's authorities, for 50 ms.
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "simulator",
                    "clusters": [{"name": "simulator", "cluster": cluster}],
                    "users": [{"name": "simulator", "user": {"token": token} if token else {}}],
                    "contexts": [
                        {
                            "name": "simulator",
                            "context": {"cluster": "simulator", "user": "simulator", "namespace": "default"},
                        }
                    ],
                }
            ),
            encoding="utf-8",
        )
        return path

    def put(self, api_object: Object, *, namespace: str = "default") -> Object:
        """Create an object, or replace it together with its status, as another client of the
        cluster would.
        """
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
            stored = self._store.update(
                resource, namespace, stored["metadata"]["name"], status, subresource="status", is_trusted=True
            )
        return stored

    def objects(self, kind: str, *, fields: str = "") -> list[Object]:
        """Read all objects of a kind."""
        resource = of_kind(kind)
        return self._store.select(resource, "", Selector(fields, "", resource.fields))

    def remove(self, kind: str, name: str, *, namespace: str = "default", grace_s: int | None = None) -> None:
        """Delete an object, as another client of the cluster would.

        A bound pod is deleted without any grace, as kubelet does at its end.
        """
        self._store.delete(of_kind(kind), namespace, name, {} if grace_s is None else {"gracePeriodSeconds": grace_s})

    def bind(self, pod: str, node: str, *, namespace: str = "default") -> None:
        """Bind a pod to a node, as a scheduler does."""
        self._store.bind(of_kind("Pod"), namespace, pod, node)

    def wipe_slices(self, node: str, driver: str = "") -> int:
        """Delete a node's slices, or one driver's of them, as kubelet does at its start and when a
        driver stays away.

        Return how many there were.
        """
        resource = of_kind("ResourceSlice")
        fields = f"spec.nodeName={node}" + (f",spec.driver={driver}" if driver else "")
        names = [resource_slice["metadata"]["name"] for resource_slice in self.objects("ResourceSlice", fields=fields)]
        for name in names:
            self._store.delete(resource, "", name)
        return len(names)

    def collect_garbage(self) -> list[str]:
        """Delete objects whose owners are gone, and return their names."""
        return self._store.collect_garbage(RESOURCES)

    def generate_claims(self) -> list[str]:
        """Make the claims that pods need of templates, as kube-controller-manager does.

        Return their names.
        """
        return serve_templates(self._store, of_kind("Pod"), of_kind("ResourceClaimTemplate"), of_kind("ResourceClaim"))

    def release_claims(self) -> list[str]:
        """Remove reservations and allocations of pods that have ended or are gone, as
        kube-controller-manager does.

        Return the claims' names.
        """
        return release_claims(self._store, of_kind("Pod"), of_kind("ResourceClaim"))

    def add_user(self, user: str, *, node: str = "") -> str:
        """Make a user whose rights are the server's Role objects.

        Return its token, which names a node as that of a pod there does.
        """
        return self._access.add_user(user, node=node)

    def rights_used(self, user: str) -> frozenset[Right]:
        """The rights that a user has requested, granted or not."""
        return self._access.used(user)

    def rights_unused(self, user: str) -> frozenset[Right]:
        """The rights that the Role objects grant a user and it has never requested."""
        return self._access.unused(user)

    def compact(self) -> None:
        """Forget the history: a client that continues from an older version gets 410."""
        self._store.compact()

    def set_drops(self, drops: Mapping[str, Iterable[str]]) -> None:
        """Become another server version, which does not know some fields and drops them silently.

        Shapes: drops — kind to paths: `{"ResourceSlice": ["spec.devices.*.taints"]}`.
        """
        self._store.drops = {kind: tuple(paths) for kind, paths in drops.items()}

    def close_watches(self) -> None:
        """Cut off every watch, as a server does that goes away."""
        for task in tuple(self._handler.watches):
            task.cancel()

    def refuse(
        self,
        method: str,
        plural: str,
        *,
        code: int,
        reason: str = "InternalError",
        times: int = 1,
        retry_after_s: int | None = None,
    ) -> None:
        """Answer the next requests of a kind with an error."""
        error = ApiError(code, reason, "refused by the test", retry_after_s=retry_after_s)
        self._handler.refuse(method, plural, error, times=times)

    async def until(self, holds: Callable[[], object], *, timeout_s: float = 60.0, what: str = "a state") -> None:
        """Wait until a condition on the objects or requests is true."""
        await self._store.until(lambda: bool(holds()), timeout_s, what)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._tasks.add(task)
        connection = Connection(reader, writer)
        try:
            while (request := await connection.read()) is not None:
                await self._handler.serve(connection, request)
        except ApiError as err:
            await connection.answer(err.code, err.status)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client left, or the test closes us: either way this connection is over, and
            # asyncio's stream callback must not see it.
            return
        finally:
            self._tasks.discard(task)
            self._handler.watches.discard(task)
            await connection.close()
