"""What an engine's HTTP endpoint says of itself, for the doctor."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from kvhash._errors import UsageError

from .doctor import HttpProbe

__all__ = ["probe_http"]

_LIMIT = 4 * 1024 * 1024


def probe_http(base: str, timeout: float = 3.0) -> HttpProbe:
    """Ask ``/health``, ``/version``, ``/v1/models`` and ``/metrics`` under `base`; never raises for what it finds.

    Raises UsageError when `base` is no http or https address.
    """
    if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).netloc:
        raise UsageError(
            f"{base!r} is no address; expected one such as http://127.0.0.1:8000", code="invalid-address"
        )
    base = base.rstrip("/")

    def get(path: str) -> str | None:
        try:
            with urllib.request.urlopen(base + path, timeout=timeout) as answer:
                body: bytes = answer.read(_LIMIT)
                return body.decode("utf-8", "replace")
        except urllib.error.HTTPError:
            return None

    try:
        healthy = get("/health") is not None
    except (OSError, ValueError) as error:
        return HttpProbe(False, f"{base} does not answer: {getattr(error, 'reason', error)}")
    try:
        version = _json_field(get("/version"), "version")
        listed = json.loads(get("/v1/models") or "{}")
        data = listed.get("data") if isinstance(listed, dict) else None
        models = tuple(str(model.get("id")) for model in data or () if isinstance(model, dict))
        metrics = get("/metrics") or ""
    except (OSError, ValueError):
        return HttpProbe(healthy, f"{base} answers in part only")
    return HttpProbe(
        healthy,
        "" if healthy else f"{base}/health says that the engine is not healthy",
        version if isinstance(version, str) else None,
        models,
        _metric(metrics, "prefix_cache_queries"),
        _metric(metrics, "prefix_cache_hits"),
    )


def _json_field(text: str | None, name: str) -> object:
    value = json.loads(text) if text else None
    return value.get(name) if isinstance(value, dict) else None


def _metric(text: str, name: str) -> float | None:
    found = re.findall(rf"^vllm:{name}(?:_total)?(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)
    return sum(map(float, found)) if found else None
