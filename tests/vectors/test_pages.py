"""What the pages say of the corpus and of request lines holds: counts, releases, how to skip what is not claimed."""

from __future__ import annotations

import subprocess
import warnings
from collections import Counter
from pathlib import Path

import pytest

from kvhash import KvHashError, UnknownReleaseError, answer, parse_request
from kvhash.contract import Release
from kvhash.vectors import load_corpus
from kvhash.vectors.conformance import read_skips, run, select

from .programs import CORPUS, ROOT, python

PORT = (ROOT / "docs" / "port-a-hasher.md").read_text()
LINES = (ROOT / "docs" / "request-lines.md").read_text()


def test_the_counts_on_the_pages_are_those_of_the_corpus() -> None:
    """How many vectors there are, of which result, and how many are asked, stands on the pages as it is."""
    corpus = load_corpus(CORPUS)
    cases = select(corpus)
    asked = len({case.vector["id"] for case in cases})
    results = Counter(vector["result"] for _, vector in corpus)
    readme = (CORPUS / "README.md").read_text()
    assert (
        f"{len(corpus):,} vectors: {results['valid']:,} valid, {results['invalid']:,} invalid, "
        f"{results['implementation_defined']} implementation-defined"
    ) in readme
    assert (
        f"{len(corpus):,} vectors {asked:,} are asked, as {len(cases):,} lines (many at two releases); "
        f"the other {len(corpus) - asked:,} are for unit tests"
    ) in PORT
    for path in ("serialization", "external", "block_size", "accumulated", "streams", "engine"):
        assert f"`{path}.json`" in PORT


@pytest.mark.parametrize("text", ["v0.33.0", "0.33", "0.33.0.1", "0.33.0rc1", "0.33.0.dev12", "0.33.0+cu129"])
def test_the_forms_of_a_release_that_the_page_accepts_are_accepted(text: str) -> None:
    """Each names the recipe of 0.33.0."""
    assert f"`{text}`" in LINES
    assert Release.parse(text) == Release.parse("0.33.0")


@pytest.mark.parametrize("text", ["1", "0.33.0.0.0", "0.9"])
def test_the_forms_of_a_release_that_the_page_refuses_are_refused(text: str) -> None:
    """None of them is guessed at."""
    assert f"`{text}`" in LINES
    with pytest.raises(UnknownReleaseError):
        answer(parse_request({"vllm": text, "tokens": [1], "hash_seed": "0"}))


@pytest.mark.parametrize(
    "field",
    [
        {"lora": {"name": "a", "path": "b", "id": 0}},
        {"lora": {"name": "", "path": "b"}},
        {"lora": {"name": "a", "path": "b", "rank": 8}},
        {"multimodal": [{"identifier": "a", "offset": 0, "length": 1, "kind": "image"}]},
        {"multimodal": [{"identifier": "a", "offset": 0, "length": 0}]},
        {"prompt_embeds": {"shape": [1, 1], "dtype": "float32", "data": "00000000", "device": "cpu"}},
    ],
)
def test_the_limits_of_nested_fields_on_the_page_hold(field: dict[str, object]) -> None:
    """LoRA ids from 1, names that are not empty, items of a token or more, no unknown nested field."""
    with pytest.raises(KvHashError):
        parse_request({"vllm": "0.33.0", "tokens": [1], "hash_seed": "0", **field})


def test_the_recipe_of_the_page_is_what_is_hashed() -> None:
    """The flat look-ahead key, an image that begins in the look-ahead tokens, and null in block 1 of a salted chain."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        request = {"vllm": "0.33.0", "algorithm": "sha256_cbor", "hash_seed": "0", "block_size": 4}
        request |= {"tokens": list(range(10)), "lookahead": 2}
        image = {"identifier": "i", "offset": 5, "length": 1}
        got = answer(parse_request({**request, "multimodal": [image]}))["extra_keys"]
        assert got[0] == [[["mm", "i", 5]], 4, 5]
        assert got[1] == [[["mm", "i", 1]], 8, 9]
        assert answer(parse_request(request))["extra_keys"] == [[None, 4, 5], [None, 8, 9]]
        salted = {**request, "lookahead": 0, "cache_salt": "t"}
        assert answer(parse_request(salted))["extra_keys"] == [[["cache_salt", "t"]], None]


@pytest.mark.parametrize(("field", "flag"), [("multimodal", "images"), ("prompt_embeds", "embeddings")])
def test_a_program_without_a_capability_is_green_as_the_page_says(
    tmp_path: Path, field: str, flag: str
) -> None:
    """The skip file that the page's line makes is enough for a program that refuses every such request."""
    line = next(line for line in PORT.splitlines() if line.startswith("grep -h"))
    made = line.replace("third_party/kvhash-vectors", str(CORPUS)).replace("multimodal", field)
    made = made.replace("> skips", f"> {tmp_path}/skips").replace("no images", f"no {flag}")
    subprocess.run(["sh", "-c", made], check=True)
    corpus = load_corpus(CORPUS)
    skips = read_skips(tmp_path / "skips", corpus)
    source = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'sdk' / 'python')!r})\n"
        "from kvhash.events.lines import answer_all_lines\n"
        "for line in sys.stdin.buffer:\n"
        f"    if b'\"{field}\":' in line:\n"
        "        print(json.dumps({'id': json.loads(line)['id'], 'error': {'code': 'not-here'}}))\n"
        "    else:\n"
        "        print(json.dumps(next(iter(answer_all_lines([line])))))\n"
    )
    cases = [
        case
        for pattern in (
            "requests/*",
            "lookahead/sha256-cbor*",
            "context_parallel/sha256-cbor*",
            "*/xxhash-cbor-mix*",
        )
        for case in select(corpus, pattern=pattern, release=None)
    ]
    report = run(python(source), corpus, cases, skips=skips)
    assert report.passed, [outcome for outcome in report.outcomes if outcome.status == "failed"][:3]
    assert any(outcome.status == "skipped" for outcome in report.outcomes)
    assert not run(python(source), corpus, cases).passed
