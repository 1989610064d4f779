"""Addresses as command lines give them. Imports no jax."""


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT, an IPv6 host in brackets; None if it is something else."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        return None
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """What `split_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
