"""Pages: what is read can be written elsewhere and computes alike; padding and null blocks never show."""

from __future__ import annotations

from typing import Any

import pytest

from .engine import BLOCK, make_engine
from .models import MODELS, ModelShelf, prompts

pytestmark = pytest.mark.torch


def move_pages(source: Any, target: Any, request: Any) -> int:
    """Copy the pages of a request's cached blocks into another engine's pool and make them findable there.

    Returns how many were moved.
    """
    pool, other = source.core.scheduler.cache.pool, target.core.scheduler.cache.pool
    moved = 0
    for key, block_ids in pool.cached_keys.items():
        group = int.from_bytes(key[-4:], "big")
        block = pool.blocks[min(block_ids)]
        copy = other.get_new_blocks(1)[0]
        target.runner.write_page(group, copy.block_id, source.runner.read_page(group, block.block_id))
        for each in pool.keys_of(block):
            other._insert(each, copy, block.num_hashed_tokens)
        other.free_blocks([copy])
        moved += 1
    assert request.block_hashes
    return moved


@pytest.mark.parametrize("name", MODELS)
def test_restored_pages_give_the_same_tokens(shelf: ModelShelf, name: str) -> None:
    """A second engine that got the first one's pages hits them and answers as if it had computed them."""
    prompt = tuple(token % 101 for token in range(7, 60, 2)) * 2
    first, second = make_engine(shelf.folder(name)), make_engine(shelf.folder(name))
    assert first.runner.page_fingerprint == second.runner.page_fingerprint
    request = first.request("a", prompt)
    first.run(request)
    assert move_pages(first, second, request) > 0
    again = second.request("b", prompt)
    second.run(again)
    assert again.num_cached_tokens >= len(prompt) - 2 * BLOCK
    assert again.output_token_ids == request.output_token_ids == shelf.generated(name, prompt, 12)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_comes_back_as_it_was(shelf: ModelShelf, name: str, dtype: str) -> None:
    """Reading, clearing and writing a page changes nothing; a page of another size is refused and nothing written."""
    engine = make_engine(shelf.folder(name), runner_options={"dtype": dtype})
    request = engine.request("a", prompts(1, seed=4)[0] * 3)
    engine.run(request)
    cache = engine.runner.cache
    for group in range(len(cache.groups)):
        block_ids = [b.block_id for b in engine.core.scheduler.cache.pool.blocks if b.block_hash]
        for block_id in block_ids:
            page = engine.runner.read_page(group, block_id)
            assert len(page) == cache.page_size(group)
            engine.runner.write_page(group, block_id, bytes(len(page)))
            assert engine.runner.read_page(group, block_id) == bytes(len(page))
            engine.runner.write_page(group, block_id, page)
            assert engine.runner.read_page(group, block_id) == page
        with pytest.raises(ValueError, match=r"has .* bytes, got"):
            engine.runner.write_page(group, block_ids[0], page[:-1])
        assert engine.runner.read_page(group, block_ids[-1]) == page


def test_the_fingerprint_tells_models_apart(shelf: ModelShelf) -> None:
    """Other weights, another dtype or another block size have other pages."""
    from engine_ref.torch_runner import TorchRunner

    def fingerprint(folder: Any, **options: Any) -> str:
        return str(TorchRunner.load(folder, num_blocks=4, **options).page_fingerprint)

    folder = shelf.folder("llama")
    known = {
        fingerprint(folder),
        fingerprint(folder, dtype="bfloat16"),
        fingerprint(folder, block_size=8),
        fingerprint(shelf.folder("llama", 0.1)),
    }
    assert len(known) == 4
    assert fingerprint(folder) in known


def test_the_null_block_stays_zero(shelf: ModelShelf) -> None:
    """What is padded reads block 0, so nothing may ever be written there."""
    for name in MODELS:
        engine = make_engine(shelf.folder(name), num_blocks=46, budget=32)
        engine.outputs(prompts(12))
        for layer in engine.runner.cache.layers.values():
            for part in layer.parts():
                assert not part[0].any(), name
