"""What an engine is told at its start, under vLLM's names, and what follows from it."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhash import BlockHasher
from kvhash._errors import InvalidRequestError, UnknownRootError
from kvhash.contract import Contract

from .block import cdiv
from .coordinator import CacheConfig
from .event_config import KVEventsConfig
from .model_info import ModelInfo
from .ngram import NgramDrafter
from .scheduler import SchedulerConfig
from .spec import GroupSpec

__all__ = ["EngineOptions", "environment_options"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """vLLM's engine arguments; plain data, the same for every data-parallel rank.

    ``num_gpu_blocks``: blocks of the pool, the null block included. ``emulate_vllm``: the release whose hashes and
    event shapes the engine makes. ``hash_seed``: PYTHONHASHSEED, None where it is unset.
    ``event_hash_bytes``: events carry whole digests (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
    """

    model: str
    info: ModelInfo = field(default_factory=ModelInfo)
    block_size: int = 16
    num_gpu_blocks: int = 4096
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    hash_seed: str | None = None
    event_hash_bytes: bool = False
    emulate_vllm: str = "latest"
    kv_events_config: KVEventsConfig = field(default_factory=KVEventsConfig)
    kv_transfer_config: Mapping[str, Any] | None = None
    speculative_config: Mapping[str, Any] | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    decode_context_parallel_size: int = 1
    watermark: float = 0.0
    load_format: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    enforce_eager: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise InvalidRequestError where the settings do not fit each other, KvHashErrors for the hasher's."""
        if not 0 <= self.watermark <= 1:
            raise InvalidRequestError(f"expected --watermark as 0 to 1, got {self.watermark}")
        contract = Contract.for_vllm(self.emulate_vllm)
        algorithm = contract.algorithm(self.prefix_caching_hash_algo)
        too_wide = contract.chain_values == "int" and algorithm.keeps == "digest"
        if too_wide and self.kv_events_config.enable_kv_cache_events:
            raise InvalidRequestError(
                f"vLLM {contract.release} cannot publish the hashes of {algorithm.name}: they are integers of "
                f"{8 * 32} bits and its events take 64; leave out the events or take another algorithm"
            )
        if self.event_hash_bytes and not contract.events.hash_bytes:
            raise InvalidRequestError(f"vLLM {self.emulate_vllm} cannot publish whole digests")
        groups = self.info.groups(self.block_size)
        needed = len(groups) * cdiv(self.max_model_len, self.block_size * self.decode_context_parallel_size)
        if needed > self.num_gpu_blocks - 1:
            raise InvalidRequestError(
                f"one request of the maximum model length {self.max_model_len} needs {needed} blocks and the pool has "
                f"{self.num_gpu_blocks - 1} beside the null block; give more blocks (--num-gpu-blocks-override) or a "
                "shorter --max-model-len"
            )
        self.drafter()
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InvalidRequestError(
                "without chunked prefill a step must take the longest prompt: --max-num-batched-tokens is smaller "
                "than --max-model-len"
            )
        try:
            self._hasher(self.hash_seed)
        except UnknownRootError:
            _log.warning(
                "PYTHONHASHSEED is not set: as in vLLM %s, NONE_HASH of %s is random; nobody else can make the hashes",
                contract.release,
                self.prefix_caching_hash_algo,
            )

    def _hasher(self, seed: str | None) -> BlockHasher:
        return BlockHasher(
            vllm=self.emulate_vllm,
            algorithm=self.prefix_caching_hash_algo,
            block_size=self.block_size * self.decode_context_parallel_size,
            hash_seed=seed,
        )

    def hasher(self) -> BlockHasher:
        """Return the hasher; where vLLM draws NONE_HASH at random, so does the engine. Raises KvHashErrors."""
        try:
            return self._hasher(self.hash_seed)
        except UnknownRootError:
            return self._hasher(secrets.token_hex(32))

    def drafter(self) -> NgramDrafter | None:
        """Return what drafts tokens, if anything; raises InvalidRequestError for a method that there is not."""
        config = self.speculative_config
        if config is None:
            return None
        known = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
        if config.get("method", "ngram") != "ngram" or not config.keys() <= known:
            raise InvalidRequestError(
                f'expected --speculative-config with method "ngram" and {", ".join(sorted(known - {"method"}))}, got '
                f"{json.dumps(dict(config))}"
            )
        try:
            # vLLM takes one bound for both where only one is given, and 5 where none is.
            least = config.get("prompt_lookup_min", config.get("prompt_lookup_max", 5))
            return NgramDrafter(
                config["num_speculative_tokens"],
                prompt_lookup_min=least,
                prompt_lookup_max=config.get("prompt_lookup_max", least),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"bad --speculative-config: {error}") from None

    def scheduler_config(self, groups: tuple[GroupSpec, ...] | None = None) -> SchedulerConfig:
        """Return the scheduler's configuration; `groups`: those of a model that was loaded."""
        in_flight = 2 if self.async_scheduling else 1
        span = self.block_size * self.decode_context_parallel_size
        return SchedulerConfig(
            cache=CacheConfig(
                groups=groups or self.info.groups(self.block_size),
                num_blocks=self.num_gpu_blocks,
                hash_block_size=span,
                scheduler_block_size=span,
                max_model_len=self.max_model_len,
                max_in_flight_tokens=in_flight * self.max_num_batched_tokens,
                decode_context_parallel_size=self.decode_context_parallel_size,
                enable_caching=self.enable_prefix_caching,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                watermark=self.watermark,
                event_hash_form="bytes" if self.event_hash_bytes else "uint64",
            ),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.scheduling_policy,
            async_scheduling=self.async_scheduling,
            num_speculative_tokens=int((self.speculative_config or {}).get("num_speculative_tokens", 0)),
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )


def environment_options() -> dict[str, Any]:
    """Return what vLLM reads from the environment: PYTHONHASHSEED and the form of published hashes."""
    as_int = os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    return {"hash_seed": os.environ.get("PYTHONHASHSEED"), "event_hash_bytes": as_int.strip() == "0"}
