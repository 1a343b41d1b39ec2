"""What an engine is told at its start, under vLLM's names, and the parts that are made of it."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from kvhash import BlockHasher, KvHashError
from kvhash._errors import InvalidRequestError, UnknownRootError
from kvhash.contract import Contract

from .block import cdiv
from .coordinator import CacheConfig
from .core import EngineCore
from .engine import Engine
from .event_config import KVEventsConfig
from .publisher import EventPublisher
from .report import StepReport
from .runner import NullRunner
from .scheduler import SchedulerConfig
from .spec import FullAttentionSpec, GroupSpec, SlidingWindowSpec

__all__ = ["EngineOptions", "ModelInfo", "environment_options", "make_engine"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """What the engine wants to know of a model; read from its ``config.json`` where the model is a folder.

    ``layers``: the kinds of its attention layers with their windows (None: full attention).
    """

    vocab_size: int = 32000
    max_model_len: int = 4096
    eos_token_id: int | None = None
    layers: tuple[int | None, ...] = (None,)

    @classmethod
    def read(cls, model: str) -> ModelInfo:
        """Return what is known of `model`: defaults where it is only a name. Raises InvalidRequestError."""
        path = Path(model).expanduser() / "config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_bytes())
            config = {**config, **config.get("text_config", {})}
            eos: Any = config.get("eos_token_id")
            return cls(
                vocab_size=int(config.get("vocab_size", cls.vocab_size)),
                max_model_len=int(config.get("max_position_embeddings", cls.max_model_len)),
                eos_token_id=eos[0] if isinstance(eos, list) and eos else eos,
                layers=_layers(config),
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InvalidRequestError(f"{path} is no model configuration: {error}") from None

    def groups(self, block_size: int) -> tuple[GroupSpec, ...]:
        """Return the KV cache groups: as many layers in each, of one kind, as vLLM packs them."""
        counts = {kind: self.layers.count(kind) for kind in dict.fromkeys(self.layers)}
        least, most = min(counts.values()), max(counts.values())
        size = most if most < 1.25 * least else least
        return tuple(
            FullAttentionSpec(block_size=block_size)
            if window is None
            else SlidingWindowSpec(block_size=block_size, sliding_window=window)
            for window, count in counts.items()
            for _ in range(ceil(count / size))
        )


def _layers(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    count = int(config.get("num_hidden_layers", 1))
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not isinstance(window, int):
        return (None,) * count
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


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

    def check(self) -> None:
        """Raise InvalidRequestError where the settings do not fit each other, KvHashErrors for the hasher's."""
        contract = Contract.for_vllm(self.emulate_vllm)
        if contract.chain_values != "bytes":
            raise InvalidRequestError(
                f"the engine cannot emulate vLLM {self.emulate_vllm}: its blocks are keyed by digests, and that "
                "release chains integers; expected a release whose hashes are bytes (kvhash contract lists them)"
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

    def scheduler_config(self) -> SchedulerConfig:
        """Return the scheduler's configuration."""
        in_flight = 2 if self.async_scheduling else 1
        span = self.block_size * self.decode_context_parallel_size
        return SchedulerConfig(
            cache=CacheConfig(
                groups=self.info.groups(self.block_size),
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


def make_engine(options: EngineOptions, deliver: Callable[[StepReport], None], *, rank: int = 0) -> Engine:
    """Return the engine of one rank, its sockets open and its threads not started. Raises KvHashErrors."""
    hasher = options.hasher()
    publisher: EventPublisher | None = None
    try:
        if options.kv_events_config.publishes:
            publisher = EventPublisher(options.kv_events_config, rank=rank, release=options.emulate_vllm)
        core = EngineCore(
            options.scheduler_config(),
            NullRunner(vocab_size=options.info.vocab_size),
            publish=publisher.publish if publisher else lambda events: None,
        )
    except KvHashError:
        if publisher:
            publisher.close(timeout=0)
        raise
    return Engine(core, hasher, deliver, rank=rank, publisher=publisher)
