"""The one interface between the engine and whatever keeps KV outside its pool, in vLLM's terms.

The engine calls a connector from its own thread only. Around one step:

1. planning: `get_num_new_matched_tokens` after the local hit, `update_state_after_alloc` once the blocks are there;
2. `build_connector_meta`: what the planned step must have loaded travels with the plan;
3. running: `start_load_kv` in the order of the plans, `get_finished`, then the model;
4. after the step: `save_kv` for each request that ran, `request_finished` for each that ended, before its blocks go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..block import Block
from ..cache_manager import CacheManager
from ..events import KVEvent
from ..request import Request

if TYPE_CHECKING:  # the runner's module knows plans, and plans are made with connectors
    from ..runner import PagedRunner

__all__ = ["ConnectorOutput", "KVConnector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOutput:
    """What has happened since the last `get_finished`.

    ``finished_recving``: requests whose asynchronous load is over, well or not. ``failed_loads``: for each request
    whose load, synchronous or not, left something out, the first token whose KV is not there.
    ``finished_sending``: ended requests whose blocks the connector does not need any more.
    """

    finished_recving: Sequence[str] = ()
    failed_loads: Mapping[str, int] = field(default_factory=dict)
    finished_sending: Sequence[str] = ()


class KVConnector(ABC):
    """Keeps KV of finished prefixes elsewhere and brings it back.

    `bind` comes once, before all else. A method that is not abstract has the answer of a connector that has nothing
    to say. What takes long belongs on a thread of the connector's own; `read_page` and `write_page` belong on the
    engine's, inside the calls of steps 3 and 4 above.
    """

    #: What becomes of a request whose load failed: ``"recompute"`` or ``"fail"``.
    kv_load_failure_policy: str = "recompute"

    @abstractmethod
    def bind(self, runner: PagedRunner, cache: CacheManager) -> None:
        """Take the runner, whose pages are loaded and saved, and the cache, which knows groups and tables."""

    # ---- planning

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens after the first `num_computed_tokens` can be loaded, and whether asynchronously.

        `num_computed_tokens` is the local hit and a multiple of the scheduler's block size; the sum must be one too
        and leave a token to compute. None: not known yet, ask again in the next step; the request waits.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: tuple[list[Block], ...], num_external_tokens: int
    ) -> None:
        """Hear that a request was given blocks, and how many tokens are to be loaded (0: none)."""

    @abstractmethod
    def build_connector_meta(self) -> Any:
        """Return what must be loaded for what was planned since the last call; None for nothing."""

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[str, int]:
        """Return the tokens of the load just allocated by where they are: ``host``, ``disk``, ``external_unspecified``.

        They add up to `num_external_tokens`.
        """
        del request
        return {"external_unspecified": num_external_tokens} if num_external_tokens else {}

    # ---- running

    @abstractmethod
    def start_load_kv(self, meta: Any) -> None:
        """Begin the loads of a plan; synchronous ones are in the pages when this returns, or failed."""

    @abstractmethod
    def get_finished(self) -> ConnectorOutput:
        """Return what is over; writes the pages of asynchronous loads whose content has come."""

    def cancel_load(self, request_id: str) -> bool:
        """Give up an asynchronous load; True: nothing will be written any more, so its blocks can be reused.

        False: the blocks are kept until `get_finished` reports the request in `finished_recving`.
        """
        del request_id
        return False

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until `get_finished` or `get_num_new_matched_tokens` has something new."""
        del timeout

    # ---- after the step

    @abstractmethod
    def save_kv(self, request: Request, blocks: tuple[list[Block], ...], num_tokens: int) -> None:
        """Save what is new of a request whose first `num_tokens` tokens are computed; its pages can be read now."""

    def request_finished(self, request: Request, blocks: tuple[list[Block], ...], num_tokens: int) -> bool:
        """Hear that a request ended, before its blocks are freed; `num_tokens` of it are computed.

        True: keep the blocks until `get_finished` reports the request in `finished_sending`.
        """
        del request, blocks, num_tokens
        return False

    # ---- the rest

    def take_events(self) -> list[KVEvent]:
        """Return the KV events since the last call; they go out with those of the pool."""
        return []

    def reset_cache(self) -> bool:
        """Forget all that is kept; False if it could not be done."""
        return True

    def get_stats(self) -> dict[str, dict[str, int]]:
        """Return counters since the start, by the name of the part (a tier, say) that they belong to."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Finish what is being saved, within a bounded time, and stop."""
