"""The ``kvhash`` command as a user runs it: golden output, exit codes, bad input, pipes."""
# ruff: noqa: E501 - golden output and the table of bad input keep their lines

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from kvhash_cli.kvevents import kvevents
from kvhash_cli.main import kvhash

KVHASH = Path(sys.executable).with_name("kvhash")
GOOD = ["--vllm", "0.33.0", "--block-size", "4", "--algorithm", "sha256_cbor", "--hash-seed", "0"]
GOOD_HASH = "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb"


def run(*arguments: str, stdin: str | bytes = b"", status: int | None = 0) -> tuple[str, str]:
    """Run the command; return (stdout, stderr) and check the exit status."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([str(KVHASH), *arguments], input=data, capture_output=True, check=False)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    if status is not None:
        assert done.returncode == status, (done.returncode, out, err)
    return out, err


# --- golden output --------------------------------------------------------------------------------------------


def test_hash_in_every_format() -> None:
    """Text has the digest with its decimal beside it; hex and int one value a line; jsonl and check are objects."""
    tokens = ["hash", "--tokens", "[1,2,3,4,5]", *GOOD]
    out, err = run(*tokens)
    assert out == f"    0  [0, 4)  {GOOD_HASH}  2164874634404590027\n"
    assert err == "1 more tokens fill no block\n"
    assert run(*tokens, "-o", "hex") == (GOOD_HASH + "\n", "")
    assert run(*tokens, "-o", "int") == ("2164874634404590027\n", "")
    record = json.loads(run(*tokens, "-o", "jsonl")[0])
    assert record["v"] == 1
    assert record["block_hashes"] == [GOOD_HASH]


def test_integer_chains_print_as_integers() -> None:
    """Before 0.10.2 a hash is an integer; it is printed as one in every format."""
    tokens = ["hash", "--tokens", "[1,2,3,4]", *GOOD, "--vllm", "0.10.0", "--algorithm", "sha256_cbor_64bit"]
    value = run(*tokens, "-o", "int")[0].strip()
    assert run(*tokens)[0].split()[-1] == value
    assert int(run(*tokens, "-o", "hex")[0], 16) == int(value)


def test_tokens_from_a_file_and_from_stdin(tmp_path: Path) -> None:
    """The same hash from JSON, @FILE and stdin."""
    (tmp_path / "tokens.json").write_text("[1, 2, 3, 4]")
    for value, stdin in ((f"@{tmp_path / 'tokens.json'}", ""), ("-", "[1,2,3,4]")):
        assert run("hash", "--tokens", value, *GOOD, "-o", "hex", stdin=stdin)[0] == GOOD_HASH + "\n"


def test_request_options_reach_the_keys() -> None:
    """Salt, adapter, items and embeddings of the command line are those of a request line."""
    out, _ = run(
        "hash", "--tokens", "[1,2,3,4]", *GOOD, "-o", "jsonl", "--cache-salt", "t", "--lora-name", "sql",
        "--lora-path", "/p", "--multimodal", '[{"identifier":"i","offset":1,"length":2}]',
        "--prompt-embeds", '{"shape":[4,1],"dtype":"float16","data":"0000000000000000"}',
    )  # fmt: skip
    assert [key[0] for key in json.loads(out)["extra_keys"][0]] == [
        "lora",
        "mm",
        "cache_salt",
        "prompt_embeds",
    ]


def test_request_lines() -> None:
    """Lines are answered in order; a refused one is an error line, a note on stderr, and exit status 2."""
    good = json.dumps({"id": 1, "tokens": [1, 2, 3, 4]})
    out, err = run("hash", "--jsonl", "-", *GOOD, stdin=f"{good}\n{{\n\n{good}\n", status=2)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer.get("block_hashes") for answer in answers] == [[GOOD_HASH], None, [GOOD_HASH]]
    assert answers[1]["error"]["code"] == "invalid-json"
    assert err == "kvhash: 1 of 3 request lines refused\n"
    assert run("hash", "--jsonl", "-", *GOOD, stdin=good)[1] == ""


def test_a_long_line_is_refused_and_the_next_answered() -> None:
    """A 10 MB line gives one error line; with a higher limit it is hashed."""
    long_line = b'{"id":"long","tokens":[' + b"1," * 5_000_000 + b"1]}"
    out, _ = run("hash", "--jsonl", "-", *GOOD, stdin=long_line + b'\n{"id":2,"tokens":[1,2,3,4]}', status=2)
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["error"]["code"] == "line-too-long"
    assert second["block_hashes"] == [GOOD_HASH]
    small = b'{"id":"s","tokens":[1,2,3,4]}'
    assert (
        "line-too-long"
        in run("hash", "--jsonl", "-", "--max-line-bytes", "10", *GOOD, stdin=small, status=2)[0]
    )
    assert GOOD_HASH in run("hash", "--jsonl", "-", "--max-line-bytes", "100", *GOOD, stdin=small)[0]


def test_where_a_line_ends_for_its_limit() -> None:
    """One line end is not counted; what stands behind the limit is never cut off and forgotten, blank or not."""
    good, end = '{"id":"s","tokens":[1,2,3,4]}', "\r\n"

    def codes(text: str, status: int) -> list[str | None]:
        limit = ("--max-line-bytes", str(len(good)))
        out, _ = run("hash", "--jsonl", "-", *limit, *GOOD, stdin=text + good, status=status)
        return [json.loads(line).get("error", {}).get("code") for line in out.splitlines()]

    assert codes(good + end, 0) == [None, None]
    assert codes(" " * len(good) + end, 0) == [None]
    long = (good + " ", good + "\r\r}", good + "\r\r", " " * (len(good) + 1), " " * 99 + good, " " * 99)
    assert codes("".join(line + end for line in long), 2) == ["line-too-long"] * len(long) + [None]


def test_root() -> None:
    """NONE_HASH of the settings, as text and as a record."""
    expected = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    out, _ = run("root", "--vllm", "0.33.0", "--algorithm", "sha256_cbor", "--hash-seed", "0")
    assert out.split()[0] == expected
    record = json.loads(run("root", "--algorithm", "sha256_cbor", "--hash-seed", "0", "-o", "jsonl")[0])
    assert record["none_hash"] == expected
    assert record["external"] == out.split()[1]


EXPLAINED = """\
block 0: tokens [0, 4)
parent: 4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e
extra keys: null
preimage: 41 bytes of cbor
       0  83                                                array of 3                            the block: (parent, tokens, extra keys)
       1  58 20 4e 11 95 df 02 0d e5 9e 0d 65 .. (34 bytes)  32 bytes                              parent: NONE_HASH
      35  84                                                array of 4                            4 items
      36  01                                                unsigned 1                            token 0
      37  02                                                unsigned 2                            token 1
      38  03                                                unsigned 3                            token 2
      39  04                                                unsigned 4                            token 3
      40  f6                                                null                                  no extra keys
sha256: c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb  2164874634404590027
"""


def test_explain() -> None:
    """The preimage byte by byte, as text and as a record."""
    assert run("explain", "--tokens", "[1,2,3,4]", *GOOD)[0] == EXPLAINED
    record = json.loads(run("explain", "--tokens", "[1,2,3,4]", *GOOD, "-o", "jsonl")[0])
    assert "".join(segment["bytes"] for segment in record["segments"]) == record["preimage"]
    line = json.dumps({"tokens": [1, 2, 3, 4], "block_size": 4, "algorithm": "sha256_cbor", "hash_seed": "0"})
    assert run("explain", "--line", line)[0] == EXPLAINED


def test_diff(tmp_path: Path) -> None:
    """Requests and lists of hashes; 0 when equal, 1 when not."""
    a, b = ('{"tokens":[1,2,3,4],"block_size":4}', '{"tokens":[0,1,2,3],"block_size":4}')
    out, _ = run("diff", a, b, status=1)
    assert "block 0" in out
    assert "leading-token" in out
    assert run("diff", a, a)[0] == "equal: 1 blocks\n"
    (tmp_path / "a").write_text("\n".join([GOOD_HASH, "ab" * 32]))
    (tmp_path / "b.json").write_text(json.dumps([GOOD_HASH, "cd" * 32]))
    out, _ = run("diff", str(tmp_path / "a"), str(tmp_path / "b.json"), "-o", "jsonl", status=1)
    assert json.loads(out)["first_block"] == 1


def test_identify() -> None:
    """A match says release, algorithm, seed, block size and form; none exits 1 and says what was tried."""
    tokens = ["identify", "--tokens", "[1,2,3,4]", "--block-size", "4"]
    out, err = run(*tokens, "--hashes", "2164874634404590027", "--seed", "0", "--seed", "unset")
    assert out == (
        "match: 1 of 1 observed hashes\n  release:    0.10.2 and later\n  algorithm:  sha256_cbor\n"
        "  hash seed:  '0'\n  block size: 4\n  published:  64-bit integer\n"
    )
    assert err == ""
    out, err = run(*tokens, "--hashes", "1234567", "--seed", "0", status=1)
    assert out == "no match\n"
    assert err.startswith("tried ")
    event = {
        "token_ids": [1, 2, 3, 4],
        "block_hashes": [GOOD_HASH],
        "block_size": 4,
        "parent_block_hash": None,
    }
    record = json.loads(run("identify", "--event", json.dumps(event), "-o", "jsonl")[0])
    assert [match["algorithm"] for match in record["matches"]] == ["sha256_cbor"]


def test_contract() -> None:
    """The table, one release, and what lies between two."""
    assert run("contract")[0].splitlines()[0].startswith("0.9.2 ")
    assert re.search(r"^lora_key: +name$", run("contract", "0.30.0")[0], re.M)
    rows = [json.loads(line) for line in run("contract", "0.30.0", "0.33.0", "-o", "jsonl")[0].splitlines()]
    assert [row["since"] for row in rows] == ["0.31.0", "0.33.0"]


def test_check(tmp_path: Path) -> None:
    """What `hash -o check` writes is right; a changed hash fails with its block; bad lines and files do not stop the rest."""
    out, _ = run("hash", "--tokens", "[1,2,3,4]", *GOOD, "-o", "check")
    good = tmp_path / "good.jsonl"
    good.write_text(out)
    assert run("check", str(good))[0] == f"{good}: 0: OK\n"
    assert run("check", "--quiet", "-", stdin=out) == ("", "")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(out.replace(GOOD_HASH, "0" * 64) + "{\n" + out)
    out, err = run("check", str(bad), str(tmp_path / "missing"), str(good), status=2)
    assert [line.split(": ")[2].split()[0] for line in out.splitlines()] == [
        "FAILED",
        "UNREADABLE",
        "OK",
        "OK",
    ]
    assert "block 0 differs" in out
    assert "missing" in err
    bad.write_text(bad.read_text().splitlines()[0])
    run("check", str(bad), status=1)


def test_chat_text_and_openai_bodies(tokenizer_folder: Path, tmp_path: Path) -> None:
    """A chat, its request body and its tokens give one hash; text gives another; a template file is used."""
    model = ["--model", str(tokenizer_folder), "--block-size", "4", "--vllm", "0.33.0", "-o", "hex"]
    messages = json.dumps([{"role": "user", "content": "The quick brown fox"}])
    chat, _ = run("hash", "--chat", messages, *model)
    body = json.dumps({"model": "m", "messages": json.loads(messages), "max_tokens": 5})
    assert run("hash", "--request", body, *model)[0] == chat
    salted = json.dumps({**json.loads(body), "cache_salt": "t"})
    assert (
        run("hash", "--request", salted, *model)[0]
        == run("hash", "--chat", messages, "--cache-salt", "t", *model)[0]
    )
    assert run("hash", "--text", "The quick brown fox", *model)[0] != chat
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }} and again {{ messages[0].content }}")
    assert run("hash", "--chat", messages, "--chat-template", str(template), *model)[0] != chat
    assert (
        run("hash", "--request", '{"prompt":[[1,2,3,4],[5,6,7,8]]}', "--block-size", "4", "-o", "hex")[
            0
        ].count("\n")
        == 3
    )


# --- bad input ------------------------------------------------------------------------------------------------

TOKENS = ["--tokens", "[1,2,3,4]"]
BAD: dict[str, tuple[str, list[str]]] = {
    "unknown release": ("unknown-release", [*TOKENS, "--vllm", "1.x"]),
    "too old a release": ("unknown-release", [*TOKENS, "--vllm", "0.8.0"]),
    "algorithm not in the release": ("algorithm-not-in-release", [*TOKENS, "--vllm", "0.12.0", "--algorithm", "xxhash"]),
    "unknown algorithm": ("unknown-algorithm", [*TOKENS, "--algorithm", "md5"]),
    "builtin": ("algorithm-not-reproducible", [*TOKENS, "--algorithm", "builtin"]),
    "unknown root": ("unknown-root", [*TOKENS, "--vllm", "0.28.0"]),
    "block size 0": ("invalid-block-size", [*TOKENS, "--block-size", "0"]),
    "negative token": ("invalid-token", ["--tokens", "[1,-2]"]),
    "fraction": ("invalid-token", ["--tokens", "[1,2.5]"]),
    "bool": ("invalid-token", ["--tokens", "[1,true]"]),
    "no list": ("invalid-token", ["--tokens", "7"]),
    "no JSON": ("invalid-json", ["--tokens", "[1,2"]),
    "overlapping items": (
        "invalid-multimodal",
        [*TOKENS, "--multimodal", '[{"identifier":"a","offset":0,"length":2},{"identifier":"b","offset":1,"length":1}]'],
    ),
    "item past the end": ("invalid-multimodal", [*TOKENS, "--multimodal", '[{"identifier":"a","offset":3,"length":2}]']),
    "too few rows": ("invalid-prompt-embeds", [*TOKENS, "--prompt-embeds", '{"shape":[1,1],"dtype":"float16","data":"0000"}']),
    "unknown dtype": ("invalid-prompt-embeds", [*TOKENS, "--prompt-embeds", '{"shape":[4,1],"dtype":"int4","data":"00"}']),
    "adapter without path": ("invalid-lora", [*TOKENS, "--lora-name", "sql"]),
    "adapter without id": ("invalid-lora", [*TOKENS, "--vllm", "0.11.0", "--hash-seed", "0", "--lora-name", "sql"]),
    "look-ahead too early": ("feature-not-in-release", [*TOKENS, "--vllm", "0.32.0", "--lookahead", "1"]),
    "no prompt": ("no-prompt", []),
    "two prompts": ("no-prompt", [*TOKENS, "--text", "x"]),
    "text without tokenizer": ("no-tokenizer", ["--text", "x"]),
    "no such tokenizer": ("tokenizer-error", ["--text", "x", "--model", "./no-such-folder"]),
    "no such file": ("io", ["--tokens", "@no-such-file"]),
    "a folder": ("io", ["--tokens", "@/"]),
    "empty value": ("empty-input", ["--tokens", ""]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_coded_line_and_status_2(name: str) -> None:
    """Each fault has its code, prints one line on stderr and nothing on stdout, and exits 2."""
    code, arguments = BAD[name]
    out, err = run("hash", *arguments, status=2)
    assert out == ""
    assert err.startswith(f"kvhash: error [{code}]: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (["--jsonl", "-"], b"", "empty-input"),
        (["--jsonl", "-"], b"\n\n", "empty-input"),
        (["--tokens", "-"], b"", "empty-input"),
        (["--tokens", "-"], b"\xff\xfe", "invalid-utf8"),
        (["--jsonl", "no-such-file"], b"", "io"),
    ],
)
def test_bad_streams(arguments: list[str], stdin: bytes, code: str) -> None:
    """Empty and undecodable input."""
    _, err = run("hash", *arguments, stdin=stdin, status=2)
    assert err.startswith(f"kvhash: error [{code}]: ")


def test_a_salt_that_is_not_text() -> None:
    """In a request line or body a number is no salt."""
    out, _ = run("hash", "--jsonl", "-", *GOOD, stdin='{"tokens":[1],"cache_salt":7}', status=2)
    assert json.loads(out)["error"]["code"] == "invalid-salt"


@pytest.mark.parametrize(
    "command", [["--no-such-option"], ["no-such-command"], ["hash", "--block-size", "x"], ["explain"]]
)
def test_usage_errors(command: list[str]) -> None:
    """Wrong words are exit status 2 with a hint, on stderr."""
    out, err = run(*command, status=2)
    assert out == ""
    assert err


def test_a_newer_release_warns_once_on_stderr() -> None:
    """The hash is computed as the newest known release does, and that is said once."""
    out, err = run("hash", *TOKENS, *GOOD, "--vllm", "0.99.0", "-o", "hex")
    assert out == GOOD_HASH + "\n"
    assert err.count("warning: ") == 1
    assert "0.99.0 is newer than" in err


def test_a_closed_pipe_is_quiet() -> None:
    """`kvhash ... | head` ends without a word."""
    tokens = json.dumps(list(range(200_000)))
    with subprocess.Popen(
        [str(KVHASH), "hash", "--tokens", "-", "--block-size", "1", *GOOD[:2]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(tokens.encode())
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


# --- help, version, start-up ----------------------------------------------------------------------------------


def _commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    found: list[tuple[str, ...]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((*prefix, name))
        if isinstance(command, click.Group):
            found += _commands(command, (*prefix, name))
    return found


ALL_COMMANDS = [("kvhash", *command) for command in _commands(kvhash)] + [
    ("kvevents", *command) for command in _commands(kvevents)
]


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_every_command_has_an_example_and_is_documented(command: tuple[str, ...]) -> None:
    """The help of every command has an example, and the reference page shows that help as it is."""
    script = str(KVHASH.with_name(command[0]))
    text = subprocess.run([script, *command[1:], "--help"], capture_output=True, text=True, check=True).stdout
    assert "Example" in text
    reference = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert f"## {' '.join(command)}\n" in reference
    assert text.strip() in reference, "docs/cli.md is stale: python docs/make_cli_reference.py"


def test_version_names_release_backend_and_libraries() -> None:
    """One line for kvhash and its backend, one for the interpreter and the libraries."""
    out, _ = run("--version")
    assert re.fullmatch(
        r"kvhash \d+\.\d+\.\d+ \(backend: .+\)\npython 3\.\d+\.\d+; .*cbor2 [\d.]+.*xxhash [\d.]+.*\n", out
    )
    assert run("hash", "--tokens", "[1]", status=0)[0] == ""


def test_version_imports_next_to_nothing() -> None:
    """`kvhash --version` is answered before click, the contract or any dependency is imported."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [str(KVHASH), "--version"], capture_output=True, text=True, check=True, env=environment
    )
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "kvhash_cli.entry" in imported
    assert not imported & {
        "click",
        "kvhash.contract",
        "json",
        "dataclasses",
        "msgspec",
        "zmq",
        "xxhash",
        "importlib.metadata",
    }


def test_stdout_carries_only_data(tmp_path: Path) -> None:
    """Every machine format is parseable line by line, whatever was said on stderr."""
    out, _ = run("hash", "--tokens", "[1,2,3,4,5,6]", *GOOD, "--vllm", "0.99.0", "-o", "jsonl")
    records: list[Any] = [json.loads(line) for line in out.splitlines()]
    assert len(records) == 1


# --- what once went wrong -------------------------------------------------------------------------------------


def test_odd_releases_are_refused_at_once() -> None:
    """A long text that almost is a release is refused in no time, and other digits than ASCII's are no release."""
    for text in ("0.33.0" + "a." * 40 + "!", "０.３３.０", "9" * 5000):
        _, err = run("root", "--vllm", text, status=2)
        assert err.startswith("kvhash: error [unknown-release]: ")
        assert len(err) < 300


def test_text_that_no_terminal_can_show_does_not_end_the_stream() -> None:
    """A lone surrogate in an id is answered, and so is the next line; a poor locale changes nothing."""
    stdin = '{"id":"\\ud800","tokens":[1]}\n{"id":2,"tokens":[1]}\n{"id":1e999,"tokens":[1]}\n'
    out, _ = run("hash", "--jsonl", "-", stdin=stdin, status=2)
    assert [json.loads(line).get("id") for line in out.splitlines()] == ["\ud800", 2, None]
    assert json.loads(out.splitlines()[2])["error"]["code"] == "invalid-json"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    arguments = [str(KVHASH), "explain", "--tokens", "[1,2,3,4]", *GOOD, "--cache-salt", "漢字"]
    done = subprocess.run(arguments, capture_output=True, check=False, env=environment)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "> /dev/full"])
@pytest.mark.parametrize(
    "command", ["hash --tokens -", "hash --jsonl -", "check -", "diff - -", "--version", "root"]
)
def test_closed_and_full_streams(command: str, redirect: str) -> None:
    """A closed stdin or stdout, or a full disk, is status 2 with a line on stderr, never a traceback."""
    done = subprocess.run(
        ["sh", "-c", f"{KVHASH} {command} {redirect}"],
        input=b"[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]",
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    needs_stdin = command not in ("--version", "root")
    if redirect != "<&-" or needs_stdin:
        assert done.returncode == 2, done


def test_a_line_without_a_block_size_takes_the_commands() -> None:
    """Null is as if left out, for the counts."""
    out, _ = run("hash", "--jsonl", "-", *GOOD, stdin='{"tokens":[1,2,3,4],"block_size":null}')
    assert json.loads(out)["block_hashes"] == [GOOD_HASH]


def test_stdin_twice_and_expectations_of_wrong_types() -> None:
    """`check - -` reads stdin once; an expectation of the wrong type is said as that."""
    out, _ = run("hash", "--tokens", "[1,2,3,4]", *GOOD, "-o", "check")
    assert json.loads(out)["vllm"] == "0.33.0"
    assert run("check", "-", "-", stdin=out)[0] == "-: 0: OK\n"
    line = '{"tokens":[1],"vllm":"0.9.2","hash_seed":"0","expect":{"none_hash":["x"]}}'
    out, _ = run("check", "-", stdin=line, status=2)
    assert "at $.expect.none_hash" in out
    request, _ = run("hash", "--tokens", "[1,2,3,4]", *GOOD, "-o", "check")
    assert run("diff", request, request)[0] == "equal: 1 blocks\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--block-size", "0"], "invalid-block-size"),
        (["--block-size", "-8"], "invalid-block-size"),
        (["--lookahead", "-1"], "invalid-request"),
        (["--algorithm", "foo"], "unknown-algorithm"),
        (["--algorithm", "builtin"], "algorithm-not-reproducible"),
        (["--algorithm", "xxhash", "--vllm", "0.12.0"], "algorithm-not-in-release"),
        (["--event", '{"token_ids":[1],"block_hashes":[1]}'], "no-prompt"),
    ],
)
def test_identify_refuses_candidates_that_cannot_be(arguments: list[str], code: str) -> None:
    """A candidate that makes no sense is an error, not a search without result."""
    _, err = run("identify", "--tokens", "[1,2,3,4]", "--hashes", "12345678", *arguments, status=2)
    assert f"error [{code}]" in err


def test_identify_says_what_it_could_not_try() -> None:
    """A 64-bit parent, an adapter without its path and multimodal keys are said, not passed over in silence."""
    event = {
        "token_ids": [1, 2, 3, 4],
        "block_hashes": [GOOD_HASH],
        "block_size": 4,
        "parent_block_hash": "123456789",
    }
    _, err = run("identify", "--event", json.dumps(event), status=1)
    assert "64-bit" in err
    _, err = run(
        "identify",
        "--tokens",
        "[1,2,3,4]",
        "--block-size",
        "4",
        "--lora-name",
        "sql",
        "--hashes",
        "99",
        status=1,
    )
    assert "path" in err
    multimodal = {**event, "parent_block_hash": None, "extra_keys": [[["img1", 2]]]}
    _, err = run("identify", "--event", json.dumps(multimodal), status=2)
    assert "$.extra_keys[0]" in err


def test_options_that_contradict_each_other() -> None:
    """A prompt beside lines that bring their own is refused."""
    for arguments in (["hash", "--jsonl", "-"], ["explain", "--line", "{}"]):
        _, err = run(*arguments, "--tokens", "[9]", stdin="{}", status=2)
        assert "error [no-prompt]" in err


def test_diff_names_only_what_is_hashed() -> None:
    """An adapter's id is no reason where it is not hashed, and a later token is none for an earlier block."""
    base = {
        "vllm": "0.33.0",
        "block_size": 4,
        "tokens": list(range(16)),
        "lora": {"name": "a", "path": "/a", "id": 1},
    }
    other = {**base, "lora": {**base["lora"], "id": 2}, "tokens": [*range(15), 99]}
    out, _ = run("diff", json.dumps(base), json.dumps(other), "-o", "jsonl", status=1)
    assert [reason["code"] for reason in json.loads(out)["reasons"]] == ["token"]
    salted = {**base, "cache_salt": "t"}
    out, _ = run(
        "diff", json.dumps({**salted, "vllm": "0.30.0"}), json.dumps(salted), "-o", "jsonl", status=1
    )
    assert json.loads(out)["reasons"][0]["code"] == "recipe"
