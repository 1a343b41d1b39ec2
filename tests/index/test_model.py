"""The index against a naive model: any story of stores, removals and clears, true parents, none or wrong ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvhash.index import ROOT, UNPLACED, Place, ResidencyIndex

from .build import CLEARED, SIZE, batch, removed, stored

#: A fixed forest of prompts: a block is the path to it, its key made from that path.
_BRANCH, _DEPTH = 2, 6
PATHS = [()]
for _ in range(_DEPTH):
    PATHS += [(*path, turn) for path in PATHS if len(path) == len(PATHS[-1]) for turn in range(_BRANCH)]
PATHS = sorted(set(PATHS[1:]), key=lambda path: (len(path), path))
ENGINES = ("a", "b")
TIERS = ("GPU", "CPU")


def key(path: Sequence[int]) -> int:
    """Return the hash of the block at the end of a path."""
    return int("9" + "".join(map(str, path)), 10)


def prompt(path: Sequence[int]) -> list[int]:
    """Return the hashes of the prompt that ends with a path."""
    return [key(path[: i + 1]) for i in range(len(path))]


paths = st.sampled_from(PATHS)


class IndexMachine(RuleBasedStateMachine):
    """Two engines of two ranks and two tiers; the model is a count for each block, the answer a walk."""

    @initialize()
    def begin(self) -> None:
        """Start empty."""
        self.index = ResidencyIndex()
        self.model: dict[tuple[str, int, str], Counter[int]] = {}
        self.ends: dict[tuple[str, int, str], set[int]] = {}

    def _at(self, engine: str, rank: int, tier: str) -> Counter[int]:
        return self.model.setdefault((engine, rank, tier), Counter())

    def _stored(self, engine: str, rank: int, tier: str, keys: Sequence[int], ends: Sequence[int]) -> None:
        held = self._at(engine, rank, tier)
        marks = self.ends.setdefault((engine, rank, tier), set())
        for one in keys:
            held[one] += 1
            if one in ends or tier == "GPU":
                marks.add(one)

    @rule(
        engine=st.sampled_from(ENGINES),
        rank=st.integers(0, 1),
        tier=st.sampled_from(TIERS),
        path=paths,
        start=st.integers(0, _DEPTH),
    )
    def store(self, engine: str, rank: int, tier: str, path: tuple[int, ...], start: int) -> None:
        """Store a stretch of a prompt with its true parent, held or not."""
        chain = prompt(path)
        first = min(start, len(chain) - 1)
        parent = chain[first - 1] if first else None
        self.index.apply(engine, batch(stored(chain[first:], parent, medium=tier), rank=rank))
        self._stored(engine, rank, tier, chain[first:], chain[-1:])

    @rule(engine=st.sampled_from(ENGINES), rank=st.integers(0, 1), tier=st.sampled_from(TIERS), path=paths)
    def store_without_tokens(self, engine: str, rank: int, tier: str, path: tuple[int, ...]) -> None:
        """Store a block of which nothing but the hash is said."""
        event = stored([key(path)], size=0, token_ids=(), medium=tier)
        self.index.apply(engine, batch(event, rank=rank))
        self._stored(engine, rank, tier, [key(path)], [key(path)])

    @rule(
        engine=st.sampled_from(ENGINES),
        rank=st.integers(0, 1),
        path=paths,
        lie=st.sampled_from(["self", "grandparent", "nobody"]),
    )
    def store_with_a_wrong_parent(self, engine: str, rank: int, path: tuple[int, ...], lie: str) -> None:
        """Store a block whose event names itself, its grandparent or an unknown block as its parent."""
        grand = key(path[:-2]) if len(path) > 2 else 5
        parent = {"self": key(path), "grandparent": grand, "nobody": 4}[lie]
        self.index.apply(engine, batch(stored([key(path)], parent), rank=rank))
        self._stored(engine, rank, "GPU", [key(path)], [key(path)])

    @rule(engine=st.sampled_from(ENGINES), rank=st.integers(0, 1), tier=st.sampled_from(TIERS), path=paths)
    def remove(self, engine: str, rank: int, tier: str, path: tuple[int, ...]) -> None:
        """Remove a block, held or not."""
        self.index.apply(engine, batch(removed([key(path)], medium=tier), rank=rank))
        held = self._at(engine, rank, tier)
        if held[key(path)]:
            held[key(path)] -= 1
            if not held[key(path)]:
                self.ends[engine, rank, tier].discard(key(path))

    @rule(engine=st.sampled_from(ENGINES), rank=st.integers(0, 1))
    def clear(self, engine: str, rank: int) -> None:
        """Clear a rank."""
        self.index.apply(engine, batch(CLEARED, rank=rank))
        for tier in TIERS:
            self._at(engine, rank, tier).clear()
            self.ends.pop((engine, rank, tier), None)

    @rule(engine=st.sampled_from(ENGINES))
    def forget(self, engine: str) -> None:
        """Remove an engine."""
        self.index.remove(engine)
        for place in [place for place in self.model if place[0] == engine]:
            del self.model[place]
            self.ends.pop(place, None)

    @rule()
    def keep_and_restore(self) -> None:
        """Go on with an index that was restored from a snapshot."""
        restored = ResidencyIndex()
        restored.load(self.index.snapshot())
        assert restored.stats() == self.index.stats()
        self.index = restored

    @precondition(lambda self: any(self.model.values()))
    @rule(path=paths)
    def look_up(self, path: tuple[int, ...]) -> None:
        """Every engine's match is the walk: the GPU's run, then the CPU's to the end of a chunk."""
        chain = prompt(path)
        found = self.index.longest_prefix(chain, ENGINES)
        for engine in ENGINES:
            best = max((self._walk(engine, rank, chain) for rank in (0, 1)), key=sum)
            match = found[engine]
            assert match.blocks == sum(best)
            assert match.tokens == match.usable_tokens == sum(best) * SIZE
            if match.rank is not None:
                gpu, cpu = self._walk(engine, match.rank, chain)
                assert dict(match.by_tier) == {k: v for k, v in (("GPU", gpu), ("CPU", cpu)) if v}

    def _walk(self, engine: str, rank: int, chain: Sequence[int]) -> tuple[int, int]:
        gpu, cpu = self.model.get((engine, rank, "GPU"), {}), self.model.get((engine, rank, "CPU"), {})
        first = next((i for i, one in enumerate(chain) if not gpu.get(one)), len(chain))
        end = next((i for i in range(first, len(chain)) if not cpu.get(chain[i])), len(chain))
        marks = self.ends.get((engine, rank, "CPU"), set())
        while end > first and chain[end - 1] not in marks:
            end -= 1
        return first, end - first

    @invariant()
    def holds_what_was_stored(self) -> None:
        """Keys and copies are the model's."""
        for engine in ENGINES:
            held = {
                (engine, rank, place.tier): blocks
                for (rank, place), blocks in self.index.holdings(engine).items()
            }
            model = {place: dict(+counts) for place, counts in self.model.items() if place[0] == engine}
            assert held == {place: counts for place, counts in model.items() if counts}
        assert len(self.index) == sum(len(+counts) for counts in self.model.values())

    @invariant()
    def is_closed_under_prefixes(self) -> None:
        """A block has a depth exactly if it is a root or its parent has one, and then one more; links go both ways."""
        for engine in ENGINES:
            for rank in self.index.ranks(engine):
                for place, layer in self.index._engines[engine][rank].places():
                    assert isinstance(place, Place)
                    assert layer.reachable == sum(block.depth > 0 for _, block in layer.items())
                    for one, block in layer.items():
                        parent = layer.blocks.get(block.parent)
                        expected = 1 if block.parent == ROOT else 0
                        if parent is not None and parent.depth:
                            expected = parent.depth + 1
                        assert block.depth == expected
                        if block.parent not in (ROOT, UNPLACED):
                            among = layer._waiting[block.parent] if parent is None else parent.children
                            assert among is not None
                            assert one in among
                    assert all(waiting for waiting in layer._waiting.values())
                    assert not set(layer._waiting) & set(layer.blocks)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
