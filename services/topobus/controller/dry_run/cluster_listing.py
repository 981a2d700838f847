"""Lists the objects of a cluster that a dry run needs, once.

It only reads: slices, classes, templates, claims and nodes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from topobus.controller.config import ClusterSettings
from topobus.controller.dry_run.rules.situation import Situation, place_of
from topobus.controller.state.cluster_objects import read_object
from topobus.controller.store.api import (
    CLAIMS,
    CLASSES,
    NAMESPACES,
    NODES,
    SLICES,
    TAINT_RULES,
    TEMPLATES,
    HistoryLost,
    Kind,
)
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.engine.allocation.admission import asks_admin
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError, PeerUnavailable

__all__ = ["list_situation"]

_KINDS = (CLASSES, SLICES, TEMPLATES, CLAIMS, TAINT_RULES, NODES)


async def list_situation(situation: Situation, kubeconfig: Path | None, context: str) -> Situation:
    """Add the objects that the API server lists to a situation.

    An object of the situation takes precedence over a listed one of the same name.

    Errors: raises ConfigError for a configuration that cannot be used, PeerUnavailable for a server
    that does not answer or forbids a list.
    """
    api = KubernetesApi.open(ClusterSettings(kubeconfig=str(kubeconfig or ""), context=context))
    try:
        # Namespaces matter for admin access alone. Without such a request the right to list them is
        # not needed.
        kinds = (*_KINDS, NAMESPACES) if any(map(_asks_admin, (*situation.wanted, *situation.objects))) else _KINDS
        listed = [api_object for kind in kinds for api_object in await _list(api, kind)]
    finally:
        await api.close()
    given = {(api_object.kind, place_of(api_object)) for api_object in situation.objects}
    added = tuple(api_object for api_object in listed if (api_object.kind, place_of(api_object)) not in given)
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


async def _list(api: KubernetesApi, kind: Kind) -> list[ApiObject]:
    version = await api.version_of(kind)
    if not version and kind.is_optional:
        return []
    if not version:
        raise PeerUnavailable(
            f"API server {api.server}: it serves no {kind.plural} in a version that we can read",
            next_step="Dynamic Resource Allocation must be enabled there (Kubernetes 1.32 or newer)",
        )
    api_objects: list[ApiObject] = []
    try:
        async for page in api.pages(kind):
            api_objects.extend(
                api_object for plain in page.items if (api_object := read_object(kind.name, version, plain)) is not None
            )
    except HistoryLost as err:
        raise PeerUnavailable(
            f"API server {api.server}: the list of {kind.plural} became too old while it was read",
            next_step="try again",
        ) from err
    return api_objects
