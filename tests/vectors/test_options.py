"""The options of `kvhash conformance` and `kvhash vectors`: what is refused by name, what is read kindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvhash import KvHashError
from kvhash.vectors import CorpusError, load_corpus
from kvhash.vectors.conformance import CAPABILITIES, read_skips, select
from kvhash_cli.conformance_cmd import conformance
from kvhash_cli.vectors_cmd import vectors

from .programs import CORPUS, sdk_program

FEW = "none_hash/sha256-cbor-e*"
COMMON = ("--cmd", sdk_program(), "--corpus", str(CORPUS), "--run", FEW)


def invoke(*arguments: str) -> Result:
    """Run `kvhash conformance` on a few vectors."""
    return CliRunner().invoke(conformance, [*COMMON, *arguments])


@pytest.mark.parametrize("option", ["--timeout", "--deadline"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "soon", "1e999"])
def test_a_time_that_is_none_is_refused(option: str, value: str) -> None:
    """A limit that would never be reached, or is over before it begins, is a usage error that names the option."""
    result = invoke(f"{option}={value}")
    assert result.exit_code == 2
    assert option in result.stderr


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    """A misspelt algorithm is not an empty run."""
    result = invoke("--algorithm", "sha265")
    assert isinstance(result.exception, KvHashError)
    assert "'sha265'" in str(result.exception)
    assert "sha256_cbor" in str(result.exception)


@pytest.mark.parametrize("write", [str, str.lower, str.upper])
def test_capabilities_are_named_in_any_case(write: type[str]) -> None:
    """What the report prints can be given to --without in any case; a wrong name is told the right ones as printed."""
    left_out = [argument for name in CAPABILITIES[1:] for argument in ("--without", write(name))]
    result = invoke(*left_out, "-o", "json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["capabilities"]) == ["NONE_HASH"]
    wrong = invoke("--without", "telepathy")
    assert wrong.exit_code == 2
    shown = " ".join(wrong.stderr.split())
    assert all(name in shown for name in CAPABILITIES)


def test_a_skip_file_may_have_tabs_and_a_byte_order_mark(tmp_path: Path) -> None:
    """Files from other editors are read; one that is not UTF-8 is a typed error."""
    corpus = load_corpus(CORPUS)
    one, two = [case.vector["id"] for case in select(corpus, pattern="chains/sha256-cbor-count-[89]/0.10.2")][
        :2
    ]
    path = tmp_path / "skips"
    path.write_bytes(f"\ufeff{one}\twhy one\r\n  {two} \t why two \r\n".encode())
    assert read_skips(path, corpus) == {one: "why one", two: "why two"}
    for data in (b"\xff\xfea\x00", f"{one} caf\xe9".encode("latin-1")):
        path.write_bytes(data)
        with pytest.raises(CorpusError, match="is not UTF-8"):
            read_skips(path, corpus)


@pytest.mark.parametrize("form", ["text", "json", "junit", "tap"])
def test_all_skipped_is_not_passed(tmp_path: Path, form: str) -> None:
    """Where nothing was asked nothing passed: it is said, with the reasons, and the exit status is 1."""
    ids = [case.vector["id"] for case in select(load_corpus(CORPUS), pattern=FEW)]
    assert ids
    path = tmp_path / "skips"
    path.write_text("".join(f"{identity} not today\n" for identity in ids))
    result = CliRunner().invoke(
        conformance,
        ["--cmd", "/nowhere", *COMMON[2:], "--skip-file", str(path), "-o", form],
    )
    assert result.exit_code == 1, result.output
    assert "not today" in result.stdout
    if form == "text":
        assert result.stdout.splitlines()[-1].startswith("NOTHING ASKED")
    if form == "json":
        assert json.loads(result.stdout)["passed"] is False


def test_the_text_report_says_why_vectors_are_skipped(tmp_path: Path) -> None:
    """A skip stands in the report with its reason, and the last line counts it."""
    identity = select(load_corpus(CORPUS), pattern=FEW)[0].vector["id"]
    path = tmp_path / "skips"
    path.write_text(f"{identity} our \x1b[31mreason\n")
    result = invoke("--skip-file", str(path))
    assert result.exit_code == 0, result.output
    assert f"{identity}" in result.stdout
    assert r"our \x1b[31mreason" in result.stdout
    assert "skipped" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--run", "nothing/*"], ["--flag", "no-such-flag"]])
def test_a_list_that_is_empty_is_an_error(arguments: list[str]) -> None:
    """A glob that matches nothing is told, as `kvhash conformance` tells it."""
    result = CliRunner().invoke(vectors, ["list", "--corpus", str(CORPUS), *arguments])
    assert isinstance(result.exception, KvHashError)
    assert result.exception.code == "no-vectors"
    assert not result.stdout
