"""One engine of one data-parallel rank: core, step thread, input thread and event publisher.

Requests are hashed on the input thread, in the order in which they came, so that a long prompt delays no running step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvhash import BlockHasher, KvHashError, backend

from .core import EngineCore
from .loop import EngineLoop
from .patient import PatientHasher
from .publisher import EventPublisher
from .report import EngineRequest, StepReport
from .request import Request
from .sampling import GREEDY, SamplingParams

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


class Engine:
    """Runs one core. `deliver` gets its reports, from the engine's threads, and may keep these waiting.

    `validate` raises what is wrong with a request for the model, KvHashErrors; it runs on the input thread.
    """

    def __init__(
        self,
        core: EngineCore,
        hasher: BlockHasher,
        deliver: Callable[[StepReport], None],
        *,
        rank: int = 0,
        publisher: EventPublisher | None = None,
        validate: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._hasher: Any = hasher
        if backend() == "python":
            self._hasher = PatientHasher(hasher, lambda: core.has_work)
        self._validate = validate
        self._publisher = publisher
        self._loop = EngineLoop(core, deliver, rank=rank)
        self._inputs: queue.SimpleQueue[EngineRequest | str | None] = queue.SimpleQueue()
        self._input_thread = threading.Thread(
            target=self._take_inputs, name=f"engine-input-{rank}", daemon=True
        )

    def wait_ready(self) -> None:
        """Return at once: the sockets were opened with the engine."""

    def start(self) -> None:
        """Start the threads."""
        self._loop.start()
        self._input_thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._loop.alive

    @property
    def endpoints(self) -> tuple[str | None, str | None]:
        """Where events and replays are published, if they are."""
        return (
            (None, None)
            if self._publisher is None
            else (self._publisher.endpoint, self._publisher.replay_endpoint)
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request; one that cannot be hashed gets an output with an error."""
        self._inputs.put(request)

    def abort(self, request_id: str) -> None:
        """End a request, queued, waiting or running."""
        self._inputs.put(request_id)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Future[bool]:
        """Reset between two steps; the future holds whether it was done."""
        return self._loop.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_external=reset_external
        )

    def close(self, *, timeout: float = 10.0) -> bool:
        """Abort what still runs, publish every queued event and stop; returns whether all of it was done in time."""
        done = True
        if self._input_thread.is_alive():
            self._inputs.put(None)
            self._input_thread.join(timeout)
            done = self._loop.close(timeout=timeout)
        left = self._publisher.close(timeout=timeout) if self._publisher else 0
        return done and not left

    def _take_inputs(self) -> None:
        while (item := self._inputs.get()) is not None:
            if isinstance(item, str):
                self._loop.abort(item)
                continue
            try:
                request = self._make(item)
            except KvHashError as error:
                self._refuse(item.request_id, str(error))
            except Exception:
                _log.exception("request %s cannot be made", item.request_id)
                self._refuse(item.request_id, "the request cannot be made")
            else:
                self._loop.submit(request)

    def _make(self, item: EngineRequest) -> Request:
        request = Request(
            item.request_id,
            item.prompt_token_ids,
            hasher=self._hasher,
            max_tokens=item.max_tokens,
            min_tokens=item.min_tokens,
            eos_token_id=item.eos_token_id,
            stop_token_ids=item.stop_token_ids,
            lora=item.lora,
            cache_salt=item.cache_salt,
            multimodal=item.multimodal,
            prompt_embeds=item.prompt_embeds,
            priority=item.priority,
            arrival_time=item.arrival_time,
            skip_reading_prefix_cache=item.skip_reading_prefix_cache,
            sampling=GREEDY if item.sampling is None else SamplingParams(**item.sampling),
        )
        self._validate(request)
        return request

    def _refuse(self, request_id: str, message: str) -> None:
        self._loop.refuse(request_id, message)
