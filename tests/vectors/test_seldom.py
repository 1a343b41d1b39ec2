"""Mistakes that show only where features meet, at unusual sizes or in unusual texts: the corpus catches each."""

from __future__ import annotations

import posixpath
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from kvhash.vectors import load_corpus
from kvhash.vectors.compare import compare
from kvhash.vectors.conformance import run, select
from kvhash.vectors.inputs import expand
from kvhash.vectors.load import REQUEST_KINDS
from kvhash.vectors.mistakes import MISTAKES
from kvhash.vectors.plain import PlainHasher

from .programs import CORPUS, changed_sdk, sdk_program

SELDOM = sorted(name for name, kind in MISTAKES.items() if kind.seldom)


@cache
def asked() -> tuple[Mapping[str, Any], ...]:
    """Return the valid vectors that are asked as requests."""
    return tuple(
        vector
        for file, vector in load_corpus(CORPUS)
        if file.kind in REQUEST_KINDS and vector["result"] == "valid" and "request" in vector["input"]
    )


def request_of(vector: Mapping[str, Any]) -> dict[str, Any]:
    """Return a vector's request as it is sent, at its first release."""
    request = expand(vector["input"]["request"])
    return {"algorithm": "sha256", "block_size": None, **request, "vllm": vector["input"]["vllm"][0]}


@pytest.mark.parametrize("name", SELDOM)
def test_a_seldom_mistake_is_named(name: str) -> None:
    """Two vectors at least were made for it, and a hasher that makes it is told so by the first value that differs."""
    made = [vector for vector in asked() if name in vector.get("wrong", {})]
    assert len(made) >= 2
    vector = min(made, key=lambda found: len(found["expected"]["block_hashes"]))
    found = compare(vector, MISTAKES[name](request_of(vector)).answer())
    assert found is not None
    assert name in found.mistakes


# --- mistakes without a name: each is a step of the recipe done wrongly, and where it is to show


def _texts(change: Callable[[str], str]) -> type[PlainHasher]:
    class Changed(PlainHasher):
        def text(self, value: str) -> str:
            return super().text(change(value))

    return Changed


def _field(place: str, change: Callable[[str], str]) -> type[PlainHasher]:
    """Change the text of one place only."""

    class Changed(PlainHasher):
        def __init__(self, request: dict[str, Any]) -> None:
            if place == "cache_salt":
                request = {**request, place: change(request[place])}
            elif place == "identifier":
                items = [{**item, place: change(item[place])} for item in request["multimodal"]]
                request = {**request, "multimodal": items}
            elif place == "hash_seed":
                request = {**request, place: change(request[place])}
            else:
                request = {**request, "lora": {**request["lora"], place: change(request["lora"][place])}}
            super().__init__(request)

    return Changed


def _following(change: Callable[[int], int]) -> type[PlainHasher]:
    class Changed(PlainHasher):
        def following(self, tokens: list[int]) -> list[int]:
            return [change(token) for token in tokens]

    return Changed


def _offset(change: Callable[[int], int]) -> type[PlainHasher]:
    class Changed(PlainHasher):
        def offset(self, item: dict[str, Any], start: int) -> int:
            return change(super().offset(item, start))

    return Changed


def _images(change: Callable[[list[Any]], list[Any]]) -> type[PlainHasher]:
    class Changed(PlainHasher):
        def multimodal_keys(self, start: int, end: int) -> list[Any]:
            return change(super().multimodal_keys(start, end))

    return Changed


def _rows(change: Callable[[PlainHasher, int, int], tuple[int, int]]) -> type[PlainHasher]:
    class Changed(PlainHasher):
        def rows(self, start: int, end: int) -> bytes:
            return super().rows(*change(self, start, end))

    return Changed


def _salted(when: Callable[[PlainHasher, int], bool]) -> type[PlainHasher]:
    class Changed(PlainHasher):
        def salted(self, start: int) -> bool:
            return bool(self.request.get("cache_salt")) and when(self, start)

    return Changed


def _ranks(hasher: PlainHasher) -> int:
    return hasher.context_parallel()


class _LookaheadTimesRanks(PlainHasher):
    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.lookahead *= self.context_parallel()


class _NeedsInnerBlock(PlainHasher):
    def needed(self) -> int:
        return self.span // self.context_parallel() + self.lookahead


class _OverlapsInnerBlock(PlainHasher):
    def overlaps(self, item: dict[str, Any], start: int, end: int) -> bool:
        return super().overlaps(item, start, min(end, start + self.span // self.context_parallel()))


class _KeysOfNextBlockOnly(PlainHasher):
    def keys_end(self, end: int) -> int:
        return end + min(self.lookahead, self.span)


class _KeysOfOneAhead(PlainHasher):
    def keys_end(self, end: int) -> int:
        return end + min(self.lookahead, 1)


class _OffsetFromInnerWithLookahead(PlainHasher):
    def offset(self, item: dict[str, Any], start: int) -> int:
        return super().offset(item, start // self.context_parallel() if self.lookahead else start)


class _PathOnlyWhereOther(PlainHasher):
    def lora_keys(self) -> list[Any]:
        keys = super().lora_keys()
        return [key[:2] if isinstance(key, tuple) and key[1] == key[2] else key for key in keys]


class _NameAndPathShared(PlainHasher):
    def lora_keys(self) -> list[Any]:
        keys = super().lora_keys()
        return [
            (key[0], key[1], key[1]) if isinstance(key, tuple) and key[1] == key[2] else key for key in keys
        ]


class _RowsUpTo64KiB(PlainHasher):
    def rows(self, start: int, end: int) -> bytes:
        return super().rows(start, end)[:65535]


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _no_astral(text: str) -> str:
    return "".join(c if ord(c) < 1 << 16 else "\ufffd" for c in text)


_SIGNED = {n: (lambda x, n=n: x - (1 << n) if x >> (n - 1) & 1 and x < 1 << n else x) for n in (32, 64)}
OTHERS: dict[str, type[PlainHasher]] = {
    "look-ahead ids in 18 bits": _following(lambda x: x & 0x3FFFF),
    "look-ahead ids in 31 bits": _following(lambda x: x & 0x7FFFFFFF),
    "look-ahead ids in 63 bits": _following(lambda x: x & ((1 << 63) - 1)),
    "look-ahead ids of 32 bits signed": _following(_SIGNED[32]),
    "look-ahead ids of 64 bits signed": _following(_SIGNED[64]),
    "look-ahead times ranks": _LookaheadTimesRanks,
    "a hash as soon as an inner block is full": _NeedsInnerBlock,
    "images of the inner block": _OverlapsInnerBlock,
    "images of the next block only": _KeysOfNextBlockOnly,
    "keys of one token ahead": _KeysOfOneAhead,
    "offset from the inner block with look-ahead": _OffsetFromInnerWithLookahead,
    "offset at least -128": _offset(lambda x: max(x, -128)),
    "offset at most 127": _offset(lambda x: min(x, 127)),
    "offset in a signed byte": _offset(lambda x: (x + 128) % 256 - 128),
    "offset in a signed 16 bits": _offset(lambda x: (x + 32768) % 65536 - 32768),
    "offset at least -65536": _offset(lambda x: max(x, -65536)),
    "offset at most 65535": _offset(lambda x: min(x, 65535)),
    "the last image only": _images(lambda keys: keys[-1:]),
    "16 images": _images(lambda keys: keys[:16]),
    "23 images": _images(lambda keys: keys[:23]),
    "24 images": _images(lambda keys: keys[:24]),
    "256 images": _images(lambda keys: keys[:256]),
    "images sorted by identifier": _images(lambda keys: sorted(keys, key=str)),
    "rows of the inner block number": _rows(lambda h, s, e: (s // _ranks(h), s // _ranks(h) + e - s)),
    "rows without look-ahead": _rows(lambda h, s, e: (s, s + h.span)),
    "rows of the look-ahead at most a block": _rows(lambda h, s, e: (s, min(e, s + 2 * h.span))),
    "rows cut at the prompt's second last": _rows(lambda h, s, e: (s, min(e, len(h.tokens) - 1))),
    "64 KiB of rows": _RowsUpTo64KiB,
    "salt dropped beyond two ranks": _salted(lambda h, s: s == 0 and _ranks(h) <= 2),
    "salt dropped with look-ahead": _salted(lambda h, s: s == 0 and not h.lookahead),
    "salt dropped beside an image": _salted(lambda h, s: s == 0 and not h.request.get("multimodal")),
    "salt dropped beside embeddings": _salted(lambda h, s: s == 0 and not h.request.get("prompt_embeds")),
    "salt again at block 256": _salted(lambda h, s: s // h.span % 256 == 0),
    "salt in the first inner blocks": _salted(lambda h, s: s // h.span < _ranks(h)),
    "path left out where it is the name": _PathOnlyWhereOther,
    "name and path one object": _NameAndPathShared,
    "texts NFKC": _texts(_nfkc),
    "texts NFD": _texts(lambda text: unicodedata.normalize("NFD", text)),
    "texts case-folded": _texts(str.casefold),
    "texts in capitals": _texts(str.upper),
    "texts without byte order mark": _texts(lambda text: text.lstrip("\ufeff")),
    "texts without ASCII spaces around": _texts(lambda text: text.strip(" \t\r\n")),
    "texts without control characters": _texts(lambda text: "".join(c for c in text if ord(c) > 31)),
    "texts without zero-width characters": _texts(
        lambda text: text.replace("\u200b", "").replace("\u200d", "")
    ),
    "texts of the basic plane": _texts(_no_astral),
    "texts up to 256 characters": _texts(lambda text: text[:256]),
    "texts up to 256 bytes": _texts(lambda text: text.encode()[:256].decode(errors="ignore")),
    "texts up to 64 KiB": _texts(lambda text: text.encode()[:65536].decode(errors="ignore")),
    "texts as numbers": _texts(lambda text: str(int(text)) if text.isdecimal() else text),
    "percent signs decoded": _texts(lambda text: text.replace("%20", " ")),
    "backslashes as slashes": _texts(lambda text: text.replace("\\", "/")),
    "path without '/' at its end": _field("path", lambda text: text.rstrip("/")),
    "path without './'": _field("path", lambda text: text.removeprefix("./")),
    "path with one '/' for two": _field("path", lambda text: text.replace("//", "/")),
    "path expanded": _field("path", lambda text: text.replace("~", "/root")),
    "path absolute": _field("path", lambda text: posixpath.join("/", text)),
    **{
        f"{place} {what}": _field(place, change)
        for place in ("cache_salt", "name", "path", "identifier", "hash_seed")
        for what, change in {
            "lower-cased": str.lower,
            "NFC": lambda text: unicodedata.normalize("NFC", text),
            "trimmed": str.strip,
            "cut at NUL": lambda text: text.split("\0")[0],
            "null for 'null'": lambda text: "" if text == "null" else text,
        }.items()
    },
}


def _catching(kind: type[PlainHasher]) -> Iterator[str]:
    """Yield the ids of the vectors that a hasher answers wrongly, the small ones first."""
    for vector in sorted(_seldom_vectors(), key=lambda found: "far-16-bits" in found["id"]):
        request = request_of(vector)
        try:
            if kind(request).answer() != vector["expected"]:
                yield vector["id"]
        except (KeyError, TypeError, IndexError):
            continue  # the request has nothing that the mistake could get wrong


@cache
def _seldom_vectors() -> tuple[Mapping[str, Any], ...]:
    """Return the vectors for such mistakes, of the newest release and of rows before 0.17."""
    flags = {"interaction", "far-offsets", "many-keys", "rows", "text-forms", "wide-numbers", "aliasing"}
    chosen = [v for v in asked() if flags & set(v["flags"]) or "long-mixture" in v["id"]]
    return tuple(v for v in chosen if v["until"] is None or "embeds-64-kib" in v["id"])


def test_a_right_hasher_is_not_caught() -> None:
    """The vectors tell wrong hashers from right ones."""
    assert not list(_catching(PlainHasher))


@pytest.mark.parametrize("name", OTHERS)
def test_a_mistake_without_a_name_is_caught(name: str) -> None:
    """Some vector of the newest release has another answer."""
    assert next(_catching(OTHERS[name]), None) is not None


# --- what a program may get wrong in reading a request


@pytest.mark.parametrize(
    "field",
    [
        "block_size",
        "lookahead",
        "decode_context_parallel_size",
        "lora",
        "cache_salt",
        "multimodal",
        "prompt_embeds",
    ],
)
def test_null_is_asked_for_every_field_that_may_be_null(field: str) -> None:
    """A program that refuses null there fails."""
    assert [v for v in asked() if field in v["input"]["request"] and v["input"]["request"][field] is None]


def test_hexadecimal_digits_are_asked_in_capitals_and_with_white_space() -> None:
    """A program that takes one form only fails."""
    data = [
        v["input"]["request"]["prompt_embeds"]["data"]
        for v in asked()
        if v["input"]["request"].get("prompt_embeds")
    ]
    assert any(text != text.lower() for text in data)
    assert all(any(space in text for text in data) for space in " \t\r\n")


#: name: (where it shows, the mistake to name or None, the change of the SDK)
PROGRAMS: dict[str, tuple[str, str | None, list[tuple[str, str, str]]]] = {
    "salt dropped under context parallelism": (
        "context_parallel/sha256-cbor-*",
        "salt-dropped-under-context-parallel",
        [
            (
                "extra_keys.py",
                "if self.cache_salt and start == 0:",
                "if self.cache_salt and start == 0 and end < 8:",
            )
        ],
    ),
    "the empty text is an object each time": (
        "extra_keys/sha256-empty-*",
        None,
        [
            (
                "serialize/pickle5.py",
                "identity = content if not content else id(value) if isinstance(value, Ref) else None",
                "identity = id(value) if isinstance(value, Ref) else None",
            )
        ],
    ),
    "texts in lower case": (
        "extra_keys/sha256-cbor-text-*",
        "texts-lower-cased",
        [
            (
                "extra_keys.py",
                "keys.append((_CACHE_SALT, self.cache_salt)",
                "keys.append((_CACHE_SALT, self.cache_salt.lower())",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_the_mistake_fails_and_is_told_it(name: str, tmp_path: Any) -> None:
    """The runner asks these vectors too: a program that makes the mistake does not pass."""
    pattern, mistake, changes = PROGRAMS[name]
    corpus = load_corpus(CORPUS)
    report = run(sdk_program(changed_sdk(tmp_path, changes)), corpus, select(corpus, pattern=pattern))
    assert [outcome for outcome in report.outcomes if outcome.status == "failed"]
    if mistake is not None:
        assert mistake in [found[0] for found in report.mistakes()]
