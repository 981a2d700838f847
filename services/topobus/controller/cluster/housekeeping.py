"""The end of claims that we allocated, and where the cluster has nobody for it, their beginning too.

kube-controller-manager's resourceclaim controller makes claims from templates, prunes reservations of pods that ended, deallocates what nobody uses and deletes what
was made for a pod. Where it runs (`cluster.housekeeping = "cluster"`) all of that is left to it, and only what no one else knows is done here: intents of pods that
are gone are withdrawn. With `own` the same is done here for gated pods and the claims that we allocated, and for no others.

Flows in: the copy of the cluster. Flows out: writes, each bound to a version, so that doing it beside somebody else is no harm.
Source: k8s.io/kubernetes pkg/controller/resourceclaim, 1.36.
"""

from __future__ import annotations

from topobus.contracts.kubernetes.objects import DELETE_PROTECTION, metadata_of, name_of
from topobus.contracts.messages import ApiObject
from topobus.controller.cluster.api import CLAIMS, PODS, Api, Rejected
from topobus.controller.cluster.ledgers import Ledgers
from topobus.controller.cluster.writes import Writer
from topobus.controller.core import gated
from topobus.controller.core.cluster_objects import downgraded_claim, has_gate, is_over
from topobus.controller.core.cluster_world import ClusterWorld, Key
from topobus.controller.core.pods import claim_from_template, owner_pod_uid, wanted_claims
from topobus.controller.core.scheduling_objects import Consumer, claim_uses, consumers_of, is_made_for, pod_ref
from topobus.domain.errors import ContractError, PeerUnavailable
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["Housekeeper"]

# How long an intent's pod must be unknown before the intent is withdrawn: our copy of the pods may be a moment behind that of the claims.
_ORPHAN_S = 10.0


class Housekeeper:
    """Looks after claims whose pods are gone, and after pods whose claims are not made yet."""

    def __init__(self, api: Api, clock: Clock, world: ClusterWorld, writer: Writer, ledgers: Ledgers, *, is_own: bool) -> None:
        self._api = api
        self._clock = clock
        self._world = world
        self._writer = writer
        self._ledgers = ledgers
        self._is_own = is_own
        self._orphans: dict[str, float] = {}
        self._log = get_logger()

    async def reconcile_all(self) -> float | None:
        """Look at every claim; gives after how many seconds another look is due."""
        orphans: dict[str, float] = {}
        is_due = False
        for key in self._world.book.noted() if self._is_own else self._world.book.unallocated():
            claim, note = self._world.claims.get(key), self._world.book.note(key)
            if claim is None or note is None:
                continue
            try:
                other = self._world.book.pod_of(note.pod)
                pod = self._world.pods.get(other) if other is not None else None
                if not claim.status.get("allocation") and (pod is None or is_over(pod)):
                    uid = metadata_of(claim).uid
                    orphans[uid] = self._orphans.get(uid, self._clock.monotonic())
                    is_late = self._clock.monotonic() - orphans[uid] >= _ORPHAN_S
                    if is_late or pod is not None or self._world.is_taken_back(key):
                        self._log.info("claim.withdrawn", claim=name_of(claim), why="its pod is gone")
                        await self._writer.claim(key, gated.withdrawal_patch(claim))
                elif self._is_own:
                    await self._end(key, claim)
            except PeerUnavailable as err:
                self._log.warning("housekeeping.peer-silent", claim=name_of(claim), error=str(err))
                is_due = True
            except ContractError:
                continue  # a note that nobody can read is not ours
        self._orphans = orphans
        if self._is_own:
            is_due = await self._make_all() or is_due
            is_due = await self._finish_all() or is_due
        return 1.0 if orphans or is_due else None

    async def _make_all(self) -> bool:
        """Make the claims of gated pods from their templates."""
        is_due = False
        for key, pod in sorted(self._world.pods.items()):
            if not has_gate(pod) or is_over(pod):
                continue
            try:
                await self._make(key, pod)
            except PeerUnavailable as err:
                self._log.warning("housekeeping.peer-silent", pod=name_of(pod), error=str(err))
                is_due = True
            except ContractError as err:
                self._log.warning("pod.malformed", pod=name_of(pod), error=str(err))
        return is_due

    async def _make(self, key: Key, pod: ApiObject) -> None:
        missing = {use.entry for use in claim_uses(pod) if not use.claim}
        if not missing:
            return
        statuses = [one for one in pod.status.get("resourceClaimStatuses") or () if isinstance(one, dict)]
        for wanted in wanted_claims(pod):
            template = self._world.templates.get((key[0], wanted.template))
            if wanted.entry not in missing or template is None:
                continue
            name = await self._claim_of(key, pod, wanted.entry)
            if not name:
                now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
                claim = claim_from_template(pod, wanted, template, now=now)
                made = {"name", "namespace", "ownerReferences", "annotations", "labels"}
                version = await self._api.version_of(CLAIMS)
                plain = {
                    "apiVersion": f"{CLAIMS.group}/{version}",
                    "kind": CLAIMS.name,
                    "metadata": {field: value for field, value in claim.metadata.items() if field in made},
                    "spec": downgraded_claim(claim.spec, version),
                }
                answer = await self._api.create(CLAIMS, plain)
                if isinstance(answer, Rejected) and answer.code != 409:
                    raise PeerUnavailable(f"API server: ResourceClaim {key[0]}/{wanted.name}: {answer.code} {answer.message}")
                name = wanted.name
                self._log.info("claim.created", claim=f"{key[0]}/{name}", pod=name_of(pod), template=wanted.template)
            statuses.append({"name": wanted.entry, "resourceClaimName": name})
        if len(statuses) > len(pod.status.get("resourceClaimStatuses") or ()):
            identity = {"uid": pod.metadata.get("uid"), "resourceVersion": pod.metadata.get("resourceVersion")}
            await self._writer.pod(key, {"metadata": identity, "status": {"resourceClaimStatuses": statuses}}, part="status")

    async def _claim_of(self, key: Key, pod: ApiObject, entry: str) -> str:
        """Name the claim that was made for an entry already, by whom ever; empty when there is none."""
        for (namespace, name), claim in self._world.claims.items():
            annotations = metadata_of(claim).annotations
            if (
                namespace == key[0]
                and annotations.get("resource.kubernetes.io/pod-claim-name") == entry
                and is_made_for(claim, pod_ref(pod))
            ):
                return name
        return ""

    async def _end(self, key: Key, claim: ApiObject) -> None:
        """Prune reservations of pods that ended; when none is left, take the devices back."""
        users = consumers_of(claim)
        gone = frozenset([one.uid for one in users if await self._has_ended(key[0], one)])
        is_unused = len(gone) == len(users) and (bool(gone) or bool(metadata_of(claim).deletion_timestamp))
        if is_unused:
            self._log.info("claim.deallocated", claim=name_of(claim), why="its pods have ended" if gone else "it is being deleted")
            await self._writer.claim(key, gated.deallocation_patch(claim), part="status")
        elif gone:
            await self._writer.claim(key, gated.unreservation_patch(claim, gone), part="status")

    async def _has_ended(self, namespace: str, user: Consumer) -> bool:
        """Say whether a user of a claim is a pod that has ended; one that our copy lacks is asked for."""
        if user.resource != "pods" or user.api_group:
            return False
        key = self._world.book.pod_of(user.uid)
        known = self._world.pods.get(key) if key is not None else None
        if known is None:
            known = await self._writer.refresh(PODS, (namespace, user.name))
        return known is None or metadata_of(known).uid != user.uid or is_over(known)

    async def _finish_all(self) -> bool:
        """Delete claims made for pods that have ended, and let go of deleted ones that hold nothing."""
        is_due = False
        for key, claim in sorted(self._world.claims.items()):
            metadata = metadata_of(claim)
            try:
                if metadata.deletion_timestamp:
                    if DELETE_PROTECTION in metadata.finalizers and not claim.status.get("allocation") and gated.was_ours(claim):
                        await self._writer.claim(key, gated.protection_patch(claim))
                    continue
                owner = owner_pod_uid(claim)
                if owner is None or not gated.was_ours(claim):
                    continue
                name = next((str(one.get("name")) for one in metadata.owner_references if one.get("uid") == owner), "")
                if await self._has_ended(key[0], Consumer("pods", name, owner)):
                    await self._api.delete(CLAIMS, *key, uid=metadata.uid)
                    self._log.info("claim.deleted", claim=name_of(claim), why="the pod that it was made for has ended")
            except PeerUnavailable as err:
                self._log.warning("housekeeping.peer-silent", claim=name_of(claim), error=str(err))
                is_due = True
        return is_due
