"""The scheduler: which requests run in the next step, on how many tokens, in which blocks."""

from __future__ import annotations

from ..connectors.base import KVConnector
from .async_scheduler import AsyncScheduler
from .plan import CachedRequest, NewRequest, SchedulerConfig, StepPlan
from .scheduler import Scheduler

__all__ = [
    "AsyncScheduler",
    "CachedRequest",
    "NewRequest",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "make_scheduler",
]


def make_scheduler(config: SchedulerConfig, connector: KVConnector | None = None) -> Scheduler:
    """Return the scheduler that `config` asks for."""
    return (AsyncScheduler if config.async_scheduling else Scheduler)(config, connector)
