"""A vision-language model: tokens are those of `generate` with the same pixels, and images part prefixes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvhash import KvHashError

from .engine import BLOCK, make_engine
from .models import _COMMON, WIDE

pytestmark = pytest.mark.torch

IMAGE = 100
FILLS = 16  # (32 / 8) ** 2 patches
COUNT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny LLaVA: CLIP's vision tower before a Llama."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            projection_dim=32,
            initializer_range=WIDE,
        ),
        text_config=LlamaConfig(**_COMMON, initializer_range=WIDE),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    config.initializer_range = WIDE
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("llava") / "model"
    LlavaForConditionalGeneration(config).eval().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """Return the model as transformers runs it."""
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def pictures(count: int) -> list[Any]:
    """Return random pixels."""
    import torch

    return list(torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)))


def asked(count: int, kinds: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts with placeholders, and which image each placeholder is; many begin alike but for the image."""
    rng = random.Random(2)
    stem = [rng.randrange(IMAGE) for _ in range(7)]
    made = []
    for index in range(count):
        tail = [rng.randrange(IMAGE) for _ in range(rng.randrange(1, 20))]
        number = index % 3  # images in it
        chosen = [rng.randrange(kinds) for _ in range(number)]
        prompt = [*stem, *([IMAGE] if number else []), *tail, *([IMAGE, 5] if number == 2 else [])]
        made.append((prompt, chosen))
    return made


def generated(reference: Any, tokens: list[int], pixels: list[Any]) -> list[int]:
    """Return what transformers makes of an expanded prompt."""
    import torch

    output = reference.generate(
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        **({"pixel_values": torch.stack(pixels)} if pixels else {}),
        max_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(tokens) :]]


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-cache": {"enable_caching": False},
    "chunked": {"budget": 19},
    "async-preempted": {"async_scheduling": True, "budget": 23, "num_blocks": 40, "watermark": 0.0},
    "drafts": {"drafts": 2},
    "graphs": {"runner_options": {"graphs": "repeat"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_generate(folder: Path, reference: Any, mode: str) -> None:
    """Prompts with no, one and two images, sharing prefixes, give generate's tokens, twice."""
    engine = make_engine(folder, **MODES[mode])
    pixels = pictures(3)
    images = [engine.runner.images.add(picture) for picture in pixels]
    assert [image.length for image in images] == [FILLS] * 3
    requests, right = [], []
    for index, (prompt, chosen) in enumerate(asked(12, 3)):
        tokens, items = engine.runner.images.expand(prompt, [images[i] for i in chosen])
        assert len(tokens) == len(prompt) + len(chosen) * (FILLS - 1)
        right.append(generated(reference, tokens, [pixels[i] for i in chosen]))
        requests += [
            engine.request(f"r{wave}-{index}", tokens, multimodal=items, max_tokens=COUNT)
            for wave in range(2)
        ]
    engine.run(*requests[::2])
    engine.run(*requests[1::2])
    assert [request.output_token_ids for request in requests[::2]] == right
    assert [request.output_token_ids for request in requests[1::2]] == right
    assert (engine.core.scheduler.cache.stats.hits > 0) == (mode != "no-cache")


def test_another_image_is_no_hit(folder: Path, reference: Any) -> None:
    """The same tokens: the same image is hit to the end, another one only up to where it begins."""
    engine = make_engine(folder)
    pixels = pictures(2)
    one, other = (engine.runner.images.add(picture) for picture in pixels)
    assert engine.runner.images.add(pixels[0].clone()) == one != other
    prompt = [*range(9), IMAGE, *range(20, 40)]
    hits = []
    for name, image in (("a", one), ("b", one), ("c", other)):
        tokens, items = engine.runner.images.expand(prompt, [image])
        request = engine.request(name, tokens, multimodal=items, max_tokens=COUNT)
        engine.run(request)
        hits.append(request.num_cached_tokens)
        assert request.output_token_ids == generated(reference, tokens, [pixels[image is other]])
    assert hits == [0, (len(tokens) - 1) // BLOCK * BLOCK, 9 // BLOCK * BLOCK]


def test_what_cannot_be_is_said(folder: Path) -> None:
    """Placeholders without images, pixels of another size, an image that is not there or of another length."""
    import torch

    engine = make_engine(folder)
    images = engine.runner.images
    image = images.add(pictures(1)[0])
    with pytest.raises(KvHashError, match=r"2 placeholders .* for 1 images"):
        images.expand([IMAGE, 1, IMAGE], [image])
    with pytest.raises(KvHashError, match="does not take pixels"):
        images.add(torch.zeros(3, 16, 16))
    for item, words in (
        ({"identifier": "none", "offset": 0, "length": FILLS}, "no image 'none'"),
        ({"identifier": image.identifier, "offset": 0, "length": 3}, "fills 16 tokens, not 3"),
    ):
        request = engine.request(words, [IMAGE] * 20, multimodal=[item])
        with pytest.raises(KvHashError, match=words) as caught:
            engine.runner.validate(request)
        assert caught.value.code == "unsupported-input"
    images.drop(image)
    with pytest.raises(KvHashError, match="no image"):
        images.check(images.expand([IMAGE], [image])[1])
