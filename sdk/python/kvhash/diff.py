"""Why two prompts, or two lists of hashes, stop agreeing: the first diverging block and the likely reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .block_hash import ChainValue, json_hash, low64
from .contract import Contract
from .extra_keys import ExtraKeys, RequestKeys, json_keys
from .request import HashRequest

__all__ = ["Difference", "diff_hashes", "diff_requests"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a comparison.

    ``common_blocks``: leading blocks with equal hashes. ``first_block``: index of the first that differs, None when
    one list is a prefix of the other or they are equal. ``reasons``: most likely first; each a (code, sentence).
    """

    equal: bool
    common_blocks: int
    first_block: int | None
    reasons: tuple[tuple[str, str], ...]
    left: ChainValue | None = None
    right: ChainValue | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "equal": self.equal,
            "common_blocks": self.common_blocks,
            "first_block": self.first_block,
            "left": None if self.left is None else json_hash(self.left),
            "right": None if self.right is None else json_hash(self.right),
            "reasons": [{"code": code, "message": message} for code, message in self.reasons],
        }


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def _shift(longer: Sequence[int], shorter: Sequence[int], limit: int = 4) -> int:
    """Return how many leading tokens (1 to `limit`) `longer` has before `shorter` begins, 0 if it is no such shift."""
    for extra in range(1, limit + 1):
        window = min(32, len(shorter), len(longer) - extra)
        if window > 0 and list(longer[extra : extra + window]) == list(shorter[:window]):
            return extra
    return 0


def diff_requests(left: HashRequest, right: HashRequest) -> Difference:
    """Compare two requests block by block; raises as `HashRequest.chain` does."""
    left_chain, right_chain = left.chain(), right.chain()
    a, b = left_chain.block_hashes, right_chain.block_hashes
    common = _common(a, b)
    first = common if common < min(len(a), len(b)) else None
    reasons = []
    if first is not None:
        reasons = _settings_reasons(left, right) + _token_reasons(left, right, first)
        if not reasons or reasons[0][0] not in ("block-size", "chain-values"):
            keys = [chain.extra_keys()[first] for chain in (left_chain, right_chain)]
            reasons += _key_reasons(left, right, first, keys)
        if not reasons:
            reasons.append(("unknown", "the settings, tokens and keys agree, yet the hashes differ"))
    elif len(a) != len(b):
        reasons = _settings_reasons(left, right) if not common else []
        reasons.append(
            ("length", f"one is a prefix of the other: {len(a)} and {len(b)} full blocks, {common} in common")
        )
    elif not a:
        reasons.append(("no-full-block", "neither prompt fills a block, so there is nothing to compare"))
    return Difference(
        equal=a == b,
        common_blocks=common,
        first_block=first,
        reasons=tuple(reasons),
        left=a[first] if first is not None else None,
        right=b[first] if first is not None else None,
    )


def _settings_reasons(left: HashRequest, right: HashRequest) -> list[tuple[str, str]]:
    reasons = []
    one, two = left.hasher(), right.hasher()
    if one.span != two.span:
        reasons.append(
            ("block-size", f"a hash covers {one.span} tokens on one side, {two.span} on the other")
        )
    if one.algorithm != two.algorithm:
        reasons.append(("algorithm", f"{one.algorithm} on one side, {two.algorithm} on the other"))
    if one.contract.chain_values != two.contract.chain_values:
        reasons.append(
            (
                "chain-values",
                f"{one.contract.release} chains integers or bytes otherwise than {two.contract.release}",
            )
        )
    same_values = one.contract.chain_values == two.contract.chain_values
    if one.none_hash != two.none_hash and one.algorithm == two.algorithm and same_values:
        seeds = [
            "unset" if request.hash_seed is None else repr(request.hash_seed) for request in (left, right)
        ]
        reasons.append(
            (
                "root",
                f"NONE_HASH differs (PYTHONHASHSEED {seeds[0]} in {one.contract.release}, {seeds[1]} in "
                f"{two.contract.release}), so every block differs",
            )
        )
    keyed = any(
        not RequestKeys(r.lora, r.cache_salt, r.multimodal, r.prompt_embeds).empty for r in (left, right)
    )
    if keyed and _key_shape(one.contract) != _key_shape(two.contract):
        reasons.append(
            ("recipe", f"{one.contract.release} and {two.contract.release} write extra keys differently")
        )
    if one.lookahead != two.lookahead:
        reasons.append(("lookahead", f"look-ahead {one.lookahead} on one side, {two.lookahead} on the other"))
    return reasons


def _key_shape(contract: Contract) -> tuple[object, ...]:
    return (contract.tagged_keys, contract.lora_key, contract.multimodal_key, contract.prompt_embeds_key)


def _token_reasons(left: HashRequest, right: HashRequest, first: int) -> list[tuple[str, str]]:
    span = left.hasher().span
    at = _common(left.tokens, right.tokens)
    if at == min(len(left.tokens), len(right.tokens)):
        return []
    if left.hasher().span == span == right.hasher().span and at >= (first + 1) * span + left.lookahead:
        return []  # the difference lies behind the block in question
    for name, longer, shorter in (
        ("first", left.tokens, right.tokens),
        ("second", right.tokens, left.tokens),
    ):
        extra = _shift(longer, shorter)
        if at == 0 and extra:
            heads = ", ".join(map(str, longer[:extra]))
            return [
                (
                    "leading-token",
                    f"the {name} has {extra} more leading token{'s' if extra > 1 else ''} ({heads}), as when BOS is "
                    "added once more or left out; all blocks are shifted",
                )
            ]
    return [
        (
            "token",
            f"token {at} (block {at // span}) is {left.tokens[at]} on one side, {right.tokens[at]} on the other",
        )
    ]


def _key_reasons(
    left: HashRequest, right: HashRequest, first: int, keys: list[ExtraKeys]
) -> list[tuple[str, str]]:
    reasons = []
    if (left.cache_salt or None) != (right.cache_salt or None):
        reasons.append(
            (
                "cache-salt",
                f"cache salt {left.cache_salt!r} on one side, {right.cache_salt!r} on the other; it is in block 0's "
                "key and so changes every block",
            )
        )
    if left.lora != right.lora:
        for name in ("name", "path", "id"):
            a, b = (getattr(request.lora, name, None) for request in (left, right))
            hashed = any(name in request.hasher().contract.lora_key.split("_") for request in (left, right))
            if a != b and hashed:
                reasons.append((f"lora-{name}", f"LoRA {name} {a!r} on one side, {b!r} on the other"))
    shown = [json_keys(key) for key in keys]
    if shown[0] != shown[1]:
        if left.multimodal != right.multimodal:
            reasons.append(
                ("multimodal", f"block {first} holds other multimodal items: {shown[0]} and {shown[1]}")
            )
        elif left.prompt_embeds != right.prompt_embeds:
            reasons.append(("prompt-embeds", f"the prompt embeddings of block {first} differ"))
        elif not reasons:
            reasons.append(("extra-keys", f"the extra keys of block {first} are {shown[0]} and {shown[1]}"))
    return reasons


def diff_hashes(left: Sequence[bytes | int], right: Sequence[bytes | int]) -> Difference:
    """Compare two observed lists of hashes, without knowing what made them.

    Digests are compared with 64-bit values by their low 64 bits.
    """
    wide = all(isinstance(value, bytes) and len(value) > 8 for value in (*left, *right))
    a: list[Any]
    b: list[Any]
    a, b = (list(left), list(right)) if wide else (list(map(low64, left)), list(map(low64, right)))
    common = _common(a, b)
    first = common if common < min(len(a), len(b)) else None
    reasons: list[tuple[str, str]] = []
    if first is None and len(a) != len(b):
        reasons.append(("length", f"one is a prefix of the other: {len(a)} and {len(b)} blocks"))
    elif first is not None:
        reasons = _list_reasons(a, b, first, wide)
    return Difference(a == b, common, first, tuple(reasons))


def _list_reasons(a: list[Any], b: list[Any], first: int, wide: bool) -> list[tuple[str, str]]:
    reasons = []
    if wide and {len(x) for x in a} != {len(x) for x in b}:
        reasons.append(
            ("algorithm", "the digests have different lengths: 32 bytes is sha256*, 16 bytes xxhash*")
        )
    for coarse, fine, side in ((a, b, "second"), (b, a, "first")):
        for factor in (2, 4, 8, 16):
            view = fine[factor - 1 :: factor]
            if view and _common(view, coarse) == min(len(view), len(coarse)) > 0:
                reasons.append(
                    (
                        "block-size",
                        f"the {side} list has {factor} hashes for one of the other: a finer block size",
                    )
                )
                break
    if first == 0 and not reasons:
        shared = set(a) & set(b)
        if shared:
            reasons.append(("order", f"{len(shared)} hashes are in both lists, at other places"))
        else:
            reasons.append(
                (
                    "from-the-start",
                    "already block 0 differs: another NONE_HASH (PYTHONHASHSEED), algorithm, block size, cache salt, "
                    "LoRA adapter, or one more leading token (BOS); `kvhash identify` with the tokens tells which",
                )
            )
    elif not reasons:
        reasons.append(
            (
                "from-the-middle",
                f"the first {first} blocks agree, so root, algorithm, block size and salt are the same: a token or a "
                f"multimodal item in block {first} differs",
            )
        )
    return reasons
