"""Find out which settings observed hashes came from: releases, algorithm, seed, block size, form, or a known mistake.

The search hashes the given tokens under every combination, and counts how many of the observed hashes come out.
Releases that hash this request alike are tried once and reported as one range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ._checks import check_int
from ._errors import InvalidRequestError, UnknownRootError
from ._recipes import CORRECT, FORMS, MISTAKES, NULL_ROOT, Recipe, normalize_observed, salt_everywhere
from .block_size import check_block_size
from .contract import ALGORITHMS, CHANGES, NEWEST, Algorithm, Contract, Release
from .extra_keys import ExtraKeys, RequestKeys
from .hasher import HashFunction, none_hash
from .request import HashRequest
from .serialize import Ref

__all__ = ["DEFAULT_BLOCK_SIZES", "DEFAULT_SEEDS", "Identification", "Match", "identify"]

DEFAULT_SEEDS: tuple[str | None, ...] = (
    None,
    "0",
    "42",
    "1",
    "",
    "123",
    "1234",
    "12345",
    "1337",
    "2024",
    "random",
)
DEFAULT_BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 4, 48, 96, 512, 528, 784, 1024)

#: Blocks of each candidate chain that the first, quick pass looks at.
_QUICK_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Match:
    """One combination that gives observed hashes.

    ``releases``: ranges (first, before) that hash this request so; ``before`` is None where the range is open, and
    equals ``first`` for a single release that was asked for. ``form``: how the digest was published.
    ``mistake``: (code, sentence) when it takes a known mistake to get the observed values, else None.
    ``matched`` of ``observed`` hashes come out.
    """

    releases: tuple[tuple[Release, Release | None], ...]
    algorithm: str
    hash_seed: str | None
    seed_known: bool
    block_size: int
    form: str
    mistake: tuple[str, str] | None
    matched: int
    observed: int

    @property
    def release_text(self) -> str:
        """The release ranges in words; a range up to the newest known release ends open."""
        return ", ".join(
            f"{first} and later"
            if last is None
            else str(first)
            if last == first
            else f"{first} up to before {last}"
            for first, last in self.releases
        )

    def to_json(self) -> dict[str, Any]:
        """Return the match as JSON values; a range is ``{"since", "before"}``, ``before`` null where open."""
        return {
            "releases": [
                {"since": str(first), "before": None if last is None else str(last)}
                for first, last in self.releases
            ],
            "algorithm": self.algorithm,
            "hash_seed": self.hash_seed,
            "hash_seed_known": self.seed_known,
            "block_size": self.block_size,
            "form": self.form,
            "mistake": None
            if self.mistake is None
            else {"code": self.mistake[0], "message": self.mistake[1]},
            "matched": self.matched,
            "observed": self.observed,
        }


@dataclass(frozen=True, slots=True)
class Identification:
    """The outcome: matches, best first, and what was tried."""

    matches: tuple[Match, ...]
    tried: int
    algorithms: tuple[str, ...]
    hash_seeds: tuple[str | None, ...]
    block_sizes: tuple[int, ...]
    releases: tuple[Release, ...] = field(repr=False)
    notes: tuple[str, ...] = ()
    exact: bool = False

    @property
    def _release_range(self) -> str:
        first, last = self.releases[0], self.releases[-1]
        return str(first) if first == last and self.exact else f"{first} to {last if self.exact else NEWEST}"

    @property
    def tried_text(self) -> str:
        """What was tried, in words."""
        seeds = ", ".join("unset" if seed is None else repr(seed) for seed in self.hash_seeds)
        return (
            f"{self.tried} combinations: releases {self._release_range}, algorithms {', '.join(self.algorithms)}, "
            f"seeds {seeds}, block sizes {', '.join(map(str, self.block_sizes))}, and the known mistakes"
        )


# --- the search -----------------------------------------------------------------------------------------------


def _contract_classes(releases: Iterable[Contract] | None) -> list[tuple[Contract, Release, Release | None]]:
    """Return contracts that hash differently, each with the range of releases [first, before) that it stands for."""
    if releases is not None:
        return [(contract, contract.release, contract.release) for contract in releases]
    starts = [change.since for change in CHANGES if change.hashes or change.since == CHANGES[0].since]
    ends: list[Release | None] = [*starts[1:], None]
    return [(Contract.for_vllm(start), start, end) for start, end in zip(starts, ends, strict=True)]


def _merge(ranges: list[tuple[Release, Release | None]]) -> tuple[tuple[Release, Release | None], ...]:
    merged: list[tuple[Release, Release | None]] = []
    for first, last in sorted(set(ranges), key=lambda pair: pair[0]):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class _Search:
    tokens: tuple[int, ...]
    keys: RequestKeys
    lookahead: int
    observed: tuple[int | bytes, ...]
    parent: bytes | int | None
    limit: int | None
    cache: dict[Any, Any] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def best(
        self, name: str, function: HashFunction, contract: Contract, root: Any, span: int, recipe: Recipe
    ) -> tuple[int, str, tuple[str, str] | None] | None:
        """Return how many observed hashes the candidate gives, in which form, by which mistake; None if it is none.

        Releases that hash these tokens alike share one answer.
        """
        keys = recipe.request(self.keys)
        if keys is None:
            return None
        tokens = recipe.tokens(self.tokens)
        count = max(0, len(tokens) - self.lookahead) // span
        if self.limit is not None:
            count = min(count, self.limit)
        block_keys: list[ExtraKeys] = [None] * count
        if not keys.empty or self.lookahead:
            tagged = recipe.needs_tag is None
            for i in range(count):
                start = i * span
                own = keys.block(contract, start, start + span + self.lookahead)
                tagged = tagged or _has_tag(own, recipe.needs_tag)
                own = recipe.keys(i, own)
                after = tokens[(i + 1) * span : (i + 1) * span + self.lookahead]
                block_keys[i] = (own, *after) if self.lookahead else own
            if not tagged:
                return None
        elif recipe.needs_keys:
            return None
        else:
            block_keys = [recipe.keys(i, None) for i in range(count)]
        if not count:
            return None
        known = root if not isinstance(root, Ref) else None
        identity = (name, id(recipe), contract.chain_values, known, span, tuple(block_keys))
        if identity not in self.cache:
            values = self._values(function, root, tokens, span, block_keys, recipe)
            self.cache[identity] = _best_form(values, self.observed, recipe.mistake)
        answer: tuple[int, str, tuple[str, str] | None] = self.cache[identity]
        return answer

    def _values(
        self,
        function: HashFunction,
        root: Any,
        tokens: tuple[int, ...],
        span: int,
        block_keys: list[ExtraKeys],
        recipe: Recipe,
    ) -> list[Any]:
        values: list[Any] = []
        parent: Any = None if root is NULL_ROOT else root
        first = parent
        for i, keys in enumerate(block_keys):
            block = tokens[i * span : (i + 1) * span]
            if recipe is CORRECT and keys is None:
                value: Any = function.plain_block(parent, list(block))
            else:
                value = function(recipe.preimage(parent, block, keys))
            values.append(value)
            parent = recipe.parent(value) if recipe.chained else first
        return values


def _has_tag(keys: ExtraKeys, tag: str | None) -> bool:
    return any(
        isinstance(key, tuple) and isinstance(key[0], Ref) and tag in ("", key[0].value) for key in keys or ()
    )


def identify(
    request: HashRequest,
    observed: Sequence[bytes | int],
    *,
    releases: Iterable[str] | None = None,
    algorithms: Iterable[str] | None = None,
    hash_seeds: Iterable[str | None] | None = None,
    block_sizes: Iterable[int] | None = None,
    parent: bytes | int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Identification:
    """Search for the settings under which the request's tokens give the observed hashes.

    `request`: tokens, salt, adapter and the rest of the prompt; its settings fields are not used, except
    ``lookahead``. `observed`: hashes as published (integers, signed or not, or bytes), of any blocks of the prompt.
    `parent`: the published parent of the first token's block, when the tokens are not the prompt's beginning; with
    the whole digest the root is not needed. `releases`, `algorithms`, `hash_seeds`, `block_sizes`: candidates, all
    known ones (`DEFAULT_SEEDS`, `DEFAULT_BLOCK_SIZES`) where None. `progress` gets (done, total).

    Raises InvalidRequestError when there is nothing to compare.
    """
    if not observed:
        raise InvalidRequestError("expected at least one observed hash", at="$.block_hashes")
    check_int(request.lookahead, at="$.lookahead", what="the look-ahead", minimum=0, maximum=1 << 16)
    seeds = tuple(dict.fromkeys(hash_seeds)) if hash_seeds is not None else DEFAULT_SEEDS
    given = block_sizes if block_sizes is not None else DEFAULT_BLOCK_SIZES
    sizes = tuple(dict.fromkeys(map(check_block_size, given)))
    usable = tuple(size for size in sizes if size + request.lookahead <= len(request.tokens))
    if not usable:
        raise InvalidRequestError(
            f"{len(request.tokens)} tokens fill no block of any of the sizes {', '.join(map(str, sizes))}",
            at="$.tokens",
        )
    contracts = None if releases is None else [Contract.for_vllm(release) for release in releases]
    classes = _contract_classes(contracts)
    names = tuple(algorithms) if algorithms is not None else tuple(ALGORITHMS)
    for name in names if algorithms is not None else ():
        if not any(name in contract.algorithms for contract, _, _ in classes):
            classes[-1][0].algorithm(name)  # raises, and says what there is
    # Tokens from the middle of a prompt never hold block 0, where the salt would be.
    salt = request.cache_salt if parent is None else None
    keys = RequestKeys(request.lora, salt, request.multimodal, request.prompt_embeds)
    recipes = [CORRECT, *MISTAKES]
    if request.cache_salt:
        recipes.append(salt_everywhere(request.cache_salt))
    wanted = tuple(normalize_observed(value) for value in observed)
    root = None if parent is None else normalize_observed(parent)
    search = _Search(request.tokens, keys, request.lookahead, wanted, root, _QUICK_BLOCKS)
    tried = 0
    found: dict[Any, tuple[int, list[tuple[Release, Release | None]]]] = {}
    passes = [(search, recipes)]
    if len(request.tokens) // min(usable) > _QUICK_BLOCKS:
        passes.append((replace(search, limit=None, cache={}), [CORRECT]))
    for current, current_recipes in passes:
        total = len(names) * len(classes)
        for done, (algorithm, candidate) in enumerate(_pairs(names, classes)):
            if progress is not None:
                progress(done, total)
            contract, first, last = candidate
            for key, matched in _try(current, current_recipes, algorithm, contract, seeds, usable):
                tried += 1
                if matched:
                    best, ranges = found.setdefault(key, (matched, []))
                    found[key] = (max(best, matched), ranges)
                    ranges.append((first, last))
        if any(matched == len(wanted) for matched, _ in found.values()):
            break
    matches = [
        Match(_merge(ranges), name, seed, known and parent is None, size, form, mistake, matched, len(wanted))
        for (name, seed, known, size, form, mistake), (matched, ranges) in found.items()
    ]
    matches.sort(key=lambda m: (-m.matched, m.mistake is not None, m.block_size, m.hash_seed is not None))
    best_count = matches[0].matched if matches else 0
    clean = [m for m in matches if m.mistake is None and m.matched == best_count]
    kept = clean or [m for m in matches if m.matched == best_count]
    if isinstance(root, int) and not kept:
        search.notes[
            "the parent is a 64-bit value, while vLLM chains the whole digest from 0.10.2 on: give the digest, or the "
            "prompt from its first token"
        ] = None
    if 0 < best_count < len(wanted):
        search.notes[f"only {best_count} of {len(wanted)} observed hashes come out"] = None
    return Identification(
        tuple(kept),
        tried,
        names,
        seeds,
        usable,
        tuple(first for _, first, _ in classes),
        tuple(search.notes),
        contracts is not None,
    )


def _pairs(
    names: Sequence[str], classes: Sequence[tuple[Contract, Release, Release | None]]
) -> Iterator[tuple[str, tuple[Contract, Release, Release | None]]]:
    for name in names:
        for candidate in classes:
            if name in candidate[0].algorithms:
                yield name, candidate


def _try(
    search: _Search,
    recipes: Sequence[Recipe],
    name: str,
    contract: Contract,
    seeds: Sequence[str | None],
    sizes: Sequence[int],
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield ((algorithm, seed, block size, form, mistake), how many observed hashes it gives) for each candidate."""
    algorithm: Algorithm = contract.algorithm(name)
    function = HashFunction(algorithm, contract)
    if search.lookahead and not contract.lookahead:
        return
    for number, (seed, root) in enumerate(_roots(search, contract, algorithm, seeds)):
        for size in sizes:
            for recipe in recipes:
                if recipe.rootless and number:
                    continue
                try:
                    start = recipe.root(function, root, seed)
                    best = (
                        None if start is None else search.best(name, function, contract, start, size, recipe)
                    )
                except InvalidRequestError as error:
                    search.notes[f"not tried: {error}"] = None
                    continue
                if best is not None:
                    known = not recipe.rootless
                    yield (name, seed if known else None, known, size, best[1], best[2]), best[0]


def _roots(
    search: _Search, contract: Contract, algorithm: Algorithm, seeds: Sequence[str | None]
) -> Iterator[tuple[str | None, Any]]:
    if search.parent is not None:
        is_digest = isinstance(search.parent, bytes) and len(search.parent) > 8
        if is_digest == (contract.chain_values == "bytes"):
            yield None, search.parent
        return
    for seed in seeds:
        try:
            yield seed, none_hash(contract, algorithm, seed)
        except UnknownRootError:
            continue


def _best_form(
    values: list[Any], observed: Sequence[int | bytes], mistake: tuple[str, str] | None
) -> tuple[int, str, tuple[str, str] | None]:
    best: tuple[int, str, tuple[str, str] | None] = (0, "", None)
    for form, convert, form_mistake in FORMS:
        if mistake is not None and form_mistake is not None:
            continue  # two mistakes at once match by chance more often than they happen
        produced = set(map(convert, values))
        if isinstance(values[0], int):
            produced |= set(values)
        count = sum(value in produced for value in observed)
        if count > best[0]:
            best = (count, form, mistake or form_mistake)
    return best


def seeds_from(texts: Iterable[str]) -> tuple[str | None, ...]:
    """Return seed candidates from texts, the word ``unset`` standing for no PYTHONHASHSEED."""
    return tuple(None if text == "unset" else text for text in texts)


def request_from_event(event: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], Any]:
    """Return (request fields, observed hashes, parent) from a BlockStored event as JSON values.

    Takes tokens, block size, adapter name, and the salt where the event's untagged extra keys show one; see
    `kvhash.events` for reading whole streams. Raises InvalidRequestError.
    """
    for name in ("token_ids", "block_hashes"):
        if not isinstance(event.get(name), list):
            raise InvalidRequestError(f"a BlockStored event needs {name!r}, a list", at=f"$.{name}")
    fields: dict[str, Any] = {"tokens": event["token_ids"]}
    if isinstance(event.get("lora_name"), str):
        fields["lora"] = {"name": event["lora_name"]}
    if event.get("lora_id") is not None:
        fields.setdefault("lora", {})["id"] = event["lora_id"]
    published = event.get("extra_keys")
    if isinstance(published, list) and published and isinstance(published[0], list):
        keys = list(published[0])
        if keys and keys[0] == event.get("lora_name"):
            keys = keys[1:]
        if len(keys) > 1 or any(not isinstance(key, str) for key in keys):
            raise InvalidRequestError(
                "the block's extra keys are not a salt alone; give the tokens, and what they are, as options",
                at="$.extra_keys[0]",
            )
        if keys and event.get("parent_block_hash") is None:
            fields["cache_salt"] = keys[0]
    return fields, event["block_hashes"], event.get("parent_block_hash")
