"""Makes TLS contexts that check a server's certificate: chain, dates, name, and that signers are
authorities.

Python 3.13 began to ask OpenSSL for more (VERIFY_X509_STRICT): the form that RFC 5280 wants of
authorities, such as a key usage. An authority without one may sign anything (RFC 5280, 4.2.1.3),
Go's programs (kubectl, kubelet, nats-server) and earlier Pythons take it, and a cluster's authority
is nobody's to make anew. So it is not asked for: nothing is trusted that was not named.
"""

from __future__ import annotations

import ssl

__all__ = ["as_other_clients", "server_context"]


def as_other_clients(context: ssl.SSLContext) -> ssl.SSLContext:
    """Have a context check what Go's programs check, whatever Python runs.

    Gives the same context.
    """
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def server_context(ca_file: str = "") -> ssl.SSLContext:
    """Make a context for a server whose authority is in a file.

    Without one it is one of the system's.

    Errors: raises OSError for a file that cannot be read or has no certificate.
    """
    return as_other_clients(ssl.create_default_context(cafile=ca_file or None))
