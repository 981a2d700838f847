"""Answers browsers: the page's files, the live stream of the board, one node's drawing, and the
login.

The headers of each answer keep the page from loading anything from elsewhere and from being framed.
It has no way to write to the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import time
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topobus.console.config import PageSettings
from topobus.console.followers import Followers
from topobus.console.rules.access import Attempts, Places, allowed_hosts, is_allowed_host, is_same_origin
from topobus.console.rules.board import Posted
from topobus.formats.messages.nouns import to_token
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError, ContractError, TopobusError

__all__ = ["console_app", "read_password"]

_COOKIE = "topobus_console"
# Seconds until a login ends: a working day with its evening. A restart
# of the console ends all of them.
_SESSION_S = 43_200
_MOST_SESSIONS = 1024
_MOST_FORM_BYTES = 4096
_LEAST_PASSWORD = 12
# A browser that reads nothing for so long is gone, or asleep. When it returns, it gets what it
# missed.
_SEND_LIMIT_S = 20.0
# A comment at this interval keeps proxies from ending a silent stream, and detects browsers that
# are gone.
_KEEPALIVE_S = 15.0
# Changes that come together are sent together.
_SETTLE_S = 0.1
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not no-referrer: with that, a browser names no origin with the page's own forms (Fetch,
    # serializing a request origin), and the login would refuse them.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_FILES = {
    "/": ("index.html", "text/html"),
    "/console.js": ("console.js", "text/javascript"),
    "/console.css": ("console.css", "text/css"),
    "/login": ("login.html", "text/html"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_LINK_PATH = "/open"
_OPEN_PATHS = ("/login", "/console.css", "/icon.svg", _LINK_PATH)
# Half a form is no login.
_FORM_LIMIT_S = 10.0
# A page that is open for less keeps its place: with more pages than places, each would otherwise
# replace another all the time.
_LEAST_PAGE_S = 10.0


def read_password(path: str) -> bytes:
    """Read the password for the page.

    Errors: raises ConfigError for a file that cannot be read or holds less than 12 characters.
    """
    try:
        password = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"page.password_file: cannot read {path}: {err}",
            next_step="name a file that holds the password",
            key="page.password_file",
        ) from err
    if len(password) < _LEAST_PASSWORD:
        raise ConfigError(
            f"page.password_file: {path} holds {len(password)} characters, wanted at least {_LEAST_PASSWORD}",
            next_step="write a longer password into it",
            key="page.password_file",
        )
    return password.encode()


def console_app(followers: Followers, settings: PageSettings, *, is_tls: bool = False, link_token: str = "") -> ASGIApp:
    """Make the application.

    Shapes: link_token — the secret of /open, which alone gives a session; empty: none.
    """
    contents = {
        path: (files("topobus.console").joinpath("page", name).read_bytes(), kind)
        for path, (name, kind) in _FILES.items()
    }
    sessions = _Sessions(settings, is_secure=is_tls or settings.is_behind_tls, link_token=link_token)
    streams = _Streams(followers, settings.streams)

    async def page_file(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, media_type=kind)

    async def node(request: Request) -> Response:
        name = request.path_params["node"]
        try:
            to_token(name)
        except ContractError:
            return JSONResponse({"error": "that is no name of a node: wanted a DNS name"}, status_code=400)
        try:
            view = await followers.node(name)
        except TopobusError as err:
            return JSONResponse({"error": err.message}, status_code=503)
        if view is None:
            return JSONResponse({"error": "no machine of that name reports"}, status_code=404)
        return Response(msgspec.json.encode(view), media_type="application/json")

    async def login(request: Request) -> Response:
        return await sessions.login(request)

    async def logout(request: Request) -> Response:
        return sessions.logout(request)

    async def open_link(request: Request) -> Response:
        return sessions.open_link(request)

    routes = [Route(path, page_file) for path in _FILES]
    routes += [
        Route("/login", login, methods=["POST"]),
        Route("/logout", logout, methods=["POST"]),
        Route(_LINK_PATH, open_link, methods=["GET"]),
        Route("/api/nodes/{node}", node),
        Route("/api/stream", streams),
    ]
    return _Guard(Starlette(routes=routes), sessions, allowed_hosts(settings.host, settings.hosts))


class _Guard:
    """Refuses requests for another name, from another page or without a session, before the
    application sees them.

    Adds the headers to every answer.
    """

    def __init__(self, app: ASGIApp, sessions: _Sessions, hosts: frozenset[str]) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not is_allowed_host(host, self._hosts):
            return Response(
                "this name is not the console's: see the setting page.hosts\n", status_code=421, media_type="text/plain"
            )
        if request.method not in ("GET", "HEAD") and not is_same_origin(request.headers.get("origin", ""), host):
            return Response(
                "forms are taken from the console's own page alone\n", status_code=403, media_type="text/plain"
            )
        if request.url.path in _OPEN_PATHS or self._sessions.is_known(request):
            return None
        if request.url.path == "/" and not self._sessions.has_link:
            return RedirectResponse("/login", status_code=303)
        if self._sessions.has_link:
            return Response(
                "open the address that `topobus console` printed when it started\n",
                status_code=401,
                media_type="text/plain",
            )
        return Response("log in first\n", status_code=401, media_type="text/plain")


class _Sessions:
    """The sessions, in memory, so that a restart ends all of them."""

    def __init__(self, settings: PageSettings, *, is_secure: bool, link_token: str) -> None:
        self._settings = settings
        self._link_token = link_token
        self._is_secure = is_secure
        self._ends: dict[str, float] = {}
        self._attempts = Attempts(settings.attempts)

    def is_known(self, request: Request) -> bool:
        if not self._settings.password_file and not self.has_link:
            return True
        return self._ends.get(request.cookies.get(_COOKIE, ""), 0.0) > time.monotonic()

    @property
    def has_link(self) -> bool:
        """Say whether a session needs the secret address."""
        return bool(self._link_token)

    def open_link(self, request: Request) -> Response:
        """Begin a session for a request with the secret, any number of times."""
        given = request.query_params.get("token", "")
        if not self._link_token or not hmac.compare_digest(given.encode(), self._link_token.encode()):
            return Response(
                "this address is of another start, or was cut off\n", status_code=403, media_type="text/plain"
            )
        return self._let_in()

    async def login(self, request: Request) -> Response:
        address, now = request.client.host if request.client is not None else "", time.monotonic()
        wait_s = self._attempts.wait_s(address, now)
        if wait_s > 0:
            return Response(
                "too many wrong passwords\n",
                status_code=429,
                headers={"Retry-After": str(int(wait_s) + 1)},
                media_type="text/plain",
            )
        body = b""
        try:
            async with asyncio.timeout(_FORM_LIMIT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MOST_FORM_BYTES:
                        return Response("too much\n", status_code=413, media_type="text/plain")
        except TimeoutError:
            return Response("half a form\n", status_code=408, headers={"Connection": "close"}, media_type="text/plain")
        given = parse_qs(body.decode("utf-8", "replace")).get("password", [""])[0].encode()
        try:
            wanted = (
                await asyncio.to_thread(read_password, self._settings.password_file)
                if self._settings.password_file
                else b""
            )
        except ConfigError as err:
            get_logger().error("console.password-unreadable", error=err.message)
            return Response(
                "the password cannot be checked: see the console's log\n", status_code=503, media_type="text/plain"
            )
        if not wanted or not hmac.compare_digest(given, wanted):
            self._attempts.note_wrong(address, time.monotonic())
            get_logger().warning("console.login-refused", address=address)
            return RedirectResponse("/login#wrong", status_code=303)
        return self._let_in()

    def _let_in(self) -> Response:
        now = time.monotonic()
        self._ends = {key: ends for key, ends in self._ends.items() if ends > now}
        while len(self._ends) >= _MOST_SESSIONS:
            del self._ends[next(iter(self._ends))]
        token = secrets.token_urlsafe(32)
        self._ends[token] = now + _SESSION_S
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(_COOKIE, token, max_age=_SESSION_S, httponly=True, samesite="strict", secure=self._is_secure)
        return answer

    def logout(self, request: Request) -> Response:
        self._ends.pop(request.cookies.get(_COOKIE, ""), None)
        answer = RedirectResponse("/login", status_code=303)
        answer.delete_cookie(_COOKIE, httponly=True, samesite="strict", secure=self._is_secure)
        return answer


class _Streams:
    """Server-sent events: what a page lacks, then each change.

    A slow page gets the newest state late, and no queue grows for it.
    """

    def __init__(self, followers: Followers, most: int) -> None:
        self._followers = followers
        self._places = Places(most, least_s=_LEAST_PAGE_S)
        self._numbers = itertools.count()
        self._ended: dict[int, asyncio.Event] = {}
        # Versions of another start of the console have no meaning here.
        self._instance = secrets.token_hex(4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page, client = next(self._numbers), scope.get("client")
        gone = self._places.enter(page, client[0] if client else "", self._followers.clock.monotonic())
        if gone is None:
            await Response(
                "too many pages are open\n", status_code=503, headers={"Retry-After": "30"}, media_type="text/plain"
            )(scope, receive, send)
            return
        for other in gone:
            self._ended[other].set()
        self._ended[page] = asyncio.Event()
        try:
            await self._serve(Request(scope), receive, send, self._ended[page])
        finally:
            self._places.leave(page)
            del self._ended[page]

    async def _serve(self, request: Request, receive: Receive, send: Send, ended: asyncio.Event) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.create_task(self._send_all(request, send), name="console-stream")
        tasks = (
            sending,
            asyncio.create_task(_left(receive), name="console-stream-end"),
            asyncio.create_task(ended.wait(), name="console-stream-ended"),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if ended.is_set():
            # A browser that reads nothing is disconnected without the last message.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, request: Request, send: Send) -> None:
        board = self._followers.board
        instance, _, seen = request.headers.get("last-event-id", "").partition("-")
        newer = board.since(int(seen)) if instance == self._instance and seen.isdecimal() and len(seen) < 19 else None
        if newer is None:
            await self._followers.is_settled.wait()
            newer, kind = list(board.all()), b"snapshot"
        else:
            kind = b"changes"
        version = board.version
        await self._put(send, kind, newer, version)
        while True:
            try:
                async with asyncio.timeout(_KEEPALIVE_S):
                    await self._followers.wait_newer(version)
            except TimeoutError:
                await _send(send, b": still here\n\n")
                continue
            await asyncio.sleep(_SETTLE_S)
            newer = board.since(version)
            kind = b"changes" if newer is not None else b"snapshot"
            newer = newer if newer is not None else list(board.all())
            version = board.version
            await self._put(send, kind, newer, version)

    async def _put(self, send: Send, kind: bytes, entries: list[Posted], version: int) -> None:
        parts = [
            b'{"topic":%s,"key":%s,"value":%s}'
            % (msgspec.json.encode(entry.topic), msgspec.json.encode(entry.key), entry.data or b"null")
            for entry in entries
        ]
        await _send(
            send, b"id: %s-%d\nevent: %s\ndata: [%s]\n\n" % (self._instance.encode(), version, kind, b",".join(parts))
        )


async def _send(send: Send, data: bytes) -> None:
    async with asyncio.timeout(_SEND_LIMIT_S):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
