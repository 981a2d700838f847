"""Names and ids: which names are legal, and how a name is made from the hardware's own name.

The uids of pods and of claims are NewTypes, because code handles both at once and would not notice
if it mixed them up. A uid whose kind another field names (`Owner.uid`, `metadata.uid`) is a plain
str until code has read that field.
"""

import ipaddress
import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import Annotated, NewType

from msgspec import Meta

__all__ = [
    "ClaimUid",
    "Generation",
    "PodUid",
    "is_dns_label",
    "is_dns_subdomain",
    "is_extended_resource_name",
    "is_loopback",
    "meant_name",
    "next_generation",
    "to_dns_label",
]

PodUid = NewType("PodUid", str)
"""A pod's `metadata.uid`. An API server gives a new one to a pod of the same name."""
ClaimUid = NewType("ClaimUid", str)
"""A ResourceClaim's `metadata.uid`. Kubelet names a claim by it, and claims and pods are looked up
side by side in the gateway."""
Generation = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that grows with each change of something. Up to 2**53 every JSON reader keeps it exactly
(RFC 8259 section 6), and one more is a number still."""
# A thousand changes a second reach it in 34 years, so a higher number is forged.
_HIGHEST_GENERATION = 2**40
# RFC 1123, as Kubernetes applies it: at most 63 characters a label, 253 a name.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# The name part of a qualified name: 63 characters at most.
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?")


def is_dns_label(text: str) -> bool:
    """Say whether `text` is an RFC 1123 label.

    >>> is_dns_label("gpu-0"), is_dns_label("GPU_0"), is_dns_label("")
    (True, False, False)
    """
    return _LABEL.fullmatch(text) is not None


def is_dns_subdomain(text: str) -> bool:
    """Say whether `text` is an RFC 1123 subdomain: labels joined by dots, 253 characters at most.

    >>> is_dns_subdomain("gpu.topobus.dev"), is_dns_subdomain("a..b")
    (True, False)
    """
    return len(text) <= 253 and all(is_dns_label(part) for part in text.split("."))


def is_extended_resource_name(name: str) -> bool:
    """Say whether kubelet takes this as an extended resource's name.

    Rule: a domain prefix that is not Kubernetes' own, and `requests.` + name (the form that quotas
    use) is still a qualified name.
    Source: k8s.io/kubernetes pkg/apis/core/v1/helper IsExtendedResourceName.

    >>> [is_extended_resource_name(name) for name in ("topobus.dev/gpu", "nodomain", "kubernetes.io/x", "a.b/-x")]
    [True, False, False, False]
    """
    prefix, slash, part = name.partition("/")
    if not slash or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    return is_dns_subdomain(f"requests.{prefix}") and len(part) <= 63 and _QUALIFIED.fullmatch(part) is not None


def to_dns_label(text: str) -> str:
    """Make a DNS label of any text: lower case, other characters become one dash, cut at 63.

    Errors: raises ValueError when no letter or digit is left.

    >>> to_dns_label("0000:3B:00.0")
    '0000-3b-00-0'
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-")
    if not label:
        raise ValueError(f"cannot make a DNS label of {text!r}: it has no letter or digit")
    return label


def is_loopback(host: str) -> bool:
    """Say whether a host name or address is this machine's loopback interface.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "nats")]
    [True, True, True, False, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def meant_name(written: str, names: Collection[str]) -> str:
    """Find the known name that a misspelt one means. Empty when none is near.

    Two words of three letters that differ in one letter are different words: a request for an npu
    does not mean a gpu.

    >>> [meant_name(written, ["cpu", "gpu", "nic"]) for written in ("gpus", "GPU", "gup", "npu")]
    ['gpu', 'gpu', 'gpu', '']
    """
    text = written.lower()
    near = get_close_matches(text, names, n=1, cutoff=0.75)
    return near[0] if near else next((name for name in sorted(names) if sorted(name) == sorted(text)), "")


def next_generation(generation: int) -> int:
    """Return the next generation.

    After a number too high to be reached by counting, start again at 1: such a number was forged,
    and its successors would soon leave the legal range.

    >>> next_generation(7), next_generation(2**53)
    (8, 1)
    """
    return generation + 1 if generation < _HIGHEST_GENERATION else 1
