"""`python -m engine_ref serve`: an HTTP server with vLLM's flags; what they mean is in vLLM's documentation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click
import uvicorn

from kvhash import Contract, UsageError
from kvhash._errors import InvalidRequestError
from kvhash.contract import ALGORITHMS

from .build import freeze_heap, make_engine
from .event_config import KVEventsConfig
from .metrics import EngineMetrics
from .model_info import ModelInfo
from .options import EngineOptions, environment_options
from .server import Frontend, make_app
from .server.prompts import Adapter, Prompts
from .server.text import EngineTokenizer

__all__ = ["serve"]

_log = logging.getLogger(__name__)

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
_FLAGS_WITHOUT_EFFECT = (
    *("--enforce-eager", "--enable-lora", "--enable-prompt-tokens-details", "--trust-remote-code"),
    *("--no-enable-log-requests", "--enable-log-requests"),
)


class _VllmCommand(click.Command):
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


def _without_effect(function: Any) -> Any:
    for name in _WITHOUT_EFFECT:
        function = click.option(name, name.strip("-").replace("-", "_"), default=None, hidden=True)(function)
    for name in _FLAGS_WITHOUT_EFFECT:
        function = click.option(name, name.strip("-").replace("-", "_"), is_flag=True, hidden=True)(function)
    return function


@click.command(cls=_VllmCommand)
@click.argument("model")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; vLLM listens everywhere."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port."
)
@click.option("--served-model-name", multiple=True, metavar="NAME...", help="Default: MODEL.")
@click.option("--tokenizer", metavar="FOLDER", help="For text and chats; default: MODEL, where it has one.")
@click.option("--chat-template", metavar="FILE", help="A Jinja file, or the template itself.")
@click.option("--trust-request-chat-template", is_flag=True, help="Take templates from requests.")
@click.option(
    "--vocab-size", type=click.IntRange(1), help="Token ids there are; default: the model's, or 32000."
)
@click.option("--max-model-len", type=click.IntRange(2), help="Default: the model's, or 4096, or what fits.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--num-gpu-blocks-override", type=click.IntRange(2), default=4096, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True)
@click.option(
    "--prefix-caching-hash-algo", type=click.Choice(list(ALGORITHMS)), default="sha256", show_default=True
)
@click.option("--kv-events-config", metavar="JSON", help="vLLM's KVEventsConfig.")
@click.option("--kv-transfer-config", metavar="JSON", callback=_json_object, help="vLLM's KVTransferConfig.")
@click.option("--speculative-config", metavar="JSON", callback=_json_object, help='Method "ngram".')
@click.option("--lora-modules", multiple=True, metavar="NAME=PATH...", help="Or JSON with name and path.")
@click.option("--data-parallel-size", "-dp", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option(
    "--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True
)
@click.option("--async-scheduling/--no-async-scheduling", default=False, show_default=True)
@click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=True, show_default=True)
@click.option("--long-prefill-token-threshold", type=click.IntRange(0), default=0, show_default=True)
@click.option("--decode-context-parallel-size", "-dcp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--watermark", type=click.FloatRange(0, 1), default=0.0, show_default=True)
@click.option(
    "--emulate-vllm", default="latest", show_default=True, metavar="RELEASE", help="Its hashes and events."
)
@click.option("--load-format", default="auto", show_default=True, help='"dummy": no model, made-up tokens.')
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True
)
@click.option("--device", default="cpu", show_default=True, help="Of the model: cpu or cuda.")
@click.option("--disable-log-stats", is_flag=True, help="No log line every 10 s (VLLM_LOG_STATS_INTERVAL).")
@click.option("--disable-uvicorn-access-log", is_flag=True)
@click.option("--uvicorn-log-level", default="info", show_default=True)
@click.option(
    "--shutdown-timeout", type=click.FloatRange(0), default=0, show_default=True, help="Seconds to drain."
)
@_without_effect
def serve(model: str, **flags: Any) -> None:
    """Serve MODEL over HTTP as vLLM does: completions, chats, metrics, and KV events.

    MODEL is a folder (its config.json gives the vocabulary and lengths) or any name. When requests can be sent, one
    JSON line on stdout says where: {"http": ..., "ranks": [{"rank", "endpoint", "replay_endpoint"}]}. The
    environment is read as vLLM reads it: PYTHONHASHSEED, VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES, VLLM_SERVER_DEV_MODE.

    \b
    Examples:
      python -m engine_ref serve tiny --block-size 16 --num-gpu-blocks-override 512
      python -m engine_ref serve ./model --kv-events-config '{"enable_kv_cache_events": true,
        "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}' --emulate-vllm 0.32.0
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=flags["uvicorn_log_level"].upper(),
        format="%(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    ignored = [
        name
        for name in (*_WITHOUT_EFFECT, *_FLAGS_WITHOUT_EFFECT)
        if flags[name.strip("-").replace("-", "_")]
    ]
    if ignored:
        _log.info("without effect here: %s", ", ".join(ignored))
    tokenizer = _tokenizer(model, flags["tokenizer"])
    options = engine_options(model, flags, tokenizer)
    listening = _listen(flags["host"], flags["port"])
    names = tuple(flags["served_model_name"]) or (model,)
    adapters = _adapters(flags["lora_modules"])
    ranks = flags["data_parallel_size"]
    metrics = EngineMetrics(
        names[0],
        ranks=ranks,
        max_model_len=options.max_model_len,
        cache_config={
            "block_size": options.block_size,
            "num_gpu_blocks": options.num_gpu_blocks,
            "enable_prefix_caching": options.enable_prefix_caching,
            "prefix_caching_hash_algo": options.prefix_caching_hash_algo,
        },
        max_loras=len(adapters) if adapters else None,
    )
    frontend = Frontend(_rank_maker(options, ranks), metrics)
    prompts = Prompts(
        options=options,
        model_names=names,
        adapters=adapters,
        tokenizer=tokenizer,
        chat_template=_chat_template(flags["chat_template"]),
        trust_request_chat_template=flags["trust_request_chat_template"],
    )
    app = make_app(
        frontend,
        prompts,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"),
        log_interval_s=None if flags["disable_log_stats"] else _log_interval(),
        release=str(Contract.for_vllm(options.emulate_vllm).release),
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=not flags["disable_uvicorn_access_log"],
        log_level=flags["uvicorn_log_level"],
        lifespan="on",
    )
    server = _Server(config, frontend, listening, flags["shutdown_timeout"])
    _log.info(
        "engine_ref: %d blocks of %d tokens, hashes and events of vLLM %s, %s, %d rank(s)",
        options.num_gpu_blocks,
        options.block_size,
        options.emulate_vllm,
        options.prefix_caching_hash_algo,
        ranks,
    )
    # uvicorn raises the signal that ended it once more; being told to end and ending is no failure.
    freeze_heap()
    signal.signal(signal.SIGTERM, _do_nothing)
    server.run(sockets=[listening])
    if not server.started:
        raise UsageError("the server did not start", code="not-started")


def _do_nothing(_: int, __: FrameType | None) -> None:
    return


def engine_options(
    model: str, flags: Mapping[str, Any], tokenizer: EngineTokenizer | None = None
) -> EngineOptions:
    """Return the checked options of the flags; raises KvHashErrors."""
    info = ModelInfo.read(model)
    vocab_size = flags["vocab_size"]
    if (
        vocab_size is None
        and tokenizer is not None
        and not (Path(model).expanduser() / "config.json").is_file()
    ):
        vocab_size = tokenizer.vocab_size
    if vocab_size is not None:
        info = ModelInfo(vocab_size, info.max_model_len, info.eos_token_id, info.layers)
    blocks, size = flags["num_gpu_blocks_override"], flags["block_size"]
    dcp = flags["decode_context_parallel_size"]
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
        adapters={a.name: a.path for a in _adapters(flags["lora_modules"]).values()},
        **environment_options(),
    )
    options.check()
    return options


def _rank_maker(options: EngineOptions, ranks: int) -> Any:
    if ranks == 1:
        return lambda rank, deliver: make_engine(options, deliver, rank=rank)
    from .rank_process import RankProcess

    return lambda rank, deliver: RankProcess(options, deliver, rank=rank)


class _Server(uvicorn.Server):
    """Says on stdout when it is ready, and drains or ends requests before connections are closed."""

    def __init__(
        self, config: uvicorn.Config, frontend: Frontend, listening: socket.socket, shutdown_timeout: float
    ) -> None:
        super().__init__(config)
        self._frontend = frontend
        self._listening = listening
        self._shutdown_timeout = shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say where everything is."""
        await super().startup(sockets=sockets)
        if not self.started:
            return
        host, port = self._listening.getsockname()[:2]
        ready = {
            "http": f"http://{f'[{host}]' if ':' in host else host}:{port}",
            "ranks": [
                {"rank": i, "endpoint": rank.endpoints[0], "replay_endpoint": rank.endpoints[1]}
                for i, rank in enumerate(self._frontend.ranks)
            ],
        }
        try:
            print(json.dumps(ready), flush=True)  # noqa: T201
        except BrokenPipeError:  # nobody reads it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End requests first, so that no connection is cut in the middle of an answer."""
        await asyncio.wait_for(self._frontend.drain(self._shutdown_timeout), self._shutdown_timeout + 5)
        await super().shutdown(sockets=sockets)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything else starts, so that a port in use is one clear line."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", code="cannot-listen"
        ) from None
    return listening


def _tokenizer(model: str, folder: str | None) -> EngineTokenizer | None:
    if folder is not None:
        return EngineTokenizer(folder)
    path = Path(model).expanduser()
    if not (path / "tokenizer_config.json").is_file() and not (path / "tokenizer.json").is_file():
        return None
    return EngineTokenizer(path)


def _chat_template(value: str | None) -> str | None:
    if value is None:
        return None
    path = Path(value)
    if "{" not in value and not path.is_file():
        raise InvalidRequestError(f"no such chat template: {value}")
    return path.read_text() if "{" not in value else value


def _adapters(values: Sequence[str]) -> dict[str, Adapter]:
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


def _log_interval() -> float:
    text = os.environ.get("VLLM_LOG_STATS_INTERVAL", "10")
    try:
        return max(float(text), 0.1)
    except ValueError:
        raise UsageError(
            f"VLLM_LOG_STATS_INTERVAL is {text!r}; expected seconds", code="invalid-option"
        ) from None
