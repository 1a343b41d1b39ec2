"""A prefix-aware HTTP router for vLLM engines: exact block hashes, live KV events, load."""

from __future__ import annotations

from .config import AdapterConfig, ConfigError, EngineConfig, HashSettings, ModelConfig, RouterConfig
from .decision import Candidate, Decision, Policy, decide

__all__ = [
    "AdapterConfig",
    "Candidate",
    "ConfigError",
    "Decision",
    "EngineConfig",
    "HashSettings",
    "ModelConfig",
    "Policy",
    "RouterConfig",
    "decide",
]
