"""Every option of ``kvevents`` and ``kvhash`` that is a time or a number: nonsense is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvhash import KvHashError
from kvhash_cli.kvevents import kvevents
from kvhash_cli.main import kvhash
from kvhash_cli.options import Seconds

NOBODY = "tcp://127.0.0.1:1"
HUGE = "9" * 26


def options() -> Iterator[tuple[str, click.Option]]:
    """Yield every option of every command, with the command's name."""
    todo: list[tuple[str, click.Command]] = [("kvevents", kvevents), ("kvhash", kvhash)]
    while todo:
        name, command = todo.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            for sub in command.list_commands(context):
                each = command.get_command(context, sub)
                assert each is not None
                todo.append((f"{name} {sub}", each))
        for option in command.params:
            if isinstance(option, click.Option):
                yield f"{name} {option.opts[-1]}", option


TIMES = [(name, option) for name, option in options() if isinstance(option.type, Seconds)]


def refused(*arguments: str, program: click.Command = kvevents) -> str:
    """Run a command that must refuse its arguments; return what it says."""
    done = CliRunner().invoke(program, arguments, input="")
    error = done.exception
    assert isinstance(error, (SystemExit, KvHashError)), (arguments, error)
    if isinstance(error, KvHashError):
        return str(error)
    assert done.exit_code == 2, (arguments, done.output)
    return done.output


def test_no_option_is_any_float() -> None:
    """A float takes nan and inf, which no comparison refuses: every time is `Seconds`, and there is nothing else."""
    assert [name for name, option in options() if isinstance(option.type, click.types.FloatParamType)] == []
    assert [name for name, option in options() if option.metavar == "SECONDS"] == [name for name, _ in TIMES]
    assert {name.split()[-1] for name, _ in TIMES} == {
        *(
            "--duration",
            "--idle-timeout",
            "--replay-timeout",
            "--delay",
            "--linger",
            "--timeout",
            "--deadline",
        )
    }


@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-1", "-1e-9", "1e10", "1e400", "5s", "", HUGE])
def test_no_time_is_nonsense(value: str) -> None:
    """Not a number, infinite, negative, or longer than clocks count: each option names itself and what is right."""
    for name, option in TIMES:
        context = click.Context(click.Command(name))
        with pytest.raises(click.BadParameter, match="expected a number of seconds, from") as caught:
            option.type_cast_value(context, value)
        assert caught.value.param is option


def test_a_time_that_is_one_is_taken() -> None:
    """Nought ends at once where that means something; a wait for an answer is longer than nothing."""
    least = {name.split()[-1]: option.type.convert("1e9", None, None) for name, option in TIMES}  # type: ignore[no-untyped-call]
    assert set(least.values()) == {1e9}
    for name, option in TIMES:
        assert isinstance(option.type, Seconds)
        waits = name.split()[-1] in ("--replay-timeout", "--timeout", "--deadline")
        assert (option.type.least > 0) == waits, name


@pytest.mark.parametrize("command", ["index", "verify"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--decode-context-parallel-size", "0"),
        ("--decode-context-parallel-size", HUGE),
        ("--block-size", "-1"),
        ("--block-size", HUGE),
        ("--lookahead", "-1"),
        ("--lookahead", HUGE),
        ("--lora-path", "foo"),
        ("--lora-path", "=x"),
    ],
)
def test_settings_are_judged_without_a_query(command: str, option: str, value: str) -> None:
    """And before any stream is read, though no event would ever need them."""
    said = refused(command, NOBODY, "--duration", "0", option, value)
    assert option[2:].split("-")[0] in said


@pytest.mark.parametrize("command", ["index", "verify", "doctor"])
def test_one_adapter_has_one_path(command: str) -> None:
    """Two are refused, not the last one taken; the same one twice is no contradiction."""
    said = refused(command, NOBODY, "--duration", "0", "--lora-path", "a=1", "--lora-path", "a=2")
    assert "'a' two paths, '1' and '2'" in said
    twice = CliRunner().invoke(kvevents, ["verify", NOBODY, "--duration", "0", *["--lora-path", "a=1"] * 2])
    assert twice.exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["tail", NOBODY, "--replay", NOBODY, "--from-seq", HUGE], "there is no batch"),
        (["tail", NOBODY, "--replay", NOBODY, "--from-seq", f"-{HUGE}"], "there is no batch"),
        (["tail", NOBODY, "--replay", NOBODY, "--from-seq", str((1 << 64) - 1)], "there is no batch"),
        (["tail", NOBODY, "--replay", NOBODY, "--from-seq", "9" * 5000], "is a number, start or end"),
        (["index", NOBODY, "--replay", NOBODY, "--from-seq", HUGE], "there is no batch"),
        (["decode", "-", "--from-seq", "-1"], "--from-seq"),
        (["decode", "-", "--from-seq", HUGE], "--from-seq"),
        (["export", "-", "x.jsonl", "--from-seq", HUGE], "--from-seq"),
        (["tail", NOBODY, "--group", "-1"], "--group"),
        (["verify", NOBODY, "--show", "-1"], "--show"),
        (["index", NOBODY, "--max-blocks", HUGE], "bound"),
        (["publish", "-", "--rank", HUGE], "rank"),
        (["replay", __file__, "--speed", "nan"], "--speed"),
        (["replay", __file__, "--speed", "inf"], "--speed"),
        (["replay", __file__, "--speed", "-infx"], "--speed"),
    ],
)
def test_no_number_is_nonsense(arguments: list[str], word: str) -> None:
    """Beyond what there is in either direction: refused in words, with no traceback."""
    assert word in refused(*arguments)


@pytest.mark.parametrize("option", ["--block-size", "--lookahead"])
@pytest.mark.parametrize("value", ["-1", HUGE])
def test_settings_of_hashes_are_judged(option: str, value: str) -> None:
    """The same bounds in `kvhash`, whose errors say where the value is."""
    words: list[Any] = [option, value]
    for command in (["hash", "--tokens", "[1]"], ["identify", "--tokens", "[1]", "--hashes", "1"]):
        assert "expected the " in refused(*command, *words, program=kvhash)
