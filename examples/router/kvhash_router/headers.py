"""The header fields that a proxy passes on: not those of one connection, and with the bytes that they came with."""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp

from .bodies import RefusedError

__all__ = ["RANK_HEADER", "field_bytes", "request_fields", "response_fields"]

#: What vLLM reads to choose a data parallel rank.
RANK_HEADER = "x-data-parallel-rank"
#: Hop-by-hop fields, and those that are written anew.
_DROPPED = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


def request_fields(fields: list[tuple[str, str]], request_id: str, rank: int | None) -> list[tuple[str, str]]:
    """Return what an engine is sent of a client's fields (as ASGI gives them, read as Latin-1).

    ``rank``: the data parallel rank to ask for, where the client asks for none. Raises RefusedError for a field that
    cannot be sent on unchanged.
    """
    dropped = {*_DROPPED, *_hop_by_hop(fields), "x-request-id"}
    sent = [(name, _sent(name, value)) for name, value in fields if name not in dropped]
    sent += [("x-request-id", _sent("x-request-id", request_id)), ("accept-encoding", "identity")]
    if rank is not None and not any(name == RANK_HEADER for name, _ in sent):
        sent.append((RANK_HEADER, str(rank)))
    return sent


def response_fields(response: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """Return what a client is sent of an engine's fields."""
    fields = [(name, value) for name, value in response.headers.items()]
    dropped = {*_DROPPED, *_hop_by_hop(fields), "date", "server", "x-request-id"}
    return [(name, value) for name, value in fields if name.lower() not in dropped]


def field_bytes(text: str) -> bytes:
    """Return a field as it came: aiohttp reads UTF-8 with surrogates for other bytes; ASGI's own are Latin-1."""
    return text.encode("utf-8", "surrogateescape")


def _hop_by_hop(fields: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names that a message's own Connection fields give: they are of this connection, as that one is."""
    named = (value for name, value in fields if name.lower() == "connection")
    return {name.strip().lower() for value in named for name in value.split(",")}


def _sent(name: str, value: str) -> str:
    """Return a client's field, read as Latin-1, as aiohttp sends it unchanged: it writes UTF-8, and nothing else."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedError(400, f"the header {name:.100} has bytes that are not UTF-8") from None
