"""An engine with a real model, driven to the end over a list of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_ref.connectors import KVConnector
from engine_ref.core import EngineCore
from engine_ref.ngram import NgramDrafter
from engine_ref.request import Request
from engine_ref.sampling import GREEDY, SamplingParams
from engine_ref.scheduler import SchedulerConfig
from kvhash import BlockHasher

BLOCK = 4
HASHER = BlockHasher(block_size=BLOCK, algorithm="sha256_cbor")


@dataclass
class Engine:
    """One engine; `published`: its events, `longest_result`: most tokens that a request got in one step."""

    core: EngineCore
    runner: Any
    published: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    longest_result: int = 0

    def request(self, name: str, prompt: Sequence[int], *, max_tokens: int = 12, **options: Any) -> Request:
        """Return a request for this engine."""
        return Request(name, list(prompt), hasher=HASHER, max_tokens=max_tokens, **options)

    def run(self, *requests: Request, each_step: Callable[[int], None] = lambda step: None) -> None:
        """Queue requests and step until all are done."""
        for request in requests:
            self.core.add_request(request)
        steps = 0
        while self.core.has_work:
            result = self.core.step()
            self.longest_result = max(self.longest_result, *map(len, result.tokens.values()), 0)
            steps += 1
            each_step(steps)
            assert steps < 5000, "the engine does not come to an end"

    def outputs(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 12,
        waves: int = 2,
        sampling: SamplingParams = GREEDY,
        **options: Any,
    ) -> list[list[int]]:
        """Return the output of each prompt; they come in `waves`, so that later ones find blocks of earlier ones."""
        requests = [
            self.request(f"r{i}", prompt, max_tokens=max_tokens, sampling=sampling, **options)
            for i, prompt in enumerate(prompts)
        ]
        size = -(-len(requests) // waves)
        for start in range(0, len(requests), size):
            self.run(*requests[start : start + size])
        self.requests = requests
        return [request.output_token_ids for request in requests]


def make_engine(
    folder: Path,
    *,
    num_blocks: int = 600,
    budget: int = 256,
    max_num_seqs: int = 64,
    drafts: int = 0,
    async_scheduling: bool = False,
    runner: Any = None,
    connector: KVConnector | None = None,
    runner_options: dict[str, Any] | None = None,
    **cache: Any,
) -> Engine:
    """Return an engine over the model in `folder`."""
    from engine_ref.torch_runner import TorchRunner

    drafter = NgramDrafter(drafts, prompt_lookup_min=1) if drafts else None
    runner = runner or TorchRunner.load(
        folder, num_blocks=num_blocks, block_size=BLOCK, drafter=drafter, **(runner_options or {})
    )
    in_flight = 2 if async_scheduling else 1
    config = SchedulerConfig(
        cache=runner.cache_config(max_in_flight_tokens=in_flight * budget, **cache),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        async_scheduling=async_scheduling,
        num_speculative_tokens=drafts,
    )
    published: list[Any] = []
    core = EngineCore(config, runner, publish=published.append, drafter=drafter, connector=connector)
    return Engine(core, runner, published)
