"""Makes TLS contexts that check a server's certificate: chain, dates, name, and that signers are
authorities.

Python 3.13 began to ask OpenSSL for more (VERIFY_X509_STRICT): the form that RFC 5280 wants of
authorities, such as a key usage. An authority without one may sign anything (RFC 5280, 4.2.1.3), Go
programs (kubectl, kubelet, nats-server) and earlier Pythons accept it, and we cannot make a
cluster's authority again. So that form is not required. Still only the named authorities are
trusted.
"""

from __future__ import annotations

import ssl

__all__ = ["as_other_clients", "server_context"]


def as_other_clients(context: ssl.SSLContext) -> ssl.SSLContext:
    """Make a context check what Go programs check, whichever Python runs. Return the
    same context.
    """
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def server_context(ca_file: str = "") -> ssl.SSLContext:
    """Make a context for a server whose authority is in a file.

    Without a file the system's authorities are trusted.

    Errors: raises OSError for a file that cannot be read or has no certificate.
    """
    return as_other_clients(ssl.create_default_context(cafile=ca_file or None))
