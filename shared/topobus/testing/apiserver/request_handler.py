"""Answers the requests of the API server simulator: authenticates the user, resolves the path,
calls the store and returns its result or an error.

Every request is recorded when it arrives, its code when it is answered. A refusal that a test has
ordered is sent before the store is called. The simulator opens and closes the sockets.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from msgspec import structs

from topobus.testing.apiserver.access import Access, verb_of
from topobus.testing.apiserver.http import Connection, HttpRequest
from topobus.testing.apiserver.patches import APPLY, patched
from topobus.testing.apiserver.request_counts import METRICS_PATH, exposition
from topobus.testing.apiserver.routes import Target, as_list, discovery, place_of, target_of, version_of
from topobus.testing.apiserver.shapes import Selector
from topobus.testing.apiserver.store import Store
from topobus.testing.apiserver.values import ApiError, ApiRequest, Object, Resource, bad_request

__all__ = ["RequestHandler"]


class RequestHandler:
    """Performs requests on one store, with the rights of their users."""

    def __init__(self, store: Store, access: Access, *, bookmark_s: float) -> None:
        self._store = store
        self._access = access
        self._bookmark_s = bookmark_s
        self._refusals: list[tuple[str, str, ApiError]] = []
        self.requests: list[ApiRequest] = []
        """Every request so far, in order of arrival; a watch has code 0 until it ends."""
        self.watches: set[asyncio.Task[None]] = set()
        """The tasks that serve a watch now."""

    def refuse(self, method: str, plural: str, error: ApiError, *, times: int) -> None:
        """Answer the next requests of a kind with an error."""
        self._refusals += [(method, plural, error)] * times

    async def serve(self, connection: Connection, request: HttpRequest) -> None:
        """Answer one request. A watch ends when its client leaves."""
        index = len(self.requests)
        code, headers = 200, {}
        try:
            body = request.json()
            seen = ApiRequest(method=request.method, path=request.path, query=request.query, body=body)
            self.requests.append(seen)
            user = self._access.user_of(request.headers.get("authorization", ""))
            self.requests[index] = seen = structs.replace(seen, user=user)
            target = target_of(request.path)
            self._authorize(request, user, target)
            if target is None:
                answer = exposition(self.requests) if request.path == METRICS_PATH else discovery(request.path)
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
        if index < len(self.requests):
            self.requests[index] = structs.replace(self.requests[index], code=code)
        self._store.wake()
        await connection.answer(code, answer, headers)

    def _act(self, target: Target, request: HttpRequest, body: Any, user: str) -> tuple[int, Object]:
        """Perform one request that is no watch."""
        resource, namespace, name = target.resource, target.namespace, target.name
        selector = Selector(
            request.query.get("fieldSelector", ""), request.query.get("labelSelector", ""), resource.fields
        )
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
                    self._store.delete(
                        resource, api_object["metadata"].get("namespace", ""), api_object["metadata"]["name"], body
                    )[0]
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
                raise ApiError(
                    410, "Expired", "The provided continue parameter is too old to display a consistent list result."
                ) from err
        elif query.get("resourceVersionMatch") == "Exact":
            self._store.check_version(version_of(query) or 0)
        api_objects, left = self._store.page(
            target.resource, target.namespace, selector, after=after, limit=int(query.get("limit") or 0)
        )
        page = as_list(target.resource, api_objects, self._store.version)
        if left:
            token = json.dumps([self._store.version, place_of(api_objects[-1])]).encode()
            page["metadata"] |= {"continue": base64.urlsafe_b64encode(token).decode(), "remainingItemCount": left}
        return page

    def _patch(self, target: Target, request: HttpRequest, body: Any, user: str) -> tuple[int, Object]:
        content_type = request.headers.get("content-type", "").partition(";")[0]
        resource, namespace, name = target.resource, target.namespace, target.name
        if content_type in APPLY:
            manager = request.query.get("fieldManager", "")
            if not manager:
                raise bad_request(
                    "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch"
                )
            is_forced = request.query.get("force") == "true"
            if target.subresource:
                # The server checks the object that would result, not the patch.
                with self._store.rehearsal():
                    wanted, _ = self._store.apply(
                        resource,
                        namespace,
                        name,
                        body,
                        manager=manager,
                        is_forced=is_forced,
                        subresource=target.subresource,
                    )
                self._check_status(target, user, "patch", wanted)
            applied, is_new = self._store.apply(
                resource, namespace, name, body, manager=manager, is_forced=is_forced, subresource=target.subresource
            )
            return (201 if is_new else 200), applied
        # Without a version in the patch nothing is compared: the patch applies to the present
        # object.
        wanted = patched(content_type, self._store.get(resource, namespace, name), body)
        self._check_status(target, user, "patch", wanted)
        return 200, self._store.update(resource, namespace, name, wanted, subresource=target.subresource)

    def _check_status(self, target: Target, user: str, verb: str, wanted: Object) -> None:
        """Check a write of a claim's status, part by part."""
        if target.resource.kind == "ResourceClaim" and target.subresource == "status":
            before = self._store.get(target.resource, target.namespace, target.name)
            self._access.check_claim_status(user, verb, target.resource, before, wanted, namespace=target.namespace)

    async def _watch(self, connection: Connection, target: Target, query: Mapping[str, str]) -> None:
        """Stream changes until the client leaves or its time is over."""
        watch = _Watch(self._store, target, query, self._bookmark_s)
        task = asyncio.current_task()
        await connection.begin_stream()
        if task is not None:
            self.watches.add(task)
        self._store.wake()
        try:
            await watch.serve(connection)
        finally:
            if task is not None:
                self.watches.discard(task)
            self._store.wake()

    def _authorize(self, request: HttpRequest, user: str, target: Target | None) -> None:
        """Check the rights of a user. Every user may use discovery."""
        if target is None:
            return
        is_watch = request.query.get("watch") in ("true", "1")
        verb = verb_of(request.method, target.name, is_watch=is_watch)
        if target.subresource == "binding":
            verb = "create"
        self._access.check(
            user, verb, target.resource, namespace=target.namespace, name=target.name, part=target.subresource
        )

    def _check_refusal(self, method: str, resource: Resource) -> None:
        for index, (wanted, plural, error) in enumerate(self._refusals):
            if (wanted, plural) == (method, resource.plural):
                del self._refusals[index]
                raise error


class _Watch:
    """One watch that a client opened.

    Errors: raises ApiError for a query that cannot be answered, before anything is sent.
    """

    def __init__(self, store: Store, target: Target, query: Mapping[str, str], bookmark_s: float) -> None:
        self._store = store
        self._target = target
        self._query = query
        self._bookmark_s = bookmark_s
        # A watch of one object by its path is a watch of its name.
        fields = ",".join(
            filter(None, (query.get("fieldSelector", ""), f"metadata.name={target.name}" if target.name else ""))
        )
        self._selector = Selector(fields, query.get("labelSelector", ""), target.resource.fields)
        self._since = None if query.get("sendInitialEvents") == "true" else version_of(query)
        self._timeout_s = float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None

    async def serve(self, connection: Connection) -> None:
        """Stream until its time is over.

        Errors: raises ConnectionResetError when the client left.
        """
        stream = asyncio.create_task(self._stream(connection))
        gone = asyncio.create_task(connection.wait_closed_by_client())
        try:
            done, _ = await asyncio.wait([stream, gone], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stream, gone):
                task.cancel()
            ends = await asyncio.gather(stream, gone, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if gone in done:
            raise ConnectionResetError("the watcher left")
        await connection.end_stream()

    async def _stream(self, connection: Connection) -> None:
        has_bookmarks = self._query.get("allowWatchBookmarks") == "true"
        has_initial = self._query.get("sendInitialEvents") == "true"
        resource = self._target.resource
        loop = asyncio.get_running_loop()
        events = self._store.watch(resource, self._target.namespace, self._selector, self._since)
        next_bookmark = loop.time() + self._bookmark_s
        pending = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait(
                    [pending], timeout=max(0.0, next_bookmark - loop.time()) if has_bookmarks else None
                )
                if not done:
                    next_bookmark = loop.time() + self._bookmark_s
                    await connection.send_line(_line("BOOKMARK", self._store.bookmark(resource).object))
                    continue
                event = pending.result()
                pending = asyncio.ensure_future(anext(events))
                if event is not None:
                    await connection.send_line(_line(event.type, event.object))
                elif has_initial:
                    has_initial = False
                    mark = self._store.bookmark(resource).object
                    mark["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
                    await connection.send_line(_line("BOOKMARK", mark))
        except ApiError as err:
            await connection.send_line(_line("ERROR", err.status))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


def _line(kind: str, api_object: Object) -> Object:
    return {"type": kind, "object": api_object}
