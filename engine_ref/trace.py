"""Recorded operations on the KV cache manager, played through ours: what was observed, in the form of the recording.

A file holds ``{"engine": ..., "traces": [...]}`` (cache operations) or ``{"engine": ..., "runs": [...]}`` (scheduler
workloads). Only inputs are read from it; every observation in the answer is our own.
"""

from __future__ import annotations

from typing import Any

from kvhash import BlockHasher
from kvhash._errors import InvalidRequestError

from .block_pool import BlockPool
from .cache_manager import CacheManager
from .coordinator import CacheConfig
from .events import event_to_json
from .request import Request
from .spec import ChunkedLocalAttentionSpec, FullAttentionSpec, GroupSpec, MambaSpec, SlidingWindowSpec

__all__ = ["free_queue_ids", "parse_group", "play_trace"]

#: Longer than any recorded request.
_MAX_MODEL_LEN = 1 << 20


def parse_group(group: Any, *, at: str) -> GroupSpec:
    """Read a KV cache group; raises InvalidRequestError."""
    try:
        kind, size = group["kind"], int(group["block_size"])
        if kind == "full_attention":
            return FullAttentionSpec(block_size=size)
        if kind == "sliding_window":
            return SlidingWindowSpec(block_size=size, sliding_window=int(group["sliding_window"]))
        if kind == "chunked_local_attention":
            return ChunkedLocalAttentionSpec(
                block_size=size, attention_chunk_size=int(group["attention_chunk_size"])
            )
        if kind == "mamba":
            return MambaSpec(block_size=size)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"a KV cache group is not complete: {error}", at=at) from None
    raise InvalidRequestError(
        f"unknown kind of KV cache group {kind!r}; expected full_attention, sliding_window, "
        "chunked_local_attention or mamba",
        at=f"{at}.kind",
    )


def free_queue_ids(pool: BlockPool) -> list[int]:
    """Return the ids of the free blocks in eviction order."""
    return [block.block_id for block in pool.free_queue]


def play_trace(trace: dict[str, Any], *, at: str = "$") -> dict[str, Any]:
    """Play one recorded cache trace; raises InvalidRequestError for one that cannot be played."""
    player = _Player(trace, at=at)
    answer = {key: value for key, value in trace.items() if key not in ("ops", "final_free_queue")}
    answer["ops"] = [player.play(op, at=f"{at}.ops[{i}]") for i, op in enumerate(trace["ops"])]
    answer["final_free_queue"] = free_queue_ids(player.cache.pool)
    return answer


class _Player:
    def __init__(self, trace: dict[str, Any], *, at: str) -> None:
        groups = tuple(parse_group(g, at=f"{at}.groups[{i}]") for i, g in enumerate(trace["groups"]))
        self.cache = CacheManager(
            CacheConfig(
                groups=groups,
                num_blocks=trace["num_blocks"],
                hash_block_size=trace["hash_block_size"],
                scheduler_block_size=trace["scheduler_block_size"],
                max_model_len=_MAX_MODEL_LEN,
                use_eagle=trace.get("use_eagle", False),
                decode_context_parallel_size=trace.get("dcp_world_size", 1),
            )
        )
        self.hasher = BlockHasher(
            vllm=trace.get("vllm", "latest"),
            algorithm=trace["algo"],
            hash_seed=trace.get("hash_seed"),
            block_size=trace["hash_block_size"],
        )
        self.requests: dict[str, Request] = {}

    def play(self, op: dict[str, Any], *, at: str) -> dict[str, Any]:
        play = {"admit": self._admit, "step": self._step, "free": self._free, "reset": self._reset}.get(
            op["op"]
        )
        if play is None:
            raise InvalidRequestError(f"unknown operation {op['op']!r}", at=f"{at}.op")
        self.cache.new_step_starts()
        inputs = ("op", "id", "tokens", "salt", "append", "num_new_tokens")
        seen = {key: op[key] for key in inputs if key in op}
        # No step runs here, so blocks being copied stay held for good; the recorder did not settle them either.
        seen |= play(op)
        seen["events"] = [event_to_json(event) for event in self.cache.take_events()]
        seen["free_blocks"] = self.cache.pool.num_free_blocks
        return seen

    def _admit(self, op: dict[str, Any]) -> dict[str, Any]:
        request = Request(op["id"], op["tokens"], hasher=self.hasher, cache_salt=op.get("salt"))
        hit = self.cache.get_computed_blocks(request)
        seen: dict[str, Any] = {
            "hit_tokens": hit.num_tokens,
            "hit_blocks": [[block.block_id for block in row] for row in hit.blocks],
        }
        new = self.cache.allocate_slots(request, op["num_new_tokens"], hit=hit)
        seen["admitted"] = new is not None
        if new is not None:
            request.num_computed_tokens = hit.num_tokens + op["num_new_tokens"]
            self.requests[request.request_id] = request
            seen["block_ids"] = self.cache.block_ids(request.request_id)
        return seen

    def _step(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["id"]]
        request.append_output(op["append"])
        new = self.cache.allocate_slots(request, op["num_new_tokens"])
        if new is None:
            self.cache.free(self.requests.pop(request.request_id))
            return {"allocated": False, "preempted": True}
        request.num_computed_tokens += op["num_new_tokens"]
        return {"allocated": True, "block_ids": self.cache.block_ids(request.request_id)}

    def _free(self, op: dict[str, Any]) -> dict[str, Any]:
        self.cache.free(self.requests.pop(op["id"]))
        return {}

    def _reset(self, op: dict[str, Any]) -> dict[str, Any]:
        del op
        return {"success": self.cache.reset_prefix_cache()}
