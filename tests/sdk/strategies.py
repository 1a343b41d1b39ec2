"""Random requests of every kind, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvhash.contract import ALGORITHMS, CHANGES, Contract

TOKENS = st.integers(0, 200_000) | st.sampled_from(
    [0, 23, 24, 255, 256, 65535, 65536, (1 << 32) - 1, (1 << 63), (1 << 64) - 1]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=40)
#: One release on each side of every change.
RELEASE_NAMES = [str(change.since) for change in CHANGES]


@st.composite
def multimodal_items(draw: st.DrawFn, num_tokens: int) -> list[dict[str, Any]]:
    """Draw sorted items that do not overlap, within the prompt."""
    items: list[dict[str, Any]] = []
    position = 0
    identifiers = draw(st.lists(TEXT, min_size=1, max_size=3))
    while position < num_tokens and draw(st.booleans()):
        offset = draw(st.integers(position, num_tokens - 1))
        length = draw(st.integers(1, num_tokens - offset))
        items.append({"identifier": draw(st.sampled_from(identifiers)), "offset": offset, "length": length})
        position = offset + length
    return items


@st.composite
def requests(draw: st.DrawFn, max_tokens: int = 60) -> dict[str, Any]:
    """Draw a request line's object that its release can hash."""
    release = draw(st.sampled_from(RELEASE_NAMES))
    contract = Contract.for_vllm(release)
    tokens = draw(st.lists(TOKENS, max_size=max_tokens))
    request: dict[str, Any] = {
        "vllm": release,
        "algorithm": draw(st.sampled_from(contract.algorithms)),
        "hash_seed": draw(st.sampled_from(["0", "42", "", "my-cluster"])),
        "block_size": draw(st.integers(1, 17)),
        "tokens": tokens,
    }
    assert request["algorithm"] in ALGORITHMS
    if draw(st.booleans()):
        request["lora"] = {"name": draw(TEXT), "path": draw(TEXT), "id": draw(st.integers(1, 1 << 40))}
    if draw(st.booleans()):
        request["cache_salt"] = draw(TEXT | st.just(""))
    if tokens and draw(st.booleans()):
        request["multimodal"] = draw(multimodal_items(len(tokens)))
    if draw(st.integers(0, 3)) == 0:
        rows = len(tokens) + draw(st.integers(0, 3))
        request["prompt_embeds"] = {
            "shape": [rows, 3],
            "dtype": "float16",
            "data": draw(st.binary(min_size=rows * 6, max_size=rows * 6)).hex(),
        }
    if contract.lookahead and draw(st.booleans()):
        request["lookahead"] = draw(st.integers(1, 4))
    if draw(st.integers(0, 4)) == 0:
        request["decode_context_parallel_size"] = draw(st.integers(1, 3))
    return request
