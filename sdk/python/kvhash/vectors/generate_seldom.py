"""Makes the vectors of what seldom meets: two features at once, sizes beyond the usual, texts of unusual form.

Each was made because a hasher with a mistake there passed all the others; `kvhash.vectors.seldom_mistakes` has the
ones with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

from kvhash.contract import ALGORITHMS

from .generate_lines import line_vector
from .generate_requests import ONE_IMAGE, OTHER_IMAGE, embeds_of, images_of, lora_of, request_of
from .inputs import tokens
from .releases import NEWEST_TEXT, OLDEST_TEXT, since_of
from .request_maker import RequestMaker

__all__ = ["SELDOM"]

#: One algorithm of each serialization, where the others add nothing.
_TWO = ("sha256", "sha256_cbor")
#: Every algorithm that has look-ahead.
_AHEAD = tuple(name for name in ALGORITHMS if not name.endswith("64bit"))


def _short(algorithm: str) -> str:
    return algorithm.replace("_", "-")


def _spec(seed: str, count: int, vocabulary: int) -> dict[str, Any]:
    return {"generate": {"seed": seed, "count": count, "vocabulary": vocabulary}}


def _add(
    maker: RequestMaker,
    kind: str,
    slug: str,
    name: str,
    flags: Iterable[str],
    algorithms: Iterable[str],
    shows: Iterable[str] = (),
    ids: Any = None,
    first: str | None = None,
    last: str | None = None,
    **more: Any,
) -> None:
    """Add one request for each of some algorithms."""
    chosen = tokens("seldom", 18, 150000) if ids is None else ids
    for algorithm in algorithms:
        maker.add(
            kind,
            f"{_short(algorithm)}-{slug}",
            name,
            request_of(algorithm, chosen, **more),
            flags,
            all_wrong=True,
            shows=tuple(shows),
            first=OLDEST_TEXT if first is None else first,
            last=last,
        )


# --- numbers

_WIDE = [1 << 31, (1 << 32) + 5, (1 << 53) + 1, (1 << 63) + 1025, (1 << 64) - 1]


def _wide_ids(maker: RequestMaker) -> None:
    """Ids beyond 31, 32, 53 and 63 bits, among small ones and behind a block."""
    first = since_of("lookahead", True)
    wide = ["lookahead-ids-through-32-bits", "lookahead-ids-rounded-to-double"]
    for value in _WIDE:
        ids = [1, 2, 3, 4, value, 5, 6, 7, value, value - 1, 8, 9]
        _add(
            maker,
            "lookahead",
            f"wide-id-{value}",
            f"look-ahead 2 over the token id {value}",
            ["lookahead", "integer-widths", "wide-numbers"],
            _AHEAD,
            wide,
            ids=ids,
            first=first,
            lookahead=2,
        )
    mixed = [_WIDE[1], 1, _WIDE[2], 2, _WIDE[4], 70000, 255, _WIDE[3]]
    _add(
        maker,
        "chains",
        "wide-ids",
        "small and wide token ids in one block",
        ["integer-widths", "wide-numbers"],
        ALGORITHMS,
        ["tokens-rounded-to-double", "tokens-through-32-bits"],
        ids=mixed,
    )
    for identity in ((1 << 53) + 1, (1 << 63) - 1):
        _add(
            maker,
            "extra_keys",
            f"lora-id-{identity}",
            f"adapter id {identity}",
            ["lora", "wide-numbers"],
            ("sha256", "sha256_cbor_64bit"),
            ["lora-id-through-32-bits"],
            lora=lora_of(identity=identity),
        )


def _offsets(maker: RequestMaker) -> None:
    """Offsets beyond a byte and beyond 16 bits, and both sides of each edge."""
    small = ["mm-offset-clamped-to-8-bits"]
    flags = ["multimodal", "continuation", "far-offsets"]
    for start in (0, 1, 127):
        _add(
            maker,
            "extra_keys",
            f"far-back-{start}",
            f"an image from {start} on that goes on through four blocks of 128",
            flags,
            ALGORITHMS,
            small,
            ids=_spec("far", 512, 150000),
            block_size=128,
            multimodal=images_of((ONE_IMAGE, start, 500 - start)),
        )
    places = (0, 23, 24, 127, 128, 255, 256, 257)
    _add(
        maker,
        "extra_keys",
        "far-ahead",
        "images at offsets around a byte's edges",
        ["multimodal", "edges", "far-offsets", "many-keys"],
        ALGORITHMS,
        [*small, "mm-cut-at-4"],
        ids=_spec("far", 300, 150000),
        block_size=300,
        multimodal=images_of(*((f"img-{place}", place, 1) for place in places)),
    )
    _add(
        maker,
        "extra_keys",
        "far-16-bits",
        "images at 65,535 and on, one of which goes on through three blocks of 65,540",
        [*flags, "large"],
        _TWO,
        ["mm-offset-clamped-to-16-bits"],
        ids=_spec("far", 3 * 65540, 10),
        first=since_of("multimodal_key", "identifier_and_offset"),
        block_size=65540,
        multimodal=images_of(("img-a", 65535, 1), ("img-b", 65536, 1), ("img-c", 65537, 100000)),
    )


# --- how many


def _many(maker: RequestMaker) -> None:
    """More keys in a block than the short heads hold, with what follows the images behind them."""
    others: dict[str, Any] = {"lora": lora_of(), "cache_salt": "tenant-7"}
    for count, size, algorithms in (
        (5, 8, ALGORITHMS),
        (9, 16, ALGORITHMS),
        (22, 24, ALGORITHMS),
        (23, 24, _TWO),
        (25, 32, ALGORITHMS),
        (260, 260, _TWO),
    ):
        cuts = [f"mm-cut-at-{cut}" for cut in (4, 8, 255) if cut < count]
        _add(
            maker,
            "extra_keys",
            f"many-{count}",
            f"{count} images in one block",
            ["multimodal", "many-keys", "aliasing"],
            algorithms,
            cuts,
            ids=_spec("many", size, 150000),
            block_size=size,
            multimodal=images_of(*((f"img-{i}", i, 1) for i in range(count))),
        )
        _add(
            maker,
            "extra_keys",
            f"many-{count}-and-others",
            f"{count} images, an adapter and a salt",
            ["mixture", "many-keys", "aliasing"],
            algorithms if count < 100 else ("sha256_cbor",),
            cuts,
            ids=_spec("many", size, 150000),
            first=since_of("tagged_keys", True) if count >= 100 else None,
            block_size=size,
            multimodal=images_of(*((f"img-{i}", i, 1) for i in range(count))),
            **others,
        )
    _add(
        maker,
        "extra_keys",
        "many-equal",
        "one image at nine places",
        ["multimodal", "many-keys", "aliasing"],
        ALGORITHMS,
        ["mm-equal-images-once", "mm-cut-at-8"],
        ids=_spec("many", 24, 150000),
        block_size=12,
        multimodal=images_of(*((ONE_IMAGE, i, 1) for i in range(9)), (ONE_IMAGE, 11, 4)),
    )
    first = since_of("lookahead", True)
    for ahead in (22, 23, 24, 255, 256):
        _add(
            maker,
            "lookahead",
            f"many-{ahead}",
            f"look-ahead {ahead}, longer than the block",
            ["lookahead", "tuple-widths"],
            _AHEAD if ahead < 100 else _TWO,
            ["lookahead-cut-at-next-block"],
            ids=tokens("many", ahead + 9, 150000),
            first=first,
            lookahead=ahead,
        )
    _add(
        maker,
        "chains",
        "block-5000",
        "blocks of 5,000 tokens",
        ["tuple-widths", "large"],
        ALGORITHMS,
        ids=_spec("large", 10001, 150000),
        block_size=5000,
    )
    _add(
        maker,
        "extra_keys",
        "long-mixture",
        "300 blocks, every key",
        ["mixture", "large"],
        _TWO,
        ids=_spec("long", 600, 150000),
        first=since_of("tagged_keys", True),
        block_size=2,
        lora=lora_of(),
        cache_salt="t-1",
        multimodal=images_of((ONE_IMAGE, 3, 270), (OTHER_IMAGE, 520, 2)),
    )


# --- two features together


def _together(maker: RequestMaker) -> None:
    """Context parallelism, look-ahead and embeddings with each other and with every key."""
    ids = tokens("together", 37, 150000)
    everything: dict[str, Any] = {
        "lora": lora_of(),
        "cache_salt": "Tenant-7",
        "multimodal": images_of((ONE_IMAGE, 1, 18), (OTHER_IMAGE, 20, 4), (ONE_IMAGE, 26, 11)),
        "prompt_embeds": embeds_of(37, 3, "float16"),
    }
    in_parallel = {
        "lora": ["lora-dropped-under-context-parallel"],
        "cache_salt": ["salt-dropped-under-context-parallel"],
        "multimodal": ["mm-offset-from-inner-block"],
        "prompt_embeds": ["embeds-by-inner-block"],
    }
    for size, (key, value) in product((2, 3, 4, 8), everything.items()):
        _add(
            maker,
            "context_parallel",
            f"{size}-{key.replace('_', '-')}",
            f"{size} context-parallel ranks, {key}",
            ["context-parallel", "interaction"],
            ALGORITHMS if size in (2, 4) else _TWO,
            in_parallel[key],
            ids=ids,
            decode_context_parallel_size=size,
            **{key: value},
        )
    for size in (2, 3):
        _add(
            maker,
            "context_parallel",
            f"{size}-everything",
            f"{size} context-parallel ranks, every key",
            ["context-parallel", "interaction", "mixture"],
            ALGORITHMS,
            [name for names in in_parallel.values() for name in names],
            ids=ids,
            decode_context_parallel_size=size,
            **everything,
        )
    _add(
        maker,
        "extra_keys",
        "everything-three-blocks",
        "every key over three blocks of 12",
        ["mixture", "interaction"],
        ALGORITHMS,
        ids=ids,
        block_size=12,
        **everything,
    )
    first = since_of("lookahead", True)
    ahead_shows = {
        "lora": ["lora-dropped-with-lookahead"],
        "cache_salt": [],
        "multimodal": [],
        "prompt_embeds": ["embeds-lookahead-one-row"],
    }
    shorter: dict[str, Any] = {
        **everything,
        "multimodal": images_of((ONE_IMAGE, 1, 6), (OTHER_IMAGE, 9, 9)),
        "prompt_embeds": embeds_of(18, 3, "float16"),
    }
    for ahead, (key, value) in product((2, 3, 5), shorter.items()):
        _add(
            maker,
            "lookahead",
            f"{ahead}-{key.replace('_', '-')}",
            f"look-ahead {ahead}, {key}",
            ["lookahead", "interaction"],
            _AHEAD if ahead == 3 else _TWO,
            ahead_shows[key],
            ids=ids[:18],
            first=first,
            lookahead=ahead,
            **{key: value},
        )
    both = ["lookahead-one-under-context-parallel"]
    for size, ahead in ((2, 1), (2, 2), (3, 3), (4, 5), (2, 9)):
        flags = ["lookahead", "context-parallel", "interaction"]
        asked: dict[str, Any] = {
            "decode_context_parallel_size": size,
            "lookahead": ahead,
            "ids": ids,
            "first": first,
        }
        shows = both if ahead > 1 else []
        said = f"look-ahead {ahead}, {size} context-parallel ranks"
        _add(maker, "lookahead", f"dcp-{size}-{ahead}", said, flags, _AHEAD, shows, **asked)
        for key, value in everything.items():
            _add(
                maker,
                "lookahead",
                f"dcp-{size}-{ahead}-{key.replace('_', '-')}",
                f"{said}, {key}",
                flags,
                _AHEAD if (size, ahead) == (2, 2) else _TWO,
                [*shows, *in_parallel[key], *ahead_shows[key]],
                **asked,
                **{key: value},
            )
        _add(
            maker,
            "lookahead",
            f"dcp-{size}-{ahead}-everything",
            f"{said}, every key",
            [*flags, "mixture"],
            _AHEAD,
            shows,
            **asked,
            **everything,
        )


def _rows(maker: RequestMaker) -> None:
    """Embeddings of more rows than tokens where the last block is full, and of wide rows."""
    last = ["embeds-last-block-takes-rest"]
    for count, rows, hidden, dtype in ((8, 11, 2, "float32"), (8, 9, 1, "bfloat16"), (4, 64, 3, "float16")):
        _add(
            maker,
            "extra_keys",
            f"embeds-{rows}-rows-of-{count}",
            f"{rows} rows, {count} tokens: the last block is full",
            ["prompt-embeds", "rows"],
            ALGORITHMS,
            last,
            ids=tokens("rows", count, 150000),
            prompt_embeds=embeds_of(rows, hidden, dtype),
        )
    # One row of 64 KiB and more: as bytes it takes long heads, and leaves pickle's frame.
    _add(
        maker,
        "extra_keys",
        "embeds-64-kib",
        "a row of 65,600 bytes",
        ["prompt-embeds", "rows", "text-widths", "frames"],
        _TWO,
        ids=[7],
        first=since_of("prompt_embeds_key", "bytes"),
        last=since_of("prompt_embeds_key", "sha256"),
        block_size=1,
        prompt_embeds=embeds_of(1, 16400, "float32"),
    )
    _add(
        maker,
        "context_parallel",
        "2-more-rows",
        "2 context-parallel ranks, more rows than tokens",
        ["context-parallel", "rows", "interaction"],
        _TWO,
        [*last, "embeds-by-inner-block"],
        ids=tokens("rows", 16, 150000),
        decode_context_parallel_size=2,
        prompt_embeds=embeds_of(21, 2, "float32"),
    )
    _add(
        maker,
        "lookahead",
        "more-rows",
        "look-ahead 2, more rows than tokens",
        ["lookahead", "rows", "interaction"],
        _TWO,
        [*last, "embeds-lookahead-one-row"],
        ids=tokens("rows", 10, 150000),
        first=since_of("lookahead", True),
        lookahead=2,
        prompt_embeds=embeds_of(15, 2, "float32"),
    )


# --- texts

_CAPITALS, _COMBINING = "Org/Llama-3-SQL", "Cafe\u0301-A\u030a-\u1112\u1161\u11ab"
_FORMS = {
    "capitals": (_CAPITALS, ["texts-lower-cased"]),
    "combining": (_COMBINING, ["texts-normalized"]),
    "compatible": ("\u212b-\ufb01-\u2460-\uff21", ["texts-normalized"]),
    "folding": ("STRASSE-ẞ-ſ-İ", ["texts-lower-cased"]),
    "spaces": (" \t two  words \n", ["texts-trimmed"]),
    "wide-spaces": ("\u00a0\u2003a\u2028\u200b", ["texts-trimmed"]),
    "nul-inside": ("ten\0ant", ["texts-cut-at-nul"]),
    "nul-first": ("\0tenant", ["texts-cut-at-nul"]),
    "controls": ("a\x01\x1b\x7f\x85b", []),
    "bom": ("\ufeffa\ufeff\ufffe\uffff", []),
    "astral": ("\U0001f469\u200d\U0001f680\U00010000\U0010ffff", []),
    "mixed-widths": ("a\u00e9\u65e5\U0001f511" * 20, []),
    "percent": ("%20+a%2Fb&amp;", []),
    "backslashes": (r"C:\models\new\u0041", []),
    "words": ("null", []),
    "digits": ("007", []),
    "c300": ("t" * 300, ["texts-cut-at-255"]),
    "c300-not-ascii": ("é" * 300, ["texts-cut-at-255"]),
}
_FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "salt": lambda text: {"cache_salt": text},
    "name": lambda text: {"lora": lora_of(name=text)},
    "path": lambda text: {"lora": lora_of(path=text)},
    "image": lambda text: {"multimodal": images_of((text, 1, 2))},
}


def _flags_of(text: str) -> list[str]:
    return ["text-forms", *(["not-ascii"] if not text.isascii() else [])]


def _texts(maker: RequestMaker) -> None:
    """Texts that a reader may want to improve, in every place where a text is hashed."""
    ids = [1, 2, 3, 4]
    tagged = since_of("tagged_keys", True)
    for slug, (text, shows) in _FORMS.items():
        at_once: dict[str, Any] = {
            "cache_salt": text,
            "lora": lora_of(name=text, path=text),
            "multimodal": images_of((text, 0, 1), (text, 2, 2)),
        }
        _add(
            maker,
            "extra_keys",
            f"text-{slug}",
            f"the text {text[:16]!r} as salt, adapter and identifier",
            _flags_of(text),
            ALGORITHMS if slug == "capitals" else _TWO,
            shows,
            ids=ids,
            **at_once,
        )
        for field, place in _FIELDS.items():
            _add(
                maker,
                "extra_keys",
                f"text-{slug}-{field}",
                f"{field} {text[:16]!r}",
                _flags_of(text),
                ("sha256_cbor",),
                shows,
                ids=ids,
                first=tagged,
                **place(text),
            )
        _add(
            maker,
            "none_hash",
            f"form-{slug}",
            f"NONE_HASH of seed {text[:16]!r}",
            ["seed", *_flags_of(text)],
            _TWO,
            ids=[],
            hash_seed=text,
        )
    huge = (("salt", "x" * 70000, _TWO), ("image", "é" * 33000, ("sha256",)))
    for field, text, algorithms in (
        *huge,
        ("name", "n" * 65536, ("sha256",)),
        ("path", "p" * 65536, _TWO[1:]),
    ):
        _add(
            maker,
            "extra_keys",
            f"text-huge-{field}",
            f"{field} of {len(text)} characters",
            ["text-forms", "text-widths", "frames", *(["not-ascii"] if not text.isascii() else [])],
            algorithms,
            ["texts-cut-at-255", *(["texts-cut-at-65535"] if len(text) > 65535 else [])],
            ids=ids,
            first=NEWEST_TEXT,
            **_FIELDS[field](text),
        )
    for slug, path in {
        "dot": "./p/",
        "slashes": "/models//sql///a",
        "up": "/models/base/../sql",
        "home": "~/sql",
        "here": ".",
        "trailing": "adapters/sql/",
        "url": "s3://bucket/a/../b?x=1#y",
    }.items():
        _add(
            maker,
            "extra_keys",
            f"path-{slug}",
            f"an adapter at {path!r}",
            ["lora", "text-forms"],
            _TWO,
            ["lora-path-normalized"],
            ids=ids,
            lora=lora_of(path=path),
        )


def _empty(maker: RequestMaker) -> None:
    """The empty text, which is one object for pickle wherever it stands."""
    flags = ["aliasing", "text-forms"]
    many = images_of(*((f"img-{i}", i, 1) for i in range(258)), ("", 258, 1), ("", 259, 1))
    for slug, name, images, algorithms in (
        ("empty-identifier", "an empty identifier", images_of(("", 1, 4)), ALGORITHMS),
        ("empty-identifiers", "two: one object", images_of(("", 0, 1), ("", 2, 3)), ALGORITHMS),
        ("empty-identifiers-late", "two behind 258 others: memo number 256 and more", many, _TWO),
    ):
        size = 260 if images is many else 4
        _add(
            maker,
            "extra_keys",
            slug,
            name,
            flags,
            algorithms,
            ids=_spec("empty", 2 * size, 150000),
            block_size=size,
            multimodal=images,
        )


# --- how a request is written

_MAY_BE_NULL = (
    "block_size",
    "lookahead",
    "decode_context_parallel_size",
    "lora",
    "cache_salt",
    "multimodal",
    "prompt_embeds",
)


def _written(maker: RequestMaker) -> None:
    """Fields that are null, hexadecimal digits in capitals and with white space between bytes; ends of ranges."""
    good = request_of("sha256_cbor", tokens("written", 33, 150000))
    rows = embeds_of(33, 2, "float16")
    data = rows["data"]
    spaced = " \t\r\n".join(data[i : i + 2] for i in range(0, len(data), 2))
    whole: dict[str, dict[str, Any]] = {
        "null-block-size": {"block_size": None},
        "null-lookahead": {"lookahead": None},
        "null-context-parallel": {"decode_context_parallel_size": None},
        "null-lora": {"lora": None},
        "null-salt": {"cache_salt": None},
        "null-multimodal": {"multimodal": None},
        "null-embeds": {"prompt_embeds": None},
        "null-all": dict.fromkeys(_MAY_BE_NULL),
        "no-images": {"multimodal": []},
        "hex-capitals": {"prompt_embeds": {**rows, "data": data.upper()}},
        "hex-spaces": {"prompt_embeds": {**rows, "data": f" {spaced}\n"}},
        "lora-null-id": {"lora": {**lora_of(), "id": None}},
        "block-size-max": {"block_size": (1 << 31) - 1},
        "block-size-max-parallel": {"block_size": (1 << 31) - 1, "decode_context_parallel_size": 2},
        "block-size-wraps-to-0": {"block_size": 1 << 30, "decode_context_parallel_size": 4},
        "block-size-wraps-to-4": {"block_size": (1 << 30) + 1, "decode_context_parallel_size": 4},
        "lookahead-max": {"lookahead": 1 << 16},
        "no-tokens": {"tokens": [], "cache_salt": "t"},
        "embeds-no-tokens": {"tokens": [], "prompt_embeds": embeds_of(2, 2, "float16")},
    }
    refused: dict[str, dict[str, Any]] = {
        "block-size-float-whole": {"block_size": 4.0},
        "lookahead-bool": {"lookahead": True},
        "lookahead-float": {"lookahead": 1.0},
        "context-parallel-bool": {"decode_context_parallel_size": True},
        "context-parallel-float": {"decode_context_parallel_size": 2.0},
        "salt-bool": {"cache_salt": False},
        "lora-list": {"lora": [lora_of()]},
        "lora-id-float": {"lora": lora_of() | {"id": 3.0}},
        "lora-id-bool": {"lora": lora_of() | {"id": True}},
        "lora-path-number": {"lora": lora_of() | {"path": 7}},
        "mm-offset-float": {"multimodal": [{"identifier": ONE_IMAGE, "offset": 1.0, "length": 2}]},
        "mm-length-bool": {"multimodal": [{"identifier": ONE_IMAGE, "offset": 1, "length": True}]},
        "mm-length-text": {"multimodal": [{"identifier": ONE_IMAGE, "offset": 1, "length": "2"}]},
        "mm-no-length": {"multimodal": [{"identifier": ONE_IMAGE, "offset": 1}]},
        "mm-null-item": {"multimodal": [None]},
        "embeds-shape-float": {"prompt_embeds": {**rows, "shape": [33.0, 2]}},
        "embeds-shape-of-3": {"prompt_embeds": {**rows, "shape": [33, 2, 1]}},
        "embeds-no-dtype": {"prompt_embeds": {name: rows[name] for name in ("shape", "data")}},
        "embeds-unknown-field": {"prompt_embeds": {**rows, "order": "C"}},
        "embeds-dtype-capitals": {"prompt_embeds": {**rows, "dtype": "Float16"}},
        "field-in-capitals": {"Cache_Salt": "t"},
        "field-proto": {"__proto__": {"cache_salt": "t"}},
        "algorithm-constructor": {"algorithm": "constructor"},
        "lora-empty-path": {"lora": lora_of(path="")},
        "hex-odd": {"prompt_embeds": {**rows, "data": data[:-1]}},
        "hex-split": {"prompt_embeds": {**rows, "data": f"{data[0]} {data[1:]}"}},
        "embeds-shape-wraps": {"prompt_embeds": {**rows, "shape": [1 << 32, 1 << 32], "data": ""}},
        "mm-same-start": {"multimodal": images_of((ONE_IMAGE, 2, 1), (OTHER_IMAGE, 2, 2))},
        "mm-zero-length-at-end": {"multimodal": images_of((ONE_IMAGE, 33, 0))},
        "mm-at-end": {"multimodal": images_of((ONE_IMAGE, 33, 1))},
        "mm-inside": {"multimodal": images_of((ONE_IMAGE, 2, 6), (OTHER_IMAGE, 4, 1))},
        "mm-wraps": {"multimodal": images_of((ONE_IMAGE, (1 << 63) - 1, 2))},
        "mm-wraps-64": {"multimodal": images_of((ONE_IMAGE, 2, (1 << 64) - 1))},
        "mm-wraps-32": {"multimodal": images_of((ONE_IMAGE, 2, (1 << 32) + 1))},
    }
    for (slug, change), flag in (
        *((item, "request-forms") for item in whole.items()),
        *((item, "bad-field") for item in refused.items()),
    ):
        maker.add("requests", slug, slug, {**good, **change}, [flag], first=NEWEST_TEXT)
    _lines(maker)


def _lines(maker: RequestMaker) -> None:
    """Add lines whose very text matters."""
    begin = f'"vllm":"{NEWEST_TEXT}","algorithm":"sha256_cbor","hash_seed":"0","block_size":4'
    head, ids = '{"id":"@id",' + begin, ',"tokens":[1,2,3,4]}'
    lines = {
        "id-absent": "{" + begin + ids,
        "id-null": '{"id":null,' + begin + ids,
        "json-escaped-name": head + ',"tok\\u0065ns":[1,2,3,4]}',
        "json-short-escapes": head + ',"cache_salt":"\\/\\b\\f\\n\\r\\t\\"\\\\"' + ids,
        "json-escapes-in-capitals": head + ',"cache_salt":"\\uD83D\\uDD11\\u00E9\\u00e9"' + ids,
        "json-escaped-nul": head + ',"cache_salt":"\\u0000t"' + ids,
        "json-exponent": head + ',"tokens":[1e0,2,3,4]}',
        "json-leading-zero": head + ',"tokens":[01,2,3,4]}',
        "json-plus": head + ',"tokens":[+1,2,3,4]}',
        "json-hexadecimal": head + ',"tokens":[0x1,2,3,4]}',
        "json-comment": head + ',"tokens":[1,2,3,4]/* four */}',
        "json-raw-tab": head + ',"cache_salt":"a\tb"' + ids,
        "json-bad-escape": head + ',"cache_salt":"\\x41"' + ids,
        "json-trailing-field-comma": head + ids[:-1] + ",}",
        "json-rubbish-behind": head + ids + " x",
        "json-field-twice-inside": head + ',"lora":{"name":"a","name":"b","path":"p"}' + ids,
        "json-lone-surrogate-name": head + ',"lora":{"name":"\\ud83d","path":"p"}' + ids,
        "json-lone-surrogate-path": head + ',"lora":{"name":"a","path":"\\udd11x"}' + ids,
        "json-surrogates-reversed": head + ',"cache_salt":"\\udd11\\ud83d"' + ids,
    }
    for slug, line in lines.items():
        maker.made["requests"].append(line_vector(slug, slug, line, ["json"]))


SELDOM: tuple[Callable[[RequestMaker], None], ...] = (
    _wide_ids,
    _offsets,
    _many,
    _together,
    _rows,
    _texts,
    _empty,
    _written,
)
