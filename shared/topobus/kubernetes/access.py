"""Read how the API server is reached and as which user: from a kubeconfig, or from the service
account of the pod.

Tokens, certificates and authorities are replaced while the process runs, so `Access` reports
whether the files behind it have changed. A part of the configuration that is not supported is
refused by name. Ignoring it would look like a server that is down, or would act as another user.
Source: client-go tools/clientcmd/api/v1 (kubeconfig), transport (impersonation headers).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx2
import yaml
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError
from msgspec import Struct

from topobus.bus.login.tls_trust import as_other_clients
from topobus.values.errors import ConfigError

__all__ = ["SERVICE_ACCOUNT", "Access", "AccessSettings", "KubeConfigError"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Kubeconfig keys that are not supported, each with what to use instead.
_UNSUPPORTED = {
    "user": {"auth-provider": "has an auth-provider"},
    "cluster": {"proxy-url": "has a proxy-url (set HTTPS_PROXY instead)"},
}
_PROGRAM = {"exec": "runs a program for its credentials (exec)"}
_AS_PARTS = ("as-uid", "as-groups", "as-user-extra")


class AccessSettings(Struct, frozen=True, kw_only=True):
    """Where the API server is, as given by a service's own settings."""

    kubeconfig: str = ""
    """Path of a kubeconfig. Empty: the service account of the pod."""
    context: str = ""
    """Context of the kubeconfig. Empty: its current context."""
    call_s: float = 10.0
    """How long one call may take, in seconds."""
    setting: str
    """The service and the setting that errors name: `gateway: cluster`."""
    next_step: str
    """What an operator does about a configuration that cannot be used."""
    runs_programs: bool = False
    """Whether a user entry may name a program that prints its token (exec). A person's
    kubeconfig may do so, but a daemon on a node must not run a program."""


class Access:
    """One configuration as it was read, and the HTTP client made from it."""

    def __init__(self, client: httpx2.AsyncClient, server: str, files: tuple[Path, ...], server_name: str = "") -> None:
        self.client = client
        self.server = server
        self.extensions: dict[str, str] = {"sni_hostname": server_name} if server_name else {}
        """Added to every request: the name that the server's certificate must have when it
        differs from the name in the address (tls-server-name)."""
        self._files = files
        self._state = _state_of(files)

    @classmethod
    def read(cls, settings: AccessSettings) -> Access:
        """Read the configuration without sending a request.

        Errors: raises ConfigError when the settings name no configuration or one that cannot be
        used.
        """
        try:
            config, files, user, cluster = _load(settings)
            headers, server_name = _impersonation(user, str(config.context.user)), _server_name(cluster)
            is_local = urlsplit(config.cluster.server).hostname in _LOOPBACK
            # Use the environment's proxy, as other Kubernetes clients do, but never to reach this
            # machine itself.
            params = ConnectionParams(timeout=httpx2.Timeout(settings.call_s), trust_env=not is_local)
            made = params.httpx_params(config)
            as_other_clients(made["verify"])
            client = httpx2.AsyncClient(**made)
            client.headers = httpx2.Headers([*client.headers.multi_items(), *headers])
            return cls(client, config.cluster.server, files, server_name)
        except (KubeConfigError, OSError, AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as err:
            # The library reads the file's entries without checking their types.
            where = settings.kubeconfig or f"the pod's service account ({SERVICE_ACCOUNT})"
            said = f"it has no {err}" if isinstance(err, KeyError) else str(err)
            raise ConfigError(f"{settings.setting}: cannot use {where}: {said}", next_step=settings.next_step) from err

    def url(self, path: str, params: Mapping[str, str] | None = None) -> httpx2.URL:
        """Build the full address of a request.

        The client would build it from the same parts and parse each of them again (base, path,
        parameters), which takes a sixth of the processor time of a small request.
        """
        # The base ends with a slash and the path begins with one.
        address = str(self.client.base_url).rstrip("/") + path
        return httpx2.URL(f"{address}?{urlencode(params)}" if params else address)

    @property
    def is_outdated(self) -> bool:
        """Return whether one of the files has been replaced since they were read."""
        return _state_of(self._files) != self._state


def _load(settings: AccessSettings) -> tuple[SingleConfig, tuple[Path, ...], Mapping[str, Any], Mapping[str, Any]]:
    """Read the files.

    Also returns the user's and the cluster's raw entries, because the library drops some of their
    keys.
    """
    user: Mapping[str, Any] = {}
    cluster: Mapping[str, Any] = {}
    if not settings.kubeconfig:
        missing = [name for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT") if not os.environ.get(name)]
        if missing:
            raise KubeConfigError(f"{' and '.join(missing)} not set: this process runs in no pod")
        chosen = KubeConfig.from_service_account(SERVICE_ACCOUNT).get()
        files: tuple[Path, ...] = (SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt")
    else:
        path = Path(settings.kubeconfig).expanduser()
        chosen = KubeConfig.from_file(path).get(settings.context or None)
        files = (path,)
    if chosen is None or chosen.user is None:
        raise KubeConfigError("it names no user")
    if settings.kubeconfig:
        plain = yaml.safe_load(files[0].read_text(encoding="utf-8"))
        user, cluster = _entry(plain, "user", chosen.context.user), _entry(plain, "cluster", chosen.context.cluster)
        _check_supported(
            "user", str(chosen.context.user), user, _UNSUPPORTED["user"] | ({} if settings.runs_programs else _PROGRAM)
        )
        _check_supported("cluster", chosen.context.cluster, cluster, _UNSUPPORTED["cluster"])
    named = (chosen.cluster.certificate_auth, chosen.user.client_cert, chosen.user.client_key, chosen.user.token_file)
    return (
        chosen,
        tuple(dict.fromkeys((*files, *(Path(chosen.abs_file(name)) for name in named if name)))),
        user,
        cluster,
    )


def _entry(plain: Mapping[str, Any], what: str, name: str | None) -> Mapping[str, Any]:
    entries = [entry.get(what) or {} for entry in plain.get(f"{what}s") or () if entry.get("name") == name]
    return entries[0] if entries else {}


def _check_supported(what: str, name: str, entry: Mapping[str, Any], unsupported: Mapping[str, str]) -> None:
    for key, why in unsupported.items():
        if entry.get(key):
            wanted = (
                "a token, a tokenFile or a client certificate"
                if what == "user"
                else "a server that its own address leads to"
            )
            raise KubeConfigError(f"{what} {name!r} {why}, which is not done here; wanted {wanted}")


def _impersonation(user: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """Return the headers of a user entry that impersonates another user.

    Errors: raises KubeConfigError for groups, a uid or extras without a user, and for a value that
    is not text. Without them the request would be made as the caller itself.
    """
    who, uid, groups, extra = (user.get(part) for part in ("as", *_AS_PARTS))
    if not who:
        present = [part for part in _AS_PARTS if user.get(part)]
        if present:
            raise KubeConfigError(f"user {name!r} has {', '.join(present)} and no `as`: wanted the user as whom to act")
        return []
    groups, extra = groups or [], extra or {}
    if (
        not isinstance(groups, list)
        or not isinstance(extra, dict)
        or not all(isinstance(values, list) for values in extra.values())
    ):
        raise KubeConfigError(
            f"user {name!r}: as-groups: wanted a list of names, as-user-extra: wanted lists of texts by name"
        )
    headers = [("Impersonate-User", who), *(("Impersonate-Group", group) for group in groups)]
    headers += [("Impersonate-Uid", uid)] if uid else []
    # Characters that a header name cannot hold are percent-encoded.
    headers += [
        (f"Impersonate-Extra-{quote(str(key).lower(), safe='')}", value)
        for key, values in extra.items()
        for value in values
    ]
    if not all(isinstance(value, str) and value.isprintable() for _, value in headers):
        raise KubeConfigError(f"user {name!r}: as: wanted names and texts without control characters")
    return headers


def _server_name(cluster: Mapping[str, Any]) -> str:
    name = cluster.get("tls-server-name") or ""
    if not isinstance(name, str):
        raise KubeConfigError(f"tls-server-name: got {name!r}, wanted a host name")
    return name


def _state_of(files: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    stamps: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            # stat() follows links, because a mounted Secret is replaced by changing a link.
            state = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((state.st_ino, state.st_mtime_ns, state.st_size))
    return tuple(stamps)
