"""`python -m engine_ref record`: request lines in, a capture of what an engine published out."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from kvhash import UsageError
from kvhash._errors import InvalidRequestError

from .build import make_runner
from .flags import VllmCommand, engine_flags, engine_options, say_without_effect
from .record import Recorder, read_lines, write_json

__all__ = ["record"]

#: Flags that the first request line gives where the command line does not.
_FROM_LINE = {
    "prefix_caching_hash_algo": "algorithm",
    "block_size": "block_size",
    "emulate_vllm": "vllm",
    "decode_context_parallel_size": "decode_context_parallel_size",
}


@click.command(cls=VllmCommand)
@click.argument("requests", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--model", default="null", show_default=True, help="A name, or a model folder.")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="A file; default: stdout."
)
@click.option("--together", is_flag=True, help="All requests at once, not one after the other.")
@engine_flags
@click.pass_context
def record(
    context: click.Context, /, requests: Path, model: str, output: Path | None, together: bool, **flags: Any
) -> None:
    """Run the request lines in REQUESTS (- is stdin) and write what the engine published.

    A line is a request line of `kvhash hash --jsonl` with "max_tokens" (16), "priority" and "prompt_logprobs" beside,
    or {"reset": true}. How the engine hashes is what the first line says, unless flags do; without a hash_seed it is
    PYTHONHASHSEED. The output is JSON: requests with their outputs, and frames, which `kvevents verify` reads.

    \b
    Examples:
      python -m engine_ref record requests.jsonl -o capture.json --num-gpu-blocks-override 64
      python -m engine_ref record - < requests.jsonl | kvevents decode -
    """
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(levelname)s %(message)s")
    say_without_effect(flags)
    if requests == Path("-"):
        lines = read_lines(sys.stdin.buffer)
    else:
        with requests.open("rb") as file:
            lines = read_lines(file)
    if not lines:
        raise InvalidRequestError(
            f"{requests} holds no request; expected request lines, one JSON object each"
        )
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"{output}: its folder does not exist", code="cannot-write")
    first = next((line for line in lines if "reset" not in line), {})
    for flag, name in _FROM_LINE.items():
        if name in first and context.get_parameter_source(flag) is not ParameterSource.COMMANDLINE:
            flags[flag] = first[name]
    given = engine_options(model, flags, **_seed(first))
    events = msgspec.structs.replace(given.kv_events_config, enable_kv_cache_events=True)
    options = replace(given, kv_events_config=events)
    recorder = Recorder(options, make_runner(options))
    text = write_json(recorder.record(lines, together=together))
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)


def _seed(first: Mapping[str, Any]) -> dict[str, Any]:
    return {"hash_seed": first["hash_seed"]} if "hash_seed" in first else {}


def _write(path: Path, text: str) -> None:
    """Write all of it or nothing; a pipe or a device, which must not be replaced, is written to as it is."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:  # which names the file that was to become this one
        raise UsageError(f"cannot write {path}: {error.strerror or error}", code="cannot-write") from None
