"""Makes the claims that pods ask for, from templates and for extended resources, in both homes.

The stand-alone home also deletes the claims of deleted pods. This module neither places pods nor
waits for their claims. In the stand-alone home every pod is served (`ClaimTemplateReconciler`), and
a claim is deleted only on evidence: its pod was stored here once and is missing after a complete
snapshot. In a cluster this is kube-controller-manager's job. Where it does not run
(`cluster.housekeeping = "own"`), gated pods are served (`GatedPodClaims`), and an existing claim
for an entry is accepted as it is.
"""

from __future__ import annotations

from functools import partial

import msgspec

from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.claims.extended_resources import (
    claim_of_pod,
    extended_claim,
    extended_claim_name,
    with_extended_status,
)
from topobus.engine.claims.reservations import is_bound, is_made_for
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import (
    POD_CLAIM_NAME,
    WantedClaim,
    claim_from_template,
    wanted_claims,
    with_claim_names,
)
from topobus.formats.kubernetes.objects import ask_deletion, metadata_of, name_of
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue
from topobus.values.errors import ContractError
from topobus.values.timestamps import rfc3339

__all__ = ["ClaimTemplateReconciler", "GatedPodClaims"]


class _ClaimMaker:
    """Stores claims once, even when another replica makes the same claim: names and uids are
    derived from the pod's uid.
    """

    def __init__(self, clock: Clock, store: ObjectStore) -> None:
        self._clock = clock
        self._store = store

    async def make(self, pod: ApiObject, wanted: WantedClaim, template: ApiObject) -> None:
        """Make the claim of one entry. An existing claim of that name is left as it is.

        Errors: raises ContractError for a template that cannot be read, PeerUnavailable.
        """
        await self.store(
            pod, claim_from_template(pod, wanted, template, now=rfc3339(self._clock.now())), wanted.template
        )

    async def store(self, pod: ApiObject, claim: ApiObject, template: str = "") -> None:
        """Store a claim that was made for a pod."""
        metadata = metadata_of(claim)
        if await self._store.create(ObjectKey("resourceclaim", metadata.namespace, metadata.name), claim) is not None:
            get_logger().info("claim.created", claim=name_of(claim), pod=name_of(pod), template=template)


class GatedPodClaims:
    """Makes the claims of gated pods in a cluster where kube-controller-manager does not."""

    def __init__(self, clock: Clock, state: ApiServerState, store: ObjectStore) -> None:
        self._state = state
        self._store = store
        self._maker = _ClaimMaker(clock, store)

    async def make(self, key: Key, stored: Stored) -> None:
        """Make the missing claims of one pod, and write the names into its status."""
        pod = stored.value
        missing = {use.entry for use in stored.pod.uses if not use.claim}
        written = pod.status.get("resourceClaimStatuses")
        statuses = [status for status in written if isinstance(status, dict)] if isinstance(written, list) else []
        made: list[dict[str, str]] = []
        for wanted in wanted_claims(pod) if missing else ():
            template = self._state.templates.get((key[0], wanted.template))
            if wanted.entry not in missing or template is None:
                continue
            name = self._claim_of(key, stored, wanted.entry)
            if not name:
                await self._maker.make(pod, wanted, template.value)
                name = wanted.name
            made.append({"name": wanted.entry, "resourceClaimName": name})
        if made:
            named = msgspec.structs.replace(pod, status={**pod.status, "resourceClaimStatuses": [*statuses, *made]})
            await self._store.write(ObjectKey("pod", *key), stored.revision, named)

    def _claim_of(self, key: Key, pod: Stored, entry: str) -> str:
        """Name the claim that any component has made for an entry already.

        Empty when there is none.
        """
        for (namespace, name), claim in self._state.claims.items():
            is_of_entry = namespace == key[0] and claim.metadata.annotations.get(POD_CLAIM_NAME) == entry
            if is_of_entry and is_made_for(claim.value, pod.pod.ref):
                return name
        return ""


class ClaimTemplateReconciler:
    """Makes the claims of pods, and ends those of deleted pods."""

    def __init__(self, runtime: Runtime, state: StandaloneState, queue: WorkQueue) -> None:
        self._queue = queue
        self._runtime = runtime
        self._state = state
        self._store = NatsStore(runtime.bus, state)
        self._maker = _ClaimMaker(runtime.clock, self._store)
        self._logged: dict[ObjectKey, str] = {}
        self._seen: tuple[int, int, int] | None = None
        """Versions of pods, claims and templates at which no pod had work left."""

    async def reconcile_all(self) -> None:
        """Bring every pod's claims up to date."""
        epochs = (self._state.pod_epoch, self._state.claim_set_epoch, self._state.shared_epoch)
        pods = sorted(self._state.of_kind("pod").items()) if epochs != self._seen else ()
        for key, stored in pods:
            version = (stored.revision, self._state.shared_epoch)
            await self._queue.run(key, version, partial(self._guarded, key, stored), name=stored.shown)
        self._seen = epochs if self._queue.wait_s() is None else None
        # Read after the pods: while they were reconciled, other pods may have appeared with claims
        # that another replica made.
        for key, stored in self._state.claims_of_gone_pods():
            await self._queue.run(key, stored.revision, partial(self._end_orphan, key, stored), name=stored.shown)
        self._logged = {key: why for key, why in self._logged.items() if key in self._state.objects}
        self._queue.keep(self._state.objects.keys())

    async def _guarded(self, key: ObjectKey, stored: Stored) -> None:
        """Bring one pod's claims up to date.

        A fault of the pod or its templates is logged once.
        """
        try:
            await self._reconcile(key, stored)
        except ContractError as err:
            self._log_once(key, stored.value, str(err))

    async def _end_orphan(self, key: ObjectKey, stored: Stored) -> None:
        """End a claim whose pod is gone."""
        if not stored.metadata.deletion_timestamp:
            await self._end(key, stored)

    async def _reconcile(self, key: ObjectKey, stored: Stored) -> None:
        pod = stored.value
        if stored.metadata.deletion_timestamp or not stored.uid:
            return
        wanted = wanted_claims(pod)
        for wanted_claim in wanted:
            claim_key = ObjectKey("resourceclaim", key.namespace, wanted_claim.name)
            if claim_key in self._state.objects:
                continue
            template = self._state.objects.get(ObjectKey("resourceclaimtemplate", key.namespace, wanted_claim.template))
            if template is None:
                raise ContractError(
                    f"{stored.shown}: resourceClaims {wanted_claim.entry}: there is no ResourceClaimTemplate "
                    f"{key.namespace}/{wanted_claim.template}"
                )
            await self._maker.make(pod, wanted_claim, template.value)
        named = await self._with_extended(key, with_claim_names(pod, wanted))
        if named != pod:
            await self._store.write(key, stored.revision, named)
        self._logged.pop(key, None)

    async def _with_extended(self, key: ObjectKey, pod: ApiObject) -> ApiObject:
        """Make the special claim that serves the pod's extended resources, once."""
        if extended_claim_name(pod) or is_bound(pod):
            return pod
        wanted = extended_claim(pod, self._state.class_names())
        if wanted is None:
            return pod
        claim = claim_of_pod(pod, wanted, now=rfc3339(self._runtime.clock.now()))
        claim_key = ObjectKey("resourceclaim", key.namespace, metadata_of(claim).name)
        if claim_key not in self._state.objects:
            await self._maker.store(pod, claim)
        return with_extended_status(pod, claim_key.name, wanted)

    async def _end(self, key: ObjectKey, stored: Stored) -> None:
        marked = ask_deletion(stored.value, now=rfc3339(self._runtime.clock.now()))
        get_logger().info("claim.ended", claim=stored.shown, why="its pod is gone")
        if marked is None:
            # An attempt that another replica has made since is protected by its finalizer: that
            # claim ends after its devices are released.
            await self._store.delete(key, stored.revision)
        else:
            await self._store.write(key, stored.revision, marked)

    def _log_once(self, key: ObjectKey, pod: ApiObject, why: str) -> None:
        """Log a fault of a pod once."""
        if self._logged.get(key) != why:
            self._logged[key] = why
            get_logger().warning("pod.waiting", pod=name_of(pod), why=why)
