"""Mistakes put into a copy of the SDK: the corpus catches every one, and the runner names most of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhash.vectors import load_corpus
from kvhash.vectors.conformance import run, select

from .programs import CORPUS, changed_sdk, sdk_program

# name: (where it shows, the mistake that the runner is to name or None, [(file, old, new)])
_LOW64 = 'int.from_bytes(value[-8:], "big")) & _MASK64'
_BLOCK = "parent = hash_function.plain_block(parent, block)"
MUTANTS: dict[str, tuple[str, str | None, list[tuple[str, str, str]]]] = {
    "little-endian": (
        "chains/sha256-cbor-count*",
        "external-little-endian",
        [("block_hash.py", _LOW64, 'int.from_bytes(value[-8:], "little")) & _MASK64')],
    ),
    "first 8 bytes": (
        "chains/sha256-cbor-count*",
        "external-first-8-bytes",
        [("block_hash.py", _LOW64, 'int.from_bytes(value[:8], "big")) & _MASK64')],
    ),
    "signed overflow": (
        "chains/sha256-c*",
        "external-signed-overflow",
        [
            (
                "block_hash.py",
                "isinstance(value, int) else low64(value)",
                "isinstance(value, int) else to_signed(low64(value))",
            )
        ],
    ),
    "64 bits too early": (
        "chains/sha256-c*",
        "external-low-64-too-early",
        [
            (
                "block_hash.py",
                "return value if isinstance(value, int) else low64(value)",
                "return low64(value)",
            )
        ],
    ),
    "empty tuple for null": (
        "chains/sha256-cbor-count*",
        "empty-tuple-for-null",
        [("hasher.py", 'b"\\x83", b"\\xf6"', 'b"\\x83", b"\\x80"')],
    ),
    "salt on every block": (
        "extra_keys/sha256-cbor-salt*",
        "salt-on-every-block",
        [("extra_keys.py", "if self.cache_salt and start == 0:", "if self.cache_salt:")],
    ),
    "offset from the request's start": (
        "extra_keys/sha256-cbor-mm*",
        "mm-offset-from-request-start",
        [("extra_keys.py", "offset = item.offset - start", "offset = item.offset")],
    ),
    "tag missing": (
        "extra_keys/sha256-cbor-mm*",
        "tags-missing",
        [("contract.py", '"tagged_keys": True', '"tagged_keys": False')],
    ),
    "seed as number": (
        "none_hash/sha256-cbor*",
        "seed-as-number",
        [
            (
                "hasher.py",
                "return HashFunction(algorithm, contract)(seed)",
                "return HashFunction(algorithm, contract)(int(seed) if seed.isdecimal() else seed)",
            )
        ],
    ),
    "empty seed is unset": (
        "none_hash/sha256-cbor-empty*",
        "empty-seed-is-unset",
        [("hasher.py", "    seed = hash_seed\n", "    seed = hash_seed or None\n")],
    ),
    "wrong int width in pickle": (
        "chains/sha256-id*",
        "pickle-binint-unsigned",
        [
            (
                "serialize/pickle5.py",
                "if -(1 << 31) <= value < 1 << 31:",
                "if -(1 << 31) <= value < 1 << 32:",
            ),
            (
                "serialize/pickle5.py",
                'value.to_bytes(4, "little", signed=True)',
                '(value % (1 << 32)).to_bytes(4, "little")',
            ),
        ],
    ),
    "no one-byte head in CBOR": (
        "chains/sha256-cbor-id*",
        None,
        [("serialize/cbor.py", "if argument < 1 << 8:", "if argument < 0:")],
    ),
    "no back-reference": (
        "extra_keys/sha256-mm*",
        "pickle-no-back-reference",
        [("serialize/pickle5.py", "id(value) if isinstance(value, Ref) else None", "None")],
    ),
    "back-reference for equal texts": (
        "extra_keys/sha256-mm*",
        "pickle-equal-texts-shared",
        [
            (
                "serialize/pickle5.py",
                "identity = content if not content else id(value) if isinstance(value, Ref) else None",
                "identity = content if isinstance(content, str) else None",
            )
        ],
    ),
    "partial block hashed": (
        "chains/sha256-cbor-count*",
        "partial-block-hashed",
        [
            (
                "hasher.py",
                "while position + span + lookahead <= len(waiting):",
                "while position < len(waiting):",
            )
        ],
    ),
    "parent truncated": (
        "chains/sha256-cbor-count*",
        "parent-truncated-to-64-bits",
        [
            (
                "hasher.py",
                _BLOCK,
                "parent = hash_function.plain_block(parent[-8:] if isinstance(parent, bytes) else parent, block)",
            )
        ],
    ),
    "parent as integer": (
        "chains/sha256-cbor-count*",
        "parent-as-integer",
        [
            (
                "hasher.py",
                _BLOCK,
                "number = parent if isinstance(parent, int) else int.from_bytes(parent, 'big')\n"
                "                parent = hash_function.plain_block(number, block)",
            )
        ],
    ),
    "not chained": (
        "chains/sha256-cbor-*",
        "not-chained",
        [("hasher.py", _BLOCK, "parent = hash_function.plain_block(self.hasher.none_hash, block)")],
    ),
    "digest reversed": (
        "chains/sha256-cbor-count*",
        "digest-little-endian",
        [("hasher.py", "return BlockHash(digest)", "return BlockHash(digest[::-1])")],
    ),
    "one frame": (
        "chains/sha256-frame*",
        "pickle-one-frame",
        [
            ("serialize/pickle5.py", "FRAME_SIZE_TARGET = 64 * 1024", "FRAME_SIZE_TARGET = 1 << 40"),
            ("serialize/pickle5.py", "len(tokens) > 4096", "len(tokens) > 1 << 30"),
        ],
    ),
    "negative integers off by one": (
        "extra_keys/sha256-cbor-mm*",
        "cbor-negative-off-by-one",
        [("serialize/cbor.py", "(_NINT, -1 - value,", "(_NINT, -value,")],
    ),
    "text length in characters": (
        "extra_keys/sha256-cbor-salt*",
        "text-length-in-characters",
        [
            (
                "serialize/cbor.py",
                "return head(_TEXT, len(payload)) + payload",
                "return head(_TEXT, len(value)) + payload[: len(value)]",
            )
        ],
    ),
    "adapter's path missing": (
        "extra_keys/sha256-cbor-lora*",
        "lora-path-missing",
        [
            (
                "extra_keys.py",
                'return ((_LORA, name, self._needed("path", contract)),)',
                "return ((_LORA, name),)",
            )
        ],
    ),
    "adapter by id": (
        "extra_keys/sha256-cbor-lora*",
        "lora-by-id",
        [("contract.py", '"lora_key": "name", ', '"lora_key": "id", ')],
    ),
    "image in its first block only": (
        "extra_keys/sha256-cbor-mm*",
        "mm-first-block-only",
        [("extra_keys.py", "if item.end > start:", "if item.offset >= start:")],
    ),
    "image after its end": (
        "extra_keys/sha256-cbor-mm*",
        "mm-edge-included",
        [
            ("extra_keys.py", "if item.end > start:", "if item.end >= start:"),
            ("hasher.py", ".end <= start:", ".end < start:"),
        ],
    ),
    "image without offset": (
        "extra_keys/sha256-cbor-mm*",
        None,
        [("contract.py", '"multimodal_key": "identifier_and_offset"', '"multimodal_key": "identifier"')],
    ),
    "embeddings as rows": (
        "extra_keys/sha256-cbor-embeds*",
        "embeds-raw-bytes",
        [("contract.py", '"prompt_embeds_key": "sha256"', '"prompt_embeds_key": "bytes"')],
    ),
    "the whole embedding matrix": (
        "extra_keys/sha256-cbor-embeds*",
        "embeds-whole-matrix",
        [
            (
                "extra_keys.py",
                "return self.data[start * self.row_size : end * self.row_size]",
                "return self.data",
            )
        ],
    ),
    "keys in reverse": (
        "extra_keys/sha256-cbor-mix*",
        None,
        [("extra_keys.py", "return tuple(keys) or None", "return tuple(keys[::-1]) or None")],
    ),
    "look-ahead without its keys": (
        "lookahead/sha256-cbor*",
        "lookahead-keys-of-block-only",
        [("hasher.py", "end = start + self.hasher.span + len(following)", "end = start + self.hasher.span")],
    ),
    "look-ahead too early": (
        "lookahead/sha256-cbor*",
        "lookahead-block-too-early",
        [
            (
                "hasher.py",
                "while position + span + lookahead <= len(waiting):",
                "while position + span <= len(waiting):",
            )
        ],
    ),
    "context parallelism ignored": (
        "context_parallel/sha256-cbor*",
        "context-parallel-ignored",
        [
            (
                "hasher.py",
                "return self.block_size * self.decode_context_parallel_size",
                "return self.block_size",
            )
        ],
    ),
    "a default root before there was one": (
        "none_hash/*unset*",
        "default-root-too-early",
        [("contract.py", "    default_seed=None,", '    default_seed="vllm-none-hash",')],
    ),
    "tags one release late": (
        "extra_keys/sha256-cbor-salt*",
        "tags-missing",
        [("contract.py", "_V(0, 31, 0)", "_V(0, 31, 1)")],
    ),
    "an algorithm too early": (
        "chains/xxhash-count*",
        None,
        [("contract.py", "_V(0, 13, 0)", "_V(0, 12, 0)")],
    ),
}

NAMED = [name for name, (_, mistake, _) in MUTANTS.items() if mistake]


def test_there_are_enough_mutants() -> None:
    """At least 25 mistakes are tried, of which the runner must name at least 15."""
    assert len(MUTANTS) >= 25
    assert len(NAMED) >= 15


@pytest.mark.parametrize("name", MUTANTS)
def test_the_corpus_catches_the_mistake_and_the_runner_names_it(name: str, tmp_path: Path) -> None:
    """A hasher with one mistake fails, answers every line all the same, and is told its mistake first."""
    pattern, mistake, changes = MUTANTS[name]
    corpus = load_corpus(CORPUS)
    cases = select(corpus, pattern=pattern)
    report = run(sdk_program(changed_sdk(tmp_path, changes)), corpus, cases)
    failed = [outcome for outcome in report.outcomes if outcome.status == "failed"]
    assert failed
    assert not [fault for fault in report.faults if fault.kind in ("hang", "rubbish", "out-of-order")]
    if mistake is not None:
        best = report.mistakes()
        assert best, "no known mistake was recognised"
        top = [found for found in best if found[1] / found[2] == best[0][1] / best[0][2]]
        assert mistake in [found[0] for found in top]
