"""Flags that say what an engine is, under vLLM's names, and the options that they make."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvhash._errors import InvalidRequestError
from kvhash.contract import ALGORITHMS, Contract

from .event_config import KVEventsConfig
from .model_info import ModelInfo
from .options import EngineOptions, environment_options

__all__ = [
    "Adapter",
    "VllmCommand",
    "engine_flags",
    "engine_options",
    "read_adapters",
    "say_without_effect",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA module as ``--lora-modules`` gives it; ``id``: its place in the list, from 1."""

    name: str
    path: str
    id: int

    def key(self) -> dict[str, Any]:
        """Return what enters the block hashes."""
        return {"name": self.name, "path": self.path, "id": self.id}


#: vLLM's flags that say how a model is computed: taken, so that its command lines work, and without effect here.
_WITHOUT_EFFECT = (
    *("--gpu-memory-utilization", "--tensor-parallel-size", "--pipeline-parallel-size", "--seed"),
    *(
        "--swap-space",
        "--quantization",
        "--kv-cache-dtype",
        "--download-dir",
        "--max-loras",
        "--max-lora-rank",
    ),
    *("--max-cpu-loras", "--generation-config", "--distributed-executor-backend", "--api-server-count"),
)
_SHORT = {
    "--tensor-parallel-size": ("-tp",),
    "--pipeline-parallel-size": ("-pp",),
    "--quantization": ("-q",),
}
_FLAGS_WITHOUT_EFFECT = (
    *("--enable-lora", "--enable-prompt-tokens-details", "--trust-remote-code"),
    *("--no-enable-log-requests", "--enable-log-requests"),
)


def _name(flag: str) -> str:
    return flag.strip("-").replace("-", "_")


class VllmCommand(click.Command):
    """Takes flags as vLLM's parser does: underscores for dashes, several values after one flag."""

    _SEVERAL = ("--lora-modules", "--served-model-name")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite the arguments into click's form."""
        rewritten: list[str] = []
        several: str | None = None
        for arg in args:
            if arg.startswith("--"):
                name, equals, value = arg.partition("=")
                arg = name.replace("_", "-") + equals + value
                several = arg if arg in self._SEVERAL else None
                took = 0
            elif arg.startswith("-") and len(arg) > 1:  # a short option ends the list
                several = None
            elif several is not None:
                took += 1
                if took > 1:
                    rewritten.append(several)
            rewritten.append(arg)
        return super().parse_args(ctx, rewritten)


def _json_object(_: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}", param=parameter) from None
    if not isinstance(value, dict):
        raise click.BadParameter("expected a JSON object", param=parameter)
    return value


_FLAGS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--vocab-size", type=click.IntRange(1), help="Token ids there are; default: the model's, or 32000."
    ),
    click.option(
        "--max-model-len", type=click.IntRange(2), help="Default: the model's, or 4096, or what fits."
    ),
    click.option("--block-size", type=click.IntRange(1), default=16, show_default=True),
    click.option("--num-gpu-blocks-override", type=click.IntRange(2), default=4096, show_default=True),
    click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True),
    click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True),
    click.option(
        "--prefix-caching-hash-algo", type=click.Choice(list(ALGORITHMS)), default="sha256", show_default=True
    ),
    click.option("--kv-events-config", metavar="JSON", help="vLLM's KVEventsConfig."),
    click.option(
        "--kv-transfer-config", metavar="JSON", callback=_json_object, help="vLLM's KVTransferConfig."
    ),
    click.option("--speculative-config", metavar="JSON", callback=_json_object, help='Method "ngram".'),
    click.option("--lora-modules", multiple=True, metavar="NAME=PATH...", help="Or JSON with name and path."),
    click.option("--data-parallel-size", "-dp", type=click.IntRange(1, 64), default=1, show_default=True),
    click.option(
        "--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True
    ),
    click.option("--async-scheduling/--no-async-scheduling", default=False, show_default=True),
    click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=True, show_default=True),
    click.option("--long-prefill-token-threshold", type=click.IntRange(0), default=0, show_default=True),
    click.option(
        "--decode-context-parallel-size", "-dcp", type=click.IntRange(1), default=1, show_default=True
    ),
    click.option("--watermark", type=click.FloatRange(0, 1), default=0.0, show_default=True),
    click.option(
        "--emulate-vllm",
        default="latest",
        show_default=True,
        metavar="RELEASE",
        help="Its hashes and events.",
    ),
    click.option(
        "--load-format", default="auto", show_default=True, help='"dummy": no model, made-up tokens.'
    ),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True
    ),
    click.option("--device", default="cpu", show_default=True, help="Of the model: cpu or cuda."),
    click.option("--enforce-eager", is_flag=True, help="On CUDA: no graphs for decodes."),
    *(
        click.option(name, *_SHORT.get(name, ()), _name(name), default=None, hidden=True)
        for name in _WITHOUT_EFFECT
    ),
    *(click.option(name, _name(name), is_flag=True, hidden=True) for name in _FLAGS_WITHOUT_EFFECT),
)


def engine_flags(function: Any) -> Any:
    """Add the flags to a command."""
    for add in reversed(_FLAGS):
        function = add(function)
    return function


def say_without_effect(flags: Mapping[str, Any]) -> None:
    """Log the flags that were given and do nothing here."""
    given = [name for name in (*_WITHOUT_EFFECT, *_FLAGS_WITHOUT_EFFECT) if flags[_name(name)]]
    if given:
        _log.info("without effect here: %s", ", ".join(given))


def engine_options(
    model: str, flags: Mapping[str, Any], tokenizer_size: int | None = None, **environment: Any
) -> EngineOptions:
    """Return the checked options of the flags; raises KvHashErrors.

    `tokenizer_size`: the vocabulary where the model has none of its own. `environment`: in place of what the
    environment says.
    """
    info = ModelInfo.read(model)
    vocab_size = flags["vocab_size"]
    if vocab_size is None and not (Path(model).expanduser() / "config.json").is_file():
        vocab_size = tokenizer_size
    if vocab_size is not None:
        info = ModelInfo(vocab_size, info.max_model_len, info.eos_token_id, info.layers)
    blocks, size = flags["num_gpu_blocks_override"], flags["block_size"]
    dcp = flags["decode_context_parallel_size"]
    for name, value in (("block_size", size), ("decode_context_parallel_size", dcp)):
        if type(value) is not int or value < 1:  # a request line gives what it likes
            raise InvalidRequestError(f"expected an integer of at least 1, got {value!r}", at=f"$.{name}")
    longest = flags["max_model_len"]
    if longest is None:
        groups = len(info.groups(size))
        longest = min(info.max_model_len, (blocks - 1) // groups * size * dcp)
        if longest < info.max_model_len:
            _log.info("the maximum model length is %d, which is what the pool holds", longest)
    contract = Contract.for_vllm(flags["emulate_vllm"])
    events = KVEventsConfig.from_json(flags["kv_events_config"] or "{}")
    options = EngineOptions(
        model=model,
        info=info,
        block_size=size,
        num_gpu_blocks=blocks,
        max_model_len=longest,
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        max_num_seqs=flags["max_num_seqs"],
        enable_prefix_caching=flags["enable_prefix_caching"],
        prefix_caching_hash_algo=flags["prefix_caching_hash_algo"],
        emulate_vllm=flags["emulate_vllm"] if flags["emulate_vllm"] == "latest" else str(contract.release),
        kv_events_config=events,
        kv_transfer_config=flags["kv_transfer_config"],
        speculative_config=flags["speculative_config"],
        scheduling_policy=flags["scheduling_policy"],
        async_scheduling=flags["async_scheduling"],
        enable_chunked_prefill=flags["enable_chunked_prefill"],
        long_prefill_token_threshold=flags["long_prefill_token_threshold"],
        decode_context_parallel_size=dcp,
        watermark=flags["watermark"],
        load_format=flags["load_format"],
        dtype="float32" if flags["dtype"] == "auto" else flags["dtype"],
        device=flags["device"],
        enforce_eager=flags["enforce_eager"],
        adapters={a.name: a.path for a in read_adapters(flags["lora_modules"]).values()},
        **{**environment_options(), **environment},
    )
    options.check()
    return options


def read_adapters(values: Sequence[str]) -> dict[str, Adapter]:
    """Return the adapters of ``--lora-modules``; raises InvalidRequestError."""
    adapters: dict[str, Adapter] = {}
    for number, value in enumerate(values, 1):
        name, equals, path = value.partition("=")
        if value.lstrip().startswith("{"):
            try:
                described: Mapping[str, Any] = json.loads(value)
                name, path = described["name"], described["path"]
            except (ValueError, KeyError, TypeError):
                raise InvalidRequestError(
                    f"expected a name and a path in --lora-modules, got {value!r}"
                ) from None
        elif not equals:
            raise InvalidRequestError(f"expected NAME=PATH in --lora-modules, got {value!r}")
        if not isinstance(name, str) or not isinstance(path, str) or not name or name in adapters:
            raise InvalidRequestError(
                f"expected adapters of different names in --lora-modules, got {value!r}"
            )
        adapters[name] = Adapter(name, path, number)
    return adapters
