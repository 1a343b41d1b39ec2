"""The Go module: its own checks pass, and its request-line program answers as the Python SDK does."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhash.request import answer_lines

from ..data_files import DATA, RELEASES, hash_cases, hash_results, request_of
from . import built
from .event_lines import python_answer
from .toolchain import need

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "sdk" / "go"
ANSWERED = ("none_hash", "block_hashes", "external", "extra_keys")


@pytest.fixture(scope="session")
def go() -> str:
    """Return the Go command."""
    return need("go")


@pytest.fixture(scope="session")
def program() -> str:
    """Return the request-line program, built."""
    return built.go()[0]


def _run(go: str, *arguments: str) -> str:
    done = subprocess.run([go, *arguments], cwd=MODULE, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _ask(program: str, lines: list[bytes]) -> list[dict[str, Any]]:
    done = subprocess.run([program], input=b"\n".join(lines) + b"\n", capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _same(program: str, lines: list[bytes]) -> list[dict[str, Any]]:
    """Assert that Go and Python answer alike (of an error its id and code); return the answers."""
    got, expected = _ask(program, lines), list(answer_lines(lines))
    assert len(got) == len(expected)
    for line, ours, theirs in zip([line for line in lines if line.strip()], got, expected, strict=True):
        if "error" in theirs:
            seen = ours.get("error", {}).get("code"), ours["id"]
            assert seen == (theirs["error"]["code"], theirs["id"]), (line[:300], ours, theirs)
        else:
            assert ours == theirs, line[:300]
    return got


def test_go_vet_and_gofmt_find_nothing(go: str) -> None:
    """The module is formatted and vet-clean."""
    _run(go, "vet", "./...")
    formatter = Path(go).with_name("gofmt")
    done = subprocess.run([str(formatter), "-l", "."], cwd=MODULE, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_go_tests_pass(go: str) -> None:
    """The module's own tests pass."""
    _run(go, "test", "-count=1", "./...")


def test_the_generated_contract_tables_are_up_to_date() -> None:
    """`gen_contract.py --check` finds nothing stale: no port has another table than the Python SDK."""
    done = subprocess.run(
        [sys.executable, "tools/gen_contract.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_recorded_case_is_equal(program: str) -> None:
    """Go's answer is what vLLM's own functions gave, and its errors are Python's."""
    lines, rows = [], []
    for release in RELEASES:
        for row in hash_results(release):
            lines.append(json.dumps(request_of(hash_cases()[row["id"]], release)).encode())
            rows.append(row)
    answered = 0
    for row, got in zip(rows, _same(program, lines), strict=True):
        if "error" not in row and not row.get("random_root"):
            assert {name: got[name] for name in ANSWERED} == {name: row[name] for name in ANSWERED}, row["id"]
            answered += 1
    assert answered > 2000


EDGES = [
    0,
    23,
    24,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**39,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
TEXTS = [
    "",
    "a",
    "salt",
    "é" * 127,
    "é" * 128,
    "x" * 255,
    "x" * 256,
    "\U0001f600" * 300,
    "y" * 65535,
    "y" * 65536,
]


def _random_request(rng: random.Random, number: int) -> dict[str, Any]:
    block = rng.choice([1, 2, 3, 4, 16, 17, 64])
    count = rng.choice([0, block - 1, block, 3 * block + 1, rng.randrange(200)])
    request: dict[str, Any] = {
        "id": number,
        "vllm": rng.choice([*RELEASES, "0.10.1", "latest", "0.13.0rc1", "v0.24", "0.32.1.dev3+gabc"]),
        "algorithm": rng.choice(
            ["sha256", "sha256", "xxhash", "sha256_cbor", "xxhash_cbor", "sha256_cbor_64bit"]
        ),
        "hash_seed": rng.choice([None, "", "0", "42", "vllm-none-hash", "π"]),
        "block_size": block,
        "tokens": [rng.choice(EDGES) if rng.random() < 0.4 else rng.randrange(200_000) for _ in range(count)],
    }
    if rng.random() < 0.3:
        request["lora"] = {"name": rng.choice(TEXTS[1:]), "path": "p/q", "id": rng.choice([1, 300, 2**40])}
    if rng.random() < 0.4:
        request["cache_salt"] = rng.choice(TEXTS)
    if rng.random() < 0.4:
        items, position = [], 0
        while len(items) < 9 and position < count - 1:
            start = position + rng.choice([0, 0, 1, 5])
            length = rng.choice([1, 2, 40])
            if start + length > count:
                break
            items.append({"identifier": rng.choice(TEXTS[:8]), "offset": start, "length": length})
            position = start + length
        request["multimodal"] = items
    if rng.random() < 0.2:
        width = {"float32": 4, "float16": 2, "bfloat16": 2}
        dtype = rng.choice(list(width))
        rows = count + rng.randrange(2)
        data = rng.randbytes(rows * 3 * width[dtype]).hex()
        request["prompt_embeds"] = {"shape": [rows, 3], "dtype": dtype, "data": data}
    if rng.random() < 0.2:
        request["lookahead"] = rng.choice([0, 1, 3, 70])
    if rng.random() < 0.1:
        request["decode_context_parallel_size"] = rng.choice([1, 2, 4])
    return request


def test_random_requests_are_answered_alike(program: str) -> None:
    """All releases, algorithms, keys, look-ahead and parallelism, mixed at random, give equal answers."""
    rng = random.Random(20)
    lines = [json.dumps(_random_request(rng, i), ensure_ascii=i % 2 == 0).encode() for i in range(2500)]
    answers = _same(program, lines)
    assert sum("error" not in answer for answer in answers) > 1000


@pytest.mark.parametrize("vllm", ["0.9.2", "0.30.0", "0.33.0"])
def test_pickle_frames_are_equal(program: str, vllm: str) -> None:
    """Around 64 KiB, where pickle opens frames and moves payloads out of them, hashes are equal."""
    lines = []
    for count in (13_100, 13_105, 13_106, 13_107, 13_108, 13_120, 40_000):
        base = {"vllm": vllm, "algorithm": "sha256", "hash_seed": "0", "block_size": count}
        lines.append(json.dumps({**base, "tokens": [2**31 - 1 - i for i in range(count)]}).encode())
    for length in (*range(65_525, 65_540), 131_072):
        salted = {
            "vllm": vllm,
            "algorithm": "sha256",
            "hash_seed": "0",
            "block_size": 4,
            "tokens": [1, 2, 3, 4],
        }
        lines.append(json.dumps({**salted, "cache_salt": "s" * length}).encode())
    assert all("error" not in answer for answer in _same(program, lines))


def _variant(**changes: Any) -> bytes:
    good = {"id": "x", "vllm": "0.33.0", "hash_seed": "0", "block_size": 2, "tokens": [1, 2, 3]}
    return json.dumps({**good, **changes}).encode()


ITEM = {"identifier": "a", "offset": 0, "length": 1}
EMBEDS = {"shape": [3, 1], "dtype": "float16", "data": "00" * 6}
HOSTILE = [
    b"", b"   ", b"\t\x0b\x0c", b"{", b"[]", b"null", b"1", b"\xff", b'{"id":"\xed\xa0\x80"}',
    b"\xef\xbb\xbf{}",
    b"{}", b'{"id":1}', b'{"id":1,"id":2,"tokens":[]}', b'{"id":1,"tokens":[],"tokens":[]}',
    b'{"tokens":[1,]}',
    b'{"tokens":[01]}', b'{"tokens":[+1]}', b'{"tokens":[1.]}', b'{"tokens":[NaN]}',
    b'{"tokens":[-Infinity]}',
    b'{"tokens":[1]} x', b'{"tokens":[1] "x":1}', b'{"tokens":["\\ud800"]}', b'{"tokens":[1]\x00}',
    b"{'a':1}",
    b'{"id":{"a":[1.5,"\\u00e9"]},"tokens":[]}', b'{"id":1,"tokens":[' + b"1" * 5000 + b"]}",
    b'{"a":"\\x"}', b'{"a":"\x01"}',
    b'{"tokens":[-0,1,2]}', b'{"tokens":' + b"[" * 100_000 + b"}", b'{"tokens":[tru]}',
    b'{"id":"\\ud83d\\ude00","tokens":[]}',
    *[_variant(tokens=value) for value in (
        None, "1", 5, True, 1.5, {}, [True], [1.0], ["1"], [None], [-1], [2**64], [2**64 - 1] * 3, [[1]],
        [10**30], []
    )],
    *[_variant(vllm=value) for value in (
        None, 1, "", "x", "0.9.1", "0.9.2", "0.10.1.1", "99.0.0", "latest", " LATEST ", "v0.33",
        "0.33.0\n", "0.3a3.0",
        "0.31.0rc1", "0.31.0.dev12+g1", "1.2.3.4.5", "0.0000033.0", "0.33.0-rc.1", "\ud800",
    )],
    *[_variant(algorithm=value) for value in (None, 1, "builtin", "sha256_cbor_64bit", "nope", "",
    "SHA256", [])],
    *[_variant(hash_seed=value) for value in (None, 0, False, "", "\ud800", [], {})],
    *[_variant(algorithm="xxhash", hash_seed=None), _variant(vllm="0.28.0", hash_seed=None)],
    *[_variant(block_size=value) for value in (None, 0, -1, True, 1.0, "2", 2**31 - 1, 2**31, 2**70, [])],
    *[_variant(lookahead=value) for value in (None, 0, 1, -1, True, 1.0, 65536, 65537, 2**80)],
    _variant(vllm="0.32.0", lookahead=1), _variant(vllm="0.32.0", lookahead=1, hash_seed=0),
    *[_variant(decode_context_parallel_size=value) for value in (None, 0, 1, 2, 2**31, "1", False)],
    *[_variant(cache_salt=value) for value in (None, "", "a", 1, True, [], "\udc00")],
    *[_variant(lora=value) for value in (
        None, {}, [], "x", {"name": "a"}, {"name": "a", "path": ""}, {"name": "a", "path": "p"},
        {"name": "", "path": "p"},
        {"name": 1, "path": "p"}, {"name": "a", "path": "p", "id": 0}, {"name": "a", "path": "p", "id": None},
        {"name": "a", "path": "p", "id": True}, {"name": "a", "path": "p", "x": 1}, {"name": "\ud800",
        "path": "p"},
        {"name": "a", "path": "p", "id": 2**63}, {"name": None, "path": "p"},
    )],
    _variant(vllm="0.9.2", lora={"name": "a"}), _variant(vllm="0.9.2", lora={"id": 3}),
    _variant(vllm="0.12.0", lora={"id": 3}),
    *[_variant(multimodal=value) for value in (
        None, [], {}, "x", 1, [1], [{}], [ITEM], [ITEM, ITEM], [{**ITEM, "offset": 3}], [{**ITEM,
        "length": 4}],
        [{**ITEM, "length": 0}], [{**ITEM, "offset": -1}], [{**ITEM, "offset": True}], [{**ITEM,
        "offset": 1.0}],
        [{**ITEM, "identifier": None}], [{**ITEM, "identifier": ""}], [{**ITEM, "identifier": "\ud800"}],
        [{**ITEM, "x": 1}],
        [{**ITEM, "offset": 1}, ITEM], [{**ITEM, "offset": 2**63 - 1}], [{**ITEM, "length": 2**63 - 1}],
        [{**ITEM, "length": 2**63}], [{"identifier": "a", "offset": 0}], [{**ITEM, "offset": None}],
    )],
    *[_variant(prompt_embeds=value) for value in (
        None, {}, [], "x", 1, EMBEDS, {**EMBEDS, "data": "00 " * 6}, {**EMBEDS, "data": "0 0" * 4},
        {**EMBEDS, "data": "zz"},
        {**EMBEDS, "data": None}, {**EMBEDS, "data": 1}, {**EMBEDS, "dtype": "float64"}, {**EMBEDS,
        "dtype": None},
        {**EMBEDS, "shape": [3]}, {**EMBEDS, "shape": "31"}, {**EMBEDS, "shape": [2, 1], "data": "00" * 4},
        {**EMBEDS, "shape": [3, 0], "data": ""}, {**EMBEDS, "shape": [-1, 1]}, {**EMBEDS, "shape": [True, 1]},
        {**EMBEDS, "shape": [2**62, 2**62]}, {**EMBEDS, "shape": [4, 1], "data": "AB" * 8}, {**EMBEDS,
        "x": 1},
        {"shape": [3, 1], "dtype": "float16"}, {**EMBEDS, "shape": None}, {**EMBEDS, "shape": {}},
    )],
    _variant(cache_sal="t"), _variant(expect={}), _variant(id=None), _variant(id=[1, {"a": None}]),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::kvhash.NewerReleaseWarning")
def test_hostile_lines_get_the_same_codes(program: str) -> None:
    """Each bad line gives one error line with Python's code and id; the lines around it are answered."""
    lines = [line for bad in HOSTILE for line in (bad, _variant(id=repr(bad[:30])))]
    answers = _same(program, lines)
    codes = {answer["error"]["code"] for answer in answers if "error" in answer}
    assert {"invalid-json", "invalid-utf8", "unknown-release", "invalid-token", "invalid-lora"} <= codes


# --- events ---------------------------------------------------------------------------------------------------


def _go_decoded(program: str, payloads: list[bytes]) -> list[dict[str, Any]]:
    answers = _ask(
        program, [json.dumps({"id": i, "decode": p.hex()}).encode() for i, p in enumerate(payloads)]
    )
    results = []
    for i, answer in enumerate(answers):
        assert answer["id"] == i
        if "error" in answer:
            results.append({"error": answer["error"]["code"]})
            continue
        for event in answer["batch"]["events"]:
            if "undecodable" in event:
                del event["message"]
        results.append({"batch": answer["batch"]})
    return results


def _recorded_payloads() -> list[bytes]:
    return [
        bytes.fromhex(json.loads(line)["payload"])
        for path in sorted((DATA / "wire").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def test_every_recorded_batch_decodes_alike(program: str) -> None:
    """Go reads each release's recorded batches as the Python decoder does."""
    payloads = _recorded_payloads()
    assert len(payloads) > 700
    for payload, got in zip(payloads, _go_decoded(program, payloads), strict=True):
        assert got == python_answer(payload), payload.hex()


def test_damaged_batches_decode_alike(program: str) -> None:
    """Cut, flipped and spliced payloads give the same events, undecodable places and codes as in Python."""
    rng = random.Random(4)
    recorded = _recorded_payloads()
    payloads = []
    for _ in range(3000):
        payload = bytearray(rng.choice(recorded))
        for _ in range(rng.choice([1, 1, 2])):
            place = rng.randrange(len(payload))
            kind = rng.randrange(4)
            if kind == 0:
                payload[place] ^= 1 << rng.randrange(8)
            elif kind == 1:
                payload[place] = rng.choice(b"\xc0\xc2\x00\x90\x80\xa0\xc4\xcb\xcf\xd3\xd9\xdc\xdf\xc1\xff")
            elif kind == 2:
                del payload[place:]
                payload += b"\x00" if not payload else b""
            else:
                payload[place:place] = rng.choice(
                    [b"\xc0", b"\x01", b"\xa1a", b"\xc4\x08aaaaaaaa", b"\x92\x01\x02"]
                )
        payloads.append(bytes(payload))
    for payload, got in zip(payloads, _go_decoded(program, payloads), strict=True):
        assert got == python_answer(payload), payload.hex()
