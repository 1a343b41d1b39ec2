"""Recorded operations on the KV cache manager, played through ours: what was observed, in the form of the recording.

A file holds ``{"engine": ..., "traces": [...]}`` (cache operations) or ``{"engine": ..., "runs": [...]}`` (scheduler
workloads). Only inputs are read from it; every observation in the answer is our own.
"""

from __future__ import annotations

from typing import Any

from kvhash import BlockHasher
from kvhash._checks import normalize_tokens
from kvhash._errors import InvalidRequestError

from .block_pool import BlockPool
from .cache_manager import CacheManager
from .coordinator import CacheConfig
from .events import event_to_json
from .recorded import field, located, objects
from .request import Request
from .spec import ChunkedLocalAttentionSpec, FullAttentionSpec, GroupSpec, MambaSpec, SlidingWindowSpec

__all__ = ["free_queue_ids", "parse_group", "play_trace"]

#: Longer than any recorded request.
_MAX_MODEL_LEN = 1 << 20


def parse_group(group: Any, *, at: str) -> GroupSpec:
    """Read a KV cache group; raises InvalidRequestError."""
    kind, size = field(group, "kind", str, at=at), field(group, "block_size", int, at=at)
    with located(at, root=at):
        if kind == "full_attention":
            return FullAttentionSpec(block_size=size)
        if kind == "sliding_window":
            return SlidingWindowSpec(
                block_size=size, sliding_window=field(group, "sliding_window", int, at=at)
            )
        if kind == "chunked_local_attention":
            return ChunkedLocalAttentionSpec(
                block_size=size, attention_chunk_size=field(group, "attention_chunk_size", int, at=at)
            )
        if kind == "mamba":
            return MambaSpec(block_size=size)
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
    with located(at, root=at):
        player = _Player(trace, at=at)
    ops = objects(trace, "ops", at=at)
    answer = {key: value for key, value in trace.items() if key not in ("ops", "final_free_queue")}
    answer["ops"] = []
    for place, op in ops:
        with located(place, root=at):
            answer["ops"].append(player.play(op, at=place))
    answer["final_free_queue"] = free_queue_ids(player.cache.pool)
    return answer


class _Player:
    def __init__(self, trace: dict[str, Any], *, at: str) -> None:
        groups = tuple(parse_group(group, at=place) for place, group in objects(trace, "groups", at=at))
        self.cache = CacheManager(
            CacheConfig(
                groups=groups,
                num_blocks=field(trace, "num_blocks", int, at=at),
                hash_block_size=field(trace, "hash_block_size", int, at=at),
                scheduler_block_size=field(trace, "scheduler_block_size", int, at=at),
                max_model_len=_MAX_MODEL_LEN,
                use_eagle=field(trace, "use_eagle", bool, at=at, default=False),
                decode_context_parallel_size=field(trace, "dcp_world_size", int, at=at, default=1),
            )
        )
        self.hasher = BlockHasher(
            vllm=trace.get("vllm", "latest"),
            algorithm=field(trace, "algo", str, at=at),
            hash_seed=trace.get("hash_seed"),
            block_size=trace["hash_block_size"],
        )
        self.requests: dict[str, Request] = {}

    def play(self, op: dict[str, Any], *, at: str) -> dict[str, Any]:
        name = field(op, "op", str, at=at)
        play = {"admit": self._admit, "step": self._step, "free": self._free, "reset": self._reset}.get(name)
        if play is None:
            raise InvalidRequestError(
                f"unknown operation {name!r}; expected admit, step, free or reset", at=f"{at}.op"
            )
        self.cache.new_step_starts()
        inputs = ("op", "id", "tokens", "salt", "append", "num_new_tokens")
        seen = {key: op[key] for key in inputs if key in op}
        # No step runs here, so blocks being copied stay held for good; the recorder did not settle them either.
        seen |= play(op, at)
        seen["events"] = [event_to_json(event) for event in self.cache.take_events()]
        seen["free_blocks"] = self.cache.pool.num_free_blocks
        return seen

    def _running(self, op: dict[str, Any], at: str) -> Request:
        name = field(op, "id", str, at=at)
        if name not in self.requests:
            raise InvalidRequestError(f"no request {name!r} is running", at=f"{at}.id")
        return self.requests[name]

    def _admit(self, op: dict[str, Any], at: str) -> dict[str, Any]:
        name = field(op, "id", str, at=at)
        if name in self.requests:
            raise InvalidRequestError(f"a request {name!r} is running already", at=f"{at}.id")
        tokens = normalize_tokens(field(op, "tokens", list, at=at), at=f"{at}.tokens")
        salt = None if op.get("salt") is None else field(op, "salt", str, at=at)
        num_new_tokens = field(op, "num_new_tokens", int, at=at)
        request = Request(name, tokens, hasher=self.hasher, cache_salt=salt)
        hit = self.cache.get_computed_blocks(request)
        seen: dict[str, Any] = {
            "hit_tokens": hit.num_tokens,
            "hit_blocks": [[block.block_id for block in row] for row in hit.blocks],
        }
        new = self.cache.allocate_slots(request, num_new_tokens, hit=hit)
        seen["admitted"] = new is not None
        if new is not None:
            request.num_computed_tokens = hit.num_tokens + num_new_tokens
            self.requests[request.request_id] = request
            seen["block_ids"] = self.cache.block_ids(request.request_id)
        return seen

    def _step(self, op: dict[str, Any], at: str) -> dict[str, Any]:
        request = self._running(op, at)
        num_new_tokens = field(op, "num_new_tokens", int, at=at)
        request.append_output(normalize_tokens(field(op, "append", list, at=at), at=f"{at}.append"))
        new = self.cache.allocate_slots(request, num_new_tokens)
        if new is None:
            self.cache.free(self.requests.pop(request.request_id))
            return {"allocated": False, "preempted": True}
        request.num_computed_tokens += num_new_tokens
        return {"allocated": True, "block_ids": self.cache.block_ids(request.request_id)}

    def _free(self, op: dict[str, Any], at: str) -> dict[str, Any]:
        self.cache.free(self.requests.pop(self._running(op, at).request_id))
        return {}

    def _reset(self, op: dict[str, Any], at: str) -> dict[str, Any]:
        del op, at
        return {"success": self.cache.reset_prefix_cache()}
