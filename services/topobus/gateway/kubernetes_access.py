"""How the API server is reached and who we are there: a kubeconfig, or the service account of our pod.

Flows in: settings. Flows out: an HTTP client, and whether the files behind it are others by now: tokens, certificates and authorities are replaced while we
run. What the configuration asks and we cannot do is refused with its name: silently left out, it would look like a server that is down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError

from topobus.domain.errors import ConfigError
from topobus.gateway.config import ClusterSettings

__all__ = ["Access", "KubeConfigError"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What a kubeconfig may say and we do not do, with what to say instead.
_UNSUPPORTED = {
    "user": {
        "exec": "runs a program for its credentials (exec)",
        "auth-provider": "has an auth-provider",
        "as": "acts as somebody else (as)",
    },
    "cluster": {"tls-server-name": "has a tls-server-name", "proxy-url": "has a proxy-url (set HTTPS_PROXY instead)"},
}


class Access:
    """One configuration as it was read, and the client made of it."""

    def __init__(self, client: httpx2.AsyncClient, server: str, files: tuple[Path, ...]) -> None:
        self.client = client
        self.server = server
        self._files = files
        self._state = _state_of(files)

    @classmethod
    def read(cls, settings: ClusterSettings) -> Access:
        """Read the configuration; nothing is asked yet.

        Errors: raises ConfigError when there is none where the settings say, or it cannot be used.
        """
        try:
            config, files = _load(settings)
            is_local = urlsplit(config.cluster.server).hostname in _LOOPBACK
            # As other Kubernetes clients do, take the environment's proxy, but never to reach this very machine.
            params = ConnectionParams(timeout=httpx2.Timeout(settings.call_s), trust_env=not is_local)
            return cls(AsyncClient(config, params), config.cluster.server, files)
        except (KubeConfigError, OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as err:
            where = f"the pod's service account ({SERVICE_ACCOUNT})" if settings.mode == "in-cluster" else settings.kubeconfig
            said = f"it has no {err}" if isinstance(err, KeyError) else str(err)
            raise ConfigError(
                f"gateway: cluster: cannot use {where}: {said}",
                next_step="set TOPOBUS_GATEWAY__CLUSTER__MODE and TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG",
            ) from err

    @property
    def is_outdated(self) -> bool:
        """Say whether one of the files has been replaced since they were read."""
        return _state_of(self._files) != self._state


def _load(settings: ClusterSettings) -> tuple[SingleConfig, tuple[Path, ...]]:
    if settings.mode == "in-cluster":
        missing = [one for one in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT") if not os.environ.get(one)]
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
    if settings.mode != "in-cluster":
        _check_supported(chosen, yaml.safe_load(files[0].read_text(encoding="utf-8")))
    named = (chosen.cluster.certificate_auth, chosen.user.client_cert, chosen.user.client_key, chosen.user.token_file)
    return chosen, tuple(dict.fromkeys((*files, *(Path(chosen.abs_file(one)) for one in named if one))))


def _check_supported(chosen: SingleConfig, plain: Mapping[str, Any]) -> None:
    names = {"cluster": chosen.context.cluster, "user": chosen.context.user}
    for what, unsupported in _UNSUPPORTED.items():
        entries = [one.get(what) or {} for one in plain.get(f"{what}s") or () if one.get("name") == names[what]]
        for entry in entries:
            for key, why in unsupported.items():
                if entry.get(key):
                    wanted = "a token, a tokenFile or a client certificate" if what == "user" else "a server that its own address leads to"
                    raise KubeConfigError(f"{what} {names[what]!r} {why}, which the gateway does not do; wanted {wanted}")


def _state_of(files: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    found: list[tuple[int, int, int] | None] = []
    for one in files:
        try:
            # Through links: a mounted secret is replaced by turning one.
            state = one.stat()
        except OSError:
            found.append(None)
        else:
            found.append((state.st_ino, state.st_mtime_ns, state.st_size))
    return tuple(found)
