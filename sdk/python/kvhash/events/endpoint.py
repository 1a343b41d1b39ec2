"""Endpoints of publishers: vLLM's rules for ranks, binding and connecting, and what a subscriber may connect to."""

from __future__ import annotations

import ipaddress
import os
import re

import zmq

from kvhash._errors import UsageError

__all__ = ["EndpointError", "binds", "check_connectable", "is_loopback", "offset_endpoint", "parse_ranks"]

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^:\[\]]*):(?P<port>\d{1,5}|\*)")


class EndpointError(UsageError):
    """An endpoint cannot be used."""

    code = "invalid-endpoint"


def _split_tcp(endpoint: str) -> tuple[str, int]:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise EndpointError(
            f"{endpoint!r} is no endpoint; expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"
        )
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > 65535:
        raise EndpointError(f"{endpoint!r}: a port is at most 65535")
    return match["host"], port


def offset_endpoint(endpoint: str, rank: int, *, port_zero_from_os: bool = True) -> str:
    """Return the endpoint of a data parallel rank: the port plus the rank, or ``_dp<rank>`` behind an inproc name.

    Rank 0 keeps the endpoint. `port_zero_from_os`: leave port 0 to the operating system (vLLM 0.33; before, the rank
    is added to it too). vLLM has no rule for ipc and ranks above 0: EndpointError. Source: vLLM 0.33.0.
    """
    if rank < 0:
        raise EndpointError(f"a rank is at least 0, got {rank}")
    if endpoint.startswith("tcp://"):
        host, port = _split_tcp(endpoint)
        if rank == 0 or (port == 0 and port_zero_from_os):
            return endpoint
        if port + rank > 65535:
            raise EndpointError(f"{endpoint!r} has no port for rank {rank}")
        return f"tcp://{host}:{port + rank}"
    if endpoint.startswith("inproc://"):
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        if rank:
            raise EndpointError(
                f"{endpoint!r}: vLLM has ranks on tcp and inproc endpoints only; name each rank's own"
            )
        return endpoint
    raise EndpointError(f"{endpoint!r} is no endpoint; expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")


def binds(endpoint: str) -> bool:
    """Return whether a publisher binds to this endpoint (a wildcard, ipc, inproc) or connects to it (any other)."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def check_connectable(endpoint: str) -> str:
    """Return `endpoint` if a subscriber can connect to it.

    Raises EndpointError for a wildcard host, port 0, or a path that is longer than this system's Unix sockets take.
    """
    if not endpoint.startswith("tcp://"):
        path = endpoint.removeprefix("ipc://")
        if path != endpoint and len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            raise EndpointError(
                f"expected a path of at most {zmq.IPC_PATH_MAX_LEN} bytes after ipc://, got {path!r:.60}..."
            )
        return offset_endpoint(endpoint, 0)
    host, port = _split_tcp(endpoint)
    if _is_wildcard(host):
        raise EndpointError(
            f"{endpoint!r}: {host or 'no host'} is where a publisher listens, not an address to connect to; "
            "give the engine's host, for example tcp://127.0.0.1:5557"
        )
    if port == 0:
        raise EndpointError(f"{endpoint!r}: port 0 stands for any port; give the one that the engine chose")
    return endpoint


def _is_wildcard(host: str) -> bool:
    if host.strip("0.") == "" or host == "*":
        return True  # no host, and the short forms of 0.0.0.0
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_loopback(endpoint: str) -> bool:
    """Return whether traffic to the endpoint stays on this machine."""
    if not endpoint.startswith("tcp://"):
        return True
    host, _ = _split_tcp(endpoint)
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read ranks such as ``0-7`` or ``0,2,5-6``; raises EndpointError."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise EndpointError(
                f"{text!r} is no list of ranks; expected one such as 0-7 or 0,2,4", code="invalid-ranks"
            )
        ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(ranks))
