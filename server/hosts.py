"""Names and addresses of this machine, as users and containers spell them."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

# Of loopback in Linux's hosts files, and of this machine in its containers and virtual machines. No public DNS name
# ends in `.internal` (reserved by ICANN).
_USUAL_NAMES = (
    *("localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"),
    *("host.docker.internal", "gateway.docker.internal", "host.containers.internal", "host.orb.internal"),
    *("host.lima.internal", "host.minikube.internal"),
)
# Short, octal and hexadecimal spellings, such as 127.1. Browsers never look them up as names.
_NUMERIC = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]+|[0-9]+)){0,3}", re.ASCII)
_LONGEST_NUMERIC = 64

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_loopback(host: str) -> bool:
    """Whether `host` always means this machine, and a server that listens on it serves this machine only."""
    name = _normal(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def is_local(host: str) -> bool:
    """Whether a URL with `host` always leads to this machine: loopback, or an unspecified address such as 0.0.0.0."""
    address = _address(_normal(host))
    return is_loopback(host) or (address is not None and address.is_unspecified)


def is_address(host: str) -> bool:
    return _address(_normal(host)) is not None


def own_names(listens_on: str) -> frozenset[str]:
    """Return the machine's names for users and containers, and the host that the server listens on."""
    name = _normal(socket.gethostname())
    short = name.partition(".")[0]
    return frozenset(filter(None, (name, short, short and f"{short}.local", _normal(listens_on), *_USUAL_NAMES)))


def host_of(authority: str) -> str:
    """Return the host in `host:port`, in lower case without a final dot; empty if invalid."""
    try:
        return _normal(urlsplit(f"//{authority}").hostname or "")
    except ValueError:
        return ""


def _normal(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _address(name: str) -> Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return _numeric_address(name)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _numeric_address(name: str) -> Address | None:
    if len(name) > _LONGEST_NUMERIC or _NUMERIC.fullmatch(name) is None:
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(name))
    except OSError:
        return None
