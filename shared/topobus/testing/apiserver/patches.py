"""The API server simulator's patches by content type: JSON patch (RFC 6902), merge patch (RFC
7386), strategic merge.

Pure. Server-side apply is in `shapes`.
"""

from __future__ import annotations

import json
from typing import Any

from topobus.formats.kubernetes.merge_patch import merged
from topobus.testing.apiserver.lists import strategic_merge
from topobus.testing.apiserver.shapes import copied
from topobus.testing.apiserver.values import ApiError, Object, bad_request

__all__ = ["APPLY", "PATCH_TYPES", "json_patch", "patched", "reordered"]

APPLY = ("application/apply-patch+yaml",)
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_JSON = "application/json-patch+json"
PATCH_TYPES = (_JSON, _MERGE, _STRATEGIC, *APPLY)


def patched(content_type: str, present: Object, patch: Any) -> Object:
    """Return the object with a patch of this type applied.

    Errors: raises ApiError: 415 for another type, 400 for a patch of the wrong shape, 422 for one
    that does not fit the object.
    """
    if content_type == _JSON:
        if not isinstance(patch, list):
            raise bad_request(
                "error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch"
            )
        return json_patch(present, patch)
    if content_type not in (_MERGE, _STRATEGIC):
        text = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(
            PATCH_TYPES
        )
        raise ApiError(415, "UnsupportedMediaType", text)
    if not isinstance(patch, dict):
        raise bad_request("error decoding patch: wanted a JSON object")
    result: Object = merged(present, patch) if content_type == _MERGE else strategic_merge(present, patch)
    return reordered(result)


def reordered(api_object: Object) -> Object:
    """Return an object with the keys of its claim's opaque parameters sorted.

    All patches but JSON patches leave it so, because the server reads the whole object and writes
    it again (seen on 1.36).

    >>> reordered({"status": {"allocation": {"devices": {"config": [{"opaque": {"parameters": {"b": 1, "a": 2}}}]}}}})
    {'status': {'allocation': {'devices': {'config': [{'opaque': {'parameters': {'a': 2, 'b': 1}}}]}}}}
    """
    result = copied(api_object)
    allocation = (result.get("status") or {}).get("allocation") or {}
    for config in (allocation.get("devices") or {}).get("config") or ():
        opaque = config.get("opaque") or {}
        if "parameters" in opaque:
            opaque["parameters"] = json.loads(json.dumps(opaque["parameters"], sort_keys=True))
    return result


def json_patch(present: Object, operations: list[Any]) -> Object:
    """Apply a JSON patch, all of it or nothing.

    Errors: raises ApiError 422 when a path is not there or a test fails.
    >>> json_patch({"a": [1, 3]}, [{"op": "test", "path": "/a/0", "value": 1}, {"op": "add", "path": "/a/1", "value": 2}])
    {'a': [1, 2, 3]}
    """  # noqa: E501
    result: Any = copied(present)
    for operation in operations:
        try:
            kind, path = str(operation["op"]), _parts(str(operation["path"]))
            match kind:
                case "add" | "replace":
                    result = _put(result, path, copied(operation["value"]), is_new=kind == "add")
                case "remove":
                    _take(result, path)
                case "move":
                    result = _put(result, path, _take(result, _parts(str(operation["from"]))), is_new=True)
                case "copy":
                    result = _put(result, path, copied(_value_at(result, _parts(str(operation["from"])))), is_new=True)
                case "test":
                    if _value_at(result, path) != operation["value"]:
                        raise _unfit(f"testing value {operation['path']} failed: test failed")
                case _:
                    raise bad_request(f"Unexpected kind: {kind}")
        except (KeyError, IndexError, ValueError, TypeError) as err:
            raise _unfit(f"{operation}: doc is missing path or key: {err}") from err
    if not isinstance(result, dict):
        raise _unfit("the result is no object")
    return result


def _unfit(why: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request due to an error in our request: {why}")


def _parts(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise ValueError(f"path {path!r} does not begin with '/'")
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _value_at(value: Any, path: list[str]) -> Any:
    for key in path:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def _put(root: Any, path: list[str], value: Any, *, is_new: bool) -> Any:
    if not path:
        return value
    holder, last = _value_at(root, path[:-1]), path[-1]
    if isinstance(holder, list):
        if is_new:
            at = len(holder) if last == "-" else int(last)
            if not 0 <= at <= len(holder):
                raise IndexError(last)
            holder.insert(at, value)
        else:
            holder[int(last)] = value
    elif isinstance(holder, dict):
        if not is_new and last not in holder:
            raise KeyError(last)
        holder[last] = value
    else:
        raise TypeError(f"{last} of a value that is neither object nor list")
    return root


def _take(root: Any, path: list[str]) -> Any:
    holder, last = _value_at(root, path[:-1]), path[-1]
    return holder.pop(int(last)) if isinstance(holder, list) else holder.pop(last)
