"""How a request's tokens are chosen, and when its text ends: values and rules that need no model.

A draw depends on nothing but the request's seed and the token's position, so the same seed gives the same tokens in
any batch, after a preemption, and with or without drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvhash._errors import InvalidRequestError

__all__ = ["GREEDY", "SamplingParams", "TextStream", "TokenLogprobs", "draw_uniform"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check(good: bool, name: str, expected: str, value: object) -> None:
    if not good:
        raise InvalidRequestError(f"expected {expected}, got {value!r}", at=f"$.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """vLLM's sampling parameters under vLLM's names and defaults.

    ``temperature``: 0 is greedy. ``top_k``: 0 or -1 is all. ``seed``: None draws one for the request.
    ``logprobs``, ``prompt_logprobs``: how many of the likeliest tokens to report beside the token itself, None for
    no report. ``stop``: strings that end the text. Raises InvalidRequestError.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _check(_is_number(getattr(self, name)), name, "a number", getattr(self, name))
        for name in ("top_k", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            optional = name != "top_k" and value is None
            _check(optional or type(value) is int, name, "an integer", value)
        _check(0.0 <= self.temperature < float("inf"), "temperature", "0 or more", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p", "more than 0 and at most 1", self.top_p)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "0 to 1", self.min_p)
        _check(self.top_k >= -1, "top_k", "-1 or more", self.top_k)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= 0, name, "0 or more", value)
        _check(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            "strings that are not empty",
            self.stop,
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability before any sampling rule, its rank (1: the likeliest), and the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float] = field(default_factory=dict)


def draw_uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the seed and the token's position only."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


class _Decoder(Protocol):
    def decode(self, token_ids: list[int], /) -> str: ...


class TextStream:
    """The text of one output as it grows: only whole characters, and nothing that may turn out to be a stop string.

    ``text``: what has been given out so far. ``stopped``: a stop string has come; the text ends before it.
    """

    def __init__(self, tokenizer: _Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._window = 0  # first token that is still decoded
        self._done = 0  # first token whose text has not been taken over
        self._pending = ""
        self.text = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; returns the text that is now certain."""
        before = len(self.text)
        for token in token_ids:
            if self.stopped:
                break
            self._token_ids.append(token)
            self._pending += self._take_text()
            self._cut_at_stop()
        if not self.stopped:
            held = self._maybe_stop()
            self.text += self._pending[: len(self._pending) - held]
            self._pending = self._pending[len(self._pending) - held :]
        return self.text[before:]

    def finish(self) -> str:
        """Return the text that was held back: no stop string came of it."""
        rest = "" if self.stopped else self._pending + self._tail()
        self.text, self._pending = self.text + rest, ""
        return rest

    def _take_text(self) -> str:
        """Return the text of the tokens that are not taken over yet, or nothing while a character is incomplete.

        Tokens are decoded with some before them, since a tokenizer may write a token otherwise at the start.
        """
        tail = self._tail()
        if not tail or tail.endswith("�"):
            return ""
        self._window, self._done = self._done, len(self._token_ids)
        return tail

    def _tail(self) -> str:
        known = self._tokenizer.decode(self._token_ids[self._window : self._done])
        return self._tokenizer.decode(self._token_ids[self._window :])[len(known) :]

    def _cut_at_stop(self) -> None:
        found = [(self._pending.find(stop), stop) for stop in self._stop if stop in self._pending]
        if found:
            at, self.stop_string = min(found)
            self.text += self._pending[:at]
            self._pending = ""

    def _maybe_stop(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        longest = min(max(map(len, self._stop), default=1) - 1, len(self._pending))
        for count in range(longest, 0, -1):
            if any(stop.startswith(self._pending[-count:]) for stop in self._stop):
                return count
        return 0
