"""Adds the objects of a cluster to a dry run: slices, classes, templates, claims, taint rules and
nodes. It only reads.
"""

from __future__ import annotations

import msgspec

from topobus.controller.dry_run.rules.situation import Situation, place_of
from topobus.controller.snapshots.listing import RIGHTS, list_objects, open_client
from topobus.controller.state.cluster_objects import read_object
from topobus.controller.store.api import CLAIMS, CLASSES, NAMESPACES, NODES, SLICES, TAINT_RULES, TEMPLATES
from topobus.engine.allocation.admission import asks_admin
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["list_situation"]

_KINDS = (CLASSES, SLICES, TEMPLATES, CLAIMS, TAINT_RULES, NODES)


async def list_situation(situation: Situation, kubeconfig: str, context: str) -> Situation:
    """Add the objects that the API server lists to a situation.

    An object of the situation takes precedence over a listed one of the same name.

    Errors: raises ConfigError for a configuration that cannot be used, PeerUnavailable for a server
    that does not answer or forbids a list.
    """
    # Namespaces matter for admin access alone. Without such a request the right to list them is not
    # needed.
    is_admin = any(map(_asks_admin, (*situation.wanted, *situation.objects)))
    client = open_client(kubeconfig, context)
    try:
        kinds = (*_KINDS, NAMESPACES) if is_admin else _KINDS
        items, unseen = await list_objects(client, kinds, lambda *_: None)
    finally:
        await client.close()
    if unseen:
        kind, why = unseen[0].kind, unseen[0].why
        raise PeerUnavailable(
            f"API server {client.server}: {kind} objects: {why}", next_step=f"{RIGHTS} has the rights to read them"
        )
    given = {(api_object.kind, place_of(api_object)) for api_object in situation.objects}
    listed = (read_object(str(plain["kind"]), str(plain["apiVersion"]).rpartition("/")[2], plain) for plain in items)
    added = tuple(
        api_object
        for api_object in listed
        if api_object is not None and (api_object.kind, place_of(api_object)) not in given
    )
    return msgspec.structs.replace(situation, objects=(*situation.objects, *added))


def _asks_admin(api_object: ApiObject) -> bool:
    """Say whether a claim, or a template's, asks for admin access.

    False for an object that cannot be read: the dry run reports it.
    """
    spec = api_object.spec.get("spec") if api_object.kind == "ResourceClaimTemplate" else api_object.spec
    try:
        return api_object.kind in ("ResourceClaim", "ResourceClaimTemplate") and bool(
            asks_admin(read_as(spec, ClaimSpec, where="spec"))
        )
    except ContractError:
        return False
