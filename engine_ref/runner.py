"""What computes tokens: one small interface, and runners that need no model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from .request import Request
from .scheduler import StepPlan

__all__ = ["ModelRunner", "NullRunner", "ScriptedRunner"]


class ModelRunner(Protocol):
    """Runs one planned step.

    Returns for each request of the plan that samples its accepted drafts and one token more.
    """

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Run `plan`; `requests` are those that lived when it was planned, by id.

        What has ended since is computed nevertheless (its blocks can be hit already); its tokens are not needed. A
        request that cannot be computed gets an ``error`` and no tokens; the others go on.
        """
        ...


class NullRunner:
    """Makes tokens from the request's own: the same tokens always go on in the same way, wherever they run."""

    def __init__(self, *, vocab_size: int = 32000) -> None:
        self.vocab_size = vocab_size

    def next_token(self, token_ids: Sequence[int], count: int) -> int:
        """Return the token after `count` tokens, the last of which are `token_ids`; the last 8 matter."""
        text = repr((count, list(token_ids[-8:])))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % self.vocab_size

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Accept the drafts that are what would have been made."""
        sampled: dict[str, list[int]] = {}
        for request_id in _sampling(plan, requests):
            known = requests[request_id].all_token_ids
            new: list[int] = []
            for draft in [*plan.spec_token_ids.get(request_id, ()), None]:
                new.append(self.next_token([*known[-8:], *new], len(known) + len(new)))
                if new[-1] != draft:
                    break
            sampled[request_id] = new
        return sampled


class ScriptedRunner:
    """Gives each request the output that was written down for it."""

    def __init__(self, outputs: Mapping[str, Sequence[int]]) -> None:
        self.outputs = dict(outputs)

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Accept the drafts that are in the script."""
        sampled: dict[str, list[int]] = {}
        for request_id in _sampling(plan, requests):
            script = self.outputs[request_id][requests[request_id].num_output_tokens :]
            accepted = 0
            for draft in plan.spec_token_ids.get(request_id, ()):
                if draft != script[accepted]:
                    break
                accepted += 1
            sampled[request_id] = list(script[: accepted + 1])
        return sampled


def _sampling(plan: StepPlan, requests: Mapping[str, Request]) -> list[str]:
    """Return the requests that get a token and have not ended since the step was planned."""
    return [
        request_id
        for request_id, samples in plan.samples.items()
        if samples and request_id in requests and not requests[request_id].status.is_finished
    ]
