"""One request on its way through the router: what came, what goes back, and what is said of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

from .decision import Decision
from .headers import field_bytes
from .router import Survey
from .sse import error_event

__all__ = ["Exchange"]


@dataclass(slots=True)
class Exchange:
    """One request on its way: what came, what goes back, and what is said of it in the log."""

    request_id: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[str, str]]
    body: bytes
    send: Send
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    survey: Survey | None = None
    decision: Decision | None = None
    attempts: list[dict[str, str]] = field(default_factory=list)
    started: bool = False
    streamed: bool = False
    gone: bool = False
    stopped: bool = False
    first_byte_s: float | None = None
    status: int | None = None
    usage: dict[str, Any] | None = None
    outcome: str = "error"
    fault: str | None = None

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Send the status and headers."""
        self.started = True
        self.status = status
        self.first_byte_s = time.monotonic() - self.began
        raw = [(field_bytes(name), field_bytes(value)) for name, value in headers]
        raw.append((b"x-request-id", self.request_id.encode("latin-1", "replace")))  # it came as Latin-1
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, status: int, message: str, kind: str) -> None:
        """Send an error as OpenAI's API gives it."""
        body = json.dumps(
            {"error": {"message": message, "type": kind, "param": None, "code": status}}
        ).encode()
        await self.start(status, [("content-type", "application/json"), ("content-length", str(len(body)))])
        await self.write(body, more=False)

    async def break_off(self, message: str) -> None:
        """End the answer with an error, wherever it is."""
        if not self.started:
            await self.refuse(503, message, "router_stopped")
        elif self.streamed:
            await self.write(error_event(message, code=503, kind="router_stopped"), more=True)
            await self.write(b"", more=False)
