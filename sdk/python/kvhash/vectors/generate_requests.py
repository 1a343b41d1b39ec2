"""Makes the vectors that are request lines: roots, chains, extra keys, look-ahead, context parallelism, requests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvhash import KvHashError, answer, parse_request
from kvhash.contract import ALGORITHMS, CHANGES, Release

from .inputs import expand, tokens
from .mistakes import MISTAKES, wrong_values
from .plain import PlainHasher
from .record import vector
from .releases import NEWEST_TEXT, OLDEST_TEXT, Range, ranges, since_of

__all__ = ["RequestMaker", "make_requests", "request_answer"]

Vectors = dict[str, list[dict[str, Any]]]

#: Codes that mean one refusal; a program may say the general one.
_GENERAL = "invalid-request"
_LINE_CODES = ("invalid-json", _GENERAL)
#: Preimages longer than this are left out: the digest says as much.
_MAX_SERIALIZED = 600


def request_answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a program is to answer, ``{"error": {"codes": [...]}}`` where it is to refuse."""
    try:
        return answer(parse_request(expand(dict(request))))
    except KvHashError as error:
        return {"error": {"codes": sorted({error.code, _GENERAL} if error.code.startswith("invalid-") else {error.code})}}


class RequestMaker:
    """Collects request vectors by kind, each confirmed by the independent hasher."""

    def __init__(self, real: Iterable[Release], wrong_per_vector: int = 3, most_wrong: int = 6) -> None:
        self.real = sorted(real)
        self.made: Vectors = {}
        self._shown: dict[str, int] = {}
        self._wrong_per_vector = wrong_per_vector
        self._most_wrong = most_wrong

    def add(
        self,
        kind: str,
        slug: str,
        name: str,
        request: Mapping[str, Any],
        flags: Iterable[str],
        *,
        first: str = OLDEST_TEXT,
        last: str | None = None,
        all_wrong: bool = False,
    ) -> None:
        """Add one vector for each range of releases that gives `request` one answer."""
        for found in ranges(lambda release: request_answer({**request, "vllm": release}), Release.parse(first)):
            if last is not None and found.since >= Release.parse(last):
                continue
            until = found.until
            if last is not None and (until is None or until > Release.parse(last)):
                until = Release.parse(last)
            self._add_one(kind, slug, name, request, flags, Range(found.since, until, found.answer), all_wrong)

    def _add_one(
        self,
        kind: str,
        slug: str,
        name: str,
        request: Mapping[str, Any],
        flags: Iterable[str],
        found: Range,
        all_wrong: bool,
    ) -> None:
        right = None if "error" in found.answer else found.answer
        asked = expand({**request, "vllm": str(found.since)})
        known_root = right is not None or "unknown-root" in found.answer["error"]["codes"]
        wrong = self._wrong(asked, right, all_wrong) if known_root else {}
        serialized = root = None
        if right is not None:
            plain = PlainHasher(asked)
            if plain.answer() != right:
                raise AssertionError(f"{slug}: the SDK and the independent hasher disagree")
            blocks = [plain.serialize(preimage) for preimage, _ in plain.preimages()]
            if sum(map(len, blocks)) <= _MAX_SERIALIZED:
                serialized = [block.hex() for block in blocks]
            root = plain.serialize(plain.seed_value()).hex()
            root = root if len(root) <= 2 * _MAX_SERIALIZED else None
        bounds = [] if found.since == Release.parse(OLDEST_TEXT) and found.until is None else ["boundary"]
        self.made.setdefault(kind, []).append(
            vector(
                f"{kind}/{slug}/{found.since}",
                name,
                flags=[*flags, *bounds],
                since=str(found.since),
                until=None if found.until is None else str(found.until),
                result="valid" if right else "invalid",
                input={"request": dict(request), "vllm": found.asked(self.real)},
                expected=found.answer,
                serialized=serialized,
                serialized_root=root,
                wrong=wrong or None,
            )
        )

    def _wrong(self, request: dict[str, Any], right: dict[str, Any] | None, more: bool) -> dict[str, str]:
        """Return some wrong values: first those of the mistakes that the fewest vectors show so far."""
        order = sorted(MISTAKES, key=lambda name: (self._shown.get(name, 0), name))
        most = self._most_wrong if more else self._wrong_per_vector
        wrong = wrong_values(request, right, order=order, most=most)
        for name in wrong:
            self._shown[name] = self._shown.get(name, 0) + 1
        return wrong


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
        kind, flags = _RECORDED_KINDS[case["kind"]]
        if request.get("hash_seed") is None:
            flags = (*flags, "no-seed")
        keys = [key for key in ("lora", "cache_salt", "multimodal", "prompt_embeds") if request.get(key)]
        if len(keys) > 1:
            flags = (*flags, "mixture")
        said = f"{case['kind']}, {request['algorithm']}, {len(request['tokens'])} tokens"
        maker.add(kind, case["id"], said, request, ("recorded-case", *flags))


# --- our own --------------------------------------------------------------------------------------------------


def _request(algorithm: str, ids: Any, **more: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "hash_seed": "0", "block_size": 4, "tokens": ids, **more}


def _each_algorithm() -> Iterator[tuple[str, str]]:
    """Yield every algorithm's name and its short form in ids."""
    for name in ALGORITHMS:
        yield name, name.replace("_", "-")


_SEEDS = {
    "zero": "0", "empty": "", "one": "1", "random": "random", "leading-zero": "007", "max": "4294967295",
    "space": " 0", "text": "my-cluster", "not-ascii": "größe", "emoji": "\U0001f511", "c23": "s" * 23, "c24": "s" * 24,
    "c255": "s" * 255, "c256": "s" * 256,
}  # fmt: skip
#: Texts around 64 KiB leave pickle's frame; two algorithms are enough for them.
_HUGE = {"c65535": "s" * 65535, "c65536": "s" * 65536}


def _add_roots(maker: RequestMaker) -> None:
    for algorithm, short in _each_algorithm():
        for slug, seed in _SEEDS.items():
            flags = ["seed", *(["not-ascii"] if not seed.isascii() else [])]
            if len(seed) > 20:
                flags.append("text-widths")
            request = {**_request(algorithm, []), "hash_seed": seed}
            maker.add("none_hash", f"{short}-{slug}", f"NONE_HASH of seed {seed[:30]!r}", request, flags)
        if algorithm in ("sha256", "sha256_cbor"):
            for slug, seed in _HUGE.items():
                request = {**_request(algorithm, []), "hash_seed": seed}
                maker.add("none_hash", f"{short}-{slug}", f"NONE_HASH of a seed of {len(seed)}", request,
                          ["seed", "text-widths"], first=since_of("chain_values", "bytes"))  # fmt: skip
        unset = {**_request(algorithm, [1, 2, 3, 4]), "hash_seed": None}
        maker.add("none_hash", f"{short}-unset", "PYTHONHASHSEED not set", unset, ["no-seed"], all_wrong=True)


def _add_chains(maker: RequestMaker) -> None:
    edges = [0, 23, 24, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1]
    edges += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    for algorithm, short in _each_algorithm():
        for value in edges:
            maker.add(
                "chains", f"{short}-id-{value}", f"token id {value}", _request(algorithm, [value] * 4),
                ["integer-widths"],
            )  # fmt: skip
        for count in (0, 1, 3, 4, 5, 7, 8, 9):
            maker.add(
                "chains", f"{short}-count-{count}", f"{count} tokens, 4 a block",
                _request(algorithm, tokens("count", count, 1000)), ["tokens", "partial-block"], all_wrong=True,
            )  # fmt: skip
        for size in (1, 2, 3, 23, 24, 25, 255, 256, 257, 1024):
            request = {**_request(algorithm, _spec(f"size-{size}", 2 * size, 150000)), "block_size": size}
            maker.add("chains", f"{short}-block-{size}", f"{size} tokens a block", request, ["tuple-widths"])
        for size in (13100, 13200, 21840, 21850, 65536):
            # Ids of 5 bytes and of 3: where a frame of 64 KiB ends depends on the bytes, not on the count.
            wide = {**_request(algorithm, _spec(f"frame-{size}", size, 150000)), "block_size": size}
            maker.add("chains", f"{short}-frame-{size}", f"one block of {size} tokens", wide, ["frames", "large"])
        long = {**_request(algorithm, _spec("long", 16 * 2000, 150000)), "block_size": 16}
        maker.add("chains", f"{short}-long", "a chain of 2,000 blocks", long, ["large"])
        maker.add(
            "chains", f"{short}-repeated", "the same block three times", _request(algorithm, [7, 8, 9, 10] * 3),
            ["tokens"], all_wrong=True,
        )  # fmt: skip
    for text in ("builtin", "sha512", "SHA256", "", "sha256_cbor "):
        slug = "".join(c if c.isalnum() else "-" for c in text) or "empty"
        maker.add(
            "chains", f"algorithm-{slug}", f"algorithm {text!r}", {**_request(text, [1, 2, 3, 4])}, ["algorithm"]
        )  # fmt: skip


def _spec(seed: str, count: int, vocabulary: int) -> dict[str, Any]:
    return {"generate": {"seed": seed, "count": count, "vocabulary": vocabulary}}


_TEXTS = {
    "short": "sql", "c23": "t" * 23, "c24": "t" * 24, "c255": "t" * 255, "c256": "t" * 256, "not-ascii": "münchen", "emoji": "\U0001f511\U0001f511", "nul": "a\0b",
    "quote": 'a"b\\c\n', "combining": "e\u0301", "number": "123",
}  # fmt: skip


def _text_flags(text: str) -> list[str]:
    return [*(["not-ascii"] if not text.isascii() else []), *(["text-widths"] if len(text) > 22 else [])]


def _lora(name: str = "sql", path: str = "adapters/sql", identity: int = 3) -> dict[str, Any]:
    return {"name": name, "path": path, "id": identity}


def _images(*items: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"identifier": name, "offset": offset, "length": length} for name, offset, length in items]


_A, _B, _C = "img-a3f1", "img-b7c2", "img-c9d4"
_PLACES = {
    "first-token": [(_A, 0, 1)], "last-token": [(_A, 3, 1)], "whole-block": [(_A, 0, 4)], "second-block": [(_A, 4, 4)],
    "over-edge": [(_A, 3, 2)], "ends-at-edge": [(_A, 1, 3)], "three-blocks": [(_A, 2, 9)], "all-blocks": [(_A, 0, 16)],
    "two-in-block": [(_A, 0, 1), (_B, 2, 1)], "two-equal-in-block": [(_A, 0, 1), (_A, 2, 1)],
    "three-in-block": [(_A, 0, 1), (_B, 1, 1), (_C, 2, 1)], "four-equal": [(_A, 0, 1), (_A, 1, 1), (_A, 2, 1), (_A, 3, 1)],
    "adjacent-over-edge": [(_A, 1, 4), (_B, 5, 4)], "end-and-start": [(_A, 0, 4), (_B, 4, 4)],
    "one-each": [(_A, 0, 2), (_B, 4, 2), (_C, 8, 2)], "past-full-blocks": [(_A, 14, 4)], "not-in-any": [(_A, 16, 2)],
    "identifier-mm": [("mm", 0, 2)], "identifier-tag": [("cache_salt", 0, 1), ("lora", 2, 1)],
}  # fmt: skip


def _embeds(rows: int, hidden: int, dtype: str, seed: str = "embeds") -> dict[str, Any]:
    from itertools import islice

    from .inputs import byte_stream

    size = rows * hidden * (4 if dtype == "float32" else 2)
    data = b"".join(islice(byte_stream(seed), size // 32 + 1))[:size]
    return {"shape": [rows, hidden], "dtype": dtype, "data": data.hex()}


def _add_extra_keys(maker: RequestMaker) -> None:
    ids = tokens("keys", 18, 150000)
    for algorithm, short in _each_algorithm():

        def add(slug: str, name: str, flags: Iterable[str], _a: str = algorithm, _s: str = short, **keys: Any) -> None:
            maker.add("extra_keys", f"{_s}-{slug}", name, _request(_a, ids, **keys), flags, all_wrong=True)

        for slug, text in _TEXTS.items():
            add(f"salt-{slug}", f"salt {text[:20]!r}", ["salt", *_text_flags(text)], cache_salt=text)
        if algorithm in ("sha256", "sha256_cbor"):
            for slug, text in _HUGE.items():
                maker.add("extra_keys", f"{short}-salt-{slug}", f"a salt of {len(text)} characters",
                          _request(algorithm, ids[:4], cache_salt=text), ["salt", "text-widths", "frames"],
                          first=since_of("tagged_keys", True))  # fmt: skip
        add("salt-empty", "an empty salt is none", ["salt"], cache_salt="")
        for slug in ("short", "c24", "c256", "not-ascii", "quote"):
            add(
                f"lora-{slug}", f"adapter {_TEXTS[slug][:20]!r}", ["lora", *_text_flags(_TEXTS[slug])],
                lora=_lora(name=_TEXTS[slug], path=f"adapters/{_TEXTS[slug]}"),
            )  # fmt: skip
        for identity in (1, 23, 24, 255, 256, 65536, 1 << 31, 1 << 32):
            add(f"lora-id-{identity}", f"adapter id {identity}", ["lora"], lora=_lora(identity=identity))
        add("lora-other-path", "the same adapter at another path", ["lora"], lora=_lora(path="/models/sql"))
        for left_out in ("name", "path", "id"):
            lora = {key: value for key, value in _lora().items() if key != left_out}
            add(f"lora-no-{left_out}", f"an adapter without its {left_out}", ["lora", "bad-field"], lora=lora)
        for slug, places in _PLACES.items():
            flags = ["multimodal", "edges"]
            if len(places) > 1:
                flags.append("aliasing")
            if any((start + length - 1) // 4 > start // 4 for _, start, length in places):
                flags.append("continuation")
            add(f"mm-{slug}", f"images: {slug}", flags, multimodal=_images(*places))
        for dtype, hidden in (("float32", 4), ("float16", 3), ("bfloat16", 8), ("float32", 33)):
            add(
                f"embeds-{dtype}-{hidden}", f"prompt embeddings, {dtype}, hidden size {hidden}", ["prompt-embeds"],
                prompt_embeds=_embeds(18, hidden, dtype),
            )  # fmt: skip
        add("embeds-more-rows", "more rows than tokens", ["prompt-embeds"], prompt_embeds=_embeds(24, 2, "float32"))
        everything = {
            "lora": _lora(), "cache_salt": "tenant-7", "multimodal": _images((_A, 1, 6), (_B, 8, 2)),
            "prompt_embeds": _embeds(18, 2, "float16"),
        }  # fmt: skip
        names = list(everything)
        for mask in range(3, 16):
            chosen = [name for bit, name in enumerate(names) if mask >> bit & 1]
            if len(chosen) > 1:
                add(
                    f"mix-{'-'.join(name.split('_')[0] for name in chosen)}", " and ".join(chosen), ["mixture"],
                    **{name: everything[name] for name in chosen},
                )  # fmt: skip
        add("salt-is-adapter-name", "a salt equal to an adapter's name", ["salt", "lora"], cache_salt="adapter-x")
        add(
            "adapter-is-salt", "that adapter, without salt: the same first hash before tags", ["salt", "lora"],
            lora=_lora(name="adapter-x", path="adapters/x"),
        )  # fmt: skip


def _add_lookahead(maker: RequestMaker) -> None:
    first = since_of("lookahead", True)
    for algorithm, short in _each_algorithm():
        if algorithm.endswith("64bit"):
            continue
        for lookahead in (1, 2, 3, 5):
            for count in (4, 5, 8, 9, 12, 16):
                request = _request(algorithm, tokens("ahead", count, 150000), lookahead=lookahead)
                maker.add(
                    "lookahead", f"{short}-{lookahead}-of-{count}", f"look-ahead {lookahead}, {count} tokens",
                    request, ["lookahead", "partial-block"], first=first, all_wrong=True,
                )  # fmt: skip
        ids = tokens("ahead", 18, 150000)
        for slug, places in _PLACES.items():
            if places[-1][1] + places[-1][2] <= 18:
                request = _request(algorithm, ids, lookahead=1, multimodal=_images(*places))
                maker.add(
                    "lookahead", f"{short}-mm-{slug}", f"look-ahead 1, images: {slug}", request,
                    ["lookahead", "multimodal"], first=first, all_wrong=True,
                )  # fmt: skip
        mixed = _request(algorithm, ids, lookahead=2, lora=_lora(), cache_salt="t-1", multimodal=_images((_A, 5, 1)))
        maker.add("lookahead", f"{short}-mixture", "look-ahead 2, every key", mixed, ["lookahead", "mixture"],
                  first=first, all_wrong=True)  # fmt: skip
        embeds = _request(algorithm, ids, lookahead=1, prompt_embeds=_embeds(18, 2, "float32"))
        maker.add("lookahead", f"{short}-embeds", "look-ahead 1, prompt embeddings", embeds,
                  ["lookahead", "prompt-embeds"], first=first, all_wrong=True)  # fmt: skip
    early = _request("sha256_cbor", tokens("ahead", 9, 1000), lookahead=1)
    maker.add("lookahead", "too-early", "look-ahead in a release without it", early, ["lookahead"])


def _add_context_parallel(maker: RequestMaker) -> None:
    for algorithm, short in _each_algorithm():
        for size in (1, 2, 4):
            for count in (7, 8, 16, 17):
                request = _request(algorithm, tokens("dcp", count, 150000), decode_context_parallel_size=size)
                maker.add(
                    "context_parallel", f"{short}-{size}-of-{count}", f"{size} context-parallel ranks, {count} tokens",
                    request, ["context-parallel"], all_wrong=True,
                )  # fmt: skip
        request = _request(
            algorithm, tokens("dcp", 17, 150000), decode_context_parallel_size=2, cache_salt="t-1",
            multimodal=_images((_A, 3, 8)),
        )  # fmt: skip
        maker.add("context_parallel", f"{short}-keys", "with salt and image", request,
                  ["context-parallel", "mixture"], all_wrong=True)  # fmt: skip


# --- refusals, and the forms of a release ---------------------------------------------------------------------


def _add_bad_fields(maker: RequestMaker) -> None:
    good = _request("sha256_cbor", [1, 2, 3, 4])
    embeds = _embeds(4, 2, "float32")
    changes: dict[str, Any] = {
        "token-negative": {"tokens": [-1, 2, 3, 4]}, "token-too-large": {"tokens": [1 << 64, 2, 3, 4]},
        "token-float": {"tokens": [1.5, 2, 3, 4]}, "token-float-whole": {"tokens": [1.0, 2, 3, 4]},
        "token-text": {"tokens": ["1", 2, 3, 4]}, "token-bool": {"tokens": [True, 2, 3, 4]},
        "token-null": {"tokens": [None, 2, 3, 4]}, "tokens-text": {"tokens": "1,2,3,4"}, "tokens-null": {"tokens": None},
        "token-late": {"tokens": [1, 2, 3, 4, 5, -7]}, "tokens-nested": {"tokens": [[1, 2], [3, 4]]},
        "block-size-zero": {"block_size": 0}, "block-size-negative": {"block_size": -4},
        "block-size-text": {"block_size": "4"}, "block-size-float": {"block_size": 4.5},
        "block-size-bool": {"block_size": True}, "seed-number": {"hash_seed": 0}, "seed-bool": {"hash_seed": False},
        "salt-number": {"cache_salt": 5}, "salt-list": {"cache_salt": ["t"]}, "unknown-field": {"cache_sault": "t"},
        "algorithm-number": {"algorithm": 256}, "algorithm-null-ish": {"algorithm": "none"},
        "lora-text": {"lora": "sql"}, "lora-empty-name": {"lora": {"name": "", "path": "p", "id": 1}},
        "lora-unknown-field": {"lora": {**_lora(), "rank": 8}}, "lora-name-number": {"lora": {**_lora(), "name": 7}},
        "lora-id-zero": {"lora": {**_lora(), "id": 0}}, "mm-object": {"multimodal": {"identifier": _A}},
        "mm-no-identifier": {"multimodal": [{"offset": 0, "length": 1}]},
        "mm-negative-offset": {"multimodal": _images((_A, -1, 2))}, "mm-zero-length": {"multimodal": _images((_A, 1, 0))},
        "mm-overlap": {"multimodal": _images((_A, 0, 3), (_B, 2, 1))},
        "mm-unsorted": {"multimodal": _images((_A, 3, 1), (_B, 0, 1))}, "mm-past-end": {"multimodal": _images((_A, 2, 3))},
        "mm-unknown-field": {"multimodal": [{"identifier": _A, "offset": 0, "length": 1, "kind": "image"}]},
        "mm-identifier-number": {"multimodal": [{"identifier": 5, "offset": 0, "length": 1}]},
        "embeds-few-rows": {"prompt_embeds": _embeds(3, 2, "float32")},
        "embeds-dtype": {"prompt_embeds": {**embeds, "dtype": "float64"}},
        "embeds-short-data": {"prompt_embeds": {**embeds, "data": embeds["data"][:-2]}},
        "embeds-not-hex": {"prompt_embeds": {**embeds, "data": "zz" * 32}},
        "embeds-shape": {"prompt_embeds": {**embeds, "shape": [4]}},
        "lookahead-negative": {"lookahead": -1}, "lookahead-text": {"lookahead": "1"},
        "context-parallel-zero": {"decode_context_parallel_size": 0},
    }  # fmt: skip
    for slug, change in changes.items():
        maker.add("requests", f"bad-{slug}", f"refused: {slug}", {**good, **change}, ["bad-field"], first=NEWEST_TEXT)
    missing = {key: value for key, value in good.items() if key != "tokens"}
    maker.add("requests", "bad-no-tokens", "refused: no tokens", missing, ["bad-field"], first=NEWEST_TEXT)


def _line_vector(slug: str, name: str, line: str, flags: list[str]) -> dict[str, Any]:
    from kvhash.request import answer_lines

    result = next(iter(answer_lines([line.encode("utf-8", "surrogatepass")])))
    result.pop("id")
    error = result.get("error")
    return vector(
        f"requests/{slug}/{NEWEST_TEXT}",
        name,
        flags=flags,
        since=NEWEST_TEXT,
        result="invalid" if error else "valid",
        input={"line": line, "vllm": []},
        # JSON that is no object: whether that is bad JSON for a request line or a bad request is a matter of words.
        expected={"error": {"codes": sorted({error["code"], *_LINE_CODES})}} if error else result,
    )


def _add_lines(maker: RequestMaker) -> None:
    head = f'{{"id":"@id","vllm":"{NEWEST_TEXT}","algorithm":"sha256_cbor","hash_seed":"0","block_size":4'
    lines = {
        "json-truncated": head + ',"tokens":[1,2,3,4]', "json-text": '"tokens"', "json-array": "[1,2,3,4]",
        "json-number": "5", "json-nan": head + ',"tokens":[NaN,2,3,4]}', "json-infinity": head + ',"tokens":[1,Infinity,3,4]}',
        "json-trailing-comma": head + ',"tokens":[1,2,3,4,]}', "json-two-objects": "{} {}", "json-rubbish": "hash me",
        "json-single-quotes": "{'tokens':[1]}", "json-field-twice": head + ',"tokens":[1,2,3,4],"tokens":[5,6,7,8]}',
        "json-deep": "[" * 100000, "json-null": "null", "json-true": "true",
    }  # fmt: skip
    for slug, line in lines.items():
        item = _line_vector(slug, f"refused: {slug}", line, ["json"])
        maker.made["requests"].append(item)
    spaces = head + ' , "tokens" : [ 1 , 2 , 3 , 4 ] }'
    escaped = head + ',"cache_salt":"m\\u00fcnchen","tokens":[1,2,3,4]}'
    surrogates = head + ',"cache_salt":"\\ud83d\\udd11","tokens":[1,2,3,4]}'
    lone = head + ',"cache_salt":"\\ud83d","tokens":[1,2,3,4]}'
    big = head + ',"tokens":[18446744073709551615,9007199254740993,3,4]}'
    for slug, line, flags in (
        ("json-spaces", spaces, ["json"]), ("json-escapes", escaped, ["json", "not-ascii"]),
        ("json-surrogate-pair", surrogates, ["json", "not-ascii"]), ("json-lone-surrogate", lone, ["json", "not-ascii"]),
        ("json-64-bit", big, ["json", "integer-widths"]),
    ):  # fmt: skip
        maker.made["requests"].append(_line_vector(slug, slug, line, flags))


def _add_release_texts(maker: RequestMaker) -> None:
    texts = ["latest", "v{0}", "{0}rc1", "{0}.dev12", "{0}+cu129", "{0}.1", "not-a-release", "", "0.9", "0.9.1", "0.8.5",
             "1", "0.33.0.0.0"]  # fmt: skip
    good = _request("sha256_cbor", [1, 2, 3, 4], cache_salt="t-1")
    for i, form in enumerate(texts):
        text = form.format(NEWEST_TEXT)
        result = request_answer({**good, "vllm": text})
        maker.made["requests"].append(
            vector(
                f"requests/release-{i}/{NEWEST_TEXT}",
                f"release written {text!r}",
                flags=["release-text"],
                since=NEWEST_TEXT,
                result="invalid" if "error" in result else "valid",
                input={"request": good, "vllm": [text]},
                expected=result,
            )
        )


def _add_shared_characters(maker: RequestMaker) -> None:
    """Two texts of one character: whether they are one object is the interpreter's affair."""
    from kvhash import BlockHasher
    from kvhash.serialize import Ref, encode_pickle5

    first = since_of("multimodal_key", "identifier_and_offset")
    request = _request("sha256", [1, 2, 3, 4], multimodal=_images(("x", 0, 1), ("x", 2, 1)))
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
    import msgspec

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
                "algorithm": run["algo"], "hash_seed": run["hash_seed"], "block_size": run["block_size"],
                "tokens": request["prompt"] + (request["out"] or []),
            }  # fmt: skip
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
    steps: tuple[Callable[[RequestMaker], None], ...] = (
        _add_roots, _add_chains, _add_extra_keys, _add_lookahead, _add_context_parallel, _add_bad_fields, _add_lines,
        _add_release_texts, _add_shared_characters,
    )  # fmt: skip
    for step in steps:
        step(maker)
    _add_recorded(maker, data)
    _add_captures(maker, data)
    assert {str(change.since) for change in CHANGES if change.hashes} <= {
        item["since"] for items in maker.made.values() for item in items
    }
    return maker.made
