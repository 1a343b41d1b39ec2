"""Runs requests through an engine and returns what it published: a capture, as one makes it of a real server.

Requests are request lines with ``max_tokens`` beside; the fields that say how an engine hashes are the engine's, so
they must agree with it. ``{"reset": true}`` resets the cache. What comes out has the form of the recorded servers in
tests/data/captures: ``requests`` with their outputs, ``frames`` as ZeroMQ carried them, ``replay`` of all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvhash import KvHashError
from kvhash._errors import InvalidRequestError
from kvhash._version import __version__
from kvhash.contract import Contract
from kvhash.events.encode import encode_batch
from kvhash.events.message import END_SEQ
from kvhash.events.schema import EventBatch
from kvhash.request import HashRequest, parse_json, parse_request

from .core import EngineCore
from .events import KVEvent
from .options import EngineOptions
from .request import Request
from .runner import ModelRunner

__all__ = ["Recorder", "read_lines", "write_json"]

#: Fields of a request line that are the engine's, with the option that holds each.
_ENGINES = {
    "algorithm": "prefix_caching_hash_algo",
    "hash_seed": "hash_seed",
    "block_size": "block_size",
    "decode_context_parallel_size": "decode_context_parallel_size",
}
_OWN = ("max_tokens", "priority", "prompt_logprobs")


def read_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Read request lines; blank ones are passed over. Raises KvHashErrors that name the line."""
    values: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value = parse_json(line, what=f"line {number}")
        if not isinstance(value, dict):
            raise InvalidRequestError(
                f"line {number}: expected an object, got {type(value).__name__}", at="$"
            )
        values.append(value)
    return values


class Recorder:
    """One engine, driven here, whose batches are kept as frames. Raises KvHashErrors for options or lines."""

    def __init__(self, options: EngineOptions, runner: ModelRunner) -> None:
        self._options = options
        self._contract = Contract.for_vllm(options.emulate_vllm)
        self._hasher = options.hasher()
        self._frames: list[list[str]] = []
        self._core = EngineCore(
            options.scheduler_config(), runner, publish=self._publish, drafter=options.drafter()
        )
        self._topic = options.kv_events_config.topic

    def record(self, lines: Sequence[Mapping[str, Any]], *, together: bool = False) -> dict[str, Any]:
        """Run the lines one after the other, or all `together` between resets; returns the capture."""
        requests = [self._read(line, at=f"line {number}") for number, line in enumerate(lines, 1)]
        records: list[dict[str, Any]] = []
        running: list[Callable[[], None]] = []
        loras: list[dict[str, Any]] = []
        for number, (line, hashed) in enumerate(zip(lines, requests, strict=True)):
            if hashed is None:
                self._finish(running)
                done = self._core.reset_prefix_cache()
                records.append({"reset": {"success": done}})
                continue
            request = self._request(str(number), line, hashed)
            record: dict[str, Any] = {"prompt": list(hashed.tokens), "max_tokens": request.max_tokens}
            records.append(record)
            self._core.add_request(request)
            running.append(lambda record=record, request=request: record.update(_outcome(request)))  # type: ignore[misc]
            if hashed.cache_salt:
                record["cache_salt"] = hashed.cache_salt
            if hashed.lora:
                lora = line["lora"]
                record["model"] = lora["name"]
                if lora not in loras:
                    loras.append(lora)
            for name in ("multimodal", "prompt_embeds", "id"):
                if line.get(name) is not None:
                    record[name] = line[name]
            if not together:
                self._finish(running)
        self._finish(running)
        self._core.publish_events()
        return self._capture(records, loras)

    def _read(self, line: Mapping[str, Any], *, at: str) -> HashRequest | None:
        if "reset" in line:
            if line["reset"] is not True or len(line) > 1:
                raise InvalidRequestError(f'{at}: expected a reset as {{"reset": true}} alone', at="$.reset")
            return None
        given = {name: value for name, value in line.items() if name not in _OWN}
        defaults = {
            "vllm": self._options.emulate_vllm,
            **{name: getattr(self._options, option) for name, option in _ENGINES.items()},
        }
        try:
            hashed = parse_request(given, defaults)
            for name, option in _ENGINES.items():
                ours = getattr(self._options, option)
                if getattr(hashed, name) != ours:
                    raise InvalidRequestError(f"the engine has {ours!r}, got {given[name]!r}", at=f"$.{name}")
            asked = Contract.for_vllm(hashed.vllm)
            if (asked.hash_fields(), asked.events) != (self._contract.hash_fields(), self._contract.events):
                raise InvalidRequestError(
                    f"the engine emulates vLLM {self._contract.release}, got {hashed.vllm!r}", at="$.vllm"
                )
            if hashed.lookahead:
                raise InvalidRequestError("the engine hashes without look-ahead", at="$.lookahead")
            self._check_lengths(line, hashed)
        except KvHashError as error:
            raise InvalidRequestError(f"{at}: {error.message}", at=error.at, code=error.code) from None
        return hashed

    def _check_lengths(self, line: Mapping[str, Any], hashed: HashRequest) -> None:
        max_tokens = line.get("max_tokens", 16)
        if type(max_tokens) is not int or max_tokens < 1:
            raise InvalidRequestError("expected an integer of at least 1", at="$.max_tokens")
        if type(line.get("priority", 0)) is not int:
            raise InvalidRequestError("expected an integer", at="$.priority")
        if not hashed.tokens:
            raise InvalidRequestError("expected at least one token", at="$.tokens")
        if len(hashed.tokens) + max_tokens > self._options.max_model_len:
            raise InvalidRequestError(
                f"{len(hashed.tokens)} tokens and {max_tokens} to make are more than the engine's "
                f"{self._options.max_model_len}",
                at="$.tokens",
            )
        if max(hashed.tokens) >= self._options.info.vocab_size:
            raise InvalidRequestError(
                f"a token id is out of the vocabulary of {self._options.info.vocab_size}", at="$.tokens"
            )

    def _request(self, name: str, line: Mapping[str, Any], hashed: HashRequest) -> Request:
        return Request(
            name,
            list(hashed.tokens),
            hasher=self._hasher,
            max_tokens=line.get("max_tokens", 16),
            lora=hashed.lora,
            cache_salt=hashed.cache_salt,
            multimodal=hashed.multimodal,
            prompt_embeds=hashed.prompt_embeds,
            priority=line.get("priority", 0),
            arrival_time=float(name),
            skip_reading_prefix_cache=line.get("prompt_logprobs") is not None,
        )

    def _finish(self, running: list[Callable[[], None]]) -> None:
        while self._core.has_work:
            self._core.step()
        for say in running:
            say()
        running.clear()

    def _publish(self, events: Sequence[KVEvent]) -> None:
        batch = EventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=0)
        payload = encode_batch(batch, self._options.emulate_vllm, drop_fields=True)
        self._frames.append([self._topic.encode().hex(), _sequence(len(self._frames)), payload.hex()])

    def _capture(self, records: list[dict[str, Any]], loras: list[dict[str, Any]]) -> dict[str, Any]:
        with_topic = self._contract.events.replay_topic_frame
        replay = [["", *frame] if with_topic else ["", *frame[1:]] for frame in self._frames]
        end = ["", "", _sequence(END_SEQ), ""] if with_topic else ["", _sequence(END_SEQ), ""]
        capture: dict[str, Any] = {
            "engine": f"engine_ref {__version__}, as vLLM {self._contract.release}",
            "algo": self._options.prefix_caching_hash_algo,
            "block_size": self._options.block_size,
            "hash_seed": self._options.hash_seed,
            "requests": records,
            "frames": self._frames,
            "replay": [*replay, end],
        }
        if len(loras) == 1:
            capture["lora"] = loras[0]
        elif loras:
            capture["loras"] = loras
        return capture


def _outcome(request: Request) -> dict[str, Any]:
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
    }
    return {"out": request.output_token_ids, "usage": usage}


def _sequence(number: int) -> str:
    return number.to_bytes(8, "big").hex()


def write_json(capture: Mapping[str, Any]) -> str:
    """Return a capture as text, one request and one frame a line, so that two of them can be compared."""
    parts = []
    for name, value in capture.items():
        if isinstance(value, list):
            items = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            parts.append(f"{json.dumps(name)}:[\n{items}\n]")
        else:
            parts.append(f"{json.dumps(name)}:{json.dumps(value)}")
    return "{" + ",\n".join(parts) + "}\n"
