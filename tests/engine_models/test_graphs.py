"""Decodes in padded, fixed buffers, and a compiled model, give the tokens that they gave before.

Nothing here needs a GPU: a stand-in for the graph calls the recorded function again, so that padding, buffers and the
choice of size are those of CUDA. That the graphs themselves work is for `make gpu-check` to show.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from kvhash import KvHashError

from .engine import make_engine
from .models import ModelShelf, prompts

pytestmark = pytest.mark.torch

COUNT = 12
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked-preempted": {"budget": 21, "num_blocks": 44, "watermark": 0.0},
    "async": {"async_scheduling": True, "max_num_seqs": 5},
    "drafts": {"drafts": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_padded_decodes_give_generates_tokens(shelf: ModelShelf, name: str, mode: str) -> None:
    """Steps of decodes go through the buffers, other steps do not; the null block is not written."""
    options = MODES[mode]
    if name == "mistral" and "num_blocks" in options:
        options = {**options, "num_blocks": 22}
    engine = make_engine(shelf.folder(name), runner_options={"graphs": "repeat"}, **options)
    asked = prompts()
    assert engine.outputs(asked, max_tokens=COUNT) == [shelf.generated(name, p, COUNT) for p in asked]
    assert engine.runner.forward.graphs.replays > 5 or mode == "drafts"
    for layer in engine.runner.cache.layers.values():
        assert not any(part[0].any() for part in layer.parts())


def test_a_step_is_padded_to_the_next_size(shelf: ModelShelf) -> None:
    """Three decodes use the graph of four; more than the largest, or a chunk among them, use none."""
    import torch

    from engine_ref.torch_runner.graphs import DecodeGraphs, record_repeat
    from engine_ref.torch_runner.layout import StepSequence, lay_out

    seen = []

    def compute(buffers: Any) -> Any:
        seen.append((buffers.size, buffers.numbers.clone(), [table.clone() for table in buffers.tables]))
        return buffers.token_ids[:, None].float()

    graphs = DecodeGraphs(
        compute,
        record_repeat,
        block_sizes=[4],
        pages=[6],
        padding=9,
        device=torch.device("cpu"),
        sizes=(4, 2, 1),
    )

    def step(*spans: tuple[int, int], rows: int = 1) -> Any:
        sequences = [
            StepSequence(str(i), start, [10 + i] * count, [[i + 1] * (-(-(start + count) // 4))], rows)
            for i, (start, count) in enumerate(spans)
        ]
        return lay_out(sequences, block_sizes=[4], device=torch.device("cpu"))

    assert graphs.run(step((20, 1), (7, 1), (3, 1))).tolist() == [[12.0], [11.0], [10.0]]
    size, numbers, tables = seen[-1]
    assert size == 4
    assert numbers.tolist() == [[12, 11, 10, 0], [3, 7, 20, 0], [3 * 4 + 3, 2 * 4 + 3, 1 * 4, 9 * 4]]
    assert tables[0].tolist() == [[3, 0, 0, 0, 0, 0], [2, 2, 0, 0, 0, 0], [1] * 6, [9, 0, 0, 0, 0, 0]]
    assert graphs.run(step((1, 1), (2, 1), (5, 1), (6, 1))) is not None
    # A smaller step after a larger one finds nothing of it.
    graphs.run(step((4, 1), (5, 1), (6, 1)))
    assert seen[-1][2][0].tolist() == [
        [1, 1, 0, 0, 0, 0],
        [2, 2, 0, 0, 0, 0],
        [3, 3, 0, 0, 0, 0],
        [9, 0, 0, 0, 0, 0],
    ]
    before = len(seen)
    for other in (
        step((1, 1), (2, 1), (3, 1), (4, 1), (5, 1)),  # too many
        step((3, 1), (4, 2)),  # a chunk
        step((0, 1)),  # a prompt of one token
        step((3, 1), rows=0),  # no logits
        step((24, 1)),  # longer than the tables
    ):
        assert graphs.run(other) is None
    assert len(seen) == before
    assert graphs.replays == 3


def test_a_graph_that_cannot_be_recorded_is_done_without(
    shelf: ModelShelf, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, no error, and the right tokens."""
    engine = make_engine(shelf.folder("llama"), runner_options={"graphs": "repeat"})

    def fail(_: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.runner.forward.graphs._record = fail
    asked = prompts(6)
    with caplog.at_level(logging.WARNING):
        assert engine.outputs(asked) == [shelf.generated("llama", p, 12) for p in asked]
    assert [r.message.count("without CUDA graphs") for r in caplog.records] == [1]


@pytest.mark.parametrize(("name", "graphs"), [("llama", None), ("gemma3", "repeat"), ("qwen3_5", None)])
def test_a_compiled_model_gives_generates_tokens(shelf: ModelShelf, name: str, graphs: str | None) -> None:
    """`torch.compile`, whose eager backend traces and does not compile, leaves pages and states outside."""
    engine = make_engine(shelf.folder(name), runner_options={"compile_backend": "eager", "graphs": graphs})
    asked = prompts(5)
    assert engine.outputs(asked, max_tokens=4) == [shelf.generated(name, p, 4) for p in asked]


def test_graphs_of_recurrent_states_are_refused(shelf: ModelShelf) -> None:
    """They are not computed in graphs, and by default not asked to be."""
    with pytest.raises(KvHashError, match="recurrent"):
        make_engine(shelf.folder("qwen3_5"), runner_options={"graphs": "repeat"})


def test_graphs_are_off_without_the_kernels(shelf: ModelShelf) -> None:
    """On the CPU there are none by default, and asking for them is refused."""
    assert make_engine(shelf.folder("llama")).runner.forward.graphs is None
    for wanted, words in (("cuda", "Triton"), ("yes", "cuda, repeat or off")):
        with pytest.raises(KvHashError, match=words):
            make_engine(shelf.folder("llama"), runner_options={"graphs": wanted})


class Streams:
    """A side stream that notes what it is asked."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.marks = 0

    def moving(self) -> AbstractContextManager[Any]:
        """Note that moves begin."""

        @contextmanager
        def noted() -> Iterator[None]:
            self.done.append("move")
            yield

        return noted()

    def mark(self) -> int:
        """Return a number."""
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> None:
        """Note for what the host waits."""
        self.done.append(f"wait {mark}")

    def join(self) -> None:
        """Note that the model is ordered behind the moves."""
        self.done.append("join")


def test_the_model_waits_for_pages_that_are_on_their_way(
    shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes are begun one after the other; the next step, and only that, is ordered behind them."""
    from engine_ref.torch_runner.page_moves import PageMover

    engine = make_engine(shelf.folder("llama"))
    streams = Streams()
    moves = PageMover(engine.runner.loaded.device, streams)
    engine.runner.cache.moves = moves
    page = bytes(range(256)) * (engine.runner.cache.page_size(0) // 256)
    for block_id in range(1, 4):
        engine.runner.write_page(0, block_id, page)
    assert streams.done == ["move"] * 3
    forward = engine.runner.forward.logits

    def logits(*args: Any, **options: Any) -> Any:
        streams.done.append("model")
        return forward(*args, **options)

    monkeypatch.setattr(engine.runner.forward, "logits", logits)
    engine.outputs([(1, 2, 3)], max_tokens=2)
    assert streams.done == ["move"] * 3 + ["join", "model", "model"]


def test_memory_of_a_page_on_its_way_is_not_used_again() -> None:
    """The host waits for the oldest of 16 writes before it fills that one's memory with another page."""
    import torch

    from engine_ref.torch_runner.page_moves import PageMover

    streams = Streams()
    moves = PageMover(torch.device("cpu"), streams)
    parts = [torch.zeros(40, 3, dtype=torch.bfloat16), torch.zeros(40, 2, dtype=torch.float32)]
    pages = [bytes([i, 0x3F] * 3 + [0, 0, i, 0x40] * 2) for i in range(40)]
    for block_id, page in enumerate(pages):
        moves.write(parts, block_id, page)
    assert [line for line in streams.done if line != "move"] == [f"wait {i}" for i in range(1, 25)]
    assert [moves.read(parts, block_id) for block_id in range(40)] == pages
