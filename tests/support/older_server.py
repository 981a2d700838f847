"""An API server of an older Kubernetes: another one's objects under the versions and in the shapes
that it had then.

v1beta1 (1.32) wraps what a device has besides its name into `basic`, and has no `exactly` in a
claim's requests; v1beta2 (1.33) is v1 by another name. Written down here once more, from the API's
own types, so that it does not share a mistake with the code under test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

GROUP = "/apis/resource.k8s.io/"


@asynccontextmanager
async def older_server(url: str, *versions: str, token: str = "") -> AsyncIterator[OlderServer]:
    """Serve the objects of the simulator at `url` under other versions of resource.k8s.io."""
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=httpx2.Timeout(10, read=None)) as client:
        made = OlderServer(client, versions, token)
        listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield made
        finally:
            listening.close()
            await made.close()


class OlderServer:
    """One running server."""

    def __init__(self, client: httpx2.AsyncClient, versions: tuple[str, ...], token: str) -> None:
        self.url = ""
        self.versions = versions
        self.asked: list[str] = []
        """Paths of all requests, as they came."""
        self.stored: list[dict[str, Any]] = []
        """Bodies of all writes, as they came."""
        self._client = client
        self._token = token
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cut all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                method, target, _ = lines[0].split(" ")
                headers = {
                    key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                await self._answer(
                    method, target, json.loads(body) if body else None, headers.get("content-type", ""), writer
                )
        except (asyncio.IncompleteReadError, ConnectionError, httpx2.HTTPError, asyncio.CancelledError):
            # The client left, or the test is over.
            return
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, method: str, target: str, body: Any, content_type: str, writer: asyncio.StreamWriter
    ) -> None:
        self.asked.append(target)
        version = target.removeprefix(GROUP).partition("?")[0].partition("/")[0] if target.startswith(GROUP) else ""
        if version and version not in self.versions:
            # Go's own handler answers for paths that are not served at all, in plain text. A Status
            # comes for an object that does not exist.
            text = b"404 page not found\n"
            head = (
                "HTTP/1.1 404 Not Found\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: "
                f"{len(text)}\r\n\r\n"
            )
            writer.write(head.encode() + text)
            await writer.drain()
            return
        if body is not None:
            self.stored.append(body)
            body = _newer(body, version)
        path = target.replace(f"{GROUP}{version}", f"{GROUP}v1", 1) if version else target
        headers = {
            "Authorization": f"Bearer {self._token}",
            **({"Content-Type": content_type} if body is not None and content_type else {}),
        }
        request = self._client.build_request(method, path, json=body, headers=headers)
        answer = await self._client.send(request, stream=True)
        try:
            if "watch=true" in target and answer.status_code == httpx2.codes.OK:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    data = json.dumps({**event, "object": _older(event["object"], version)}).encode() + b"\n"
                    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                return
            await answer.aread()
            await _send(writer, answer.status_code, _older(answer.json(), version))
        finally:
            await answer.aclose()


async def _send(writer: asyncio.StreamWriter, code: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(
        f"HTTP/1.1 {code} Status\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    await writer.drain()


def _older(plain: Any, version: str) -> Any:
    if not isinstance(plain, dict) or version != "v1beta1":
        return plain
    if isinstance(plain.get("items"), list):
        return {**plain, "items": [_older(item, version) for item in plain["items"]]}
    spec = plain.get("spec") or {}
    devices = spec.get("devices")
    if isinstance(spec.get("spec"), dict):  # a template
        return {**plain, "apiVersion": "resource.k8s.io/v1beta1", "spec": {**spec, "spec": _flat(spec["spec"])}}
    if isinstance(devices, dict):
        return {**plain, "apiVersion": "resource.k8s.io/v1beta1", "spec": _flat(spec)}
    if not isinstance(devices, list):
        return plain
    basic = [
        {"name": it["name"], "basic": {key: value for key, value in it.items() if key != "name"}} for it in devices
    ]
    return {**plain, "apiVersion": "resource.k8s.io/v1beta1", "spec": {**plain["spec"], "devices": basic}}


def _flat(claim: dict[str, Any]) -> dict[str, Any]:
    """Write a claim's requests as v1beta1 has them: the content of v1's `exactly` is beside the
    name.
    """
    requests = [
        {"name": it["name"], **it["exactly"]} if "exactly" in it else it
        for it in (claim.get("devices") or {}).get("requests") or ()
    ]
    return {**claim, "devices": {**(claim.get("devices") or {}), "requests": requests}}


def _newer(plain: dict[str, Any], version: str) -> dict[str, Any]:
    if plain.get("kind") == "ResourceClaim" and version == "v1beta2":
        return {**plain, "apiVersion": "resource.k8s.io/v1"}
    if plain.get("kind") == "ResourceClaim" and version == "v1beta1":
        requests = plain["spec"]["devices"]["requests"]
        assert not any("exactly" in it for it in requests), "v1beta1 knows no exactly"
        made = [
            {"name": it["name"], "exactly": {key: value for key, value in it.items() if key != "name"}}
            for it in requests
        ]
        return {
            **plain,
            "apiVersion": "resource.k8s.io/v1",
            "spec": {"devices": {**plain["spec"]["devices"], "requests": made}},
        }
    if plain.get("kind") != "ResourceSlice":
        return plain
    assert plain["apiVersion"] == f"resource.k8s.io/{version}", f"an object of {plain['apiVersion']} came to {version}"
    spec = dict(plain["spec"])
    if version == "v1beta1":
        assert all(it.keys() <= {"name", "basic"} for it in spec.get("devices", ())), (
            "v1beta1 knows only name and basic of a device"
        )
        spec["devices"] = [{"name": it["name"], **it["basic"]} for it in spec.get("devices", ())]
    return {**plain, "apiVersion": "resource.k8s.io/v1", "spec": spec}
