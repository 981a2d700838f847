"""Operations on a node's ledger, drawn from a seed, and the effects of their answers on each object
of the ledger.

A seed and a worker's number give the same operations each time, whatever the answers are. An
operation with its answer gives the actions on devices and owners (`ledger_objects`). Several
workers share owners, so that they place, keep and release the same ones at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from lab.chaos.ledger_objects import ANY, FREE, Act, DeviceAction, OwnerAction, devices_of, held_by_owner
from topobus.engine.alignment.planning.node_view import cpu_name
from topobus.formats.messages.messages import (
    AdoptReply,
    AdoptRequest,
    CommitReply,
    CommitRequest,
    PlaceReply,
    PlaceRequest,
    ReleaseReply,
    ReleaseRequest,
)
from topobus.values.ledger import AllocationPhase, Holders
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

__all__ = [
    "CPUS",
    "DEVICES",
    "GPUS",
    "NICS",
    "Draft",
    "Effects",
    "Verb",
    "effects_of",
    "operations",
    "owner_keys",
    "unknown_effects",
]

GPUS = tuple(f"gpu-{number}" for number in range(12))
NICS = tuple(f"nic-{number}" for number in range(4))
CPUS = tuple(cpu_name(number) for number in range(16))
DEVICES = (*GPUS, *NICS, *CPUS)

_SHARED = 6
_PRIVATE = 1
_RESOURCE = "topobus.dev/gpu"


class Verb(StrEnum):
    """The kinds of operations on the ledger."""

    PLACE = "place"
    ADOPT = "adopt"
    COMMIT = "commit"
    RELEASE = "release"
    READ = "read"


# Of a hundred operations. Devices are scarce on purpose: about every second request for some
# conflicts with another owner.
_SHARES = ((Verb.READ, 30), (Verb.PLACE, 16), (Verb.ADOPT, 14), (Verb.COMMIT, 4), (Verb.RELEASE, 36))


class Draft(Struct, frozen=True, kw_only=True):
    """One operation before it is sent. A read has no request.

    A placement without `names` lets the node choose.
    """

    op_id: str
    verb: Verb
    owner: Owner
    names: frozenset[str] = frozenset()
    request: PlaceRequest | AdoptRequest | CommitRequest | ReleaseRequest | None = None


class Effects(Struct, frozen=True, kw_only=True):
    """The actions of an operation on each device and each owner that it touches."""

    devices: dict[str, DeviceAction] = {}
    owners: dict[str, OwnerAction] = {}


def _owner(kind: OwnerKind, name: str) -> Owner:
    if kind is OwnerKind.DEVICE_PLUGIN:
        return Owner(kind=kind, namespace="kubelet", name=_RESOURCE, uid=name)
    return Owner(kind=kind, name=name, uid=f"uid-{name}")


_PODS = tuple(_owner(OwnerKind.POD, f"pod-{number}") for number in range(_SHARED))
_CLAIMS = tuple(_owner(OwnerKind.CLAIM, f"claim-{number}") for number in range(_SHARED))
_PLUGINS = tuple(_owner(OwnerKind.DEVICE_PLUGIN, f"plugin-{number}") for number in range(_SHARED))
_PLUGIN_KEYS = frozenset(owner.key for owner in _PLUGINS)


def operations(seed: int, worker: int) -> Iterator[Draft]:
    """Yield a worker's operations, without an end. The same seed gives the same ones."""
    chance = random.Random(f"{seed}/{worker}")
    private = _private(worker)
    number = 0
    while True:
        number += 1
        yield _draw(chance, f"{seed}-{worker}-{number}", private)


def _draw(chance: random.Random, op_id: str, private: tuple[Owner, ...]) -> Draft:
    verb = chance.choices([verb for verb, _ in _SHARES], [share for _, share in _SHARES])[0]
    match verb:
        case Verb.READ:
            return Draft(op_id=op_id, verb=verb, owner=_PODS[0])
        case Verb.PLACE:
            return _draw_place(chance, op_id, private)
        case Verb.ADOPT:
            owner = chance.choice((*_CLAIMS, *_CLAIMS, *_PLUGINS))
            is_plugin = owner.kind is OwnerKind.DEVICE_PLUGIN
            gpus, nics = chance.sample(GPUS, chance.choice((1, 1, 2))), chance.sample(NICS, chance.choice((0, 1)))
            devices = {"gpu": tuple(sorted(gpus)), **({"nic": tuple(nics)} if nics and not is_plugin else {})}
            request = AdoptRequest(op_id=op_id, owner=owner, devices=devices)
            return Draft(op_id=op_id, verb=verb, owner=owner, names=devices_of(devices), request=request)
        case Verb.COMMIT:
            owner = chance.choice((*_PODS, *private))
            return Draft(op_id=op_id, verb=verb, owner=owner, request=CommitRequest(op_id=op_id, owner=owner))
        case Verb.RELEASE:
            owner = chance.choice((*_PODS, *_CLAIMS, *_PLUGINS, *private * 3))
            return Draft(op_id=op_id, verb=verb, owner=owner, request=ReleaseRequest(op_id=op_id, owner=owner))


def _draw_place(chance: random.Random, op_id: str, private: tuple[Owner, ...]) -> Draft:
    owner = chance.choice((*_PODS, *private * 3))
    is_reservation = chance.random() < 0.4
    names: frozenset[str] = frozenset()
    if owner in private:
        devices = (
            DeviceRequest(device_class="gpu", count=chance.choice((1, 2))),
            DeviceRequest(device_class="nic", count=chance.choice((0, 1))),
        )
        container = ContainerRequest(
            name="main", cpus=chance.choice((0, 1, 3)), devices=tuple(device for device in devices if device.count)
        )
    else:
        names = frozenset(chance.sample(GPUS, chance.choice((1, 1, 2))))
        container = ContainerRequest(
            name="main", devices=(DeviceRequest(device_class="gpu", count=len(names), names=tuple(sorted(names))),)
        )
    request = PlaceRequest(
        op_id=op_id, pod=PodRequest(owner=owner, containers=(container,)), is_reservation=is_reservation
    )
    return Draft(op_id=op_id, verb=Verb.PLACE, owner=owner, names=names, request=request)


def owner_keys(workers: int) -> tuple[str, ...]:
    """List all owners that so many workers name."""
    private = (owner for worker in range(workers) for owner in _private(worker))
    return tuple(owner.key for owner in (*_PODS, *_CLAIMS, *_PLUGINS, *private))


def _private(worker: int) -> tuple[Owner, ...]:
    return tuple(_owner(OwnerKind.POD, f"own-{worker}-{number}") for number in range(_PRIVATE))


def effects_of(draft: Draft, reply: object, owners: Iterable[str]) -> Effects:
    """Return the effects of an answered operation on each object.

    A read's reply is the ledger, which is about all `owners`.

    Errors: raises TypeError for a reply that does not belong to the operation.
    """
    match reply:
        case Holders():
            return _read(reply, owners)
        case PlaceReply():
            return _placed(draft, reply)
        case AdoptReply():
            return _adopted(draft, reply)
        case CommitReply():
            act = Act.COMMIT if reply.refusal is None else Act.HOLDS_NONE
            return Effects(owners={draft.owner.key: OwnerAction(act)})
        case ReleaseReply():
            gone = devices_of(reply.devices)
            key = draft.owner.key
            return Effects(
                devices={name: DeviceAction(Act.LET_GO if name in gone else Act.NOT_HOLDER, key) for name in DEVICES},
                owners={key: OwnerAction(Act.RELEASE, gone) if gone else OwnerAction(Act.HOLDS_NONE)},
            )
    raise TypeError(f"{draft.verb} was answered by {type(reply).__name__}")


def _read(ledger: Holders, owners: Iterable[str]) -> Effects:
    held = held_by_owner(ledger)
    holder = {name: key for key, held_devices in held.items() for name in held_devices.devices}
    seen = {key: OwnerAction(Act.HOLDS, each.devices, each.phase) for key, each in held.items()}
    return Effects(
        devices={name: DeviceAction(Act.HOLDER, holder.get(name, FREE)) for name in {*DEVICES, *holder}},
        owners={**{key: OwnerAction(Act.HOLDS_NONE) for key in owners}, **seen},
    )


def _codes(refusal: Refusal) -> frozenset[str]:
    return frozenset(reason.code for reason in refusal.reasons)


def _placed(draft: Draft, reply: PlaceReply) -> Effects:
    key = draft.owner.key
    if isinstance(reply.result, Placement):
        placed = frozenset(
            name
            for container in reply.result.containers
            for name in (*devices_of(container.devices), *(cpu_name(cpu) for cpu in container.cpus))
        )
        return Effects(
            devices={name: DeviceAction(Act.TAKE, key) for name in placed},
            owners={key: OwnerAction(Act.PLACE, placed, _phase(draft))},
        )
    codes = _codes(reply.result)
    if "released-since" in codes:
        # It was placed, and another worker has released it before the answer came.
        return unknown_effects(draft) if not draft.names else _taken(draft)
    if "already-placed" in codes:
        return Effects(owners={key: OwnerAction(Act.HOLDS_SOME)})
    if len(draft.names) == 1:
        return Effects(devices={name: DeviceAction(Act.NOT_HOLDER, FREE) for name in draft.names})
    return Effects()


def _taken(draft: Draft) -> Effects:
    return Effects(
        devices={name: DeviceAction(Act.TAKE, draft.owner.key) for name in draft.names},
        owners={draft.owner.key: OwnerAction(Act.PLACE, draft.names, _phase(draft))},
    )


def _phase(draft: Draft) -> str:
    is_reservation = isinstance(draft.request, PlaceRequest) and draft.request.is_reservation
    return (AllocationPhase.RESERVED if is_reservation else AllocationPhase.COMMITTED).value


def _adopted(draft: Draft, reply: AdoptReply) -> Effects:
    key = draft.owner.key
    result = reply.result
    if isinstance(result, Refusal) and "released-since" not in _codes(result):
        seen = {
            str(name): DeviceAction(Act.HOLDER, str(reason.facts["owner"]))
            for reason in result.reasons
            if reason.code == "device-held"
            for name in _names_in(reason.facts.get("devices", ()))
        }
        return Effects(devices=seen)
    displaces = _displaced_by(draft.owner)
    devices = {
        name: DeviceAction(Act.TAKE, key, displaces) if name in draft.names else DeviceAction(Act.DROP, key)
        for name in DEVICES
    }
    lost = (
        {}
        if isinstance(result, Refusal)
        else {owner.key: OwnerAction(Act.LOSE, draft.names) for owner in result.displaced}
    )
    return Effects(devices=devices, owners={key: OwnerAction(Act.ADOPT, draft.names), **lost})


def _names_in(fact: str | float | bool | tuple[str, ...]) -> tuple[str, ...]:
    return fact if isinstance(fact, tuple) else (str(fact),)


def _displaced_by(owner: Owner) -> frozenset[str]:
    """A newer allocation of kubelet's of a resource displaces its older ones."""
    return _PLUGIN_KEYS - {owner.key} if owner.kind is OwnerKind.DEVICE_PLUGIN else frozenset()


def unknown_effects(draft: Draft) -> Effects:
    """Return the possible effects of an operation whose answer was lost for good."""
    key = draft.owner.key
    match draft.verb:
        case Verb.READ:
            return Effects()
        case Verb.COMMIT:
            return Effects(owners={key: OwnerAction(Act.MAY_COMMIT)})
        case Verb.RELEASE:
            return Effects(
                devices={name: DeviceAction(Act.MAY_DROP, key) for name in DEVICES},
                owners={key: OwnerAction(Act.MAY_RELEASE)},
            )
        case Verb.PLACE:
            return Effects(
                devices={name: DeviceAction(Act.MAY_TAKE, key) for name in draft.names or DEVICES},
                owners={key: OwnerAction(Act.MAY_PLACE, draft.names or ANY, _phase(draft))},
            )
        case Verb.ADOPT:
            displaces = _displaced_by(draft.owner)
            devices = {
                name: DeviceAction(Act.MAY_TAKE, key, displaces)
                if name in draft.names
                else DeviceAction(Act.MAY_DROP, key)
                for name in DEVICES
            }
            lost = {other: OwnerAction(Act.MAY_LOSE, draft.names) for other in displaces}
            return Effects(devices=devices, owners={key: OwnerAction(Act.ADOPT, draft.names), **lost})
