"""Async scheduling: a step is planned before the tokens of the one before it are known.

Its tokens are placeholders until then; a block that they fill gets its hash when the real tokens are in.
"""

from __future__ import annotations

from .plan import StepPlan
from .scheduler import Scheduler

__all__ = ["AsyncScheduler"]


class AsyncScheduler(Scheduler):
    """Plans ahead with placeholders for the output tokens that are still being computed."""

    def _after_schedule(self, plan: StepPlan) -> None:
        super()._after_schedule(plan)
        for request_id, samples in plan.samples.items():
            if samples:
                request = self.requests[request_id]
                request.num_output_placeholders += 1 + len(plan.spec_token_ids.get(request_id, ()))
                request.spec_token_ids = [-1] * self.config.num_speculative_tokens
