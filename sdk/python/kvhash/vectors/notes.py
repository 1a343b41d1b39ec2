"""What each flag of the corpus means: the mistake that it catches, and what that mistake costs a user."""

from __future__ import annotations

__all__ = ["NOTES"]


def _note(mistake: str, cost: str = "every lookup misses; nothing is reported") -> dict[str, str]:
    return {"mistake": mistake, "cost": cost}


_FALSE_HIT = (
    "blocks of different content are taken for each other: false hits, or one tenant sees another's timing"
)

#: Every flag: what mistake its vectors catch, and what the mistake costs.
NOTES: dict[str, dict[str, str]] = {
    "recorded-case": _note("any disagreement with what vLLM's own functions gave for this input"),
    "tokens": _note("token ids serialized otherwise than as a tuple of integers"),
    "integer-widths": _note("an integer head of the wrong width or sign", "misses for some token ids only"),
    "text-widths": _note(
        "a text or bytes head of the wrong width", "misses for some salts and adapters only"
    ),
    "tuple-widths": _note("an array head of the wrong width", "misses for some block sizes only"),
    "seed": _note("NONE_HASH made from the seed as a number, as bytes or not at all"),
    "no-seed": _note("a root claimed where vLLM draws it at random", "hashes that no engine has"),
    "salt": _note("the salt left out, or put into other blocks than block 0", _FALSE_HIT),
    "lora": _note("the adapter left out, or named by what that release does not hash", _FALSE_HIT),
    "multimodal": _note("an image left out of a block that it overlaps, or at a wrong offset", _FALSE_HIT),
    "continuation": _note("a wrong offset in a block where an image continues (it is negative there)"),
    "edges": _note(
        "an image counted in a block beside those that it overlaps, or not in one that it touches"
    ),
    "prompt-embeds": _note("embeddings left out, or hashed in another form than that release's", _FALSE_HIT),
    "mixture": _note("extra keys in a wrong order"),
    "lookahead": _note("look-ahead tokens left out, or a block hashed before they exist"),
    "context-parallel": _note("hashes per block where one covers several under context parallelism"),
    "block-size": _note("coarse blocks hashed anew; theirs is the hash at the last fine boundary"),
    "partial-block": _note("a block hashed before it is full", "publishes hashes that no engine has"),
    "algorithm": _note("an algorithm accepted in a release that lacks it", "hashes that no engine has"),
    "boundary": _note("a change of the recipe applied in the release before it, or after"),
    "aliasing": _note(
        "pickle's back-references by equality instead of identity", "misses with several images"
    ),
    "frames": _note("pickle's frames split elsewhere than CPython splits them", "misses for large blocks"),
    "not-ascii": _note("text measured in characters, or not as UTF-8", "misses for such salts and adapters"),
    "wide-numbers": _note(
        "ids through 32 bits, or through a double, in one of the places where they are hashed",
        "misses for ids that are that large",
    ),
    "far-offsets": _note(
        "an image's offset in 8 or 16 bits",
        "misses where an image starts far into a block or began far before",
    ),
    "many-keys": _note("extra keys of a block cut at some number, or counted in a byte", _FALSE_HIT),
    "interaction": _note(
        "two features each right alone and wrong together: context parallelism, look-ahead, embeddings, keys",
        _FALSE_HIT,
    ),
    "rows": _note("rows of prompt embeddings that belong to no token of the block hashed"),
    "text-forms": _note(
        "texts lower-cased, normalized, trimmed, cut or read as numbers; they are hashed as they are",
        "misses for such salts and adapters, and false hits between texts that become equal",
    ),
    "request-forms": _note(
        "null taken for a value, hexadecimal digits of one case only, ranges that end too early",
        "good lines refused",
    ),
    "external": _note("other 64 bits of the digest, or with another sign"),
    "external-high-bit": _note("published values of 2^63 and more wrapped to negative numbers"),
    "group-id": _note("the group id left out, or little-endian", "blocks of groups taken for each other"),
    "json": _note("a malformed line answered with hashes", "a silently wrong hash"),
    "bad-field": _note("a wrong field ignored or guessed", "a silently wrong hash"),
    "large": _note("an input of many tokens cut short or answered too slowly"),
    "accumulated": _note("any rare disagreement over 100,000 blocks"),
    "real-server": _note("any disagreement with what a real vLLM server published"),
    "release-text": _note("a release written in another way read wrongly", "the recipe of another release"),
    "implementation-defined": _note("a claim to know what depends on the interpreter that runs vLLM", "none"),
    "event-array": _note("fields of array events read at wrong places", "wrong or missing residency"),
    "event-map": _note("map events not read", "no residency at all from 0.24 on"),
    "event-fields": _note("a field of that release not read", "wrong groups, tiers or adapters"),
    "event-encode": _note(
        "events written otherwise than that release writes them", "engines' readers refuse them"
    ),
    "event-unknown": _note(
        "a whole batch lost for one unknown tag or field", "residency lost with each new release"
    ),
    "event-hash-forms": _note(
        "hashes read as one form only (signed, unsigned, bytes)", "no residency, or half of it"
    ),
    "event-rank": _note("a missing or nil rank taken for an error", "no residency without data parallelism"),
    "event-sglang": _note("SGLang's events not read", "no residency for these engines"),
    "event-hostile": _note("a crash, or a whole batch lost for one bad event", "residency lost"),
    "event-malformed": _note("bytes that are no batch crash the reader", "the router stops"),
    "stream-gap": _note("lost messages not noticed", "blocks that left the cache are still routed to"),
    "stream-replay": _note("replayed batches applied after newer live ones", "removed blocks rise again"),
    "stream-restart": _note("an engine's restart taken for old messages", "blocks of the dead process stay"),
    "stream-late": _note(
        "a late join taken for a complete view", "the index is believed empty of older blocks"
    ),
    "stream-duplicate": _note(
        "one message applied twice, or two copies of a block counted as one", "wrong residency"
    ),
    "stream-clear": _note("AllBlocksCleared not applied", "the whole index is stale"),
    "engine-hit": _note(
        "a hit counted past the last block that is there, or up to the last token",
        "predicted hits that the engine does not have",
    ),
    "engine-evict": _note(
        "removals not applied, or applied to the wrong copy", "routing to blocks that are gone"
    ),
    "engine-reset": _note("blocks kept after a reset", "the whole index is stale"),
    "engine-skip": _note(
        "a hit expected for a request that reads no cache (prompt logprobs)",
        "a wrong expectation of its cost",
    ),
    "engine-groups": _note(
        "the KV cache groups' blocks mixed, which share hashes", "blocks of one group taken for another's"
    ),
    "stream-ranks": _note("sequence numbers of several ranks mixed", "false gaps"),
}
