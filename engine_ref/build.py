"""An engine of its options: the runner, the core, the publisher."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhash import KvHashError
from kvhash._errors import InvalidRequestError

from .connectors import make_connector
from .core import EngineCore
from .engine import Engine
from .options import EngineOptions
from .publisher import EventPublisher
from .report import StepReport
from .runner import ModelRunner, NullRunner

__all__ = ["freeze_heap", "has_weights", "make_engine", "make_runner"]

_log = logging.getLogger(__name__)


def freeze_heap() -> None:
    """Take what lives as long as the process out of garbage collection: a full one would delay steps by 20 ms."""
    gc.collect()
    gc.freeze()


def has_weights(model: str) -> bool:
    """Return whether `model` is a folder that has weights, or should have: an index names what may be missing."""
    folder = Path(model).expanduser()
    return any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file()


def make_engine(options: EngineOptions, deliver: Callable[[StepReport], None], *, rank: int = 0) -> Engine:
    """Return the engine of one rank, its sockets open and its threads not started. Raises KvHashErrors."""
    runner = make_runner(options)
    config = options.scheduler_config(getattr(runner, "groups", None))
    hasher = options.hasher()
    publisher: EventPublisher | None = None
    if options.kv_events_config.publishes:
        publisher = EventPublisher(options.kv_events_config, rank=rank, release=options.emulate_vllm)
    try:
        core = EngineCore(
            config,
            runner,
            publish=publisher.publish if publisher else lambda events: None,
            drafter=options.drafter(),
            connector=None
            if options.kv_transfer_config is None
            else make_connector(options.kv_transfer_config),
        )
    except KvHashError:
        if publisher:
            publisher.close(timeout=0)
        raise
    return Engine(
        core,
        hasher,
        deliver,
        rank=rank,
        publisher=publisher,
        validate=getattr(runner, "validate", lambda request: None),
    )


def make_runner(options: EngineOptions) -> ModelRunner:
    """Return what computes tokens: the model in the folder, or made-up ones. Raises KvHashErrors."""
    if options.load_format == "dummy" or not has_weights(options.model):
        return _null_runner(options, "no model is loaded")
    if importlib.util.find_spec("torch") is None:
        return _null_runner(options, "torch is not installed, so the model in the folder is not loaded")
    torch_runner: Any = importlib.import_module("engine_ref.torch_runner")
    runner: ModelRunner = torch_runner.TorchRunner.load(
        options.model,
        num_blocks=options.num_gpu_blocks,
        block_size=options.block_size,
        dtype=options.dtype,
        device=options.device,
        graphs="off" if options.enforce_eager else None,
        adapters=dict(options.adapters),
        drafter=options.drafter(),
    )
    return runner


def _null_runner(options: EngineOptions, why: str) -> ModelRunner:
    if options.async_scheduling and options.speculative_config is not None:
        raise InvalidRequestError(
            "without a model there are no drafts with async scheduling; leave one of them out"
        )
    _log.info("%s: tokens are made up, the same for the same prompt", why)
    # Pages are kept only for a connector, which moves them.
    cache = None if options.kv_transfer_config is None else options.scheduler_config().cache
    return NullRunner(vocab_size=options.info.vocab_size, cache=cache)
