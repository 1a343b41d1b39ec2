"""Tokens to text: with a tokenizer its text, without one the token ids, separated by spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhash.prompt import Tokenizer

__all__ = ["EngineTokenizer", "TokenIdText"]


class EngineTokenizer(Tokenizer):
    """A tokenizer that can also go back to text."""

    @property
    def vocab_size(self) -> int:
        """Token ids, added ones included."""
        return len(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        value: int | None = self._tokenizer.eos_token_id
        return value

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        text: Any = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return what the vocabulary calls each token."""
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))


class TokenIdText:
    """The text of one output without a tokenizer: as `TextStream`, but made of the token ids themselves."""

    stop_string: str | None = None

    def __init__(self) -> None:
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; there is no text in which it could."""
        return False

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; returns their text."""
        new = "".join(f" {token}" for token in token_ids)
        if not self.text:
            new = new[1:]
        self.text += new
        return new

    def finish(self) -> str:
        """Return the text that was held back: none."""
        return ""
