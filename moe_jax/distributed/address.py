"""Network addresses on command lines. Imports no jax."""

import ipaddress
import re

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_LONGEST_LABEL = 63  # characters between two dots of a name
_NUMBERS = re.compile(r"[0-9.]+")


def split_address(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT, with an IPv6 host in brackets, into host and port; None if it is something else."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        return None
    bare = host[1:-1]
    if host == f"[{bare}]" and _is_ip(bare, ipaddress.IPv6Address):
        return bare, int(port)
    if _is_ip(host, ipaddress.IPv4Address) if _NUMBERS.fullmatch(host) else _is_name(host):
        return host, int(port)
    return None


def join_address(host: str, port: int) -> str:
    """Join host and port to a text that `split_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_name(text: str) -> bool:
    """Whether a text may name a host; a last dot is that of the root."""
    labels = text.removesuffix(".").split(".")
    return bool(_NAME.fullmatch(text)) and all(0 < len(label) <= _LONGEST_LABEL for label in labels)


def _is_ip(text: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
