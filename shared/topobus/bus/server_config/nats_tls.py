"""Renders the TLS parts of a NATS server's configuration, for a folder with `tls.crt`, `tls.key`
and `ca.crt`: as `topobus keys certify` or cert-manager fills it.

The folder's path is the one that the server sees. Clients and leaves are accepted without a
certificate, because their users identify them. Members of a cluster show each other theirs, because
a server takes no route by TLS otherwise. The server reads the files again at SIGHUP.
"""

from __future__ import annotations

__all__ = ["remote_tls", "route_tls", "server_tls"]

# When a thousand leaves reconnect at once, a server needs longer for a handshake than its default,
# 2 s.
_HANDSHAKE = "timeout: 5"


def server_tls(folder: str) -> str:
    """Render the block for a listener: clients or leaves check the server, and it asks them for no
    certificate.

    >>> server_tls("/etc/topobus/nats-tls")
    'tls { cert_file: "/etc/topobus/nats-tls/tls.crt", key_file: "/etc/topobus/nats-tls/tls.key", timeout: 5 }'
    """
    return f'tls {{ cert_file: "{folder}/tls.crt", key_file: "{folder}/tls.key", {_HANDSHAKE} }}'


def remote_tls(folder: str) -> str:
    """Give the block for a leaf's remote: which authorities may have signed the hub's certificate.

    A hub without TLS is then sent nothing.

    >>> remote_tls("/etc/topobus/nats-tls")
    'tls { ca_file: "/etc/topobus/nats-tls/ca.crt", timeout: 5 }'
    """
    return f'tls {{ ca_file: "{folder}/ca.crt", {_HANDSHAKE} }}'


def route_tls(folder: str) -> str:
    """Give the block for a cluster's routes: each member checks the other's certificate.

    >>> route_tls("/tls")
    'tls { cert_file: "/tls/tls.crt", key_file: "/tls/tls.key", ca_file: "/tls/ca.crt", timeout: 5 }'
    """
    return (
        f'tls {{ cert_file: "{folder}/tls.crt", key_file: "{folder}/tls.key", ca_file: "{folder}/ca.crt", '
        f"{_HANDSHAKE} }}"
    )
