"""Access control of the API server simulator: users with tokens, and RBAC rules from the Role
objects that the server stores.

A request is a verb, a resource and a name. One without the right gets a 403 in Kubernetes' words.
Afterwards a test can list the granted rights that were used and those that were not, to compare a
least-privilege manifest with the calls of a program.
Source: k8s.io/kubernetes plugin/pkg/auth/authorizer/rbac, and registry/resource/resourceclaim
(granular status authorization), 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from topobus.testing.apiserver.values import ApiError, Object, Resource, forbidden, invalid

__all__ = ["ADMIN", "Access", "Right", "verb_of"]

ADMIN = "system:admin"
_SERVICE_ACCOUNT = "system:serviceaccount:"


class Right(Struct, frozen=True, kw_only=True, order=True):
    """One verb on one resource (with its part, as in `pods/status`), in one namespace.

    An empty namespace is all of them.
    """

    verb: str
    group: str
    resource: str
    namespace: str = ""

    def __str__(self) -> str:
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group}{where}"


class Access:
    """Users, their tokens, and their rights.

    Args:
        token: the administrator's. Empty: a request without a token is the administrator's.
        objects: reads the role and binding objects, by kind.
    """

    def __init__(self, token: str, objects: Callable[[str], list[Object]]) -> None:
        self._objects = objects
        self._users = {token: ADMIN}
        self._masters = {ADMIN}
        self._nodes: dict[str, str] = {}
        self._used: dict[str, set[Right]] = {}

    def add_user(self, user: str, *, node: str = "", is_master: bool = False) -> str:
        """Make a user and return its token, the same one when called again.

        A service account's token names the node that its pod runs on.

        Shapes: is_master — may do everything, as one of group `system:masters`.
        """
        if node:
            self._nodes[user] = node
        if is_master:
            self._masters.add(user)
        for token, known_user in self._users.items():
            if known_user == user:
                return token
        token = f"token-of-{user}"
        self._users[token] = user
        return token

    def user_of(self, authorization: str) -> str:
        """Name the user of an Authorization header.

        Errors: raises ApiError 401 for an unknown token.
        """
        token = authorization.removeprefix("Bearer ")
        if token in self._users:
            return self._users[token]
        if "" in self._users:
            return ADMIN
        raise ApiError(401, "Unauthorized", "Unauthorized")

    def check(
        self, user: str, verb: str, resource: Resource, *, namespace: str = "", name: str = "", part: str = ""
    ) -> None:
        """Return if the user has the right.

        Errors: raises ApiError 403.
        """
        if user in self._masters:
            return
        plural = f"{resource.plural}/{part}" if part else resource.plural
        self._used.setdefault(user, set()).add(
            Right(verb=verb, group=resource.group, resource=plural, namespace=namespace)
        )
        for rule, scope in self._rules(user):
            if scope in ("", namespace) and _grants(rule, verb, resource.group, plural, name):
                return
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        why = f'User "{user}" cannot {verb} resource "{plural}" in API group "{resource.group}" {where}'
        raise forbidden(resource, name, why)

    def check_claim_status(
        self, user: str, verb: str, resource: Resource, before: Object, after: Object, *, namespace: str
    ) -> None:
        """Check a write of a claim's status by its parts: the allocation needs the right `binding`,
        a driver's status of its devices `driver`.

        Errors: raises ApiError 422, because a real server checks the parts when it validates.
        """
        old, new = before.get("status") or {}, after.get("status") or {}
        name = str(before["metadata"]["name"])
        problems: list[tuple[str, str]] = []
        if any(old.get(field) != new.get(field) for field in ("allocation", "reservedFor")):
            try:
                self.check(user, verb, resource, part="binding")
            except ApiError as err:
                text = (
                    "changing status.allocation or status.reservedFor requires "
                    f'resource="resourceclaims/binding", verb="{verb}" permission'
                )
                problems.append(("status.allocation", f"Forbidden: {text}: {err}"))
        if new.get("allocation"):
            is_here = self._nodes.get(user, "") == node_of_allocation(new["allocation"]) != ""
            verbs = [f"{prefix}:{verb}" for prefix in (("associated-node",) if is_here else ()) + ("arbitrary-node",)]
            for driver in _changed_drivers(old.get("devices") or (), new.get("devices") or ()):
                why = self._why_not(user, verbs, resource, namespace=namespace, name=driver)
                if why:
                    text = (
                        'changing status.devices requires resource="resourceclaims/driver", '
                        f'verb="[{" ".join(verbs)}]" permission'
                    )
                    problems.append(("status.devices", f"Forbidden: {text}: {why}"))
        if problems:
            raise invalid(resource, name, problems)

    def _why_not(self, user: str, verbs: list[str], resource: Resource, *, namespace: str, name: str) -> str:
        """Name the reason why none of the verbs is granted on a driver's devices. Empty when one
        is.
        """
        why = ""
        for verb in verbs:
            try:
                self.check(user, verb, resource, namespace=namespace, name=name, part="driver")
            except ApiError as err:
                why = why or str(err)
            else:
                return ""
        return why

    def used(self, user: str) -> frozenset[Right]:
        """The rights that a user requested, granted or not."""
        return frozenset(self._used.get(user, ()))

    def unused(self, user: str) -> frozenset[Right]:
        """The rights that a user's roles grant and it never requested. `*` is reported
        unexpanded.
        """
        granted = {
            Right(verb=verb, group=group, resource=resource, namespace=scope)
            for rule, scope in self._rules(user)
            for verb in rule.get("verbs") or ()
            for group in rule.get("apiGroups") or ()
            for resource in rule.get("resources") or ()
        }
        return frozenset(
            rule
            for rule in granted
            if not any(
                (used.verb, used.group, used.resource) == (rule.verb, rule.group, rule.resource)
                and rule.namespace in ("", used.namespace)
                for used in self._used.get(user, ())
            )
        )

    def _rules(self, user: str) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each rule that binds a user, with the namespace in which it does. Empty:
        everywhere.
        """
        cluster_roles = {
            cluster_role["metadata"]["name"]: cluster_role for cluster_role in self._objects("ClusterRole")
        }
        roles = {(role["metadata"]["namespace"], role["metadata"]["name"]): role for role in self._objects("Role")}
        for kind in ("ClusterRoleBinding", "RoleBinding"):
            for binding in self._objects(kind):
                scope = binding["metadata"].get("namespace", "")
                if not any(_is_user(subject, user, scope) for subject in binding.get("subjects") or ()):
                    continue
                reference = binding.get("roleRef") or {}
                granted_role = (
                    roles.get((scope, reference["name"]))
                    if reference.get("kind") == "Role"
                    else cluster_roles.get(reference["name"])
                )
                for rule in (granted_role or {}).get("rules") or ():
                    yield rule, scope


def node_of_allocation(allocation: Mapping[str, Any]) -> str:
    """Name the one node of an allocation. Empty when it is not written for one node."""
    terms = (allocation.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    fields = [field for term in terms for field in term.get("matchFields") or []]
    is_single = len(terms) == len(fields) == 1 and not terms[0].get("matchExpressions")
    if not is_single or (fields[0].get("key"), fields[0].get("operator")) != ("metadata.name", "In"):
        return ""
    values = fields[0].get("values") or []
    return str(values[0]) if len(values) == 1 else ""


def _changed_drivers(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[str]:
    """List the drivers whose entries were added, removed or changed."""
    old, new = ({_device_of(device): device for device in devices} for devices in (before, after))
    return sorted({key[0] for key in old.keys() | new.keys() if old.get(key) != new.get(key)})


def _device_of(device: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return (
        str(device.get("driver")),
        str(device.get("pool")),
        str(device.get("device")),
        str(device.get("shareID") or ""),
    )


def verb_of(method: str, name: str, *, is_watch: bool) -> str:
    """Name the verb of a request, as RBAC does."""
    if method == "GET":
        return "watch" if is_watch else "get" if name else "list"
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


def _grants(rule: Mapping[str, Any], verb: str, group: str, plural: str, name: str) -> bool:
    names = rule.get("resourceNames") or ()
    return (
        _holds(rule.get("verbs"), verb)
        and _holds(rule.get("apiGroups"), group)
        and (_holds(rule.get("resources"), plural) or f"*/{plural.partition('/')[2]}" in (rule.get("resources") or ()))
        and (not names or name in names)
    )


def _holds(granted: list[str] | None, wanted: str) -> bool:
    return granted is not None and (wanted in granted or "*" in granted)


def _is_user(subject: Mapping[str, Any], user: str, scope: str) -> bool:
    match subject.get("kind"):
        case "ServiceAccount":
            return user == f"{_SERVICE_ACCOUNT}{subject.get('namespace', scope)}:{subject.get('name')}"
        case "Group":
            return subject.get("name") == "system:authenticated" or (
                subject.get("name") == "system:serviceaccounts" and user.startswith(_SERVICE_ACCOUNT)
            )
    return subject.get("name") == user
