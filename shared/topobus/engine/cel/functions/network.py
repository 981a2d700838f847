"""Functions for IP addresses, networks and URLs.

An address is IPv4 or IPv6 without a zone. IPv4 within IPv6 is refused. Source:
k8s.io/apiserver/pkg/cel/library (ip.go, cidr.go, urls.go), 1.36; Go's net/netip and net/url.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import quote, unquote, unquote_plus, unquote_to_bytes

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.registry import Library, overload
from topobus.engine.cel.values import Address, Network, WebAddress

__all__ = ["NETWORK", "problem_of_url"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_PORT = re.compile(r"(?::[0-9]*)?")
# Characters that Go's net/url does not accept in a host, and an escaped ASCII character other than
# the percent sign (RFC 6874).
_BAD_HOST = re.compile(r"[ #?\[\\^`{|}]|%(?!25|[89a-fA-F][0-9a-fA-F])")
_BAD_USER = re.compile(r"[^A-Za-z0-9\-._~!$&'()*+,;=%:@]|%(?![0-9a-fA-F]{2})")
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _read_address(text: str) -> Address:
    try:
        ip_address = ipaddress.ip_address(text)
    except ValueError as err:
        raise EvaluationError(f"IP Address {text[:64]!r} parse error during conversion from string: {err}") from err
    if isinstance(ip_address, ipaddress.IPv6Address):
        if ip_address.ipv4_mapped is not None:
            raise EvaluationError(f"IPv4-mapped IPv6 address {text!r} is not allowed")
        if ip_address.scope_id is not None or "%" in text:
            raise EvaluationError(f"IP address {text!r} with zone value is not allowed")
    return ip_address


def _read_network(text: str) -> Network:
    address, slash, length = text.partition("/")
    where = f"network address parse error during conversion from string: {text[:64]!r}"
    if not slash or not re.fullmatch(r"0|[1-9]\d{0,2}", length, re.ASCII):
        raise EvaluationError(f"{where} has no prefix length")
    try:
        parsed = _read_address(address)
    except EvaluationError as err:
        raise EvaluationError(f"{where}: {err}") from err
    if int(length) > parsed.max_prefixlen:
        raise EvaluationError(f"{where}: prefix length out of range")
    return Network(parsed, int(length))


def _masked(network: Network) -> Network:
    whole = ipaddress.ip_network((network.address, network.length), strict=False)
    return Network(whole.network_address, network.length)


def _contains_address(network: Network, other: Address) -> bool:
    return other.version == network.address.version and _masked(Network(other, network.length)) == _masked(network)


def _contains_network(first: Network, second: Network) -> bool:
    if first.address.version != second.address.version:
        return False
    return _masked(first) == _masked(Network(second.address, first.length)) and first.length <= second.length


def _is(read: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            read(text)
        except EvaluationError:
            return False
        return True

    return check


def _is_canonical(text: str) -> bool:
    return str(_read_address(text)) == text


def _is_global_unicast(address: Address) -> bool:
    """Say, as Go does, whether an address is neither unspecified, loopback, multicast, link-local
    nor the broadcast address.

    Private ones count as global.
    """
    is_broadcast = address == ipaddress.IPv4Address("255.255.255.255")
    return not (
        address.is_unspecified or address.is_loopback or address.is_multicast or _is_link_local(address) or is_broadcast
    )


def _is_link_local(address: Address) -> bool:
    return address in ipaddress.ip_network("169.254.0.0/16" if address.version == 4 else "fe80::/10")


def _is_link_local_multicast(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return address in ipaddress.ip_network("224.0.0.0/24")
    return address.packed[0] == 0xFF and address.packed[1] & 0x0F == 0x02


def _read_url(text: str) -> WebAddress:
    """Read an absolute URL or an absolute path.

    As upstream, the text with its fragment must be one (ParseRequestURI), and it is taken apart
    without the fragment (Parse).
    """
    _parse_url(text, is_request=True)
    return _parse_url(text.partition("#")[0], is_request=False)


def _parse_url(text: str, *, is_request: bool) -> WebAddress:
    where = f"URL parse error during conversion from string: {text[:64]!r}"
    if not text:
        raise EvaluationError(f"{where}: empty url")
    if _CONTROL.search(text):
        raise EvaluationError(f"{where}: invalid control character in URL")
    if text == "*":
        return WebAddress("", "", "*", "", text)
    match = _SCHEME.fullmatch(text)
    scheme, rest = (match[1].lower(), match[2]) if match else ("", text)
    rest, _, query = rest.partition("?")
    if not rest.startswith("/"):
        if scheme:
            return WebAddress(scheme, "", "", query, text)  # opaque, like mailto:x
        raise EvaluationError(f"{where}: invalid URI for request")
    host = ""
    if rest.startswith("//") and (scheme or not (is_request or rest.startswith("///"))):
        authority, slash, path = rest[2:].partition("/")
        host, rest = _read_authority(scheme, authority, where), slash + path
    if _BAD_ESCAPE.search(rest):
        raise EvaluationError(f"{where}: invalid URL escape")
    return WebAddress(scheme, host, rest, query, text)


def _read_authority(scheme: str, authority: str, where: str) -> str:
    """Return the host, with its port."""
    user, _, host = authority.rpartition("@")
    if _BAD_USER.search(user):
        raise EvaluationError(f"{where}: invalid userinfo")
    if host.startswith("["):
        inside, bracket, port = host[1:].partition("]")
        if not bracket or not _PORT.fullmatch(port):
            raise EvaluationError(f"{where}: missing ']' in host or invalid port")
        try:
            ipaddress.IPv6Address(inside.partition("%25")[0])
        except ValueError as err:
            raise EvaluationError(f"{where}: invalid host") from err
    else:
        # As Go: of several colons the last one begins the port, but for a scheme of
        # the web, which may have one only.
        place = host.find(":") if scheme in ("http", "https") else host.rfind(":")
        name, port = (host[:place], host[place:]) if place >= 0 else (host, "")
        if not _PORT.fullmatch(port):
            raise EvaluationError(f"{where}: invalid port {port!r} after host")
        if _BAD_HOST.search(name):
            raise EvaluationError(f"{where}: invalid character in host name")
    return unquote(host)


def problem_of_url(text: str) -> str:
    """Explain why a text is neither an absolute URL nor an absolute path. Empty when it is one."""
    try:
        _parse_url(text, is_request=True)
    except EvaluationError as err:
        return str(err)
    return ""


def _host_name(web_address: WebAddress) -> str:
    host = web_address.host
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _port(web_address: WebAddress) -> str:
    after = web_address.host.rpartition("]")[2] if web_address.host.startswith("[") else web_address.host
    return after.rpartition(":")[2] if ":" in after else ""


def _escaped_path(web_address: WebAddress) -> str:
    return (
        quote(unquote_to_bytes(web_address.path), safe="/$&+,;=:@!'()*-._~")
        if not re.fullmatch(r"[A-Za-z0-9/$&+,;=:@!'()*\-._~\[\]%]*", web_address.path)
        else web_address.path
    )


def _query(web_address: WebAddress) -> dict[object, object]:
    values_by_key: dict[object, list[object]] = {}
    for pair in web_address.query.split("&"):
        # As Go: what has a semicolon or a wrong escape is left out.
        if pair and ";" not in pair and not _BAD_ESCAPE.search(pair):
            key, _, value = map(unquote_plus, pair.partition("="))
            values_by_key.setdefault(key, []).append(value)
    return dict(values_by_key)


NETWORK: Library = (
    overload("ip(string) -> IP", _read_address),
    overload("isIP(string) -> bool", _is(_read_address)),
    overload("ip.isCanonical(string) -> bool", _is_canonical),
    overload("IP.family() -> int", lambda a: a.version),
    overload("IP.isUnspecified() -> bool", lambda a: a.is_unspecified),
    overload("IP.isLoopback() -> bool", lambda a: a.is_loopback),
    overload("IP.isLinkLocalMulticast() -> bool", _is_link_local_multicast),
    overload("IP.isLinkLocalUnicast() -> bool", _is_link_local),
    overload("IP.isGlobalUnicast() -> bool", _is_global_unicast),
    overload("cidr(string) -> CIDR", _read_network),
    overload("isCIDR(string) -> bool", _is(_read_network)),
    overload("CIDR.containsIP(string) -> bool", lambda a, b: _contains_address(a, _read_address(b))),
    overload("CIDR.containsIP(IP) -> bool", _contains_address),
    overload("CIDR.containsCIDR(string) -> bool", lambda a, b: _contains_network(a, _read_network(b))),
    overload("CIDR.containsCIDR(CIDR) -> bool", _contains_network),
    overload("CIDR.ip() -> IP", lambda a: a.address),
    overload("CIDR.masked() -> CIDR", _masked),
    overload("CIDR.prefixLength() -> int", lambda a: a.length),
    overload("url(string) -> URL", _read_url),
    overload("isURL(string) -> bool", lambda a: not problem_of_url(a)),
    overload("URL.getScheme() -> string", lambda a: a.scheme),
    overload("URL.getHost() -> string", lambda a: a.host),
    overload("URL.getHostname() -> string", _host_name),
    overload("URL.getPort() -> string", _port),
    overload("URL.getEscapedPath() -> string", _escaped_path),
    overload("URL.getQuery() -> map<string, list<string>>", _query),
)
