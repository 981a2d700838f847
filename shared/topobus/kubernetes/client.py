"""Sends requests to one API server in plain JSON and reads its answers, refusals and watch lines.

lightkube provides configuration, TLS and authentication. Its own calls are not used: its delete has
no preconditions, its watch has no bookmarks, and its models drop fields that are newer than they
are. A missing answer, an overloaded server and an undecodable answer raise PeerUnavailable. When
the server asks for a pause, all callers wait. When a token, certificate or authority was replaced,
it is read again and the call that failed because of it is repeated once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from urllib.parse import quote

import httpx2
import msgspec

from topobus.kubernetes.access import Access, AccessSettings, KubeConfigError
from topobus.kubernetes.answers import GONE, NOT_FOUND, HistoryLost, NotServed, Plain, Rejected
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable

__all__ = ["BACKOFF_LIMIT_S", "KubernetesClient", "object_path"]

BACKOFF_LIMIT_S = 10.0

_UNAUTHORIZED = 401
_TEMPORARY = (_UNAUTHORIZED, 408, 429)
# Seconds after which the server ends a watch. Each watch draws its own length, so that a fleet does
# not reconnect at the same moment. client-go asks for five to ten minutes and detects a dead
# connection by HTTP/2 pings. Here the end itself is the sign of life. Bookmarks are not: a server
# whose etcd reports no progress sends none while nothing changes.
_WATCH_S = (60, 90)
# A server that has not ended a watch this many seconds after its time is gone, even when the
# connection was never closed.
_LATE_S = 15.0
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_JSON_PATCH = "application/json-patch+json"


class KubernetesClient:
    """A client of one API server."""

    def __init__(self, settings: AccessSettings, access: Access) -> None:
        self._settings = settings
        self._access = access
        self._retired: list[httpx2.AsyncClient] = []
        self._renewing = asyncio.Lock()
        self._not_before = 0.0
        """Time of the event loop before which the server asked to get no request."""

    @classmethod
    def open(cls, settings: AccessSettings) -> KubernetesClient:
        """Read the configuration without sending a request.

        Errors: raises ConfigError when the settings name no configuration or one that cannot be
        used.
        """
        return cls(settings, Access.read(settings))

    @property
    def server(self) -> str:
        """The server's address."""
        return self._access.server

    async def close(self) -> None:
        """Close all connections."""
        for client in (*self._retired, self._access.client):
            await client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        is_applied: bool = False,
    ) -> Plain | Rejected:
        """Send one request.

        A PATCH is a merge patch (RFC 7386), a JSON patch (RFC 6902) where the body is a list, or
        applied server-side (KEP-555), for which `params` name a field manager.
        Errors: raises PeerUnavailable or its subclass NotServed. The outcome of a write is then
        unknown.
        """
        patch = _APPLY_PATCH if is_applied else _JSON_PATCH if isinstance(body, list) else _MERGE_PATCH
        headers = {"content-type": patch if method == "PATCH" else "application/json"}
        answer = await self._exchange(
            method, path, params, msgspec.json.encode(body) if body is not None else None, headers
        )
        try:
            plain = msgspec.json.decode(answer.content) if answer.content else {}
        except (ValueError, RecursionError) as err:
            if answer.status_code == NOT_FOUND:
                raise NotServed(f"API server {self.server} has no {path}", retry_after_s=0.0) from err
            if not answer.is_success:
                return Rejected(code=answer.status_code, reason="", message=answer.text[:200].strip())
            raise PeerUnavailable(
                f"API server {self.server}: {method} {path}: {_describe(err)}", retry_after_s=0.0
            ) from err
        if not isinstance(plain, dict):
            raise PeerUnavailable(
                f"API server {self.server}: {method} {path}: the answer is no object but {str(plain)[:80]!r}"
            )
        if answer.is_success:
            return plain
        return Rejected(
            code=answer.status_code, reason=str(plain.get("reason", "")), message=str(plain.get("message", ""))
        )

    async def fetch_bytes(self, path: str, media_type: str) -> bytes | Rejected:
        """Read an object in a format other than JSON.

        Errors: raises PeerUnavailable.
        """
        answer = await self._exchange("GET", path, None, None, {"accept": media_type})
        return answer.content if answer.is_success else _rejected(answer)

    async def put_bytes(
        self, path: str, media_type: str, content: bytes, *, params: Mapping[str, str] | None
    ) -> Rejected | None:
        """Replace an object by one in a format other than JSON. None: it was replaced.

        Errors: raises PeerUnavailable. The outcome of the write is then unknown.
        """
        answer = await self._exchange(
            "PUT", path, params, content, {"content-type": media_type, "accept": "application/json"}
        )
        return None if answer.is_success else _rejected(answer)

    async def watch(
        self, path: str, version: str, *, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[tuple[str, Plain], None]:
        """Read one watch to its end: the type of each event (ADDED, MODIFIED, DELETED, BOOKMARK)
        and its object, which has a resource version.

        Errors: raises HistoryLost, PeerUnavailable.
        """
        asked = {
            **(params or {}),
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(watch_s := random.randint(*_WATCH_S)),
        }
        timeout = httpx2.Timeout(self._settings.call_s, read=watch_s + _LATE_S)
        await self._wait()
        await self._renew(self._access)
        access = self._access
        try:
            async with access.client.stream(
                "GET", access.url(path, asked), timeout=timeout, extensions=access.extensions
            ) as answer:
                if answer.status_code == GONE:
                    raise HistoryLost
                if answer.status_code != httpx2.codes.OK:
                    await answer.aread()
                    raise self._trouble(answer)
                async for line in answer.aiter_lines():
                    yield _event(path, line)
        except (
            httpx2.HTTPError,
            httpx2.InvalidURL,
            KubeConfigError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as err:
            raise PeerUnavailable(
                f"API server {self.server}: watch of {path}: {_describe(err)}", retry_after_s=0.0
            ) from err

    async def _wait(self) -> None:
        """Wait for the pause that the server asked for."""
        await asyncio.sleep(max(0.0, self._not_before - asyncio.get_running_loop().time()))

    def _trouble(self, answer: httpx2.Response) -> PeerUnavailable:
        """Return the error for an answer that may change soon, and remember its pause."""
        trouble = _unavailable(answer)
        self._not_before = asyncio.get_running_loop().time() + min(trouble.retry_after_s, BACKOFF_LIMIT_S)
        return trouble

    async def _exchange(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        content: bytes | None,
        headers: dict[str, str],
    ) -> httpx2.Response:
        """Send one request and return an answer that would be the same if asked again.

        Errors: raises PeerUnavailable.
        """

        async def request() -> httpx2.Response:
            access = self._access
            return await access.client.request(
                method, access.url(path, params), content=content, headers=headers, extensions=access.extensions
            )

        await self._wait()
        try:
            answer = await self._send(request)
        except (httpx2.HTTPError, httpx2.InvalidURL, KubeConfigError, OSError, ValueError) as err:
            raise PeerUnavailable(f"API server {self.server}: {_describe(err)}", retry_after_s=0.0) from err
        # Checked before the body is read: what rejects requests on the way (a rate limit, a proxy)
        # answers in plain text.
        if answer.status_code in _TEMPORARY or answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
            raise self._trouble(answer)
        return answer

    async def _send(self, request: Callable[[], Awaitable[httpx2.Response]]) -> httpx2.Response:
        """Send a request, and repeat it when our replaced token or certificates made it fail."""
        used = self._access
        try:
            answer = await request()
        except (httpx2.TransportError, KubeConfigError, OSError):
            if not await self._renew(used):
                raise
        else:
            if answer.status_code != _UNAUTHORIZED or not await self._renew(used):
                return answer
        return await request()

    async def _renew(self, used: Access) -> bool:
        """Read the configuration again if its files have changed since `used` was read.

        False when they have not, or cannot be used yet.
        """
        async with self._renewing:
            if self._access is not used:
                return True  # another call was faster
            if not used.is_outdated:
                return False
            try:
                # In a thread: loading certificates and the TLS context takes tens of milliseconds.
                fresh = await asyncio.to_thread(Access.read, self._settings)
            except ConfigError as err:
                # The files may be half written. The next failure reads them again.
                get_logger().warning("cluster.renew-failed", error=str(err))
                return False
            self._access = fresh
            get_logger().info("cluster.renewed", server=fresh.server)
            # Calls may still be using the previous client. The one before it is no longer in use.
            self._retired.append(used.client)
            while len(self._retired) > 1:
                await self._retired.pop(0).aclose()
            return True


def object_path(api_version: str, plural: str, *, namespace: str = "", name: str = "", part: str = "") -> str:
    """Return the path of a kind, of an object or of a part of it (`status`).

    Errors: raises ContractError for a name that would change the path.

    >>> object_path("v1", "nodes"), object_path("apps/v1", "deployments", namespace="a", name="b", part="status")
    ('/api/v1/nodes', '/apis/apps/v1/namespaces/a/deployments/b/status')
    """
    for segment in (namespace, name):
        # Characters that no object name can have (apimachinery, ValidatePathSegmentName).
        if segment in (".", "..") or "/" in segment or "%" in segment:
            raise ContractError(f"{plural}: got {segment[:100]!r}, wanted a name that can be part of a path")
    root = f"/{'apis' if '/' in api_version else 'api'}/{api_version}"
    middle = f"/namespaces/{_quoted(namespace)}" if namespace else ""
    return f"{root}{middle}/{plural}" + (f"/{_quoted(name)}" if name else "") + (f"/{part}" if part else "")


def _quoted(segment: str) -> str:
    return quote(segment, safe=":@!$&'()*+,;=~")


def _event(path: str, line: str) -> tuple[str, Plain]:
    """Read a line of a watch.

    Errors: raises HistoryLost, PeerUnavailable when the server ends the watch with an error, and
    ValueError for a line that is not an event.
    """
    event = msgspec.json.decode(line)
    if (
        not isinstance(event, dict)
        or not isinstance(event.get("object"), dict)
        or not isinstance(event.get("type"), str)
    ):
        raise ValueError(f"a line that is no event: {line[:80]!r}")
    body: Plain = event["object"]
    if event["type"] == "ERROR":
        if body.get("code") == GONE:
            raise HistoryLost
        raise PeerUnavailable(f"API server: watch of {path}: {body.get('message')}")
    if not body["metadata"]["resourceVersion"]:
        raise ValueError(f"an event without a resource version: {line[:80]!r}")
    return str(event["type"]), body


def _rejected(answer: httpx2.Response) -> Rejected:
    """Read a refusal in JSON or in plain text."""
    try:
        plain = msgspec.json.decode(answer.content)
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        return Rejected(code=answer.status_code, reason="", message=answer.text[:200].strip())
    return Rejected(code=answer.status_code, reason=str(plain.get("reason", "")), message=str(plain.get("message", "")))


def _unavailable(answer: httpx2.Response) -> PeerUnavailable:
    try:
        text = str(msgspec.json.decode(answer.content).get("message", ""))
    except (ValueError, AttributeError, RecursionError):
        text = answer.text[:200].strip()
    after = answer.headers.get("retry-after", "")
    return PeerUnavailable(
        f"API server answered {answer.status_code}: {text}",
        # A longer number is no plausible pause.
        retry_after_s=float(after) if after.isdecimal() and len(after) < 10 else 0.0,
        code=answer.status_code,
    )


def _describe(err: Exception) -> str:
    # Some of the library's errors have no text at all.
    return str(err) or type(err).__name__
