"""What is said of a request that is over: metrics, the decision log, and engines that count other tokens."""

from __future__ import annotations

import logging
import time
from typing import Any

from .decision import Decision, Scored
from .decision_log import DecisionLog, prompt_json
from .doubts import Predictions
from .exchange import Exchange
from .metrics import RouterMetrics
from .prompts import Plan
from .router import Survey
from .usage import cached_tokens, count

__all__ = ["Accounts"]

_log = logging.getLogger(__name__)


class Accounts:
    """Takes every request when it is over."""

    def __init__(self, metrics: RouterMetrics, log: DecisionLog | None) -> None:
        self._metrics = metrics
        self._log = log
        self._told: set[str] = set()
        self._predictions = Predictions()
        if log is not None:
            log.on_drop = metrics.log_dropped.inc

    def take(self, exchange: Exchange) -> None:
        """Count and log one request."""
        decision, survey = exchange.decision, exchange.survey
        engine = "" if decision is None else decision.engine
        self._metrics.requests.labels(engine, exchange.outcome).inc()
        if decision is None or survey is None:
            return
        if exchange.first_byte_s is not None and exchange.outcome == "ok":
            self._metrics.first_byte.labels(engine).observe(exchange.first_byte_s)
        self._metrics.prompt_tokens.labels(engine).inc(survey.plan.prompt_tokens)
        self._metrics.predicted_tokens.labels(engine).inc(decision.chosen.candidate.matched_tokens)
        usage = exchange.usage or {}
        cached, counted = cached_tokens(usage), count(usage.get("prompt_tokens"))
        if survey.plan.prompts and counted is not None and counted != survey.plan.prompt_tokens:
            self._say_other_prompt(survey.plan, engine, counted)
        predicted = decision.chosen.candidate.matched_tokens
        doubt = self._predictions.saw(engine, predicted=predicted, reported=cached)
        if doubt is not None:
            _log.warning("%s", doubt)
        if cached:
            self._metrics.cached_tokens.labels(engine).inc(cached)
        if self._log is not None:
            self._log.write(self._record(exchange, survey, decision, cached, counted))

    def _say_other_prompt(self, plan: Plan, engine: str, counted: int) -> None:
        """Say that an engine made other tokens of a prompt than were hashed: nothing of it can match there."""
        self._metrics.other_prompts.labels(engine).inc()
        if engine not in self._told:  # once: the log has it of each request
            self._told.add(engine)
            _log.warning(
                "engine %s counted %d prompt tokens where %d were hashed: its tokenizer, chat template or defaults are "
                "not those that model %r is configured with",
                engine,
                counted,
                plan.prompt_tokens,
                plan.model,
            )

    def _record(
        self,
        exchange: Exchange,
        survey: Survey,
        decision: Decision,
        cached: int | None,
        counted: int | None,
    ) -> dict[str, Any]:
        assert self._log is not None
        plan = survey.plan
        return {
            "v": 1,
            "id": exchange.request_id,
            "time": round(exchange.began_at, 3),
            "path": exchange.path,
            "model": plan.model,
            "adapter": plan.adapter,
            "engine": decision.engine,
            "basis": decision.basis.value,
            "prompt_tokens": plan.prompt_tokens,
            "matched_tokens": decision.chosen.candidate.matched_tokens,
            "cached_tokens": cached,
            "reported_prompt_tokens": counted,
            "unhashed": plan.unhashed,
            "outcome": exchange.outcome,
            "fault": exchange.fault,
            "status": exchange.status,
            "first_byte_s": None if exchange.first_byte_s is None else round(exchange.first_byte_s, 4),
            "total_s": round(time.monotonic() - exchange.began, 4),
            "attempts": exchange.attempts,
            "candidates": [_candidate_json(one, survey) for one in decision.scored],
            "prompts": [prompt_json(one, with_tokens=self._log.with_tokens) for one in plan.prompts],
        }


def _candidate_json(scored: Scored, survey: Survey) -> dict[str, Any]:
    candidate = scored.candidate
    known = survey.known.get(candidate.engine)
    return {
        "engine": candidate.engine,
        "matched_tokens": candidate.matched_tokens,
        "knowledge": candidate.knowledge.value,
        "reason": None if known is None else known.reason,
        "uncached_tokens": round(scored.uncached_tokens, 1),
        "queued_tokens": round(candidate.queued_tokens, 1),
        "recent_tokens": round(candidate.recent_tokens, 1),
        "tokens_per_second": round(candidate.speed, 1),
        "cost_s": round(scored.cost, 6),
    }
