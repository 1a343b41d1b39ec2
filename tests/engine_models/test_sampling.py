"""Tokens are drawn by vLLM's rules, and a draw depends on seed and position alone; stop strings end a text once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ref.ngram import NgramDrafter
from engine_ref.request import RequestStatus
from engine_ref.sampling import SamplingParams, TextStream, draw_uniform
from kvhash import KvHashError

from .engine import make_engine
from .models import ModelShelf, prompts


class Letters:
    """A tokenizer of which every token is one byte of UTF-8."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text."""
        return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(max_size=30), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3), st.integers(1, 4))
def test_text_grows_to_the_whole_and_stops_at_the_first_stop_string(
    text: str, stop: list[str], chunk: int
) -> None:
    """The pieces join to the text before the first stop string, and none is ever taken back."""
    stream = TextStream(Letters(), stop)
    data = list(text.encode())
    pieces = [stream.push(data[i : i + chunk]) for i in range(0, len(data), chunk)]
    pieces.append(stream.finish())
    shown = "".join(pieces)
    assert shown == stream.text
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert shown == text
        assert not stream.stopped
    else:
        assert stream.stopped
        assert text.startswith(shown + (stream.stop_string or ""))
        assert len(shown) + len(stream.stop_string or "") == min(ends)


def test_incomplete_characters_are_held_back() -> None:
    """A character of three bytes comes when its last byte has come."""
    stream = TextStream(Letters())
    first, second, third = "€".encode()
    assert [stream.push([token]) for token in (first, second, third)] == ["", "", "€"]


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"temperature": -0.1}, "$.temperature"),
        ({"temperature": "hot"}, "$.temperature"),
        ({"top_p": 0.0}, "$.top_p"),
        ({"top_k": -2}, "$.top_k"),
        ({"min_p": 1.5}, "$.min_p"),
        ({"seed": 1.5}, "$.seed"),
        ({"logprobs": -1}, "$.logprobs"),
        ({"stop": ("",)}, "$.stop"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], at: str) -> None:
    """The error says where."""
    with pytest.raises(KvHashError) as caught:
        SamplingParams(**options)
    assert caught.value.at == at


def test_draws_are_spread_and_repeat() -> None:
    """The same seed and position give the same number; over positions they fill [0, 1) evenly."""
    numbers = [draw_uniform(7, position) for position in range(2000)]
    assert numbers == [draw_uniform(7, position) for position in range(2000)]
    counts = [sum(1 for n in numbers if i / 10 <= n < (i + 1) / 10) for i in range(10)]
    assert min(counts) > 150
    assert max(counts) < 250


def test_drafts_are_what_followed_the_last_ngram() -> None:
    """The longest n-gram wins, its first occurrence is taken, and none gives no draft."""
    drafter = NgramDrafter(3, prompt_lookup_min=2, prompt_lookup_max=3)
    assert drafter.propose([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]
    assert drafter.propose([7, 2, 3, 8, 1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2]
    assert drafter.propose([1, 2, 3, 4]) == []
    assert drafter.propose([5, 5]) == []
    assert drafter.propose([5, 5, 5]) == [5]


@pytest.mark.torch
def test_filters_follow_their_definitions() -> None:
    """min-p, top-k and top-p keep the tokens that their definitions keep."""
    import torch

    from engine_ref.torch_runner.sampler import filtered_probabilities

    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = probabilities.log()

    def kept(**options: Any) -> list[int]:
        found = filtered_probabilities(logits, SamplingParams(**options))
        return [int(i) for i in found.nonzero().flatten()]

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(min_p=0.3) == [0, 1, 2]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.4) == [0]
    assert kept(top_p=0.41) == [0, 1]
    assert kept(top_k=3, top_p=0.8) == [0, 1]  # of what top-k left, 0.7/0.85 is past 0.8
    assert kept(temperature=100.0, min_p=0.9) == [0, 1, 2, 3, 4]
    halved = filtered_probabilities(logits, SamplingParams(temperature=0.5))
    assert torch.allclose(halved.float(), (probabilities**2) / (probabilities**2).sum(), atol=1e-6)


@pytest.mark.torch
def test_draws_follow_the_distribution() -> None:
    """Over many positions tokens come as often as their probabilities say."""
    import torch

    from engine_ref.request import Request
    from engine_ref.torch_runner.sampler import choose_tokens

    from .engine import HASHER

    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    request = Request("r", [1], hasher=HASHER, sampling=SamplingParams(seed=3))
    count = 3000
    tokens = choose_tokens(probabilities.log().expand(count, 4), [(request, i) for i in range(count)])
    for token, probability in enumerate(probabilities.tolist()):
        assert abs(tokens.count(token) / count - probability) < 0.03
    assert 1 not in tokens


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.01, seed=11)


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [
        {"enable_caching": False},
        {"budget": 19},
        {"num_blocks": 44, "budget": 64},
        {"drafts": 3},
        {"async_scheduling": True, "drafts": 2},
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_in_every_mode(shelf: ModelShelf, options: dict[str, Any]) -> None:
    """Batch, cache, preemption and drafts do not change what a seed draws."""
    asked = prompts(12, seed=2)
    right = make_engine(shelf.folder("qwen3")).outputs(asked, sampling=SAMPLED)
    got = make_engine(shelf.folder("qwen3"), **options).outputs(asked, sampling=SAMPLED)
    assert got == right
    greedy = make_engine(shelf.folder("qwen3")).outputs(asked)
    assert got != greedy


@pytest.mark.torch
def test_without_a_seed_requests_differ(shelf: ModelShelf) -> None:
    """Equal prompts without seeds go apart."""
    outputs = make_engine(shelf.folder("qwen3")).outputs([(1, 2, 3)] * 4, sampling=SamplingParams())
    assert len({tuple(tokens) for tokens in outputs}) > 1


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"budget": 9}, {"drafts": 3}, {"async_scheduling": True}], ids=str)
def test_logprobs_are_of_the_plain_forward(shelf: ModelShelf, options: dict[str, Any]) -> None:
    """Each token's log-probability and rank, prompt and output, are those of one forward; nothing is hit."""
    import torch

    engine = make_engine(shelf.folder("llama"), **options)
    sampling = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
    prompt = prompts(1, seed=5)[0] + (3, 4, 5, 3, 4, 5, 3, 4)
    for name in ("first", "second"):  # the second could hit
        request = engine.request(name, prompt, sampling=sampling, max_tokens=8)
        engine.run(request)
    assert request.num_cached_tokens == 0
    with torch.inference_mode():
        logits = shelf.reference("llama")(torch.tensor([request.all_token_ids])).logits[0]
    logprobs = logits.log_softmax(dim=-1)
    assert sorted(request.logprobs) == list(range(1, request.num_tokens))
    for position, report in request.logprobs.items():
        row = logprobs[position - 1]
        token = request.all_token_ids[position]
        assert report.token_id == token
        assert report.logprob == pytest.approx(float(row[token]), abs=1e-3)
        count = 3 if position >= len(prompt) else 2
        assert list(report.top) == row.topk(count).indices.tolist()
        assert report.rank == int((row > row[token]).sum()) + 1
    outputs = [request.logprobs[i] for i in range(len(prompt), request.num_tokens)]
    assert all(report.rank == 1 for report in outputs)


@pytest.mark.torch
def test_stop_ids_end_a_request_and_min_tokens_delays_them(shelf: ModelShelf) -> None:
    """The stop token is the last one, and it is not chosen before `min_tokens`."""
    engine = make_engine(shelf.folder("llama"))
    prompt = prompts(1, seed=3)[0]
    free = shelf.generated("llama", prompt, 12)
    stop = free[3]
    first = free.index(stop)
    request = engine.request("a", prompt, stop_token_ids=[stop])
    engine.run(request)
    assert request.output_token_ids == free[: first + 1]
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, stop)
    later = engine.request("b", prompt, stop_token_ids=[stop], min_tokens=9)
    engine.run(later)
    assert stop not in later.output_token_ids[:9]


@pytest.mark.torch
def test_stop_strings_over_a_real_tokenizer(tokenizer_folder: Path) -> None:
    """A text cut at a stop string is the decoded text up to there."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    text = "The quick brown fox jumps over the lazy dog. A router — €uro."
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, ["lazy"])
    shown = "".join(stream.push([token]) for token in ids)
    assert shown == "The quick brown fox jumps over the "
    whole = TextStream(tokenizer)
    assert "".join(whole.push([token]) for token in ids) + whole.finish() == tokenizer.decode(ids)
