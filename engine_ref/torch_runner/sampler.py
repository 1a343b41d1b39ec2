"""From logits to tokens: vLLM's rules in vLLM's order, and a draw that depends on seed and position alone.

Order: log-probabilities for the report, then tokens that may not come yet, temperature, min-p, top-k, top-p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..request import Request
from ..sampling import SamplingParams, TokenLogprobs, draw_uniform

__all__ = ["choose_tokens", "report_logprobs"]


def choose_tokens(logits: torch.Tensor, rows: Sequence[tuple[Request, int]]) -> list[int]:
    """Return a token for each row of `logits` (rows, vocabulary).

    `rows`: the request of each row and the position that its token will have.
    """
    logits = _forbid_early_stops(logits, rows)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for index, (request, position) in enumerate(rows):
        if not request.sampling.greedy:
            probabilities = filtered_probabilities(logits[index], request.sampling)
            tokens[index] = _draw(probabilities, draw_uniform(request.seed, position))
    return tokens


def filtered_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return what may be drawn, (vocabulary,), zero where a rule forbids a token; not normalised."""
    scaled = logits.double() / sampling.temperature
    probabilities = scaled.softmax(dim=-1)
    if sampling.min_p > 0.0:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0.0)
    if 0 < sampling.top_k < probabilities.numel():
        least = probabilities.topk(sampling.top_k).values[-1]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        ordered = ordered / ordered.sum()
        before = ordered.cumsum(dim=-1) - ordered
        probabilities = torch.zeros_like(probabilities).scatter(
            0, order, ordered.where(before < sampling.top_p, 0.0)
        )
    return probabilities


def report_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return what is reported of each token: `logits` (rows, vocabulary), `count` likeliest tokens beside it."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks: list[int] = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    values, indexes = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token, float(value), rank, dict(zip(ids, tops, strict=True)))
        for token, value, rank, ids, tops in zip(
            token_ids, chosen[:, 0].tolist(), ranks, indexes.tolist(), values.tolist(), strict=True
        )
    ]


def _forbid_early_stops(logits: torch.Tensor, rows: Sequence[tuple[Request, int]]) -> torch.Tensor:
    """Return logits without the tokens that would end a request before its `min_tokens`."""
    copied = False
    for index, (request, position) in enumerate(rows):
        if position - request.num_prompt_tokens >= request.min_tokens:
            continue
        stops = [*request.stop_token_ids, *([] if request.eos_token_id is None else [request.eos_token_id])]
        stops = [token for token in stops if 0 <= token < logits.shape[-1]]
        if stops:
            if not copied:
                logits, copied = logits.clone(), True
            logits[index, stops] = float("-inf")
    return logits


def _draw(probabilities: torch.Tensor, uniform: float) -> int:
    """Return the token at which the running sum of probabilities passes `uniform` of the total."""
    sums = probabilities.cumsum(dim=-1)
    found = int(torch.searchsorted(sums, sums[-1] * uniform, right=True))
    return min(found, int(probabilities.nonzero()[-1]))
