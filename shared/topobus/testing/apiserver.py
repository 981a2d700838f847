"""A Kubernetes API server for tests of controllers and DRA drivers: real HTTP on loopback, no cluster, no etcd, nothing to install.

    async with ApiServerSimulator() as server:
        server.put({"kind": "Node", "metadata": {"name": "n1"}})
        start_my_driver(kubeconfig=server.write_kubeconfig(tmp_path / "kubeconfig"))
        await server.until(lambda: server.objects("ResourceSlice"), what="a slice")
        server.wipe_slices("n1")                     # what kubelet does at its start
        server.compact()                             # the next watch from an old version gets 410
        server.refuse("POST", "resourceslices", code=500, times=2)
        assert not [one for one in server.requests if one.is_write]

As a process: `python -m topobus.testing.apiserver --kubeconfig FILE --node n1` serves until it is told to stop.

What it does: resource.k8s.io/v1 ResourceSlice, ResourceClaim, ResourceClaimTemplate, DeviceClass, DeviceTaintRule (also v1beta2, v1alpha3), v1 Pod and Node;
get, list (with limit and continue), watch (from a version, from now, with initial events, bookmarks, 410), create with generateName, update, merge patch,
server-side apply, delete with preconditions and finalizers, deletecollection, the status subresource, pods/binding, field and label selectors, Status
bodies for every error, validation by the published limits, bearer token. `drops` makes it an older server that does not know some fields.
What it does not: TLS, RBAC, admission, strategic merge and JSON patch (415), managedFields, protobuf, garbage collection by itself (`collect_garbage`), and
a continued list shows the present, not the state of its first page.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from topobus.testing.apiserver_http import Connection, HttpRequest
from topobus.testing.apiserver_routes import Target, as_list, discovery, of_kind, place_of, target_of, version_of
from topobus.testing.apiserver_shapes import Selector, merge
from topobus.testing.apiserver_store import Store
from topobus.testing.apiserver_values import RESOURCES, ApiError, ApiRequest, Object, Resource, bad_request

__all__ = ["RESOURCES", "ApiError", "ApiRequest", "ApiServerSimulator", "Object"]

_PATCHES = {"application/merge-patch+json": "merge", "application/apply-patch+yaml": "apply"}


class ApiServerSimulator:
    """One API server on 127.0.0.1.

    Args:
        drops: kind to paths that this server does not know and drops in silence: `{"ResourceSlice": ["spec.devices.*.taints"]}`.
        token: the bearer token that every request must carry; empty: none.
        port: where to listen; 0 takes any that is free.
        bookmark_s: how often a watch that asked for bookmarks gets one (a real server: about a minute).
    """

    def __init__(
        self, *, drops: Mapping[str, Iterable[str]] | None = None, token: str = "", bookmark_s: float = 60.0, port: int = 0
    ) -> None:
        self._store = Store(drops or {})
        self._token = token
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
        """Close the door and every connection."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig that leads here."""
        user = {"token": self._token} if self._token else {}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "simulator",
                    "clusters": [{"name": "simulator", "cluster": {"server": self.url}}],
                    "users": [{"name": "simulator", "user": user}],
                    "contexts": [{"name": "simulator", "context": {"cluster": "simulator", "user": "simulator", "namespace": "default"}}],
                }
            ),
            encoding="utf-8",
        )
        return path

    def put(self, one: Object, *, namespace: str = "default") -> Object:
        """Create an object, or replace it together with its status, as somebody else in the cluster would."""
        resource = of_kind(str(one.get("kind")))
        namespace = str(one.get("metadata", {}).get("namespace", namespace)) if resource.is_namespaced else ""
        name = str(one.get("metadata", {}).get("name", ""))
        try:
            self._store.get(resource, namespace, name)
        except ApiError:
            stored = self._store.create(resource, namespace, one)
        else:
            stored = self._store.update(resource, namespace, name, one)
        if resource.has_status and "status" in one:
            stored = self._store.update(resource, namespace, stored["metadata"]["name"], {"status": one["status"]}, subresource="status")
        return stored

    def objects(self, kind: str, *, fields: str = "") -> list[Object]:
        """Read all objects of a kind."""
        resource = of_kind(kind)
        return self._store.select(resource, "", Selector(fields, "", resource.fields))

    def remove(self, kind: str, name: str, *, namespace: str = "default") -> None:
        """Delete an object, as somebody else in the cluster would."""
        self._store.delete(of_kind(kind), namespace, name)

    def wipe_slices(self, node: str, driver: str = "") -> int:
        """Delete a node's slices, or one driver's of them, as kubelet does at its start and when a driver stays away; how many there were."""
        resource = of_kind("ResourceSlice")
        fields = f"spec.nodeName={node}" + (f",spec.driver={driver}" if driver else "")
        names = [one["metadata"]["name"] for one in self.objects("ResourceSlice", fields=fields)]
        for name in names:
            self._store.delete(resource, "", name)
        return len(names)

    def collect_garbage(self) -> list[str]:
        """Delete objects whose owners are gone; their names."""
        return self._store.collect_garbage(RESOURCES)

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
        except (ConnectionError, asyncio.CancelledError):
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
            self._authorize(request)
            target = target_of(request.path)
            if target is None:
                answer = discovery(request.path)
            elif request.method == "GET" and request.query.get("watch") in ("true", "1"):
                self._check_refusal(request.method, target.resource)
                await self._watch(connection, target, request.query)
                return
            else:
                self._check_refusal(request.method, target.resource)
                code, answer = self._act(target, request, body)
        except ApiError as err:
            code, answer = err.code, err.status
            headers = {} if err.retry_after_s is None else {"Retry-After": str(err.retry_after_s)}
        if index < len(self._requests):
            self._requests[index] = ApiRequest(
                method=request.method, path=request.path, query=request.query, body=self._requests[index].body, code=code
            )
        self._store.wake()
        await connection.answer(code, answer, headers)

    def _act(self, target: Target, request: HttpRequest, body: Object | None) -> tuple[int, Object]:
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
            case "PUT", True:
                return 200, self._store.update(resource, namespace, name, body or {}, subresource=target.subresource)
            case "PATCH", True:
                return self._patch(target, request, body or {})
            case "DELETE", True:
                return 200, self._store.delete(resource, namespace, name, body)[0]
            case "DELETE", False:
                gone = [
                    self._store.delete(resource, one["metadata"].get("namespace", ""), one["metadata"]["name"], body)[0]
                    for one in self._store.select(resource, namespace, selector)
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
        found = [one for one in self._store.select(target.resource, target.namespace, selector) if place_of(one) > after]
        limit = int(query.get("limit") or 0) or len(found)
        page = as_list(target.resource, found[:limit], self._store.version)
        if found[limit:]:
            token = json.dumps([self._store.version, place_of(found[limit - 1])]).encode()
            page["metadata"] |= {"continue": base64.urlsafe_b64encode(token).decode(), "remainingItemCount": len(found) - limit}
        return page

    def _patch(self, target: Target, request: HttpRequest, body: Object) -> tuple[int, Object]:
        kind = _PATCHES.get(request.headers.get("content-type", "").partition(";")[0])
        if kind is None:
            raise ApiError(
                415, "UnsupportedMediaType", f"the simulator takes {', '.join(_PATCHES)}, got {request.headers.get('content-type')}"
            )
        resource, namespace, name = target.resource, target.namespace, target.name
        if kind == "apply":
            manager = request.query.get("fieldManager", "")
            if not manager:
                raise bad_request("PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch")
            is_forced = request.query.get("force") == "true"
            applied, is_new = self._store.apply(
                resource, namespace, name, body, manager=manager, is_forced=is_forced, subresource=target.subresource
            )
            return (201 if is_new else 200), applied
        present = self._store.get(resource, namespace, name)
        # Without a version in the patch nothing is compared: the patch is made on what there is now.
        return 200, self._store.update(resource, namespace, name, merge(present, body), subresource=target.subresource)

    async def _watch(self, connection: Connection, target: Target, query: Mapping[str, str]) -> None:
        """Stream changes until the client leaves or its time is over."""
        if target.name:
            raise bad_request("watch by name is not served: use fieldSelector=metadata.name=NAME")
        selector = Selector(query.get("fieldSelector", ""), query.get("labelSelector", ""), target.resource.fields)
        since = None if query.get("sendInitialEvents") == "true" else version_of(query)
        task = asyncio.current_task()
        await connection.begin_stream()
        if task is not None:
            self._watches.add(task)
        self._store.wake()
        stream = asyncio.create_task(self._stream(connection, target, selector, query, since))
        gone = asyncio.create_task(connection.wait_closed_by_client())
        try:
            timeout_s = float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None
            done, _ = await asyncio.wait([stream, gone], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (stream, gone):
                one.cancel()
            ends = await asyncio.gather(stream, gone, return_exceptions=True)
            if task is not None:
                self._watches.discard(task)
            self._store.wake()
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if gone in done:
            raise ConnectionResetError("the watcher left")
        await connection.end_stream()

    async def _stream(
        self, connection: Connection, target: Target, selector: Selector, query: Mapping[str, str], since: int | None
    ) -> None:
        has_bookmarks = query.get("allowWatchBookmarks") == "true"
        has_initial = query.get("sendInitialEvents") == "true"
        loop = asyncio.get_running_loop()
        events = self._store.watch(target.resource, target.namespace, selector, since)
        next_bookmark = loop.time() + self._bookmark_s
        pending = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait([pending], timeout=max(0.0, next_bookmark - loop.time()) if has_bookmarks else None)
                if not done:
                    next_bookmark = loop.time() + self._bookmark_s
                    await connection.send_line(_line("BOOKMARK", self._store.bookmark(target.resource).object))
                    continue
                event = pending.result()
                pending = asyncio.ensure_future(anext(events))
                if event is not None:
                    await connection.send_line(_line(event.type, event.object))
                elif has_initial:
                    has_initial = False
                    mark = self._store.bookmark(target.resource).object
                    mark["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
                    await connection.send_line(_line("BOOKMARK", mark))
        except ApiError as err:
            await connection.send_line(_line("ERROR", err.status))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    def _authorize(self, request: HttpRequest) -> None:
        if self._token and request.headers.get("authorization") != f"Bearer {self._token}":
            raise ApiError(401, "Unauthorized", "Unauthorized")

    def _check_refusal(self, method: str, resource: Resource) -> None:
        for index, (wanted, plural, error) in enumerate(self._refusals):
            if (wanted, plural) == (method, resource.plural):
                del self._refusals[index]
                raise error


def _line(kind: str, one: Object) -> Object:
    return {"type": kind, "object": one}


async def _serve_until_told(arguments: argparse.Namespace) -> None:
    told = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(one, told.set)
    async with ApiServerSimulator(port=arguments.port, token=arguments.token) as server:
        for node in arguments.node:
            server.put({"kind": "Node", "metadata": {"name": node}})
        if arguments.kubeconfig is not None:
            server.write_kubeconfig(arguments.kubeconfig)
        print(server.url, flush=True)  # noqa: T201  (the answer of a program)
        await told.wait()


def main() -> None:
    """Serve as a process of its own; prints its address."""
    parser = argparse.ArgumentParser(prog="python -m topobus.testing.apiserver", description="A Kubernetes API server without a cluster.")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1; 0: any that is free")
    parser.add_argument("--token", default="", help="the bearer token that requests must carry; empty: none")
    parser.add_argument("--kubeconfig", type=Path, help="write a kubeconfig that leads here")
    parser.add_argument("--node", action="append", default=[], help="make a node of this name; may be repeated")
    asyncio.run(_serve_until_told(parser.parse_args()))


if __name__ == "__main__":
    main()
