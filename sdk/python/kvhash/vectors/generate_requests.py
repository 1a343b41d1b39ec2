"""Makes the vectors that are requests: roots, chains, extra keys, look-ahead, context parallelism, recorded ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvhash import BlockHasher, parse_request
from kvhash.contract import ALGORITHMS, CHANGES, Release
from kvhash.serialize import Ref, encode_pickle5

from .inputs import byte_stream, tokens
from .record import vector
from .releases import ranges, since_of
from .request_maker import RequestMaker, Vectors, request_answer

__all__ = [
    "ONE_IMAGE",
    "OTHER_IMAGE",
    "embeds_of",
    "images_of",
    "lora_of",
    "make_requests",
    "recorded_cases",
    "request_of",
]

# --- the recorded cases ---------------------------------------------------------------------------------------

_RECORDED_NAMES = {"algo": "algorithm", "seed": "hash_seed", "salt": "cache_salt", "mm": "multimodal"}
_RECORDED_KINDS = {
    "text": ("chains", ("tokens",)),
    "ints": ("chains", ("integer-widths",)),
    "salt": ("extra_keys", ("salt",)),
    "lora": ("extra_keys", ("lora",)),
    "mm": ("extra_keys", ("multimodal",)),
    "embeds": ("extra_keys", ("prompt-embeds",)),
    "lookahead": ("lookahead", ("lookahead",)),
}


def recorded_cases(data: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (case, request without release) of the recorded hash cases under ``tests/data``."""
    with gzip.open(data / "oracle" / "hash" / "cases.json.gz") as file:
        cases = json.load(file)
    for case in cases:
        request = {
            _RECORDED_NAMES.get(key, key): value
            for key, value in case.items()
            if key not in ("id", "kind") and (value is not None or key == "seed")
        }
        yield case, request


def _add_recorded(maker: RequestMaker, data: Path) -> None:
    for case, request in recorded_cases(data):
        kind, listed = _RECORDED_KINDS[case["kind"]]
        flags = list(listed)
        if request.get("hash_seed") is None:
            flags.append("no-seed")
        keys = [key for key in ("lora", "cache_salt", "multimodal", "prompt_embeds") if request.get(key)]
        if len(keys) > 1:
            flags.append("mixture")
        said = f"{case['kind']}, {request['algorithm']}, {len(request['tokens'])} tokens"
        maker.add(kind, case["id"], said, request, ("recorded-case", *flags))


# --- our own --------------------------------------------------------------------------------------------------


def request_of(algorithm: str, ids: Any, **more: Any) -> dict[str, Any]:
    """Return a request of the tokens `ids`, 4 a block, seed 0."""
    return {"algorithm": algorithm, "hash_seed": "0", "block_size": 4, "tokens": ids, **more}


def _each_algorithm() -> Iterator[tuple[str, str]]:
    """Yield every algorithm's name and its short form in ids."""
    for name in ALGORITHMS:
        yield name, name.replace("_", "-")


_SEEDS = {
    "zero": "0",
    "empty": "",
    "one": "1",
    "random": "random",
    "leading-zero": "007",
    "max": "4294967295",
    "space": " 0",
    "text": "my-cluster",
    "not-ascii": "größe",
    "emoji": "\U0001f511",
    "c23": "s" * 23,
    "c24": "s" * 24,
    "c255": "s" * 255,
    "c256": "s" * 256,
}
#: Texts around 64 KiB leave pickle's frame; two algorithms are enough for them.
_HUGE = {"c65535": "s" * 65535, "c65536": "s" * 65536}


def _add_roots(maker: RequestMaker) -> None:
    for algorithm, short in _each_algorithm():
        for slug, seed in _SEEDS.items():
            flags = ["seed", *(["not-ascii"] if not seed.isascii() else [])]
            if len(seed) > 20:
                flags.append("text-widths")
            request = {**request_of(algorithm, []), "hash_seed": seed}
            maker.add("none_hash", f"{short}-{slug}", f"NONE_HASH of seed {seed[:30]!r}", request, flags)
        if algorithm in ("sha256", "sha256_cbor"):
            for slug, seed in _HUGE.items():
                request = {**request_of(algorithm, []), "hash_seed": seed}
                maker.add(
                    "none_hash",
                    f"{short}-{slug}",
                    f"NONE_HASH of a seed of {len(seed)}",
                    request,
                    ["seed", "text-widths"],
                    first=since_of("chain_values", "bytes"),
                )
        unset = {**request_of(algorithm, [1, 2, 3, 4]), "hash_seed": None}
        maker.add("none_hash", f"{short}-unset", "PYTHONHASHSEED not set", unset, ["no-seed"], all_wrong=True)


def _add_chains(maker: RequestMaker) -> None:
    edges = [0, 23, 24, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1]
    edges += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    for algorithm, short in _each_algorithm():
        for value in edges:
            maker.add(
                "chains",
                f"{short}-id-{value}",
                f"token id {value}",
                request_of(algorithm, [value] * 4),
                ["integer-widths"],
            )
        for count in (0, 1, 3, 4, 5, 7, 8, 9):
            maker.add(
                "chains",
                f"{short}-count-{count}",
                f"{count} tokens, 4 a block",
                request_of(algorithm, tokens("count", count, 1000)),
                ["tokens", "partial-block"],
                all_wrong=True,
            )
        for size in (1, 2, 3, 23, 24, 25, 255, 256, 257, 1024):
            request = {**request_of(algorithm, _spec(f"size-{size}", 2 * size, 150000)), "block_size": size}
            maker.add("chains", f"{short}-block-{size}", f"{size} tokens a block", request, ["tuple-widths"])
        for size in (13100, 13200, 21840, 21850, 65536):
            # Ids of 5 bytes and of 3: where a frame of 64 KiB ends depends on the bytes, not on the count.
            wide = {**request_of(algorithm, _spec(f"frame-{size}", size, 150000)), "block_size": size}
            maker.add(
                "chains", f"{short}-frame-{size}", f"one block of {size} tokens", wide, ["frames", "large"]
            )
        long = {**request_of(algorithm, _spec("long", 16 * 2000, 150000)), "block_size": 16}
        maker.add("chains", f"{short}-long", "a chain of 2,000 blocks", long, ["large"])
        maker.add(
            "chains",
            f"{short}-repeated",
            "the same block three times",
            request_of(algorithm, [7, 8, 9, 10] * 3),
            ["tokens"],
            all_wrong=True,
        )
    for text in ("builtin", "sha512", "SHA256", "", "sha256_cbor "):
        slug = "".join(c if c.isalnum() else "-" for c in text) or "empty"
        maker.add(
            "chains",
            f"algorithm-{slug}",
            f"algorithm {text!r}",
            {**request_of(text, [1, 2, 3, 4])},
            ["algorithm"],
        )


def _spec(seed: str, count: int, vocabulary: int) -> dict[str, Any]:
    return {"generate": {"seed": seed, "count": count, "vocabulary": vocabulary}}


_TEXTS = {
    "short": "sql",
    "c23": "t" * 23,
    "c24": "t" * 24,
    "c255": "t" * 255,
    "c256": "t" * 256,
    "not-ascii": "münchen",
    "emoji": "\U0001f511\U0001f511",
    "nul": "a\0b",
    "quote": 'a"b\\c\n',
    "combining": "e\u0301",
    "number": "123",
}


def _text_flags(text: str) -> list[str]:
    return [*(["not-ascii"] if not text.isascii() else []), *(["text-widths"] if len(text) > 22 else [])]


def lora_of(name: str = "sql", path: str = "adapters/sql", identity: int = 3) -> dict[str, Any]:
    """Return an adapter with everything that any release hashes."""
    return {"name": name, "path": path, "id": identity}


def images_of(*items: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Return images, each (identifier, offset, length)."""
    return [{"identifier": name, "offset": offset, "length": length} for name, offset, length in items]


ONE_IMAGE, OTHER_IMAGE, _C = "img-a3f1", "img-b7c2", "img-c9d4"
_PLACES = {
    "first-token": [(ONE_IMAGE, 0, 1)],
    "last-token": [(ONE_IMAGE, 3, 1)],
    "whole-block": [(ONE_IMAGE, 0, 4)],
    "second-block": [(ONE_IMAGE, 4, 4)],
    "over-edge": [(ONE_IMAGE, 3, 2)],
    "ends-at-edge": [(ONE_IMAGE, 1, 3)],
    "three-blocks": [(ONE_IMAGE, 2, 9)],
    "all-blocks": [(ONE_IMAGE, 0, 16)],
    "two-in-block": [(ONE_IMAGE, 0, 1), (OTHER_IMAGE, 2, 1)],
    "two-equal-in-block": [(ONE_IMAGE, 0, 1), (ONE_IMAGE, 2, 1)],
    "three-in-block": [(ONE_IMAGE, 0, 1), (OTHER_IMAGE, 1, 1), (_C, 2, 1)],
    "four-equal": [(ONE_IMAGE, 0, 1), (ONE_IMAGE, 1, 1), (ONE_IMAGE, 2, 1), (ONE_IMAGE, 3, 1)],
    "adjacent-over-edge": [(ONE_IMAGE, 1, 4), (OTHER_IMAGE, 5, 4)],
    "end-and-start": [(ONE_IMAGE, 0, 4), (OTHER_IMAGE, 4, 4)],
    "one-each": [(ONE_IMAGE, 0, 2), (OTHER_IMAGE, 4, 2), (_C, 8, 2)],
    "past-full-blocks": [(ONE_IMAGE, 14, 4)],
    "not-in-any": [(ONE_IMAGE, 16, 2)],
    "identifier-mm": [("mm", 0, 2)],
    "identifier-tag": [("cache_salt", 0, 1), ("lora", 2, 1)],
}


def embeds_of(rows: int, hidden: int, dtype: str, seed: str = "embeds") -> dict[str, Any]:
    """Return an embedding matrix of generated bytes."""
    size = rows * hidden * (4 if dtype == "float32" else 2)
    data = b"".join(islice(byte_stream(seed), size // 32 + 1))[:size]
    return {"shape": [rows, hidden], "dtype": dtype, "data": data.hex()}


def _add_extra_keys(maker: RequestMaker) -> None:
    ids = tokens("keys", 18, 150000)
    for algorithm, short in _each_algorithm():

        def add(
            slug: str, name: str, flags: Iterable[str], _a: str = algorithm, _s: str = short, **keys: Any
        ) -> None:
            maker.add("extra_keys", f"{_s}-{slug}", name, request_of(_a, ids, **keys), flags, all_wrong=True)

        for slug, text in _TEXTS.items():
            add(f"salt-{slug}", f"salt {text[:20]!r}", ["salt", *_text_flags(text)], cache_salt=text)
        if algorithm in ("sha256", "sha256_cbor"):
            for slug, text in _HUGE.items():
                maker.add(
                    "extra_keys",
                    f"{short}-salt-{slug}",
                    f"a salt of {len(text)} characters",
                    request_of(algorithm, ids[:4], cache_salt=text),
                    ["salt", "text-widths", "frames"],
                    first=since_of("tagged_keys", True),
                )
        add("salt-empty", "an empty salt is none", ["salt"], cache_salt="")
        for slug in ("short", "c24", "c256", "not-ascii", "quote"):
            add(
                f"lora-{slug}",
                f"adapter {_TEXTS[slug][:20]!r}",
                ["lora", *_text_flags(_TEXTS[slug])],
                lora=lora_of(name=_TEXTS[slug], path=f"adapters/{_TEXTS[slug]}"),
            )
        for identity in (1, 23, 24, 255, 256, 65536, 1 << 31, 1 << 32):
            add(f"lora-id-{identity}", f"adapter id {identity}", ["lora"], lora=lora_of(identity=identity))
        add("lora-other-path", "the same adapter at another path", ["lora"], lora=lora_of(path="/models/sql"))
        for left_out in ("name", "path", "id"):
            lora = {key: value for key, value in lora_of().items() if key != left_out}
            add(f"lora-no-{left_out}", f"an adapter without its {left_out}", ["lora", "bad-field"], lora=lora)
        for slug, places in _PLACES.items():
            flags = ["multimodal", "edges"]
            if len(places) > 1:
                flags.append("aliasing")
            if any((start + length - 1) // 4 > start // 4 for _, start, length in places):
                flags.append("continuation")
            add(f"mm-{slug}", f"images: {slug}", flags, multimodal=images_of(*places))
        for dtype, hidden in (("float32", 4), ("float16", 3), ("bfloat16", 8), ("float32", 33)):
            add(
                f"embeds-{dtype}-{hidden}",
                f"prompt embeddings, {dtype}, hidden size {hidden}",
                ["prompt-embeds"],
                prompt_embeds=embeds_of(18, hidden, dtype),
            )
        add(
            "embeds-more-rows",
            "more rows than tokens",
            ["prompt-embeds"],
            prompt_embeds=embeds_of(24, 2, "float32"),
        )
        everything: dict[str, Any] = {
            "lora": lora_of(),
            "cache_salt": "tenant-7",
            "multimodal": images_of((ONE_IMAGE, 1, 6), (OTHER_IMAGE, 8, 2)),
            "prompt_embeds": embeds_of(18, 2, "float16"),
        }
        names = list(everything)
        for mask in range(3, 16):
            chosen = [name for bit, name in enumerate(names) if mask >> bit & 1]
            if len(chosen) > 1:
                add(
                    f"mix-{'-'.join(name.split('_')[0] for name in chosen)}",
                    " and ".join(chosen),
                    ["mixture"],
                    **{name: everything[name] for name in chosen},
                )
        add(
            "salt-is-adapter-name",
            "a salt equal to an adapter's name",
            ["salt", "lora"],
            cache_salt="adapter-x",
        )
        add(
            "adapter-is-salt",
            "that adapter, without salt: the same first hash before tags",
            ["salt", "lora"],
            lora=lora_of(name="adapter-x", path="adapters/x"),
        )


def _add_lookahead(maker: RequestMaker) -> None:
    first = since_of("lookahead", True)
    for algorithm, short in _each_algorithm():
        if algorithm.endswith("64bit"):
            continue
        for lookahead in (1, 2, 3, 5):
            for count in (4, 5, 8, 9, 12, 16):
                request = request_of(algorithm, tokens("ahead", count, 150000), lookahead=lookahead)
                maker.add(
                    "lookahead",
                    f"{short}-{lookahead}-of-{count}",
                    f"look-ahead {lookahead}, {count} tokens",
                    request,
                    ["lookahead", "partial-block"],
                    first=first,
                    all_wrong=True,
                )
        ids = tokens("ahead", 18, 150000)
        for slug, places in _PLACES.items():
            if places[-1][1] + places[-1][2] <= 18:
                request = request_of(algorithm, ids, lookahead=1, multimodal=images_of(*places))
                maker.add(
                    "lookahead",
                    f"{short}-mm-{slug}",
                    f"look-ahead 1, images: {slug}",
                    request,
                    ["lookahead", "multimodal"],
                    first=first,
                    all_wrong=True,
                )
        mixed = request_of(
            algorithm,
            ids,
            lookahead=2,
            lora=lora_of(),
            cache_salt="t-1",
            multimodal=images_of((ONE_IMAGE, 5, 1)),
        )
        maker.add(
            "lookahead",
            f"{short}-mixture",
            "look-ahead 2, every key",
            mixed,
            ["lookahead", "mixture"],
            first=first,
            all_wrong=True,
        )
        embeds = request_of(algorithm, ids, lookahead=1, prompt_embeds=embeds_of(18, 2, "float32"))
        maker.add(
            "lookahead",
            f"{short}-embeds",
            "look-ahead 1, prompt embeddings",
            embeds,
            ["lookahead", "prompt-embeds"],
            first=first,
            all_wrong=True,
        )
    early = request_of("sha256_cbor", tokens("ahead", 9, 1000), lookahead=1)
    maker.add("lookahead", "too-early", "look-ahead in a release without it", early, ["lookahead"])


def _add_context_parallel(maker: RequestMaker) -> None:
    for algorithm, short in _each_algorithm():
        for size in (1, 2, 4):
            for count in (7, 8, 16, 17):
                request = request_of(
                    algorithm, tokens("dcp", count, 150000), decode_context_parallel_size=size
                )
                maker.add(
                    "context_parallel",
                    f"{short}-{size}-of-{count}",
                    f"{size} context-parallel ranks, {count} tokens",
                    request,
                    ["context-parallel"],
                    all_wrong=True,
                )
        request = request_of(
            algorithm,
            tokens("dcp", 17, 150000),
            decode_context_parallel_size=2,
            cache_salt="t-1",
            multimodal=images_of((ONE_IMAGE, 3, 8)),
        )
        maker.add(
            "context_parallel",
            f"{short}-keys",
            "with salt and image",
            request,
            ["context-parallel", "mixture"],
            all_wrong=True,
        )


def _add_shared_characters(maker: RequestMaker) -> None:
    """Two texts of one character: whether they are one object is the interpreter's affair."""
    first = since_of("multimodal_key", "identifier_and_offset")
    request = request_of("sha256", [1, 2, 3, 4], multimodal=images_of(("x", 0, 1), ("x", 2, 1)))
    for found in ranges(lambda release: request_answer({**request, "vllm": release}), Release.parse(first)):
        distinct = found.answer
        parsed = parse_request({**request, "vllm": str(found.since)})
        hasher: BlockHasher = parsed.hasher()
        (keys,) = parsed.chain().extra_keys()
        one = Ref("x")

        def share(value: Any, one: Ref = one) -> Any:
            return tuple(map(share, value)) if isinstance(value, tuple) else one if value == "x" else value

        data = encode_pickle5((hasher.none_hash, (1, 2, 3, 4), share(keys)))
        value = hasher.hash_function.keep(hasher.hash_function._digest(data))
        assert isinstance(value, bytes)
        shared = {
            **distinct,
            "block_hashes": [value.hex()],
            "external": [str(int.from_bytes(value[-8:], "big"))],
        }
        maker.made["extra_keys"].append(
            vector(
                f"extra_keys/one-character-twice/{found.since}",
                "one identifier of one character twice in a block",
                flags=["implementation-defined", "aliasing"],
                since=str(found.since),
                until=None if found.until is None else str(found.until),
                result="implementation_defined",
                input={"request": request, "vllm": found.asked(maker.real)},
                expected=distinct,
                accepted=[distinct, shared],
            )
        )


def _add_captures(maker: RequestMaker, data: Path) -> None:
    """What a real server published, with the requests that it was given."""
    for path in sorted((data / "captures").glob("*.json")):
        run = json.loads(path.read_bytes())
        release = path.stem.split("-")[1]
        published: set[str] = set()
        for _topic, _sequence, payload in run["frames"]:
            for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]:
                if event["type"] == "BlockStored":
                    published |= {v.hex() if isinstance(v, bytes) else str(v) for v in event["block_hashes"]}
        served = [request for request in run["requests"] if "prompt" in request]
        for number, request in enumerate(served):
            line: dict[str, Any] = {
                "algorithm": run["algo"],
                "hash_seed": run["hash_seed"],
                "block_size": run["block_size"],
                "tokens": request["prompt"] + (request["out"] or []),
            }
            if request.get("cache_salt"):
                line["cache_salt"] = request["cache_salt"]
            if request.get("model"):
                line["lora"] = run["lora"]
            expected = request_answer({**line, "vllm": release})
            seen = [
                digest if digest in published else external
                for digest, external in zip(expected["block_hashes"], expected["external"], strict=True)
                if {digest, external} & published
            ]
            maker.made.setdefault("recorded", []).append(
                vector(
                    f"recorded/{path.stem.split('-', 2)[2].replace('_', '-')}-{number}/{release}",
                    f"request {number} to a vLLM {release} server, {run['algo']}",
                    flags=["real-server"],
                    since=release,
                    input={"request": line, "vllm": [release]},
                    expected=expected,
                    published=seen,
                    provenance=f"vLLM {release}, {path.stem}: the hashes that its publisher sent",
                )
            )


def make_requests(data: Path, real: Iterable[Release]) -> Vectors:
    """Return every vector that is a request line, by kind. `data`: the recorded outputs, ``tests/data``."""
    maker = RequestMaker(real)
    from .generate_lines import add_bad_fields, add_lines, add_release_texts
    from .generate_seldom import SELDOM

    steps: tuple[Callable[[RequestMaker], None], ...] = (
        _add_roots,
        _add_chains,
        _add_extra_keys,
        _add_lookahead,
        _add_context_parallel,
        add_bad_fields,
        add_lines,
        add_release_texts,
        _add_shared_characters,
    )
    for step in steps:
        step(maker)
    _add_recorded(maker, data)
    _add_captures(maker, data)
    for step in SELDOM:
        step(maker)
    assert {str(change.since) for change in CHANGES if change.hashes} <= {
        item["since"] for items in maker.made.values() for item in items
    }
    return maker.made
