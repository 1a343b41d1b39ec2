"""Short lives of an engine, played and written down: what the corpus's engine vectors are made from.

Each sequence is a list of steps. A step sends requests at once and waits for their ends, or resets the prefix cache.
What was observed, per step: the payloads that were published, as a given release writes them, and for each request its
output and how many of its prompt tokens were found in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvhash import BlockHasher, Contract
from kvhash.events import EventBatch, encode_batch

from .coordinator import CacheConfig
from .core import EngineCore
from .events import KVEvent
from .request import Request
from .runner import NullRunner
from .scheduler import SchedulerConfig
from .trace import parse_group

__all__ = ["play_sequence"]

#: A request's fields that go into its block hashes.
_KEYS = ("cache_salt", "lora", "multimodal")


def play_sequence(settings: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Play the steps on a new engine and yield what each showed.

    `settings`: ``vllm``, ``algorithm``, ``hash_seed``, ``block_size``, ``num_blocks`` and, where they are not 1, 0, one
    full-attention group and the default form, ``decode_context_parallel_size``, ``lookahead``, ``groups`` (as cache
    traces have them) and ``event_hash_form``. Raises what `BlockHasher` and `Request` raise.
    """
    size, ranks = settings["block_size"], settings.get("decode_context_parallel_size", 1)
    groups = settings.get("groups", [{"kind": "full_attention", "block_size": size}])
    sizes = [group["block_size"] * (1 if group["kind"] == "mamba" else ranks) for group in groups]
    hasher = BlockHasher(
        vllm=settings["vllm"],
        algorithm=settings["algorithm"],
        hash_seed=settings["hash_seed"],
        block_size=math.gcd(*(group["block_size"] for group in groups)),
        decode_context_parallel_size=ranks,
        lookahead=settings.get("lookahead", 0),
    )
    contract = Contract.for_vllm(settings["vllm"])
    batches: list[Sequence[KVEvent]] = []
    core = EngineCore(
        SchedulerConfig(
            cache=CacheConfig(
                groups=tuple(parse_group(group, at=f"$.groups[{i}]") for i, group in enumerate(groups)),
                num_blocks=settings["num_blocks"],
                hash_block_size=math.gcd(*sizes),
                scheduler_block_size=math.lcm(*sizes),
                max_model_len=1024,
                decode_context_parallel_size=ranks,
                event_hash_form=settings.get("event_hash_form", "uint64"),
            )
        ),
        NullRunner(),
        publish=batches.append,
    )
    published = 0
    for number, step in enumerate(steps):
        requests = [
            _request(f"{number}-{i}", body, hasher) for i, body in enumerate(step.get("requests", ()))
        ]
        if step.get("reset_prefix_cache") and not core.reset_prefix_cache():
            raise ValueError(f"$.steps[{number}]: the cache cannot be reset while requests run")
        for request in requests:
            core.add_request(request)
        while core.has_work:
            core.step()
        new, batches[:] = list(batches), []
        payloads = []
        for events in new:
            batch = EventBatch(ts=float(published), events=tuple(events), data_parallel_rank=0)
            payloads.append(encode_batch(batch, contract.release, drop_fields=True).hex())
            published += 1
        yield {
            "payloads": payloads,
            "requests": [
                {"output": request.output_token_ids, "cached_tokens": request.num_cached_tokens}
                for request in requests
            ],
        }


def _request(request_id: str, body: dict[str, Any], hasher: BlockHasher) -> Request:
    return Request(
        request_id,
        body["tokens"],
        hasher=hasher,
        max_tokens=body["max_tokens"],
        skip_reading_prefix_cache=body.get("skip_reading_prefix_cache", False),
        **{name: body[name] for name in _KEYS if name in body},
    )
