"""`topobus keys secrets`: the passwords of NATS' users, and the server's certificate, as Secrets of
a cluster. deploy/kubernetes runs `make` in a Job.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.cli.commands.key_users import check_overlap, known_user, show_password
from topobus.cli.config import CliSettings
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.kubeconfigs import find_kubeconfig
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.cli.users_file import extra_classes
from topobus.formats.messages.device_classes import has_own_service
from topobus.keys.cluster_certificates import make_certificate, server_names
from topobus.keys.cluster_secrets import forget_previous_passwords, make_users, rotate_users, user_password
from topobus.keys.namespace_objects import NamespaceObjects
from topobus.keys.secret_objects import users_of
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.client import KubernetesClient
from topobus.process.logging import setup_logging

__all__ = ["secrets_app"]

secrets_app = App(
    name="secrets", help="Passwords of NATS' users, and the server's certificate, as Secrets of a Kubernetes cluster."
)

# kubelet reads mounted Secrets once a minute (syncFrequency). Where it does not watch them, its
# copy may be another minute old (configMapAndSecretChangeDetectionStrategy).
_SERVER_AFTER_S = 120.0

Namespace = Annotated[str, Parameter(help="Where Topobus runs: topobus, in deploy/kubernetes.")]
Names = Annotated[
    list[str] | None,
    Parameter(
        name="--name",
        help="A further name or address of the server, beside those that it has in a cluster; as often as needed.",
    ),
]
Kubeconfig = Annotated[
    Path | None,
    Parameter(name="--kubeconfig", help="Default: $KUBECONFIG, ~/.kube/config, else the pod's service account."),
]


@secrets_app.command(name="make")
async def make(
    namespace: Namespace,
    *,
    names: Names = None,
    has_leaves: Annotated[
        bool,
        Parameter(
            name="--leaves",
            help="Nodes have servers of their own (deploy/kubernetes-leaf): users of the hub and of the nodes.",
        ),
    ] = False,
    classes: Annotated[
        list[str] | None,
        Parameter(
            name="--class",
            help="A device class of your own, which topobus-device serves: it gets a user, and keeps it.",
        ),
    ] = None,
    has_tls: Annotated[
        bool, Parameter(name="--tls", negative="--no-tls", help="Whether the server also gets a certificate.")
    ] = True,
    kubeconfig: Kubeconfig = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Make the missing Secrets, and the server's from them. Existing ones stay.

    A certificate of ours is renewed when a third of its life is left.
    """
    own_classes = extra_classes(classes or ())

    async def work(objects: NamespaceObjects) -> None:
        await make_users(objects, has_leaves=has_leaves, classes=own_classes)
        if has_tls:
            await make_certificate(objects, (*server_names(namespace), *(names or ())), now=datetime.now(UTC))

    return await _change(kubeconfig, namespace, options, work)


@secrets_app.command(name="renew")
async def renew(
    namespace: Namespace,
    *,
    names: Names = None,
    kubeconfig: Kubeconfig = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Renew the server's certificate by the same authority, so that clients need no change."""
    hosts = (*server_names(namespace), *(names or ()))
    renewal = partial(make_certificate, names=hosts, now=datetime.now(UTC), is_renewal=True)
    return await _change(kubeconfig, namespace, options, renewal)


@secrets_app.command(name="rotate")
async def rotate(
    namespace: Namespace,
    users: Annotated[list[str] | None, Parameter(help="Whose passwords. Default: everybody's.")] = None,
    *,
    kubeconfig: Kubeconfig = None,
    is_overlapping: Annotated[
        bool,
        Parameter(
            name="--overlap",
            help="Keep the previous passwords valid until `topobus keys secrets forget`: services change over by "
            "themselves, and none of their requests fails. "
            "Not for `user`, `verdicts` and nodes' servers.",
        ),
    ] = False,
    server_after_s: Annotated[
        float | None,
        Parameter(
            name="--server-after",
            help="Seconds after which the server's Secret is written: by then pods have their new passwords. Default: "
            f"{_SERVER_AFTER_S:g}, with --overlap 0.",
        ),
    ] = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Replace passwords by new ones: first those of the users, then the server's file of them."""
    changed = [
        known_user(user, users_of(has_leaves=True, classes=tuple(filter(has_own_service, users or ()))))
        for user in users or ()
    ]
    check_overlap(changed, is_overlapping=is_overlapping)
    if server_after_s is None:
        # Both passwords are valid: a client with the new one continues with the old one until the
        # server has the new one.
        server_after_s = 0.0 if is_overlapping else _SERVER_AFTER_S
    if not 0 <= server_after_s <= 3600:
        raise UsageError(f"--server-after: got {server_after_s:g}, wanted 0 to 3600 seconds")
    rotation = partial(rotate_users, principals=changed, server_after_s=server_after_s, is_overlapping=is_overlapping)
    return await _change(kubeconfig, namespace, options, rotation)


@secrets_app.command(name="forget")
async def forget(
    namespace: Namespace, *, kubeconfig: Kubeconfig = None, options: OutputOptions = OUTPUT_DEFAULTS
) -> int:
    """Make passwords from before a `rotate --overlap` invalid.

    Wait two minutes after the rotation, so that pods have the newer ones. A client that still uses
    an old one is disconnected.
    """
    return await _change(kubeconfig, namespace, options, forget_previous_passwords)


@secrets_app.command(name="show")
async def show(
    namespace: Namespace,
    user: Annotated[str, Parameter(help="Whose password.")],
    *,
    kubeconfig: Kubeconfig = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Print the password of a user, for a file or a URL."""
    principal = known_user(user, users_of(has_leaves=True, classes=[user] if has_own_service(user) else []))
    async with _opened(kubeconfig, namespace) as objects:
        password = await user_password(objects, principal)
    show_password(options, principal, password)
    return ExitCode.OK


@asynccontextmanager
async def _opened(kubeconfig: Path | None, namespace: str) -> AsyncIterator[NamespaceObjects]:
    setup_logging(CliSettings().log, service="cli")
    client = KubernetesClient.open(
        AccessSettings(
            kubeconfig=str(find_kubeconfig(kubeconfig) or ""),
            setting="topobus keys",
            next_step="give --kubeconfig a file that leads to the cluster",
            runs_programs=True,
        )
    )
    try:
        yield NamespaceObjects(client, namespace)
    finally:
        await client.close()


async def _change(
    kubeconfig: Path | None,
    namespace: str,
    options: OutputOptions,
    change: Callable[[NamespaceObjects], Awaitable[object]],
) -> int:
    """Make a change, and print which objects it wrote."""
    async with _opened(kubeconfig, namespace) as objects:
        await change(objects)
    written, output = objects.written, options.output()
    output.document({"namespace": namespace, "written": written})
    output.show(Text(f"{namespace}: {', '.join(written) if written else 'nothing to do'}"))
    return ExitCode.OK
