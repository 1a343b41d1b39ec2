"""Random steps for the Triton kernels, each against the plain form; run as a program it prints one line a case.

Triton decides when it is imported whether it compiles or interprets, so the tests run this with TRITON_INTERPRET=1 in
a process of its own, and `tools/gpu_check.py` imports it to run the same cases on a device.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A step's shapes."""

    seed: int
    heads: int
    kv_heads: int
    size: int
    page: int
    window: int | None
    softcap: float | None
    splits: int
    dtype: str
    sequences: tuple[tuple[int, int], ...]  # (computed before, new tokens)


def cases(
    count: int, *, seed: int = 0, longest: int = 60, dtypes: tuple[str, ...] = ("float32",)
) -> Iterator[Case]:
    """Yield random cases: decodes, chunks after a prefix and fresh prompts mixed."""
    rng = random.Random(seed)
    for number in range(count):
        kv_heads = rng.choice([1, 2, 3])
        kind = number % 3  # only decodes, only prompts, both
        sequences = []
        for _ in range(rng.randrange(1, 5)):
            decode = kind == 0 or (kind == 2 and rng.random() < 0.5)
            before = rng.randrange(longest) if decode or rng.random() < 0.6 else 0
            sequences.append((before, rng.choice([1, 1, 3]) if decode else rng.randrange(1, longest // 2)))
        yield Case(
            seed=rng.randrange(1 << 30),
            heads=kv_heads * rng.choice([1, 2, 3, 4]),
            kv_heads=kv_heads,
            size=rng.choice([8, 16, 24, 64]),
            page=rng.choice([4, 16]),
            window=rng.choice([None, None, 7, 33]),
            softcap=rng.choice([None, None, 5.0]),
            splits=rng.choice([1, 2, 4]),
            dtype=rng.choice(dtypes),
            sequences=tuple(sequences),
        )


def difference(case: Case, *, device: str = "cpu", splits: int | None = 0) -> tuple[float, float]:
    """Return how far the kernels are from the plain form in float64: the largest output error, and that of pages.

    `splits`: 0 for the case's own, None to let the backend choose.
    """
    import torch

    from engine_ref.torch_runner.attention import PlainAttention
    from engine_ref.torch_runner.attention_triton import TritonAttention
    from engine_ref.torch_runner.layout import StepSequence, lay_out
    from engine_ref.torch_runner.pages import KVPages

    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    rng = random.Random(case.seed)
    tables = [-(-(start + count) // case.page) for start, count in case.sequences]
    ids = list(range(1, sum(tables) + 3))
    rng.shuffle(ids)
    steps = [
        StepSequence(str(i), start, [0] * count, [[ids.pop() for _ in range(tables[i])]], 1)
        for i, (start, count) in enumerate(case.sequences)
    ]
    where = torch.device(device)
    layout = lay_out(steps, block_sizes=[case.page], device=where)
    tokens = layout.offsets[-1]

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(dtype).to(where)

    blocks = sum(tables) + 4
    old = [draw(blocks, case.page, case.kv_heads, case.size) for _ in range(2)]
    q = draw(tokens, case.heads, case.size)
    k, v = (draw(tokens, case.kv_heads, case.size) for _ in range(2))

    def run(backend: Any, kind: Any) -> tuple[Any, Any]:
        pages = KVPages(*(part.clone().to(kind) for part in old))
        plan = backend.plan(layout, 0, block_size=case.page, window=case.window)
        inputs = [x.to(kind) for x in (q, k, v)]
        backend.write(inputs[1], inputs[2], pages, plan)
        options = {"scale": case.size**-0.5, "softcap": case.softcap}
        return backend.attend(*inputs, pages, plan, **options), pages

    right, right_pages = run(PlainAttention(torch.float64), torch.float64)
    backend = TritonAttention(splits=case.splits if splits == 0 else splits)
    got, pages = run(backend, dtype)
    assert got.shape == right.shape
    written = max(
        float((a.double() - b).abs().max()) for a, b in zip(pages.parts(), right_pages.parts(), strict=True)
    )
    return float((got.double() - right).abs().max()), written


def padded_difference(seed: int, *, device: str = "cpu", splits: int | None = 2) -> float:
    """Return how far decodes in a graph's padded buffers are from the plain form of the same step in float64."""
    import torch

    from engine_ref.torch_runner.attention import PlainAttention
    from engine_ref.torch_runner.attention_triton import TritonAttention
    from engine_ref.torch_runner.graphs import DecodeBuffers, DecodeGraphs, record_repeat
    from engine_ref.torch_runner.layout import StepSequence, lay_out
    from engine_ref.torch_runner.pages import KVPages

    rng, generator, where = random.Random(seed), torch.Generator().manual_seed(seed), torch.device(device)
    heads, kv_heads, size, page, window = 6, 2, 16, 4, rng.choice([None, 7])
    starts = [rng.randrange(1, 40) for _ in range(3)]
    ids = list(range(1, 40))
    rng.shuffle(ids)
    steps = [
        StepSequence(str(i), start, [0], [[ids.pop() for _ in range(start // page + 1)]], 1)
        for i, start in enumerate(starts)
    ]
    layout = lay_out(steps, block_sizes=[page], device=where)
    old = [torch.randn(42, page, kv_heads, size, generator=generator).to(where) for _ in range(2)]
    q = torch.randn(4, heads, size, generator=generator).to(where)
    k, v = (torch.randn(4, kv_heads, size, generator=generator).to(where) for _ in range(2))
    options: Any = {"scale": size**-0.5, "softcap": None}
    kind = torch.float64
    wide = KVPages(*(part.to(kind) for part in old))
    right = PlainAttention(kind)
    plan: Any = right.plan(layout, 0, block_size=page, window=window)
    inputs = [x[:3].to(kind) for x in (q, k, v)]
    right.write(inputs[1], inputs[2], wide, plan)
    wanted = right.attend(*inputs, wide, plan, **options)
    pages, backend = KVPages(*(part.clone() for part in old)), TritonAttention(splits=splits)

    def compute(buffers: DecodeBuffers) -> Any:
        plan = backend.plan_decodes(buffers, 0, block_size=page, window=window)
        backend.write(k, v, pages, plan)
        return backend.attend(q, k, v, pages, plan, **options)

    graphs = DecodeGraphs(
        compute, record_repeat, block_sizes=[page], pages=[10], padding=41, device=where, sizes=(4,)
    )
    found = graphs.run(layout)
    assert found is not None
    assert not torch.isnan(found).any()
    return float((found.double() - wanted).abs().max())


def main() -> None:
    """Run the cases of which the number and seed are given."""
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    for number in range(4):
        line = {
            "case": f"padded {number}",
            "dtype": "float32",
            "output": padded_difference(number),
            "pages": 0.0,
        }
        sys.stdout.write(json.dumps(line) + "\n")
    for case in cases(count, seed=seed, dtypes=("float32", "float32", "float16")):
        output, pages = difference(case)
        sys.stdout.write(
            json.dumps({"case": repr(case), "dtype": case.dtype, "output": output, "pages": pages}) + "\n"
        )


if __name__ == "__main__":
    main()
