"""Drafts from the request's own tokens: what followed the last n-gram when it came before."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NgramDrafter"]


class NgramDrafter:
    """Proposes up to ``num_speculative_tokens`` tokens.

    The longest n-gram at the end of the tokens, of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, is looked
    for earlier; what followed its first occurrence is the draft (vLLM's ``ngram`` method and names).
    """

    def __init__(
        self, num_speculative_tokens: int, *, prompt_lookup_min: int = 2, prompt_lookup_max: int = 4
    ) -> None:
        if num_speculative_tokens < 1 or not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                "expected at least one draft token and 1 <= prompt_lookup_min <= prompt_lookup_max"
            )
        self.num_speculative_tokens = num_speculative_tokens
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max

    def propose(self, token_ids: Sequence[int]) -> list[int]:
        """Return the draft after `token_ids`, empty where no n-gram came before."""
        tokens = list(token_ids)
        for size in range(min(self.prompt_lookup_max, len(tokens) - 1), self.prompt_lookup_min - 1, -1):
            gram = tokens[-size:]
            first, last = gram[0], len(tokens) - size
            start = 0
            while True:
                try:
                    start = tokens.index(first, start, last)
                except ValueError:
                    break
                if tokens[start : start + size] == gram:
                    return tokens[start + size : start + size + self.num_speculative_tokens]
                start += 1
        return []
