"""Settings of the console, and which of them cannot work together."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from topobus.process.config import ServiceSettings
from topobus.values.errors import ConfigError
from topobus.values.names import is_loopback

__all__ = ["ClusterSettings", "ConsoleSettings", "PageSettings", "check_settings"]

Port = Annotated[int, Meta(ge=0, le=65535)]


class PageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where browsers find the page, and who may see it."""

    host: str = "127.0.0.1"
    """The address to listen at. With the default only users of this machine can connect. Any other
    address needs `page.password_file`."""
    port: Port = 8765
    """The port to listen at. 0: a free one, which the log names."""
    hosts: tuple[str, ...] = ()
    """Names and addresses by which browsers reach the page, besides `host` and the names of
    loopback: `("console.example",)`. A request for any other name is refused, for another site's
    page could resolve its own name to this address (DNS rebinding)."""
    password_file: str = ""
    """A file that holds the password for the page, at least 12 characters. Empty: no login. It is
    read again at each login."""
    has_link: bool = False
    """Whether the page has a secret address instead of a login. The address is printed at the
    start, new each time, and a browser that opens it gets a session. `topobus console` sets it, for
    every user of a machine reaches its loopback interface."""
    attempts: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Wrong passwords within a minute from one address, after which that address waits for the rest
    of it. All addresses together may have twenty times as many."""
    certificate_file: str = ""
    """The page's certificate with its chain, PEM. Empty: plain HTTP, for loopback or behind a proxy
    that has TLS."""
    key_file: str = ""
    """The certificate's private key, PEM."""
    is_behind_tls: bool = False
    """Whether a proxy in front has TLS: then the cookie is sent over TLS alone."""
    streams: Annotated[int, Meta(ge=1, le=10_000)] = 64
    """Pages that may be open at once. One more takes the place of the oldest page of the address
    that has the most, if that page has been open for ten seconds. Otherwise it must try again
    later. 64: each takes a connection and some 100 KiB, and what is shown is stored once for
    all."""


class ClusterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster's API server, where claims and pods are when the controller's home is a cluster.

    It is only read.
    """

    mode: Literal["off", "in-cluster", "kubeconfig"] = "off"
    """Which cluster: none, the one of our pod (by its service account), or that of a kubeconfig
    file. Its user needs to list and watch claims and pods, and no more."""
    kubeconfig: str = ""
    """Path of the file, with mode `kubeconfig`."""
    context: str = ""
    """Context of the file. Empty: its current one."""
    call_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """How long one call may take, in seconds."""
    retry_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """First pause after a call that failed, in seconds. It doubles up to ten."""
    page: Annotated[int, Meta(ge=1, le=10_000)] = 500
    """Objects in one page of a list: no more of them are in memory in the server's form. kubectl
    asks for 500."""
    resync_s: Annotated[float, Meta(ge=1)] = 600.0
    """How often a copy is compared with a whole list, in seconds. Changes arrive by watches. The
    list repairs what a watch may have lost."""


class ConsoleSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the console. `http.*` is for probes and metrics, `page.*` for people."""

    page: PageSettings = PageSettings()
    cluster: ClusterSettings = ClusterSettings()
    decisions: Annotated[int, Meta(ge=1, le=10_000)] = 200
    """How many of the newest decisions the page lists, with all that is shown of each. Together
    they have at most 16 MiB."""
    events: Annotated[int, Meta(ge=1, le=10_000)] = 200
    """How many of the newest health events the page lists."""


def check_settings(settings: ConsoleSettings) -> None:
    """Refuse settings that would open the page to all users, or cannot work.

    Errors: raises ConfigError that names the key.
    """
    page = settings.page
    if not is_loopback(page.host) and not page.password_file:
        raise ConfigError(
            f"page.host: {page.host} is not an address of loopback, and without a login whoever reaches it "
            "sees everything",
            next_step="name a file with a password by page.password_file, or leave page.host at 127.0.0.1",
            key="page.host",
        )
    if page.has_link and page.password_file:
        raise ConfigError(
            "page.has_link and page.password_file are two ways in, and both are given",
            next_step="leave one of them out",
            key="page.has_link",
        )
    if bool(page.certificate_file) != bool(page.key_file):
        raise ConfigError(
            "page.certificate_file and page.key_file go together, and only one of them is given",
            next_step="give both, or neither",
            key="page.key_file" if page.certificate_file else "page.certificate_file",
        )
    if (settings.cluster.mode == "kubeconfig") != bool(settings.cluster.kubeconfig):
        raise ConfigError(
            f"console: cluster: mode {settings.cluster.mode!r} and kubeconfig {settings.cluster.kubeconfig!r} "
            "do not go together",
            next_step="set both TOPOBUS_CONSOLE__CLUSTER__MODE=kubeconfig and TOPOBUS_CONSOLE__CLUSTER__KUBECONFIG, or "
            "neither",
            key="cluster",
        )
    if settings.http.port and settings.http.port == page.port:
        raise ConfigError(
            f"page.port: got {page.port}, which http.port has as well",
            next_step="choose another port for one of them",
            key="page.port",
        )
