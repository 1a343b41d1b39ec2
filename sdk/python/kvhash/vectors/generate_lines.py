"""Makes the vectors of request lines as text: what is refused, the forms of a release, JSON's own pitfalls."""

from __future__ import annotations

from typing import Any

from kvhash.request import answer_lines

from .generate_requests import ONE_IMAGE, OTHER_IMAGE, embeds_of, images_of, lora_of, request_of
from .record import vector
from .releases import NEWEST_TEXT
from .request_maker import GENERAL_CODE, RequestMaker, request_answer

__all__ = ["add_bad_fields", "add_lines", "add_release_texts", "line_vector"]

_LINE_CODES = ("invalid-json", GENERAL_CODE)


def add_bad_fields(maker: RequestMaker) -> None:
    """Add a request for each field that may be wrong, each in a way of its own."""
    good = request_of("sha256_cbor", [1, 2, 3, 4])
    embeds = embeds_of(4, 2, "float32")
    changes: dict[str, Any] = {
        "token-negative": {"tokens": [-1, 2, 3, 4]},
        "token-too-large": {"tokens": [1 << 64, 2, 3, 4]},
        "token-float": {"tokens": [1.5, 2, 3, 4]},
        "token-float-whole": {"tokens": [1.0, 2, 3, 4]},
        "token-text": {"tokens": ["1", 2, 3, 4]},
        "token-bool": {"tokens": [True, 2, 3, 4]},
        "token-null": {"tokens": [None, 2, 3, 4]},
        "tokens-text": {"tokens": "1,2,3,4"},
        "tokens-null": {"tokens": None},
        "token-late": {"tokens": [1, 2, 3, 4, 5, -7]},
        "tokens-nested": {"tokens": [[1, 2], [3, 4]]},
        "block-size-zero": {"block_size": 0},
        "block-size-negative": {"block_size": -4},
        "block-size-text": {"block_size": "4"},
        "block-size-float": {"block_size": 4.5},
        "block-size-bool": {"block_size": True},
        "seed-number": {"hash_seed": 0},
        "seed-bool": {"hash_seed": False},
        "salt-number": {"cache_salt": 5},
        "salt-list": {"cache_salt": ["t"]},
        "unknown-field": {"cache_sault": "t"},
        "algorithm-number": {"algorithm": 256},
        "algorithm-null-ish": {"algorithm": "none"},
        "lora-text": {"lora": "sql"},
        "lora-empty-name": {"lora": {"name": "", "path": "p", "id": 1}},
        "lora-unknown-field": {"lora": {**lora_of(), "rank": 8}},
        "lora-name-number": {"lora": {**lora_of(), "name": 7}},
        "lora-id-zero": {"lora": {**lora_of(), "id": 0}},
        "mm-object": {"multimodal": {"identifier": ONE_IMAGE}},
        "mm-no-identifier": {"multimodal": [{"offset": 0, "length": 1}]},
        "mm-negative-offset": {"multimodal": images_of((ONE_IMAGE, -1, 2))},
        "mm-zero-length": {"multimodal": images_of((ONE_IMAGE, 1, 0))},
        "mm-overlap": {"multimodal": images_of((ONE_IMAGE, 0, 3), (OTHER_IMAGE, 2, 1))},
        "mm-unsorted": {"multimodal": images_of((ONE_IMAGE, 3, 1), (OTHER_IMAGE, 0, 1))},
        "mm-past-end": {"multimodal": images_of((ONE_IMAGE, 2, 3))},
        "mm-unknown-field": {
            "multimodal": [{"identifier": ONE_IMAGE, "offset": 0, "length": 1, "kind": "image"}]
        },
        "mm-identifier-number": {"multimodal": [{"identifier": 5, "offset": 0, "length": 1}]},
        "embeds-few-rows": {"prompt_embeds": embeds_of(3, 2, "float32")},
        "embeds-dtype": {"prompt_embeds": {**embeds, "dtype": "float64"}},
        "embeds-short-data": {"prompt_embeds": {**embeds, "data": embeds["data"][:-2]}},
        "embeds-not-hex": {"prompt_embeds": {**embeds, "data": "zz" * 32}},
        "embeds-shape": {"prompt_embeds": {**embeds, "shape": [4]}},
        "lookahead-negative": {"lookahead": -1},
        "lookahead-text": {"lookahead": "1"},
        "context-parallel-zero": {"decode_context_parallel_size": 0},
    }
    for slug, change in changes.items():
        maker.add(
            "requests",
            f"bad-{slug}",
            f"refused: {slug}",
            {**good, **change},
            ["bad-field"],
            first=NEWEST_TEXT,
        )
    missing = {key: value for key, value in good.items() if key != "tokens"}
    maker.add("requests", "bad-no-tokens", "refused: no tokens", missing, ["bad-field"], first=NEWEST_TEXT)


def line_vector(slug: str, name: str, line: str, flags: list[str]) -> dict[str, Any]:
    """Return the vector of a whole line, ``@id`` in the place of its id, as the newest release answers it."""
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


def add_lines(maker: RequestMaker) -> None:
    """Add whole lines: malformed ones, and well-formed ones that readers get wrong."""
    head = f'{{"id":"@id","vllm":"{NEWEST_TEXT}","algorithm":"sha256_cbor","hash_seed":"0","block_size":4'
    lines = {
        "json-truncated": head + ',"tokens":[1,2,3,4]',
        "json-text": '"tokens"',
        "json-array": "[1,2,3,4]",
        "json-number": "5",
        "json-nan": head + ',"tokens":[NaN,2,3,4]}',
        "json-infinity": head + ',"tokens":[1,Infinity,3,4]}',
        "json-beyond-float": head + ',"tokens":[1e999,2,3,4]}',
        "json-trailing-comma": head + ',"tokens":[1,2,3,4,]}',
        "json-two-objects": "{} {}",
        "json-rubbish": "hash me",
        "json-single-quotes": "{'tokens':[1]}",
        "json-field-twice": head + ',"tokens":[1,2,3,4],"tokens":[5,6,7,8]}',
        "json-deep": "[" * 100000,
        "json-null": "null",
        "json-true": "true",
    }
    for slug, line in lines.items():
        item = line_vector(slug, f"refused: {slug}", line, ["json"])
        if slug == "json-beyond-float":  # to a reader that has an infinity for it the token is wrong
            item["expected"]["error"]["codes"] = sorted(
                [*item["expected"]["error"]["codes"], "invalid-token"]
            )
        maker.made["requests"].append(item)
    spaces = head + ' , "tokens" : [ 1 , 2 , 3 , 4 ] }'
    escaped = head + ',"cache_salt":"m\\u00fcnchen","tokens":[1,2,3,4]}'
    surrogates = head + ',"cache_salt":"\\ud83d\\udd11","tokens":[1,2,3,4]}'
    lone = head + ',"cache_salt":"\\ud83d","tokens":[1,2,3,4]}'
    big = head + ',"tokens":[18446744073709551615,9007199254740993,3,4]}'
    for slug, line, flags in (
        ("json-spaces", spaces, ["json"]),
        ("json-escapes", escaped, ["json", "not-ascii"]),
        ("json-surrogate-pair", surrogates, ["json", "not-ascii"]),
        ("json-lone-surrogate", lone, ["json", "not-ascii"]),
        ("json-64-bit", big, ["json", "integer-widths"]),
    ):
        maker.made["requests"].append(line_vector(slug, slug, line, flags))


def add_release_texts(maker: RequestMaker) -> None:
    """Add the ways in which a release may be written."""
    texts = [
        "latest",
        "v{0}",
        "{0}rc1",
        "{0}.dev12",
        "{0}+cu129",
        "{0}.1",
        "not-a-release",
        "",
        "0.9",
        "0.9.1",
        "0.8.5",
        "1",
        "0.33.0.0.0",
        " {0}\n",
        "{0}rc1.post2.dev3+g1.2-x_3",
        "{0}rc1rc2rc3rc4rc5",
        "{0}+" + "g" * 95,
    ]
    good = request_of("sha256_cbor", [1, 2, 3, 4], cache_salt="t-1")
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
