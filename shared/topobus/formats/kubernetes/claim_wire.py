"""A ResourceClaim in Kubernetes' protobuf form, changed in one place: the statuses that a driver
reports for its devices.

Pure. All other bytes stay as they are. Why not JSON: an API server compares the claim's allocation
byte for byte, opaque parameters included, and re-encodes those when a client sends JSON or a patch.
A claim whose author wrote them with spaces, or with keys in another order than a server's, then
counts as changed, and the write is refused although the allocation was never touched (seen on
1.36).
Source: k8s.io/api/resource/v1 generated.proto (the same numbers in all versions), apimachinery
runtime and meta/v1 generated.proto, 1.36.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.errors import ContractError

__all__ = ["PROTOBUF", "claim_uid", "with_device_statuses"]

PROTOBUF = "application/vnd.kubernetes.protobuf"

_MAGIC = b"k8s\x00"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Fields of runtime.Unknown, ResourceClaim, ObjectMeta, ResourceClaimStatus, AllocatedDeviceStatus,
# NetworkDeviceData, Condition, Time, RawExtension.
_RAW = 2
_METADATA, _STATUS = 1, 3
_UID = 5
_DEVICES = 4
_DRIVER, _POOL, _DEVICE, _CONDITIONS, _DATA, _NETWORK, _SHARE = 1, 2, 3, 4, 5, 6, 7
_NAME, _IPS, _HARDWARE = 1, 2, 3
_TYPE, _STATE, _GENERATION, _SINCE, _REASON, _MESSAGE = 1, 2, 3, 4, 5, 6
_SECONDS = 1
_RAW_JSON = 1
# The types of our conditions.
_OWN = ("Ready", "Healthy")


class _Field(Struct, frozen=True):
    number: int
    kind: int
    payload: bytes
    """What follows the tag; of a length-delimited field without its length."""


def claim_uid(body: bytes) -> str:
    """Read the uid of a claim.

    Errors: raises ContractError for bytes that are no claim in protobuf.
    """
    claim = _claim(body)[1]
    return _text(_first(_fields(_first(claim, _METADATA)), _UID))


def with_device_statuses(body: bytes, device_class: str, devices: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the claim with exactly these entries of our devices of a class.

    Conditions of other types in the present entries of these devices stay, and keep their entry.

    Shapes: devices — as in `status.devices` in JSON.
    Errors: raises ContractError for bytes that are no claim in protobuf.
    """
    unknown, claim = _claim(body)
    status = _fields(_first(claim, _STATUS))
    wanted = {_key(device): device for device in devices}
    kept: dict[tuple[str, str, str], list[bytes]] = {}
    others: list[_Field] = []
    for field in status:
        if field.number != _DEVICES:
            others.append(field)
            continue
        entry = _fields(field.payload)
        if class_of_device(_text(_first(entry, _DRIVER)), _text(_first(entry, _DEVICE))) != device_class:
            others.append(field)
            continue
        foreign = [
            part.payload
            for part in entry
            if part.number == _CONDITIONS and _text(_first(_fields(part.payload), _TYPE)) not in _OWN
        ]
        key = (_text(_first(entry, _POOL)), _text(_first(entry, _DEVICE)), _text(_first(entry, _SHARE)))
        if foreign:
            kept[key] = foreign
    entries = [
        _device(key, wanted.get(key, {}), kept.get(key, ()))
        for key in (*wanted, *(key for key in kept if key not in wanted))
    ]
    changed = _joined([*others, *(_Field(_DEVICES, _BYTES, entry) for entry in entries)])
    new_claim = _joined([*(field for field in claim if field.number != _STATUS), _Field(_STATUS, _BYTES, changed)])
    return _MAGIC + _joined(
        [_Field(field.number, field.kind, new_claim) if field.number == _RAW else field for field in unknown]
    )


def _claim(body: bytes) -> tuple[list[_Field], list[_Field]]:
    """Split the envelope and the claim in it."""
    if not body.startswith(_MAGIC):
        raise ContractError("API server: wanted a claim in protobuf, got something else")
    unknown = _fields(body[len(_MAGIC) :])
    return unknown, _fields(_first(unknown, _RAW))


def _device(key: tuple[str, str, str], device: Mapping[str, Any], foreign: Iterable[bytes]) -> bytes:
    pool, name, share = key
    fields = [_string(_DRIVER, DRIVER), _string(_POOL, pool), _string(_DEVICE, name)]
    fields += [_Field(_CONDITIONS, _BYTES, _condition(condition)) for condition in device.get("conditions", ())]
    fields += [_Field(_CONDITIONS, _BYTES, payload) for payload in foreign]
    if device.get("data"):
        fields.append(_Field(_DATA, _BYTES, _joined([_Field(_RAW_JSON, _BYTES, json.dumps(device["data"]).encode())])))
    network = device.get("networkData")
    if network:
        parts = [_string(_NAME, network.get("interfaceName", ""))]
        parts += [_string(_IPS, address) for address in network.get("ips", ())]
        parts.append(_string(_HARDWARE, network.get("hardwareAddress", "")))
        fields.append(_Field(_NETWORK, _BYTES, _joined(parts)))
    if share:
        fields.append(_string(_SHARE, share))
    return _joined(fields)


def _condition(condition: Mapping[str, Any]) -> bytes:
    seconds = int(datetime.fromisoformat(str(condition["lastTransitionTime"])).timestamp())
    fields = [_string(_TYPE, condition["type"]), _string(_STATE, condition["status"])]
    if condition.get("observedGeneration"):
        fields.append(_Field(_GENERATION, _VARINT, _varint(condition["observedGeneration"])))
    fields.append(_Field(_SINCE, _BYTES, _joined([_Field(_SECONDS, _VARINT, _varint(seconds))])))
    return _joined([*fields, _string(_REASON, condition["reason"]), _string(_MESSAGE, condition.get("message", ""))])


def _key(device: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(device["pool"]), str(device["device"]), str(device.get("shareID", ""))


def _first(fields: Iterable[_Field], number: int) -> bytes:
    return next((field.payload for field in fields if field.number == number), b"")


def _text(payload: bytes) -> str:
    return payload.decode("utf-8", "replace")


def _string(number: int, text: object) -> _Field:
    return _Field(number, _BYTES, str(text).encode("utf-8", "replace"))


def _fields(data: bytes) -> list[_Field]:
    """Split a message into its fields, in their order.

    Errors: raises ContractError for a message that ends in the middle.
    """
    fields: list[_Field] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, end = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            end = at + (8 if kind == _FIXED64 else 4)
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            end = at + size
        else:
            raise ContractError(f"API server: a claim in protobuf with wire type {kind}")
        if end > len(data):
            raise ContractError("API server: a claim in protobuf that ends too early")
        fields.append(_Field(number, kind, data[at:end]))
        at = end
    return fields


def _joined(fields: Iterable[_Field]) -> bytes:
    return b"".join(
        _varint(field.number << 3 | field.kind)
        + (_varint(len(field.payload)) if field.kind == _BYTES else b"")
        + field.payload
        for field in fields
    )


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ContractError("API server: a claim in protobuf with a number that does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
