"""Lines at the edges of what JSON readers agree on: numbers, texts, nesting, white space, releases, lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from kvhash.request import MAX_JSON_DEPTH, MAX_LINE_BYTES

__all__ = ["changed_lines", "edge_lines", "long_lines"]

_BASE: dict[str, Any] = {"id": 1, "vllm": "0.33.0", "hash_seed": "0", "block_size": 2, "tokens": [1, 2, 3, 4]}
_GOOD = b'{"id":1,"hash_seed":"0","block_size":1,"tokens":[1]}'

_SPACES = (
    "",
    "\u00a0",
    "\u2003",
    "\ufeff",
    "\x85",
    "\x1c",
    "\x1f",
    "\u3000",
    "\u180e",
    "\u200b",
    "\u1680",
    "\u2007",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u205f",
    "\x1d",
    "\x1e",
    "\x0b\x0c\r",
    "\t\n",
    "\x00",
)
_RELEASES = (
    *("0.33.0" + "rc1" * n for n in (1, 4, 5)), "0.33.0rc" + "1" * 9, "0.33.0rc" + "1" * 10, "0.33.0po\u017ft1",
    "0.33.0\u212a", "0.33.0RC1", "0.33.0+ABC.def-_", "0.33.0+", "0.33.0+\u00e9", "\u0660.33.0", "0.\uff13\uff13.0",
    "1000000.0", "999999.999999.999999.999999", "..", "0.33.0-.rc1", "0.33.0--rc1", "0.33.0.post1.dev2", "0.33.0a",
    "0.33.0alphabeta", "0.33.0c1", "late\u017ft", "0.33 .0", "00.033.000", "0.9.1.post1", "0.9.2rc1", "0.9", "v",
    "vv0.33.0", "0.10.10", "0.33.0+" + "a" * 93, "0.33.0+" + "a" * 94, " " * 101 + "latest", " " * 101 + "0.33.0",
    " " * 94 + "0.33.0", " " * 95 + "0.33.0", "0.33.1000", "0.33.999999", "0.33.1000000", "0.33.1000000000",
    "0.33.0+a..b", "LATEST", "V0.33.0", "latest1", "0.33.0alpha1", "0.33.0preview2", "0.33.0.rev3", "0.33.0-r4",
    "0.33.0_post_4", "0.33.0-4", "0.33.0.rc.1", "0.33.0.rc..1", "0.33.0rc1+", "0.33.0+a+b", "0.33.0+a b", "v 0.33",
    "0.33.0.1.2",
)  # fmt: skip
_ALGORITHMS = ("SHA256", "sha256 ", "sha256\0", "Builtin", "toString", "__proto__", "constructor")

_NUMBERS = (
    "1e999", "-1e999", "1e-999", "0e0", "-0", "-0.0", "1E0", "1e+0", "00", "1.", "1e", "1e+", "1_0", "\u0661", "1e308",
    "1.8e308", "1e2147483648", "1e99999999999", "0.1e1", "1" * 4300, "-" + "1" * 4300, "1" * 4301, "-" + "1" * 4301,
    "0." + "1" * 5000, "1" * 300 + ".0", "1" * 5000 + ".0", "1" * 4301 + "e0", "1e" + "1" * 5000, "-", ".5",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616", "4294967296",
    "2147483648", "65536", "65537", "1.5", "1e2",
)  # fmt: skip
_TEXTS = (
    r'"\ud800"', r'"\udc00"', r'"\ud800\udc00"', r'"\udc00\ud800"', r'"\ud800a"', r'"\ud800\u0041"', r'"\uD83D\uDE00"',
    r'"\u0000"', r'"\u00"', r'"\u 123"', r'"\u+123"', r'"\u-123"', r'"\u0x1"', r'"\u_123"', r'"\x41"', r'"\'"', r'"\/"',
    r'"\b\f\n\r\t"', '"\x7f"', '"\x1f"', '"\u2028\u2029"', '"\ufeff"', '"\ufffe\uffff"', '"\U0010ffff"', '"e\u0301"',
    '""', "''", '"a', '"a\\"', '"\\', r'"\ud83d\u"', r'"\ud83d\u12"', r'"\ud83d\uzzzz"', r'"\U0001f600"',
)  # fmt: skip
_HEX = (
    "", "0", "00", "0000", " 0000", "0000 ", "00 00", "0 000", "00\t00", "00\n00", "00\u00a000", "0x00", "AAFF", "aAfF",
    "00\r00", "\x0b\x0c00\r\n", "\u200300",
    "00\x1c00", "\uff10\uff1000", "00\x0b00", "00\x0c00", "00\x8500", "00,00", "00\x0000",
)  # fmt: skip

_HEAD = '{"id":1,"hash_seed":"0","block_size":2,'
#: A line for a value in every place where one can stand.
_PLACES = (
    '{"id":%s,"hash_seed":"0","block_size":2,"tokens":[1,2]}',
    '{"id":{"a":[%s]},"hash_seed":"0","tokens":[1]}',
    '{"id":1,"hash_seed":%s,"block_size":2,"tokens":[1,2]}',
    '{"id":1,"hash_seed":"0","block_size":%s,"tokens":[1,2]}',
    '{"id":1,"vllm":%s,"tokens":[]}',
    '{"id":1,"algorithm":%s,"tokens":[]}',
    '{"id":1,"unknown":%s,"tokens":[]}',
    '{"id":1,"decode":%s}',
    _HEAD + '"tokens":[1,%s]}',
    _HEAD + '"tokens":%s}',
    _HEAD + '"tokens":[1,2],"lookahead":%s}',
    _HEAD + '"tokens":[1,2],"decode_context_parallel_size":%s}',
    _HEAD + '"tokens":[1,2],"cache_salt":%s}',
    _HEAD + '"tokens":[1,2],"lora":{"name":"a","path":"p","id":%s}}',
    _HEAD + '"tokens":[1,2],"lora":{"name":%s,"path":"p"}}',
    _HEAD + '"tokens":[1,2],"lora":{"name":"n","path":%s}}',
    _HEAD + '"tokens":[1,2],"multimodal":[{"identifier":"a","offset":%s,"length":1}]}',
    _HEAD + '"tokens":[1,2],"multimodal":[{"identifier":"a","offset":0,"length":%s}]}',
    _HEAD + '"tokens":[1,2],"multimodal":[{"identifier":%s,"offset":0,"length":1}]}',
    _HEAD + '"tokens":[1,2],"prompt_embeds":{"shape":[%s,1],"dtype":"float16","data":"00000000"}}',
    _HEAD + '"tokens":[1,2],"prompt_embeds":{"shape":[2,%s],"dtype":"float16","data":"00000000"}}',
    _HEAD + '"tokens":[1,2],"prompt_embeds":{"shape":[2,1],"dtype":%s,"data":"00000000"}}',
    _HEAD + '"tokens":[1,2],"prompt_embeds":{"shape":[2,1],"dtype":"float16","data":%s}}',
    "%s",
    "[%s]",
)
#: The same for a text that is a field's name.
_NAMES = (
    '{"id":1,%s:1,"tokens":[1]}',
    '{"id":{%s:1},"hash_seed":"0","tokens":[1]}',
    _HEAD + '"tokens":[1],"lora":{%s:1,"name":"n","path":"p"}}',
)
_TWICE = (
    '{"id":1,"\\u0069d":2,"tokens":[1]}', '{"tokens":[1],"tok\\u0065ns":[1]}', '{"id":1,"":1,"":1}',
    '{"id":{"a":1,"a":2},"hash_seed":"0","tokens":[1]}', '{"id":1,"tokens":[1],"x":{"a":1,"a":1}}',
    '{"__proto__":1,"__proto__":1,"tokens":[1]}', '{"id":{"\u00e9":1,"e\u0301":2},"hash_seed":"0","tokens":[1]}',
    '{"id":1,"a":1,"a":', '{"id":7,"a":1,"a":1', '{"id":1,"tokens":[1],"tokens":NaN}',
)  # fmt: skip
_BYTES = (
    b"\xc2\xa0" + _GOOD, b"\x0c" + _GOOD, _GOOD + b"\x0b", _GOOD + b"\xc2\x85", _GOOD + b"\r", _GOOD + b" \t",
    b"\xc0\x80", b"\xf4\x90\x80\x80", b'{"id":"\xc0\xaf","tokens":[1]}', b'{"id":"\xe2\x82"}', b"\x00", b"\x1c",
    b"\xc2\x85", b"\xc2\xa0", b"\xe2\x80\x83", b"\x1f", b" \xc2\x85 ",
    b"/**/" + _GOOD, _GOOD + _GOOD, _GOOD + b"]", b"\xff\xfe{\x00}\x00", _GOOD[:-1], _GOOD[:-2] + b",]}",
    b'{"id":1,"tokens":[1,,2]}', b'{"id":1,"tokens":[,1]}', b'{,"id":1}', b'{"id":1,}', b'{"id" 1}', b"{id:1}", b"nul",
    b"nullx", b"truefalse",
)  # fmt: skip


def edge_lines() -> list[bytes]:
    """Return a few thousand lines, each with one odd thing in it; some are answered, most are refused."""
    texts = [*_texts()]
    lines = [text.encode("utf-8", "surrogatepass") for text in texts]
    lines += _BYTES
    for byte in range(0x20):
        if byte != 0x0A:
            lines += [_GOOD[:5] + bytes([byte]) + _GOOD[5:], bytes([byte]) + _GOOD]
    return [line + b"\n" for line in lines if line.strip()]


def _texts() -> Iterator[str]:
    for text in (*(s + r + s for s in _SPACES for r in ("0.33.0", "latest", "v0.31")), *_RELEASES):
        yield json.dumps({**_BASE, "vllm": text})
        yield json.dumps({**_BASE, "vllm": text}, ensure_ascii=False)
    for name in _ALGORITHMS:
        yield json.dumps({**_BASE, "algorithm": name})
    for place in _PLACES:
        for value in (*_NUMBERS, *_TEXTS, "true", "false", "null", "NaN", "-Infinity"):
            yield place % value
    for place in _NAMES:
        for value in _TEXTS:
            yield place % value
    for depth in (1, 128, *range(MAX_JSON_DEPTH - 3, MAX_JSON_DEPTH + 4), 5000):
        arrays, objects = "[" * depth, '{"a":' * depth
        yield f'{{"id":{arrays}{"]" * depth},"hash_seed":"0","tokens":[1]}}'
        yield f'{{"id":{arrays}1{"]" * depth},"hash_seed":"0","tokens":[1]}}'
        yield f'{{"id":{objects}1{"}" * depth},"hash_seed":"0","tokens":[1]}}'
        yield f'{{"id":1,"tokens":{arrays}{"]" * depth}}}'
        yield arrays + "]" * depth
        yield arrays
    yield from _TWICE
    for release in ("0.11.1", "0.16.0", "0.17.1", "0.33.0"):
        for width in (1023, 1024, 2048):  # a block's rows around and beyond one frame of pickle
            data = {"shape": [16, width], "dtype": "float32", "data": "5a" * (64 * width)}
            line = {
                "id": width,
                "vllm": release,
                "hash_seed": "0",
                "tokens": list(range(16)),
                "prompt_embeds": data,
            }
            yield json.dumps(line)
    embeds = {"shape": [1, 1], "dtype": "float16"}
    for data in _HEX:
        yield json.dumps({**_BASE, "tokens": [1], "prompt_embeds": {**embeds, "data": data}})
        yield json.dumps({"id": 1, "decode": data})


def changed_lines(lines: list[bytes], count: int, seed: int) -> list[bytes]:
    """Return lines with characters changed, taken out, put in, or copied from elsewhere in the line."""
    rng = random.Random(seed)
    changed = []
    for _ in range(count):
        line = bytearray(rng.choice(lines).strip())
        for _ in range(rng.choice((1, 1, 2, 3))):
            place = rng.randrange(len(line))
            match rng.randrange(5):
                case 0:
                    line[place] = rng.choice(b'"{}[]:,0123456789-+.eEtfn\\u \x00\xff\xc3')
                case 1:
                    del line[place : place + rng.randrange(1, 4)]
                case 2:
                    line[place:place] = bytes([rng.choice(b'"{}[]:,0e.-\\u ')])
                case 3:
                    other = rng.randrange(len(line))
                    line[place:place] = line[other : other + rng.randrange(1, 20)]
                case _:
                    del line[place + 1 :]
            line = line or bytearray(b"{")
        changed.append(bytes(line).replace(b"\n", b"") + b"\n")
    return [line for line in changed if line.strip()]


def long_lines() -> list[bytes]:
    """Return lines around the longest that is read, blank ones too, with every kind of end, and one behind them."""
    ends = (b"\n", b"\r\n")
    lines = [
        _GOOD + b" " * (MAX_LINE_BYTES + more - len(_GOOD)) + end for more in (0, 1, 100) for end in ends
    ]
    full = _GOOD + b" " * (MAX_LINE_BYTES - len(_GOOD))
    lines += [full + end + b"\n" for end in (b"\r\r", b"\r\r}", b"\r" * 100)]
    lines += [b" " * (MAX_LINE_BYTES + more) + end for more in (0, 1, 100) for end in ends]
    return [*lines, b"\r" * (MAX_LINE_BYTES + 9) + b"\n", _GOOD + b"\n"]
