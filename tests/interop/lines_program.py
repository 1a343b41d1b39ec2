"""Runs a request-line program and compares it with Python, for the tests of each language's hasher."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvhash.events.lines import answer_all_lines
from kvhash.request import MAX_LINE_BYTES

from ..data_files import RELEASES, hash_cases, hash_results, request_of

__all__ = [
    "ROOT",
    "assert_recorded_answers",
    "assert_same_answers",
    "awkward_lines",
    "oracle_lines",
    "random_lines",
    "run_lines",
]

ANSWERED = ("none_hash", "block_hashes", "external", "extra_keys")
ROOT = Path(__file__).resolve().parents[2]


def run_lines(
    command: Sequence[str], lines: Iterable[bytes], *, timeout: float = 120
) -> list[dict[str, Any]]:
    """Return what a program answers to the lines, each read back; raises when it fails or prints rubbish."""
    done = subprocess.run(
        command, input=b"".join(lines), capture_output=True, timeout=timeout, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same_answers(command: Sequence[str], lines: Sequence[bytes]) -> int:
    """Compare with Python line by line, messages of errors apart; returns how many lines were answered with hashes."""
    expected = [_comparable(answered) for answered in answer_all_lines(lines)]
    got = [_comparable(answered) for answered in run_lines(command, lines)]
    assert len(got) == len(expected)
    asked = [
        line for line in lines if line.strip() or len(line.rstrip(b"\n").removesuffix(b"\r")) > MAX_LINE_BYTES
    ]
    for line, ours, theirs in zip(asked, expected, got, strict=True):
        assert theirs == ours, line[:2000]
    return sum("error" not in answered for answered in expected)


def assert_recorded_answers(command: Sequence[str], release: str) -> None:
    """Compare a program with what a vLLM release itself gave for every recorded case."""
    lines, rows = oracle_lines(release)
    answered = 0
    for row, got in zip(rows, run_lines(command, lines), strict=True):
        assert got.pop("id") == row["id"]
        if row.get("random_root"):
            assert got["error"]["code"] == "unknown-root", row["id"]
        elif "error" in row:
            assert got["error"]["code"] in ("algorithm-not-in-release", "feature-not-in-release"), row["id"]
        else:
            assert got == {name: row[name] for name in ANSWERED}, row["id"]
            answered += 1
    assert answered > 50


def _comparable(answered: dict[str, Any]) -> dict[str, Any]:
    if "error" not in answered:
        return answered
    assert answered["error"]["message"]
    return {**answered, "error": answered["error"]["code"]}


def oracle_lines(release: str) -> tuple[list[bytes], list[dict[str, Any]]]:
    """Return the recorded cases of a release as request lines, and what vLLM gave for each."""
    rows = hash_results(release)
    return [_line(request_of(hash_cases()[row["id"]], release)) for row in rows], rows


def _line(request: Any) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode() + b"\n"


_ALGORITHMS = ("sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor", "builtin")
_TOKENS = (0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1)
_WORDS = (
    "a",
    "x",
    "lora",
    "mm",
    "cache_salt",
    "prompt_embeds",
    "é",
    "日本",
    "\U0001f600",
    "z" * 300,
    "q" * 66000,
)


def random_lines(count: int, seed: int) -> list[bytes]:
    """Return random requests over all releases, algorithms and keys; most of them valid."""
    rng = random.Random(seed)
    return [_line(_random_request(rng, number)) for number in range(count)]


def _random_request(rng: random.Random, number: int) -> dict[str, Any]:
    block_size = rng.choice((1, 2, 3, 4, 16, 64))
    count = rng.randrange(0, 6 * block_size + 3)
    if rng.random() < 0.02:
        block_size, count = 20000, 40100  # frames and long tuples
    request: dict[str, Any] = {
        "id": rng.choice((number, str(number), None, [number, {"k": 1.5}], 2**70)),
        "vllm": rng.choice((*RELEASES, "latest", "v0.33", "0.10.1.1", "0.31.0rc1.dev3+gabc", "9.0.0")),
        "algorithm": rng.choice(_ALGORITHMS[: 5 if rng.random() < 0.97 else 6]),
        "block_size": block_size,
        "tokens": [_random_token(rng) for _ in range(count)],
    }
    if rng.random() < 0.85:
        request["hash_seed"] = rng.choice(("0", "", "42", "seed é", "s" * 70000))
    if rng.random() < 0.3:
        lora = {
            "name": rng.choice(_WORDS),
            "path": rng.choice(_WORDS),
            "id": rng.choice((1, 300, 2**40, 2**63 - 1)),
        }
        request["lora"] = {k: v for k, v in lora.items() if rng.random() < 0.95}
    if rng.random() < 0.3:
        request["cache_salt"] = rng.choice((*_WORDS, ""))
    if rng.random() < 0.4:
        request["multimodal"] = _random_items(rng, count)
    if rng.random() < 0.2 and count < 500:
        width, (dtype, size) = (
            rng.choice((1, 4)),
            rng.choice((("float32", 4), ("float16", 2), ("bfloat16", 2))),
        )
        data = rng.randbytes(count * width * size).hex()
        request["prompt_embeds"] = {"shape": [count, width], "dtype": dtype, "data": data}
    if rng.random() < 0.15:
        request["vllm"] = rng.choice(("latest", "0.33.0", "0.32.0"))
        request["lookahead"] = rng.choice((0, 1, 2, 5))
    if rng.random() < 0.1:
        request["decode_context_parallel_size"] = rng.choice((1, 2, 3))
    return request


def _random_token(rng: random.Random) -> int:
    return rng.choice(_TOKENS) if rng.random() < 0.3 else rng.randrange(0, 160000)


def _random_items(rng: random.Random, count: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    at = 0
    while at < count and len(items) < 5:
        at += rng.randrange(0, 6)
        length = rng.randrange(1, 9)
        if at + length > count:
            break
        items.append({"identifier": rng.choice((*_WORDS, "", "same")), "offset": at, "length": length})
        at += length
    return items


def awkward_lines() -> list[bytes]:
    """Return lines that are refused, or nearly: each field of a wrong type or range, and text that is no JSON."""
    base: dict[str, Any] = {
        "id": 1, "vllm": "0.33.0", "algorithm": "sha256", "hash_seed": "0", "block_size": 2, "tokens": [1, 2, 3, 4]
    }  # fmt: skip
    odd: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        1,
        1.0,
        1.5,
        2**63,
        2**64,
        -(2**70),
        "",
        "x",
        "0",
        [],
        [1],
        {},
        {"a": 1},
    ]
    lines = [_line({**base, field: value}) for field in (*base, "lookahead", *_KEYS) for value in odd]
    lines += [_line({**base, "decode_context_parallel_size": value}) for value in odd]
    lines += [_line({**base, "tokens": [1, value]}) for value in odd]
    lines += [
        _line({**base, "lora": {"name": "n", "path": "p", "id": 1, field: v}}) for field in _LORA for v in odd
    ]
    item = {"identifier": "i", "offset": 0, "length": 2}
    lines += [
        _line({**base, "multimodal": [{**item, field: value}]}) for field in (*item, "more") for value in odd
    ]
    lines += [_line({**base, "multimodal": [value]}) for value in odd]
    lines += [
        _line(
            {**base, "multimodal": [{**item, "offset": a, "length": b}, {**item, "offset": c, "length": d}]}
        )
        for a, b, c, d in (
            (0, 2, 1, 1),
            (2, 1, 0, 1),
            (0, 2, 2, 2),
            (0, 2, 2, 3),
            (0, 2**62, 3, 1),
            (0, 1, 2**53, 1),
        )
    ]
    embeds = {"shape": [4, 1], "dtype": "float16", "data": "00" * 8}
    lines += [
        _line({**base, "prompt_embeds": {**embeds, f: value}}) for f in (*embeds, "more") for value in odd
    ]
    lines += [_line({**base, "prompt_embeds": {**embeds, "shape": [4, value]}}) for value in odd]
    lines += [_line({**base, "prompt_embeds": {**embeds, "shape": [value, 1]}}) for value in odd]
    texts = (
        "00 11\t22 33 44 55 66 77 ",
        "AA" * 8,
        "0 0" * 8,
        "00" * 7,
        "0g" * 8,
        "00" * 9,
        "é" * 16,
        "0" * 15,
    )
    lines += [_line({**base, "prompt_embeds": {**embeds, "data": text}}) for text in texts]
    lines += [_line({**base, "prompt_embeds": {**embeds, "shape": [3, 1], "data": "00" * 6}})]
    lines += [_line({k: v for k, v in base.items() if k != left_out}) for left_out in base]
    releases = (
        "0.9.1",
        "0.9.2",
        " 0.33 ",
        "LATEST",
        "0",
        "0.33.",
        "0.33.x",
        "v0.10.0",
        "0.31rc1",
        "0.33.0-",
        "1e3",
    )
    lines += [_line({**base, "vllm": release}) for release in releases]
    # Several faults in one line: the first one checked counts.
    lines += [
        _line(
            {
                **base,
                "vllm": "x",
                "algorithm": "y",
                "cache_salt": 1,
                "lora": 1,
                "multimodal": 1,
                "prompt_embeds": 1,
            }
        ),
        _line({**base, "lora": {"more": 1}, "multimodal": 1, "prompt_embeds": {"more": 1}}),
        _line({**base, "lora": {"name": ""}, "prompt_embeds": {**embeds, "shape": [0, 1]}}),
        _line({**base, "vllm": "x", "algorithm": None}),
        _line({**base, "algorithm": "y", "block_size": 0, "lookahead": -1, "hash_seed": 1}),
        _line({**base, "vllm": "0.32.0", "lookahead": 1, "hash_seed": None, "algorithm": "xxhash"}),
        _line({**base, "vllm": "0.32.0", "lookahead": 1 << 17}),
        _line({**base, "tokens": [True], "more": 1}),
    ]
    return [*lines, *_TEXTS]


_KEYS = ("lora", "cache_salt", "multimodal", "prompt_embeds", "more", "__proto__")
_LORA = ("name", "path", "id", "more")
_HEAD = b'{"id":1,"vllm":"0.33.0","algorithm":"sha256_cbor","hash_seed":"0","block_size":1,"tokens":'
_TEXTS = [
    b"\n",
    b"   \t\r\n",
    b"\x0b\x0c\n",
    b"{\n",
    b"[]\n",
    b"null\n",
    b"1 2\n",
    b"\xff\n",
    b'{"id":"\xc3"}\n',
    b'{"id":"\xed\xa0\x80"}\n',
    b"\xef\xbb\xbf" + _HEAD + b"[1]}\n",
    _HEAD + b"[1]}\r\n",
    _HEAD + b"[1],}\n",
    _HEAD + b"[1,]}\n",
    _HEAD + b"[01]}\n",
    _HEAD + b"[-0]}\n",
    _HEAD + b"[+1]}\n",
    _HEAD + b"[1.]}\n",
    _HEAD + b"[.5]}\n",
    _HEAD + b"[1e0]}\n",
    _HEAD + b"[0x1]}\n",
    _HEAD + b"[NaN]}\n",
    _HEAD + b"[Infinity]}\n",
    _HEAD + b"[-Infinity]}\n",
    _HEAD + b"[18446744073709551615,18446744073709551616]}\n",
    _HEAD + b"[18446744073709551615,9007199254740993]}\n",
    _HEAD + b"[" + b"9" * 5000 + b"]}\n",
    _HEAD + b"[" + b"9" * 4000 + b"]}\n",
    _HEAD + b"[" * 100000 + b"\n",
    _HEAD + b"[1]," + b'"tokens":[1]}\n',
    _HEAD + b'[1],"lora":{"name":"a","name":"a","path":"p"}}\n',
    _HEAD + b"[1],\x00}\n",
    _HEAD + b'[1],"cache_salt":"a\tb"}\n',
    _HEAD + b'[1],"cache_salt":"a\\tb\\u00e9\\/"}\n',
    _HEAD + b'[1],"cache_salt":"\\ud800"}\n',
    _HEAD + b'[1],"cache_salt":"\\ud83d\\ude00"}\n',
    _HEAD + b'[1],"cache_salt":"\\x41"}\n',
    _HEAD + b'[1],"cache_salt":"\\u12"}\n',
    _HEAD + b"[1],\"cache_salt\":'a'}\n",
    _HEAD + b'[1],"hash_seed2":"0"}\n',
    _HEAD + b"[1]} // comment\n",
    b'{"id":"long","tokens":"' + b"x" * (8 * 1024 * 1024) + b'"}\n',
    b'{"id":"after","tokens":[1]}\n',
    _HEAD + b"[1]}",
]
