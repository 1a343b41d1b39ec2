"""What only a machine with an NVIDIA GPU can show (`make gpu-check`): kernels, tokens, speed. Under five minutes.

Prints one line a check and, at the end, the lines for docs/gpu.md. Exit code 0: all checks hold; 1: one does not;
3: there is no GPU. Speeds are printed as fractions of ceilings measured in the same run, never compared with a number
from elsewhere; no speed is a failure.
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 32_000
BLOCK = 16


class Report:
    """Prints and keeps lines; knows whether a check failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed = False

    def say(self, line: str) -> None:
        """Print a line for the page."""
        self.lines.append(line)
        print(line, flush=True)

    def check(self, holds: bool, line: str) -> None:
        """Print a line with its verdict."""
        self.failed |= not holds
        self.say(f"{'ok  ' if holds else 'FAIL'} {line}")


def seconds(function: Callable[[], Any], *, repeat: int = 10) -> float:
    """Return the median time of a call on the device."""
    import torch

    function()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def check_kernels(report: Report, count: int) -> None:
    """The kernels against the plain form in float64, on random steps."""
    from tests.engine_models.kernel_cases import cases, difference, padded_difference

    close = {"float32": 5e-6, "bfloat16": 4e-2}
    worst = dict.fromkeys(close, 0.0)
    wrote = 0.0
    for number, case in enumerate(cases(count, seed=1, longest=700, dtypes=tuple(close))):
        output, pages = difference(case, device="cuda", splits=0 if number % 2 else None)
        worst[case.dtype] = max(worst[case.dtype], output)
        wrote = max(wrote, pages)
    padded = max(padded_difference(number, device="cuda", splits=None) for number in range(20))
    report.check(padded < close["float32"], f"decodes in padded buffers: largest error {padded:.2e}")
    report.check(wrote == 0.0, f"KV writing: {count} random steps, largest difference {wrote:g}")
    for dtype, limit in close.items():
        report.check(
            worst[dtype] < limit, f"attention in {dtype}: largest error {worst[dtype]:.2e} (limit {limit:g})"
        )


def make_model(folder: Path, *, hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> None:
    """Write a random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16_384,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16 if hidden > 1024 else torch.float32).save_pretrained(folder)


def engine(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return an engine core and its runner."""
    from engine_ref.core import EngineCore
    from engine_ref.scheduler import SchedulerConfig
    from engine_ref.torch_runner import TorchRunner

    runner = TorchRunner.load(folder, block_size=BLOCK, **options)
    config = SchedulerConfig(
        cache=runner.cache_config(max_model_len=16_384), max_num_seqs=256, max_num_batched_tokens=8192
    )
    return EngineCore(config, runner), runner


def run(core: Any, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Return the seconds until all is generated, and the outputs."""
    from engine_ref.request import Request
    from kvhash import BlockHasher

    hasher = BlockHasher(block_size=BLOCK)
    start = time.perf_counter()
    requests = [
        Request(f"{start}-{i}", prompt, hasher=hasher, max_tokens=max_tokens)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.add_request(request)
    while core.has_work:
        core.step()
    return time.perf_counter() - start, [request.output_token_ids for request in requests]


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def check_tokens(report: Report) -> None:
    """Greedy tokens of the device, with both attentions, are those of the CPU, in float32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), hidden=256, layers=4, heads=8, kv_heads=2, inner=512)
        prompts = [p[: 20 + 37 * i] for i, p in enumerate(random_prompts(16, 640, seed=3))]
        _, right = run(engine(Path(folder), num_blocks=2048)[0], prompts, 24)
        kinds: dict[str, dict[str, Any]] = {
            "plain attention": {"attention": "plain"},
            "triton attention": {"graphs": "off"},
            "triton attention, CUDA graphs": {"graphs": "cuda"},
            "triton attention, compiled": {"graphs": "off", "compile_backend": "inductor"},
        }
        for name, options in kinds.items():
            core, runner = engine(Path(folder), num_blocks=2048, device="cuda", **options)
            first = run(core, prompts, 24)[1]
            again = run(core, prompts, 24)[1]  # with hits
            same = sum(a == b == c for a, b, c in zip(first, again, right, strict=True))
            report.check(same == len(prompts), f"tokens, {name}: {same} of {len(prompts)} as on the CPU")
            if options.get("graphs") == "cuda":
                graphs = runner.forward.graphs
                report.check(graphs.usable and graphs.replays > 20, f"CUDA graphs: {graphs.replays} replays")


def check_page_moves(report: Report) -> None:
    """Pages written from host memory while the device computes are there in the next step, and read back the same."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), hidden=256, layers=4, heads=8, kv_heads=2, inner=512)
        _, runner = engine(Path(folder), num_blocks=256, device="cuda")
    draw = random.Random(5)
    size = runner.cache.page_size(0)
    pages = {block_id: draw.randbytes(size) for block_id in range(1, 200)}
    busy = torch.randn(4096, 4096, device="cuda")
    for block_id, page in pages.items():
        busy = busy @ busy * 1e-4  # the model's stream is at work
        runner.write_page(0, block_id, page)
    runner.cache.moves.join()
    key = runner.cache.layers[0].keys[1:200].flatten(1).contiguous().view(torch.uint8).cpu()
    row = key.shape[1]
    seen = all(bytes(key[i - 1].numpy().tobytes()) == page[:row] for i, page in pages.items())
    back = all(runner.read_page(0, block_id) == page for block_id, page in pages.items())
    report.check(
        seen and back, f"pages through pinned memory and a side stream: {len(pages)} of {size} bytes"
    )


def measure_ceilings(report: Report) -> tuple[float, float]:
    """Return bytes a second of a copy and operations a second of a bfloat16 product."""
    import torch

    data = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(data)
    bandwidth = 2 * data.numel() / seconds(lambda: target.copy_(data))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = 2 * 8192**3 / seconds(lambda: a @ a)
    report.say(
        f"     ceilings of this run: memory {bandwidth / 1e9:.0f} GB/s, bfloat16 product {product / 1e12:.0f} TFLOP/s"
    )
    return bandwidth, product


def measure_attention(report: Report, bandwidth: float, product: float) -> None:
    """Decode as a fraction of the memory's speed, prefill of the product's, for the kernels alone."""
    import torch

    from engine_ref.torch_runner.attention import PlainAttention
    from engine_ref.torch_runner.attention_triton import TritonAttention
    from engine_ref.torch_runner.layout import StepSequence, lay_out
    from engine_ref.torch_runner.pages import KVPages

    heads, kv_heads, size = 32, 8, 128
    for name, sequences, start, count in (
        ("decode", 32, 4095, 1),
        ("prefill", 1, 0, 4096),
        ("decode 1", 1, 16_383, 1),
    ):
        pages_each = -(-(start + count) // BLOCK)
        steps = [
            StepSequence(
                str(i), start, [0] * count, [list(range(1 + i * pages_each, 1 + (i + 1) * pages_each))], 1
            )
            for i in range(sequences)
        ]
        layout = lay_out(steps, block_sizes=[BLOCK], device=torch.device("cuda"))
        shape = (sequences * pages_each + 1, BLOCK, kv_heads, size)
        pages = KVPages(*(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
        tokens = sequences * count
        q = torch.randn(tokens, heads, size, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(tokens, kv_heads, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        shown = []
        for backend in (TritonAttention(), PlainAttention(torch.bfloat16)):
            plan: Any = backend.plan(layout, 0, block_size=BLOCK, window=None)
            took = seconds(partial(backend.attend, q, k, v, pages, plan, scale=size**-0.5, softcap=None))
            if count == 1:
                part = 2 * sequences * (start + count) * kv_heads * size * 2 / took / bandwidth
                shown.append(f"{took * 1e6:.0f} us, {part:.0%} of memory")
            else:
                part = 4 * heads * size * count * (count + 1) / 2 / took / product
                shown.append(f"{took * 1e3:.2f} ms, {part:.0%} of the product")
        report.say(
            f"     attention, {name} ({sequences} x {start + count}): triton {shown[0]}; plain {shown[1]}"
        )


def measure_generate(report: Report, core: Any, runner: Any, bandwidth: float, name: str) -> None:
    """Generate throughput of 32 concurrent requests, and what a step takes beside what its weights alone would."""
    weights = sum(p.numel() * p.element_size() for p in runner.loaded.model.parameters())
    run(core, random_prompts(32, 64, seed=0), 4)  # compiles the kernels, records the graphs
    prompts = random_prompts(32, 512, seed=1)
    run(core, prompts, 1)
    took, _ = run(core, prompts, 65)
    per_step = took / 65
    report.say(
        f"     generate, 1B Llama in bfloat16, 32 requests, {name}: {32 * 65 / took:.0f} tokens/s, "
        f"a step {per_step * 1e3:.1f} ms, its weights alone {weights / bandwidth * 1e3:.1f} ms at the memory's speed"
    )


def measure_engine(report: Report, bandwidth: float) -> None:
    """Generate throughput and the time to the first token with 0, 50 and 95 % of the prompt cached."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), hidden=2048, layers=16, heads=32, kv_heads=8, inner=5632)
        options: dict[str, Any] = {"num_blocks": 8192, "dtype": "bfloat16", "device": "cuda"}
        core, runner = engine(Path(folder), **options, graphs="off")
        measure_generate(report, core, runner, bandwidth, "without graphs")
        del core, runner
        torch.cuda.empty_cache()
        core, runner = engine(Path(folder), **options, graphs="cuda")
    measure_generate(report, core, runner, bandwidth, "with CUDA graphs")
    length = 8192
    for share in (0.0, 0.5, 0.95):
        times = []
        for seed in range(3):
            first, other = random_prompts(2, length, seed=50 + seed + int(share * 1000))
            cached = int(share * length) // BLOCK * BLOCK
            if cached:
                run(core, [first], 1)
            times.append(run(core, [first[:cached] + other[cached:]], 1)[0])
        report.say(
            f"     first token of {length} with {share:.0%} cached: {statistics.median(times) * 1e3:.1f} ms"
        )


def commit() -> str:
    """Return the commit that is checked out, or "unknown"."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run all checks; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=60, help="random steps for the kernels")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    try:
        import torch
        import transformers
        import triton
    except ImportError as error:
        print(f"the GPU check needs torch, transformers and triton: {error}", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was checked", file=sys.stderr)
        return 3
    transformers.utils.logging.disable_progress_bar()
    report = Report()
    started = time.perf_counter()
    report.say(
        f"{datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}, {torch.cuda.get_device_name()}, "
        f"commit {commit()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"transformers {transformers.__version__}"
    )
    with torch.inference_mode():
        check_kernels(report, args.cases)
        check_tokens(report)
        check_page_moves(report)
        bandwidth, product = measure_ceilings(report)
        measure_attention(report, bandwidth, product)
        measure_engine(report, bandwidth)
    report.say(f"{'FAILED' if report.failed else 'all checks hold'}, {time.perf_counter() - started:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
