"""A request: its tokens, its block hashes, and how far it is computed."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvhash.block_hash import ChainValue
from kvhash.extra_keys import ExtraKeys, Lora, MultimodalItem, event_extra_keys
from kvhash.hasher import BlockHasher

from .sampling import GREEDY, SamplingParams, TokenLogprobs

__all__ = ["Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, text: str) -> None:
        #: Whether the request will not run again; looked at for every request of every step, so no property.
        self.is_finished = text in ("stop", "length", "abort", "error")


class Request:
    """One request. Constructing it hashes the prompt; appending output tokens extends the hashes.

    ``num_computed_tokens``: tokens whose KV is there or is being computed. ``num_in_flight_tokens``: of these, those
    planned whose results have not come in. ``num_output_placeholders``: output tokens planned but not yet known
    (async scheduling). ``spec_token_ids``: draft tokens to verify in the next step. ``logprobs``: by position, of the
    tokens for which `sampling` asks for them. ``error``: what ended it with ``FINISHED_ERROR``.

    Raises what `BlockHasher.chain` raises for bad tokens, salt, adapter, items or embeddings.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        hasher: BlockHasher,
        max_tokens: int = 16,
        lora: Lora | Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[MultimodalItem | Mapping[str, Any]] | None = None,
        prompt_embeds: Any = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        skip_reading_prefix_cache: bool = False,
        min_tokens: int = 0,
        eos_token_id: int | None = None,
        stop_token_ids: Iterable[int] = (),
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt_token_ids)
        self.all_token_ids = list(prompt_token_ids)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids)
        self.priority = priority
        self.arrival_time = arrival_time
        self.sampling = sampling
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        # The logits of prompt positions come only from computing them.
        self.skip_reading_prefix_cache = skip_reading_prefix_cache or sampling.prompt_logprobs is not None
        self.chain = hasher.chain(
            self.all_token_ids,
            lora=lora,
            cache_salt=cache_salt,
            multimodal=multimodal,
            prompt_embeds=prompt_embeds,
        )
        self.block_hashes: list[ChainValue] = self.chain.block_hashes
        self._num_chained = self.num_prompt_tokens
        self._next_hash_at = self._tokens_for_next_hash()

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_stale_output_tokens = 0
        self.drop_stale_output = False
        self.num_preemptions = 0
        self.spec_token_ids: list[int] = []
        self.is_prefill_chunk = False
        self.shared_prefix_boundary = 0
        #: Prompt tokens that were not computed: local hit and external tokens; of these, the external ones.
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.error: str | None = None
        #: Loads that left something out; after one, connectors are not asked again for this request.
        self.num_load_failures = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far; a copy."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def lora(self) -> Lora | None:
        """The adapter, if any."""
        return self.chain.keys.lora

    def append_output(self, token_ids: Sequence[int]) -> None:
        """Add output tokens and the hashes of the blocks that they complete."""
        self.all_token_ids += token_ids
        if len(self.all_token_ids) >= self._next_hash_at:
            self.block_hashes += self.chain.append(self.all_token_ids[self._num_chained :])
            self._num_chained = len(self.all_token_ids)
            self._next_hash_at = self._tokens_for_next_hash()

    def _tokens_for_next_hash(self) -> int:
        hasher = self.chain.hasher
        return (len(self.block_hashes) + 1) * hasher.span + hasher.lookahead

    def event_extra_keys(self, start: int, end: int) -> ExtraKeys:
        """Return the extra keys of the tokens `start` to `end` as a block of that span publishes them."""
        hasher = self.chain.hasher
        keys = self.chain.keys.block(hasher.contract, start, end + hasher.lookahead)
        return event_extra_keys(keys, hasher.contract)

    def lose_cached_tokens(self, first: int) -> None:
        """Take back that the tokens from `first` on were cached: their load failed."""
        local = self.num_cached_tokens - self.num_external_tokens
        self.num_cached_tokens = min(self.num_cached_tokens, first)
        self.num_external_tokens = max(0, self.num_cached_tokens - local)
        self.num_load_failures += 1

    def check_stop(self, max_model_len: int) -> bool:
        """Set the final status if the last token ends the request; returns whether it did.

        Source: ``check_stop`` of vLLM 0.33.0; ``min_tokens`` is enforced where tokens are chosen, not here.
        """
        tokens = self.all_token_ids
        count, last = len(tokens), tokens[-1]
        if last == self.eos_token_id:
            self.status = RequestStatus.FINISHED_STOPPED
        elif last in self.stop_token_ids:
            self.status, self.stop_reason = RequestStatus.FINISHED_STOPPED, last
        elif count >= max_model_len or count - self.num_prompt_tokens >= self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        else:
            return False
        return True

    def queue_key(self) -> tuple[int, float, str]:
        """Return what the priority policy orders by: a lower priority value first, then the older request."""
        return (self.priority, self.arrival_time, self.request_id)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"
