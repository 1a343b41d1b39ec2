"""What is wrong with an event stream, in order, and what to do: the checks behind ``kvevents doctor``.

The doctor is fed what a subscriber sees, then asked for its findings. It opens no socket itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvhash._errors import InvalidRequestError, KvHashError
from kvhash.contract import ALGORITHMS, Contract
from kvhash.identify import DEFAULT_SEEDS, Identification, Match, identify
from kvhash.request import HashRequest

from .schema import BlockStored, EventBatch
from .stats import PublisherStats, StreamStats
from .wire_range import WireRange

__all__ = ["Doctor", "Expectation", "Finding", "HttpProbe"]

Level = Literal["ok", "note", "warning", "problem"]

#: Stored events that are kept for recomputation.
_SAMPLES = 16
_LAG_S = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found: how bad, a stable code, what was seen, and what to do about it."""

    level: Level
    code: str
    seen: str
    advice: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {"level": self.level, "code": self.code, "seen": self.seen, "advice": self.advice}


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """What the engine's HTTP endpoint said: whether it answered, its version and models, and cache metrics."""

    reachable: bool
    detail: str = ""
    version: str | None = None
    models: tuple[str, ...] = ()
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A router's settings, to hold the stream against. What is None is not compared."""

    vllm: str | None = None
    algorithm: str | None = None
    hash_seed: str | None = None
    hash_seed_given: bool = False
    block_size: int | None = None
    hash_form: Literal["int", "bytes"] | None = None
    ranks: tuple[int, ...] | None = None
    lora_paths: Mapping[str, str] = field(default_factory=dict)

    _FIELDS = ("vllm", "algorithm", "hash_seed", "block_size", "hash_form", "ranks", "lora_paths")

    @classmethod
    def of(cls, value: object) -> Expectation:
        """Read a router's settings from a JSON object; raises InvalidRequestError for an unknown or wrong field."""
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"expected an object of settings, got {type(value).__name__}", at="$")
        for name in value:
            if name not in cls._FIELDS:
                raise InvalidRequestError(
                    f"unknown setting {name!r}; expected one of: {', '.join(cls._FIELDS)}", at="$"
                )
        checks: dict[str, Any] = {
            "vllm": str, "algorithm": str, "hash_seed": (str, type(None)), "block_size": int,
            "hash_form": str, "ranks": list, "lora_paths": Mapping,
        }  # fmt: skip
        for name, item in value.items():
            if not isinstance(item, checks[name]) or isinstance(item, bool):
                raise InvalidRequestError(f"wrong type: {type(item).__name__}", at=f"$.{name}")
        if value.get("hash_form", "int") not in ("int", "bytes"):
            raise InvalidRequestError("expected 'int' or 'bytes'", at="$.hash_form")
        if "vllm" in value:
            Contract.for_vllm(value["vllm"])
        if "algorithm" in value and value["algorithm"] not in ALGORITHMS:
            raise InvalidRequestError(f"expected one of: {', '.join(ALGORITHMS)}", at="$.algorithm")
        settings = dict(value)
        if "ranks" in settings:
            settings["ranks"] = tuple(settings["ranks"])
        return cls(**settings, hash_seed_given="hash_seed" in value)


class Doctor:
    """Collects what a subscriber sees and tells what it means. Bounded: samples and counts, not the stream."""

    def __init__(
        self,
        *,
        hash_seeds: Sequence[str | None] = DEFAULT_SEEDS,
        lora_paths: Mapping[str, str] | None = None,
        expect: Expectation | None = None,
    ) -> None:
        self._expect = expect or Expectation()
        seeds = [*hash_seeds]
        if self._expect.hash_seed_given:
            seeds.insert(0, self._expect.hash_seed)
        self._seeds = tuple(dict.fromkeys(seeds))
        self._lora_paths = {**self._expect.lora_paths, **(lora_paths or {})}
        self.stats = StreamStats()
        self.wire = WireRange()
        self._samples: list[BlockStored] = []
        self._hash_forms: dict[str, int] = {}
        self._lora_names: set[str] = set()
        self._salted = 0
        self._bigrams = 0
        self._no_tokens = 0
        self._stored_events = 0
        self._bad_messages = 0
        self._replay_failed: list[str] = []

    # --- feeding ----------------------------------------------------------------------------------------------

    def see_batch(
        self, publisher: PublisherStats, batch: EventBatch, payload: bytes, *, received: float
    ) -> None:
        """Take one batch into account; `publisher` comes from ``self.stats.publisher(endpoint, rank)``."""
        publisher.see(batch, received=received)
        self.wire.see(payload)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._see_stored(event)

    def see_bad_message(self) -> None:
        """Count a message that was no batch."""
        self._bad_messages += 1

    def _see_stored(self, event: BlockStored) -> None:
        self._stored_events += 1
        for value in event.block_hashes:
            form = "int" if isinstance(value, int) else "bytes"
            self._hash_forms[form] = self._hash_forms.get(form, 0) + 1
        if event.lora_name and len(self._lora_names) < 256:
            self._lora_names.add(event.lora_name)
        self._bigrams += event.bigram
        self._no_tokens += not event.token_ids
        self._salted += _salt_of(event) is not None
        usable = (
            event.parent_block_hash is None and event.token_ids and not event.bigram and event.block_hashes
        )
        if usable and len(self._samples) < _SAMPLES:
            self._samples.append(event)

    # --- findings ---------------------------------------------------------------------------------------------

    def findings(self, http: HttpProbe | None = None, *, waited_s: float) -> list[Finding]:
        """Return all findings in order: arrival, wire, hashes, settings, then the health of the stream."""
        found: list[Finding] = []
        if http is not None:
            found += self._http(http)
        if not any(publisher.batches for publisher in self.stats):
            return found + self._silence(http, waited_s)
        found += (
            self._arrival() + self._wire() + self._hashes() + self._blocks() + self._ranks() + self._health()
        )
        return found

    def _http(self, http: HttpProbe) -> list[Finding]:
        if not http.reachable:
            return [
                Finding(
                    "problem", "http-unreachable", http.detail, "check the address and that the engine runs"
                )
            ]
        models = f", models {', '.join(http.models)}" if http.models else ""
        found = [
            Finding("ok", "http", f"the engine answers (vLLM {http.version or 'version unknown'}{models})")
        ]
        if http.prefix_cache_queries is not None:
            found.append(
                Finding(
                    "note", "prefix-cache",
                    f"prefix cache: {http.prefix_cache_hits:.0f} of {http.prefix_cache_queries:.0f} tokens hit",
                )
            )  # fmt: skip
        return found

    def _silence(self, http: HttpProbe | None, waited_s: float) -> list[Finding]:
        if self._bad_messages:
            seen = f"{self._bad_messages} messages in {waited_s:g} s, none of them a batch of KV events"
            advice = "this port is not vLLM's KV event publisher, or a proxy changes its messages"
            return [Finding("problem", "no-batches", seen, advice)]
        causes = [
            "events are off: start vLLM with --kv-events-config "
            """'{"enable_kv_cache_events": true, "publisher": "zmq"}'""",
            "no request ran meanwhile: blocks are stored only when they fill, so send one longer than a block",
            "the topic differs: subscribe to the empty topic to see all",
            "both sides connect: vLLM binds only to an endpoint with * or a wildcard (tcp://*:5557), and connects to "
            "any other (tcp://127.0.0.1:5557)",
            "the host or port is wrong: data parallel rank r publishes on port + r, and a wildcard (0.0.0.0, *) is no "
            "address to connect to",
            "a cache reset shows only at the engine's next step",
        ]
        if http is not None and http.reachable:
            causes.insert(0, "the engine is up, so most likely:")
        advice = "; ".join(f"({i}) {cause}" for i, cause in enumerate(causes, 1))
        return [Finding("problem", "silence", f"nothing arrived in {waited_s:g} s", advice)]

    def _arrival(self) -> list[Finding]:
        batches = sum(publisher.batches for publisher in self.stats)
        events = sum(p.stored + p.removed for p in self.stats)
        found = [Finding("ok", "arrival", f"{batches} batches with {events} block operations arrived")]
        if self._bad_messages:
            found.append(Finding("warning", "bad-messages", f"{self._bad_messages} messages were no batch"))
        undecodable = sum(p.undecodable for p in self.stats)
        if undecodable:
            found.append(
                Finding(
                    "warning", "undecodable", f"{undecodable} events could not be read",
                    "see them with kvevents tail; a publisher of another kind, or a release newer than this kvhash",
                )
            )  # fmt: skip
        return found

    def _wire(self) -> list[Finding]:
        if self.wire.foreign_fields:
            names = ", ".join(sorted(self.wire.foreign_fields))
            return [
                Finding(
                    "note", "wire", f"no vLLM release writes the fields {names}: SGLang, or a newer release"
                )
            ]
        if not self.wire.ranges:
            return [
                Finding(
                    "warning", "wire", "no single vLLM release writes all of these events", "several engines?"
                )
            ]
        return [Finding("ok", "wire", f"events as vLLM {self.wire.text} writes them")]

    def _hashes(self) -> list[Finding]:
        found: list[Finding] = []
        forms = sorted(self._hash_forms)
        if forms:
            found.append(
                Finding(
                    "ok" if len(forms) == 1 else "warning", "hash-form", f"hashes are {' and '.join(forms)}"
                )
            )
        wanted = self._expect.hash_form
        if wanted is not None and forms and forms != [wanted]:
            found.append(
                Finding(
                    "problem", "expected-hash_form", f"expected {wanted} hashes, the engine publishes {forms[0]}",
                    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 makes them bytes",
                )
            )  # fmt: skip
        if self._bigrams:
            found.append(
                Finding("note", "bigrams", f"{self._bigrams} events carry token pairs (SGLang with EAGLE)",
                        "their hashes cover pairs, so the recipe of vLLM does not give them")
            )  # fmt: skip
        return found + self._settings()

    def _settings(self) -> list[Finding]:
        if not self._samples:
            return [
                Finding(
                    "note", "not-identified", "no stored event begins a prompt and has its tokens",
                    "hash settings are recomputed from such events; send a fresh prompt, or replay from the start",
                )
            ]  # fmt: skip
        found: list[Finding] = []
        best: Match | None = None
        unexplained: list[str] = []
        for event in self._samples:
            try:
                result = self._identify(event)
            except KvHashError as error:
                unexplained.append(str(error))
                continue
            matches = [match for match in result.matches if match.matched == match.observed]
            if not matches:
                continue
            best = matches[0]
            break
        if best is None:
            found.append(self._unidentified(unexplained))
            return found
        seed = "unset" if best.hash_seed is None else repr(best.hash_seed)
        found.append(
            Finding(
                "ok" if best.mistake is None else "warning", "settings",
                f"recomputed: algorithm {best.algorithm}, PYTHONHASHSEED {seed}, {best.block_size} tokens a block, "
                f"hashed as vLLM {best.release_text}",
                None if best.mistake is None else best.mistake[1],
            )
        )  # fmt: skip
        if not ALGORITHMS[best.algorithm].collision_resistant and not self._salted:
            found.append(
                Finding(
                    "note", "not-collision-resistant", f"{best.algorithm} does not resist made collisions",
                    "where tenants share an engine use sha256, or a cache_salt for each",
                )
            )  # fmt: skip
        return found + self._compare(best)

    def _identify(self, event: BlockStored) -> Identification:
        fields: dict[str, Any] = {"tokens": list(event.token_ids)}
        if event.lora_name or event.lora_id is not None:
            lora = {
                "name": event.lora_name,
                "path": self._lora_paths.get(event.lora_name or ""),
                "id": event.lora_id,
            }
            fields["lora"] = {name: value for name, value in lora.items() if value is not None}
        salt = _salt_of(event)
        if salt is not None:
            fields["cache_salt"] = salt
        size = len(event.token_ids) // len(event.block_hashes)
        return identify(
            HashRequest.of(fields),
            list(event.block_hashes),
            hash_seeds=self._seeds,
            block_sizes=dict.fromkeys(s for s in (event.block_size, size) if s > 0),
        )

    def _unidentified(self, unexplained: list[str]) -> Finding:
        missing = sorted(name for name in self._lora_names if name not in self._lora_paths)
        if missing and all(event.lora_name for event in self._samples):
            return Finding(
                "warning", "lora-path-unknown", f"adapters {', '.join(missing)}: their paths are not in the events",
                "from 0.31 the path is hashed; give it with --lora-path NAME=PATH",
            )  # fmt: skip
        seeds = ", ".join("unset" if seed is None else repr(seed) for seed in self._seeds)
        advice = (
            f"no algorithm gives the published hashes with the seeds {seeds}: the engine's PYTHONHASHSEED is another "
            "(give it with --hash-seed), or NONE_HASH is random (xxhash without PYTHONHASHSEED, or before 0.29)"
        )
        detail = f"; {unexplained[0]}" if unexplained else ""
        return Finding(
            "problem", "unknown-root", f"the published hashes cannot be recomputed{detail}", advice
        )

    def _compare(self, best: Match) -> list[Finding]:
        expect = self._expect
        found: list[Finding] = []

        def differs(name: str, wanted: object, seen: object, advice: str) -> None:
            found.append(
                Finding(
                    "problem", f"expected-{name}", f"{name}: expected {wanted}, the engine has {seen}", advice
                )
            )

        if expect.algorithm is not None and expect.algorithm != best.algorithm:
            differs(
                "algorithm",
                expect.algorithm,
                best.algorithm,
                "set vLLM's --prefix-caching-hash-algo, or the router's",
            )
        if expect.hash_seed_given and expect.hash_seed != best.hash_seed:
            wanted, seen = (
                "unset" if seed is None else repr(seed) for seed in (expect.hash_seed, best.hash_seed)
            )
            differs(
                "hash_seed", wanted, seen,
                "PYTHONHASHSEED must be in the engine's environment when it starts; setting it later has no effect",
            )  # fmt: skip
        if expect.vllm is not None:
            release = Contract.for_vllm(expect.vllm).release
            inside = any(
                first <= release and (before is None or release < before) for first, before in best.releases
            )
            on_wire = any(
                first <= release and (before is None or release < before)
                for first, before in self.wire.ranges
            )
            if not inside:
                differs(
                    "vllm",
                    expect.vllm,
                    f"hashes of {best.release_text}",
                    "the recipe changed between these releases",
                )
            elif not on_wire:
                differs(
                    "vllm",
                    expect.vllm,
                    f"events of {self.wire.text}",
                    "the event format changed between these releases",
                )
        return found

    def _blocks(self) -> list[Finding]:
        sizes: dict[int, int] = {}
        kinds: dict[int | None, str | None] = {}
        for publisher in self.stats:
            for size, count in publisher.block_sizes.items():
                sizes[size] = sizes.get(size, 0) + count
            kinds.update(publisher.kinds)
        found: list[Finding] = []
        shown = ", ".join(f"{size} ({count} blocks)" for size, count in sorted(sizes.items()))
        if sizes:
            found.append(Finding("ok", "block-size", f"tokens a block: {shown}"))
        wanted = self._expect.block_size
        if wanted is not None and sizes and wanted not in sizes:
            found.append(
                Finding(
                    "problem", "expected-block_size", f"block_size: expected {wanted}, the engine stores {shown}",
                    "vLLM may enlarge the configured size (hybrid models, accelerators); use the size of the events",
                )
            )  # fmt: skip
        if 0 in sizes and self._no_tokens:
            found.append(
                Finding("note", "no-tokens", f"{self._no_tokens} stored events carry no tokens (an offload tier)",
                        "join them by hash to the blocks of the GPU events")
            )  # fmt: skip
        if len(kinds) > 1:
            names = ", ".join(
                f"{group}: {kind or 'unknown kind'}" for group, kind in sorted(kinds.items(), key=str)
            )
            found.append(
                Finding("note", "groups", f"KV cache groups {names}",
                        "keep residency per group: a removal in one group says nothing of another")
            )  # fmt: skip
        missing = sorted(name for name in self._lora_names if name not in self._lora_paths)
        if missing:
            found.append(
                Finding("note", "lora-paths", f"adapters seen without a known path: {', '.join(missing)}",
                        "from 0.31 a LoRA hash needs the adapter's path")
            )  # fmt: skip
        return found

    def _ranks(self) -> list[Finding]:
        seen = sorted({publisher.rank for publisher in self.stats if publisher.rank is not None})
        found = []
        if seen:
            found.append(Finding("ok", "ranks", f"data parallel ranks {', '.join(map(str, seen))}"))
        missing = sorted(set(self._expect.ranks or ()) - set(seen))
        if missing:
            found.append(
                Finding(
                    "problem", "expected-ranks", f"no event of ranks {', '.join(map(str, missing))}",
                    "each rank publishes on its own port: the endpoint's port plus the rank; subscribe to all of them",
                )
            )  # fmt: skip
        return found

    def _health(self) -> list[Finding]:
        found: list[Finding] = []
        for p in self.stats:
            name = p.endpoint if p.rank is None else f"{p.endpoint} rank {p.rank}"
            if p.gaps:
                covered = "replay covered all of it" if not p.lost else f"{p.lost} batches are lost"
                advice = None if not p.lost else (
                    "give the replay endpoint, and raise the engine's buffer_steps (and hwm) above the longest gap"
                )  # fmt: skip
                found.append(
                    Finding(
                        "warning" if p.lost else "note", "gaps", f"{name}: {p.gaps} gaps; {covered}", advice
                    )
                )
            if p.restarts:
                found.append(
                    Finding(
                        "note",
                        "restarts",
                        f"{name}: restarted {p.restarts} times",
                        "drop what it held before",
                    )
                )
            if p.clears and p.clears >= max(1, p.stored):
                found.append(
                    Finding("warning", "clears", f"{name}: {p.clears} clears for {p.stored} stored blocks",
                            "something resets the prefix cache again and again")
                )  # fmt: skip
            for medium, stored in p.stored_by_medium.items():
                if stored >= 1000 and not p.removed_by_medium.get(medium) and not p.clears:
                    found.append(
                        Finding("warning", "no-removals", f"{name}: {stored} blocks stored in {medium}, none removed",
                                "this tier does not report evictions, so an index of it grows unbounded: give it a TTL")
                    )  # fmt: skip
            if p.lag_s is not None and abs(p.lag_s) > _LAG_S:
                found.append(
                    Finding("warning", "lag", f"{name}: the last batch arrived {p.lag_s:.1f} s after its own time",
                            "the publisher or this subscriber is behind, or the clocks differ")
                )  # fmt: skip
        return found


def _salt_of(event: BlockStored) -> str | None:
    """Return the cache salt that the event's first block shows, if it begins a prompt."""
    if event.cache_salt:
        return event.cache_salt
    if event.parent_block_hash is not None or not event.extra_keys or not event.extra_keys[0]:
        return None
    texts = [key for key in event.extra_keys[0] if isinstance(key, str)]
    if event.lora_name and texts and texts[0] == event.lora_name:
        texts = texts[1:]
    return texts[-1] if texts else None
